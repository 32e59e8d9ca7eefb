"""Writes the reference pages of files from the docstrings of the structs they are read into: one home for each setting.

``python scripts/config_reference.py`` rewrites the pages; ``--check`` only says whether they are up to date.
"""

from __future__ import annotations

import ast
import re
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src/nearcast"


@dataclass(frozen=True)
class Page:
    """One page: what it begins with, which modules its structs are in, and the TOML table each struct stands for."""

    path: str
    introduction: str
    modules: tuple[str, ...]
    tables: dict[str, str]
    parts: dict[str, str]
    """Headings above the section of a struct; where there are any, sections are one level lower."""


CONFIGURATION = Page(
    path="docs/reference/configuration.md",
    introduction="""# Configuration

`nearcast broker --config FILE` reads TOML. Every key is optional unless it says otherwise; unknown keys are refused.
This page is made from `src/nearcast/config.py` and `fabricconfig.py` by `scripts/config_reference.py`.
""",
    modules=("config.py", "fabricconfig.py"),
    tables={
        "BrokerConfig": "Top level",
        "Listener": "`[[listeners]]`",
        "Limits": "`[limits]`",
        "Security": "`[security]`",
        "AccessRule": "`[[security.acl]]`",
        "Persistence": "`[persistence]`",
        "TopicRule": "`[[topics]]`",
        "Retention": "`[topics.retention]`",
        "TopicLogSettings": "`[topic_log]`",
        "Observability": "`[observability]`",
        "Recording": "`[recording]`",
        "Fabric": "`[fabric]`",
        "TopicClass": "`[[fabric.classes]]`",
        "Groups": "`[fabric.groups]`",
        "Telemetry": "`[fabric.telemetry]`",
    },
    parts={},
)

CONTROLLER = Page(
    path="docs/reference/controller.md",
    introduction="""# The controller's configuration

`nearcast controller --config FILE` reads TOML; options of the command line go before it. Every key is optional, but that a
secret is needed; unknown keys are refused.

```toml
# controller.toml
[controller]
secret_file = "fabric.secret"
host = "0.0.0.0"
planner = "own"
executors = 16

[controller.placement]
high_watermark = 0.8
```

This page is made from `src/nearcast/controller/config.py` and `placement/topics.py` by `scripts/config_reference.py`.
""",
    modules=("controller/config.py", "placement/topics.py"),
    tables={"ControllerConfig": "`[controller]`", "PlacementSettings": "`[controller.placement]`"},
    parts={},
)

