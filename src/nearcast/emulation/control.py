"""The control protocol of a running WAN: what a client may ask its keeper, and how it is answered.

JSON lines over a Unix socket. The keeper greets with a :class:`Greeting`; then each line of the client is one request, a
``{"id": N, "do": ...}``, and gets exactly one :class:`Answer` with its number; requests that follow something (``watch``,
``logs`` with ``follow``) get :class:`Item` lines before it. Several requests may be under way on one connection. ``exec``
carries the standard streams of the program as file descriptors beside its line (SCM_RIGHTS), so output never passes through
JSON.

Owns only the words and their bounds; sockets are :mod:`nearcast.emulation.server`'s and :mod:`nearcast.emulation.wan`'s.
"""

from __future__ import annotations

from typing import Any, Final, Literal, Union

import msgspec

from nearcast.network.conditions import Conditions
from nearcast.scenario.events import Event
from nearcast.scenario.topology import Topology

PROTOCOL: Final = 1

#: A longer request is refused and its connection closed: nobody makes the keeper hold more.
MAX_REQUEST_BYTES: Final = 256 * 1024

#: A client gives up on a longer answer. The status of a thousand hosts with a thousand processes is below 1 MB.
MAX_ANSWER_BYTES: Final = 16 * 1024 * 1024

#: A matrix that fits into an answer.
MAX_MATRIX_ENTRIES: Final = 1_000_000

Mode = Literal["auto", "namespaces", "loopback"]
ProcessState = Literal["waiting", "starting", "running", "paused", "stopping", "exited", "killed", "failed"]
WanState = Literal["starting", "up", "stopping", "failed"]


class Specification(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a keeper is started with: a file in its directory."""

    name: str
    topology: Topology
    mode: Mode
    events: tuple[Event, ...] = ()
    seed: int = 0
    output: str
    """Directory of ``logs`` and ``data``."""

    working_directory: str
    """Where the topology's processes run."""

    max_log_bytes: int = 16 * 1024 * 1024
    """How much of each process's output is kept, in bytes; the oldest goes first."""


# -- requests --------------------------------------------------------------------------------------------------------------


class _Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="do"):
    id: int


class AskStatus(_Request, tag="status", frozen=True, kw_only=True):
    """Answered with a :class:`WanStatus`."""


class AwaitUp(_Request, tag="await-up", frozen=True, kw_only=True):
    """Answered when every process is ready, or with the error that ended the start."""


class Apply(_Request, tag="apply", frozen=True, kw_only=True):
    """Let an event happen now, whatever its ``at_s``."""

    event: Event


class AdjustLink(_Request, tag="adjust-link", frozen=True, kw_only=True):
    """Change what is named of a link between two sites; the rest stays. Answered with the :class:`Conditions` now."""

    between: tuple[str, str]
    changes: dict[str, float | str]
    one_way: bool = False
    for_s: float | None = None


class AdjustAccess(_Request, tag="adjust-access", frozen=True, kw_only=True):
    """The same for a host's access link."""

    host: str
    changes: dict[str, float | str]
    for_s: float | None = None


class Control(_Request, tag="process", frozen=True, kw_only=True):
    """Do something to the processes that ``target`` names: a process, or a host for all of its processes.

    ``start``, ``stop`` and ``restart`` are answered when it is done: started means ready.
    """

    action: Literal["start", "stop", "kill", "restart", "pause", "resume"]
    target: str


class Execute(_Request, tag="exec", frozen=True, kw_only=True):
    """Run a program on a host; standard input, output and error come beside the line. Answered with :class:`Finished`.

    ``{name}`` of a host is replaced by its address; other braces are left alone, as shell and awk need them. When the
    connection ends first, the program is killed.
    """

    host: str
    command: tuple[str, ...]
    environment: dict[str, str] = {}
    working_directory: str | None = None


class SendSignal(_Request, tag="signal", frozen=True, kw_only=True):
    """Send a signal to the program of an ``exec`` of this connection."""

    to: int
    """The request's id."""

    signal: Literal["INT", "TERM", "QUIT", "HUP", "KILL"]


class ReadLogs(_Request, tag="logs", frozen=True, kw_only=True):
    """The last ``lines`` of what a process wrote, as items of text; with ``follow``, what it writes from then on."""

    process: str
    lines: int = 100
    follow: bool = False


class Watch(_Request, tag="watch", frozen=True, kw_only=True):
    """Everything that happens from now on, as :class:`Happening` items, after those of the past that are still known."""


