"""What a load process is told: which clients, when to begin, where to record. A JSON file."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from nearcast.errors import ConfigError
from nearcast.scenario.events import Move
from nearcast.scenario.files import load_scenario, resolve
from nearcast.scenario.scenario import Scenario

MAX_SPEC_BYTES = 64 * 1024 * 1024


class LoadSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One load process."""

    scenario: str | Scenario
    """The whole scenario, or the name or file of one: clients of other hosts are needed too, to know publishers by name."""

    host: str | None = None
    """The host whose clients run here; unset runs the clients of all hosts."""

    run: str = "load"
    """Name of the run in recorded events."""

    seed: int = 1
    """Schedules follow from it. All processes of a run have the same."""

    start_ns: int | None = None
    """When the scenario begins, on the shared clock; unset begins at once. One that comes too late says by how much."""

    meeting: str | None = None
    """A directory in which processes that are to begin together meet, instead of ``start_ns``: each makes ``HOST.ready`` in it
    and waits for the file ``start``, which holds ``start_ns`` (:func:`nearcast.load.meeting.start_together`)."""

    clock_offset_ns: int | None = None
    """What turns this machine's monotonic clock into the shared one (nanoseconds since 1970). Processes of one machine get the
    same from whoever starts them, and then agree to the nanosecond whatever happens to the wall clock; unset reads the wall
    clock once, which is as good as the machines' clocks agree."""

    moves: tuple[Move, ...] = ()
    """How hosts move, in the order of time: clients that roam go along."""

    addresses: dict[str, str] = {}
    """Addresses of brokers by host name, where the name itself does not resolve: ``address`` or ``address:port``."""

    events: str | None = None
    """Directory to record events in; unset records none."""

    seconds_per_file: float = 10.0
    """How long a file of events is written to: what a process that is killed loses at most."""

    late_ms: float = 10.0
    """A message sent so much later than due counts as late."""


class SharedClock:
    """Nanoseconds since 1970 that never jump: the monotonic clock, moved."""

    def __init__(self, offset_ns: int | None = None) -> None:
        self.offset_ns = clock_offset_ns() if offset_ns is None else offset_ns

    def now_ns(self) -> int:
        return time.monotonic_ns() + self.offset_ns


def clock_offset_ns() -> int:
    """What makes the monotonic clock show the time that the wall clock shows now."""
    return time.time_ns() - time.monotonic_ns()


def read_spec(path: str | Path) -> LoadSpec:
    """The specification in a file, with its scenario loaded and checked."""
    location = str(path)
    try:
        with Path(path).open("rb") as file:
            content = file.read(MAX_SPEC_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read the load's specification: {error.strerror}", path=location) from error
    if len(content) > MAX_SPEC_BYTES:
        raise ConfigError("cannot be a load's specification: larger than 64 MiB", path=location)
    try:
        spec = msgspec.json.decode(content, type=LoadSpec)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"not a load's specification: {error}", path=location) from error
    if isinstance(spec.scenario, str):
        scenario = load_scenario(spec.scenario)
    else:
        scenario = resolve(spec.scenario)
    return msgspec.structs.replace(spec, scenario=scenario)
