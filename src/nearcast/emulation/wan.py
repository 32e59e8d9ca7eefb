"""An emulated WAN from Python: start one, change it while it runs, run programs on its hosts, take it down.

    async with Wan.up("uav") as wan:
        print((await wan.run("swarm-1", ["ping", "-c", "3", "broker-1"])).output)
        await wan.move("swarm-1", "zone-2")

Everything goes over the control socket of the WAN's keeper, a process of its own: the ``nearcast wan`` commands see and change
the same WAN. When the ``async with`` block ends, or this process does, however it does, the WAN ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from nearcast.emulation import directories
from nearcast.emulation.client import ControlClient
from nearcast.emulation.control import (
    AdjustAccess,
    AdjustLink,
    Apply,
    AskMatrix,
    AskStatus,
    AwaitUp,
    Control,
    Down,
    Execute,
    Finished,
    Happening,
    Matrix,
    Mode,
    ReadLogs,
    SendSignal,
    Specification,
    WanStatus,
    Watch,
)
from nearcast.emulation.deployment import check_events
from nearcast.emulation.launcher import TEARDOWN_SECONDS
from nearcast.emulation.programs import Completed, run_program
from nearcast.emulation.supervision import describe_end
from nearcast.errors import EmulationError
from nearcast.network.conditions import Conditions
from nearcast.scenario.checks import check_topology
from nearcast.scenario.events import Cut, Event, Heal, Move
from nearcast.scenario.expansion import expand_processes
from nearcast.scenario.files import load_topology
from nearcast.scenario.topology import Topology

__all__ = ["Completed", "Happening", "Matrix", "Wan", "WanStatus"]

#: How long after its launcher's end a WAN is waited for.
_GONE_SECONDS = 10.0

Signal = Literal["INT", "TERM", "QUIT", "HUP", "KILL"]


class Wan:
    """A running WAN. Made by :meth:`up` or :meth:`connect`."""

    def __init__(self, name: str, client: ControlClient) -> None:
        self.name = name
        self._client = client

    # -- up and down -------------------------------------------------------------------------------------------------------

    @classmethod
    @contextlib.asynccontextmanager
    async def up(
        cls,
        topology: Topology | str | Path,
        *,
        name: str | None = None,
        mode: Mode = "auto",
        events: Iterable[Event] = (),
        seed: int = 0,
        output: str | Path | None = None,
        base: Path | None = None,
        wait: bool = True,
    ) -> AsyncIterator[Wan]:
        """Start a WAN; it is taken down at the end of the block.

        ``topology`` is one, the name of a ready-made one, or a file. ``name`` is what commands call the WAN (the topology's by
        default). ``mode`` is ``"namespaces"`` (needs root), ``"loopback"``, or ``"auto"``: the former where it is possible.
        ``events`` happen at their ``at_s`` after all processes are ready. Randomness comes from ``seed``. Logs and the
        processes' data go to ``output`` and stay there; without it they go with the WAN. ``base`` is the directory of running
        WANs. Without ``wait`` the block begins while processes are still being started; :meth:`ready` waits for them.
        """
        launched = await _launch(topology, name, mode, tuple(events), seed, output, base, detached=False)
        wan = cls(launched.name, launched.client)
        try:
            if wait:
                await wan.ready()
            yield wan
        finally:
            await _end(launched)
        _check_end(launched)

    @classmethod
    async def up_detached(
        cls,
        topology: Topology | str | Path,
        *,
        name: str | None = None,
        mode: Mode = "auto",
        events: Iterable[Event] = (),
        seed: int = 0,
        output: str | Path | None = None,
        base: Path | None = None,
    ) -> str:
        """Start a WAN that outlives this process; returns its name. ``nearcast wan down``, or :meth:`down`, ends it."""
        launched = await _launch(topology, name, mode, tuple(events), seed, output, base, detached=True)
        try:
            await cls(launched.name, launched.client).ready()
        except BaseException:
            await _end(launched)
            raise
        launched.client.close()
        await launched.process.wait()  # its first process, which ended at once
        return launched.name

    @classmethod
    @contextlib.asynccontextmanager
    async def connect(cls, name: str | None = None, *, base: Path | None = None) -> AsyncIterator[Wan]:
        """A WAN that somebody else started; without a name, the only one that is running. It goes on after the block."""
        directory = directories.find(base or directories.default_base(), name)
        client = await ControlClient.connect(directory.socket)
        try:
            yield cls(directory.name, client)
        finally:
            client.close()

    async def ready(self) -> None:
        """Wait until every process is ready; :class:`EmulationError` says what kept one from it."""
        await self._client.ask(AwaitUp(id=self._client.take_number()))

    async def down(self) -> None:
        """Take the WAN down; returns when nothing of it is left."""
        await self._client.ask(Down(id=self._client.take_number()))
        await self._client.ended.wait()

    async def ended(self) -> None:
        """Wait until the WAN has been taken down."""
        await self._client.ended.wait()

    # -- looking -----------------------------------------------------------------------------------------------------------

    async def status(self) -> WanStatus:
        """Hosts, processes, traffic: everything about it now."""
        return msgspec.convert(await self._client.ask(AskStatus(id=self._client.take_number())), WanStatus)

    async def matrix(self, rows: int | None = None) -> Matrix:
        """The one-way latencies between hosts that are expected now; with ``rows``, only from the first so many hosts."""
        request = AskMatrix(id=self._client.take_number(), rows=rows)
        return msgspec.convert(await self._client.ask(request), Matrix)

    async def watch(self) -> AsyncIterator[Happening]:
        """Everything that has happened and happens, until the WAN ends."""
        async for item in self._client.items(Watch(id=self._client.take_number())):
            yield msgspec.convert(item, Happening)

    async def logs(self, process: str, lines: int = 100) -> list[str]:
        """The last lines that a process wrote."""
        request = ReadLogs(id=self._client.take_number(), process=process, lines=lines)
        return [line async for line in self._client.items(request)]

    async def follow(self, process: str, lines: int = 10) -> AsyncIterator[str]:
        """The last lines that a process wrote, and then what it writes."""
        request = ReadLogs(id=self._client.take_number(), process=process, lines=lines, follow=True)
        async for line in self._client.items(request):
            yield line

    # -- the network -------------------------------------------------------------------------------------------------------

    async def apply(self, event: Event) -> None:
        """Let an event happen now, whatever its ``at_s``."""
        await self._client.ask(Apply(id=self._client.take_number(), event=event))

    async def move(self, host: str, site: str) -> None:
        """A host is at another site from now on."""
        await self.apply(Move(at_s=0.0, host=host, site=site))

    async def cut(
        self,
        source: str | Sequence[str],
        target: str | Sequence[str] = (),
        *,
        one_way: bool = False,
        for_s: float | None = None,
    ) -> None:
        """Let nothing pass between hosts or sites; without ``target``, between ``source`` and everything else."""
        await self.apply(Cut(at_s=0.0, source=_names(source), target=_names(target), one_way=one_way, for_s=for_s))

    async def heal(self) -> None:
        """Undo every cut."""
        await self.apply(Heal(at_s=0.0))

    async def link(
        self, a: str, b: str, *, one_way: bool = False, for_s: float | None = None, **changes: float | str
    ) -> Conditions:
        """Change the link between two sites: ``await wan.link("zone-1", "cloud", latency_ms=80, loss=0.01)``.

        The fields of :class:`Conditions` that are not named stay as they are; returns them all.
        """
        request = AdjustLink(id=self._client.take_number(), between=(a, b), changes=changes, one_way=one_way, for_s=for_s)
        return msgspec.convert(await self._client.ask(request), Conditions)

    async def access(self, host: str, *, for_s: float | None = None, **changes: float | str) -> Conditions:
        """The same for a host's access link."""
        request = AdjustAccess(id=self._client.take_number(), host=host, changes=changes, for_s=for_s)
        return msgspec.convert(await self._client.ask(request), Conditions)

    # -- processes ---------------------------------------------------------------------------------------------------------

    async def start(self, target: str) -> None:
        """Start a process, or all of a host, and wait until it is ready. One that runs is left alone."""
        await self._control("start", target)

    async def stop(self, target: str) -> None:
        """Ask a process, or all of a host, to end, and wait until it has; killed if it does not in time."""
        await self._control("stop", target)

    async def kill(self, target: str) -> None:
        """SIGKILL for a process, or all of a host, and everything it started."""
        await self._control("kill", target)

    async def restart(self, target: str) -> None:
        """Stop a process, or all of a host, if it runs, start it, and wait until it is ready."""
        await self._control("restart", target)

    async def pause(self, target: str) -> None:
        """Let a process, or all of a host, stand still."""
        await self._control("pause", target)

    async def resume(self, target: str) -> None:
        """Let it go on."""
        await self._control("resume", target)

    async def _control(self, action: Literal["start", "stop", "kill", "restart", "pause", "resume"], target: str) -> None:
        await self._client.ask(Control(id=self._client.take_number(), action=action, target=target))

    # -- programs ----------------------------------------------------------------------------------------------------------

    async def run(
        self,
        host: str,
        command: Sequence[str],
        *,
        input: str = "",  # noqa: A002  # subprocess.run's word
        environment: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        max_output_bytes: int = 16 * 1024 * 1024,
    ) -> Completed:
        """Run a program on a host to its end. ``{name}`` in it is the address of a host.

        After ``timeout_s`` it is killed and ``TimeoutError`` raised. Output beyond ``max_output_bytes`` kills it too.
        """
        request = Execute(
            id=self._client.take_number(),
            host=host,
            command=tuple(command),
            environment=dict(environment or {}),
            working_directory=os.getcwd(),
        )
        async with asyncio.timeout(timeout_s):
            return await run_program(self._client, request, input.encode(), max_output_bytes)

    async def execute(
        self,
        host: str,
        command: Sequence[str],
        streams: tuple[int, int, int] = (0, 1, 2),
        *,
        environment: Mapping[str, str] | None = None,
        signals: asyncio.Queue[Signal] | None = None,
    ) -> int:
        """Run a program on a host with these standard streams; returns its exit code. Signals put in ``signals`` are sent to
        it."""
        request = Execute(
            id=self._client.take_number(),
            host=host,
            command=tuple(command),
            environment=dict(environment or {}),
            working_directory=os.getcwd(),
        )

        async def pass_on(queue: asyncio.Queue[Signal]) -> None:
            while True:
                self._client.send(SendSignal(id=self._client.take_number(), to=request.id, signal=await queue.get()))

        passing = asyncio.create_task(pass_on(signals)) if signals is not None else None
        try:
            return msgspec.convert(await self._client.ask(request, streams), Finished).code
        finally:
            if passing is not None:
                passing.cancel()


