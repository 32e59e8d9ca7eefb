"""Topologies and scenarios by name or from TOML files. Errors name the file, the line and the key.

The ready-made ones are files like anybody's, in ``ready/topologies`` and ``ready/scenarios`` beside this module.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import msgspec

from nearcast.configfile import Document
from nearcast.errors import ConfigError
from nearcast.scenario.checks import Problem, scenario_problems, topology_problems
from nearcast.scenario.expansion import expand_processes
from nearcast.scenario.movement import Trace
from nearcast.scenario.rules import shown
from nearcast.scenario.scenario import Scenario
from nearcast.scenario.topology import Topology

_READY = Path(__file__).parent / "ready"

Description = TypeVar("Description", Topology, Scenario)


def ready_topologies() -> list[str]:
    """Names of the ready-made topologies."""
    return _names("topologies")


def ready_scenarios() -> list[str]:
    """Names of the ready-made scenarios."""
    return _names("scenarios")


def load_topology(name_or_path: str | Path) -> Topology:
    """A ready-made topology by its name, or one from a file."""
    return _topology(_locate(name_or_path, "topology", "topologies"))


def load_scenario(name_or_path: str | Path) -> Scenario:
    """A ready-made scenario by its name, or one from a file. Its ``topology`` is one afterwards, never a name."""
    path = _locate(name_or_path, "scenario", "scenarios")
    document = Document.read(path, "the scenario")
    if "sites" in document.data:
        raise document.refusal(("sites",), "this is a topology, not a scenario: a scenario names its `topology`")
    scenario = document.convert(Scenario)
    if isinstance(scenario.topology, Topology):
        topology = scenario.topology
        _refuse(document, (Problem(("topology", *problem.steps), problem.message) for problem in topology_problems(topology)))
        topology = _finished(topology, path.parent)
    else:
        topology = _referred(scenario.topology, document, path.parent)
    _refuse(document, scenario_problems(scenario, topology))
    mobility = tuple(
        msgspec.structs.replace(entry, file=str(path.parent / entry.file)) if isinstance(entry, Trace) else entry
        for entry in scenario.mobility
    )
    return msgspec.structs.replace(scenario, topology=topology, mobility=mobility)


def resolve(scenario: Scenario, directory: str | Path = ".") -> Scenario:
    """A scenario made in Python, checked, with a topology that was only named now loaded."""
    if isinstance(scenario.topology, str):
        named = scenario.topology
        topology = load_topology(named if named in ready_topologies() else Path(directory) / named)
    else:
        for problem in topology_problems(scenario.topology):
            raise Problem(("topology", *problem.steps), problem.message).error()
        topology = expand_processes(scenario.topology)
    for problem in scenario_problems(scenario, topology):
        raise problem.error()
    return msgspec.structs.replace(scenario, topology=topology)


def _topology(path: Path) -> Topology:
    document = Document.read(path, "the topology")
    if "topology" in document.data:
        raise document.refusal(("topology",), "this is a scenario, not a topology: a topology has `sites` itself")
    topology = document.convert(Topology)
    _refuse(document, topology_problems(topology))
    return _finished(topology, path.parent)


def _referred(named: str, document: Document, directory: Path) -> Topology:
    if named in ready_topologies():
        return load_topology(named)
    path = directory / named
    if not path.is_file():
        message = _no_such(named, "topology", "topologies")
        raise document.refusal(("topology",), f"`topology`: {message}")
    return _topology(path)


def _refuse(document: Document, problems: Iterable[Problem]) -> None:
    for problem in problems:
        raise document.refusal(problem.steps, problem.message)


def _finished(topology: Topology, directory: Path) -> Topology:
    """The same topology with its file names made relative to the current directory instead of the file's, and its processes
    each on one host."""
    topology = expand_processes(topology)
    if topology.model is None or topology.model.file is None:
        return topology
    model = msgspec.structs.replace(topology.model, file=str(directory / topology.model.file))
    return msgspec.structs.replace(topology, model=model)


def _names(folder: str) -> list[str]:
    return sorted(path.stem for path in (_READY / folder).glob("*.toml"))


def _locate(name_or_path: str | Path, what: str, folder: str) -> Path:
    """The file of a ready-made description, or the path itself. A name wins over a file of that name in the current directory,
    so that the same command means the same everywhere."""
    if str(name_or_path) in _names(folder):
        return _READY / folder / f"{name_or_path}.toml"
    path = Path(name_or_path)
    if not path.exists() and path.suffix != ".toml" and len(path.parts) == 1:
        raise ConfigError(_no_such(str(name_or_path), what, folder))
    return path


def _no_such(name: str, what: str, folder: str) -> str:
    other, others = ("scenario", "scenarios") if folder == "topologies" else ("topology", "topologies")
    if name in _names(others):
        how = "; name it in a scenario: `topology = " + f'"{name}"`' if other == "topology" else ""
        return f"{shown(name)} is a ready-made {other}, not a {what}{how}"
    ready = _names(folder)
    near = difflib.get_close_matches(name, ready, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"ready-made are {', '.join(ready)}"
    return f"no {what} {shown(name)}: neither ready-made nor a file; {hint}"
