"""The keeper: the one process that a WAN lives and dies with. Makes the hosts, starts the processes, serves the control
socket.

Runs until it is asked to end (``down``, SIGTERM), until the process that started it is gone, or until a start fails; then it
takes everything down: processes first, then the network, then its directory. As PID 1 of its namespace it also reaps what
programs inside leave behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Coroutine
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, cast

import msgspec

from nearcast.emulation import namespaces
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
    ReadLogs,
    Request,
    SendSignal,
    Specification,
    Traffic,
    WanState,
    WanStatus,
    Watch,
)
from nearcast.emulation.deployment import Deployment, check_events
from nearcast.emulation.directories import WanDirectory
from nearcast.emulation.logs import Follower
from nearcast.emulation.loopback import LoopbackUnderlay
from nearcast.emulation.namespaced import NamespaceUnderlay
from nearcast.emulation.server import Connection, Server
from nearcast.emulation.supervision import Supervised, Supervisor, resolve, with_environment
from nearcast.emulation.underlay import Streams, Underlay
from nearcast.errors import EmulationError, EmulationUnavailable, NearcastError
from nearcast.scenario.rules import unknown

MAX_REMEMBERED = 1_000
"""Happenings that a new watcher is told."""

MAX_UNWATCHED = 10_000
"""Happenings a watcher may lag behind; then the oldest are left out."""

MAX_LOG_BYTES = 4 * 1024 * 1024
"""Of the keeper's own log; the oldest goes first."""

TELL_SECONDS = 5.0
"""How long a keeper whose start failed waits to be asked why."""

STOP_SECONDS = 45.0
"""Longest that processes get to end by themselves, together."""

_log = logging.getLogger(__name__)


def run(directory: WanDirectory, owner: int, lock: int, *, detached: bool) -> int:
    """Be the keeper of a WAN, to its end; returns the exit code."""
    _open_log(directory.path / "keeper.log")
    try:
        specification = msgspec.json.decode(directory.specification.read_bytes(), type=Specification)
        return asyncio.run(Keeper(specification, directory, owner, detached=detached).run())
    except Exception as error:  # noqa: BLE001  # the edge of the process: whoever started it sees one line
        _log.exception("the keeper failed")
        print(f"nearcast: the keeper of WAN {directory.name} failed: {error!r}", file=sys.stderr)  # noqa: T201
        return 1
    finally:
        directory.release(lock)


