"""One scenario, one seed, one run: build the world, let it run, say what came of it.

A run is not traced. One that fails is run again with a tracer, which must end in the same way at the same event: the same code
with the same seed has no other choice unless something in it is not determined by the seed, and then that is the finding.
"""

from __future__ import annotations

import contextlib
import gc
import json
import numbers
import random
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from nearcast.errors import ConfigError, InvariantViolated, NearcastError
from nearcast.scenario.assembly import build_network
from nearcast.scenario.expansion import topology_of
from nearcast.scenario.scenario import Scenario
from nearcast.scenario.timeline import timeline
from nearcast.simulation.faults import describe
from nearcast.simulation.invariants import Invariant
from nearcast.simulation.protocols import load_protocol
from nearcast.simulation.segments import HEADER_BYTES
from nearcast.simulation.stories import Story, tell
from nearcast.simulation.tracing import Line, Tracer
from nearcast.simulation.world import World

Progress = Callable[[float, int], None]
"""Told now and then: the virtual time reached, and how many events that took."""

MAX_KEPT_LINES = 400_000
"""Of a story, over all hosts: with very many of them each keeps fewer."""

_SLICES = 100


class Violation(msgspec.Struct, frozen=True, kw_only=True):
    """What did not hold, and when."""

    kind: str
    """Name of the exception: ``InvariantViolated``, ``NodeFailed``, or one of the protocol's own."""

    message: str
    at_s: float
    hosts: tuple[str, ...]


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a run."""

    scenario: str
    seed: int
    virtual_s: float
    wall_s: float
    cpu_s: float
    """Seconds of one core; less than ``wall_s`` on a machine that has other things to do."""

    events: int
    digest: str
    """Hash of every event: the same for the same run, wherever and however often."""

    faults: tuple[str, ...]
    """What went wrong on purpose, in words; the position is the number that ``--only`` takes."""

    applied: tuple[int, ...]
    """Numbers of the faults that were in this run: all, unless it was asked for fewer."""

    violation: Violation | None
    figures: dict[str, Any]
    network: dict[str, int]
    checkpoints: tuple[tuple[float, int, int], ...] = ()
    story: Story | None = None

    @property
    def ok(self) -> bool:
        return self.violation is None


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What a run may be asked for beside its seed."""

    directory: str | None = None
    """Where the scenario's file is; a protocol's path may be relative to it."""

    only: tuple[int, ...] | None = None
    """Numbers of the faults to apply; None applies all."""

    max_events: int = 2_000_000_000


def simulate(
    scenario: Scenario,
    seed: int = 1,
    options: Options = Options(),  # noqa: B008 - frozen
    *,
    tracer: Tracer | None = None,
    progress: Progress | None = None,
    observers: Sequence[Invariant] = (),
) -> Outcome:
    """Run a scenario (with its topology loaded) once. A violated invariant is part of the outcome, not an exception.

    ``observers`` see what the protocol's own invariants see: to record a run, or to hold it to more."""
    began, began_cpu = time.perf_counter(), time.process_time()
    topology = topology_of(scenario)
    with _blamed(scenario.protocol):
        protocol = load_protocol(scenario.protocol, None if options.directory is None else Path(options.directory))
    network, host_names = build_network(topology, random.Random(f"{seed}/network"))
    world = World(network, seed, tracer, host_names)
    world.segment_bytes = topology.mtu_bytes - HEADER_BYTES
    world.max_events = options.max_events
    with _blamed(scenario.protocol):
        world.invariants = [*_invariants(protocol.build(world, scenario), scenario.protocol), *observers]
    events = timeline(scenario, seed)
    applied = tuple(range(len(events))) if options.only is None else _chosen(options.only, len(events))
    for number in applied:
        world.schedule(events[number])
    end_s = scenario.duration_s + scenario.settle_s
    violation: Violation | None = None
    story: Story | None = None
    # Events are millions of small objects without cycles; looking for those often costs a tenth of the run.
    thresholds = gc.get_threshold()
    gc.set_threshold(max(thresholds[0], 100_000), *thresholds[1:])
    try:
        with _blamed(scenario.protocol):
            for slice_number in range(1, _SLICES + 1):
                world.run(end_s * slice_number / _SLICES)
                if progress is not None:
                    progress(world.now, world.events)
                if protocol.done():
                    break
            world.finish()
    except InvariantViolated as error:
        violation = Violation(kind=type(error).__name__, message=error.message, at_s=world.now, hosts=error.hosts)
        if tracer is not None:
            story = tell(tracer, [host.name for host in world.hosts], error, world.cause)
    finally:
        gc.set_threshold(*thresholds)
    with _blamed(scenario.protocol):
        figures = _figures(protocol.report(), scenario.protocol)
    outcome = Outcome(
        scenario=scenario.name,
        seed=seed,
        virtual_s=world.now,
        wall_s=time.perf_counter() - began,
        cpu_s=time.process_time() - began_cpu,
        events=world.events,
        digest=f"{world.digest:011x}",
        faults=tuple(f"{event.at_s:.6f} s {describe(event)}" for event in events),
        applied=applied,
        violation=violation,
        figures=figures,
        network={name: getattr(network, name) for name in ("packets", "bytes", "lost", "full", "unreachable", "duplicated")},
        checkpoints=tuple(world.checkpoints),
        story=story,
    )
    world.close()
    return outcome


