"""Retained messages, the same at every broker: the last one wins, whoever published it and wherever.

Every change has a version (:class:`~nearcast.mqtt.retained.Version`): the fabric's stamp, which rises over all brokers that
hear of each other, and the origin, a broker and its epoch. Brokers with subscribers get a change with the message itself,
which carries the stamp. All others get, every ``retained_interval_seconds``, the last message of each topic that changed.
A subscription is therefore answered locally; what its broker learns later of a topic that matches, and did not get as a
message, the subscriber gets then. A cleared topic keeps its version for a while, so that an old message does not come back.

RETAINED brings changes, each with its content, or the word that the message itself was sent already. Its last frame says up
to which stamp of which origin everything is known now (``through``). RETAINED_SEEN tells another broker how far that is; the
answer is what is newer. Everyone answers for itself, for origins that it cannot reach, which therefore cannot answer
themselves, and for what the asker itself once published and may have lost. It is said when a link comes up, when a broker was
lost (others may have got more of it), and by a receiver that misses something.

What goes to one broker is a line of *jobs*, each an answer or the changes of an interval. A job waits until all messages that
were on their way to that broker when it was made have arrived: so nothing that it brings is older than what was delivered,
and nothing of it comes a second time as a message.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from nearcast.errors import RemoteProtocolError
from nearcast.fabric import frames
from nearcast.fabric.frames import frame
from nearcast.fabric.parts import FOREVER, Part, Peer
from nearcast.mqtt import reasons, records
from nearcast.mqtt.publication import Publication, Terms
from nearcast.mqtt.records import Fields, blob, number
from nearcast.mqtt.retained import Version
from nearcast.mqtt.routing import GROUP, Target
from nearcast.mqtt.topics import is_string, topic_fault

if TYPE_CHECKING:
    from nearcast.fabric.fabric import Fabric

#: A frame is sent when it has this many bytes, and the next one a little later: what nobody asked for must not delay messages.
PIECE_BYTES: Final = 131_072
PIECE_S: Final = 0.005
#: How often it is looked whether a job that waits may go on.
LOOK_S: Final = 0.05
#: Batches that may wait for one broker. Beyond, they are dropped and everything newer than the last one is sent instead.
MAX_JOBS: Final = 8
SWEEP_S: Final = 60.0
MAX_TOLD: Final = 10_000

# What an entry of RETAINED says.
CLEARED: Final = 0
CONTENT: Final = 1
SENT: Final = 2

_V5: Final = 1
_FORWARDABLE: Final = 2

_NO_PEERS: Final[list[Target]] = []


def origin_id(name: str, epoch: int) -> str:
    """A broker as the origin of changes. One that forgot everything is another origin."""
    return f"{name}\0{epoch:x}"


class Job:
    """Changes to be sent to one broker: all of a batch, or what is newer than the receiver's ``seen``."""

    def __init__(self, topics: list[bytes], barrier: int, limit: int) -> None:
        self.topics = topics
        self.position = 0
        self.barrier = barrier
        #: Own changes up to this stamp are part of it; later ones are in the next batch.
        self.limit = limit
        self.sent_as_message: dict[bytes, list[Target]] = {}
        self.seen: dict[str, int] | None = None
        self.through: dict[str, int] = {}
        self.answers_for: dict[str, bool] = {}


