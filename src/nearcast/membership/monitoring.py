"""EMMA's monitoring protocol as a pure machine: probing paths, answering probes, asking others to probe (section V-A).

A driver hands datagrams in (:meth:`Monitor.handle`), calls :meth:`Monitor.tick`, sends :meth:`Monitor.take_outgoing`, and its
owner reads :meth:`Monitor.take_events`. Addresses are text, ``host:port``, and mean nothing here.

A path is measured by a *burst* of pings (ten, 250 ms apart), the paper's measurement, as long as it is new, lossy or restless.
Once a burst has shown it to be steady, each period takes one ping, a *check*: while that agrees with what is known the value
is as fresh as another burst would make it. A check that is lost or does not agree becomes a burst at once, and what the burst
finds replaces what was known, so a gateway that travels is noticed within a period, where a mean over the last bursts would
take four. Paths that are near as well are checked half as often: they cannot get much better, and the broker in use is
watched through its link anyhow. The rest of EMMA's traffic, a question and an answer for each measurement, is gone as well:
nodes know whom to measure and report over the link they have, when something changed. QOSREQ and QOSRESP remain for what
cannot wait: is that node still there, seen from you?
"""

from __future__ import annotations

import random
from typing import Final, Protocol

import msgspec

from nearcast.membership import packets
from nearcast.membership.packets import Quality, Reconnect

FOREVER: Final = float("inf")

UDP_OVERHEAD_BYTES: Final = 48
"""What the paper counts for UDP, IPv4 and Ethernet around each packet."""

MAX_REQUESTERS: Final = 8
MAX_DIRECT_PINGS: Final = 10_000
DIRECT_PING_S: Final = 5.0
ORDER_TRIES: Final = 3
ORDER_RETRY_S: Final = 0.3
LEAST_ASKED_INTERVAL_S: Final = 0.2
"""Questions within this time of a measurement are answered by it: whoever asks may want to know whether a node has just died,
and anybody can ask."""


class MonitorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How paths are measured. The defaults are the paper's; ``adaptive`` off is the paper's fixed rate."""

    pings: int = 10
    """Pings of a burst."""

    ping_interval_s: float = 0.25
    """Seconds between them."""

    period_s: float = 15.0
    """How old a value may get. Too low costs bandwidth; too high notices late that a gateway travels."""

    timeout_s: float = 1.0
    """How long an answer may take before it counts as lost; at least four times what the path usually takes."""

    adaptive: bool = True
    """Whether steady paths are checked with one ping instead of measured with a burst."""

    near_ms: float = 10.0
    """Paths below this that stay steady are checked every second period. 0: none."""

    tolerance: float = 0.1
    """How far a check may be off, as a share of the round-trip time."""

    tolerance_ms: float = 0.5
    """The same in milliseconds: whichever is more, and three times the path's jitter, is allowed."""


class Measured(msgspec.Struct, frozen=True):
    """A path was measured. ``news``: it was unknown or dead before, or is dead now, or has changed much."""

    target: str
    quality: Quality
    news: bool


class Answered(msgspec.Struct, frozen=True):
    """Another node says how it sees a target it was asked about."""

    helper: str
    target: str
    quality: Quality


class Ponged(msgspec.Struct, frozen=True):
    """A node that was pinged by name answered."""

    name: str
    latency_ms: float


class Ordered(msgspec.Struct, frozen=True):
    """The controller wants this gateway to use another broker."""

    number: int
    broker: str


class Acknowledged(msgspec.Struct, frozen=True):
    """A gateway has such an order, or refuses it (``result``)."""

    number: int
    result: int


Event = Measured | Answered | Ponged | Ordered | Acknowledged


class PongListener(Protocol):
    """Who pings by name, where that is not who reads the events."""

    def ponged(self, name: str, round_trip_ms: float, now: float) -> None:
        """A node that was pinged by name answered."""


class _Run:
    """Pings of one measurement that is under way."""

    def __init__(self, planned: int, now: float) -> None:
        self.planned = planned
        self.sent: dict[int, float] = {}
        self.rtts_ms: list[float] = []
        self.next_ping_at = now
        self.ends_at = FOREVER
        self.requesters: list[tuple[str, int]] = []


class _Path:
    """A node, the way there, and what is known of it."""

    def __init__(self, name: str, address: str, due_at: float) -> None:
        self.name = name
        self.address = address
        self.quality: Quality | None = None
        self.steady = 0
        self.measured_at = -FOREVER
        self.due_at = due_at
        self.run: _Run | None = None


