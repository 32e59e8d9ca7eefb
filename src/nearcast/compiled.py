"""Whether the hot modules run compiled, and the one line to say when they do not.

Knows where Python would import the package from and nothing of what is in it: asking does not import a hot module.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
from pathlib import Path

_PACKAGE = "nearcast"
_WITNESS = "nearcast.mqtt.engine"


def origin() -> str | None:
    """The file the engine would be imported from; None where there is none."""
    spec = importlib.util.find_spec(_WITNESS)
    return spec.origin if spec is not None else None


def is_compiled() -> bool:
    """Whether the engine is an extension module."""
    found = origin()
    return found is not None and _is_extension(found)


def stale_sources() -> list[str]:
    """Hot sources of a checkout that changed after the extensions beside them were built, as file names.

    Installed packages have none: there, file times say when pip unpacked, not what was built from what.
    """
    package = importlib.util.find_spec(_PACKAGE)
    if package is None or package.origin is None:
        return []
    directory = Path(package.origin).parent
    if not (directory.parents[1] / "pyproject.toml").is_file():
        return []
    stale = []
    for extension in directory.rglob("*.so"):
        if not _is_extension(extension.name):
            continue
        source = extension.parent / (extension.name.partition(".")[0] + ".py")
        if not source.exists() or source.stat().st_mtime > extension.stat().st_mtime:
            stale.append(source.name)
    return sorted(stale)


def notice() -> str | None:
    """The line a program shows once when it does not run the compiled form of its current sources; None when it does."""
    if not is_compiled():
        return (
            "running uncompiled: the same behaviour at several times the CPU per message; "
            "install a C compiler and the Python headers, then run `make install` (or reinstall nearcast)"
        )
    stale = stale_sources()
    if stale:
        return f"running compiled modules older than their sources ({', '.join(stale)}): run `make install`"
    return None


def _is_extension(name: str) -> bool:
    return any(name.endswith(suffix) for suffix in importlib.machinery.EXTENSION_SUFFIXES)