class Line:
    """What goes to one broker, and what came from it."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.jobs: deque[Job] = deque()
        #: What it said it knows, brought up to date. Before it says that, nothing is sent: the answer includes everything.
        self.seen: dict[str, int] | None = None
        self.next_at = 0.0
        #: Whether something it said it had sent did not arrive.
        self.missing = False


class Replication(Part):
    """See the module. The engine asks it for the version of whatever is to be retained."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._engine = fabric.engine
        self._retained = fabric.engine.retained
        self._interval: float = fabric.settings.retained_interval_seconds
        self._keep_s: float = fabric.settings.keep_for_seconds
        self._me = ""
        #: The stamp of the last change that was published here.
        self._last = 0
        self._changed: dict[bytes, list[Target]] = {}
        self._batch_at = FOREVER
        #: Topics without a message, oldest first, and since when; topics whose message found no room here, and its origin.
        self._cleared: dict[bytes, float] = {}
        self._unkept: dict[bytes, str] = {}
        #: Topics whose message came from a third broker while its origin is away, and that origin. It may have been queued for
        #: us there, so subscribers are told when that is known.
        self._untold: dict[bytes, str] = {}
        #: The latest change of others that is known here, by origin: a message may bring one that no batch has brought yet.
        self._latest: dict[str, int] = {}
        # Of topics whose messages may come by other ways than from their origin: what subscribers were told.
        self._told: dict[tuple[bytes, int, str], None] = {}
        self._lines: dict[str, Line] = {}
        self._reconcile_at = FOREVER
        self._sweep_at = 0.0
        fabric.engine.retained.replica = self
        fabric.add_part(self, [frames.RETAINED_SEEN, frames.RETAINED])

    def begin(self, now: float) -> None:
        """Go on with what the journal had. Messages that were retained outside the fabric become part of it."""
        fabric = self._fabric
        self._me = origin_id(fabric.name, fabric.epoch)
        versions = self._retained.versions
        for topic, version in versions.items():
            fabric.seen_stamp(version.stamp)
            if version.origin == self._me:
                self._last = max(self._last, version.stamp)
            self._latest[version.origin] = max(self._latest.get(version.origin, 0), version.stamp)
            if self._retained.get(topic) is None:
                self._cleared[topic] = now
        self._last = max(self._last, self._retained.seen.pop(self._me, 0))
        effects = self._engine.effects
        for message in self._retained.all():
            if message.topic[:5] == b"$SYS/" or message.topic in versions:
                continue
            self._last = fabric.stamp(now)
            version = Version(self._last, self._me)
            versions[message.topic] = version
            if effects.gated:
                effects.records.append(records.retained(message, effects.wall_offset, version))

    # --- what is published here, or comes as a message ------------------------------------------------------------------

    def admit(self, publication: Publication, now: float) -> bool:
        if not self._me:
            self._fabric.begin(now)
        topic = publication.topic
        author = publication.author
        if publication.origin == 0 and not author:
            if not self._fabric.classes.crosses(topic):
                return True
            self._last = self._fabric.stamp(now)
            publication.stamp = self._last
            self._set(topic, self._last, self._me)
            route = self._engine.router.route_for(topic)
            self._changed[topic] = route.peers
            if self._batch_at == FOREVER:
                self._batch_at = now + self._interval
            return True
        peer = self._fabric.by_number[publication.origin]
        if publication.stamp == 0 or (peer is None and not author):
            return False  # it was kept for us for long, and comes with what is newer
        origin = author if peer is None or author else origin_id(peer.name, peer.epoch)
        version = self._retained.versions.get(topic)
        # An equal one is the same publication's next part.
        if version is not None and (version.stamp, version.origin) > (publication.stamp, origin):
            return False
        self._fabric.seen_stamp(publication.stamp)
        self._set(topic, publication.stamp, origin)
        return True

    def was_told(self, publication: Publication, author: str) -> bool:
        """Whether subscribers here had this very message as the one that is kept, before it came as a message."""
        return publication.count == 1 and (publication.topic, publication.stamp, author) in self._told

    def _set(self, topic: bytes, stamp: int, origin: str) -> None:
        self._retained.versions[topic] = Version(stamp, origin)
        if stamp > self._latest.get(origin, 0):
            self._latest[origin] = stamp
        self._cleared.pop(topic, None)
        self._unkept.pop(topic, None)
        self._untold.pop(topic, None)

    def cleared(self, topic: bytes, kept: bool, now: float) -> None:
        self._cleared[topic] = now
        version = self._retained.versions.get(topic)
        if not kept and version is not None and version.origin != self._me:
            self._unkept[topic] = version.origin
        if len(self._cleared) > self._fabric.limits.max_retained_messages:
            self._forget(next(iter(self._cleared)))

    def _forget(self, topic: bytes) -> None:
        """The topic has had no message for long."""
        self._cleared.pop(topic, None)
        self._unkept.pop(topic, None)
        del self._retained.versions[topic]
        effects = self._engine.effects
        if effects.gated:
            effects.records.append(records.unretained(topic, None))

    # --- who comes and goes ---------------------------------------------------------------------------------------------

    def peer_up(self, peer: Peer, now: float) -> None:
        self._lines[peer.name] = Line(peer)
        self._say_seen(peer)
        for origin in set(self._untold.values()):
            if origin.partition("\0")[0] == peer.name and origin != origin_id(peer.name, peer.epoch):
                self._tell_after_all(origin, now)  # it knows nothing any more of what it had queued

    def peer_down(self, peer: Peer, now: float) -> None:
        self._lines.pop(peer.name, None)
        # It may have told others more than us.
        self._reconcile_at = min(self._reconcile_at, now + 2 * self._interval)

    def peer_gone(self, peer: Peer, now: float) -> None:
        for origin in set(self._untold.values()):
            if origin.partition("\0")[0] == peer.name:
                self._tell_after_all(origin, now)

    def _say_seen(self, peer: Peer) -> None:
        seen = dict(self._retained.seen)
        seen[self._me] = self._last
        parts = [number(len(seen))]
        for origin, stamp in seen.items():
            parts.append(blob(origin.encode("utf-8")))
            parts.append(number(stamp))
        peer.send_held(frame(frames.RETAINED_SEEN, *parts))

    def handle(self, peer: Peer, content: bytes, now: float) -> None:
        line = self._lines.get(peer.name)
        if line is None:
            return
        if content[0] == frames.RETAINED:
            self._take(line, Fields(content), now)
            return
        fields = Fields(content)
        seen: dict[str, int] = {}
        for _ in range(fields.number()):
            origin = fields.blob().decode("utf-8")
            seen[origin] = fields.number()
        self._answer(line, seen, now)

    # --- sending --------------------------------------------------------------------------------------------------------

    def _answer(self, line: Line, seen: dict[str, int], now: float) -> None:
        """Send whatever is newer than what the other broker has seen. Batches that wait are part of that."""
        job = Job([], self._barrier(), self._last)
        job.seen = seen
        unkept = set(self._unkept.values())
        for origin, stamp in self._retained.seen.items():
            if origin not in unkept and stamp > seen.get(origin, 0) and self._answers_for(origin, line.peer):
                job.through[origin] = stamp
        for origin, stamp in self._latest.items():
            if stamp > seen.get(origin, 0) and self._answers_for(origin, line.peer):
                job.topics = list(self._retained.versions)
                break
        if job.through or unkept or self._last > seen.get(self._me, 0):
            job.topics = list(self._retained.versions)
        # Said in any case: messages that were on their way have arrived then.
        job.through[self._me] = self._last
        line.seen = seen
        line.jobs.clear()
        line.jobs.append(job)
        self._work(line, now)

    def _answers_for(self, origin: str, asker: Peer) -> bool:
        name, _, epoch = origin.partition("\0")
        if name == self._fabric.name or name == asker.name:
            return True
        peer = self._fabric.peers.get(name)
        return peer is None or not peer.up or f"{peer.epoch:x}" != epoch

    def _barrier(self) -> int:
        return self._engine.router.next_sequence - 1

    def _make_batches(self, now: float) -> None:
        changed = self._changed
        self._changed = {}
        self._batch_at = FOREVER
        topics = list(changed)
        for line in self._lines.values():
            if line.seen is None:
                continue
            if len(line.jobs) >= MAX_JOBS:
                self._answer(line, line.seen, now)
                continue
            job = Job(topics, self._barrier(), self._last)
            job.sent_as_message = changed
            job.through[self._me] = self._last
            line.jobs.append(job)
            self._work(line, now)

    def _work(self, line: Line, now: float) -> None:
        """Send the next piece of the first job, if it is time for it."""
        if not line.jobs or now < line.next_at:
            return
        job = line.jobs[0]
        if not line.peer.has_room() or not line.peer.session.has_confirmed(job.barrier):
            line.next_at = now + LOOK_S
            return
        writer = _Writer()
        while job.position < len(job.topics) and writer.size < PIECE_BYTES:
            self._write(writer, line.peer, job, job.topics[job.position], now)
            job.position += 1
        if job.position >= len(job.topics):
            line.jobs.popleft()
            for origin, stamp in job.through.items():
                writer.through(origin, stamp)
                if line.seen is not None:
                    line.seen[origin] = stamp
        line.next_at = now + PIECE_S if line.jobs else 0.0
        line.peer.send_held(writer.frame())

    def _write(self, writer: _Writer, peer: Peer, job: Job, topic: bytes, now: float) -> None:
        version = self._retained.versions.get(topic)
        if version is None or (version.origin == self._me and version.stamp > job.limit) or topic in self._unkept:
            return
        if job.seen is not None:
            answers = job.answers_for.get(version.origin)
            if answers is None:
                answers = self._answers_for(version.origin, peer)
                job.answers_for[version.origin] = answers
            if not answers or version.stamp <= job.seen.get(version.origin, 0):
                return
        elif version.origin != self._me:
            return  # another broker's came later, which sends it
        message = self._retained.get(topic)
        if message is None or message.expired(now):
            writer.entry(topic, version, CLEARED)
            return
        for target in job.sent_as_message.get(topic, _NO_PEERS):
            if target.session is peer.session:
                writer.entry(topic, version, SENT)
                return
        writer.message(topic, version, message, now)

    # --- receiving ------------------------------------------------------------------------------------------------------

    def _take(self, line: Line, fields: Fields, now: float) -> None:
        origins = [fields.blob().decode("utf-8") for _ in range(fields.number())]
        sender = origin_id(line.peer.name, line.peer.epoch)
        for _ in range(fields.number()):
            topic = fields.blob()
            stamp = fields.number()
            origin = origins[fields.number()]
            what = fields.number()
            message = _read_message(topic, fields, now) if what == CONTENT else None
            version = self._retained.versions.get(topic)
            if version is not None and not version.is_before(stamp, origin):
                continue
            if what == SENT:
                line.missing = True
                continue
            self._check_topic(topic)
            self._fabric.seen_stamp(stamp)
            self._set(topic, stamp, origin)
            if origin == self._me and stamp > self._last:
                # It was lost here, in a crash, before the journal had it, and so others may never have heard of it.
                self._last = stamp
                self._changed[topic] = []
                self._batch_at = min(self._batch_at, now + self._interval)
            if message is None:
                self._engine.inbound.clear_retained(topic, now)
            else:
                message.origin = line.peer.number
                message.stamp = stamp
                self._engine.inbound.store_retained(message, now)
                if origin != sender and self._may_queue(origin):
                    self._untold[topic] = origin
                else:
                    self._tell_subscribers(message, now)
        through = [(origins[fields.number()], fields.number()) for _ in range(fields.number())]
        if not through:
            return
        if line.missing:
            line.missing = False
            self._say_seen(line.peer)
            return
        if self._untold:
            self._tell_after_all(sender, now)
        effects = self._engine.effects
        for origin, stamp in through:
            self._fabric.seen_stamp(stamp)
            if origin != self._me and stamp > self._retained.seen.get(origin, 0):
                self._retained.seen[origin] = stamp
                if effects.gated:
                    effects.records.append(records.retained_seen(origin, stamp))

    def _check_topic(self, topic: bytes) -> None:
        if not is_string(topic) or topic_fault(topic, self._fabric.limits.max_topic_levels):
            raise RemoteProtocolError(reasons.TOPIC_NAME_INVALID, "a retained message with a topic that is none")

    def _may_queue(self, origin: str) -> bool:
        """Whether an origin may have the message queued for us."""
        name, _, epoch = origin.partition("\0")
        peer = self._fabric.peers.get(name)
        return peer is not None and f"{peer.epoch:x}" == epoch

    def _tell_after_all(self, origin: str, now: float) -> None:
        """All messages of an origin that were queued for us have arrived, or never will: tell the rest."""
        for topic in [topic for topic, of in self._untold.items() if of == origin]:
            del self._untold[topic]
            message = self._retained.get(topic)
            if message is not None:
                self._tell_subscribers(message, now)

    def _tell_subscribers(self, message: Publication, now: float) -> None:
        """Whoever subscribed before this broker knew the message gets it now, as a subscription is answered."""
        version = self._retained.versions.get(message.topic)
        if version is not None and self._fabric.classes.reach(message.topic) >= GROUP:
            self._told[message.topic, version.stamp, version.origin] = None
            if len(self._told) > MAX_TOLD:
                del self._told[next(iter(self._told))]
        wanted: dict[str, Target] = {}
        for subscription in self._engine.tree.match(message.topic).subscriptions:
            session = subscription.session
            if session.is_peer or subscription.retain_handling == 2:
                continue
            target = wanted.get(session.client_id)
            if target is None:
                wanted[session.client_id] = Target(subscription)
            else:
                target.merge(subscription)
        for target in wanted.values():
            terms = Terms(min(message.qos, target.qos), True, target.identifiers)
            self._engine.router.deliver(target.session, message, terms, now)
        message.forget_forms()

    # --- time -----------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        if now >= self._batch_at:
            self._make_batches(now)
        for line in self._lines.values():
            if line.jobs:
                self._work(line, now)
        if now >= self._reconcile_at:
            self._reconcile_at = FOREVER
            for line in self._lines.values():
                self._say_seen(line.peer)
        if now >= self._sweep_at:
            self._sweep_at = now + SWEEP_S
            self._sweep(now)

    def _sweep(self, now: float) -> None:
        """Forget what was cleared long ago, and origins that nothing is left of."""
        while self._cleared:
            topic = next(iter(self._cleared))
            if now - self._cleared[topic] < self._keep_s:
                break
            self._forget(topic)
        named = {version.origin for version in self._retained.versions.values()}
        for origin in [origin for origin in self._latest if origin not in named]:
            del self._latest[origin]
        effects = self._engine.effects
        for origin in list(self._retained.seen):
            name, _, epoch = origin.partition("\0")
            peer = self._fabric.peers.get(name)
            if origin not in named and (peer is None or f"{peer.epoch:x}" != epoch):
                del self._retained.seen[origin]
                if effects.gated:
                    effects.records.append(records.retained_seen(origin, 0))

    def next_deadline(self) -> float:
        deadline = min(self._batch_at, self._reconcile_at, self._sweep_at)
        for line in self._lines.values():
            if line.jobs:
                deadline = min(deadline, line.next_at)
        return deadline


