"""Code of users: modules by name, files by path. Loads it and finds functions in it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from nearcast.errors import PipelineError
from nearcast.pipeline.failures import user_error


def load_file(path: Path) -> ModuleType:
    """Run a user's file as a module. Imports find the files beside it, as they would for a script.

    Its functions travel to executors by value: they have no such file.
    """
    if not path.is_file():
        raise PipelineError(f"there is no file {path}")
    directory = str(path.absolute().parent)
    if directory not in sys.path:
        sys.path.insert(0, directory)
    name = path.stem if path.stem.isidentifier() and not _is_known(path.stem) else f"nearcast_user_{abs(hash(str(path)))}"
    specification = importlib.util.spec_from_file_location(name, path.absolute())
    if specification is None or specification.loader is None:
        raise PipelineError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module
    try:
        specification.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise user_error(error, path) from error
    _pickle_by_value(module)
    return module


def load_function(place: str) -> Callable[..., Any]:
    """The function that ``module:function`` or ``file.py:function`` names."""
    where, colon, name = place.rpartition(":")
    if not colon or not where or not name:
        raise PipelineError(f"{place!r} names no function: write package.module:function or file.py:function")
    if where.endswith(".py"):
        module = load_file(Path(where))
    else:
        try:
            module = importlib.import_module(where)
        except ImportError as error:
            raise PipelineError(f"cannot import {where}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        named = sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        there = f"; it has {', '.join(named[:10])}" if named else ""
        raise PipelineError(f"{where} has no function {name}{there}")
    return function  # type: ignore[no-any-return]


def _is_known(name: str) -> bool:
    """Whether a module of this name exists already, which the user's file must not replace."""
    if name in sys.modules:
        return not getattr(sys.modules[name], "__nearcast_user__", False)
    return name in sys.stdlib_module_names


def _pickle_by_value(module: ModuleType) -> None:
    from pyspark import cloudpickle

    module.__dict__["__nearcast_user__"] = True
    cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]