class Monitor:
    """See the module. ``standing``: whether known nodes are measured all the time, or only when somebody asks."""

    def __init__(self, name: str, secret: bytes, rng: random.Random, settings: MonitorSettings, *, standing: bool) -> None:
        self.settings = settings
        self.standing = standing
        self.controller_epoch = -1
        """The controller whose orders count: whom the node is registered with."""
        self.packets_sent = 0
        self.packets_received = 0
        self.bytes_sent = 0
        self.bytes_received = 0
        self.ignored = 0
        self._hash = packets.name_hash(name)
        self._key = packets.monitoring_key(secret)
        self._rng = rng
        self._paths: dict[str, _Path] = {}
        self._by_hash: dict[bytes, str] = {}
        self._pings: dict[int, _Path] = {}
        self._direct: dict[int, tuple[str, float]] = {}
        self._pongs: PongListener | None = None
        self._asked: dict[int, tuple[str, str, float]] = {}
        self._orders: dict[int, tuple[bytes, str, int, float]] = {}
        self._newest = 0
        self._newest_result = packets.ACCEPTED
        self._outgoing: list[tuple[str, bytes]] = []
        self._events: list[Event] = []
        self._next = FOREVER

    # --- who there is ---------------------------------------------------------------------------------------------------

    def know(self, name: str, address: str, now: float) -> None:
        """A node that may be measured, from now on at this address."""
        path = self._paths.get(name)
        if path is not None and path.address == address:
            return
        if path is not None:
            self.forget(name)
        if not address:
            return
        self._paths[name] = _Path(name, address, now if self.standing else FOREVER)
        self._by_hash[packets.name_hash(name)] = name
        self._next = min(self._next, now)

    def forget(self, name: str) -> None:
        """It is there no more."""
        path = self._paths.pop(name, None)
        if path is not None:
            self._by_hash.pop(packets.name_hash(name), None)
            self._drop_run(path)

    def quality(self, name: str) -> Quality | None:
        """What is known of a path."""
        path = self._paths.get(name)
        return path.quality if path is not None else None

    # --- asking ---------------------------------------------------------------------------------------------------------

    def ping(self, name: str, address: str, now: float) -> None:
        """One ping; :class:`Ponged` follows if it is answered."""
        if len(self._direct) >= MAX_DIRECT_PINGS:
            del self._direct[next(iter(self._direct))]  # the oldest, which is not likely to be answered
        identifier = self._identifier()
        self._direct[identifier] = (name, now)
        self._send(address, packets.pingreq(identifier))
        self._next = min(self._next, now + DIRECT_PING_S)

    def listen(self, pongs: PongListener) -> None:
        """Who pings by name hears of answers at once, and :class:`Ponged` is no event any more."""
        self._pongs = pongs

    def ask(self, helper_address: str, target: str, now: float) -> None:
        """Let another node measure its path to ``target``; :class:`Answered` follows if it does."""
        if len(self._asked) >= MAX_DIRECT_PINGS:
            del self._asked[next(iter(self._asked))]
        identifier = self._identifier()
        self._asked[identifier] = (helper_address, target, now)
        self._send(helper_address, packets.qosreq(identifier, packets.name_hash(target)))
        self._next = min(self._next, now + DIRECT_PING_S)

    def order(self, number: int, address: str, gateway: str, broker: str, epoch: int, now: float) -> None:
        """Have a gateway use another broker; said up to three times, until :class:`Acknowledged` follows."""
        content = Reconnect(number, packets.name_hash(gateway), packets.name_hash(broker), epoch)
        data = packets.reconnect(packets.RECONNREQ, content, self._key)
        self._orders[number] = (data, address, ORDER_TRIES - 1, now + ORDER_RETRY_S)
        self._send(address, data)
        self._next = min(self._next, now + ORDER_RETRY_S)

    def withdraw(self, number: int) -> None:
        """An order is no longer wanted: it is not said again."""
        self._orders.pop(number, None)

    # --- datagrams ------------------------------------------------------------------------------------------------------

    def handle(self, data: bytes, source: str, now: float, waited_s: float = 0.0) -> None:
        """A datagram arrived, ``waited_s`` before it was read. What makes no sense is counted and ignored: anybody can send
        one."""
        self.packets_received += 1
        self.bytes_received += len(data)
        kind = packets.kind_of(data)
        if kind == packets.PINGREQ:
            self._send(source, packets.pingresp(packets.id_of(data)))
        elif kind == packets.PINGRESP:
            self._pong(packets.id_of(data), now, waited_s)
        elif kind == packets.QOSREQ:
            self._requested(packets.id_of(data), packets.qosreq_target(data), source, now)
        elif kind == packets.QOSRESP:
            asked = self._asked.pop(packets.id_of(data), None)
            if asked is None:
                self.ignored += 1
            else:
                self._events.append(Answered(asked[0], asked[1], packets.qosresp_quality(data)))
        elif kind in (packets.RECONNREQ, packets.RECONNACK):
            content = packets.read_reconnect(data, self._key)
            if content is None:
                self.ignored += 1
            elif kind == packets.RECONNREQ:
                self._ordered(content, source)
            elif self._orders.pop(content.number, None) is not None:
                self._events.append(Acknowledged(content.number, content.result))
        else:
            self.ignored += 1

    def _pong(self, identifier: int, now: float, waited_s: float) -> None:
        path = self._pings.pop(identifier, None)
        if path is not None and path.run is not None:
            run = path.run
            run.rtts_ms.append(_rtt_ms(run.sent[identifier], now, waited_s))
            self._advance(path, run, now)
            return
        direct = self._direct.pop(identifier, None)
        if direct is None:
            self.ignored += 1
            return
        rtt_ms = _rtt_ms(direct[1], now, waited_s)
        if self._pongs is not None:
            self._pongs.ponged(direct[0], rtt_ms, now)
        else:
            self._events.append(Ponged(direct[0], rtt_ms))

    def _requested(self, identifier: int, target: bytes, source: str, now: float) -> None:
        path = self._paths.get(self._by_hash.get(target, ""))
        if path is None:
            self.ignored += 1
            return
        run = path.run
        if run is None and path.quality is not None and now - path.measured_at < LEAST_ASKED_INTERVAL_S:
            self._send(source, packets.qosresp(identifier, path.quality))
            return
        if run is None:
            run = self._start(path, now)
        if len(run.requesters) < MAX_REQUESTERS:
            run.requesters.append((source, identifier))
        self._advance(path, run, now)

    def _ordered(self, content: Reconnect, source: str) -> None:
        if content.gateway != self._hash or content.epoch != self.controller_epoch:
            self.ignored += 1
            return
        if content.number < self._newest:
            self.ignored += 1  # a repetition, or overtaken by a later order: that one holds
            return
        if content.number > self._newest:
            self._newest = content.number
            broker = self._by_hash.get(content.broker)
            self._newest_result = packets.REFUSED if broker is None else packets.ACCEPTED
            if broker is not None:
                self._events.append(Ordered(content.number, broker))
        answer = msgspec.structs.replace(content, result=self._newest_result)
        self._send(source, packets.reconnect(packets.RECONNACK, answer, self._key))

    def registered(self, controller_epoch: int) -> None:
        """This node is registered with a controller, whose orders count from now on; those of another one are forgotten."""
        if controller_epoch != self.controller_epoch:
            self.controller_epoch = controller_epoch
            self._newest = 0

    # --- measuring ------------------------------------------------------------------------------------------------------

    def _start(self, path: _Path, now: float) -> _Run:
        check = self.settings.adaptive and path.steady > 0
        run = _Run(1 if check else self.settings.pings, now)
        path.run = run
        return run

    def _advance(self, path: _Path, run: _Run, now: float) -> None:
        """Send the pings that are due; end the run when everything is answered or has had its time."""
        while len(run.sent) < run.planned and run.next_ping_at <= now:
            identifier = self._identifier()
            run.sent[identifier] = now
            run.next_ping_at = now + self.settings.ping_interval_s
            self._pings[identifier] = path
            self._send(path.address, packets.pingreq(identifier))
            if len(run.sent) == run.planned:
                usual_s = 0.0 if path.quality is None else path.quality.latency_ms / 1e3
                run.ends_at = now + max(self.settings.timeout_s, 4 * usual_s)
        if len(run.sent) == run.planned and (len(run.rtts_ms) == run.planned or run.ends_at <= now):
            self._finish(path, run, now)
        if path.run is not None:
            self._next = min(self._next, run.ends_at if len(run.sent) == run.planned else run.next_ping_at)

    def _finish(self, path: _Path, run: _Run, now: float) -> None:
        settings = self.settings
        known = path.quality
        if run.planned == 1 and settings.pings > 1 and known is not None:
            rtt_ms = run.rtts_ms[0] if run.rtts_ms else -1.0
            if rtt_ms < 0.0 or abs(rtt_ms - known.latency_ms) > self._allowed_ms(known):
                run.planned = settings.pings  # a check that does not agree: look closely
                run.ends_at = FOREVER
                self._next = min(self._next, run.next_ping_at)
                return
            found = Quality(
                known.latency_ms + 0.125 * (rtt_ms - known.latency_ms),
                known.jitter_ms + 0.125 * (abs(rtt_ms - known.latency_ms) - known.jitter_ms),
                0.0,
            )
            path.steady += 1
        else:
            found = _quality(run)
            calm = found.loss == 0.0 and found.jitter_ms <= max(settings.tolerance_ms, settings.tolerance * found.latency_ms)
            path.steady = 1 if calm else 0
        news = known is None or (known.loss >= 1.0) != (found.loss >= 1.0)
        if known is not None and not news:
            news = found.loss < 1.0 and abs(found.latency_ms - known.latency_ms) > self._allowed_ms(known)
        path.quality = found
        path.measured_at = now
        requesters = run.requesters
        self._drop_run(path)
        if self.standing:
            period_s = settings.period_s
            if settings.adaptive and path.steady > 2 and found.latency_ms < settings.near_ms:
                period_s *= 2
            path.due_at = now + period_s * (0.9 + 0.1 * self._rng.random())  # not all at once
            self._next = min(self._next, path.due_at)
        for address, identifier in requesters:
            self._send(address, packets.qosresp(identifier, found))
        self._events.append(Measured(path.name, found, news))

    def _allowed_ms(self, known: Quality) -> float:
        settings = self.settings
        return max(settings.tolerance_ms, settings.tolerance * known.latency_ms, 3 * known.jitter_ms)

    def _drop_run(self, path: _Path) -> None:
        run, path.run = path.run, None
        if run is not None:
            for identifier in run.sent:
                self._pings.pop(identifier, None)

    # --- time and output ------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Time passed: pings that are due, answers that did not come."""
        if now < self._next:
            return
        self._next = FOREVER
        for path in self._paths.values():
            run = path.run
            if run is None and path.due_at <= now:
                run = self._start(path, now)
            if run is not None:
                self._advance(path, run, now)
            if path.run is None:
                self._next = min(self._next, path.due_at)
        for identifier in [identifier for identifier, (_, at) in self._direct.items() if at + DIRECT_PING_S <= now]:
            del self._direct[identifier]
        for identifier in [identifier for identifier, (_, _, at) in self._asked.items() if at + DIRECT_PING_S <= now]:
            del self._asked[identifier]
        for number, (data, address, tries, at) in list(self._orders.items()):
            if at > now:
                continue
            if not tries:
                del self._orders[number]
                continue
            self._orders[number] = (data, address, tries - 1, now + ORDER_RETRY_S)
            self._send(address, data)
        if self._direct or self._asked:
            self._next = min(self._next, now + DIRECT_PING_S)
        if self._orders:
            self._next = min(self._next, min(at for _, _, _, at in self._orders.values()))

    def next_deadline(self) -> float:
        """When :meth:`tick` is needed next."""
        return self._next

    def take_outgoing(self) -> list[tuple[str, bytes]]:
        """Datagrams to send, with their addresses."""
        taken, self._outgoing = self._outgoing, []
        return taken

    def take_events(self) -> list[Event]:
        """What happened since the last call."""
        taken, self._events = self._events, []
        return taken

    def _send(self, address: str, data: bytes) -> None:
        self.packets_sent += 1
        self.bytes_sent += len(data)
        self._outgoing.append((address, data))

    def _identifier(self) -> int:
        while True:
            identifier = self._rng.getrandbits(32)
            if identifier not in self._pings and identifier not in self._direct and identifier not in self._asked:
                return identifier


def _rtt_ms(sent_at: float, now: float, waited_s: float) -> float:
    """What the path took, and not we to read the answer."""
    return max(now - sent_at - waited_s, 0.0) * 1e3


def _quality(run: _Run) -> Quality:
    """The median, where the paper takes the mean: one ping that waited for a busy machine says nothing of the path. And the
    paper's future work: the mean deviation from it, and the share lost."""
    rtts_ms = sorted(run.rtts_ms)
    if not rtts_ms:
        return Quality(0.0, 0.0, 1.0)
    middle = len(rtts_ms) // 2
    median_ms = rtts_ms[middle] if len(rtts_ms) % 2 else (rtts_ms[middle - 1] + rtts_ms[middle]) / 2
    jitter_ms = sum(abs(rtt_ms - median_ms) for rtt_ms in rtts_ms) / len(rtts_ms)
    return Quality(median_ms, jitter_ms, 1.0 - len(rtts_ms) / len(run.sent))