def _open_log(path: Path) -> None:
    """Keep a log of bounded size; a disk that is full, now or later, is no reason to end or to complain with every line."""
    logging.raiseExceptions = False
    with contextlib.suppress(OSError):
        handler = RotatingFileHandler(path, maxBytes=MAX_LOG_BYTES // 2, backupCount=1)
        logging.basicConfig(handlers=[handler], level=logging.INFO)


class Keeper:
    """A running WAN."""

    def __init__(self, specification: Specification, directory: WanDirectory, owner: int, *, detached: bool) -> None:
        self._specification = specification
        self._directory = directory
        self._owner = owner
        self._detached = detached
        self._began = time.monotonic()
        self._state: WanState = "starting"
        self._error: str | None = None
        self._started_s: float | None = None
        self._happenings: deque[Happening] = deque(maxlen=MAX_REMEMBERED)
        self._watchers: list[deque[Happening]] = []
        self._news = asyncio.Event()
        self._stopping = asyncio.Event()
        self._settled = asyncio.Event()
        """Set once the start has succeeded or failed."""
        self._told = asyncio.Event()
        """Set once whoever started it knows, or is gone."""
        self._down = asyncio.Event()
        self._executed: dict[int, tuple[Connection, int, asyncio.Future[int]]] = {}
        self._underlay: Underlay | None = None
        self._deployment: Deployment | None = None
        self._supervisor: Supervisor | None = None

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self.stop)
        loop.add_signal_handler(signal.SIGCHLD, self._reap)
        server = Server(self, self._specification.name, self._directory.socket)
        server.open()
        server.adopt(socket.socket(fileno=self._owner), owner=True)
        start = asyncio.create_task(self._start(), name="start")
        stopping = asyncio.create_task(self._stopping.wait(), name="stopping")
        await asyncio.wait([start, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not start.done():
            start.cancel()
        failure = await _outcome(start)
        if failure is not None:
            self._error = failure
            self._change("failed", f"could not be started: {failure}")
        else:
            await self._stopping.wait()
            self._change("stopping", "is being taken down")
        stopping.cancel()
        await self._take_down()
        self._settled.set()
        self._down.set()
        if failure is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TELL_SECONDS):
                    await self._told.wait()
        server.close()
        await server.flushed(timeout_seconds=2.0)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)  # it is ending: nobody needs to ask again
        return 0 if failure is None else 1

    def stop(self) -> None:
        """Take everything down; asked a second time, without waiting for anybody."""
        if self._stopping.is_set() and self._supervisor is not None:
            self._supervisor.kill_all()
        self._stopping.set()

    # -- up and down -------------------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        specification = self._specification
        topology = specification.topology
        check_events(specification.events, topology)
        obstacle = namespaces.available() if specification.mode != "loopback" else None
        if obstacle is not None:
            if specification.mode == "namespaces":
                raise EmulationUnavailable(obstacle)
            self._note("fallback", specification.name, f"loopback mode is used: {obstacle}")
        loopback = specification.mode == "loopback" or obstacle is not None
        chosen = LoopbackUnderlay if loopback else NamespaceUnderlay
        self._underlay = underlay = chosen(topology, specification.seed)
        self._deployment = deployment = Deployment(topology, underlay, self._note)
        supervisor = Supervisor(
            underlay,
            deployment.hosts,
            topology.processes,
            Path(specification.output),
            specification.working_directory,
            specification.max_log_bytes,
            self._note,
            self._now_s,
        )
        self._supervisor = supervisor
        await underlay.open(self._network_failed)
        hosts = f"{len(deployment.hosts)} hosts are" if len(deployment.hosts) != 1 else "1 host is"
        self._note("state", specification.name, f"{hosts} there ({underlay.mode})")
        for limit in underlay.limits:
            self._note("limit", specification.name, limit)
        await supervisor.start_all()
        self._started_s = self._now_s()
        count = sum(not process.manual for process in topology.processes)
        self._change("up", f"is up: {count} process{'' if count == 1 else 'es'} ready")
        deployment.schedule(specification.events, supervisor)
        self._settled.set()

    async def _take_down(self) -> None:
        """Everything but the control socket; nothing here may keep the rest from happening."""
        if self._deployment is not None:
            self._deployment.close()
        if self._supervisor is not None:
            try:
                async with asyncio.timeout(STOP_SECONDS):
                    await self._supervisor.stop_all()
            except TimeoutError:
                self._supervisor.kill_all()
        for pid in list(self._executed):
            _kill_group(pid)
        if self._underlay is not None:
            try:
                await self._underlay.close()
            except (NearcastError, OSError):
                _log.exception("the network did not end in order")
        if self._supervisor is not None:
            self._supervisor.close()

    def _network_failed(self, reason: str) -> None:
        self._error = reason
        self._note("problem", self._specification.name, reason)

    # -- what happens ------------------------------------------------------------------------------------------------------

    def _now_s(self) -> float:
        return time.monotonic() - self._began

    def _note(self, kind: str, subject: str, text: str) -> None:
        happening = Happening(at_s=round(self._now_s(), 3), kind=kind, subject=subject, text=text)
        self._happenings.append(happening)
        for watcher in self._watchers:
            watcher.append(happening)
        self._news.set()
        self._news = asyncio.Event()
        _log.info("%s: %s", kind, text)

    def _change(self, state: WanState, text: str) -> None:
        self._state = state
        self._note(
            "ended" if state == "failed" else "state", self._specification.name, f"WAN {self._specification.name} {text}"
        )

    def _reap(self) -> None:
        """Every child that has ended: processes of the topology, executed commands, the router, and orphans."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            code = os.waitstatus_to_exitcode(status)
            if pid in self._executed:
                future = self._executed.pop(pid)[2]
                if not future.done():
                    future.set_result(code)
            elif self._supervisor is not None and self._supervisor.reaped(pid, code):
                continue
            elif self._underlay is not None:
                self._underlay.reaped(pid, code)

    # -- requests ----------------------------------------------------------------------------------------------------------

    def disconnected(self, connection: Connection) -> None:
        if connection.owner:
            self._told.set()
            if not self._detached:
                self.stop()

    async def handle(self, request: Request, connection: Connection, descriptors: tuple[int, ...]) -> Any:
        try:
            if isinstance(request, Execute):
                return await self._execute(request, connection, descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        match request:
            case AskStatus():
                return await self._status()
            case AwaitUp():
                await self._settled.wait()
                self._told.set()
                if self._state != "up":
                    raise EmulationError(self._error or "it is being taken down")
                return None
            case Down():
                self.stop()
                await self._down.wait()
                return None
            case Watch():
                await self._watch(request, connection)
                return None
        deployment, supervisor = self._running()
        match request:
            case Apply():
                await deployment.apply(request.event, supervisor)
            case AdjustLink():
                conditions = deployment.adjusted_link(request.between, request.changes)
                await deployment.change_link(request.between, conditions, request.one_way, request.for_s)
                return conditions
            case AdjustAccess():
                conditions = deployment.adjusted_access(request.host, request.changes)
                await deployment.change_access(request.host, conditions, request.for_s)
                return conditions
            case Control():
                await self._control(request, deployment, supervisor)
            case ReadLogs():
                await self._logs(request, connection, supervisor)
            case AskMatrix():
                return await deployment.matrix(request.rows)
            case SendSignal():
                self._send_signal(request, connection)
        return None

    def _running(self) -> tuple[Deployment, Supervisor]:
        if self._deployment is None or self._supervisor is None or self._state in ("stopping", "failed"):
            raise EmulationError(f"WAN {self._specification.name} is {self._state}")
        return self._deployment, self._supervisor

    async def _status(self) -> WanStatus:
        underlay, deployment, supervisor = self._underlay, self._deployment, self._supervisor
        ready = deployment is not None and self._state in ("starting", "up")
        traffic = Traffic()
        if underlay is not None and self._state == "up":
            with contextlib.suppress(EmulationError):  # without a router there are no figures, and _error says why
                traffic = await underlay.traffic()
        return WanStatus(
            name=self._specification.name,
            topology=self._specification.topology.name,
            mode=underlay.mode if underlay is not None else self._specification.mode,
            state=self._state,
            error=self._error,
            uptime_s=round(self._now_s(), 3),
            started_s=self._started_s,
            hosts=deployment.host_statuses() if deployment is not None and ready else (),
            processes=tuple(process.status() for process in supervisor.processes.values()) if supervisor is not None else (),
            cuts=deployment.cuts() if deployment is not None else (),
            pending_events=deployment.pending if deployment is not None else len(self._specification.events),
            limits=underlay.limits if underlay is not None else (),
            traffic=traffic,
            output=self._specification.output,
        )

    async def _control(self, request: Control, deployment: Deployment, supervisor: Supervisor) -> None:
        name = request.target
        if name in supervisor.processes:
            processes = [supervisor.processes[name]]
            host = processes[0].process.host
            if request.action in ("start", "restart") and deployment.is_crashed(host):
                raise EmulationError(f"{host} has crashed: start it, and {name} with it (`nearcast wan start {host}`)")
        elif name in deployment.hosts:
            if request.action in ("start", "restart"):
                await deployment.revive(name)
            processes = supervisor.on_host(deployment.host(name))
        else:
            raise EmulationError(unknown("process or host", name, [*supervisor.processes, *deployment.hosts]))
        if not processes:
            raise EmulationError(f"no process of the topology runs on {name}")
        for process in processes:
            await self._act(request.action, process, supervisor, alone=len(processes) == 1)

    async def _act(self, action: str, process: Supervised, supervisor: Supervisor, *, alone: bool) -> None:
        match action:
            case "start":
                await supervisor.start(process)
            case "stop":
                await supervisor.stop(process)
            case "kill":
                if alone and not process.alive:
                    raise EmulationError(f"process {process.name} does not run: it is {process.state}")
                await supervisor.kill(process)
            case "restart":
                await supervisor.restart(process)
            case "pause":
                if alone or process.state == "running":
                    supervisor.pause(process)
            case "resume":
                if alone or process.state == "paused":
                    supervisor.resume(process)

    async def _watch(self, request: Watch, connection: Connection) -> None:
        mine: deque[Happening] = deque(self._happenings, maxlen=MAX_UNWATCHED)
        self._watchers.append(mine)
        try:
            while not (self._down.is_set() and not mine):
                news = self._news
                while mine:
                    await connection.send_item(request.id, mine.popleft())
                await _until(self._down, news.wait())
        finally:
            self._watchers.remove(mine)

    async def _logs(self, request: ReadLogs, connection: Connection, supervisor: Supervisor) -> None:
        process = supervisor.processes.get(request.process)
        if process is None:
            raise EmulationError(unknown("process", request.process, list(supervisor.processes)))
        follower = process.log.follow() if request.follow else None
        try:
            for line in process.log.tail(max(0, request.lines)):
                await connection.send_item(request.id, line)
            if follower is not None:
                await _until(self._down, self._pass_on(follower, request.id, connection))
        finally:
            if follower is not None:
                process.log.unfollow(follower)

    async def _pass_on(self, follower: Follower, request: int, connection: Connection) -> None:
        while True:
            for line in await follower.take():
                await connection.send_item(request, line)

    # -- commands on hosts ---------------------------------------------------------------------------------------------------

    async def _execute(self, request: Execute, connection: Connection, descriptors: tuple[int, ...]) -> Finished:
        deployment, supervisor = self._running()
        if len(descriptors) != 3:
            raise EmulationError("an exec request needs standard input, output and error beside it")
        if not request.command:
            raise EmulationError("say which command to run")
        host = deployment.host(request.host)
        filled = [supervisor.fill_known(word, host) for word in request.command]
        command = with_environment(resolve(filled), request.environment)
        directory = request.working_directory or self._specification.working_directory
        try:
            pid = cast(Underlay, self._underlay).spawn(host, command, Streams(*descriptors), directory)
        except OSError as error:
            raise EmulationError(f"cannot run {request.command[0]}: {error.strerror}") from error
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._executed[pid] = (connection, request.id, future)
        try:
            return Finished(code=await asyncio.shield(future))
        finally:
            if not future.done():
                _kill_group(pid)

    def _send_signal(self, request: SendSignal, connection: Connection) -> None:
        for pid, (other, number, _) in self._executed.items():
            if other is connection and number == request.to:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.Signals[f"SIG{request.signal}"])
                return
        raise EmulationError(f"no program of request {request.to} is running")


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


async def _until(event: asyncio.Event, work: Coroutine[Any, Any, object]) -> None:
    """Do something to its end, or until the event is set."""
    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(event.wait())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


async def _outcome(task: asyncio.Task[None]) -> str | None:
    """Why a task failed, in one line; None if it did not."""
    try:
        await task
    except asyncio.CancelledError:
        return "it was ended before it was up"
    except NearcastError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001  # the edge of the task: clients are told, the log has the rest
        _log.exception("the start failed")
        return f"internal error: {error!r}"
    return None
