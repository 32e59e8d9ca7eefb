"""Which topics the log keeps: the rules of the configuration, then those made at run time, which survive a restart.

The first rule whose filter matches a topic decides about it. The configuration's stand first, in their order. A rule that is
made at run time stands behind those before it, but ahead of every such rule that is wider than itself, so that an exception
can be made of a pattern later. One that a rule of the configuration covers whole could never decide anything and is refused.

Rules made at run time lie in ``DIRECTORY/topics/definitions.json``. It is replaced as a whole and flushed before a change is
seen by anybody. A file that cannot be read keeps the broker from starting: going on without it would acknowledge messages of
durable topics that no log has.

This module knows rules, and the file they lie in. What is kept of a topic, and who may change rules, is others' business.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal

import msgspec

from nearcast.broker.files import replace_file
from nearcast.config import Retention, TopicRule
from nearcast.errors import ConfigError, StorageCorrupt, StorageUnavailable, TopicUnknown
from nearcast.mqtt import topics
from nearcast.mqtt.topics import covers
from nearcast.topiclog.rules import RuleTable

FILE_NAME = "definitions.json"
FILE_VERSION = 1

MAX_CREATED_RULES = 10_000
"""Rules made at run time. Each is written anew with every change."""

MAX_FILE_BYTES = 64 * 1024 * 1024

Outcome = Literal["created", "changed", "unchanged"]


class _File(msgspec.Struct, frozen=True):
    version: int
    rules: tuple[TopicRule, ...]


class Definitions:
    """The file of the rules made at run time."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.path = directory / FILE_NAME

    def load(self) -> tuple[TopicRule, ...]:
        """What the file holds; nothing, if there is none."""
        try:
            with self.path.open("rb") as file:
                content = file.read(MAX_FILE_BYTES + 1)
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise StorageUnavailable(str(self.path), f"cannot be read: {error.strerror}") from error
        try:
            if len(content) > MAX_FILE_BYTES:
                raise ValueError(f"more than {MAX_FILE_BYTES // 2**20} MiB")
            found = msgspec.json.decode(content)
            if isinstance(found, dict) and isinstance(found.get("version"), int) and found["version"] > FILE_VERSION:
                raise StorageUnavailable(str(self.path), "written by a newer version of nearcast; use that one")
            rules = msgspec.convert(found, _File).rules
            for rule in rules:
                check_rule(rule)
        except (ValueError, ConfigError) as error:
            raise StorageCorrupt(
                str(self.path), 0, f"{error}; put back a copy, or remove the file and create its topics again"
            ) from error
        return rules

    def save(self, rules: tuple[TopicRule, ...]) -> None:
        """Replace the file; returns once the disk has it. After :class:`StorageUnavailable` the old one is there."""
        content = msgspec.json.format(msgspec.json.encode(_File(FILE_VERSION, rules)), indent=2) + b"\n"
        if len(content) > MAX_FILE_BYTES:
            # What could not be read again would keep the broker from starting.
            raise ConfigError(f"the rules made at run time would take more than {MAX_FILE_BYTES // 2**20} MiB: use patterns")
        replace_file(self.path, self._directory / f"{FILE_NAME}.new", content)


