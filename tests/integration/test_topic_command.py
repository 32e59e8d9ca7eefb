"""``nearcast topic`` as people use it, against a real broker: what it says, what it pipes, and how it refuses."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nearcast.broker.passwords import ScryptVerifier, store_user
from nearcast.cli.topic import app
from nearcast.client.blocking_topics import BlockingTopics
from nearcast.config import Retention
from nearcast.errors import ConfigError, ConnectionRefused, NearcastError, RecordUnavailable, RequestRefused, TopicUnknown
from tests.integration.broker.running import PATIENCE_SECONDS, wait_for
from tests.integration.brokers import NearcastBroker, nearcast_broker

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NearcastBroker]:
    with nearcast_broker(tmp_path_factory, data=True, arguments=["--durable", "d/#"]) as running:
        with BlockingTopics(running.bulk_url) as topics:
            for number in range(1, 6):
                topics.publish("d/door", f"open {number}")
            topics.publish("d/bytes", bytes(range(20)))
        yield running


def topic(broker: NearcastBroker, *arguments: str) -> str:
    """Run a command that must end well; what it printed."""
    result = CliRunner().invoke(app, [*arguments, "--url", broker.bulk_url])
    if isinstance(result.exception, NearcastError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def as_json(broker: NearcastBroker, *arguments: str) -> dict[str, object]:
    found = json.loads(topic(broker, *arguments, "--json"))
    assert isinstance(found, dict)
    return found


def words(broker: NearcastBroker, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "nearcast", "topic", *arguments, "--url", broker.bulk_url]


ENVIRONMENT = {**os.environ, "NO_COLOR": "1", "TERM": "dumb"}


# --- rules ----------------------------------------------------------------------------------------------------------------


def test_create_change_and_delete(broker: NearcastBroker) -> None:
    assert topic(broker, "create", "rules/#", "--durable", "--max-age", "7d", "--max-bytes", "10GB") == (
        "rules/# is durable now, keeping 10 GB or 7 d\n"
    )
    assert topic(broker, "create", "rules/#", "--max-age", "7d", "--max-bytes", "10GB").startswith(
        "rules/# is durable already"
    )
    assert topic(broker, "create", "rules/#", "--max-records", "2k") == (
        "rules/# is durable, keeping 2,000 records (before: durable, 10 GB or 7 d)\n"
    )
    assert topic(broker, "tap", "rules/+") == "rules/+ is tapped now, keeping everything\n"
    assert as_json(broker, "tap", "rules/+")["outcome"] == "unchanged"
    listed = topic(broker, "list", "rules/#")
    assert [line.split() for line in listed.splitlines()[1:3]] == [
        ["rules/+", "tap", "created", "everything"],
        ["rules/#", "durable", "created", "2,000", "records"],
    ]
    assert topic(broker, "delete", "rules/+") == "deleted rules/+\n"
    assert topic(broker, "delete", "rules/#") == "deleted rules/#\n"
    with pytest.raises(TopicUnknown, match="there is no rule `rules/#`"):
        topic(broker, "delete", "rules/#")
    assert "the log keeps nothing of `rules/#`: `nearcast topic create" in topic(broker, "list", "rules/#")


def test_deleting_records_is_asked_about(broker: NearcastBroker) -> None:
    topic(broker, "create", "gone/#")
    topic(broker, "publish", "gone/a", "-m", "1")
    with pytest.raises(NearcastError, match=r"Delete 1 record of 1 topic \(.* B\)\? Say --yes"):
        topic(broker, "delete", "gone/#")
    assert topic(broker, "delete", "gone/#", "--keep-records") == "deleted gone/#\n"
    assert "none any more: what is here stays" in topic(broker, "show", "gone/a")
    # Records that no rule keeps can be deleted still; the index goes on when the topic is made again.
    assert topic(broker, "delete", "gone/a", "--yes") == "deleted gone/a and 1 record\n"
    assert "gone/a" not in topic(broker, "list")
    topic(broker, "create", "gone/a")
    assert topic(broker, "publish", "gone/a", "-m", "2") == "gone/a 2\n"
    with pytest.raises(RecordUnavailable, match="the oldest there is 2"):
        topic(broker, "get", "gone/a", "1")
    assert topic(broker, "delete", "gone/a", "-y") == "deleted gone/a and 1 record\n"


def test_what_a_rule_of_the_configuration_keeps_is_left_alone(broker: NearcastBroker) -> None:
    with pytest.raises(RequestRefused, match="the configuration's rule `d/#` comes first"):
        topic(broker, "create", "d/door", "--max-records", "1")
    with pytest.raises(RequestRefused, match="`d/#` stands in the configuration: remove it there and send SIGHUP"):
        topic(broker, "delete", "d/#", "--yes")
    with pytest.raises(TopicUnknown, match="there is no rule `d/door`; what keeps it is the rule `d/#`"):
        topic(broker, "delete", "d/door", "--yes")
    assert topic(broker, "get", "d/door", "latest") == "open 5\n"


# --- looking --------------------------------------------------------------------------------------------------------------


def test_list_and_show(broker: NearcastBroker) -> None:
    listed = topic(broker, "list", "d/#")
    (line,) = [line for line in listed.splitlines() if line.startswith("d/door")]
    assert line.split()[1:4] == ["5", "1", "5"]
    assert "... and 1 more" in topic(broker, "list", "d/#", "--limit", "1")
    found = as_json(broker, "list", "d/door")
    kept = {"topic": "d/#", "mode": "durable", "max_records": 0, "max_bytes": 0, "max_age_seconds": 0.0, "origin": "config"}
    assert found["rules"] == [kept]
    shown = topic(broker, "show", "d/door")
    for said in ("5: 1 to 5", "B a record", "just now|s ago", "in the last minute", r"d/# \(durable\)", "everything"):
        assert re.search(said, shown), said
    details = as_json(broker, "show", "d/door")
    assert (details["first_index"], details["latest_index"], details["records"]) == (1, 5, 5)
    assert as_json(broker, "show", "d/nothing yet")["records"] == 0
    with pytest.raises(TopicUnknown, match="no rule keeps other: `nearcast topic create other --durable` makes one"):
        topic(broker, "show", "other")


def test_get(broker: NearcastBroker) -> None:
    assert topic(broker, "get", "d/door", "2") == "open 2\n"
    assert topic(broker, "get", "d/door", "earliest") == "open 1\n"
    assert topic(broker, "get", "d/door", "2", "--raw") == "open 2"
    assert "index:          2\n" in topic(broker, "get", "d/door", "2", "-v")
    assert topic(broker, "get", "d/door", "2", "--hex").startswith("00000000  6f 70 65 6e 20 32 ")
    assert as_json(broker, "get", "d/door", "2")["payload"] == "open 2"
    assert topic(broker, "get", "d/bytes", "1", "-v").splitlines()[-1] == "00000010  10 11 12 13" + " " * 38 + "...."
    result = CliRunner().invoke(app, ["get", "d/bytes", "1", "--url", broker.bulk_url])
    assert result.stdout_bytes == bytes(range(20)), "into a pipe, bytes go as they are"
    with pytest.raises(RecordUnavailable, match="has no record 6: the newest there is 5"):
        topic(broker, "get", "d/door", "6")
    with pytest.raises(TopicUnknown, match="the log has no topic 'other'"):
        topic(broker, "get", "other", "1")


def test_tail(broker: NearcastBroker) -> None:
    lines = topic(broker, "tail", "d/#", "--from", "earliest", "-n", "3").splitlines()
    assert [line.split("  ", 1)[1] for line in lines] == [f"d/door {number}  open {number}" for number in (1, 2, 3)]
    assert topic(broker, "tail", "d/door", "--from", "4", "--no-follow", "--raw") == "open 4\nopen 5\n"
    records = [json.loads(line) for line in topic(broker, "tail", "d/+", "-f", "1h", "--no-follow", "--json").splitlines()]
    assert [record["index"] for record in records if record["topic"] == "d/door"] == [1, 2, 3, 4, 5]
    assert topic(broker, "tail", "d/door", "--from", "2099-01-01", "--no-follow") == ""
    after = str(records[2]["time"])
    assert topic(broker, "tail", "d/door", "--from", after, "--no-follow", "--raw", "-n", "1") == "open 3\n"


def test_a_tail_goes_on_until_ctrl_c(broker: NearcastBroker, tmp_path: Path) -> None:
    """Also over a restart of the broker, and says what retention took away."""
    with NearcastBroker(tmp_path, data=True) as own:
        with BlockingTopics(own.bulk_url) as topics:
            topics.create_topic("t", Retention(max_records=2))
            for number in range(5):
                topics.publish("t", b"%d" % number)
            wait_for("retention", lambda: topics.topics("t")[0].first_index == 4)
        process = subprocess.Popen(
            words(own, "tail", "t", "--from", "1"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
        )
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            assert [process.stdout.readline().split()[-1] for _ in range(2)] == ["3", "4"]
            own.kill()
            own.start()
            with BlockingTopics(own.bulk_url) as topics:
                topics.publish("t", "back again")
            assert process.stdout.readline().endswith("t 6  back again\n")
            process.send_signal(signal.SIGINT)
            assert process.wait(PATIENCE_SECONDS) == 130
            said = process.stderr.read()
            assert said == "nearcast: records 1 to 3 of t are gone: retention removed them\n"
        finally:
            process.kill()
            process.communicate()


def test_waiting_for_what_nothing_keeps(broker: NearcastBroker) -> None:
    result = CliRunner().invoke(app, ["tail", "other/#", "--from", "earliest", "--no-follow", "--url", broker.bulk_url])
    assert result.exit_code == 0
    assert "no rule keeps other/#: `nearcast topic create 'other/#' --durable` makes one" in result.stderr


# --- writing --------------------------------------------------------------------------------------------------------------


def test_publish(broker: NearcastBroker, tmp_path: Path) -> None:
    assert topic(broker, "publish", "d/p", "-m", "one", "-p", "unit=C", "--content-type", "text/plain") == "d/p 1\n"
    found = as_json(broker, "get", "d/p", "1")
    assert (found["content_type"], found["user_properties"], found["qos"]) == ("text/plain", [["unit", "C"]], 1)
    (tmp_path / "file").write_bytes(b"\x00" * 1_000)
    assert as_json(broker, "publish", "d/p", "-f", str(tmp_path / "file")) == {
        "topic": "d/p",
        "published": 1,
        "first_index": 2,
        "last_index": 2,
    }
    lines = "".join(f"line {number}\n" for number in range(1_000)) + "last"
    run = subprocess.run(
        words(broker, "publish", "d/lines", "-l"), input=lines, capture_output=True, text=True, timeout=60, check=False
    )
    assert (run.returncode, run.stdout) == (0, "d/lines 1 to 1001\n"), run.stderr
    assert topic(broker, "get", "d/lines", "1001") == "last\n"
    with pytest.raises(TopicUnknown, match="no rule keeps the topic 'other': `nearcast topic create other` makes one"):
        topic(broker, "publish", "other", "-m", "x")


# --- refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ["show", "d/#"],
        ["get", "d/+", "1"],
        ["get", "d/door", "first"],
        ["get", "d/door", "-1"],
        ["get", "d/door", "1", "--raw", "--hex"],
        ["tail", "d/door", "--from", "yesterday"],
        ["tail", "d/door", "--raw", "--json"],
        ["create", "a", "--max-bytes", "10 apples"],
        ["create", "a", "--max-age", "-5"],
        ["create", "a", "--max-records", "99999999999999999999"],
        ["publish", "d/p"],
        ["publish", "d/p", "-m", "a", "-l"],
        ["publish", "d/p", "-m", "a", "-p", "novalue"],
    ],
    ids=" ".join,
)
def test_wrong_usage(broker: NearcastBroker, arguments: list[str]) -> None:
    assert CliRunner().invoke(app, [*arguments, "--url", broker.bulk_url]).exit_code == 2


def test_filters_that_are_none(broker: NearcastBroker) -> None:
    for arguments in (["create", "a/#/b"], ["create", "$SYS/x"], ["create", ""]):
        with pytest.raises((ConfigError, RequestRefused)):
            topic(broker, *arguments)
    with pytest.raises(ConfigError, match="# must be the whole last level"):
        topic(broker, "list", "a/#/b")


def test_no_broker_is_one_line_that_says_what_to_do(broker: NearcastBroker) -> None:
    command = [sys.executable, "-m", "nearcast", "topic", "list", "--url", "nearcast://127.0.0.1:1"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=ENVIRONMENT)
    assert run.returncode == 1
    assert run.stderr == (
        "nearcast: cannot reach nearcast://127.0.0.1:1: nothing listens there; "
        "start a broker with `nearcast broker --data DIR`, or name its bulk port with --url\n"
    )
    with pytest.raises(NearcastError, match=r"closed the connection; is it a bulk port\?"):
        topic_at(f"nearcast://127.0.0.1:{broker.port()}")
    with pytest.raises(ConfigError, match="topic logs are served on the bulk port; write nearcast://HOST:7883"):
        topic_at("mqtt://127.0.0.1:1883")


def topic_at(url: str) -> None:
    result = CliRunner().invoke(app, ["list", "--url", url])
    assert result.exception is not None
    raise result.exception


def test_a_broker_without_a_data_directory(tmp_path: Path) -> None:
    with NearcastBroker(tmp_path, arguments=["--bulk-port", "0"]) as broker:
        for arguments in (["list"], ["create", "a"], ["delete", "a"], ["get", "a", "1"], ["publish", "a", "-m", "x"]):
            with pytest.raises(RequestRefused, match="it has no data directory; start it with --data DIRECTORY"):
                topic(broker, *arguments)


ACL = """
[security]
password_file = "users"
[[security.acl]]
action = "allow"
access = "subscribe"
user = "reader"
topic = "s/#"
[[security.acl]]
action = "allow"
access = "all"
user = "writer"
topic = "s/#"
[[security.acl]]
action = "allow"
access = "manage"
user = "manager"
topic = "s/#"
"""


def test_rights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for user in ("reader", "writer", "manager"):
        store_user(str(tmp_path / "users"), user, ScryptVerifier.create(f"{user}'s secret".encode()))
    with NearcastBroker(tmp_path, ACL, data=True) as broker:
        with pytest.raises(ConnectionRefused):
            topic(broker, "list")

        def by(user: str, *arguments: str) -> str:
            monkeypatch.setenv("NEARCAST_PASSWORD", f"{user}'s secret")
            return topic(broker, *arguments, "--user", user)

        with pytest.raises(RequestRefused, match='not allowed here: it takes a rule with access = "manage"'):
            by("writer", "create", "s/a")
        with pytest.raises(RequestRefused, match="not allowed"):
            by("manager", "create", "other")
        assert by("manager", "create", "s/#") == "s/# is durable now, keeping everything\n"
        for user in ("reader", "manager"):
            with pytest.raises(RequestRefused, match="publishing to 's/a' is not allowed here"):
                by(user, "publish", "s/a", "-m", "x")
        assert by("writer", "publish", "s/a", "-m", "x") == "s/a 1\n"
        assert by("reader", "get", "s/a", "1") == "x\n"
        with pytest.raises(RequestRefused, match="reading '#' is not allowed here"):
            by("reader", "list", "#")
        for filters in ([], ["s/#"]):
            assert "s/a" in by("reader", "list", *filters)
        with pytest.raises(RequestRefused, match="reading 's/a' is not allowed here"):
            by("manager", "get", "s/a", "1")
        with pytest.raises(RequestRefused, match="not allowed here"):
            by("reader", "delete", "s/#", "--keep-records")
        password = tmp_path / "password"
        password.write_text("manager's secret\n", encoding="utf-8")
        monkeypatch.delenv("NEARCAST_PASSWORD")
        deleted = topic(broker, "delete", "s/#", "--keep-records", "--user", "manager", "--password-file", str(password))
        assert deleted == "deleted s/#\n"
        with pytest.raises(ConnectionRefused):
            topic(broker, "list", "s/#", "--user", "manager")
