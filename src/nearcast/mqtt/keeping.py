"""Topics that are kept: what the engine asks of the log, which it does not know, and how their promises survive a crash.

A route remembers whether its topic is kept (:class:`Keeping`) until rules or subscriptions change, so that a topic that is not
costs one comparison per publication. A message of a *durable* topic is acknowledged once log and journal are on disk; one of a
topic that is only *tapped* is copied into the log as it passes, and nothing waits for that.

A QoS 2 message must be in the log once, whatever happens, and its packet identifier is in the journal. These are two files,
and a crash can leave either ahead of the other. So each such publication of a session that outlives its connection gets the
next *mark*, a number that rises by one: the log has its messages and the mark together or not at all, and the journal a KEPT
record with the mark and the identifiers. Both are written in one go, the log first; and no flush of the journal begins before
a flush of the log that covers everything written until then. After a crash

- *the log is ahead*: it has a mark that the journal has not. Nothing from there on was promised to anybody, nor shown to a
  reader, because that waits for both files. The log is cut off before that mark, and the client, which has no PUBREC, sends
  the message again.
- *the journal is ahead*: it has a mark that the log has not. Only a power cut does that, when the kernel wrote back the pages
  of one file by itself and not those of the other. Sessions have the message by then and must not get it twice, so the
  identifier stays known, and is noted as *not kept*: when the client sends the message again, it is kept and not delivered.

A journal that is lost or damaged must not cost the log anything. Each mark therefore also says up to which mark the journal
was known to be on disk, and whatever is first written after that has come further brings a mark that says so. A journal that
ends before that has lost something, and the log is left as it is: a QoS 2 message may then be in it twice.

What is kept of a message is topic, payload, QoS, retain flag, publisher, and its properties, the message expiry interval as it
was on arrival among them. Expiry itself means nothing to the log: it keeps what its retention says.
"""

from __future__ import annotations

from typing import Protocol


class MarkedLog(Protocol):
    """The log as recovery of the journal meets it."""

    def reconcile(self, journal_mark: int) -> int:
        """Cut off what lies beyond the journal's last mark and was never promised; returns the log's last mark.

        -1 says that there was no journal at all. One is on disk before the first mark is given, so it was removed.
        """


class Keeping(Protocol):
    """One topic's way into the log. Topics come into being there with their first message."""

    durable: bool

    def keep(self, payloads: list[bytes], qos: int, retain: bool, properties: bytes, publisher: bytes, mark: int) -> bool:
        """Append messages, to be written by and by; with a ``mark``, together with it or not at all.

        False, and nothing was done, when the log has no room for another topic.
        """


class Keeper(Protocol):
    """The log and its rules."""

    def keeping(self, topic: bytes) -> Keeping | None:
        """How a topic is kept, or ``None`` when it is not."""
