"""One run of an experiment: its folder, and all that it finds.

Owns what is kept and when: ``figures.json`` is there from the beginning, marked incomplete, and is replaced as a whole, so
that a run that was interrupted or killed is recognised as such by whoever finds the folder. It refuses to know the terminal.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol

import msgspec
import numpy as np

from nearcast.errors import ConfigError, LocalProtocolError, NearcastError, StorageUnavailable
from nearcast.experiments.experiment import Bar, Experiment, P, Parameters
from nearcast.experiments.machine import Usage, facts, versions

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Progress(Protocol):
    """Who is told how far a run is."""

    def step(self, text: str) -> None:
        """Another part of it begins."""

    def advance(self, share: float) -> None:
        """So much of this part is done, 0 to 1."""


class Silent:
    """Nobody is told."""

    def step(self, text: str) -> None:
        pass

    def advance(self, share: float) -> None:
        pass


class ResultTable(msgspec.Struct, frozen=True, kw_only=True):
    """Figures that are read side by side; printed at the end of a run."""

    title: str
    columns: list[str]
    """Their units are part of their names."""

    rows: list[list[str | float | int | None]]
    """None where there is nothing to say."""


class Outcome(msgspec.Struct, kw_only=True):
    """What a run found; ``figures.json``, and what ``--json`` prints."""

    experiment: str
    parameters: Parameters
    quick: bool
    figures: dict[str, Any]
    bars: list[Bar]
    ok: bool = False
    """Complete, and every bar holds."""

    complete: bool = False
    """False: interrupted or failed (``error``), and the figures are those until then."""

    error: str | None = None
    tables: list[ResultTable] = msgspec.field(default_factory=list)
    notes: list[str]
    """What qualifies the figures."""

    plots: list[str]
    """Files, relative to the folder."""

    events: list[str]
    """Directories of recorded events, relative to the folder."""

    command: str
    folder: str | None = None
    """None when it could not even begin."""

    started: str
    elapsed_s: float = 0.0
    versions: dict[str, str]
    machine: dict[str, Any]


class Run(Generic[P]):
    """What an experiment works with while it runs."""

    def __init__(self, parameters: P, folder: Path, outcome: Outcome, progress: Progress) -> None:
        self.parameters = parameters
        self.folder = folder
        self._outcome = outcome
        self._progress = progress

    @property
    def quick(self) -> bool:
        return self._outcome.quick

    def step(self, text: str) -> None:
        """Another part of the run begins; also the moment at which what was found so far is written."""
        self._progress.step(text)
        self.save()

    def advance(self, share: float) -> None:
        """So much of this part is done, 0 to 1."""
        self._progress.advance(share)

    def figure(self, name: str, value: Any) -> None:
        """Keep a figure: a number, text, or lists and dictionaries of them. Anything else is a defect, found here and not when
        everything is written at the end."""
        self._outcome.figures[name] = msgspec.to_builtins(value, enc_hook=_plain, str_keys=True)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str | float | None]]) -> None:
        """Keep a table that is worth printing."""
        plain = msgspec.to_builtins([list(row) for row in rows], enc_hook=_plain)
        self._outcome.tables.append(ResultTable(title=title, columns=list(columns), rows=plain))

    def measured(self, bar: str, value: float | None) -> None:
        """Give a bar its value."""
        for number, known in enumerate(self._outcome.bars):
            if known.name == bar:
                self._outcome.bars[number] = known.measured(value)
                return
        raise LocalProtocolError(f"{self._outcome.experiment} declared no bar {bar!r}")

    def note(self, text: str) -> None:
        """Something that qualifies the figures and must not be overlooked."""
        if text not in self._outcome.notes:
            self._outcome.notes.append(text)

    def keep(self, name: str, value: Any) -> Path:
        """Write data beside the figures, as JSON: a scenario, a trace."""
        path = self.folder / name
        with _storage(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        _write_whole(path, msgspec.json.format(to_json(value)))
        return path

    def directory(self, name: str) -> Path:
        """A directory in the folder, for logs and the like."""
        path = self.folder / name
        with _storage(path):
            path.mkdir(parents=True, exist_ok=True)
        return path

    def events(self, name: str) -> Path:
        """A directory for recorded events (:class:`nearcast.recording.EventWriter`)."""
        relative = f"events/{name}"
        if relative not in self._outcome.events:
            self._outcome.events.append(relative)
        return self.directory(relative)

    def name_of(self, name: str) -> str:
        """What this part of the run is called in its recorded events: folders of several runs may be read together."""
        return f"{self.folder.absolute().name}/{name}"

    def new_events(self, name: str) -> Path:
        """The same for a runtime that fills it: nothing may be there yet, so that each part of a run has events of its own."""
        directory = self.events(name)
        if any(directory.iterdir()):
            raise LocalProtocolError(f"events/{name} holds events already: give each part of a run a name of its own")
        return directory

    @contextlib.contextmanager
    def plot(self, name: str, title: str, x: str, y: str) -> Iterator[Axes]:
        """Draw something; it is saved as ``plots/NAME.png`` afterwards."""
        from nearcast.experiments import plots

        path = self.directory("plots") / f"{name}.png"
        with plots.saved(path, title, x, y) as axes:
            yield axes
        self._outcome.plots.append(f"plots/{name}.png")

    def save(self) -> None:
        """Write ``figures.json``."""
        _write_whole(self.folder / "figures.json", msgspec.json.format(to_json(self._outcome)))


def to_json(value: Any) -> bytes:
    """JSON, of NumPy's numbers and arrays too. What JSON has no word for (infinity, not a number) is null."""
    return msgspec.json.encode(value, enc_hook=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise NotImplementedError(f"{type(value).__name__} has no place in figures: use numbers, text, lists and dictionaries")


def default_folder(name: str, now: datetime | None = None) -> Path:
    """``experiments/NAME-<time>``, new: a second run in the same second gets another name."""
    moment = (now or datetime.now(UTC)).strftime("%Y%m%dT%H%M%SZ")
    folder = Path("experiments") / f"{name}-{moment}"
    number = 1
    while folder.exists():
        number += 1
        folder = Path("experiments") / f"{name}-{moment}-{number}"
    return folder


def perform(
    experiment: Experiment[P],
    parameters: P,
    folder: Path,
    *,
    command: str = "",
    quick: bool = False,
    progress: Progress | None = None,
) -> Outcome:
    """Run an experiment. What can go wrong while it runs is in the outcome, not raised; only a defect is raised, after what
    is there was kept. Ctrl-C (``KeyboardInterrupt``) ends it early, as incomplete."""
    usage = Usage()
    began = time.monotonic()
    outcome = Outcome(
        experiment=experiment.name,
        parameters=parameters,
        quick=quick,
        figures={},
        bars=list(experiment.bars(parameters)),
        notes=[],
        plots=[],
        events=[],
        command=command,
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=versions(),
        machine=facts(),
    )
    try:
        experiment.check(parameters)
    except NearcastError as error:
        outcome.error = _line(error)
        return outcome
    _new_folder(folder)
    outcome.folder = str(folder)
    run = Run(parameters, folder, outcome, progress or Silent())
    run.save()
    try:
        _write_whole(folder / "command.txt", command.encode())
        experiment.run(run)
        outcome.complete = True
    except KeyboardInterrupt:
        outcome.error = "interrupted"
    except NearcastError as error:
        outcome.error = _line(error)
    except BaseException as error:
        # A task group wraps what went wrong in one of its tasks.
        purposeful = _purposeful(error)
        if purposeful is None:
            outcome.error = f"internal error: {error!r}"
            raise
        outcome.error = _line(purposeful)
    finally:
        outcome.elapsed_s = round(time.monotonic() - began, 3)
        outcome.ok = outcome.complete and all(bar.ok for bar in outcome.bars)
        outcome.machine |= usage.since()
        for note in usage.notes():
            run.note(note)
        run.save()
    return outcome


def _purposeful(error: BaseException) -> NearcastError | None:
    """The first error made on purpose inside a group of exceptions."""
    if isinstance(error, BaseExceptionGroup):
        return next((found for inner in error.exceptions if (found := _purposeful(inner)) is not None), None)
    return error if isinstance(error, NearcastError) else None


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def _new_folder(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is not empty: results of two runs do not mix; name another folder with --out")
    with _storage(folder):
        folder.mkdir(parents=True, exist_ok=True)


@contextlib.contextmanager
def _storage(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageUnavailable(str(path), f"cannot be written: {error.strerror}; name another folder with --out") from error


def _write_whole(path: Path, data: bytes) -> None:
    """The new content or the old, never half of it."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with _storage(path):
        try:
            aside.write_bytes(data + b"\n")
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)


def missed(outcome: Outcome) -> Sequence[Bar]:
    """The bars that do not hold."""
    return [bar for bar in outcome.bars if not bar.ok]
