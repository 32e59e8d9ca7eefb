"""A scenario in the simulator, in a process of its own: nothing else in it, so time and memory are the simulator's.

Owns what connects the simulator to experiments: the child process, and recorded events of simulated MQTT clients in the schema
of :mod:`nearcast.recording`. ``python -m nearcast.experiments.simulated SPEC`` is the child.
"""

from __future__ import annotations

import itertools
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import msgspec

from nearcast.errors import InvariantViolated, NearcastError
from nearcast.experiments.recorder import Recorder
from nearcast.experiments.run import Run
from nearcast.recording import EventWriter
from nearcast.scenario.scenario import Scenario
from nearcast.simulation.invariants import Invariant
from nearcast.simulation.runs import Violation, simulate

MAX_LAST_WORDS_BYTES = 4_096


class SimulationSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What the child process is told."""

    scenario: Scenario
    seed: int
    events: str | None = None
    run: str = "simulation"
    processed: bool = False
    """Whether brokers record what they process beside what clients see."""

    search_path: tuple[str, ...] = ()
    """Where to look for a protocol of somebody's own, after everything else: where we would find it."""


class SimulationResult(msgspec.Struct, frozen=True, kw_only=True):
    """What it answers."""

    events: int
    digest: str
    virtual_s: float
    wall_s: float
    """Building the world included."""

    events_per_second: float
    """While there is something to do: without building the world, the first hundredth of its time, and settling."""

    events_per_cpu_second: float
    pace: tuple[tuple[float, float], ...]
    """Virtual seconds, and events per second of the clock since the entry before."""

    peak_bytes: int
    """Most memory that the process ever had, the interpreter included."""

    violation: Violation | None
    figures: dict[str, Any]
    network: dict[str, int]


class _Mark(NamedTuple):
    """How far it was at a moment."""

    now_s: float
    wall_s: float
    cpu_s: float
    events: int


class _Line(msgspec.Struct):
    """A line of the child: how far it is, or what came of it."""

    share: float | None = None
    result: SimulationResult | None = None


def run_simulated(
    run: Run[Any], scenario: Scenario, seed: int, *, events: str | None = None, processed: bool = False
) -> SimulationResult:
    """Simulate a scenario (its topology loaded). ``events`` names the directory of recorded events; only of MQTT scenarios.
    With ``processed``, brokers record what they process beside what clients see.

    A violated invariant is an error here: an experiment measures what works.
    """
    directory = None if events is None else str(run.new_events(events).absolute())
    spec = SimulationSpec(
        scenario=scenario,
        seed=seed,
        events=directory,
        run=run.name_of(events or "simulation"),
        processed=processed,
        search_path=tuple(sys.path),
    )
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "simulation.json"
        path.write_bytes(msgspec.json.encode(spec))
        result = _child([sys.executable, "-P", "-m", "nearcast.experiments.simulated", str(path)], run)
    if result.violation is not None:
        raise InvariantViolated(
            f"in the simulator, after {result.violation.at_s:.3f} s: {result.violation.message}", result.violation.hosts
        )
    return result


def _child(command: list[str], run: Run[Any]) -> SimulationResult:
    result: SimulationResult | None = None
    # What it says beside its answers goes to a file: a pipe that nobody reads would hold it up.
    with (
        tempfile.TemporaryFile() as words,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=words, text=True) as process,  # noqa: S603
    ):
        try:
            if process.stdout is not None:
                for text in process.stdout:
                    line = msgspec.json.decode(text, type=_Line)
                    result = line.result or result
                    if line.share is not None:
                        run.advance(line.share)
            code = process.wait()
        finally:
            process.kill()
        words.seek(0)
        said = words.read()[-MAX_LAST_WORDS_BYTES:].decode(errors="replace").strip()
    if result is None or code != 0:
        last = said.rpartition("\n")[2] or f"exit code {code}"
        raise NearcastError(f"the simulator ended without a result: {last}")
    return result


def main(path: str) -> int:
    """The child."""
    spec = msgspec.json.decode(Path(path).read_bytes(), type=SimulationSpec)
    sys.path += [place for place in spec.search_path if place not in sys.path]
    end_s = spec.scenario.duration_s + spec.scenario.settle_s
    marks: list[_Mark] = []
    # A protocol of somebody's own may print; our answers go where they are expected.
    answers, sys.stdout = sys.stdout, sys.stderr

    def progress(now_s: float, events: int) -> None:
        marks.append(_Mark(now_s, time.perf_counter(), time.process_time(), events))
        _say(answers, _Line(share=now_s / end_s))

    observers: list[Invariant] = []
    writer = None
    if spec.events is not None:
        writer = EventWriter(spec.events, spec.run, source="simulation")
        observers.append(Recorder(spec.scenario, writer, processed=spec.processed))
    try:
        outcome = simulate(spec.scenario, spec.seed, progress=progress, observers=observers)
        if writer is not None:
            writer.close()
    except NearcastError as error:
        sys.stderr.write(" ".join(str(error).split()) + "\n")
        return 1
    busy = [mark for mark in marks if mark.now_s <= spec.scenario.duration_s]
    first, last = (busy[0], busy[-1]) if busy else (_Mark(0.0, 0.0, 0.0, 0),) * 2
    events = last.events - first.events
    result = SimulationResult(
        events=outcome.events,
        digest=outcome.digest,
        virtual_s=outcome.virtual_s,
        wall_s=round(outcome.wall_s, 3),
        events_per_second=round(events / max(1e-9, last.wall_s - first.wall_s), 1),
        events_per_cpu_second=round(events / max(1e-9, last.cpu_s - first.cpu_s), 1),
        pace=tuple(
            (round(later.now_s, 3), round((later.events - earlier.events) / max(1e-9, later.wall_s - earlier.wall_s), 1))
            for earlier, later in itertools.pairwise(busy)
        ),
        peak_bytes=_peak_bytes(),
        violation=outcome.violation,
        figures=outcome.figures,
        network=outcome.network,
    )
    _say(answers, _Line(result=result))
    return 0


def _peak_bytes() -> int:
    """Not from getrusage where it can be helped: a child's maximum there begins with what its parent had."""
    try:
        found = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:
        found = None  # not on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 if found is None else int(found.group(1)) * 1024


def _say(answers: TextIO, line: _Line) -> None:
    answers.write(msgspec.json.encode(line).decode() + "\n")
    answers.flush()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
