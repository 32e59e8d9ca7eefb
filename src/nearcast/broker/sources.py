"""Where records of a topic are: in this broker's own log, in that of a replica set which is hosted here, or elsewhere.

A *source* is a log by its name: a replica set's, or "" for the broker's own. The class of a topic says which one it is, so
that a name has one source, and a filter with wildcards may have several. A replica may know less than its leader; whoever has
to have everything waits for :meth:`Sources.catch_up`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from nearcast.broker.topic_files import TopicFiles
from nearcast.errors import RequestRefused
from nearcast.fabric.classes import SET
from nearcast.mqtt import reasons
from nearcast.topiclog import wire
from nearcast.topiclog.log import TopicLog

if TYPE_CHECKING:
    from nearcast.broker.process import Broker
    from nearcast.broker.set_lines import SetLines
    from nearcast.fabric.replica_sets import ReplicaSets

HERE: Final = "here"
"""What a request says that is about a broker's own log and no other."""

DEFINITE_S: Final = 3.0
"""How long somebody waits who asks for the newest records of a replica set, when nobody can say which those are: several
elections, and less than a broker waits that asks for its client."""

FRESH_S: Final = 1.0
"""The same for somebody who reads all that there is, and then gets what this replica knows."""

PAUSE_S: Final = 0.05
"""Before it is asked again."""


class Kept:
    """A log that is read. ``hidden``: topics that it has and does not keep any more, because a replica set does."""

    __slots__ = ("files", "hidden", "log", "source")

    def __init__(
        self, source: str, log: TopicLog, files: TopicFiles | None, hidden: Callable[[bytes], bool] | None = None
    ) -> None:
        self.source = source
        self.log = log
        self.files = files
        self.hidden = hidden


class Sources:
    """See the module."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    @property
    def sets(self) -> ReplicaSets:
        links = self._broker.links
        if links is None:
            raise RequestRefused(
                reasons.IMPLEMENTATION_SPECIFIC, "this broker is not part of a fabric: it has no replica sets"
            )
        return links.fabric.sets

    @property
    def lines(self) -> SetLines:
        """The way to other brokers."""
        links = self._broker.links
        if links is None:
            raise RequestRefused(
                reasons.IMPLEMENTATION_SPECIFIC, "this broker is not part of a fabric: it reaches no other one"
            )
        return links.lines

    @property
    def own_log(self) -> TopicLog:
        log = self._broker.topics.log
        if log is None:
            raise RequestRefused(
                reasons.IMPLEMENTATION_SPECIFIC,
                "this broker keeps no topics: it has no data directory; start it with --data DIRECTORY",
            )
        return log

    def leader_of(self, source: str) -> str:
        """Who leads a set, as far as is known here."""
        return self.sets.leader_of(source) if source else ""

    # --- which ----------------------------------------------------------------------------------------------------------

    def set_of(self, topic: bytes) -> str:
        """The replica set that keeps a topic; empty if none does."""
        links = self._broker.links
        return "" if links is None else links.fabric.classes.set_of(topic)

    def of(self, filters: list[str], keeper: str, *, trusted: bool) -> list[str]:
        """The sources that may have topics which a filter matches; without filters, all."""
        if keeper.startswith(SET):
            source = keeper[len(SET) :]
            if not trusted:  # what a set keeps for itself is nobody's to read
                raise RequestRefused(reasons.NOT_AUTHORIZED, "only brokers say in which log to look")
            if not self.serves(source):
                raise _misplaced(source)
            return [source]
        links = self._broker.links
        if keeper == HERE or links is None:
            return [""]
        classes = links.fabric.classes
        found: set[str] = set()
        for topic_filter in filters or ["#"]:
            if "+" in topic_filter or "#" in topic_filter:
                set_names, others = classes.keepers(topic_filter)
                found.update(set_names)
                if others and (self._broker.topics.log is not None or not set_names):
                    found.add("")
            else:
                found.add(classes.set_of(topic_filter.encode()))
        return sorted(found)

    def part_of(self, content: wire.Open, source: str) -> wire.Open:
        """What of a stream is one source's."""
        starts = {name: index for name, index in content.start_indexes.items() if self.set_of(name.encode()) == source}
        ends = {name: index for name, index in content.end_indexes.items() if self.set_of(name.encode()) == source}
        filters = [each for each in content.filters if "+" in each or "#" in each or self.set_of(each.encode()) == source]
        return msgspec.structs.replace(
            content, filters=filters, start_indexes=starts, end_indexes=ends, keeper=SET + source if source else HERE
        )

    # --- here -----------------------------------------------------------------------------------------------------------

    def serves(self, source: str) -> bool:
        """Whether the log is here."""
        return not source or (self._broker.links is not None and source in self.sets.hosted)

    def kept(self, source: str) -> Kept:
        """The log, which is here."""
        links = self._broker.links
        if source:
            found = None if links is None else links.replicating.readable(source)
            if found is None:
                raise _misplaced(source)
            return Kept(source, found[0], found[1])
        files = self._broker.topics.files
        if links is None or not links.fabric.sets.definitions:
            return Kept("", self.own_log, files)
        classes = links.fabric.classes
        return Kept("", self.own_log, files, lambda topic: bool(classes.set_of(topic)))

    def may_lag(self, source: str) -> bool:
        """Whether more may be committed than the replica here knows."""
        return bool(source) and not self.sets.hosted[source].leads

    def lags(self, source: str, content: wire.Open) -> bool:
        """Whether a stream is to wait for what is committed elsewhere: one that ends with what there is, at a replica that may
        know less."""
        if not source or content.follow:
            return False
        return self.may_lag(source) or self.is_beyond(source, content)

    def is_beyond(self, source: str, content: wire.Open) -> bool:
        """Whether a stream is about records that the replica here does not know to be committed."""
        log = self.kept(source).log
        for name, index in (*content.end_indexes.items(), *content.start_indexes.items()):
            topic = log.topic(name.encode(), create=False)
            if index > (1 if topic is None else topic.committed_index):
                return True
        return False

    async def catch_up(self, source: str, patience_s: float = DEFINITE_S) -> None:
        """Return once all that is committed in a set now may be read here. Raises :class:`RequestRefused`."""
        loop = asyncio.get_running_loop()
        until = loop.time() + patience_s
        while loop.time() < until:
            hosted = self.sets.hosted.get(source)
            if hosted is None:
                raise _misplaced(source)
            told: asyncio.Future[bool] = loop.create_future()
            hosted.read_index(partial(_tell, told), self._broker.monotonic())
            self._broker.flush()
            try:
                async with asyncio.timeout_at(until):
                    if await told:
                        return
            except TimeoutError:
                break
            await asyncio.sleep(PAUSE_S)
        raise RequestRefused(
            reasons.SERVER_UNAVAILABLE,
            f"replica set {source} has no leader that a majority follows: nobody can say what its newest records are",
        )

    async def refresh(self, source: str) -> None:
        """The same for somebody who would rather have what is known here than nothing."""
        if self.may_lag(source):
            with contextlib.suppress(RequestRefused):
                await self.catch_up(source, FRESH_S)


def _misplaced(source: str) -> RequestRefused:
    return RequestRefused(reasons.USE_ANOTHER_SERVER, f"replica set {source} is not hosted here")


def _tell(future: asyncio.Future[bool], known: bool) -> None:
    if not future.done():
        future.set_result(known)
