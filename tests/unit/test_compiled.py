"""The build under test is the one that was asked for, and a stale one is noticed."""

from __future__ import annotations

import importlib
import importlib.machinery
import os
import pkgutil
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import nearcast.mqtt
from nearcast import compiled

HOT_MODULES = sorted(module.name for module in pkgutil.iter_modules(nearcast.mqtt.__path__, "nearcast.mqtt."))
EXTENSION = importlib.machinery.EXTENSION_SUFFIXES[0]


@pytest.mark.parametrize("name", HOT_MODULES)
def test_hot_module_is_of_the_wanted_flavour(name: str) -> None:
    wanted = os.environ.get("NEARCAST_EXPECT")
    if wanted is None:
        pytest.skip("no flavour was asked for (NEARCAST_EXPECT)")
    file = importlib.import_module(name).__file__
    assert file is not None
    assert file.endswith(".py" if wanted == "plain" else ".so")


def test_notice_tells_the_flavour() -> None:
    if compiled.is_compiled():
        assert compiled.notice() is None
    else:
        assert "uncompiled" in (compiled.notice() or "")


def _checkout(directory: Path) -> Path:
    """A checkout with one hot module and something in the place of its extension, built after it; returns the hot package."""
    hot = directory / "src" / "nearcast" / "mqtt"
    hot.mkdir(parents=True)
    (directory / "pyproject.toml").touch()
    (hot / "__init__.py").touch()
    (hot.parent / "__init__.py").touch()
    shutil.copy(Path(__file__).parents[2] / "src" / "nearcast" / "compiled.py", hot.parent)
    for name, time in (("engine.py", 1_000), (f"engine{EXTENSION}", 2_000)):
        (hot / name).touch()
        os.utime(hot / name, (time, time))
    return hot


def _ask(hot: Path) -> list[str]:
    program = "from nearcast.compiled import *; print(is_compiled(), stale_sources(), notice(), sep='|')"
    environment = {"PYTHONPATH": str(hot.parents[1]), "PATH": os.defpath}
    # -S: no site-packages, so that the package under test is this one.
    done = subprocess.run([sys.executable, "-S", "-c", program], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.rstrip("\n").split("|")


def test_fresh_extension_is_not_stale(tmp_path: Path) -> None:
    assert _ask(_checkout(tmp_path)) == ["True", "[]", "None"]


def test_edited_source_makes_its_extension_stale(tmp_path: Path) -> None:
    hot = _checkout(tmp_path)
    os.utime(hot / "engine.py", (3_000, 3_000))
    is_compiled, stale, notice = _ask(hot)
    assert (is_compiled, stale) == ("True", "['engine.py']")
    assert "engine.py" in notice
    assert "make install" in notice


def test_extension_whose_source_is_gone_is_stale(tmp_path: Path) -> None:
    hot = _checkout(tmp_path)
    (hot / "engine.py").unlink()
    assert _ask(hot)[1] == "['engine.py']"


def test_installed_package_is_never_stale(tmp_path: Path) -> None:
    hot = _checkout(tmp_path)
    (tmp_path / "pyproject.toml").unlink()
    os.utime(hot / "engine.py", (3_000, 3_000))
    assert _ask(hot)[1] == "[]"