def replay(
    scenario: Scenario,
    first: Outcome,
    options: Options = Options(),  # noqa: B008 - frozen
    *,
    sink: Callable[[Line], None] | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """The same run again, with the story of its end. ``difference`` tells whether it was the same."""
    hosts = len(topology_of(scenario).host_names())
    tracer = Tracer(max(20, min(200, MAX_KEPT_LINES // max(1, hosts))), sink)
    return simulate(scenario, first.seed, options, tracer=tracer, progress=progress)


def difference(first: Outcome, second: Outcome) -> str | None:
    """How two runs of one seed differ, in words; None if they do not."""
    if (first.digest, first.events, first.violation) == (second.digest, second.events, second.violation):
        for name in sorted({*first.figures, *second.figures}):
            one, other = (json.dumps(run.figures.get(name)) for run in (first, second))  # as text: nan is nan
            if one != other:
                return f"every event is the same, but the figure {name} is {one:.80} the first time, {other:.80} the second"
        return None
    before = 0.0
    for earlier, later in zip(first.checkpoints, second.checkpoints, strict=False):
        if earlier != later:
            return f"they part between {before:g} s and {earlier[0]:g} s of virtual time"
        before = earlier[0]
    ends = [
        f"{run.events:,} events, {'no violation' if run.violation is None else run.violation.message}"
        for run in (first, second)
    ]
    return f"they part after {before:g} s of virtual time: {ends[0]} the first time, {ends[1]} the second"


@contextlib.contextmanager
def _blamed(protocol: str) -> Iterator[None]:
    """What a protocol's own code lets out (nodes aside, which have a host to name) is said in one line, with its place."""
    try:
        yield
    except NearcastError:
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(frame.filename).name}:{frame.lineno}"
        raise NearcastError(f"the protocol {protocol} raised {type(error).__name__}: {error} ({place})") from error


def _invariants(built: object, protocol: str) -> list[Invariant]:
    if not isinstance(built, list | tuple) or not all(isinstance(each, Invariant) for each in built):
        raise ConfigError(f"`protocol`: build() of {protocol} must return a list of invariants, [] if there are none")
    return list(built)


def _figures(reported: object, protocol: str) -> dict[str, Any]:
    """What a protocol reports as plain data, whatever kinds of numbers it computed with."""
    try:
        figures = msgspec.to_builtins(reported, str_keys=True, enc_hook=_number)
        json.dumps(figures)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"`protocol`: report() of {protocol} must return plain numbers, texts and lists: {error}") from error
    if not isinstance(figures, dict):
        raise ConfigError(f"`protocol`: report() of {protocol} must return a dictionary of figures")
    return figures


def _number(value: object) -> int | float:
    """NumPy's numbers, and others that are registered as such."""
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    raise TypeError(f"{type(value).__name__} is none of these")


def _chosen(only: Sequence[int], count: int) -> tuple[int, ...]:
    for number in only:
        if not 0 <= number < count:
            raise ConfigError(f"there is no fault {number}: this seed has {count} (numbers from 0)")
    return tuple(sorted(set(only)))
