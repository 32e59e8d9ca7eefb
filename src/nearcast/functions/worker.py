"""The process that runs one function: ``python -m nearcast.functions.worker``, started by a broker and by nobody else.

Two pipes, handed over as descriptors, carry frames (:mod:`nearcast.functions.wire`). What the function prints goes to the
broker as text. The process has its own session, no input, and a bound on its memory. Whoever watches it ends it when it
takes too long.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import resource
import subprocess
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from nearcast.functionconfig import Function
from nearcast.functions.context import FunctionContext
from nearcast.functions.wire import (
    LENGTH_BYTES,
    MAX_FRAME_BYTES,
    PROGRESS_SHARE,
    Ask,
    Begin,
    Done,
    Found,
    Progress,
    Ready,
    Run,
    Said,
    ToBroker,
    ToWorker,
    encode,
    to_worker,
)

MAX_SAID_CHARACTERS: Final = 8_192
MAX_FAULT_CHARACTERS: Final = 2_000

Callback = Callable[[str, int, bytes, FunctionContext], Any]


class Gone(Exception):  # it is no error: the broker closed the pipe
    """There is nobody to work for."""


class Worker:
    """One function, loaded, and what is said about it."""

    def __init__(self, source: io.RawIOBase, target: io.RawIOBase) -> None:
        self._source = source
        self._target = target
        self._waiting: deque[ToWorker] = deque()

    def send(self, frame: ToBroker) -> None:
        data = memoryview(encode(frame))
        while data:
            data = data[self._target.write(data) or 0 :]

    def receive(self) -> ToWorker:
        """The next frame; raises :class:`Gone`."""
        size = int.from_bytes(self._read(LENGTH_BYTES), "little")
        if size > MAX_FRAME_BYTES:
            raise Gone
        return to_worker(self._read(size))

    def _read(self, size: int) -> bytes:
        parts: list[bytes] = []
        while size:
            part = self._source.read(size)
            if not part:
                raise Gone
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def ask(self, question: Ask) -> Found:
        """Ask the broker, while further messages may be on their way."""
        self.send(question)
        while True:
            frame = self.receive()
            if isinstance(frame, Found):
                return frame
            self._waiting.append(frame)

    def serve(self) -> None:
        """Load the function, then run it until the broker closes the pipe."""
        begin = self.receive()
        if not isinstance(begin, Begin):
            raise Gone
        function = begin.function
        context = FunctionContext(function.name, self.ask)
        if begin.state:
            context.state = msgspec.msgpack.decode(begin.state)
        with tempfile.TemporaryDirectory(prefix="nearcast-function-") as directory:
            callback: Callback
            try:
                _write(function, Path(directory))
                _bound_memory(function.max_memory_bytes)
                callback = _native(directory) if function.native else _load(function, directory)
            except BaseException as error:  # noqa: BLE001  # whatever importing raises is the function's
                self.send(Ready(fault=_fault(error)))
                return
            self.send(Ready())
            while True:
                frame = self._waiting.popleft() if self._waiting else self.receive()
                if isinstance(frame, Run):
                    self._run(frame, function, callback, context)

    def _run(self, run: Run, function: Function, callback: Callback, context: FunctionContext) -> None:
        before = msgspec.msgpack.encode(context.state)
        told_at = time.monotonic()
        for index, time_us, payload in zip(run.indexes, run.times_us, run.payloads, strict=True):
            context._at(run.topic, index, time_us)
            if time.monotonic() - told_at > PROGRESS_SHARE * function.timeout_seconds:
                told_at = time.monotonic()
                self.send(Progress(run.number))
            try:
                callback(run.topic, index, payload, context)
                if context._output_bytes > function.max_output_bytes:
                    raise ValueError(f"more than {function.max_output_bytes:,} bytes of output in one batch")
            except BaseException as error:  # noqa: BLE001  # whatever it raises is the function's
                self.send(Done(run.number, [], None, _fault(error), index))
                return
        try:
            state = msgspec.msgpack.encode(context.state)
            if len(state) > function.max_state_bytes:
                raise ValueError(f"ctx.state has {len(state):,} bytes, and {function.max_state_bytes:,} are the most")
        except BaseException as error:  # noqa: BLE001
            self.send(Done(run.number, [], None, _fault(error), run.indexes[-1]))
            return
        self.send(Done(run.number, context._take_outputs(), None if state == before else state))


def _write(function: Function, directory: Path) -> None:
    for path, content in function.files.items():
        target = directory / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)


def _bound_memory(max_bytes: int) -> None:
    if max_bytes:
        resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _load(function: Function, directory: str) -> Callback:
    sys.path.insert(0, directory)
    sys.dont_write_bytecode = True
    module = importlib.import_module("main")
    found: Callback | None = getattr(module, function.entry, None)
    if not callable(found):
        raise LookupError(f"main.py has no function {function.entry!r}")
    return found


def _native(directory: str) -> Callback:
    program = os.path.join(directory, "program")
    os.chmod(program, 0o700)

    def call(topic: str, index: int, data: bytes, context: FunctionContext) -> None:
        command = [program, topic, str(index)]
        done = subprocess.run(command, input=data, capture_output=True, cwd=directory, check=False)  # noqa: S603  # it is meant
        if done.stderr:
            sys.stderr.write(done.stderr.decode("utf-8", "replace"))
        if done.returncode:
            raise RuntimeError(f"the program ended with {done.returncode}: {done.stderr[-500:].decode('utf-8', 'replace')}")
        for line in done.stdout.splitlines():
            target, separator, payload = line.partition(b"\t")
            if not separator:
                raise ValueError(f"a line of output has no tab: {line[:80]!r}")
            context.publish(target.decode("utf-8"), payload)

    return call


def _fault(error: BaseException) -> str:
    """What went wrong, for the person who wrote the function."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "nearcast-function-" in frame.filename]
    where = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
    text = f"{type(error).__name__}: {error}{where}"
    return text[:MAX_FAULT_CHARACTERS]


class _Told(io.TextIOBase):
    """Standard output and error of the function."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if text.strip():
            self._worker.send(Said(text.rstrip()[:MAX_SAID_CHARACTERS]))
        return len(text)


def main() -> None:
    """Serve on the descriptors that are named on the command line."""
    source_fd, target_fd = int(sys.argv[1]), int(sys.argv[2])
    worker = Worker(os.fdopen(source_fd, "rb", buffering=0), os.fdopen(target_fd, "wb", buffering=0))
    sys.stdout = sys.stderr = _Told(worker)
    with contextlib.suppress(Gone, BrokenPipeError, KeyboardInterrupt):
        worker.serve()


if __name__ == "__main__":
    main()
