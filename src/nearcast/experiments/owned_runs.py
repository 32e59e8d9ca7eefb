"""Scenarios with owned topics on the emulated WAN: run one, and ask the controller in the end what it moved, when and why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from nearcast.emulation import namespaces
from nearcast.emulation.wan import Wan
from nearcast.errors import EmulationError
from nearcast.experiments import plots
from nearcast.experiments.emulated import EmulationResult, run_emulated
from nearcast.experiments.nodes import MAKER
from nearcast.experiments.run import Run
from nearcast.recording.schema import arrow
from nearcast.scenario.scenario import Scenario

MOST_ASKED = 10_000
"""Migrations that are asked for: as many as a controller remembers."""


class MigrationView(msgspec.Struct):
    """What the controller says of a migration. Times are those of the wall clock, in seconds; null is not yet."""

    topic: str
    origin: str | None
    target: str
    kind: str
    state: str
    reason: str = ""
    created_at: float = 0.0
    ordered_at: float | None = None
    ended_at: float | None = None
    duration_ms: float | None = None
    detail: str = ""


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """What the controller knows at the end."""

    migrations: list[MigrationView]
    """Oldest first."""

    owners: dict[str, str]
    """By topic."""

    start_ns: int
    """When the scenario began."""


def check_machine() -> None:
    """What these experiments need, or the one line that says what is missing."""
    arrow()
    plots.require()
    reason = namespaces.available()
    if reason is not None:
        raise EmulationError(f"{reason}; loopback mode carries no UDP, which nodes measure with")


def run_owned(run: Run[Any], scenario: Scenario, events: str) -> Told:
    """Run it, record it; what the controller said at the end."""
    run.step("starting controller, brokers and gateways")
    found: list[tuple[list[MigrationView], dict[str, str]]] = []

    async def question(wan: Wan) -> None:
        found.append((await migrations_of(wan, scenario), await owners_of(wan, scenario)))

    result = run_emulated(run, scenario, run.parameters.seed, events=events, mode="namespaces", question=question)
    note_result(run, result)
    migrations, owners = found[0]
    start_ns = int((run.folder / "load" / events / "start").read_text())
    return Told(migrations=migrations, owners=owners, start_ns=start_ns)


def note_result(run: Run[Any], result: EmulationResult) -> None:
    """Keep what the WAN says of a run, and what went wrong with its processes."""
    run.figure("emulation", {"mode": result.mode, "loads": result.loads, "traffic": result.status.traffic})
    for process in result.status.processes:
        if process.state in ("failed", "killed") or (process.exit_code or 0) > 0:
            run.note(f"{process.name} did not end as it should: see {process.log}")


async def migrations_of(wan: Wan, scenario: Scenario) -> list[MigrationView]:
    """All that the controller ordered, oldest first."""
    answer: list[MigrationView] = convert(await ask(wan, scenario, f"migrations?limit={MOST_ASKED}"), list[MigrationView])
    return answer[::-1]


async def owners_of(wan: Wan, scenario: Scenario) -> dict[str, str]:
    """Who owns what."""
    answer = await ask(wan, scenario, f"topics?limit={MOST_ASKED}")
    return {topic.topic: topic.owner for topic in convert(answer, _TopicPage).topics}


class _TopicView(msgspec.Struct):
    topic: str
    owner: str


class _TopicPage(msgspec.Struct):
    topics: list[_TopicView]


def convert(answer: bytes, kind: Any) -> Any:
    """An answer of the controller as what is expected of it."""
    try:
        return msgspec.json.decode(answer, type=kind)
    except msgspec.DecodeError as error:
        raise EmulationError(f"the controller's answer is not as expected: {error}") from error


async def ask(wan: Wan, scenario: Scenario, what: str) -> bytes:
    """A question to the controller's HTTP interface, asked on its host."""
    controller = scenario.controller
    if controller is None:
        raise EmulationError("the scenario has no controller to ask")
    url = f"http://127.0.0.1:{controller.http_port}/api/v1/{what}"
    command = ["python", "-P", "-m", "nearcast.experiments.asking", url, str(await secret_of(wan))]
    answer = await wan.run(controller.host, command, timeout_s=30)
    if answer.code != 0:
        raise EmulationError(f"the controller did not answer: {answer.error.strip()}")
    return answer.output.encode()


async def secret_of(wan: Wan) -> Path:
    """Where the fabric's secret is."""
    return Path((await wan.status()).output) / "data" / MAKER / "secret"
