"""What another broker is to get: its session here, from the queue to the link.

The order of things is files, then the queue (:mod:`nearcast.fabric.spool`). Everything stays where it is until the other
broker confirms it, and what was sent is known by its sequence alone: ``last_sent`` is a position in all of it, and going back
after a reconnect is setting it to what the other broker has. At most ``max_unconfirmed_bytes`` are on their way.

After an outage what gathered is sent at a steady rate (*catching up*), so that the link keeps room for what is not queued and
other clients their share of this broker. New messages meanwhile go behind it and raise the rate to twice their own, so that
catching up comes to an end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from nearcast.errors import StorageUnavailable
from nearcast.fabric import frames, messages
from nearcast.fabric.errands import is_word, without_errand
from nearcast.fabric.frames import frame
from nearcast.fabric.spool import (
    FILE_BYTES,
    SPILL_ABOVE_BYTES,
    SPILL_HEADROOM_BYTES,
    SPILL_HEADROOM_MESSAGES,
    SpoolStorage,
    file_of,
    last_of,
    stretches_of,
)
from nearcast.mqtt import records
from nearcast.mqtt.effects import Effects
from nearcast.mqtt.publication import Publication, Terms, build
from nearcast.mqtt.records import number
from nearcast.mqtt.routing import PASSED_ON, SERVED, VIA_SEPARATOR
from nearcast.mqtt.session import NEVER, Pending, Session, Spilled

if TYPE_CHECKING:
    from nearcast.fabric.parts import Peer

#: Begins the client identifier of another broker's session: no client can have such a one [MQTT-1.5.4-2].
PEER_PREFIX: Final = "\0"

#: Less than this is sent at once after an outage.
PACED_ABOVE_BYTES: Final = 1_048_576
#: Seconds of the catch-up rate that may be sent at once: ticks are not exact.
BURST_S: Final = 0.25

#: How often a file that cannot be read is tried, once a second: a process that is out of descriptors gets some back.
MAX_READS: Final = 30

#: Packets of this size go out without being copied behind their head.
COPY_BELOW_BYTES: Final = 2_048

MAX_WORDS: Final = 10_000
WORD_BYTES: Final = 512
"""Words about owned topics find room where messages do not: so many more, of so many bytes."""

# The two streams between brokers, as PROGRESS names them.
UNRELIABLE_STREAM: Final = 0
RELIABLE_STREAM: Final = 1


class OnItsWay:
    """Messages that were sent and not confirmed: the sequence of the last one, and their size."""

    def __init__(self, last: int, size: int) -> None:
        self.last = last
        self.size = size


class Barrier:
    """Somebody waits until everything up to ``upto`` was sent; ``position`` is what they are told then."""

    def __init__(self, token: int, upto: int, position: int) -> None:
        self.token = token
        self.upto = upto
        self.position = position


class PeerSession(Session):
    """See the module. ``waiting`` is the part of the queue that was not sent to the present link yet."""

    def __init__(self, name: str, session_number: int, effects: Effects, max_messages: int, max_bytes: int) -> None:
        super().__init__(PEER_PREFIX + name, session_number, effects, max_messages, max_bytes)
        self.is_peer = True
        self.expiry_seconds = NEVER
        self.peer: Peer | None = None
        self.ready = False
        self.waiting: deque[Pending] = deque()
        self.last_sent = 0
        self.last_confirmed = 0
        self.progress_at = 0.0
        self.on_their_way: deque[OnItsWay] = deque()
        self.unconfirmed_bytes = 0
        self.max_unconfirmed_bytes = 1
        # What every node takes, until the other broker says that it takes more.
        self.max_packet_bytes = messages.MAX_PART_BYTES
        self._barriers: list[Barrier] = []
        # Catching up.
        self.catching_up = False
        self.bytes_per_second = 0
        self._allowance = 0.0
        self._allowed_at = 0.0
        # What lies in files: the next one to be read, and what was read of the one before it.
        self.spool: SpoolStorage | None = None
        self.max_spilled_bytes = 0
        self._memory_messages = max_messages
        self._memory_bytes = max_bytes
        self.spilled_bytes = 0
        self.spilled_messages = 0
        self.spilling: Spilled | None = None
        self.useless_files: list[int] = []
        self._loaded: deque[Pending] = deque()
        self._next_file = 0
        self._next_file_number = 1
        # The disk failed lately: it is not asked again with every message, but when :meth:`try_files_again` says so.
        self._write_waits = False
        self._read_waits = False
        self._failed_reads = 0
        # Counters since the start.
        self.sent_messages = 0
        self.rewinds = 0
        self.dropped_messages = 0
        self.unreadable_files = 0

    def adopt(self, recovered: Session) -> None:
        """Go on with what the journal had of this session."""
        self.durable = recovered.durable
        self.queue = recovered.queue
        self.queued_messages = recovered.queued_messages
        self.queued_bytes = recovered.queued_bytes
        self.spilled = recovered.spilled
        if self.spilled is not None:
            for file in self.spilled:
                self._next_file_number = max(self._next_file_number, file.number + 1)
                self.spilled_bytes += file.size
                self.spilled_messages += file.messages

    # --- taking on ------------------------------------------------------------------------------------------------------

    def deliver(self, publication: Publication, terms: Terms, now: float) -> int:
        said = is_word(terms.via)
        if said:  # others wait for it, whatever had no room here
            self.max_queued_messages += MAX_WORDS
            self.max_queued_bytes += MAX_WORDS * WORD_BYTES
        accepted = self._enqueue(publication, 0, publication.count, terms)
        if said:
            self.max_queued_messages -= MAX_WORDS
            self.max_queued_bytes -= MAX_WORDS * WORD_BYTES
        if accepted != publication.count:
            self.dropped_messages += publication.count - accepted
        if accepted and self.queue is not None:
            if self.catching_up:
                self._allowance += 2.0 * accepted * publication.stride
            self.waiting.append(self.queue[-1])
            self.drain(now)
        if self.spool is not None:
            self.spill()
        return accepted

    def forward(self, publication: Publication, via: str, now: float) -> None:
        peer = self.peer
        if peer is None or not peer.has_room():
            self.effects.stats.dropped_slow_consumer += publication.count
            self.dropped_messages += publication.count
            return
        size = len(publication.packets)
        if size > messages.MAX_PART_BYTES and publication.count > 1:
            for part in publication.parts(size // messages.MAX_PART_BYTES + 1):
                self.forward(part, via, now)
            return
        if size > self.max_packet_bytes and size > messages.MAX_PART_BYTES:
            self.effects.stats.dropped_too_large += publication.count
            return
        self.sent_messages += publication.count
        link = peer.link
        head = messages.head(publication, 0, via, now, 0)
        if link is not None and size >= COPY_BELOW_BYTES:
            link.send(head)
            link.send(publication.packets)
        else:
            peer.send(head + publication.packets)

    # --- sending --------------------------------------------------------------------------------------------------------

    def opened(self, last: int, now: float) -> None:
        """The other broker says what it has: drop that, and send the rest (again)."""
        backwards = self.ready
        self.ready = False
        self.confirmed(last, now)
        self.progress_at = now
        self.waiting = deque(self.queue) if self.queue is not None else deque()
        self._loaded = deque()
        self._next_file = 0
        self.on_their_way = deque()
        self.unconfirmed_bytes = 0
        if backwards:
            self.rewinds += 1
        self.last_sent = last
        self.catching_up = self.bytes_per_second > 0 and self.queued_bytes + self.spilled_bytes > PACED_ABOVE_BYTES
        self._allowance = self.bytes_per_second * BURST_S
        self._allowed_at = now
        self.ready = True
        self.drain(now)

    def closed(self) -> None:
        """There is no link any more."""
        self.ready = False
        self.catching_up = False
        self.max_packet_bytes = messages.MAX_PART_BYTES
        self._barriers = []

    def takes(self) -> bool:
        """Whether the way to the other broker takes more now; if not, the session is drained when it does."""
        peer = self.peer
        return peer is not None and peer.has_room()

    def emptied(self, now: float) -> None:
        """Everything was sent that there is."""

    def drain(self, now: float) -> None:
        if not self.ready:
            return
        if self.catching_up:
            earned = (now - self._allowed_at) * self.bytes_per_second
            self._allowance = min(self._allowance + earned, max(self._allowance, self.bytes_per_second * BURST_S))
            self._allowed_at = now
        while (
            self.unconfirmed_bytes < self.max_unconfirmed_bytes
            and (not self.catching_up or self._allowance > 0)
            and self.takes()
        ):
            pending = self._next()
            if pending is None:
                self.catching_up = self.catching_up and self._read_waits
                if not self._read_waits:
                    self.emptied(now)
                break
            self._pass(pending, now)
        if self._barriers and self.peer is not None:
            self._answer_barriers(self.peer)

    def _next(self) -> Pending | None:
        """The oldest stretch that was not sent."""
        if self.spilled is not None:
            while not self._loaded and self._next_file < len(self.spilled):
                if self._read_waits:
                    return None
                self._load(self.spilled[self._next_file])
            if self._loaded:
                return self._loaded.popleft()
        return self.waiting.popleft() if self.waiting else None

    def _pass(self, pending: Pending, now: float) -> None:
        publication = pending.publication
        if pending.count != publication.count:
            publication = publication.cut(pending.start, pending.count)
        size = len(publication.packets)
        flags = messages.RELIABLE
        if publication.expired(now):  # [MQTT-3.3.2-5]
            flags |= messages.VOID
            self.effects.stats.dropped_expired += publication.count
        elif publication.stride > self.max_packet_bytes and size > messages.MAX_PART_BYTES:
            flags |= messages.VOID
            self.effects.stats.dropped_too_large += publication.count
        else:
            self.sent_messages += publication.count
        self.send_reliable(publication, pending.terms.via, flags, now)
        self.last_sent = publication.sequence + publication.count - 1
        if not self.on_their_way:
            self.progress_at = now  # the wait for a confirmation begins with what there is to confirm
        self.on_their_way.append(OnItsWay(self.last_sent, size))
        self.unconfirmed_bytes += size
        if self.catching_up:
            self._allowance -= size

    def send_reliable(self, publication: Publication, via: str, flags: int, now: float) -> None:
        """Send messages, or that they are void (``flags``), behind the last ones."""
        peer = self.peer
        if peer is None:
            return
        head = messages.head(publication, self.last_sent, via, now, flags)
        link = peer.link
        if flags & messages.VOID:
            peer.send_held(head)
        elif link is not None and len(publication.packets) >= COPY_BELOW_BYTES:
            link.send_held(head)
            link.send_held(publication.packets)
        else:
            peer.send_held(head + publication.packets)

    def confirmed(self, last: int, now: float) -> None:
        """The other broker has everything up to this sequence."""
        on_their_way = self.on_their_way
        while on_their_way and on_their_way[0].last <= last:
            self.unconfirmed_bytes -= on_their_way.popleft().size
        if last > self.last_confirmed:
            self.last_confirmed = last
            self.progress_at = now
        if self.spilled is not None:
            self._confirm_files(last)
        done = self._leave_queue(last)
        if done and self.durable:
            self.effects.records.append(records.dropped(self.number, done))
        self.drain(now)

    def _leave_queue(self, last: int) -> int:
        """Take from the front of the queue what is not beyond ``last``; returns how many messages that were."""
        queue = self.queue
        done = 0
        size = 0
        while queue:
            pending = queue[0]
            if last_of(pending) > last:
                break
            queue.popleft()
            done += pending.count
            size += pending.count * pending.publication.stride
        if done:
            waiting = self.waiting
            while waiting and last_of(waiting[0]) <= last:
                waiting.popleft()
            if not queue:
                self.queue = None
            stats = self.effects.stats
            self.queued_messages -= done
            self.queued_bytes -= size
            stats.queued_messages -= done
            stats.queued_bytes -= size
        return done

    def orphans(self) -> list[tuple[str, Publication]]:
        """What the other broker was to give to one member of a group and has not confirmed, as (filter, messages)."""
        return for_groups(self.queue or ())

    def stuck_since(self) -> float:
        """Since when nothing was confirmed although something is on its way; 0 when nothing is."""
        return self.progress_at if self.ready and self.on_their_way else 0.0

    def has_confirmed(self, sequence: int) -> bool:
        """Whether the other broker has everything that was queued for it up to this sequence."""
        if self.last_confirmed >= sequence:
            return True
        if self.spilled:
            return False
        queue = self.queue
        return not queue or queue[0].publication.sequence + queue[0].start > sequence

    # --- barriers -------------------------------------------------------------------------------------------------------

    def barrier(self, token: int, position: int) -> None:
        """Tell the other broker when everything was sent that is queued by now."""
        upto = last_of(self.queue[-1]) if self.queue else 0
        if self.spilled:
            upto = max(upto, self.spilled[-1].last_sequence)
        self._barriers.append(Barrier(token, upto, position))
        if self.peer is not None and self.ready:
            self._answer_barriers(self.peer)

    def _answer_barriers(self, peer: Peer) -> None:
        while self._barriers and self._barriers[0].upto <= self.last_sent:
            barrier = self._barriers.pop(0)
            peer.send_held(frame(frames.PROGRESS, number(barrier.token), number(RELIABLE_STREAM), number(barrier.position)))

    # --- files ----------------------------------------------------------------------------------------------------------

    def spill(self) -> None:
        """Begin to move the front of the queue into a file, if there is too much of it. One file at a time."""
        spool = self.spool
        if spool is None:
            return
        # A disk that is slow for a moment must not cost messages that it has room for.
        has_room = self.spilled_bytes < self.max_spilled_bytes
        self.max_queued_bytes = self._memory_bytes + (SPILL_HEADROOM_BYTES if has_room else 0)
        self.max_queued_messages = self._memory_messages + (SPILL_HEADROOM_MESSAGES if has_room else 0)
        if self.spilling is not None or self._write_waits or not self.queue or not has_room:
            return
        above_bytes = min(self._memory_bytes // 2, SPILL_ABOVE_BYTES)
        if self.queued_bytes <= above_bytes and self.queued_messages <= self._memory_messages // 2:
            return
        stretches: list[Pending] = []
        count = 0
        size = 0
        for pending in self.queue:
            if size >= FILE_BYTES:
                break
            stretches.append(pending)
            count += pending.count
            size += pending.count * pending.publication.stride
        file = Spilled(self._next_file_number, last_of(stretches[-1]), count, size)
        self._next_file_number += 1
        self.spilling = file
        try:
            spool.write(self.number, file.number, file_of(stretches, self.effects.wall_offset))
        except StorageUnavailable:
            self.spill_failed(file.number)

    def spill_done(self, file_number: int) -> None:
        """The file is on disk: what is in it leaves the queue."""
        file = self.spilling
        if file is None or file.number != file_number:
            return
        self.spilling = None
        done = self._leave_queue(file.last_sequence)
        if not done:  # all of it was confirmed meanwhile
            self.useless_files.append(file_number)
            return
        if self.spilled is None:
            self.spilled = []
            self._next_file = 0
        self.spilled.append(file)
        self.spilled_bytes += file.size
        self.spilled_messages += file.messages
        if self.durable:
            self.effects.records.append(records.spilled(self.number, file, done))
        self.spill()

    def spill_failed(self, file_number: int) -> None:
        """The file cannot be written: the queue stays as it is, and what it has no room for is dropped."""
        if self.spilling is not None and self.spilling.number == file_number:
            self.spilling = None
            self.useless_files.append(file_number)
            self._write_waits = True

    def try_files_again(self, now: float) -> None:
        """Called once in a while: what the disk refused a moment ago it may take or give now."""
        self._write_waits = False
        self.spill()
        if self._read_waits:
            self._read_waits = False
            self.drain(now)

    def _load(self, file: Spilled) -> None:
        if file.last_sequence <= self.last_sent:
            self._next_file += 1
            return
        try:
            data = b"" if self.spool is None else self.spool.read(self.number, file.number)
        except StorageUnavailable:
            self._failed_reads += 1
            if self._failed_reads < MAX_READS:
                self._read_waits = True
                return
            data = b""
        self._failed_reads = 0
        self._next_file += 1
        try:
            self._loaded = stretches_of(data, self.effects.wall_offset, self.last_sent)
        except ValueError:
            # Its messages are gone, and counted. Those behind it must not wait for them: their place is taken by one that
            # expired long ago.
            self.unreadable_files += 1
            self.dropped_messages += file.messages
            nothing = build(b"lost", b"", 1, False, b"", 1e-9)
            nothing.sequence = file.last_sequence
            self._loaded = deque([Pending(nothing, 0, 1, Terms(1, False, b""))])

    def _confirm_files(self, last: int) -> None:
        while self.spilled and self.spilled[0].last_sequence <= last:
            file = self.spilled.pop(0)
            self._next_file = max(0, self._next_file - 1)
            self.spilled_bytes -= file.size
            self.spilled_messages -= file.messages
            self.useless_files.append(file.number)
            if self.durable:
                self.effects.records.append(records.unspilled(self.number, file.number))
        if not self.spilled:
            self.spilled = None
            self._next_file = 0


def for_groups(stretches: Iterable[Pending]) -> list[tuple[str, Publication]]:
    """What of this another broker was to give to one member of a group, as (filter, messages)."""
    found: list[tuple[str, Publication]] = []
    for pending in stretches:
        for name in without_errand(pending.terms.via).split(VIA_SEPARATOR):
            if name and name[0] != SERVED:
                found.append((name.lstrip(PASSED_ON), pending.publication.cut(pending.start, pending.count)))
    return found
