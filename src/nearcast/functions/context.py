"""What a function gets beside the message: ``def f(topic, index, data, ctx)``."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import msgspec

from nearcast.functions.wire import Ask, Found, Output

Payload = str | bytes | dict[str, Any] | list[Any]


class FunctionContext:
    """The world of one function. Everything it does here happens with the message, or not at all."""

    def __init__(self, name: str, ask: Callable[[Ask], Found]) -> None:
        self.name = name
        """The function's own name."""
        self.state: dict[str, Any] = {}
        """What the function wants to remember: numbers, text, bytes, lists, dicts. Written with each batch that changed it."""
        self.topic = ""
        self.index = 0
        self._time_us = 0
        self._ask = ask
        self._outputs: list[Output] = []
        self._output_bytes = 0

    @property
    def time(self) -> datetime:
        """When the message arrived."""
        return datetime.fromtimestamp(self._time_us / 1e6, UTC)

    def publish(self, topic: str, payload: Payload, *, qos: int = 1, retain: bool = False) -> None:
        """Publish a message, if and only if the one that is being handled counts as handled. dicts and lists become JSON."""
        if isinstance(payload, str):
            data = payload.encode("utf-8")
        elif isinstance(payload, bytes | bytearray | memoryview):
            data = bytes(payload)
        else:
            data = msgspec.json.encode(payload)
        if not topic or "+" in topic or "#" in topic or "\0" in topic:
            raise ValueError(f"{topic!r} is no topic to publish to")
        if qos not in (0, 1, 2):
            raise ValueError("qos is 0, 1 or 2")
        self._outputs.append(Output(topic, data, qos, bool(retain)))
        self._output_bytes += len(topic) + len(data)

    def get(self, topic: str, index: int) -> bytes | None:
        """A record of a topic of the same replica set, as far as it is committed; None if it is not kept."""
        if index < 1:
            raise ValueError("indexes begin with 1")
        return self._answer(Ask(topic, index)).payload

    def latest_index(self, topic: str) -> int:
        """The index of the last committed record of a topic; 0: there is none."""
        return self._answer(Ask(topic, 0)).index

    def _answer(self, ask: Ask) -> Found:
        found = self._ask(ask)
        if found.fault:
            raise LookupError(found.fault)
        return found

    # --- for the worker -------------------------------------------------------------------------------------------------

    def _at(self, topic: str, index: int, time_us: int) -> None:
        self.topic = topic
        self.index = index
        self._time_us = time_us

    def _take_outputs(self) -> list[Output]:
        outputs, self._outputs = self._outputs, []
        self._output_bytes = 0
        return outputs