class _Writer:
    """A RETAINED frame in the making: origins by number, entries, how far they reach."""

    def __init__(self) -> None:
        self.size = 0
        self._origins: dict[str, int] = {}
        self._entries: list[bytes] = []
        self._count = 0
        self._through: list[bytes] = []

    def _origin(self, origin: str) -> bytes:
        return number(self._origins.setdefault(origin, len(self._origins)))

    def entry(self, topic: bytes, version: Version, what: int) -> None:
        head = blob(topic) + number(version.stamp) + self._origin(version.origin) + number(what)
        self._entries.append(head)
        self._count += 1
        self.size += len(head)

    def message(self, topic: bytes, version: Version, message: Publication, now: float) -> None:
        self.entry(topic, version, CONTENT)
        left_ms = max(1, int((message.expires_at - now) * 1e3) + 1) if message.expires_at > 0 else 0
        flags = (_V5 if message.v5 else 0) | (_FORWARDABLE if message.raw_flags >= 0 else 0)
        body = b"".join(
            (number(flags), number(left_ms), number(message.head_size), blob(message.properties), blob(message.packets))
        )
        self._entries.append(body)
        self.size += len(body)

    def through(self, origin: str, stamp: int) -> None:
        self._through.append(self._origin(origin) + number(stamp))

    def frame(self) -> bytes:
        parts = [number(len(self._origins))]
        parts += [blob(origin.encode("utf-8")) for origin in self._origins]
        parts.append(number(self._count))
        parts += self._entries
        parts.append(number(len(self._through)))
        parts += self._through
        return frame(frames.RETAINED, *parts)


def _read_message(topic: bytes, fields: Fields, now: float) -> Publication:
    flags = fields.number()
    left_ms = fields.number()
    head_size = fields.number()
    properties = fields.blob()
    packets = fields.blob()
    if len(packets) < 4 or packets[0] & 0xF0 != 0x30:
        raise ValueError("a retained message that is no PUBLISH")
    expires_at = now + left_ms / 1e3 if left_ms else 0.0
    v5 = (flags & _V5) != 0
    return Publication(topic, packets, 1, len(packets), v5, head_size, properties, expires_at, (flags & _FORWARDABLE) != 0)
