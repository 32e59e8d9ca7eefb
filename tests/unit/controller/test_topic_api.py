"""Owned topics over the HTTP API: what is shown, what can be asked for, and how it says no."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from litestar.testing import TestClient

from nearcast.controller.api import build
from nearcast.controller.config import ControllerConfig
from nearcast.controller.process import ControllerProcess
from nearcast.controller.tokens import derived_token
from nearcast.telemetry.records import TopicSummary
from tests.topic_control_harness import OwningNet, crowd, place, settings

SECRET = "a secret that is long enough"


class Shown:
    """A controller of three brokers in virtual time, behind the real API. ``swarm/0`` to ``swarm/9`` are b1's."""

    def __init__(self, directory: Path, **topics: object) -> None:
        secret = directory / "secret"
        secret.write_text(SECRET)
        secret.chmod(0o600)
        self.net = OwningNet(control=settings(**topics))
        self.net.add_owning("b1", "b2", "b3")
        self.net.run(1.0)
        self.net.owning("b1").ask(*(f"swarm/{number}" for number in range(10)))
        self.net.run(7.0)
        self.process = ControllerProcess(ControllerConfig(secret_file=str(secret), http_port=None))
        self.process.controller = self.net.controller
        self.process.monotonic = lambda: self.net.now
        self.process.flush = self.net.machines["controller"].flush  # type: ignore[method-assign]
        self.client = TestClient(build(self.process))

    def report(self, *topics: TopicSummary) -> None:
        """b1 is at 0 ms, b2 at 30, b3 at 100."""
        self.net.owning("b2").telemetry(place(30.0))
        self.net.owning("b3").telemetry(place(100.0))
        self.net.owning("b1").telemetry(place(0.0), list(topics))
        self.net.run(0.5)

    def ask(self, method: str, path: str, status: int = 200, content: object = None, **query: str) -> Any:
        headers = {"Authorization": f"Bearer {derived_token(SECRET.encode())}"}
        answer = self.client.request(method, f"/api/v1{path}", json=content, headers=headers, params=query or None)
        assert answer.status_code == status, answer.text
        return answer.json()


@pytest.fixture
def shown(tmp_path: Path) -> Iterator[Shown]:
    made = Shown(tmp_path, planner="none")
    with made.client:
        yield made


@pytest.fixture
def planned(tmp_path: Path) -> Iterator[Shown]:
    made = Shown(tmp_path)
    with made.client:
        yield made


def far_topic(shown: Shown, name: str, worst_ms: float = 26.0) -> TopicSummary:
    """Its clients are where b3 is."""
    at, known = place(100.0), shown.net.manager.owner_of(name)
    return TopicSummary(name, known.epoch, known.owner, crowd(at, 2, worst_ms), crowd(at, 3, worst_ms), 10.0, 30.0)


def test_topics_are_listed_page_by_page(shown: Shown) -> None:
    page = shown.ask("GET", "/topics", limit="4")
    assert [topic["topic"] for topic in page["topics"]] == ["swarm/0", "swarm/1", "swarm/2", "swarm/3"]
    assert (page["total"], page["next"]) == (10, "swarm/3")
    rest = shown.ask("GET", "/topics", limit="10", after=page["next"])
    assert (len(rest["topics"]), rest["next"]) == (6, None)


def test_only_some_of_them(shown: Shown) -> None:
    shown.ask("POST", "/migrations", 202, {"topic": "swarm/7", "target": "b2"})
    shown.net.run(1.0)
    assert [topic["topic"] for topic in shown.ask("GET", "/topics", owner="b2")["topics"]] == ["swarm/7"]
    assert [topic["topic"] for topic in shown.ask("GET", "/topics", topic_filter="+/3")["topics"]] == ["swarm/3"]
    shown.report(far_topic(shown, "swarm/1"), far_topic(shown, "swarm/2", worst_ms=5.0))
    assert [topic["topic"] for topic in shown.ask("GET", "/topics", violated="true")["topics"]] == ["swarm/1"]
    assert "is no topic filter" in shown.ask("GET", "/topics", 409, topic_filter="a/#/b")["detail"]