SCENARIOS = Page(
    path="docs/reference/topology.md",
    introduction="""# Topology and scenario files

A **topology** says where things are: sites, the links between them, hosts at sites, programs on hosts. `nearcast wan` brings
it up as real network namespaces. A **scenario** is a topology with brokers, clients and what happens to them;
[`nearcast simulate`](../guides/simulating.md) runs it in virtual time, [`nearcast wan up`](../guides/emulating.md) as real
processes, experiments in both worlds. Both are TOML. Every key is optional unless it says otherwise; unknown keys are refused,
and an error names the file, the line and the key.

This page is made from the structs in `src/nearcast/scenario` by `scripts/config_reference.py`.

## Example

Two sites and a cloud. A car drives between the sites; halfway its broker's machine loses power.

```toml
# town.toml
name = "town"
description = "Two cells 5 ms apart, a cloud 40 ms away, one car."

[[sites]]
name = "east"
latitude = 48.21
longitude = 16.40

[[sites]]
name = "west"
latitude = 48.20
longitude = 16.34

[[sites]]
name = "cloud"
tier = "cloud"

[[links]]
between = ["east", "west"]
latency_ms = 5.0

[[links]]
between = ["east", "cloud"]
latency_ms = 40.0
jitter_ms = 2.0
bandwidth_mbps = 100.0

[[links]]
between = ["west", "cloud"]
latency_ms = 40.0

[[hosts]]
name = "broker"
site = "east"
ports = [1883]

[[hosts]]
name = "car"
site = "east"
access = { latency_ms = 2.0, loss = 0.001 }

[[hosts]]
name = "centre"
site = "cloud"

[[processes]]
name = "broker"
host = "broker"
command = ["nearcast", "broker", "--host", "{host}", "--allow-anonymous", "--data", "{data}"]
ready = { port = 1883 }
```

```toml
# rush-hour.toml
name = "rush-hour"
topology = "town.toml"
duration_s = 300.0

[[brokers]]
host = "broker"
durable = true

[[clients]]
name = "car"
host = "car"
broker = "broker"
clean_start = false
publish = [{ topic = "cars/{client}", rate_hz = 10.0, qos = 1 }]

[[clients]]
name = "watcher"
host = "centre"
broker = "broker"
clean_start = false
subscribe = [{ filter = "cars/#", qos = 1 }]

[[mobility]]
kind = "waypoints"
hosts = ["car"]
min_speed_mps = 15.0
max_speed_mps = 30.0

[[events]]
kind = "crash"
host = "broker"
at_s = 150.0
restart_after_s = 3.0
```

```console
$ nearcast wan up town.toml                  # the topology as network namespaces, with its programs (root, Linux)
$ nearcast simulate rush-hour.toml --seed 7  # the scenario in virtual time
$ nearcast wan up rush-hour.toml --seed 7    # the scenario with real brokers and clients, in five minutes
```

A name without a path is a ready-made one (`nearcast wan topologies`, `nearcast simulate --list`): the topologies `uav`,
`mmog`, `iov`, `emma` and `canal` are those of the papers Nearcast builds on; their `description` says what the numbers mean.
""",
    modules=(
        "network/conditions.py",
        "scenario/topology.py",
        "scenario/events.py",
        "scenario/workload.py",
        "scenario/movement.py",
        "scenario/scenario.py",
    ),
    tables={
        "Topology": "Top level of a topology",
        "Site": "`[[sites]]`",
        "SiteLink": "`[[links]]`",
        "LatencyModel": "`[model]`",
        "Host": "`[[hosts]]`",
        "Process": "`[[processes]]`",
        "ReadyCheck": "`[processes.ready]`",
        "Conditions": "Conditions: `access`, `local`, `conditions`, and part of every link",
        "Scenario": "Top level of a scenario",
        "Broker": "`[[brokers]]`",
        "Controller": "`[controller]`",
        "Gateway": "`[[gateways]]`",
        "Clients": "`[[clients]]`",
        "Publishing": "`[[clients.publish]]`",
        "Subscribing": "`[[clients.subscribe]]`",
        "Change": "`[[clients.changes]]`",
        "Waypoints": '`[[mobility]]` with `kind = "waypoints"`',
        "Trace": '`[[mobility]]` with `kind = "trace"`',
        "RandomFaults": "`[random_faults]`",
        "Kill": '`[[events]]` with `kind = "kill"`',
        "Crash": '`[[events]]` with `kind = "crash"`',
        "Restart": '`[[events]]` with `kind = "restart"`',
        "Start": '`[[events]]` with `kind = "start"`',
        "Stop": '`[[events]]` with `kind = "stop"`',
        "Pause": '`[[events]]` with `kind = "pause"`',
        "Resume": '`[[events]]` with `kind = "resume"`',
        "Cut": '`[[events]]` with `kind = "cut"`',
        "Heal": '`[[events]]` with `kind = "heal"`',
        "ChangeLink": '`[[events]]` with `kind = "link"`',
        "ChangeAccess": '`[[events]]` with `kind = "access"`',
        "Move": '`[[events]]` with `kind = "move"`',
        "SkewClock": '`[[events]]` with `kind = "skew"`',
        "FailDisk": '`[[events]]` with `kind = "disk"`',
    },
    parts={"Topology": "Topologies", "Scenario": "Scenarios", "Waypoints": "Movement and faults", "Kill": "Events"},
)
PAGES = (CONFIGURATION, CONTROLLER, SCENARIOS)

SHARED = {"SiteLink": "Conditions"}
"""Structs whose inherited fields have a section of their own."""

DEFAULTS = {
    "None": "unset",
    "True": "default `true`",
    "False": "default `false`",
    "()": "default none",
    "{}": "default none",
    "DEFAULT_LISTENERS": "default one of kind tcp",
    "Groups()": "default: none are formed",
    "Conditions()": "default: nothing happens to packets",
    "ReadyCheck()": "default: ready as soon as it runs",
}
"""Defaults in TOML's words where they differ from Python's."""


