"""Compiles the hot modules with mypyc where that is possible. Everything else about the package is in pyproject.toml.

``hot-modules.txt`` lists the hot modules. They are ordinary Python: without a C compiler, with ``NEARCAST_COMPILE=0``
or when compiling fails, the package is built without extensions, says so in one line, and behaves the same, only slower.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools import Distribution, setup
from setuptools.command.build_ext import build_ext

PACKAGE = Path("src/nearcast")
HOT_PATTERNS = [line for line in Path("hot-modules.txt").read_text().splitlines() if line and not line.startswith("#")]
# One shared library holds the code of all hot modules; the others are shims that load it.
SHARED_LIBRARY = "nearcast_hot"


def reason_not_to_compile() -> str | None:
    """Why compiling is not even tried; None when it is."""
    if os.environ.get("NEARCAST_COMPILE") == "0":
        return "NEARCAST_COMPILE=0"
    candidates = [os.environ.get("CC"), sysconfig.get_config_var("CC"), "cc", "gcc", "clang"]
    if not any(shutil.which(shlex.split(candidate)[0]) for candidate in candidates if candidate):
        return "no C compiler found"
    return None


def hot_extensions() -> list[Any]:
    """Runs mypyc: type-checks the hot modules and writes their C."""
    from mypyc.build import mypycify

    found = {path for pattern in HOT_PATTERNS for path in PACKAGE.glob(pattern) if path.name != "__init__.py"}
    # One C file for each module, not one for all: half the time even on one core, and several cores share it.
    extensions = mypycify(sorted(map(str, found)), opt_level="3", debug_level="0", multi_file=True, group_name=SHARED_LIBRARY)
    for extension in extensions:
        # A fused multiply-add rounds once where Python rounds twice: a seed would not replay the same run compiled and plain.
        extension.extra_compile_args.append("-ffp-contract=off")
    return extensions


def built_files(root: Path) -> list[Path]:
    """Extension files of earlier builds under ``root``, those whose source is gone included."""
    return [*root.glob(f"{SHARED_LIBRARY}__mypyc*.so"), *(root / PACKAGE.name).rglob("*.so")]


class HotDistribution(Distribution):
    """Says that there are extensions before they are known: finding them takes mypyc seconds, and only building needs them."""

    def has_ext_modules(self) -> bool:
        return reason_not_to_compile() is None


class BuildHotModules(build_ext):
    """Builds the extensions, or none at all: a half-compiled package would mix two builds."""

    def run(self) -> None:
        root = Path("src") if self.inplace else Path(self.build_lib)
        # Also what an earlier build left: an extension hides its source, so one that is not rebuilt would run old code.
        self.remove_built(root)
        reason = reason_not_to_compile()
        if reason is None:
            reason = self.compile(root)
        if reason is not None:
            print(f"nearcast: hot modules stay uncompiled, several times slower: {reason}", file=sys.stderr)

    def compile(self, root: Path) -> str | None:
        """Returns what went wrong, if something did."""
        started = time.time()
        try:
            self.accept(hot_extensions())
            super().run()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - mypyc exits on type errors; any failure means "run plain"
            self.distribution.ext_modules = self.extensions = []
            self.remove_built(root)
            print(error)
            return "compiling failed: " + ("mypyc found errors" if isinstance(error, SystemExit) else type(error).__name__)
        # A source that was edited while we compiled must count as newer than its extension (nearcast.compiled compares).
        for path in built_files(root):
            os.utime(path, (started, started))
        return None

    def build_extensions(self) -> None:
        """Compiles several files at a time: those of the shared library, and the shims beside them."""
        self.parallel = os.cpu_count()
        compile_all = self.compiler.compile

        def compile_side_by_side(sources: list[str], **options: Any) -> list[str]:
            with ThreadPoolExecutor(self.parallel) as pool:
                objects = pool.map(lambda source: compile_all([source], **options), sources)
                return [path for made in objects for path in made]

        self.compiler.compile = compile_side_by_side
        super().build_extensions()

    def accept(self, extensions: list[Any]) -> None:
        """Starts the command anew with extensions that were not known when it was finalized."""
        self.distribution.ext_modules = extensions
        given = {name: getattr(self, name) for name in ("inplace", "editable_mode", "force")}
        self.initialize_options()
        vars(self).update(given)
        self.finalize_options()

    def remove_built(self, root: Path) -> None:
        for path in built_files(root):
            path.unlink()


setup(
    distclass=HotDistribution,
    cmdclass={"build_ext": BuildHotModules},
    ext_modules=[],
)