def test_one_topic_as_reports_show_it(shown: Shown) -> None:
    idle = shown.ask("GET", "/topics/one", name="swarm/1")
    assert (idle["owner"], idle["state"], idle["latency_ms"], idle["max_latency_ms"]) == ("b1", "idle", None, 40.0)
    assert idle["topic_filter"] == "swarm/#"
    known = shown.net.manager.owner_of("swarm/1")
    shown.report(far_topic(shown, "swarm/1"))
    topic = shown.ask("GET", "/topics/one", name="swarm/1")
    assert (topic["state"], topic["latency_ms"], topic["producers"], topic["consumers"]) == ("violated", 52.0, 2, 3)
    assert topic["messages_per_second"] == 40.0
    assert topic["owned_since"] == round(known.epoch / 1e6, 3)


def test_why_a_topic_moved_is_told_with_its_alternatives(planned: Shown) -> None:
    planned.report(far_topic(planned, "swarm/1"))
    planned.net.run(3.0)
    why = planned.ask("GET", "/topics/why", name="swarm/1")
    assert why["topic"]["owner"] == "b3"
    assert why["words"].startswith("b3 owns it")
    [move] = why["history"]
    assert (move["kind"], move["origin"], move["target"], move["state"]) == ("latency", "b1", "b3", "done")
    decision = move["explanation"]
    assert (decision["bound_ms"], decision["worst_ms"], decision["owner"], decision["target"]) == (40.0, 52.0, "b1", "b3")
    assert [alternative["broker"] for alternative in decision["alternatives"]] == ["b3", "b2", "b1"]
    assert planned.ask("GET", f"/migrations/{move['number']}")["explanation"] == decision


def test_why_without_telemetry_and_without_a_planner(shown: Shown) -> None:
    why = shown.ask("GET", "/topics/why", name="swarm/1")
    assert why["explanation"] is None
    assert why["words"] == "No broker has reported its coordinate and load yet, so nothing can be planned."
    shown.report(far_topic(shown, "swarm/1"))
    words = shown.ask("GET", "/topics/why", name="swarm/1")["words"]
    assert words.endswith("But the planner is 'none', so the controller does not move it by itself.")


def test_a_topic_is_moved(shown: Shown) -> None:
    ordered = shown.ask("POST", "/migrations", 202, {"topic": "swarm/1", "target": "b2"})
    assert (ordered["state"], ordered["kind"]) == ("ordered", "manual")
    assert shown.ask("GET", "/topics/one", name="swarm/1")["moving_to"] == "b2"
    shown.net.run(1.0)
    done = shown.ask("GET", f"/migrations/{ordered['number']}")
    assert (done["state"], done["duration_ms"]) == ("done", 12.5)
    assert [move["number"] for move in shown.ask("GET", "/migrations", name="swarm/1")] == [ordered["number"]]
    assert shown.ask("GET", "/migrations", pending="true") == []
    assert shown.ask("GET", "/topics/one", name="swarm/1")["owner"] == "b2"
    status = shown.ask("GET", "/status")
    assert (status["owned_topics"], status["migrations"], status["planner"]) == (10, {"done": 1}, "none")
    assert {node["name"]: node["topics_owned"] for node in shown.ask("GET", "/nodes")} == {"b1": 9, "b2": 1, "b3": 0}


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "words"),
    [
        ("GET", "/topics/one?name=nothing", None, 404, "nothing is not owned: `nearcast topic create"),
        ("GET", "/topics/why?name=swarm/none", None, 404, "nobody owns swarm/none yet"),
        ("GET", "/topics/one", None, 400, "name"),
        ("GET", "/migrations/7", None, 404, "there is no migration 7; the last 10,000 are kept"),
        ("POST", "/migrations", {"topic": "swarm/1", "target": "b9"}, 404, "there is no broker 'b9'"),
        ("POST", "/migrations", {"topic": "swarm/1", "target": "b1"}, 409, "b1 owns swarm/1 already"),
        ("POST", "/migrations", {"topic": "swarm/1"}, 400, "target"),
        (
            "PUT",
            "/classes",
            {"topic_filter": "a", "topic_class": "local", "max_latency_ms": 3},
            409,
            "only topics of class owned",
        ),
    ],
)
def test_how_it_says_no(shown: Shown, method: str, path: str, content: object, status: int, words: str) -> None:
    assert words in shown.ask(method, path, status, content)["detail"]


def test_rules_have_bounds(shown: Shown) -> None:
    rule = {"topic_filter": "fleet/+", "topic_class": "owned", "max_latency_ms": 25.0}
    assert rule in shown.ask("PUT", "/classes", 200, rule)
    assert rule in shown.ask("GET", "/classes")
