"""Owned topics at a broker's end of a gateway's link: the gateway's clients publish straight to the owner.

::

    gateway ◄─OWNER──────────── broker    who owns a topic that a client of this gateway published here, and who that client
                                          is; again, when the owner changes
    gateway ──OWNED_PUBLISH──►  owner     a client's messages
    gateway ◄─OWNED_ACK──────── owner     all up to this one are in its journal; these were refused
    gateway ──SOURCE_CLOSED──►  broker    no more of this topic comes this way

A gateway is believed when it says who published: it has the fabric's secret, and the name from the broker that let the client
in. Whether that client may publish the topic is decided here, by the rules of this broker. What is wrong with a message that
makes no sense is left to the client's home broker to say: the answer sends it there. The gateway's side is
:mod:`nearcast.fabric.direct`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from nearcast.errors import RemoteProtocolError
from nearcast.fabric import frames
from nearcast.fabric.direct_lines import BY_HOME, NOT_OWNED, PIECE
from nearcast.fabric.frames import frame
from nearcast.fabric.mirrors import packet_end
from nearcast.fabric.owner_records import MAX_EPOCH
from nearcast.mqtt import reasons
from nearcast.mqtt.access import Authorizer, Peer
from nearcast.mqtt.connection import Connection
from nearcast.mqtt.publication import Publication
from nearcast.mqtt.records import Fields, blob, number, text
from nearcast.mqtt.session import Session

if TYPE_CHECKING:
    from nearcast.fabric.fabric import Fabric
    from nearcast.fabric.owned_topics import OwnedTopic
    from nearcast.fabric.trunks import Channel, Trunk

MAX_AUTHORS: Final = 100_000
"""Clients of one gateway whose rights are remembered; all are forgotten when there are more, and looked up again."""

MAX_USES: Final = 100_000
"""Topics that one gateway is told of; of others it hears when it sends something here."""

MAX_GROUPED_BYTES: Final = 131_072
"""Packets that share a frame are no more than so much larger than the largest of them."""

ACKNOWLEDGE_BYTES: Final = 262_144
"""So much without a message that asks for an answer is answered all the same, so that the gateway may send more."""

_TAKEN: Final = -1


class Branch:
    """What a broker remembers of one gateway's link. ``uses``: topics the gateway uses, and of which epoch it was told."""

    def __init__(self) -> None:
        self.uses: dict[bytes, int] = {}
        self.authors: dict[tuple[str, str | None, int], Connection] = {}
        self.taken = 0
        self.unasked_bytes = 0
        self.refused: list[tuple[int, int]] = []
        self._pieces: list[bytes] = []
        self._pieces_bytes = 0

    def add(self, piece: bytes, limit_bytes: int) -> None:
        """A piece of packets that follow. Of more than anybody may send nothing is kept: the home broker is to say so."""
        self._pieces_bytes += len(piece)
        if self._pieces_bytes > limit_bytes:
            self._pieces.clear()
        else:
            self._pieces.append(piece)

    def whole(self, last: bytes) -> bytes:
        """All of the packets; nothing if they are too large."""
        if not self._pieces_bytes:
            return last
        pieces, self._pieces = self._pieces, []
        self._pieces_bytes = 0
        return b"".join([*pieces, last]) if pieces else b""


