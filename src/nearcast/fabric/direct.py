"""Owned topics at a gateway: what its clients publish goes straight to the topic's owner (ePulsar, section 3.6).

A client's first message of an owned topic goes to its home broker, like all it says. That broker tells the gateway who owns
the topic (OWNER), and who the client is; tells it again when the owner changes; and the owner itself does. From then on
messages at QoS 0 and 1 go to the owner over the gateway's own link to it (OWNED_PUBLISH), and its answer becomes the client's
PUBACK. Messages at QoS 2 stay with the home broker, which keeps the handshake and thus knows what comes twice.

The order of a client's messages must not depend on the way they go. Whoever changes the way says so to the broker on the old
way behind the last message there (SOURCE_CLOSED, with a number drawn for it), and messages on the new way name that number:
the owner lets them wait until the word has come to it, on the old way, behind the messages before.

While there is no link to the owner, messages go to the owner before it, which passes them on, or by way of the home broker.
What a broker that is lost has not answered is sent again by way of the home broker. Nothing here waits for anybody.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mypy_extensions import i64

from nearcast.errors import RemoteProtocolError
from nearcast.fabric import frames
from nearcast.fabric.direct_clients import MARKED_S, NO_MARK, DirectClient, Use, puback, publish_id
from nearcast.fabric.direct_lines import BY_HOME, NOT_OWNED, Sent
from nearcast.fabric.mirrors import DUPLICATE, Mirror, body_start, packet_end
from nearcast.fabric.owner_records import MAX_EPOCH
from nearcast.fabric.tunnels import Channel
from nearcast.mqtt import reasons
from nearcast.mqtt.packets import MQTT_5
from nearcast.mqtt.records import Fields
from nearcast.mqtt.wire import PUBLISH

if TYPE_CHECKING:
    from nearcast.fabric.gateway import Gateway
    from nearcast.fabric.trunk_lines import TrunkLine
    from nearcast.fabric.tunnels import Tunnel, Upstream

MAX_DIRECT_BYTES: Final = 4_194_304
"""A larger packet goes by way of the home broker, which takes it in as many pieces as it needs."""

GROUPED_BYTES: Final = 65_536
"""Packets of one client and topic that stand back to back share a frame, up to so much."""

MAX_TOPICS: Final = 100_000
IDLE_S: Final = 60.0
"""A topic that no client published for so long is forgotten; the next message asks the home broker again, by going there."""

IN_USE_S: Final = 10.0
"""Links to owners of topics that were published within so long are kept."""

HOME_TOLD_S: Final = 1.0
"""How often the home broker hears of a client that talks to others, so that it is not taken for gone."""

LOOK_S: Final = 1.0

# Which way a packet goes.
HOME: Final = 0
DIRECT: Final = 1
LATER: Final = 2


class Closing:
    """A SOURCE_CLOSED that was said on a link, for the owner of an epoch; ``number`` is how messages refer to it."""

    def __init__(self, line: TrunkLine, epoch: int, number: int, now: float) -> None:
        self.line = line
        self.epoch = epoch
        self.number = number
        self.said_at = now


class TopicPath:
    """One owned topic: its owner as far as the gateway was told, and the link that its messages take, if they take one."""

    def __init__(self, topic: bytes, now: float) -> None:
        self.topic = topic
        self.epoch = 0
        self.owner = ""
        self.line: TrunkLine | None = None
        #: The epoch in which the broker there was the owner.
        self.line_epoch = 0
        self.used_at = now
        #: What was said on links that were used before, by broker and epoch of its use. Clients that change at the same time
        #: share it.
        self.closings: dict[tuple[str, int], Closing] = {}


class Direct:
    """See the module. One per gateway."""

    def __init__(self, gateway: Gateway, enabled: bool) -> None:
        self._gateway = gateway
        self.enabled = enabled
        self.topics: dict[bytes, TopicPath] = {}
        self.next_look = gateway.now + LOOK_S
        self.max_packet_bytes: int = MAX_DIRECT_BYTES
        # Counters since the start.
        self.messages = 0
        self.sent_again = 0
        self.switches = 0
        # The group of packets that shares the next frame.
        self._line: TrunkLine | None = None
        self._path: TopicPath | None = None
        self._use: Use | None = None
        self._packets: list[bytes] = []
        self._packets_bytes = 0
        self._packet_ids: list[int] = []

    # --- what brokers say -----------------------------------------------------------------------------------------------

    def handle(self, line: TrunkLine, kind: int, fields: Fields, now: float) -> None:
        """OWNER or OWNED_ACK."""
        if kind == frames.OWNER:
            self._told(line, fields, now)
        elif kind == frames.OWNED_ACK:
            for sent, reason_code in line.direct.answered(fields):
                self._answered(sent, reason_code)
            self.drain(line)
        else:
            raise RemoteProtocolError(reasons.PROTOCOL_ERROR, f"frame {kind} is not for a gateway")

    def _told(self, line: TrunkLine, fields: Fields, now: float) -> None:
        topic = fields.blob()
        epoch = fields.number()
        owner = fields.blob().decode("utf-8")
        channel = line.channels.get(fields.number())
        username = fields.text()
        if epoch > MAX_EPOCH:
            raise ValueError("an epoch that there cannot be")
        if not self.enabled:
            return
        if channel is not None:
            client = channel.tunnel.direct
            if client is None:
                client = channel.tunnel.begin_direct(username, line.name, now)
            # It published this by way of its home broker a moment ago.
            use = client.use_of(topic, now)
            use.line = None
            use.home = line.name
        path = self.topics.get(topic)
        if path is None:
            if len(self.topics) >= MAX_TOPICS:
                return
            path = TopicPath(topic, now)
            self.topics[topic] = path
        if epoch > path.epoch:
            path.epoch = epoch
            path.owner = owner
            if owner and owner not in self._gateway.lines:
                self._gateway.reaches(owner, now)

    def _answered(self, sent: Sent, reason_code: int) -> None:
        if reason_code == NOT_OWNED:
            self.topics.pop(sent.topic, None)
        if not sent.packet_ids:
            return
        tunnel = sent.tunnel
        client = tunnel.direct
        mirror = tunnel.mirror
        if tunnel.ended or client is None or mirror is None:
            return
        mirror.kept_bytes -= sent.size
        if reason_code in (BY_HOME, NOT_OWNED):
            self._send_again(sent)
            tunnel.drain()
            return
        refusal = reason_code if reason_code > 0 and mirror.version >= MQTT_5 else 0
        for packet_id in sent.packet_ids:
            for answer in client.answered(packet_id, puback(packet_id, refusal)):
                tunnel.tell(answer)
        self._gateway.touch(tunnel)

    def _send_again(self, sent: Sent) -> None:
        self.sent_again += len(sent.packet_ids)
        sent.tunnel.send_again(sent.again())

    # --- links ----------------------------------------------------------------------------------------------------------

    def client_gone(self, tunnel: Tunnel) -> None:
        """A client left: brokers that heard from it need not think that it still is there."""
        client = tunnel.direct
        if client is None:
            return
        brokers: dict[str, None] = {}
        for use in client.uses.values():
            if use.line is not None:
                brokers[use.line.name] = None
                use.line.direct.waiting.pop(tunnel, None)
        if brokers:
            self._gateway.places.left(tunnel.client_id, brokers)

    def drain(self, line: TrunkLine) -> None:
        """There may be room on a link."""
        for tunnel in line.direct.take_waiting():
            tunnel.drain()

    def line_lost(self, line: TrunkLine) -> None:
        """A broker is gone: what it has not answered goes another way."""
        for path in self.topics.values():
            if path.line is line:
                path.line = None
            for key, closing in list(path.closings.items()):
                if closing.line is line:
                    del path.closings[key]
        lost = list(line.direct.unanswered.values())
        line.direct.unanswered.clear()
        waiting = list(line.direct.waiting)
        line.direct.waiting.clear()
        # Each goes before what its client has waiting: the last one first.
        for sent in reversed(lost):
            tunnel = sent.tunnel
            if not sent.packet_ids or tunnel.ended or tunnel.mirror is None:
                continue
            tunnel.mirror.kept_bytes -= sent.size
            self._send_again(sent)
            waiting.append(tunnel)
        for tunnel in waiting:
            tunnel.drain()

    # --- from clients ---------------------------------------------------------------------------------------------------

    def forward(self, tunnel: Tunnel, client: DirectClient, mirror: Mirror, upstream: Upstream, run: bytes) -> bytes:
        """Pass on whole packets of a client, each its way, as far as there is room; returns the rest."""
        now = self._gateway.now
        client.waits = False
        room: i64 = upstream.room()
        home: list[bytes] = []
        position: i64 = 0
        start: i64 = 0
        end: i64 = len(run)
        while position < end:
            stop = packet_end(run, position, end)
            way = HOME
            packet = b""
            first = run[position]
            if first >> 4 == PUBLISH:
                if first & 4 == 0:
                    pending = bool(home) or start < position
                    if mirror.has_alias(run, position, stop):
                        way, packet = self._aliased(tunnel, client, mirror, upstream, run[position:stop], pending, now)
                    else:
                        topic_at: i64 = body_start(run, position) + 2
                        topic_end: i64 = topic_at
                        if topic_at <= stop:
                            topic_end = topic_at + (run[topic_at - 2] << 8 | run[topic_at - 1])
                        path = self.topics.get(run[topic_at:topic_end])
                        if path is not None and topic_end <= stop:
                            way = self._way(tunnel, client, path, upstream, first, stop - position, pending, now)
                        if way == DIRECT:
                            packet = run[position:stop]
                if first & 6 == 2 and way != LATER:
                    client.published(publish_id(run, position, stop))
            if way == LATER or (way == HOME and stop - position > room):
                client.waits = way == LATER
                break
            if way == DIRECT:
                mirror.messages_in += 1
                self._add(tunnel, client, packet, now)
            elif packet:
                room -= len(packet)
            else:
                room -= stop - position
                position = stop
                continue
            if start < position:
                home.append(run[start:position])
            if way == HOME:
                home.append(packet)
            start = stop
            position = stop
        if start < position:
            home.append(run[start:position])
        self._flush(tunnel, client, now)
        if home:
            client.home_told_at = now
            data = mirror.outgoing(b"".join(home))
            if data:
                upstream.send(data)
        elif position and now - client.home_told_at >= HOME_TOLD_S:
            client.home_told_at = now
            upstream.send(b"")
        return run[position:]

    def _aliased(
        self,
        tunnel: Tunnel,
        client: DirectClient,
        mirror: Mirror,
        upstream: Upstream,
        raw: bytes,
        pending: bool,
        now: float,
    ) -> tuple[int, bytes]:
        """The way of a packet with a topic alias, which means something to the home broker alone; and the packet as it leaves,
        if that is not as it came."""
        packet = mirror.unaliased(raw)
        if packet is None:
            return HOME, b""
        path = self.topics.get(packet.topic.encode("utf-8"))
        way = HOME if path is None else self._way(tunnel, client, path, upstream, raw[0], len(raw), pending, now)
        if way == LATER:
            return way, b""
        return way, mirror.sent_aliased(packet, raw, way == HOME)

    def _way(
        self,
        tunnel: Tunnel,
        client: DirectClient,
        path: TopicPath,
        upstream: Upstream,
        first: int,
        size: i64,
        pending: bool,
        now: float,
    ) -> int:
        """Which way a message of an owned topic goes. ``pending``: something for the home broker is about to be sent."""
        path.used_at = now
        use = client.uses.get(path.topic)
        if use is None:
            use = client.use_of(path.topic, now)
        line = self._line_of(path, now)
        mirror = tunnel.mirror
        if mirror is None or not mirror.connected or mirror.no_local or size > self.max_packet_bytes or first & DUPLICATE:
            line = None  # what is sent again is so because nobody answered, or because an owner left it to the home broker
        elif line is not None and line.name == upstream.broker and self._rests(path, use, line, now):
            line = None  # the owner is the home broker, and nothing is on its way there by others
        elif line is not None and use.line is None and use.home:
            if tunnel.previous is not None:
                line = None  # what it sent may still wait for its session: the broker could not say when it is through
            elif pending:
                return LATER  # until that is out, the way cannot be closed behind it
        if line is None:
            before = use.line
            if before is not None:
                if before.name != upstream.broker and not first & DUPLICATE:
                    self._flush_group(tunnel, client, now)
                    if before.direct.awaits(tunnel, path.topic):
                        before.direct.waiting[tunnel] = None
                        return LATER  # the way home may be quicker
                self._gateway.places.left(tunnel.client_id, (before.name,))
                use.line = None
            use.home = upstream.broker
            return HOME
        if not line.direct.has_room():
            line.direct.waiting[tunnel] = None
            return LATER
        if use.line is not line or use.epoch != path.line_epoch:
            self._switch(path, use, line, upstream, now)
        if self._line is not line or self._path is not path:
            self._flush_group(tunnel, client, now)
            self._line = line
            self._path = path
            self._use = use
        return DIRECT

    def _rests(self, path: TopicPath, use: Use, line: TrunkLine, now: float) -> bool:
        """Whether a client's messages, whose home broker is the owner, all came to it over the same link."""
        if use.line is None:
            return not use.home or use.home == line.name
        return use.line is line and use.epoch == path.line_epoch and now >= use.marked_until

    def _line_of(self, path: TopicPath, now: float) -> TrunkLine | None:
        """The link that a topic's messages take, if there is one."""
        gateway = self._gateway
        before = path.line
        line = gateway.lines.get(path.owner) if path.owner else None
        if line is None:
            return before
        if before is line and path.line_epoch == path.epoch:
            return before
        path.line = line
        path.line_epoch = path.epoch
        self.switches += 1
        return line

    def _switch(self, path: TopicPath, use: Use, line: TrunkLine, upstream: Upstream, now: float) -> None:
        """A client's messages of a topic go another way from here on."""
        use.behind = ""
        use.closing = 0
        before = use.line
        if before is not None:
            # Also where the broker is the same: what it was sent in an earlier epoch may be on its way round by others.
            closing = self._closing(path, before, use.epoch, now)
            if closing is not None:
                use.behind = before.name
                use.closing = closing.number
        elif use.home and use.home != line.name:
            home = self._gateway.lines.get(use.home)
            if home is not None:
                use.behind = use.home
                use.closing = self._gateway.rng.getrandbits(60) | 1
                channel = upstream.number if isinstance(upstream, Channel) and upstream.line is home else 0
                home.direct.close_source(path.topic, path.epoch, path.owner, use.closing, channel)
        use.line = line
        use.epoch = path.line_epoch
        use.home = ""
        use.marked_until = now + MARKED_S

    def _closing(self, path: TopicPath, before: TrunkLine, epoch: int, now: float) -> Closing | None:
        """Say that no more comes over a link from those who used it in ``epoch``; none, if the link is gone."""
        if self._gateway.lines.get(before.name) is not before:
            return None
        closing = path.closings.get((before.name, epoch))
        if closing is None or closing.line is not before or closing.epoch != path.line_epoch:
            closing = Closing(before, path.line_epoch, self._gateway.rng.getrandbits(60) | 1, now)
            before.direct.close_source(path.topic, path.line_epoch, path.owner, closing.number)
            path.closings[before.name, epoch] = closing
        return closing

    # --- frames ---------------------------------------------------------------------------------------------------------

    def _add(self, tunnel: Tunnel, client: DirectClient, packet: bytes, now: float) -> None:
        self.messages += 1
        self._packets.append(packet)
        self._packets_bytes += len(packet)
        if packet[0] & 6:
            self._packet_ids.append(publish_id(packet, 0, len(packet)))
        if self._packets_bytes >= GROUPED_BYTES:
            self._flush_group(tunnel, client, now)

    def _flush(self, tunnel: Tunnel, client: DirectClient, now: float) -> None:
        self._flush_group(tunnel, client, now)
        self._line = None
        self._path = None
        self._use = None

    def _flush_group(self, tunnel: Tunnel, client: DirectClient, now: float) -> None:
        packets = self._packets
        line = self._line
        path = self._path
        use = self._use
        mirror = tunnel.mirror
        if not packets or line is None or path is None or use is None or mirror is None:
            return
        packet_ids = self._packet_ids
        self._packets = []
        self._packets_bytes = 0
        self._packet_ids = []
        sent = Sent(tunnel, path.topic, packets[0] if len(packets) == 1 else b"".join(packets), packet_ids)
        if packet_ids:
            mirror.kept_bytes += sent.size
        marked = use if now < use.marked_until else NO_MARK
        line.direct.publish(sent, path.line_epoch, client.username, mirror.version, tunnel.latency_ms, marked)

    # --- time -----------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Keep the links that are in use, and forget topics that are not."""
        if now < self.next_look:
            return
        self.next_look = now + LOOK_S
        owners: dict[str, None] = {}
        for topic, path in list(self.topics.items()):
            idle = now - path.used_at
            if idle >= IDLE_S:
                del self.topics[topic]
            elif idle < IN_USE_S:
                if path.owner:
                    owners[path.owner] = None
                if path.line is not None:
                    owners[path.line.name] = None
            for key, closing in list(path.closings.items()):
                if now - closing.said_at >= MARKED_S:
                    del path.closings[key]
        for owner in owners:
            self._gateway.reaches(owner, now)
