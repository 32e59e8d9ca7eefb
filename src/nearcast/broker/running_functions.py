"""Functions that run at this broker: those of the replica sets that it leads, each as a task with a process of its own.

What they are to handle, and what becomes of what they did, is :mod:`nearcast.fabric.set_functions`'s business; here they are
handed batches, tried again, given up, and started anew when the log took back what it rested on.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import msgspec

from nearcast.errors import RecordUnavailable, StorageCorrupt
from nearcast.fabric.hosted_sets import HostedSet
from nearcast.fabric.set_functions import Posted, Work
from nearcast.functionconfig import Function
from nearcast.functions.runner import FunctionBroken, Message, MessageFailed, Runner
from nearcast.functions.wire import Ask, Found

if TYPE_CHECKING:
    from nearcast.broker.process import Broker
    from nearcast.fabric.replica_sets import ReplicaSets

LEAST_BACKOFF_SECONDS: Final = 0.1
MOST_BACKOFF_SECONDS: Final = 30.0
ROOM_SECONDS: Final = 0.05
"""How often a function that has a result looks whether there is room for it."""

Key = tuple[str, str]


class FunctionStatus(msgspec.Struct):
    """How a function is doing here, for people."""

    name: str
    replica_set: str
    version: int
    state: str = "waiting"
    """waiting, running, retrying, broken"""
    handled: int = 0
    failed: int = 0
    dead: int = 0
    starts: int = 0
    last_fault: str = ""


class RunningFunctions:
    """See the module. ``flush`` is the broker's, called after every result."""

    def __init__(self, broker: Broker, sets: ReplicaSets, flush: Callable[[], None]) -> None:
        self._broker = broker
        self._sets = sets
        self._flush = flush
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        self._functions: dict[Key, Function] = {}
        self._awake: dict[Key, asyncio.Event] = {}
        self.status: dict[Key, FunctionStatus] = {}
        self._reviews = False
        self._closed = False

    # --- which run ------------------------------------------------------------------------------------------------------

    def wake(self, set_name: str, function: str) -> None:
        """A function has something to do."""
        event = self._awake.get((set_name, function))
        if event is not None:
            event.set()

    def review_soon(self) -> None:
        """Something changed in what is to run; looked at after what runs now."""
        if self._reviews or self._closed:
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # the broker is being put together
            return
        self._reviews = True
        loop.call_soon(self._review)

    def _review(self) -> None:
        self._reviews = False
        if self._closed:
            return
        wanted: dict[Key, tuple[HostedSet, Function]] = {}
        for hosted in self._sets.hosted.values():
            if hosted.leads:
                for name in hosted.functions.names:
                    function = hosted.functions.function(name)
                    if function is not None:
                        wanted[hosted.name, name] = (hosted, function)
        for key, task in list(self._tasks.items()):
            if key not in wanted or wanted[key][1] != self._functions[key] or task.done():
                task.cancel()
                del self._tasks[key]
        for key, (hosted, function) in wanted.items():
            if key not in self._tasks:
                self._functions[key] = function
                self._awake[key] = asyncio.Event()
                self.status[key] = FunctionStatus(function.name, hosted.name, function.version)
                work = self._serve(hosted, function, self._awake[key], self.status[key])
                self._tasks[key] = asyncio.get_running_loop().create_task(work, name=f"function {function.name}")
        for key in [key for key in self.status if key not in wanted]:
            del self.status[key]
            self._awake.pop(key, None)
            self._functions.pop(key, None)

    async def close(self) -> None:
        """The broker stops: processes are ended."""
        self._closed = True
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    # --- one function ---------------------------------------------------------------------------------------------------

    async def _serve(self, hosted: HostedSet, function: Function, awake: asyncio.Event, status: FunctionStatus) -> None:
        """Hand over batches until cancelled. A message that fails is tried again alone, then put aside."""
        runner = Runner(function, lambda ask: _look_up(hosted, ask), lambda text: self._said(function.name, text))
        generation = -1
        alone = 0
        attempts = 0
        try:
            while True:
                awake.clear()
                if generation != hosted.functions.generation:
                    generation = hosted.functions.generation
                    await runner.close()
                    alone = attempts = 0
                work = hosted.functions.take(function.name, 1 if alone else function.batch)
                if work is None:
                    status.state = "waiting"
                    await awake.wait()
                    continue
                status.state = "retrying" if alone else "running"
                messages = [Message(record.index, record.time_us, bytes(record.payload)) for record in work.records]
                topic = work.topic.decode("utf-8")
                try:
                    result = await runner.run(topic, messages, hosted.functions.state(function.name))
                except FunctionBroken as error:
                    attempts += 1
                    self._failed(status, "broken", f"it cannot be run: {error}")
                    await asyncio.sleep(_backoff(attempts))
                    continue
                except MessageFailed as error:
                    self._failed(status, "retrying", f"{topic} at {error.index or messages[0].index}: {error.reason}")
                    if len(messages) > 1:
                        alone = len(messages)
                        continue
                    attempts += 1
                    if attempts <= function.retries:
                        await asyncio.sleep(_backoff(attempts))
                        continue
                    reason = error.reason
                    await self._until_taken(functools.partial(self._give_up, hosted, function.name, generation, work, reason))
                    status.dead += 1
                    attempts = 0
                else:
                    outputs = [Posted(each.topic, each.payload, each.qos, each.retain) for each in result.outputs]
                    await self._until_taken(
                        functools.partial(self._done, hosted, function.name, generation, work, outputs, result.state)
                    )
                    status.handled += len(messages)
                    attempts = 0
                alone = max(0, alone - 1)
                status.starts = runner.starts
        finally:
            await runner.close()

    def _done(
        self, hosted: HostedSet, name: str, generation: int, work: Work, outputs: list[Posted], state: bytes | None
    ) -> bool:
        return hosted.functions.done(name, generation, work, outputs, state, self._broker.monotonic())

    def _give_up(self, hosted: HostedSet, name: str, generation: int, work: Work, reason: str) -> bool:
        return hosted.functions.give_up(name, generation, work, reason, self._broker.monotonic())

    async def _until_taken(self, offer: Callable[[], bool]) -> None:
        """Bring a result back as soon as there is room for it."""
        while not offer():  # noqa: ASYNC110  # nobody tells when a quorum has answered
            await asyncio.sleep(ROOM_SECONDS)
        self._flush()

    def facts(self) -> list[dict[str, object]]:
        """The functions that run here, for /healthz."""
        return [msgspec.structs.asdict(status) for status in self.status.values()]

    # --- words ----------------------------------------------------------------------------------------------------------

    def _failed(self, status: FunctionStatus, state: str, fault: str) -> None:
        status.state = state
        status.failed += 1
        status.last_fault = fault
        self._broker.events.event(logging.WARNING, "a function failed", function=status.name, reason=fault)

    def _said(self, name: str, text: str) -> None:
        self._broker.events.event(logging.INFO, "a function says", function=name, text=text)


def _backoff(attempts: int) -> float:
    return min(MOST_BACKOFF_SECONDS, LEAST_BACKOFF_SECONDS * 2.0 ** min(attempts - 1, 20))


def _look_up(hosted: HostedSet, ask: Ask) -> Found:
    """A record of a topic of this set, or its latest index."""
    topic = ask.topic.encode("utf-8")
    if not ask.index:
        return Found(None, hosted.last_index(topic))
    try:
        return Found(bytes(hosted.record(topic, ask.index).payload), ask.index)
    except RecordUnavailable:
        return Found(None, ask.index)
    except StorageCorrupt as error:
        return Found(None, ask.index, str(error))