class Branches:
    """See the module. One per broker."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._engine = fabric.engine
        self._inbound = fabric.engine.inbound
        self._authorizer: Authorizer | None = fabric.engine.inbound.authorizer
        self._unanswered: dict[Trunk, None] = {}
        # Counters since the start.
        self.messages = 0
        self.refused = 0

    # --- who owns what --------------------------------------------------------------------------------------------------

    def published(self, topic: OwnedTopic, channel: Channel, session: Session) -> None:
        """A client of a gateway published a topic here, for the first time in a while: the gateway could do better."""
        trunk = channel.trunk
        uses = trunk.branch.uses
        if topic.name in uses or len(uses) < MAX_USES:
            # Who it is while nobody knows: the gateway is told when somebody does.
            uses[topic.name] = topic.epoch if topic.owner else 0
            self._tell(trunk, topic.name, topic.epoch, topic.owner, channel.number, session.username)

    def owner_changed(self, name: bytes, epoch: int, owner: str) -> None:
        """Tell the gateways that use a topic. While nobody owns it, they go on as before: this broker keeps what comes."""
        if not owner:
            return
        for trunk in self._fabric.trunks.by_link.values():
            told = trunk.branch.uses.get(name)
            if told is not None and told < epoch:
                trunk.branch.uses[name] = epoch
                self._tell(trunk, name, epoch, owner, 0, None)

    def _tell(self, trunk: Trunk, name: bytes, epoch: int, owner: str, channel: int, username: str | None) -> None:
        fields = (blob(name), number(epoch), blob(owner.encode("utf-8")), number(channel), text(username))
        trunk.link.send(frame(frames.OWNER, *fields))

    # --- what gateways send ---------------------------------------------------------------------------------------------

    def handle(self, trunk: Trunk, content: bytes, fields: Fields, now: float) -> None:
        """OWNED_PUBLISH or SOURCE_CLOSED. ``ValueError`` ends the link."""
        kind = content[0]
        if kind == frames.OWNED_PUBLISH:
            self._publish(trunk, content, fields, now)
        elif kind == frames.SOURCE_CLOSED:
            name = fields.blob()
            epoch = _epoch(fields)
            owner = fields.blob().decode("utf-8")
            self._fabric.ownership.close_source(name, trunk.name, now, epoch, owner, fields.number())
            channel = trunk.channels.get(fields.number())
            if channel is not None and channel.connection is not None and channel.connection.session is not None:
                self._fabric.ownership.topic(name).producers.pop(channel.connection.session.number, None)
        else:
            raise RemoteProtocolError(reasons.PROTOCOL_ERROR, f"frame {kind} is not for a broker")

    def _publish(self, trunk: Trunk, content: bytes, fields: Fields, now: float) -> None:
        branch = trunk.branch
        sent_number = fields.number()
        if sent_number == PIECE:
            branch.add(content[fields.position :], self._fabric.limits.max_packet_bytes + MAX_GROUPED_BYTES)
            return
        if sent_number != branch.taken + 1:
            raise ValueError("messages of owned topics out of order")
        branch.taken = sent_number
        client = fields.blob().decode("utf-8")
        username = fields.text()
        author = self._author(branch, client, username, fields.number(), now)
        latency_ms = fields.number() / 1e3
        epoch = _epoch(fields)
        behind = fields.blob().decode("utf-8")
        closing = fields.number()
        packets = branch.whole(content[fields.position :])
        publications = self._publications(author, packets, now)
        code = BY_HOME if not publications else self._fault(author, publications[0])
        if code == _TAKEN:
            code = self._kept(author, publications, now)
        if code == _TAKEN:
            stats = self._engine.stats
            for publication in publications:
                self.messages += publication.count
                stats.publishes_received[publication.qos] += publication.count
                stats.publish_bytes_received += len(publication.packets)
                self._fabric.ownership.submit(publication, trunk.name, client, latency_ms, behind, now, epoch, closing)
            self._correct(trunk, publications[0].topic, epoch)
        else:
            self.refused += 1
            branch.refused.append((sent_number, code))
        asks = code != _TAKEN
        for publication in publications:
            asks = asks or publication.qos > 0
        branch.unasked_bytes += len(packets)
        if asks or branch.unasked_bytes >= ACKNOWLEDGE_BYTES:
            self._unanswered[trunk] = None

    def _author(self, branch: Branch, client: str, username: str | None, version: int, now: float) -> Connection:
        """A client as rules see it. It has no transport here, only rights."""
        if self._inbound.authorizer is not self._authorizer:
            self._authorizer = self._inbound.authorizer
            for trunk in self._fabric.trunks.by_link.values():
                trunk.branch.authors.clear()
        key = (client, username, version)
        author = branch.authors.get(key)
        if author is None:
            if len(branch.authors) >= MAX_AUTHORS:
                branch.authors.clear()
            author = Connection(self._engine.effects, Peer("gateway"), None, now, self._fabric.limits)
            author.client_id = client
            author.username = username
            author.version = version
            author.alias_in_maximum = 0
            branch.authors[key] = author
        return author

    def _publications(self, author: Connection, packets: bytes, now: float) -> list[Publication]:
        """The messages, as few publications as can be; none if some of them make no sense."""
        found: list[Publication] = []
        position = 0
        while position < len(packets):
            stop = packet_end(packets, position, len(packets))
            if stop == 0 or stop > len(packets) or packets[position] >> 4 != 3:
                raise ValueError("an owned topic's messages that are not whole")
            if stop - position > author.packet_limit_bytes:
                return []
            try:
                publication = self._inbound.cut(author, packets, position, now)
            except RemoteProtocolError:
                return []
            if publication.qos > 1 or (found and publication.topic != found[0].topic):
                return []
            if b"\x00\x00" in self._packet_ids(publication):
                return []  # [MQTT-2.2.1-2]
            found.append(publication)
            position = self._inbound.cut_end
        return found

    def _packet_ids(self, publication: Publication) -> list[bytes]:
        if not publication.qos:
            return []
        at = self._inbound.cut_id_at
        packets = publication.packets
        return [packets[start : start + 2] for start in range(at, len(packets), publication.stride)]

    def _fault(self, author: Connection, publication: Publication) -> int:
        """Why messages are not taken; -1: they are."""
        if publication.qos > author.max_qos or (publication.retain and not author.retain_available):
            return BY_HOME
        topic = publication.topic
        route = self._engine.router.remembered(topic)
        if route is None:
            try:
                self._inbound.check_topic(topic)
            except RemoteProtocolError:
                return BY_HOME
            route = self._engine.router.route_for(topic)
        if route.watch is None:
            return NOT_OWNED
        if not self._inbound.may_publish(author, topic):
            self._engine.stats.dropped_not_authorized += publication.count
            return reasons.NOT_AUTHORIZED
        return _TAKEN

    def _kept(self, author: Connection, publications: list[Publication], now: float) -> int:
        """Hand messages of a topic that is kept to the log."""
        kept = self._engine.router.route_for(publications[0].topic).kept
        if kept is None:
            return _TAKEN
        for publication in publications:
            if not self._inbound.keep_from(kept, publication, author.client_id, 0, now) and kept.durable:
                # MQTT 3 cannot be told: the home broker, which closes the connection then, is to try.
                return reasons.QUOTA_EXCEEDED if author.is_v5 else BY_HOME
        return _TAKEN

    def _correct(self, trunk: Trunk, name: bytes, epoch: int) -> None:
        """The gateway uses a topic here; if it goes by an epoch that is over, tell it."""
        owner, known = self._fabric.ownership.owner_of(name)
        if not owner:
            known = 0
        uses = trunk.branch.uses
        told = max(uses.get(name, 0), epoch)
        if name in uses or len(uses) < MAX_USES:
            uses[name] = max(told, known)
        if known > told:
            self._tell(trunk, name, known, owner, 0, None)

    # --- answers --------------------------------------------------------------------------------------------------------

    def settle(self, now: float) -> None:
        """After every event: answer what was taken, once it is in the journal."""
        if not self._unanswered:
            return
        unanswered, self._unanswered = self._unanswered, {}
        for trunk in unanswered:
            branch = trunk.branch
            if self._fabric.trunks.by_link.get(trunk.link) is not trunk:
                continue
            branch.unasked_bytes = 0
            refused, branch.refused = branch.refused, []
            parts = [number(branch.taken), number(len(refused))]
            for refused_number, code in refused:
                parts.append(number(refused_number) + number(code))
            trunk.link.send_held(frame(frames.OWNED_ACK, *parts))


def _epoch(fields: Fields) -> int:
    epoch = fields.number()
    if epoch > MAX_EPOCH:
        raise ValueError("an epoch that there cannot be")
    return epoch