class _Launched(msgspec.Struct):
    """A keeper that was started."""

    name: str
    client: ControlClient
    process: asyncio.subprocess.Process
    directory: directories.WanDirectory


async def _launch(
    topology: Topology | str | Path,
    name: str | None,
    mode: Mode,
    events: tuple[Event, ...],
    seed: int,
    output: str | Path | None,
    base: Path | None,
    *,
    detached: bool,
) -> _Launched:
    if sys.platform != "linux":
        raise EmulationError("the emulated WAN needs Linux: run it in a Linux machine or container")
    if isinstance(topology, Topology):
        check_topology(topology)
        topology = expand_processes(topology)
    else:
        topology = load_topology(topology)
    check_events(events, topology)
    if not topology.hosts:
        raise EmulationError(f"topology {topology.name} has no hosts: add [[hosts]]")
    directory, lock = directories.reserve(base or directories.default_base(), name or topology.name[:40])
    try:
        kept = str(directory.path if output is None else Path.cwd() / output)
        os.makedirs(kept, exist_ok=True)
        specification = Specification(
            name=directory.name,
            topology=topology,
            mode=mode,
            events=events,
            seed=seed,
            output=kept,
            working_directory=os.getcwd(),
        )
        directory.specification.write_bytes(msgspec.json.encode(specification))
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",  # what lies in the user's directory is not for us to import
                "-m",
                "nearcast.emulation.launcher",
                str(directory.path),
                str(theirs.fileno()),
                str(lock),
                str(int(detached)),
                str(os.getpid()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL if detached else None,
                stderr=asyncio.subprocess.DEVNULL if detached else None,
                pass_fds=[theirs.fileno(), lock],
                start_new_session=True,  # Ctrl-C is for the process that started it
            )
    except OSError as error:
        directory.remove()
        raise EmulationError(f"the WAN cannot be started in {error.filename or directory.path}: {error.strerror}") from error
    finally:
        os.close(lock)
    client = ControlClient(ours)
    launched = _Launched(name=directory.name, client=client, process=process, directory=directory)
    try:
        await client.greeted()
    except BaseException:
        await _end(launched)
        raise
    return launched


