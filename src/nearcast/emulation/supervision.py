"""The processes of a topology: started in order, watched, stopped, paused, killed, started again.

A process is a session and process group of its own, and what it starts is paused and killed with it, also what leaves the
group. Owns states, exit codes, logs and readiness; how a program gets onto a host is the underlay's business.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from nearcast.emulation.control import ProcessState, ProcessStatus
from nearcast.emulation.logs import ProcessLog
from nearcast.emulation.offspring import MARK, signal_offspring
from nearcast.emulation.underlay import Streams, Underlay
from nearcast.errors import EmulationError
from nearcast.scenario.placeholders import fill
from nearcast.scenario.topology import Process

_READ_BYTES = 64 * 1024

#: How often a port is tried while a process gets ready, in seconds.
_READY_POLL_SECONDS = 0.02

#: Daemons are where only root's PATH looks.
_DAEMONS = "/usr/local/sbin:/usr/sbin:/sbin"

_BRACED = re.compile(r"\{([A-Za-z0-9_-]+)\}")

Note = Callable[[str, str, str], None]
"""``note(kind, subject, text)``: something happened."""


def resolve(command: Sequence[str]) -> list[str]:
    """A command with its program found. ``nearcast`` and ``python`` are this installation's, whatever the PATH says."""
    program, *arguments = command
    if program == "nearcast":
        return [sys.executable, "-P", "-m", "nearcast", *arguments]
    if program == "python":
        return [sys.executable, *arguments]
    found = shutil.which(program) or shutil.which(program, path=_DAEMONS)
    if found is None:
        raise EmulationError(f"there is no program {program!r}: install it, or give its whole path")
    return [found, *arguments]


def with_environment(command: Sequence[str], added: Mapping[str, str]) -> list[str]:
    """The command with variables added to the environment it inherits."""
    if not added:
        return list(command)
    for name in added:
        if not name or "=" in name:
            raise EmulationError(f"{name!r} cannot name an environment variable")
    return ["/usr/bin/env", *(f"{name}={value}" for name, value in added.items()), *command]