class Structs:
    """The structs of some modules as their sources have them."""

    def __init__(self, modules: tuple[str, ...]) -> None:
        self._classes: dict[str, ast.ClassDef] = {}
        self._sources: dict[str, str] = {}
        self._constants: dict[str, str] = {}
        for module in modules:
            source = (PACKAGE / module).read_text()
            for node in ast.parse(source).body:
                if isinstance(node, ast.ClassDef):
                    self._classes[node.name] = node
                    self._sources[node.name] = source
                elif isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Constant):
                    self._constants[ast.unparse(node.target)] = ast.get_source_segment(source, node.value) or ""

    def summary(self, name: str) -> str:
        """What a struct is."""
        return ast.get_docstring(self._classes[name]) or ""

    def fields(self, name: str) -> dict[str, tuple[str, str, str]]:
        """The fields of a struct, its own first: type, default and paragraph of each."""
        own = self._own(name)
        for base in self._classes[name].bases:
            if isinstance(base, ast.Name) and base.id in self._classes and SHARED.get(name) != base.id:
                inherited = self.fields(base.id)
                # A required field of the base, such as the time of every event, is what a reader looks for first.
                required = {field: told for field, told in inherited.items() if told[1] == "required"}
                own = required | own | inherited
        return own

    def _own(self, name: str) -> dict[str, tuple[str, str, str]]:
        found = {}
        body = self._classes[name].body
        for field, text in zip(body, [*body[1:], None], strict=True):
            if isinstance(field, ast.AnnAssign):
                key = ast.unparse(field.target)
                if not (
                    isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
                ):
                    raise SystemExit(f"{name}.{key} has no paragraph")
                paragraph = text.value.value
                elsewhere = re.fullmatch(r"As in :class:`(\w+)`\.", paragraph)
                if elsewhere:
                    paragraph = self._own(elsewhere.group(1))[key][2]
                found[key] = (_kind(field.annotation), self._default(name, field.value), paragraph)
        return found

    def _default(self, name: str, value: ast.expr | None) -> str:
        """A default as it stands in the source: octal stays octal."""
        if value is None:
            return "required"
        written = ast.get_source_segment(self._sources[name], value) or ast.unparse(value)
        written = self._constants.get(written, written)
        if written.endswith("()") and written not in DEFAULTS:
            return "default as below"
        return DEFAULTS.get(written, f"default `{written}`")


def _kind(annotation: ast.expr) -> str:
    """A type in TOML's words."""
    names = {
        "str": "string",
        "float": "number",
        "int": "integer",
        "bool": "true or false",
        "JitterKind": '`"uniform"`, `"normal"`, `"lognormal"` or `"pareto"`',
        "Tier": '`"cloud"`, `"region"`, `"edge"` or `"device"`',
        "Workflow": '`"handover"` or `"release"`',
        "Event": "table",
        "Mobility": "table",
    }
    if isinstance(annotation, ast.BinOp):
        members = [_kind(member) for member in (annotation.left, annotation.right) if ast.unparse(member) != "None"]
        return " or ".join(members)
    if isinstance(annotation, ast.Subscript):
        of = ast.unparse(annotation.value)
        inner = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
        if of == "Literal":
            *most, last = (f'`"{ast.literal_eval(choice)}"`' for choice in inner)
            return f"{', '.join(most)} or {last}" if most else last
        if of == "tuple" and ast.unparse(inner[-1]) == "...":
            return f"list of {_kind(inner[0]).replace('true or false', 'booleans')}s"
        if of == "tuple":
            return f"list of {len(inner)} {_kind(inner[0])}s"
        return "table" if of == "dict" and ast.unparse(inner[1]) == "Any" else "table of strings"
    written = ast.unparse(annotation)
    return names.get(written, "table" if written[:1].isupper() else written)


def render(page: Page) -> str:
    """A page as it should be."""
    structs = Structs(page.modules)
    parts = [page.introduction]
    for name, heading in page.tables.items():
        if name in page.parts:
            parts.append(f"## {page.parts[name]}\n")
        parts.append(f"{'###' if page.parts else '##'} {heading}\n")
        shared = f" Beside the keys here it takes those of `{SHARED[name]}`, below." if name in SHARED else ""
        parts.append(_paragraph(structs.summary(name)) + shared + "\n")
        for field, (kind, default, text) in structs.fields(name).items():
            parts.append(f"**`{field}`** ({kind}; {default})")
            parts.append(f": {_paragraph(text)}\n")
    return "\n".join(parts)


def _paragraph(text: str) -> str:
    """Docstring markup as Markdown, on one line."""
    text = re.sub(r":\w+:`~?(?:[\w.]+\.)?(\w+)`", r"`\1`", text)
    return " ".join(text.replace("``", "`").split())


def main() -> None:
    for page in PAGES:
        path = ROOT / page.path
        wanted = render(page)
        if "--check" in sys.argv:
            if not path.exists() or path.read_text() != wanted:
                raise SystemExit(f"{page.path} is out of date: run python scripts/config_reference.py")
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(wanted)


if __name__ == "__main__":
    main()