async def _end(launched: _Launched) -> None:
    """Take a WAN down, and wait until its launcher is gone; twice cancelled, it is killed."""
    try:
        try:
            async with asyncio.timeout(TEARDOWN_SECONDS):
                await launched.client.ask(Down(id=launched.client.take_number()))
        except EmulationError:
            pass  # it was taken down already
        except TimeoutError:
            # A keeper that does not answer any more does not see the connection end either; the launcher kills it.
            with contextlib.suppress(ProcessLookupError):
                launched.process.terminate()
        launched.client.close()
        await launched.process.wait()
    except asyncio.CancelledError:
        launched.client.close()
        with contextlib.suppress(ProcessLookupError):
            launched.process.terminate()
        await launched.process.wait()
        raise
    finally:
        await asyncio.to_thread(launched.directory.remove_when_dead, _GONE_SECONDS)


def _check_end(launched: _Launched) -> None:
    """Whoever took it down, it ended in order; else whatever ran on it was cut short, and says nothing."""
    code = launched.process.returncode or 0
    if code < 0 or code > 128:
        number = -code if code < 0 else code - 128
        who = "launcher" if code < 0 else "keeper"
        raise EmulationError(f"the {who} of WAN {launched.name} was killed ({describe_end(-number)}), and the WAN with it")


def _names(names: str | Sequence[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)