def describe_end(code: int) -> str:
    """``exit code 1`` or ``SIGKILL``."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


class Supervised:
    """One process of the topology over all its starts."""

    def __init__(self, process: Process, host: int, log: ProcessLog, mark: str) -> None:
        self.process = process
        self.host = host
        self.log = log
        self.mark = mark
        """What tells its offspring from that of others."""
        self.state: ProcessState = "waiting"
        self.since_s = 0.0
        self.pid: int | None = None
        self.exit_code: int | None = None
        self.starts = 0
        self.command: tuple[str, ...] = process.command
        self.ended = asyncio.Event()
        self.ended.set()
        self.lock = asyncio.Lock()
        self.killed = False
        """Its end was asked for by a kill."""

    @property
    def name(self) -> str:
        return self.process.name

    @property
    def alive(self) -> bool:
        return self.pid is not None

    def status(self) -> ProcessStatus:
        return ProcessStatus(
            name=self.name,
            host=self.process.host,
            state=self.state,
            pid=self.pid,
            exit_code=self.exit_code,
            starts=self.starts,
            since_s=round(self.since_s, 3),
            command=self.command,
            log=str(self.log.path),
        )


class Supervisor:
    """All processes of a WAN. ``hosts`` maps the names of hosts to their numbers, in order."""

    def __init__(
        self,
        underlay: Underlay,
        hosts: Mapping[str, int],
        processes: Sequence[Process],
        output: Path,
        directory: str,
        max_log_bytes: int,
        note: Note,
        clock: Callable[[], float],
    ) -> None:
        self._underlay = underlay
        self._hosts = hosts
        self._output = output
        self._directory = directory
        self._note = note
        self._clock = clock
        self._by_pid: dict[int, Supervised] = {}
        self._readers: set[int] = set()
        self.processes: dict[str, Supervised] = {}
        run = uuid.uuid4().hex  # two WANs may have the same names, and see each other's processes
        try:
            (output / "logs").mkdir(parents=True, exist_ok=True)
            for process in processes:
                path = output / "logs" / f"{process.name}.log"
                log = ProcessLog(path, max_log_bytes, partial(note, "problem", process.name))
                self.processes[process.name] = Supervised(process, hosts[process.host], log, f"{process.name}/{run}")
        except OSError as error:
            raise EmulationError(f"logs cannot be kept in {output / 'logs'}: {error.strerror}") from error

    # -- finding -----------------------------------------------------------------------------------------------------------

    def on_host(self, host: int) -> list[Supervised]:
        return [process for process in self.processes.values() if process.host == host]

    def fill_known(self, text: str, host: int) -> str:
        """Text with ``{name}`` replaced where it is a host; other braces are left alone."""

        def replaced(found: re.Match[str]) -> str:
            number = self._hosts.get(found.group(1))
            return found.group() if number is None else self._underlay.address(number, host)

        return _BRACED.sub(replaced, text)

    def fill(self, text: str, host: int, data: Path) -> str:
        """Text with ``{name}`` replaced by addresses as ``host`` sees them, and ``{data}``."""
        values = {name: self._underlay.address(number, host) for name, number in self._hosts.items()}
        values["data"] = str(data)
        try:
            return fill(text, values)
        except ValueError as error:
            raise EmulationError(str(error)) from error

    # -- starting ----------------------------------------------------------------------------------------------------------

    async def start_all(self) -> None:
        """Start every process in order, each when those before it are ready; not those that wait to be told."""
        turns: list[list[Supervised]] = []
        for process in self.processes.values():
            if not process.process.manual:
                if process.process.together and turns:
                    turns[-1].append(process)
                else:
                    turns.append([process])
        for turn in turns:
            await asyncio.gather(*(self.start(process) for process in turn))

    async def start(self, process: Supervised) -> None:
        """Start a process and wait until it is ready; one that runs already is left alone."""
        async with process.lock:
            if not process.alive:
                await self._start(process)

    async def _start(self, process: Supervised) -> None:
        specification = process.process
        data = self._output / "data" / specification.name
        try:
            data.mkdir(parents=True, exist_ok=True)
            filled = [self.fill(word, process.host, data) for word in specification.command]
            environment = {name: self.fill(value, process.host, data) for name, value in specification.environment.items()}
            command = with_environment(resolve(filled), {**environment, MARK: process.mark})
            process.log.say(f"start {process.starts + 1}: {' '.join(filled)}")
            # After that line, which may have the word in it.
            expected = process.log.expect(specification.ready.log) if specification.ready.log is not None else None
            if process.starts:
                signal_offspring(process.mark, signal.SIGKILL)  # what the start before has left
            self._spawn(process, command)
        except (EmulationError, OSError) as error:
            reason = str(error) if isinstance(error, EmulationError) else f"{error.strerror}: {error.filename}"
            self._change(process, "failed")
            self._note("failed", process.name, f"{process.name} could not be started: {reason}")
            raise EmulationError(f"process {process.name} could not be started: {reason}") from error
        process.command = tuple(filled)
        process.starts += 1
        process.exit_code = None
        process.killed = False
        self._change(process, "starting")
        self._note("started", process.name, f"{process.name} started on {specification.host}")
        try:
            await self._wait_ready(process, expected)
        finally:
            if expected is not None:
                process.log.forget(expected)

    def _spawn(self, process: Supervised, command: Sequence[str]) -> None:
        reading, writing = os.pipe2(os.O_CLOEXEC)
        nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        try:
            process.pid = self._underlay.spawn(process.host, command, Streams(nothing, writing, writing), self._directory)
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
            os.close(nothing)
        self._by_pid[process.pid] = process
        process.ended.clear()
        os.set_blocking(reading, False)
        self._readers.add(reading)
        asyncio.get_running_loop().add_reader(reading, self._collect, reading, process.log)

    def _collect(self, reading: int, log: ProcessLog) -> None:
        try:
            data = os.read(reading, _READ_BYTES)
        except BlockingIOError:
            return
        if data:
            log.write(data)
        else:
            self._stop_reading(reading)

    def _stop_reading(self, reading: int) -> None:
        asyncio.get_running_loop().remove_reader(reading)
        self._readers.discard(reading)
        os.close(reading)

    async def _wait_ready(self, process: Supervised, expected: asyncio.Event | None) -> None:
        check = process.process.ready
        try:
            async with asyncio.timeout(check.timeout_s):
                if expected is not None:
                    await self._event_or_end(process, expected)
                while check.port is not None and process.alive:
                    if await self._underlay.accepts(process.host, check.port):
                        break
                    await self._pause_or_end(process)
        except TimeoutError:
            what = (
                f"accepts no connection at port {check.port} of its address" if check.port is not None else "does not say so"
            )
            if expected is not None and not expected.is_set():
                what = f"has not written {check.log!r}"
            self._kill(process)
            await process.ended.wait()
            self._change(process, "failed")
            text = f"{process.name} was not ready within {check.timeout_s:g} s: it {what}; {self._last_words(process)}"
            self._note("failed", process.name, text)
            raise EmulationError(f"process {text}") from None
        if not process.alive:
            if check.port is None and expected is not None and expected.is_set():
                return  # it said its word and was done
            self._change(process, "failed")
            end = describe_end(process.exit_code or 0)
            raise EmulationError(f"process {process.name} ended ({end}) before it was ready; {self._last_words(process)}")
        self._change(process, "running")
        self._note("ready", process.name, f"{process.name} is ready")

    async def _event_or_end(self, process: Supervised, event: asyncio.Event) -> None:
        waits = [asyncio.ensure_future(event.wait()), asyncio.ensure_future(process.ended.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def _pause_or_end(self, process: Supervised) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_READY_POLL_SECONDS):
                await process.ended.wait()

    def _last_words(self, process: Supervised) -> str:
        lines = [line for line in process.log.tail(5) if line.strip() and not line.startswith("--- ")]
        said = f"it said: {lines[-1].strip()[:300]}" if lines else "it said nothing"
        if lines and self._underlay.mode == "loopback" and "in use" in lines[-1].lower():
            said += f" (in loopback mode a process must listen on {{{process.process.host}}}, not on 0.0.0.0)"
        return said

    # -- ending ------------------------------------------------------------------------------------------------------------

    async def stop(self, process: Supervised) -> None:
        """Ask a process to end, and kill it if it does not in time; what it leaves is killed."""
        await self._stop_any(process)
        signal_offspring(process.mark, signal.SIGKILL)

    async def _stop_any(self, process: Supervised) -> None:
        if process.state == "starting":  # whoever starts it has the lock for as long as it takes to be ready
            await self._stop(process)
            return
        async with process.lock:
            await self._stop(process)

    async def _stop(self, process: Supervised) -> None:
        if not process.alive:
            return
        if process.state == "paused":
            self.resume(process)
        self._change(process, "stopping")
        self._signal(process, signal.Signals[f"SIG{process.process.stop_signal}"])
        try:
            async with asyncio.timeout(process.process.stop_timeout_s):
                await process.ended.wait()
        except TimeoutError:
            asked = f"SIG{process.process.stop_signal}"
            text = f"{process.name} did not end within {process.process.stop_timeout_s:g} s of {asked}: killed"
            self._note("problem", process.name, text)
            self._kill(process)
            await process.ended.wait()

    async def restart(self, process: Supervised) -> None:
        async with process.lock:
            await self._stop(process)
            await self._start(process)

    async def kill(self, process: Supervised) -> None:
        """SIGKILL, at once, for all that it started too; also in the middle of a start."""
        self._kill(process)
        signal_offspring(process.mark, signal.SIGKILL)
        await process.ended.wait()

    def _kill(self, process: Supervised) -> None:
        if process.alive:
            process.killed = True
            self._signal(process, signal.SIGKILL)

    async def stop_all(self) -> None:
        """Stop every process, all at the same time. What they leave ends with the keeper."""
        await asyncio.gather(*(self._stop_any(process) for process in self.processes.values()))

    def kill_all(self) -> None:
        for process in self.processes.values():
            self._kill(process)

    def close(self) -> None:
        for reading in list(self._readers):
            self._stop_reading(reading)
        for process in self.processes.values():
            process.log.close()

    # -- pausing -----------------------------------------------------------------------------------------------------------

    def pause(self, process: Supervised) -> None:
        """The process and all that it started stand still."""
        if process.state != "running":
            raise EmulationError(f"process {process.name} cannot be paused: it is {process.state}")
        self._signal(process, signal.SIGSTOP)
        signal_offspring(process.mark, signal.SIGSTOP)
        self._change(process, "paused")
        self._note("paused", process.name, f"{process.name} paused")

    def resume(self, process: Supervised) -> None:
        if process.state != "paused":
            raise EmulationError(f"process {process.name} is not paused: it is {process.state}")
        signal_offspring(process.mark, signal.SIGCONT)
        self._signal(process, signal.SIGCONT)
        self._change(process, "running")
        self._note("resumed", process.name, f"{process.name} resumed")

    # -- what the kernel tells -----------------------------------------------------------------------------------------------

    def reaped(self, pid: int, code: int) -> bool:
        """A child ended; whether it was one of ours."""
        process = self._by_pid.pop(pid, None)
        if process is None:
            return False
        # What it started ends with it, unless it left the group.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        asked = process.state == "stopping"
        process.pid = None
        process.exit_code = code
        self._change(process, "killed" if process.killed else "exited")
        process.log.say(f"ended: {describe_end(code)}")
        kind = "killed" if process.killed else "stopped" if asked else "exited"
        words = {
            "killed": "was killed",
            "stopped": f"stopped ({describe_end(code)})",
            "exited": f"ended: {describe_end(code)}",
        }
        self._note(kind, process.name, f"{process.name} {words[kind]}")
        process.ended.set()
        return True

    def _signal(self, process: Supervised, number: signal.Signals) -> None:
        if process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)

    def _change(self, process: Supervised, state: ProcessState) -> None:
        process.state = state
        process.since_s = self._clock()