class TopicRules:
    """The rules of one broker. ``generation`` changes whenever an answer of :meth:`rule_for` may have changed.

    Without ``definitions`` (a broker without a data directory) there can be no rule at all.
    """

    def __init__(self, configured: Iterable[TopicRule] = (), definitions: Definitions | None = None) -> None:
        self.configured = checked(configured)
        self._definitions = definitions
        if definitions is None and self.configured:
            raise ConfigError(_NO_DIRECTORY, key="topics")
        self.created = definitions.load() if definitions is not None else ()
        self.generation = 0
        self.on_change: list[Callable[[], None]] = []
        self._changing = asyncio.Lock()
        self._table = RuleTable((*self.configured, *self.created))

    @property
    def rules(self) -> tuple[TopicRule, ...]:
        """All of them, in the order in which they decide."""
        return self._table.rules

    @property
    def table(self) -> RuleTable:
        """The rules as they are now, for whoever asks often. A change makes a new one."""
        return self._table

    def rule_for(self, topic: bytes) -> TopicRule | None:
        """The rule that decides about ``topic``; ``None`` when the log does not keep it."""
        return self._table.match(topic)

    def retention_for(self, topic: bytes) -> Retention | None:
        """How much of ``topic`` is kept; ``None`` when no rule keeps it any more."""
        rule = self._table.match(topic)
        return None if rule is None else rule.retention

    # A change that has begun is finished whatever becomes of the client that asked: the file may be replaced by then, and what
    # is in memory must follow it.

    async def create(self, rule: TopicRule) -> Outcome:
        """Make or change the rule of ``rule.topic``; returns once it is on disk and decides."""
        check_rule(rule)
        return await asyncio.shield(asyncio.ensure_future(self._create(rule)))

    async def delete(self, topic_filter: str) -> TopicRule:
        """Remove the rule of exactly this filter, if it was made at run time; returns it."""
        return await asyncio.shield(asyncio.ensure_future(self._delete(topic_filter)))

    async def _create(self, rule: TopicRule) -> Outcome:
        async with self._changing:
            self._check_reach(rule)
            before = next((other for other in self.created if other.topic == rule.topic), None)
            if before == rule:
                return "unchanged"
            if before is not None:
                await self._replace(tuple(rule if other is before else other for other in self.created))
                return "changed"
            if len(self.created) >= MAX_CREATED_RULES:
                raise ConfigError(f"there are {MAX_CREATED_RULES:,} rules already: delete some, or use a pattern")
            place = next((at for at, other in enumerate(self.created) if covers(other.topic, rule.topic)), len(self.created))
            await self._replace((*self.created[:place], rule, *self.created[place:]))
            return "created"

    async def _delete(self, topic_filter: str) -> TopicRule:
        async with self._changing:
            for rule in self.created:
                if rule.topic == topic_filter:
                    await self._replace(tuple(other for other in self.created if other is not rule))
                    return rule
            if any(rule.topic == topic_filter for rule in self.configured):
                raise ConfigError(f"the rule `{topic_filter}` stands in the configuration: remove it there and send SIGHUP")
            decided_by = self._table.match(topic_filter.encode("utf-8", "surrogateescape"))
            hint = f"; what keeps it is the rule `{decided_by.topic}`" if decided_by is not None else ""
            raise TopicUnknown(topic_filter, f"there is no rule `{topic_filter}`{hint}: `nearcast topic list` shows them")

    def reconfigure(self, configured: Iterable[TopicRule]) -> bool:
        """Use these rules of the configuration from now on; returns whether anything changed. Those made at run time stay."""
        rules = checked(configured)
        if rules == self.configured:
            return False
        if self._definitions is None:
            raise ConfigError(_NO_DIRECTORY, key="topics")
        self.configured = rules
        self._changed()
        return True

    def _check_reach(self, rule: TopicRule) -> None:
        if self._definitions is None:
            raise ConfigError("this broker keeps no topics: it has no data directory; start it with --data DIRECTORY")
        for other in self.configured:
            if other.topic == rule.topic:
                raise ConfigError(f"the rule `{rule.topic}` stands in the configuration: change it there, send SIGHUP")
            if covers(other.topic, rule.topic):
                raise ConfigError(
                    f"the configuration's rule `{other.topic}` comes first and decides about all of `{rule.topic}`: "
                    "change the configuration and send SIGHUP"
                )

    async def _replace(self, created: tuple[TopicRule, ...]) -> None:
        if self._definitions is not None:
            # In a thread: a disk under load takes its time.
            await asyncio.to_thread(self._definitions.save, created)
        self.created = created
        self._changed()

    def _changed(self) -> None:
        self._table = RuleTable((*self.configured, *self.created))
        self.generation += 1
        for callback in self.on_change:
            callback()


_NO_DIRECTORY = "`topics` need a data directory: set persistence.directory, or give --data DIRECTORY"


def check_configured(rules: Iterable[TopicRule], directory: str | None) -> tuple[TopicRule, ...]:
    """The rules of a configuration, if a broker with this data directory can keep them."""
    found = checked(rules)
    if found and directory is None:
        raise ConfigError(_NO_DIRECTORY, key="topics")
    return found


def check_rule(rule: TopicRule) -> None:
    """Refuse a rule that could never keep anything."""
    fault = topics.filter_fault(rule.topic, 65_535)
    if not fault and rule.topic.startswith(topics.SHARE_PREFIX):
        fault = "a rule names the filter inside a shared subscription, without $share/NAME/"
    if not fault and rule.topic.split("/", 1)[0] == "$SYS":
        fault = "the broker's own $SYS topics are not kept"
    if not fault and not rule.topic.isprintable() and not topics.is_string(rule.topic.encode("utf-8", "surrogatepass")):
        fault = "a topic filter must be well-formed UTF-8"
    if fault:
        raise ConfigError(f"topic `{rule.topic}`: {fault}", key="topics")


def checked(rules: Iterable[TopicRule]) -> tuple[TopicRule, ...]:
    """The configuration's rules; refuses those that could never decide anything."""
    found: dict[str, TopicRule] = {}
    patterns: list[str] = []
    for rule in rules:
        check_rule(rule)
        if rule.topic in found:
            raise ConfigError(f"there are two topic rules `{rule.topic}`", key="topics")
        wider = next((pattern for pattern in patterns if covers(pattern, rule.topic)), None)
        if wider is not None:
            raise ConfigError(
                f"the topic rule `{rule.topic}` stands behind `{wider}`, which decides about all of it: put it first",
                key="topics",
            )
        found[rule.topic] = rule
        if "+" in rule.topic or "#" in rule.topic:
            patterns.append(rule.topic)
    return tuple(found.values())
