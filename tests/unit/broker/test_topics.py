"""Rules of topics in a broker: those of the configuration, those made at run time, and the file that keeps these."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest

from nearcast.broker import topics
from nearcast.broker.topics import Definitions, TopicRules, check_configured
from nearcast.config import Retention, TopicRule
from nearcast.errors import ConfigError, StorageCorrupt, StorageUnavailable, TopicUnknown

Result = TypeVar("Result")


def rule(topic: str, **bounds: float) -> TopicRule:
    return TopicRule(topic=topic, retention=Retention(**bounds))  # type: ignore[arg-type]


def run(work: Awaitable[Result]) -> Result:
    async def main() -> Result:
        return await work

    return asyncio.run(main())


def names(rules: TopicRules) -> list[str]:
    return [item.topic for item in rules.rules]


@pytest.fixture
def definitions(tmp_path: Path) -> Definitions:
    return Definitions(tmp_path / "topics")


def test_the_configuration_stands_first(definitions: Definitions) -> None:
    rules = TopicRules([rule("a/b"), rule("b/#", max_records=1)], definitions)
    assert run(rules.create(rule("#", max_records=2))) == "created"
    assert names(rules) == ["a/b", "b/#", "#"]
    assert rules.retention_for(b"b/c") == Retention(max_records=1)
    assert rules.retention_for(b"c") == Retention(max_records=2)
    assert rules.retention_for(b"$SYS/x") is None


def test_a_rule_survives_a_restart(definitions: Definitions) -> None:
    rules = TopicRules([], definitions)
    tap = TopicRule(topic="plain/+", mode="tap", retention=Retention(max_age_seconds=0.5, max_bytes=7))
    run(rules.create(tap))
    assert TopicRules([], definitions).rules == (tap,)
    assert definitions.path.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in definitions.path.parent.iterdir()] == ["definitions.json"]


def test_an_exception_can_be_made_of_a_pattern_later(definitions: Definitions) -> None:
    rules = TopicRules([], definitions)
    for topic in ("x", "a/#", "a/b", "a/+", "b"):
        assert run(rules.create(rule(topic))) == "created"
    assert names(rules) == ["x", "a/b", "a/+", "a/#", "b"]


def test_asked_again_a_rule_changes_or_stays(definitions: Definitions) -> None:
    rules = TopicRules([], definitions)
    told: list[int] = []
    rules.on_change.append(lambda: told.append(rules.generation))
    for topic in ("a", "b"):
        run(rules.create(rule(topic)))
    assert run(rules.create(rule("a"))) == "unchanged"
    assert run(rules.create(rule("a", max_records=5))) == "changed"
    assert names(rules) == ["a", "b"]
    assert rules.retention_for(b"a") == Retention(max_records=5)
    assert told == [1, 2, 3]
    assert TopicRules([], definitions).retention_for(b"a") == Retention(max_records=5)


def test_deleting(definitions: Definitions) -> None:
    rules = TopicRules([rule("fixed")], definitions)
    run(rules.create(rule("a/#", max_records=1)))
    assert run(rules.delete("a/#")) == rule("a/#", max_records=1)
    assert rules.rule_for(b"a/b") is None
    assert TopicRules([], definitions).rules == ()
    with pytest.raises(ConfigError, match="stands in the configuration: remove it there and send SIGHUP"):
        run(rules.delete("fixed"))
    with pytest.raises(TopicUnknown, match="there is no rule `a/#`: `nearcast topic list` shows them"):
        run(rules.delete("a/#"))
    run(rules.create(rule("b/#")))
    with pytest.raises(TopicUnknown, match="no rule `b/c`; what keeps it is the rule `b/#`"):
        run(rules.delete("b/c"))


def test_what_the_configuration_decides_cannot_be_changed_at_run_time(definitions: Definitions) -> None:
    rules = TopicRules([rule("a/#")], definitions)
    with pytest.raises(ConfigError, match="`a/#` stands in the configuration: change it there"):
        run(rules.create(rule("a/#", max_records=1)))
    with pytest.raises(ConfigError, match="rule `a/#` comes first and decides about all of `a/b`"):
        run(rules.create(rule("a/b")))
    assert not definitions.path.exists()


@pytest.mark.parametrize(
    ("topic", "says"),
    [
        ("", "must not be empty"),
        ("a/#/b", "# must be the whole last level"),
        ("a+", "\\+ must be a whole level"),
        ("$share/group/a", "without \\$share/NAME/"),
        ("$SYS/broker/uptime", "\\$SYS topics are not kept"),
        ("a\udc80", "well-formed UTF-8"),
        ("a" * 70_000, "at most 65,535 bytes"),
    ],
)
def test_filters_that_keep_nothing_are_refused(definitions: Definitions, topic: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        run(TopicRules([], definitions).create(rule(topic)))
    with pytest.raises(ConfigError, match=says):
        TopicRules([rule(topic)], definitions)


def test_the_configuration_has_no_rule_that_never_decides(definitions: Definitions) -> None:
    with pytest.raises(ConfigError, match="`a/b` stands behind `a/#`, which decides about all of it: put it first"):
        TopicRules([rule("a/#"), rule("a/b")], definitions)
    with pytest.raises(ConfigError, match="two topic rules `a`"):
        TopicRules([rule("a"), rule("a", max_records=1)], definitions)


def test_without_a_data_directory_nothing_is_kept() -> None:
    with pytest.raises(ConfigError, match="--data DIRECTORY"):
        TopicRules([rule("a")])
    with pytest.raises(ConfigError, match="--data DIRECTORY"):
        check_configured([rule("a")], None)
    rules = TopicRules()
    assert rules.rule_for(b"a") is None
    with pytest.raises(ConfigError, match="has no data directory"):
        run(rules.create(rule("a")))
    with pytest.raises(ConfigError, match="--data DIRECTORY"):
        rules.reconfigure([rule("a")])
    assert rules.reconfigure([]) is False


def test_reloading_changes_the_configurations_part(definitions: Definitions) -> None:
    rules = TopicRules([rule("a")], definitions)
    run(rules.create(rule("b/#")))
    assert rules.reconfigure([rule("a")]) is False
    assert rules.reconfigure([rule("b/c", max_records=1), rule("c")]) is True
    assert names(rules) == ["b/c", "c", "b/#"]
    assert rules.rule_for(b"a") is None
    with pytest.raises(ConfigError, match="two topic rules"):
        rules.reconfigure([rule("x"), rule("x")])
    assert names(rules) == ["b/c", "c", "b/#"]


def test_changes_at_once_all_happen(definitions: Definitions) -> None:
    rules = TopicRules([], definitions)

    async def main() -> None:
        await asyncio.gather(*(rules.create(rule(f"t/{number}")) for number in range(20)))

    run(main())
    assert sorted(names(rules)) == sorted(f"t/{number}" for number in range(20))
    assert TopicRules([], definitions).rules == rules.rules


def test_a_change_that_has_begun_is_finished_though_nobody_waits(definitions: Definitions) -> None:
    rules = TopicRules([], definitions)

    async def main() -> None:
        changed = asyncio.Event()
        rules.on_change.append(changed.set)
        asking = asyncio.ensure_future(rules.create(rule("a")))
        await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        async with asyncio.timeout(20):
            await changed.wait()

    run(main())
    assert names(rules) == ["a"]
    assert TopicRules([], definitions).rules == rules.rules


def test_a_disk_that_fails_changes_nothing(definitions: Definitions, monkeypatch: pytest.MonkeyPatch) -> None:
    rules = TopicRules([], definitions)
    run(rules.create(rule("a")))

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(StorageUnavailable, match=r"definitions\.json: cannot be written: No space left"):
            run(rules.create(rule("b")))
        with pytest.raises(StorageUnavailable):
            run(rules.delete("a"))
    assert names(rules) == ["a"]
    assert TopicRules([], definitions).rules == rules.rules
    assert [path.name for path in definitions.path.parent.iterdir()] == ["definitions.json"]
    assert run(rules.create(rule("b"))) == "created"


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"version": 1}', b'{"version": 1, "rules": [{}]}',
     b'{"version": "1", "rules": []}',
     b'{"version": 1, "rules": [{"topic": "a/#/b"}]}', b'{"version": 1, "rules": [{"topic": "a", "mode": "other"}]}',
     b'{"version": 1, "rules": [{"topic": "a", "retention": {"max_records": -1}}]}'],
)  # fmt: skip
def test_a_damaged_file_is_not_taken_for_no_rules(definitions: Definitions, content: bytes) -> None:
    definitions.path.parent.mkdir()
    definitions.path.write_bytes(content)
    with pytest.raises(StorageCorrupt, match=r"definitions\.json: byte 0: .*put back a copy, or remove the file") as caught:
        TopicRules([], definitions)
    assert caught.value.path == str(definitions.path)


def test_a_file_of_a_newer_version_is_left_alone(definitions: Definitions) -> None:
    definitions.path.parent.mkdir()
    definitions.path.write_bytes(b'{"version": 2, "rules": {"other": "shape"}}')
    with pytest.raises(StorageUnavailable, match="written by a newer version"):
        TopicRules([], definitions)


def test_a_file_that_cannot_be_read(definitions: Definitions) -> None:
    definitions.path.mkdir(parents=True)
    with pytest.raises(StorageUnavailable, match="cannot be read"):
        TopicRules([], definitions)


def test_the_number_of_rules_is_bounded(definitions: Definitions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topics, "MAX_CREATED_RULES", 2)
    rules = TopicRules([], definitions)
    for topic in ("a", "b"):
        run(rules.create(rule(topic)))
    with pytest.raises(ConfigError, match="delete some, or use a pattern"):
        run(rules.create(rule("c")))
    assert run(rules.create(rule("b", max_records=1))) == "changed"


def test_a_file_that_could_not_be_read_again_is_not_written(definitions: Definitions, monkeypatch: pytest.MonkeyPatch) -> None:
    rules = TopicRules([], definitions)
    run(rules.create(rule("a")))
    monkeypatch.setattr(topics, "MAX_FILE_BYTES", 2_000)
    with pytest.raises(ConfigError, match="use patterns"):
        run(rules.create(rule("x" * 2_000)))
    assert [each.topic for each in TopicRules([], definitions).rules] == ["a"]


def test_the_file_is_for_people_too(definitions: Definitions) -> None:
    run(TopicRules([], definitions).create(rule("a", max_records=3)))
    content = msgspec.json.decode(definitions.path.read_bytes())
    assert content == {
        "version": 1,
        "rules": [
            {"topic": "a", "mode": "durable", "retention": {"max_records": 3, "max_bytes": 0, "max_age_seconds": 0.0}},
        ],
    }
