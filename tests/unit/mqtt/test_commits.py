"""Output that goes through another connection's output, and records that come up while output is sent."""

from __future__ import annotations

import random

from nearcast.config import EngineSettings, Limits
from nearcast.mqtt.access import AllowAll, Peer
from nearcast.mqtt.commits import Commits
from nearcast.mqtt.connection import Connection
from nearcast.mqtt.engine import Engine


class Memory:
    """A journal that needs no flush."""

    def __init__(self, story: list[str]) -> None:
        self.needs_sync = False
        self.unsynced = False
        self.story = story

    def append(self, records: list[bytes]) -> None:
        self.story.append(f"journal {b' '.join(records).decode()}")


class Plain:
    """A transport that tells what it was given."""

    def __init__(self, name: str, story: list[str]) -> None:
        self.name = name
        self.story = story
        self.connection: Connection | None = None
        self.held_bytes = 0
        self.waits_to_close = False

    def send(self, chunks: list[bytes]) -> None:
        self.story.append(f"{self.name} {b' '.join(chunks).decode()}")

    def close(self) -> None:
        self.story.append(f"{self.name} closed")


class Tunnel(Plain):
    """A transport inside another connection's; sending also brings up a record."""

    def __init__(self, name: str, story: list[str], outer: Connection) -> None:
        super().__init__(name, story)
        self.outer = outer

    def send(self, chunks: list[bytes]) -> None:
        super().send(chunks)
        self.outer.effects.records.append(b"made-by-sending")
        self.outer.push_held(b"tunnelled")


def opened(durable: bool) -> tuple[Engine, Commits, list[str]]:
    story: list[str] = []
    engine = Engine(EngineSettings(limits=Limits(), durable=durable), AllowAll(), None, random.Random(1))
    commits = Commits(engine, lambda: 0.0, lambda: None, lambda error: None)
    if durable:
        commits.journal = Memory(story)
    return engine, commits, story


def test_what_goes_through_another_connection_leaves_in_the_same_flush_behind_its_records() -> None:
    engine, commits, story = opened(durable=True)
    outer = engine.open(Peer("a"), Plain("outer", story), 0.0)
    inner = engine.open(Peer("b"), Tunnel("inner", story, outer), 0.0)
    inner.push(b"hello")
    outer.touch()
    commits.flush()
    assert story == ["inner hello", "journal made-by-sending", "outer tunnelled"]
    assert not engine.effects.dirty


def test_without_a_journal_it_leaves_as_well() -> None:
    engine, commits, story = opened(durable=False)
    outer = engine.open(Peer("a"), Plain("outer", story), 0.0)
    inner = engine.open(Peer("b"), Tunnel("inner", story, outer), 0.0)
    outer.touch()
    inner.push(b"hello")
    commits.flush()
    assert story == ["inner hello", "outer tunnelled"]
