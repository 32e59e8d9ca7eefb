"""A program run on a host from Python: its standard streams as pipes, its output collected, its end awaited."""

from __future__ import annotations

import asyncio
import contextlib
import os

import msgspec

from nearcast.emulation.client import ControlClient
from nearcast.emulation.control import Execute, Finished, SendSignal
from nearcast.errors import EmulationError

_CHUNK_BYTES = 64 * 1024


class Completed(msgspec.Struct, frozen=True, kw_only=True):
    """A program that has ended."""

    code: int
    """Its exit code; negative is the signal that ended it."""

    output: str
    """What it wrote to standard output."""

    error: str
    """What it wrote to standard error."""

    def check(self) -> Completed:
        """Itself, if it succeeded; else :class:`EmulationError` with its last words."""
        if self.code == 0:
            return self
        words = (self.error.strip() or self.output.strip()).splitlines()
        raise EmulationError(f"exit code {self.code}: {words[-1] if words else 'it said nothing'}")


async def run_program(client: ControlClient, request: Execute, given: bytes, max_output_bytes: int) -> Completed:
    """Run to the end; whatever keeps this from waiting for it kills the program."""
    theirs: list[int] = []
    with contextlib.ExitStack() as ours:
        standard_input, our_input = _pipe()
        theirs.append(standard_input)
        outputs = []
        for _ in range(2):
            reading, writing = _pipe()
            theirs.append(writing)
            outputs.append(reading)
            ours.callback(os.close, reading)
        try:
            pending = client.begin(request, (theirs[0], theirs[1], theirs[2]))
        except BaseException:
            os.close(our_input)
            raise
        finally:
            for descriptor in theirs:
                os.close(descriptor)  # the program has copies; ours would keep the pipes from ending
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(_feed(our_input, given))
                collected = [group.create_task(_collect(reading, max_output_bytes)) for reading in outputs]
                result = await client.finish(pending)
        except BaseException as error:
            client.send(SendSignal(id=client.take_number(), to=request.id, signal="KILL"))
            if isinstance(error, BaseExceptionGroup) and isinstance(error.exceptions[0], EmulationError):
                raise error.exceptions[0] from None
            raise
    output, complaint = (task.result().decode("utf-8", "replace") for task in collected)
    return Completed(code=msgspec.convert(result, Finished).code, output=output, error=complaint)


def _pipe() -> tuple[int, int]:
    return os.pipe2(os.O_CLOEXEC)


async def _collect(descriptor: int, max_bytes: int) -> bytes:
    """All that comes through a pipe."""
    os.set_blocking(descriptor, False)
    found = bytearray()
    while True:
        try:
            data = os.read(descriptor, _CHUNK_BYTES)
        except BlockingIOError:
            await _until(descriptor, writable=False)
            continue
        if not data:
            return bytes(found)
        found += data
        if len(found) > max_bytes:
            raise EmulationError(f"the program wrote more than {max_bytes} bytes: write to a file, or raise max_output_bytes")


async def _feed(descriptor: int, data: bytes) -> None:
    """Write everything, as long as somebody reads; then close, so that the end is seen."""
    os.set_blocking(descriptor, False)
    position = 0
    try:
        while position < len(data):
            try:
                position += os.write(descriptor, data[position : position + _CHUNK_BYTES])
            except BlockingIOError:
                await _until(descriptor, writable=True)
    except BrokenPipeError:
        pass
    finally:
        os.close(descriptor)


async def _until(descriptor: int, *, writable: bool) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    if writable:
        loop.add_writer(descriptor, ready.set)
    else:
        loop.add_reader(descriptor, ready.set)
    try:
        await ready.wait()
    finally:
        if writable:
            loop.remove_writer(descriptor)
        else:
            loop.remove_reader(descriptor)
