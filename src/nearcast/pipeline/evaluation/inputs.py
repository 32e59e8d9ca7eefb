"""What is evaluated: files of recorded events, checked before Spark sees them, and what their folder knows about the run.

Owns finding files, refusing those that cannot be used, and telling runs apart. A path is a file, a directory of files, or the
folder of an experiment (or of ``nearcast wan up --out``), whose scenario and command are read too.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from nearcast.errors import ConfigError, PipelineError, StorageCorrupt
from nearcast.recording import Recorded, describe, files
from nearcast.scenario.scenario import Scenario

_LEVELS_ABOVE = 3
"""How far above a directory of events its folder may be: FOLDER/events/PART."""

_MAX_JSON_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True)
class Folder:
    """What the folder of a run says beside its events."""

    path: Path
    scenario: Scenario | None = None
    seed: int = 1
    command: str = ""
    strategy: str | None = None
    complete: bool = True


@dataclass(frozen=True)
class RecordedRun:
    """The events of one run."""

    name: str
    """What it is called in results: its recorded name, with its folder's before it where two have the same."""

    recorded: str
    """Its name in its events."""

    files: tuple[Path, ...]
    file_rows: tuple[int, ...]
    folder: Folder | None

    @property
    def rows(self) -> int:
        return sum(self.file_rows)

    @property
    def part(self) -> str:
        """Of an experiment's run, which of its directories of events."""
        return self.recorded.rpartition("/")[2]


@dataclass
class Inputs:
    """Everything that was found."""

    runs: list[RecordedRun]
    notes: list[str] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return sum(run.rows for run in self.runs)


def find_inputs(paths: Sequence[str | Path], *, skip_damaged: bool = False) -> Inputs:
    """Look at every file's end: version, columns, run, rows. Raises what a user can do something about."""
    if not paths:
        raise ConfigError("name the folder of a run, or files of recorded events")
    notes: list[str] = []
    found: dict[tuple[Path, str], list[Recorded]] = defaultdict(list)
    taken: set[Path] = set()
    for given in paths:
        source = Path(given)
        listed = [path for path in _event_files(source, notes) if path.resolve() not in taken]
        taken.update(path.resolve() for path in listed)
        for recorded in _described(listed, notes, skip_damaged=skip_damaged):
            found[_root(source), recorded.run].append(recorded)
    runs = list(_runs(found))
    if not runs:
        where = ", ".join(map(str, paths))
        raise PipelineError(
            f"{where}: no recorded events; a run records them when it is asked to (docs/reference/recording.md)"
        )
    if not sum(run.rows for run in runs):
        raise PipelineError(f"{', '.join(map(str, paths))}: the files hold no events")
    return Inputs(runs, notes)


def _event_files(source: Path, notes: list[str]) -> list[Path]:
    if source.is_file():
        return [source]
    if not source.is_dir():
        raise ConfigError(f"{source}: there is no such file or directory")
    # Beside its events a folder may hold other Parquet files: what this job made of it, for one.
    directory = source / "events" if (source / "events").is_dir() else source
    unfinished = [path for path in directory.rglob(".*.parquet") if path.is_file()]
    if unfinished:
        notes.append(f"{directory}: {len(unfinished)} unfinished files are left out; their writers run still, or were killed")
    evaluated = {path.parent for path in directory.rglob("report.html")}
    return [path for path in files(directory) if path.is_file() and not evaluated.intersection(path.parents)]


def _described(paths: Sequence[Path], notes: list[str], *, skip_damaged: bool) -> Iterator[Recorded]:
    def one(path: Path) -> Recorded | StorageCorrupt:
        try:
            return describe(path)
        except StorageCorrupt as error:
            return error

    with ThreadPoolExecutor(min(8, (os.cpu_count() or 1) * 4)) as pool:
        for result in pool.map(one, paths):
            if isinstance(result, Recorded):
                yield result
            elif skip_damaged:
                notes.append(f"left out: {result}")
            else:
                raise PipelineError(f"{result}; remove it, or leave it out with --skip-damaged") from result


def _root(source: Path) -> Path:
    """The folder that tells apart runs of the same name: the one that was named, without ``events``."""
    path = source.absolute()
    path = path.parent if path.is_file() else path
    for parent in (path, *path.parents[:_LEVELS_ABOVE]):
        if parent.name == "events":
            return parent.parent
    return path


def _runs(found: dict[tuple[Path, str], list[Recorded]]) -> Iterator[RecordedRun]:
    names = [name for _, name in found]
    folders: dict[Path, Folder | None] = {}
    used: set[str] = set()
    for (root, recorded), parts in sorted(found.items()):
        if root not in folders:
            folders[root] = read_folder(root)
        name = recorded if names.count(recorded) == 1 else f"{root.name}/{recorded}"
        number = 1
        while name in used:
            number += 1
            name = f"{root.name}-{number}/{recorded}"
        used.add(name)
        yield RecordedRun(
            name, recorded, tuple(part.path for part in parts), tuple(part.rows for part in parts), folders[root]
        )


# -- folders ---------------------------------------------------------------------------------------------------------------


def read_folder(root: Path) -> Folder | None:
    """What a folder knows about its run; None when it is just a directory of files."""
    scenario, seed = _scenario(root)
    figures = _json(root / "figures.json")
    outcome = figures if isinstance(figures, dict) else {}
    parameters = outcome.get("parameters")
    parameters = parameters if isinstance(parameters, dict) else {}
    command = root / "command.txt"
    if scenario is None and not outcome and not command.is_file():
        return None
    strategy = parameters.get("strategy")
    if strategy is None and scenario is not None:
        strategy = scenario.settings.get("strategy")
    if isinstance(given := parameters.get("seed"), int):
        seed = given
    text = command.read_text(errors="replace").strip() if command.is_file() else str(outcome.get("command", ""))
    return Folder(
        path=root,
        scenario=scenario,
        seed=seed,
        command=text,
        strategy=None if strategy is None else str(strategy),
        complete=bool(outcome.get("complete", True)),
    )


def _scenario(root: Path) -> tuple[Scenario | None, int]:
    """The scenario that an experiment kept, or that a load was told."""
    for path in (root / "scenario.json", *sorted(root.glob("load/spec.json")), *sorted(root.glob("load/*/spec.json"))):
        content = _json(path)
        if not isinstance(content, dict):
            continue
        seed = content.get("seed", 1) if path.name == "spec.json" else 1
        described = content.get("scenario") if path.name == "spec.json" else content
        try:
            return msgspec.convert(described, Scenario), seed if isinstance(seed, int) else 1
        except (msgspec.ValidationError, ConfigError):
            continue  # a later version's, or somebody else's: sites and bounds can be given otherwise
    return None, 1


def _json(path: Path) -> Any:
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            return None
        return msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def strategies(runs: Iterable[RecordedRun], given: Sequence[str]) -> dict[str, str]:
    """The strategy of each run: given as ``LABEL`` for all or ``RUN=LABEL``, or what its folder says."""
    names = [run.name for run in runs]
    found = {run.name: run.folder.strategy or "" if run.folder is not None else "" for run in runs}
    for text in given:
        run, equals, label = text.rpartition("=")
        chosen = [name for name in names if not equals or name in (run, run.rstrip("/")) or name.startswith(f"{run}/")]
        if not chosen:
            raise ConfigError(f"--strategy {text}: there is no run {run!r}; there are {', '.join(names)}")
        found |= dict.fromkeys(chosen, label)
    return found