class AskMatrix(_Request, tag="matrix", frozen=True, kw_only=True):
    """Expected one-way latency between hosts now, in milliseconds; null where nothing gets through. A :class:`Matrix`."""

    rows: int | None = None
    """Only from the first so many hosts; to all."""


class Down(_Request, tag="down", frozen=True, kw_only=True):
    """End everything. Answered when nothing but the keeper is left."""


Request = Union[
    AskStatus, AwaitUp, Apply, AdjustLink, AdjustAccess, Control, Execute, SendSignal, ReadLogs, Watch, AskMatrix, Down
]


# -- answers ---------------------------------------------------------------------------------------------------------------


class Greeting(msgspec.Struct, frozen=True, kw_only=True):
    """First line of the keeper."""

    nearcast_wan: int
    """Version of this protocol."""

    name: str


class Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Last line about a request. ``id`` is -1 when the request could not even be read."""

    id: int
    error: str | None = None
    result: Any = None


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """One of several lines about a request."""

    id: int
    item: Any


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """How a program ended: its exit code, or the number of the signal that ended it, negative."""

    code: int


class Happening(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that happened, at ``at_s`` seconds after the keeper's start."""

    at_s: float
    kind: str
    """Of the WAN: ``state``, ``fallback``, ``limit``, ``ended`` (before it was up). Of a process: ``started``, ``ready``,
    ``exited``, ``failed``, ``stopped``, ``killed``, ``paused``, ``resumed``. ``event``, ``undone`` or ``problem``."""

    text: str
    """For people."""

    subject: str = ""
    """The process, host or site it is about."""


class HostStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A host now."""

    name: str
    site: str
    address: str
    """As it calls itself; in loopback mode every peer has another one for it."""

    up: bool
    """False after a crash, until it is restarted."""

    access: Conditions


class ProcessStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A process now."""

    name: str
    host: str
    state: ProcessState
    pid: int | None
    """In the WAN's own PID namespace: what programs inside see."""

    exit_code: int | None
    """Of the last end; negative is a signal."""

    starts: int
    since_s: float
    """When it came into this state, in seconds after the keeper's start."""

    command: tuple[str, ...]
    log: str
    """File with its output."""


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """What went through the network."""

    packets: int = 0
    bytes: int = 0
    lost: int = 0
    full: int = 0
    """Dropped because they would have waited longer for bandwidth than the queue allows."""

    unreachable: int = 0
    dropped: int = 0
    """Dropped because the router itself had no room or did not keep up: results are not to be trusted."""

    lateness_ms: float = 0.0
    """How much later than computed packets left the router, 99th percentile since the last look."""

    doubts: tuple[str, ...] = ()
    """Why what ran on this network should not be trusted, a sentence each."""

    connections: int = 0
    """Open relayed connections, in loopback mode."""


class WanStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about a running WAN."""

    name: str
    topology: str
    mode: str
    state: WanState
    error: str | None
    uptime_s: float
    started_s: float | None
    """When everything was ready and the clock of the events began, in seconds after the keeper's start."""

    hosts: tuple[HostStatus, ...]
    processes: tuple[ProcessStatus, ...]
    cuts: tuple[str, ...]
    pending_events: int
    limits: tuple[str, ...]
    """What this mode cannot show."""

    traffic: Traffic
    output: str
    """Directory of ``logs`` and ``data``."""


class Matrix(msgspec.Struct, frozen=True, kw_only=True):
    """One-way latencies in milliseconds: ``one_way_ms[i][j]`` is from host i to host j. It may be of the first hosts only."""

    hosts: tuple[str, ...]
    one_way_ms: tuple[tuple[float | None, ...], ...]


_REQUESTS: msgspec.json.Decoder[Request] = msgspec.json.Decoder(Request)
_ENCODER = msgspec.json.Encoder()


class RequestNumber(msgspec.Struct):
    """Just enough of a broken request to answer it."""

    id: int = -1


_NUMBERS = msgspec.json.Decoder(RequestNumber)


def decode_request(line: bytes) -> Request:
    """A request; raises ``msgspec.DecodeError`` (of which ``ValidationError`` is one kind) for anything else."""
    return _REQUESTS.decode(line)


def number_of(line: bytes) -> int:
    """The ``id`` of a line that is no valid request, or -1."""
    try:
        return _NUMBERS.decode(line).id
    except msgspec.DecodeError:
        return -1


def encode(message: msgspec.Struct) -> bytes:
    """One line."""
    return _ENCODER.encode(message) + b"\n"
