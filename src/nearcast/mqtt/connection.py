"""One transport's MQTT state: framing of what comes in, output that waits to go out, aliases and limits agreed in CONNECT.

A connection lives as long as its transport; what must outlive it is the :class:`~nearcast.mqtt.session.Session`'s.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from nearcast.config import Limits
from nearcast.mqtt.access import Peer
from nearcast.mqtt.codec import encode
from nearcast.mqtt.effects import Effects
from nearcast.mqtt.packets import MQTT_5, ConnAck, Disconnect
from nearcast.mqtt.publication import V5_FLAG, Publication, Terms
from nearcast.mqtt.wire import split_packets

if TYPE_CHECKING:
    from nearcast.mqtt.packets import Connect
    from nearcast.mqtt.pledges import Answer
    from nearcast.mqtt.session import Session

AWAITING_CONNECT: Final = 0
AUTHENTICATING: Final = 1
CONNECTED: Final = 2
CLOSED: Final = 3

NO_PACKET_LIMIT: Final = 268_435_460


class Producer:
    """Makes output of a connection that has no session."""

    def drain(self, now: float) -> None:
        """There is room for output again."""


class Resumption:
    """A client that was let in elsewhere and goes on here: it is told nothing, least of all CONNACK."""

    def accepted(self, connection: Connection, session: Session, present: bool, now: float) -> None:
        """It is let in here, too; ``present`` when its session was found."""


class Connection:
    """See the module. A driver uses ``handle``, ``congested``, ``reading``, ``closing``, ``take``, ``take_held`` and
    ``committed``, and reads the rest."""

    def __init__(self, effects: Effects, peer: Peer, handle: object, now: float, limits: Limits) -> None:
        self.effects = effects
        self.peer = peer
        self.handle = handle
        self.state = AWAITING_CONNECT
        self.opened_at = now
        self.last_seen = now
        self.version = 0
        self.form_flags = 0
        self.client_id = ""
        self.username: str | None = None
        self.session: Session | None = None
        self.producer: Producer | None = None
        self.keep_alive_seconds = 0
        self.timer_at = 0.0
        # What arrived of a packet that is not complete yet, and how many bytes it takes to go on.
        self.partial: bytearray | None = None
        self.needed_bytes = 0
        # Output.
        self.congested = False
        self.reading = True
        self.starved = False
        self.closing = False
        self.dirty = False
        # Whether CONNACK waits for the disk: nothing may overtake it [MQTT-3.2.0-1].
        self.awaits_disk = False
        self.out: list[bytes] = []
        self.held: list[bytes] | None = None
        # Answers to publications of which the first waits for somebody elsewhere.
        self.answers: deque[Answer] | None = None
        self.out_bytes = 0
        self.max_output_bytes: int = limits.max_output_bytes
        # What CONNACK tells the client: the limits at the time it came. A reload does not change them.
        self.packet_limit_bytes: int = limits.max_packet_bytes
        self.receive_maximum: int = limits.receive_maximum
        self.alias_in_maximum: int = limits.topic_alias_maximum
        self.max_qos: int = limits.max_qos
        self.retain_available: bool = limits.retain_available
        # What the client asked for in CONNECT.
        self.send_maximum = 65_535
        self.max_packet_bytes = NO_PACKET_LIMIT
        self.wants_problem_information = True
        self.wants_redirect = False
        self.auth_method: str | None = None
        self.pending_connect: Connect | None = None
        self.pending_verdict = False
        self.resumption: Resumption | None = None
        self.authenticating_again = False
        self.aliases_in: dict[int, bytes] | None = None
        self.aliases_out: dict[bytes, int] | None = None
        self.alias_out_maximum = 0
        self.allowed_topics: set[bytes] | None = None
        # Retained messages that a subscription is still owed: its filter, the topics in reverse order.
        self.owed_retained: dict[str, list[bytes]] | None = None
        self.close_reason = ""
        self.messages_in = 0
        self.messages_out = 0
        self.bytes_in = 0
        self.bytes_out = 0

    @property
    def is_v5(self) -> bool:
        return self.version == MQTT_5

    def push(self, chunk: bytes) -> None:
        """Output that waits for nothing."""
        if self.awaits_disk:
            self.push_held(chunk)
            return
        self.out.append(chunk)
        self.out_bytes += len(chunk)
        self.touch()

    def push_held(self, chunk: bytes) -> None:
        """Output that must not leave before the records that are pending now are durable."""
        if not self.effects.gated:
            self.push(chunk)
            return
        held = self.held
        if held is None:
            self.held = [chunk]
        else:
            held.append(chunk)
        self.out_bytes += len(chunk)
        self.touch()

    def answer(self, answer: Answer) -> None:
        """Acknowledge publications, in the order in which they came."""
        answers = self.answers
        pledge = answer.pledge
        if answers is None and (pledge is None or pledge.is_settled):
            self.push_held(answer.encode(self.is_v5))
            return
        if answers is None:
            answers = deque()
            self.answers = answers
        answers.append(answer)
        if pledge is not None and not pledge.is_settled:
            pledge.awaited_by(self)

    def settle_answers(self) -> None:
        """Something that answers wait for is settled: send those that wait no more."""
        answers = self.answers
        while answers:
            pledge = answers[0].pledge
            if pledge is not None and not pledge.is_settled:
                return
            self.push_held(answers.popleft().encode(self.is_v5))
        self.answers = None

    def take_answers(self) -> deque[Answer] | None:
        """What waits here, for the connection that takes this one's place."""
        answers, self.answers = self.answers, None
        return answers

    def give_answers(self, answers: deque[Answer] | None) -> None:
        """Go on waiting in another connection's place; before anything was answered here."""
        self.answers = answers
        for answer in answers or ():
            if answer.pledge is not None and not answer.pledge.is_settled:
                answer.pledge.awaited_by(self)
        self.settle_answers()

    def forget(self) -> None:
        """The connection ended; a timer may keep it for a while, so let go of what is large."""
        self.held = None
        self.answers = None
        self.partial = None
        self.aliases_in = None
        self.aliases_out = None
        self.allowed_topics = None
        self.owed_retained = None
        self.pending_connect = None

    def fitting(self, packet: ConnAck | Disconnect) -> bytes:
        """The packet, without its reason string where that makes it too large for the client [MQTT-3.2.2-19, -3.14.2-3]."""
        encoded = encode(packet, self.version)
        if len(encoded) > self.max_packet_bytes and packet.properties is not None:
            packet.properties.reason_string = None
            encoded = encode(packet, self.version)
        return encoded

    def touch(self) -> None:
        """Ask the driver to look at this connection."""
        if not self.dirty:
            self.dirty = True
            self.effects.dirty.append(self)

    def has_room(self) -> bool:
        """Whether more output may be produced now. If not, ``starved`` asks the driver to call ``writable`` when there is."""
        if self.congested:
            return False
        if self.out_bytes < self.max_output_bytes:
            return True
        self.starved = True
        return False

    def take(self) -> list[bytes]:
        """The output that may be sent now; the driver owns it from here on."""
        chunks = self.out
        if chunks:
            self.out = []
            self._taken(chunks)
        return chunks

    def take_held(self) -> list[bytes] | None:
        """The output that may be sent once the records taken with it are durable."""
        chunks = self.held
        if chunks is not None:
            self.held = None
            self._taken(chunks)
        return chunks

    def committed(self) -> None:
        """What :meth:`take_held` gave was sent."""
        self.awaits_disk = False

    def _taken(self, chunks: list[bytes]) -> None:
        size = 0
        for chunk in chunks:
            size += len(chunk)
        self.out_bytes -= size
        self.bytes_out += size
        self.effects.stats.bytes_sent += size

    def alias_for(self, topic: bytes, held: bool) -> int:
        """The topic alias to send ``topic`` with: 0 none, positive while it is being defined, negative once it is known.

        Held output may be overtaken by other output, so it may use an alias and must not define one.
        """
        if self.alias_out_maximum == 0:
            return 0
        aliases = self.aliases_out
        if aliases is None:
            aliases = {}
            self.aliases_out = aliases
        alias = aliases.get(topic)
        if alias is not None:
            return -alias
        if len(aliases) >= self.alias_out_maximum or (held and self.effects.gated):
            return 0
        alias = len(aliases) + 1
        aliases[topic] = alias
        return alias

    def forget_alias(self, topic: bytes) -> None:
        """Take back the alias that was defined last, because its definition did not go out."""
        aliases = self.aliases_out
        if aliases is not None and topic in aliases:
            del aliases[topic]

    def send_qos0(self, publication: Publication, retain: bool, identifiers: bytes, now: float) -> None:
        """Send at QoS 0, or drop and count it when this client reads too slowly."""
        stats = self.effects.stats
        count = publication.count
        if self.out_bytes >= self.max_output_bytes:
            stats.dropped_slow_consumer += count
            return
        flags = self.form_flags | (1 if retain else 0)
        alias = 0
        if flags == publication.raw_flags and self.alias_out_maximum == 0 and not identifiers:
            chunk = publication.packets
            stride = publication.stride
        else:
            alias = self.alias_for(publication.topic, held=False)
            form = publication.form(flags, identifiers, alias, now)
            chunk = form.packets
            stride = form.stride
        if self.max_packet_bytes < NO_PACKET_LIMIT and (stride > self.max_packet_bytes or stride == 0):
            chunk, count = self._fitting(chunk, stride, count)
            if not count:
                if alias > 0:
                    self.forget_alias(publication.topic)
                return
        stats.publishes_sent[0] += count
        stats.publish_bytes_sent += len(chunk)
        self.messages_out += count
        self.push(chunk)

    def send_qos0_on(self, publication: Publication, terms: Terms, now: float) -> None:
        """The same, on terms that were found for this receiver alone."""
        self.send_qos0(publication, terms.retain, terms.identifiers, now)

    def _fitting(self, chunk: bytes, stride: int, count: int) -> tuple[bytes, int]:
        """Those of the packets in ``chunk`` that the client's Maximum Packet Size admits [MQTT-3.1.2-25]."""
        stats = self.effects.stats
        if stride > self.max_packet_bytes:
            stats.dropped_too_large += count
            return b"", 0
        if len(chunk) <= self.max_packet_bytes:
            return chunk, count
        fitting: list[bytes] = []
        for packet in split_packets(chunk):
            if len(packet) <= self.max_packet_bytes:
                fitting.append(packet)
            else:
                stats.dropped_too_large += 1
        return b"".join(fitting), len(fitting)


def form_flags(version: int) -> int:
    """The part of a form's flags that a protocol version decides."""
    return V5_FLAG if version == MQTT_5 else 0
