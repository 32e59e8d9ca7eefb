"""Which protocol a scenario names: one of ours by name, or a class of the user's by where it is."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

from nearcast.errors import ConfigError
from nearcast.simulation.invariants import Protocol

BUILT_IN = {
    "chord": "nearcast.simulation.chord:Chord",
    "fabric": "nearcast.simulation.fabric:Fabric",
    "groups": "nearcast.simulation.groups:Groups",
    "mqtt": "nearcast.simulation.mqtt:Mqtt",
    "probes": "nearcast.simulation.probes:Probes",
}


def load_protocol(name: str, directory: Path | None = None) -> Protocol:
    """A new protocol object for one run.

    ``name`` is one of ours (:data:`BUILT_IN`), ``package.module:Class``, or ``path/to/file.py:Class`` with a path relative to
    ``directory`` (the scenario file's) or to the current one.
    """
    where = BUILT_IN.get(name, name)
    module_name, colon, class_name = where.rpartition(":")
    if not colon or not module_name or not class_name:
        known = ", ".join(sorted(BUILT_IN))
        raise ConfigError(f"`protocol`: {name} is neither {known} nor `package.module:Class` nor `path/to/file.py:Class`")
    module = _file(Path(module_name), directory) if module_name.endswith(".py") else _module(module_name)
    found = getattr(module, class_name, None)
    if found is None:
        raise ConfigError(f"`protocol`: {module_name} has no {class_name}")
    if not (isinstance(found, type) and issubclass(found, Protocol)):
        raise ConfigError(f"`protocol`: {where} must be a subclass of nearcast.simulation.Protocol")
    return found()


def _module(name: str) -> object:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"`protocol`: cannot import {name}: no module {error.name}") from error


def _file(path: Path, directory: Path | None) -> object:
    candidates = [path] if path.is_absolute() or directory is None else [directory / path, path]
    for candidate in candidates:
        if candidate.is_file():
            # By its place, so that two files of one name do not meet, and once, so that classes keep their identity.
            name = f"nearcast_protocol_{candidate.resolve().as_posix()}"
            if name in sys.modules:
                return sys.modules[name]
            spec = importlib.util.spec_from_file_location(name, candidate)
            if spec is None or spec.loader is None:
                break
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module
            try:
                spec.loader.exec_module(module)
            except Exception as error:  # the user's own code, whatever it raises
                del sys.modules[name]
                raise ConfigError(f"`protocol`: {candidate} cannot be loaded: {type(error).__name__}: {error}") from error
            return module
    raise ConfigError(f"`protocol`: there is no file {candidates[0]}")
