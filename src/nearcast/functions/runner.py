"""A function's process, watched: started, handed batches, given up when it takes too long, started again.

:meth:`Runner.run` takes the messages of one batch and returns what they made of it, or raises: :class:`MessageFailed` says
which message, :class:`FunctionBroken` that there is no use in trying. After any of it the process is another one, so that
nothing of a message that failed is left in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from nearcast.errors import NearcastError
from nearcast.functionconfig import Function
from nearcast.functions.wire import (
    LENGTH_BYTES,
    MAX_FRAME_BYTES,
    PROGRESS_SHARE,
    Ask,
    Begin,
    Done,
    Found,
    Output,
    Progress,
    Ready,
    Run,
    Said,
    encode,
    to_broker,
)

PACKAGES: Final = Path(__file__).parent.parent.parent
"""Where this package is, for a process that begins elsewhere."""

START_SECONDS: Final = 30.0
"""How long a process may take to load its function."""


class MessageFailed(NearcastError):
    """A message made the function fail. ``index`` is 0 where that is not known: the process died, or took too long."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(reason)
        self.index = index
        self.reason = reason


class FunctionBroken(NearcastError):
    """The function cannot even be loaded."""


class Message:
    """A message that a function is to handle."""

    __slots__ = ("index", "payload", "time_us")

    def __init__(self, index: int, time_us: int, payload: bytes) -> None:
        self.index = index
        self.time_us = time_us
        self.payload = payload


class Result:
    """What a batch made of the world. ``state`` is None where it is as it was."""

    __slots__ = ("outputs", "state")

    def __init__(self, outputs: list[Output], state: bytes | None) -> None:
        self.outputs = outputs
        self.state = state


class Runner:
    """See the module. ``look_up`` answers what a function asks of topics; ``said`` is told what it prints."""

    def __init__(self, function: Function, look_up: Callable[[Ask], Found], said: Callable[[str], None]) -> None:
        self.function = function
        self.starts = 0
        self._look_up = look_up
        self._said = said
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._number = 0

    async def run(self, topic: str, messages: list[Message], state: bytes) -> Result:
        """Have messages handled, beginning with this state if the process is new. Cancelling ends the process."""
        try:
            if self._process is None:
                await self._start(state)
            return await self._run(topic, messages)
        except BaseException:
            await self.close()
            raise

    async def _start(self, state: bytes) -> None:
        self.starts += 1
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        loop = asyncio.get_running_loop()
        try:
            environment = {"PATH": os.defpath, "LANG": "C.UTF-8", "PYTHONPATH": _python_path()}
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "nearcast.functions.worker",
                str(theirs_in),
                str(theirs_out),
                pass_fds=(theirs_in, theirs_out),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
                start_new_session=True,
                env=environment,
                cwd=Path("/"),
            )
        finally:
            os.close(theirs_in)
            os.close(theirs_out)
        self._reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(self._reader)
        await loop.connect_read_pipe(lambda: protocol, os.fdopen(ours_in, "rb", buffering=0))
        target = os.fdopen(ours_out, "wb", buffering=0)
        transport, flow = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, target)
        self._writer = asyncio.StreamWriter(transport, flow, None, loop)
        await self._send(encode(Begin(self.function, state)))
        try:
            async with asyncio.timeout(START_SECONDS):
                frame = await self._receive()
        except TimeoutError:
            raise FunctionBroken(f"loading it takes more than {START_SECONDS:g} s") from None
        except MessageFailed as error:
            raise FunctionBroken(f"it cannot be loaded: {error.reason}") from error
        if not isinstance(frame, Ready) or frame.fault:
            raise FunctionBroken(frame.fault if isinstance(frame, Ready) else "its process speaks out of turn")

    async def _run(self, topic: str, messages: list[Message]) -> Result:
        self._number += 1
        indexes = [message.index for message in messages]
        payloads = [message.payload for message in messages]
        await self._send(encode(Run(self._number, topic, indexes, [message.time_us for message in messages], payloads)))
        limit_s = self.function.timeout_seconds
        frame: Ready | Done | Progress = Progress(self._number)
        try:
            while isinstance(frame, Progress):
                async with asyncio.timeout(limit_s * (1.0 if len(messages) == 1 else 1.0 + PROGRESS_SHARE)):
                    frame = await self._receive()
        except TimeoutError:
            at = indexes[0] if len(messages) == 1 else 0
            raise MessageFailed(at, f"it takes more than {limit_s:g} s") from None
        if not isinstance(frame, Done) or frame.number != self._number:
            raise MessageFailed(0, "its process speaks out of turn")
        if frame.fault:
            raise MessageFailed(frame.failed_index, frame.fault)
        return Result(frame.outputs, frame.state)

    async def _send(self, data: bytes) -> None:
        writer = self._writer
        if writer is None:
            raise MessageFailed(0, "its process is not there")
        try:
            writer.write(data)
            await writer.drain()
        except OSError as error:
            raise MessageFailed(0, "its process ended") from error

    async def _receive(self) -> Ready | Done | Progress:
        """The next frame that is not answered here."""
        reader = self._reader
        while reader is not None:
            try:
                size = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "little")
                if size > MAX_FRAME_BYTES:
                    raise MessageFailed(0, "its process sends more than it may")
                frame = to_broker(await reader.readexactly(size))
            except (asyncio.IncompleteReadError, OSError):
                raise MessageFailed(0, await self._ending()) from None
            except ValueError as error:
                raise MessageFailed(0, f"its process sends garbage: {error}") from error
            if isinstance(frame, Ask):
                await self._send(encode(self._look_up(frame)))
            elif isinstance(frame, Said):
                self._said(frame.text)
            else:
                return frame
        raise MessageFailed(0, "its process is not there")

    async def _ending(self) -> str:
        process = self._process
        if process is None:
            return "its process ended"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await process.wait()
        code = process.returncode
        if code is not None and code < 0:
            with contextlib.suppress(ValueError):
                return f"its process was ended by {signal.Signals(-code).name}"
        return f"its process ended with {code}"

    async def close(self) -> None:
        """End the process, at once."""
        process, self._process = self._process, None
        writer, self._writer = self._writer, None
        self._reader = None
        if writer is not None:
            writer.close()
        if process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def _python_path() -> str:
    """Where packages are for this process, in a form that holds elsewhere."""
    return os.pathsep.join([str(PACKAGES), *(os.path.abspath(part) for part in sys.path if part)])
