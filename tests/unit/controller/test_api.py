"""The HTTP API in process: who gets in, what is shown, what can be asked for, and how it says no."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from litestar.testing import TestClient

from nearcast.controller.api import build
from nearcast.controller.config import ControllerConfig
from nearcast.controller.process import ControllerProcess
from nearcast.controller.tokens import derived_token
from nearcast.fabric.group_facts import FellowFacts, GroupFacts
from tests.control_harness import Net

SECRET = "a secret that is long enough"
READ_TOKEN = "read-only-token-123"


class Shown:
    """A controller of a fabric in virtual time, behind the real API."""

    def __init__(self, directory: Path) -> None:
        secret = directory / "secret"
        secret.write_text(SECRET)
        secret.chmod(0o600)
        tokens = directory / "tokens"
        tokens.write_text(f"# for the dashboard\nread {READ_TOKEN}\n\nwriting-token-456789\n")
        config = ControllerConfig(secret_file=str(secret), token_file=str(tokens), http_port=None)
        self.net = Net()
        self.net.add_broker("near")
        self.net.add_broker("far")
        self.net.add_gateway("g", clients=3, home="near", near=1.0, far=80.0)
        self.net.run(6.0)
        self.process = ControllerProcess(config)
        self.process.controller = self.net.controller
        self.process.monotonic = lambda: self.net.now
        self.process.flush = self.net.machines["controller"].flush  # type: ignore[method-assign]
        self.client = TestClient(build(self.process))

    def ask(self, method: str, path: str, status: int, content: object = None, token: str | None = None) -> Any:
        headers = {"Authorization": f"Bearer {token or derived_token(SECRET.encode())}"}
        answer = self.client.request(method, f"/api/v1{path}", json=content, headers=headers)
        assert answer.status_code == status, answer.text
        return answer.json()


@pytest.fixture
def shown(tmp_path: Path) -> Iterator[Shown]:
    made = Shown(tmp_path)
    with made.client:
        yield made


def test_nobody_gets_in_without_a_token(shown: Shown) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic abc"}, {"Authorization": "Bearer"}):
        for path in ("/status", "/nodes", "/clients", "/moves", "/classes", "/links", "/groups"):
            answer = shown.client.get(f"/api/v1{path}", headers=headers)
            assert answer.status_code == 401
            assert "token" in answer.json()["detail"]
            assert answer.headers["www-authenticate"] == "Bearer"
    assert shown.client.get("/metrics").status_code == 401
    assert shown.client.get("/healthz").json() == {"ok": True}


def test_a_reading_token_may_look_and_not_change(shown: Shown) -> None:
    shown.ask("GET", "/status", 200, token=READ_TOKEN)
    for method, path, content in (
        ("POST", "/moves", {"target": "far", "client": "g-0"}),
        ("POST", "/nodes/near/drain", {}),
        ("DELETE", "/nodes/near/drain", None),
        ("PUT", "/classes", {"topic_filter": "a", "topic_class": "local"}),
        ("DELETE", "/classes?topic_filter=a", None),
    ):
        assert "may look" in shown.ask(method, path, 403, content, READ_TOKEN)["detail"]
    shown.ask("PUT", "/classes", 200, {"topic_filter": "a", "topic_class": "local"}, "writing-token-456789")


def test_status_nodes_links_and_clients_are_shown(shown: Shown) -> None:
    status = shown.ask("GET", "/status", 200)
    assert (status["brokers"], status["gateways"], status["clients"]) == (2, 1, 3)
    nodes = shown.ask("GET", "/nodes", 200)
    assert [(node["name"], node["role"], node["state"]) for node in nodes] == [
        ("far", "broker", "up"),
        ("near", "broker", "up"),
        ("g", "gateway", "up"),
    ]
    assert [node["name"] for node in shown.ask("GET", "/nodes?role=gateway", 200)] == ["g"]
    gateway = shown.ask("GET", "/nodes/g", 200)
    assert (gateway["home"], gateway["brokers"], gateway["ranking"]) == ("near", {"near": 3}, ["near", "far"])
    links = shown.ask("GET", "/links", 200)
    assert [(link["origin"], link["target"], round(link["latency_ms"]), link["in_use"]) for link in links] == [
        ("g", "far", 80, False),
        ("g", "near", 1, True),
    ]
    page = shown.ask("GET", "/clients?limit=2", 200)
    assert [client["client"] for client in page["clients"]] == ["g-0", "g-1"]
    assert (page["total"], page["next"]) == (3, "g-1")
    assert [client["client"] for client in shown.ask("GET", "/clients?after=g-1", 200)["clients"]] == ["g-2"]
    assert shown.ask("GET", "/clients?node=far", 200)["clients"] == []
    assert shown.ask("GET", "/clients?node=near", 200)["total"] == 3


def test_groups_are_shown_as_their_brokers_report_them(shown: Shown) -> None:
    assert shown.ask("GET", "/groups", 200) == [], "without a cloud there are none"
    entries = shown.net.controller.entries
    told: dict[str, Any] = {
        "view": 4,
        "region": "europe",
        "cloud": "mqtt://cloud:1883",
        "threshold_ms": 5.0,
        "leave_threshold_ms": 6.25,
    }
    far = GroupFacts(name="far", leader="far", relay="live", lcm=9.0, fellows=[FellowFacts(name="near")], **told)
    near = GroupFacts(name="near", leader="far", latency_ms=1.5, relay="catching up", waiting_messages=3, lcm=2.0, **told)
    entries["far"].report.group = far
    entries["near"].report.group = near
    (group,) = shown.ask("GET", "/groups", 200)
    assert (group["leader"], group["region"], group["threshold_ms"], group["settled"]) == ("far", "europe", 5.0, True)
    first, second = group["members"]
    assert (first["name"], first["leads"], first["latency_ms"], first["lcm"]) == ("far", True, None, 9.0)
    assert (second["name"], second["leads"], second["latency_ms"], second["relay"]) == ("near", False, 1.5, "catching up")
    assert second["waiting_messages"] == 3
    # A leader that does not count a broker among its own, or is not there itself, has no settled group.
    entries["far"].report.group = GroupFacts(name="far", leader="far", **told)
    assert [group["settled"] for group in shown.ask("GET", "/groups", 200)] == [False]
    entries["far"].state = "down"
    (group,) = shown.ask("GET", "/groups", 200)
    assert (group["leader"], [member["name"] for member in group["members"]], group["settled"]) == ("far", ["near"], False)


def test_a_move_by_hand_is_ordered_and_seen_through(shown: Shown) -> None:
    move = shown.ask("POST", "/moves", 202, {"target": "far", "client": "g-1"})
    assert (move["state"], move["kind"], move["gateway"], move["origin"]) == ("ordered", "manual", "g", "near")
    assert [pending["number"] for pending in shown.ask("GET", "/moves?pending=true", 200)] == [move["number"]]
    shown.net.run(1.0)
    ended = shown.ask("GET", f"/moves/{move['number']}", 200)
    assert (ended["state"], ended["moved_clients"]) == ("done", 1)
    assert shown.ask("GET", "/moves?pending=false", 200)[0] == ended
    assert shown.ask("GET", "/moves?pending=true", 200) == []


def test_a_drain_is_begun_watched_and_ended(shown: Shown) -> None:
    node = shown.ask("POST", "/nodes/near/drain", 202, {"clients_per_second": 50})
    assert (node["draining"], node["clients_to_move"]) == (True, 3)
    shown.net.run(2.0)
    assert shown.ask("GET", "/nodes/near", 200)["clients_to_move"] == 0
    assert not shown.ask("DELETE", "/nodes/near/drain", 200)["draining"]
    assert shown.ask("POST", "/nodes/far/drain", 202)["draining"], "a body is not needed"


def test_classes_are_changed(shown: Shown) -> None:
    rule = {"topic_filter": "a/#", "topic_class": "local", "max_latency_ms": 0.0}
    assert shown.ask("PUT", "/classes", 200, rule) == [rule]
    assert shown.ask("GET", "/classes", 200) == [rule]
    shown.net.run(1.0)
    assert shown.net.registrants["near"].rules[-1].rules[0].topic_filter == "a/#"
    assert shown.ask("DELETE", "/classes?topic_filter=a/%23", 200) == []


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "words"),
    [
        ("GET", "/nodes/nobody", None, 404, "no node 'nobody'"),
        ("GET", "/moves/5", None, 404, "no move 5"),
        ("POST", "/moves", {"target": "nobody", "client": "g-0"}, 404, "no node 'nobody'"),
        ("POST", "/moves", {"target": "far", "client": "who"}, 404, "no gateway has a client 'who'"),
        ("POST", "/moves", {"target": "near", "client": "g-0"}, 409, "at near already"),
        ("POST", "/moves", {"target": "far"}, 409, "say which client"),
        ("POST", "/moves", {"goal": "far"}, 400, "unknown field `goal`"),
        ("POST", "/nodes/g/drain", {}, 409, "brokers are drained"),
        ("POST", "/nodes/near/drain", {"clients_per_second": 0}, 409, "above 0"),
        ("PUT", "/classes", {"topic_filter": "a/#/b", "topic_class": "local"}, 409, "a/#/b"),
        ("DELETE", "/classes?topic_filter=zz", None, 404, "no rule"),
        ("GET", "/clients?limit=0", None, 400, "limit: Expected `int` >= 1"),
        ("GET", "/moves?limit=20000", None, 400, "limit: Expected `int` <= 10000"),
        ("GET", "/moves?pending=perhaps", None, 400, "pending: "),
        ("GET", "/nodes?role=toaster", None, 400, "role: Invalid enum value 'toaster'"),
        ("POST", "/moves", {"client": "g-0"}, 400, "target"),
        ("GET", "/nowhere", None, 404, ""),
    ],
)
def test_what_cannot_be_is_answered_in_one_sentence(
    shown: Shown, method: str, path: str, content: object, status: int, words: str
) -> None:
    answer = shown.ask(method, path, status, content)
    assert words in answer["detail"]


def test_openapi_describes_every_path(shown: Shown) -> None:
    schema = shown.client.get("/schema/openapi.json").json()
    paths = schema["paths"]
    assert set(paths) >= {
        "/healthz",
        "/api/v1/status",
        "/api/v1/nodes",
        "/api/v1/nodes/{name}",
        "/api/v1/nodes/{name}/drain",
        "/api/v1/links",
        "/api/v1/clients",
        "/api/v1/moves",
        "/api/v1/moves/{number}",
        "/api/v1/classes",
    }
    assert schema["components"]["securitySchemes"]["bearer"]["scheme"] == "bearer"
    for path, methods in paths.items():
        for method, described in methods.items():
            assert described["summary"], (path, method)


def test_a_broker_that_others_cannot_reach_is_told_of(shown: Shown, caplog: pytest.LogCaptureFixture) -> None:
    node = shown.net.controller.entries["far"].node
    shown.net.controller.entries["far"].node = msgspec.structs.replace(node, link="127.0.0.1:1884")
    with caplog.at_level("INFO", "nearcast"):
        shown.process._log_changes()
        shown.process._log_changes()
    told = [record.__dict__ for record in caplog.records if "cannot reach this broker" in record.getMessage()]
    assert len(told) == 1


def test_metrics_are_rendered(shown: Shown) -> None:
    headers = {"Authorization": f"Bearer {READ_TOKEN}"}
    text = shown.client.get("/metrics", headers=headers).text
    assert 'nearcast_controller_nodes{role="broker",state="up"} 2.0' in text
    assert "nearcast_monitoring_sent_packets_total" in text
