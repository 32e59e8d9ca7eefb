"""The simulator as a sweep's function: ``nearcast pipeline run sweep --function nearcast.experiments.sweeping:simulate``.

A point names a ``scenario`` (a ready-made one, or a file) and, if it wants, ``duration_s``; every other parameter is a place
inside the scenario: ``brokers.0.durable``, ``settings.retries``, ``topology.links.0.loss``. What the run reports are the
figures; a violated invariant is a failure of that point, with the seed to see it again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from nearcast.errors import ConfigError, InvariantViolated, NearcastError
from nearcast.scenario.files import load_scenario, resolve
from nearcast.scenario.scenario import Scenario
from nearcast.simulation.runs import Options
from nearcast.simulation.runs import simulate as run_simulation

_OWN = ("scenario",)


class Simulate:
    """Runs a scenario in virtual time; what it returns follows from the parameters and the seed alone."""

    def __init__(self, scenarios: Mapping[str, tuple[Scenario, str | None]] | None = None) -> None:
        self._scenarios = dict(scenarios or {})

    def prepare(self, combinations: Iterable[Mapping[str, Any]]) -> Simulate:
        """The same with all scenarios loaded and checked, here, once: executors have no such files."""
        return Simulate({_key(parameters): _scenario(parameters) for parameters in combinations})

    def __call__(self, parameters: Mapping[str, Any], seed: int) -> dict[str, Any]:
        loaded = self._scenarios.get(_key(parameters))
        scenario, directory = loaded if loaded is not None else _scenario(parameters)
        outcome = run_simulation(scenario, seed, Options(directory=directory))
        if outcome.violation is not None:
            violation = outcome.violation
            raise InvariantViolated(f"after {violation.at_s:.3f} s: {violation.message}", violation.hosts)
        return {
            "events": outcome.events,
            "virtual_s": outcome.virtual_s,
            "cpu_s": outcome.cpu_s,
            "faults": len(outcome.applied),
            "digest": outcome.digest,
            **outcome.figures,
            "network": outcome.network,
        }


simulate = Simulate()


def _key(parameters: Mapping[str, Any]) -> str:
    return json.dumps(parameters, sort_keys=True)


def _scenario(parameters: Mapping[str, Any]) -> tuple[Scenario, str | None]:
    """The scenario that the parameters describe, and the directory that its own files are relative to."""
    name = parameters.get("scenario")
    if not isinstance(name, str):
        raise ConfigError("the parameter `scenario` is missing: --set scenario=mqtt (`nearcast simulate --list` shows them)")
    scenario = load_scenario(name)
    directory = str(Path(name).absolute().parent) if Path(name).is_file() else None
    changes = {place: value for place, value in parameters.items() if place not in _OWN}
    if not changes:
        return scenario, directory
    plain = _changeable(msgspec.to_builtins(scenario))
    for place, value in changes.items():
        _put(plain, place, value)
    try:
        return resolve(msgspec.convert(plain, Scenario)), directory
    except msgspec.ValidationError as error:
        raise ConfigError(f"scenario {name} with {', '.join(changes)}: {error}") from None
    except NearcastError as error:
        raise ConfigError(f"scenario {name} with {', '.join(changes)}: {error}") from None


def _changeable(plain: Any) -> Any:
    """The same with lists in place of tuples."""
    if isinstance(plain, dict):
        return {key: _changeable(value) for key, value in plain.items()}
    if isinstance(plain, (list, tuple)):
        return [_changeable(value) for value in plain]
    return plain


def _put(plain: Any, place: str, value: Any) -> None:
    """Replace what is at a dotted place; the last step may be a key that is not there yet, all others lead somewhere."""
    *steps, last = place.split(".")
    here = plain
    for step in steps:
        here = _step(here, step, place)
    if isinstance(here, list):
        _step(here, last, place)
        here[int(last)] = value
    elif isinstance(here, dict):
        here[last] = value
    else:
        raise ConfigError(f"a scenario has nothing at {place}")


def _step(here: Any, step: str, place: str) -> Any:
    try:
        return here[int(step)] if isinstance(here, list) else here[step]
    except (KeyError, IndexError, ValueError, TypeError):
        there = ", ".join(here) if isinstance(here, dict) else f"0 to {len(here) - 1}" if isinstance(here, list) else "nothing"
        raise ConfigError(f"a scenario has nothing at {place}: instead of {step}, there is {there}") from None
