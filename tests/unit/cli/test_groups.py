"""``nearcast groups``: several brokers' words become one picture, which is safe to show."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from nearcast.cli.groups import merged
from nearcast.cli.main import main
from nearcast.fabric.group_facts import FellowFacts, GroupFacts, LeaderFacts

CLOUD = "mqtt://cloud:1883"


def told(facts: GroupFacts) -> dict[str, Any]:
    """As ``/healthz`` has it."""
    found: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(facts))
    return found


BERLIN = GroupFacts(
    name="berlin",
    leader="berlin",
    region="europe",
    lcm=900.0,
    threshold_ms=5.0,
    leave_threshold_ms=6.25,
    cloud=CLOUD,
    cloud_state="connected",
    relay="live",
    fellows=[FellowFacts(name="graz", latency_ms=2.0, relay="held"), FellowFacts(name="vienna", up=False)],
    leaders=[LeaderFacts(name="tokyo", latency_ms=90.0, lcm=50.0, size=3, threshold_ms=5.0)],
)
GRAZ = GroupFacts(
    name="graz",
    leader="berlin",
    region="europe",
    lcm=10.0,
    threshold_ms=5.0,
    leave_threshold_ms=6.25,
    latency_ms=2.125,
    cloud=CLOUD,
    relay="catching up",
    waiting_messages=1_200,
    fellows=[FellowFacts(name="berlin", latency_ms=2.125), FellowFacts(name="vienna", latency_ms=3.0)],
)


def test_a_leader_alone_tells_of_its_group_and_of_other_leaders() -> None:
    berlin, tokyo = merged([told(BERLIN)])
    assert [(member["name"], member["leads"], member["latency_ms"]) for member in berlin["members"]] == [
        ("berlin", True, None),
        ("graz", False, 2.0),
        ("vienna", False, None),
    ]
    assert [member["state"] for member in berlin["members"]] == ["up", "up", "down"]
    assert (tokyo["leader"], tokyo["size"], [member["name"] for member in tokyo["members"]]) == ("tokyo", 3, ["tokyo"])


def test_a_members_own_word_is_better_than_its_leaders() -> None:
    for words in ([told(BERLIN), told(GRAZ)], [told(GRAZ), told(BERLIN)]):
        berlin, _ = merged(words)
        graz = berlin["members"][1]
        assert (graz["latency_ms"], graz["relay"], graz["waiting_messages"]) == (2.125, "catching up", 1_200)
        assert (berlin["threshold_ms"], berlin["leave_threshold_ms"], berlin["size"]) == (5.0, 6.25, 3)


def test_a_member_does_not_know_how_far_others_are_from_its_leader() -> None:
    (berlin,) = merged([told(GRAZ)])
    assert [(member["name"], member["latency_ms"]) for member in berlin["members"]] == [
        ("berlin", None),
        ("graz", 2.125),
        ("vienna", None),
    ]


def test_who_belongs_to_a_group_is_no_leader_any_more() -> None:
    late = LeaderFacts(name="graz", lcm=1.0, threshold_ms=5.0)
    (berlin,) = merged([told(msgspec.structs.replace(BERLIN, leaders=[late]))])
    assert berlin["size"] == 3


@contextmanager
def answering(content: object, status: int = 200) -> Iterator[str]:
    """Something that answers every request alike."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_request(self, code: object = "-", size: object = "-") -> None:
            """Nothing is written."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def health(facts: GroupFacts | None) -> dict[str, object]:
    return {"ok": True, "version": "1", "groups": None if facts is None else told(facts)}


def test_the_picture_of_two_brokers(capsys: pytest.CaptureFixture[str]) -> None:
    evil = msgspec.structs.replace(GRAZ, name="graz\x1b[2J")
    with answering(health(BERLIN)) as berlin, answering(health(evil)) as graz, pytest.raises(SystemExit) as ended:
        main(["groups", "--broker", berlin, "--broker", f"http://{graz}/"])
    assert ended.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "2 groups of 7 brokers"
    assert [line.split() for line in lines[2:]] == [
        ["Broker", "Role", "To", "leader", "Threshold", "LCM", "Cloud", "Relay", "Waiting"],
        ["berlin", "leads", "-", "5", "ms", "(leave", "6.25)", "900", "connected", "live", "0"],
        ["graz", "member", "2.00", "ms", "-", "-", "held", "-"],
        ["graz\\x1b[2J", "member", "2.12", "ms", "10", "not", "needed", "catching", "up", "1,200"],
        ["vienna", "member,", "down", "?", "-", "-", "-", "-"],
        ["tokyo", "leads", "-", "5", "ms", "50", "connected", "-", "-"],
        ["2", "more"],
    ]


def test_who_has_no_cloud_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    alone = GroupFacts(name="a", leader="a", cloud_state="connecting", cloud_problem="nothing listens there", relay="no cloud")
    with answering(health(alone)) as place, pytest.raises(SystemExit):
        main(["groups", "--broker", place])
    assert capsys.readouterr().out.splitlines()[-1].rstrip() == "a has no cloud: nothing listens there"


def test_the_same_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(health(BERLIN)) as berlin, pytest.raises(SystemExit):
        main(["groups", "--json", "--broker", berlin])
    found = json.loads(capsys.readouterr().out)
    assert [group["leader"] for group in found] == ["berlin", "tokyo"]
    assert set(found[0]) == set(found[1])
    assert {key for group in found for member in group["members"] for key in member} == set(found[0]["members"][0])


@pytest.mark.parametrize(
    ("content", "status", "words"),
    [
        ({"ok": True, "version": "1", "groups": None}, 200, "forms no groups: start it with --cloud URL"),
        ({"ok": True, "version": "9", "groups": {"name": "a"}}, 200, "is of another version: "),
        ({"ok": True}, 200, "is no broker: is it its --http-port?"),
        (b"\x1b[2J", 200, "is no broker: is it its --http-port?"),
        ({}, 404, "is no broker (HTTP 404): is it its --http-port?"),
    ],
)
def test_who_cannot_tell_is_named_in_one_line(
    content: object, status: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(content, status) as place, pytest.raises(SystemExit) as ended:
        main(["groups", "--broker", place])
    assert ended.value.code == 1
    complaint = capsys.readouterr().err
    assert words in complaint
    assert len(complaint.splitlines()) == 1


def test_a_broker_that_stops_still_tells(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(health(BERLIN), 503) as berlin, pytest.raises(SystemExit) as ended:
        main(["groups", "--broker", berlin])
    assert ended.value.code == 0
    assert "berlin" in capsys.readouterr().out


def test_nobody_is_asked_by_default(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NEARCAST_TOKEN", "NEARCAST_FABRIC_SECRET"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit) as ended:
        main(["groups"])
    assert ended.value.code == 1
    assert "say whom to ask: --broker" in capsys.readouterr().err


def test_where_nobody_listens(capsys: pytest.CaptureFixture[str]) -> None:
    for url, words in (
        ("http://127.0.0.1:1", "no broker answers at http://127.0.0.1:1"),
        ("ftp://a", "is no address of a broker"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["groups", "--broker", url])
        assert ended.value.code == 1
        assert words in capsys.readouterr().err
