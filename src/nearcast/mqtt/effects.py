"""What the engine has decided and a driver has yet to carry out, and the counters of what it has done."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nearcast.mqtt.connection import Connection
    from nearcast.mqtt.pledges import Pledge
    from nearcast.mqtt.witnesses import Witness


class Stats:
    """Counters since the start, and gauges that are kept up to date. Plain integers: they are touched in the hot path."""

    def __init__(self) -> None:
        self.connections_opened = 0
        self.connections = 0
        self.connects_accepted = 0
        self.connects_refused = 0
        self.connected_clients = 0
        self.protocol_errors = 0
        self.keep_alive_timeouts = 0
        self.takeovers = 0
        self.sessions = 0
        self.sessions_expired = 0
        self.retained_messages = 0
        self.retained_bytes = 0
        self.not_retained = 0
        self.bytes_received = 0
        self.bytes_sent = 0
        self.publishes_received = [0, 0, 0]
        self.publishes_sent = [0, 0, 0]
        self.publish_bytes_received = 0
        self.publish_bytes_sent = 0
        self.packets_received = 0
        self.dropped_slow_consumer = 0
        self.dropped_queue_full = 0
        self.dropped_expired = 0
        self.dropped_too_large = 0
        self.dropped_not_authorized = 0
        self.not_kept = 0
        self.unmatched = 0
        self.queued_messages = 0
        self.queued_bytes = 0
        self.inflight_messages = 0
        self.wills_published = 0
        self.resent = 0


class Effects:
    """Pending effects of one engine.

    The contract with the driver, the only order that keeps "nothing acknowledged is lost" true:

    1. what was kept in the topic log is made durable, then the ``records``;
    2. only then the ``held`` output of the connections is sent;
    3. a connection's other output (``out``) waits for nothing.

    Without a journal nothing is gated and everything goes to ``out`` in the order it was produced. ``generation`` is the
    journal's: a new one begins with each compaction and ends up holding everything that is still needed. ``last_mark`` is the
    last mark given to messages in the log (:mod:`nearcast.mqtt.keeping`).
    """

    def __init__(self, gated: bool) -> None:
        self.gated = gated
        self.generation = 1
        self.next_journal_key = 1
        self.last_mark = 0
        self.wall_offset = 0.0
        self.records: list[bytes] = []
        self.dirty: list[Connection] = []
        #: Brokers that messages may come from, by the number they have here as an origin; this one is 0.
        self.origin_names: list[str] = [""]
        self.stats = Stats()
        self.witness: Witness | None = None
        #: Left by whoever took on the publication that is just being routed, if its publisher is to hear of it only later.
        self.pledge: Pledge | None = None

    def take_pledge(self) -> Pledge | None:
        """What the publisher of what was just routed has to wait for, once."""
        pledge = self.pledge
        self.pledge = None
        return pledge

    def origin_number(self, name: str) -> int:
        """The number of another broker as an origin of messages, from now on."""
        if name not in self.origin_names:
            self.origin_names.append(name)
        return self.origin_names.index(name)
