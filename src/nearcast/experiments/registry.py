"""The experiments there are, by name. A line here is all that a new module needs.

``package.module:Class`` names one that is not in the list: yours.
"""

from __future__ import annotations

import difflib
import importlib
from typing import Any

from nearcast.errors import ConfigError
from nearcast.experiments.experiment import Experiment

EXPERIMENTS: dict[str, str] = {
    "simulator-scale": "nearcast.experiments.simulator_scale:SimulatorScale",
    "wan-accuracy": "nearcast.experiments.wan_accuracy:WanAccuracy",
    "agreement": "nearcast.experiments.agreement:Agreement",
    "emma": "nearcast.experiments.emma:Emma",
    "groups": "nearcast.experiments.groups:Groups",
    "iov": "nearcast.experiments.iov:Iov",
    "tradeoff": "nearcast.experiments.tradeoff:Tradeoff",
    "group-rules": "nearcast.experiments.group_rules:GroupRules",
    "coordinates": "nearcast.experiments.coordinates:Coordinates",
    "selection": "nearcast.experiments.selection:Selection",
    "monitoring": "nearcast.experiments.monitoring:Monitoring",
    "migration": "nearcast.experiments.migration:Migration",
    "uav": "nearcast.experiments.uav:Uav",
    "mmog": "nearcast.experiments.mmog:Mmog",
    "canal-failover": "nearcast.experiments.canal_failover:CanalFailover",
    "canal-availability": "nearcast.experiments.canal_availability:CanalAvailability",
}


def find(name: str) -> Experiment[Any]:
    """The experiment of this name."""
    place = EXPERIMENTS.get(name, name)
    module_name, colon, class_name = place.partition(":")
    if not (colon and class_name and module_name and not module_name.startswith(".")):
        near = difflib.get_close_matches(name, EXPERIMENTS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(EXPERIMENTS)}"
        raise ConfigError(f"no experiment is called {name}; {hint}")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(f"no experiment {name}: Python finds no module {error.name}; is it on PYTHONPATH?") from None
    found = getattr(module, class_name, None)
    if not (isinstance(found, type) and issubclass(found, Experiment)):
        raise ConfigError(f"no experiment {name}: {module_name} has no subclass of Experiment called {class_name}")
    return found()


def everything() -> list[Experiment[Any]]:
    """All experiments of the list, in its order."""
    return [find(name) for name in EXPERIMENTS]
