"""Probing in virtual time: bursts, checks, what makes one the other, and what strangers cannot do."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable

import pytest

from nearcast.membership import packets
from nearcast.membership.monitoring import (
    Acknowledged,
    Answered,
    Event,
    Measured,
    Monitor,
    MonitorSettings,
    Ordered,
    Ponged,
)
from nearcast.membership.packets import Quality, Reconnect

SECRET = b"everybody's secret"


class Air:
    """Monitors that hear each other, so far apart as ``rtt_ms(source, target)`` says; None: lost."""

    def __init__(self, rtt_ms: Callable[[str, str], float | None], settings: MonitorSettings | None = None) -> None:
        self.rtt_ms = rtt_ms
        self.settings = settings or MonitorSettings()
        self.now = 50.0
        self.monitors: dict[str, Monitor] = {}
        self.events: dict[str, list[Event]] = {}
        self.sent: list[tuple[float, str, str, bytes]] = []
        self._under_way: list[tuple[float, int, str, str, bytes]] = []
        self._numbers = itertools.count()

    def add(self, name: str, *, standing: bool = False) -> Monitor:
        monitor = Monitor(name, SECRET, random.Random(name), self.settings, standing=standing)
        self.monitors[name] = monitor
        self.events[name] = []
        return monitor

    def _pump(self) -> None:
        for name, monitor in self.monitors.items():
            for address, data in monitor.take_outgoing():
                self.sent.append((self.now, name, address, data))
                distance_ms = self.rtt_ms(name, address)
                if distance_ms is not None and address in self.monitors:
                    arrival = (self.now + distance_ms / 2e3, next(self._numbers), name, address, data)
                    heapq.heappush(self._under_way, arrival)
            self.events[name] += monitor.take_events()

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        self._pump()
        while True:
            due = min(monitor.next_deadline() for monitor in self.monitors.values())
            due = max(due, self.now)
            if self._under_way and self._under_way[0][0] <= due:
                due = self._under_way[0][0]
                if due > end:
                    break
                self.now = due
                _, _, source, target, data = heapq.heappop(self._under_way)
                self.monitors[target].handle(data, source, self.now)
            elif due <= end:
                self.now = due
                for monitor in self.monitors.values():
                    monitor.tick(self.now)
            else:
                break
            self._pump()
        self.now = end

    def pings(self, source: str) -> int:
        return sum(1 for _, name, _, data in self.sent if name == source and packets.kind_of(data) == packets.PINGREQ)


def fixed(distance_ms: float) -> Callable[[str, str], float]:
    return lambda source, target: distance_ms


def pair(rtt_ms: Callable[[str, str], float | None], settings: MonitorSettings | None = None) -> tuple[Air, Monitor]:
    air = Air(rtt_ms, settings)
    gateway = air.add("gateway", standing=True)
    air.add("broker")
    gateway.know("broker", "broker", air.now)
    return air, gateway


def measured(air: Air) -> list[Measured]:
    return [event for event in air.events["gateway"] if isinstance(event, Measured)]


def test_a_new_path_is_measured_by_ten_pings_250_ms_apart() -> None:
    air, gateway = pair(fixed(40.0))
    air.run(3.0)
    times = [at for at, name, _, data in air.sent if name == "gateway" and packets.kind_of(data) == packets.PINGREQ]
    assert len(times) == 10
    assert [round(after - before, 6) for before, after in itertools.pairwise(times)] == [0.25] * 9
    (found,) = measured(air)
    assert found.news
    assert found.quality.latency_ms == pytest.approx(40.0)
    assert found.quality.jitter_ms == pytest.approx(0.0, abs=1e-6)
    assert found.quality.loss == 0.0
    assert gateway.quality("broker") == found.quality


def test_a_steady_path_takes_one_ping_a_period() -> None:
    air, _ = pair(fixed(40.0))
    air.run(3.0)
    air.sent.clear()
    air.run(150.0)
    assert 9 <= air.pings("gateway") <= 11
    assert not any(event.news for event in measured(air)[1:])


def test_a_near_and_steady_path_takes_half_of_that() -> None:
    air, _ = pair(fixed(1.0))
    air.run(60.0)
    air.sent.clear()
    air.run(300.0)
    assert 9 <= air.pings("gateway") <= 11


def test_without_adapting_every_period_has_its_burst() -> None:
    air, _ = pair(fixed(40.0), MonitorSettings(adaptive=False))
    air.run(150.0)
    assert 80 <= air.pings("gateway") <= 110


def test_a_restless_path_is_always_measured_by_bursts() -> None:
    rng = random.Random(4)
    air, _ = pair(lambda source, target: rng.uniform(20.0, 80.0))
    air.run(150.0)
    assert air.pings("gateway") >= 80
    assert measured(air)[-1].quality.jitter_ms > 5.0


def test_a_check_that_does_not_agree_becomes_a_burst_and_replaces_what_was_known() -> None:
    distance = [40.0]
    air, _ = pair(lambda source, target: distance[0])
    air.run(50.0)
    distance[0] = 8.0
    air.events["gateway"].clear()
    air.run(18.5)
    found = measured(air)
    assert found[0].news
    assert found[0].quality.latency_ms == pytest.approx(8.0, abs=0.2) or found[-1].quality.latency_ms == pytest.approx(8.0)


def test_loss_is_measured() -> None:
    rng = random.Random(7)
    air, _ = pair(lambda source, target: None if rng.random() < 0.3 else 10.0)
    air.run(200.0)
    shares = [event.quality.loss for event in measured(air)]
    assert 0.1 < sum(shares) / len(shares) < 0.9
    assert air.pings("gateway") > 60, "a lossy path is looked at closely"


def test_a_dead_path_is_news_and_so_is_its_return() -> None:
    alive = [True]
    air, _ = pair(lambda source, target: 10.0 if alive[0] else None)
    air.run(20.0)
    alive[0] = False
    air.events["gateway"].clear()
    air.run(40.0)
    assert measured(air)[0].news
    assert measured(air)[0].quality.loss == 1.0
    alive[0] = True
    air.events["gateway"].clear()
    air.run(20.0)
    assert measured(air)[0].news
    assert measured(air)[0].quality.loss == 0.0


def test_one_ping_that_waited_says_nothing_of_the_path() -> None:
    counts = itertools.count()
    air, _ = pair(lambda source, target: 400.0 if next(counts) == 5 else 10.0)
    air.run(4.0)
    assert measured(air)[0].quality.latency_ms == pytest.approx(10.0)


def test_another_node_is_asked_and_answers_from_where_it_is() -> None:
    def rtt_ms(source: str, target: str) -> float:
        return 30.0 if {source, target} == {"helper", "broker"} else 5.0

    air = Air(rtt_ms)
    controller = air.add("controller")
    helper = air.add("helper")
    air.add("broker")
    helper.know("broker", "broker", air.now)
    controller.ask("helper", "broker", air.now)
    air.run(5.0)
    (answer,) = [event for event in air.events["controller"] if isinstance(event, Answered)]
    assert (answer.helper, answer.target) == ("helper", "broker")
    assert answer.quality.latency_ms == pytest.approx(30.0, abs=0.1)
    # Asked again at once it says what it knows; later it looks again, with one ping.
    before = air.pings("helper")
    controller.ask("helper", "broker", air.now)
    air.run(2.0)
    assert air.pings("helper") == before + 1


def test_a_helper_says_when_a_node_does_not_answer() -> None:
    air = Air(lambda source, target: None if "broker" in (source, target) else 5.0)
    controller = air.add("controller")
    helper = air.add("helper")
    air.add("broker")
    helper.know("broker", "broker", air.now)
    controller.ask("helper", "broker", air.now)
    air.run(5.0)
    (answer,) = [event for event in air.events["controller"] if isinstance(event, Answered)]
    assert answer.quality.loss == 1.0


def test_a_node_that_is_not_known_is_not_probed_for_anybody() -> None:
    air = Air(fixed(5.0))
    stranger = air.add("stranger")
    helper = air.add("helper")
    air.add("victim")
    stranger.ask("helper", "victim", air.now)
    air.run(5.0)
    assert air.pings("helper") == 0
    assert helper.ignored == 1


def test_questions_in_a_row_do_not_multiply_probes() -> None:
    air = Air(fixed(5.0))
    stranger = air.add("stranger")
    helper = air.add("helper")
    air.add("broker")
    helper.know("broker", "broker", air.now)
    for _ in range(1000):
        stranger.ask("helper", "broker", air.now)
    air.run(4.0)
    assert air.pings("helper") == 10
    assert len([event for event in air.events["stranger"] if isinstance(event, Answered)]) <= 8


def test_a_direct_ping_is_answered_by_name() -> None:
    air = Air(fixed(6.0))
    controller = air.add("controller")
    air.add("broker")
    controller.ping("broker", "broker", air.now)
    air.run(1.0)
    (event,) = air.events["controller"]
    assert isinstance(event, Ponged)
    assert event.name == "broker"
    assert event.latency_ms == pytest.approx(6.0)


def test_answers_that_nobody_asked_for_are_ignored() -> None:
    air, gateway = pair(fixed(10.0))
    air.run(0.1)
    for data in (packets.pingresp(1), packets.qosresp(1, Quality(1.0)), b"", b"\x09abc", bytes(47)):
        gateway.handle(data, "stranger", air.now)
    assert gateway.ignored == 5


def test_an_order_is_said_until_it_is_acknowledged_and_carried_out_once() -> None:
    lost = itertools.count()
    air = Air(lambda source, target: None if source == "controller" and next(lost) < 2 else 5.0)
    controller = air.add("controller")
    gateway = air.add("gateway")
    gateway.know("broker", "broker", air.now)
    gateway.registered(99)
    controller.order(1000, "gateway", "gateway", "broker", 99, air.now)
    air.run(3.0)
    assert air.events["gateway"] == [Ordered(1000, "broker")]
    assert air.events["controller"] == [Acknowledged(1000, packets.ACCEPTED)]
    # The same again, as a recorded packet would be: acknowledged, not done.
    request = next(data for _, name, _, data in air.sent if name == "controller")
    gateway.handle(request, "attacker", air.now)
    assert gateway.take_events() == []


@pytest.mark.parametrize(
    ("epoch", "gateway_name", "broker", "secret"),
    [(98, "gateway", "broker", SECRET), (99, "another", "broker", SECRET), (99, "gateway", "broker", b"not it")],
)
def test_orders_of_others_for_others_or_without_the_secret_are_ignored(
    epoch: int, gateway_name: str, broker: str, secret: bytes
) -> None:
    air = Air(fixed(5.0))
    gateway = air.add("gateway")
    gateway.know("broker", "broker", air.now)
    gateway.registered(99)
    content = Reconnect(1, packets.name_hash(gateway_name), packets.name_hash(broker), epoch)
    gateway.handle(packets.reconnect(packets.RECONNREQ, content, packets.monitoring_key(secret)), "x", air.now)
    assert gateway.take_events() == []
    assert gateway.take_outgoing() == []


def test_an_order_to_an_unknown_broker_is_refused() -> None:
    air = Air(fixed(5.0))
    controller = air.add("controller")
    gateway = air.add("gateway")
    gateway.registered(99)
    controller.order(5, "gateway", "gateway", "nowhere", 99, air.now)
    air.run(1.0)
    assert air.events["controller"] == [Acknowledged(5, packets.REFUSED)]
    assert air.events["gateway"] == []


def test_only_the_newest_order_counts() -> None:
    air = Air(fixed(5.0))
    gateway = air.add("gateway")
    gateway.know("broker", "broker", air.now)
    gateway.registered(99)
    key = packets.monitoring_key(SECRET)

    def order(number: int) -> int:
        content = Reconnect(number, packets.name_hash("gateway"), packets.name_hash("broker"), 99)
        gateway.handle(packets.reconnect(packets.RECONNREQ, content, key), "controller", air.now)
        return len(gateway.take_events())

    assert order(5000) == 1
    assert order(5000) == 0, "said again"
    assert order(4990) == 0, "overtaken: the later decision holds"
    assert order(5001) == 1
    assert order(5000) == 0


def test_a_path_that_is_forgotten_is_not_probed() -> None:
    air, gateway = pair(fixed(10.0))
    air.run(1.0)
    gateway.forget("broker")
    air.sent.clear()
    air.run(60.0)
    assert air.pings("gateway") == 0
    assert gateway.quality("broker") is None


def test_a_node_that_moved_to_another_address_is_measured_anew() -> None:
    air, gateway = pair(fixed(10.0))
    air.add("elsewhere")
    air.run(10.0)
    gateway.know("broker", "elsewhere", air.now)
    air.sent.clear()
    air.run(3.0)
    assert {address for _, name, address, _ in air.sent if name == "gateway"} == {"elsewhere"}
    assert air.pings("gateway") == 10


def test_who_listens_for_answers_of_pings_hears_of_them_at_once() -> None:
    heard: list[tuple[str, float]] = []

    class Listener:
        def ponged(self, name: str, round_trip_ms: float, now: float) -> None:
            heard.append((name, round_trip_ms))

    air = Air(fixed(14.0))
    one = air.add("one")
    air.add("other")
    one.listen(Listener())
    one.ping("other", "other", air.now)
    air.run(1.0)
    ((name, round_trip_ms),) = heard
    assert name == "other"
    assert round_trip_ms == pytest.approx(14.0)
    assert air.events["one"] == []
