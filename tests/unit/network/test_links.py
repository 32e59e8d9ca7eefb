"""One direction of a link: every field of ``Conditions`` does what its paragraph says. Seeds are fixed."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable
from random import Random

import pytest

from nearcast.network.conditions import Conditions, JitterKind
from nearcast.network.links import FULL, LOST, Dice, Link

SEED = 20_261_116


def link(conditions: Conditions) -> Link:
    return Link(conditions, conditions.latency_ms)


def spaced_delays_ms(conditions: Conditions, count: int = 20_000, seed: int = SEED) -> list[float]:
    """Delays of packets so far apart that keeping their order changes nothing."""
    one = link(conditions)
    dice = Dice(Random(seed))
    return [(one.carry(100, now, now, dice) - now) * 1000 for now in (index * 10_000.0 for index in range(count))]


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[int(share * len(values))]


def test_latency_alone_is_exact_and_draws_nothing() -> None:
    rng = Random(SEED)
    before = rng.getstate()
    one = link(Conditions(latency_ms=12.5))
    assert one.carry(1500, 3.0, 3.0, Dice(rng)) == 3.0125
    assert rng.getstate() == before
    assert one.fixed


def test_uniform_jitter() -> None:
    delays = spaced_delays_ms(Conditions(latency_ms=50, jitter_ms=10, jitter="uniform"))
    assert 40.0 <= min(delays) < 40.1
    assert 59.9 < max(delays) <= 60.0
    assert statistics.fmean(delays) == pytest.approx(50.0, abs=0.2)
    assert statistics.stdev(delays) == pytest.approx(10 / math.sqrt(3), rel=0.02)


def test_normal_jitter() -> None:
    delays = spaced_delays_ms(Conditions(latency_ms=50, jitter_ms=5, jitter="normal"))
    expected = statistics.NormalDist(50, 5)
    assert statistics.fmean(delays) == pytest.approx(50.0, abs=0.15)
    assert statistics.stdev(delays) == pytest.approx(5.0, rel=0.02)
    for share in (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99):
        assert quantile(delays, share) == pytest.approx(expected.inv_cdf(share), abs=0.35)
    # Neighbouring draws come from one pair of uniform numbers; they are independent all the same.
    assert abs(statistics.correlation(delays[:-1], delays[1:])) < 0.03


def test_lognormal_jitter_is_only_added_and_its_median_is_the_figure() -> None:
    added = [delay - 50 for delay in spaced_delays_ms(Conditions(latency_ms=50, jitter_ms=2, jitter="lognormal"))]
    expected = statistics.NormalDist()
    assert min(added) > 0.0
    for share in (0.05, 0.5, 0.95, 0.99):
        assert quantile(added, share) == pytest.approx(2 * math.exp(expected.inv_cdf(share)), rel=0.1)
    assert quantile(added, 0.5) == pytest.approx(2.0, rel=0.03)


def test_pareto_jitter_is_only_added_and_has_the_longer_tail() -> None:
    added = [delay - 50 for delay in spaced_delays_ms(Conditions(latency_ms=50, jitter_ms=2, jitter="pareto"))]
    scale = 2 / (2 ** (1 / 3) - 1)
    assert min(added) > -1e-6
    for share in (0.05, 0.5, 0.95, 0.99):
        assert quantile(added, share) == pytest.approx(scale * ((1 - share) ** (-1 / 3) - 1), rel=0.1)
    assert quantile(added, 0.5) == pytest.approx(2.0, rel=0.03)
    other = [delay - 50 for delay in spaced_delays_ms(Conditions(latency_ms=50, jitter_ms=2, jitter="lognormal"))]
    assert quantile(added, 0.999) > quantile(other, 0.999)


@pytest.mark.parametrize("rate_hz", [200, 2_000])
@pytest.mark.parametrize(
    ("jitter", "tolerance", "quantiles_ms"),
    [
        ("uniform", 0.12, {0.1: -0.8, 0.25: -0.5, 0.5: 0.0, 0.75: 0.5, 0.9: 0.8}),
        ("normal", 0.15, {0.1: -1.28, 0.25: -0.674, 0.5: 0.0, 0.75: 0.674, 0.9: 1.28}),
        ("lognormal", 0.2, {0.1: 0.278, 0.25: 0.509, 0.5: 1.0, 0.75: 1.96, 0.9: 3.6}),
        ("pareto", 0.3, {0.1: 0.138, 0.25: 0.388, 0.5: 1.0, 0.75: 2.26, 0.9: 4.44}),
    ],
)
def test_the_law_holds_at_any_packet_rate_and_order_is_kept(
    jitter: JitterKind, tolerance: float, quantiles_ms: dict[float, float], rate_hz: int
) -> None:
    one = link(Conditions(latency_ms=50, jitter_ms=1, jitter=jitter))
    dice = Dice(Random(SEED))
    moments = [index / rate_hz for index in range(100_000)]
    arrivals = [one.carry(100, now, now, dice) for now in moments]
    assert all(second >= first for first, second in itertools.pairwise(arrivals))
    added = [(arrival - now) * 1000 - 50 for now, arrival in zip(moments, arrivals, strict=True)]
    for share, expected in quantiles_ms.items():
        assert quantile(added, share) == pytest.approx(expected, abs=tolerance * max(1.0, abs(expected)))


def test_packets_close_together_are_delayed_alike() -> None:
    one = link(Conditions(latency_ms=50, jitter_ms=5))
    dice = Dice(Random(SEED))
    assert one.carry(100, 1.0, 1.0, dice) == one.carry(100, 1.0, 1.0, dice)
    delays = [one.carry(100, now, now, dice) - now for now in (2.0 + index * 0.2 for index in range(20_000))]
    # One time constant (40 times 5 ms) apart: e to the -1.
    assert statistics.correlation(delays[:-1], delays[1:]) == pytest.approx(math.exp(-1), abs=0.03)


@pytest.mark.parametrize("jitter", ["uniform", "normal"])
def test_no_packet_is_faster_than_a_tenth_of_the_latency(jitter: JitterKind) -> None:
    delays = spaced_delays_ms(Conditions(latency_ms=10, jitter_ms=40, jitter=jitter), 2_000)
    assert min(delays) == pytest.approx(1.0, abs=1e-4)


def test_loss_is_the_share_asked_for_and_independent() -> None:
    one = link(Conditions(latency_ms=1, loss=0.05))
    dice = Dice(Random(SEED))
    lost = [one.carry(100, float(now), float(now), dice) == LOST for now in range(40_000)]
    deviation = math.sqrt(40_000 * 0.05 * 0.95)
    assert abs(sum(lost) - 2_000) < 4 * deviation
    assert one.lost == sum(lost)
    runs = sum(first and second for first, second in itertools.pairwise(lost))
    assert runs == pytest.approx(100, abs=45)


@pytest.mark.parametrize(("loss", "outcome"), [(1.0, True), (0.0, False)])
def test_loss_of_all_or_nothing(loss: float, outcome: bool) -> None:
    one = link(Conditions(loss=loss))
    dice = Dice(Random(SEED))
    assert all((one.carry(1, 0.0, 0.0, dice) == LOST) is outcome for _ in range(1_000))


def test_bandwidth_is_time_per_byte_and_a_queue() -> None:
    one = link(Conditions(latency_ms=10, bandwidth_mbps=8, queue_ms=2.1))  # a byte a microsecond
    dice = Dice(Random(SEED))
    assert one.carry(1_000, 5.0, 5.0, dice) == pytest.approx(5.011, abs=1e-9)
    assert one.carry(1_000, 5.0, 5.0, dice) == pytest.approx(5.012, abs=1e-9)
    assert one.carry(500, 5.0, 5.0, dice) == pytest.approx(5.0125, abs=1e-9)
    assert one.carry(1, 5.0, 5.0, dice) == FULL
    assert one.carry(1, 5.000401, 5.000401, dice) == pytest.approx(5.012501, abs=1e-9)
    assert (one.packets, one.bytes, one.full) == (5, 2_502, 1)


def test_a_lost_packet_has_used_its_bandwidth() -> None:
    one = link(Conditions(bandwidth_mbps=8, loss=1.0))
    dice = Dice(Random(SEED))
    assert one.carry(1_000, 0.0, 0.0, dice) == LOST
    one.configure(Conditions(bandwidth_mbps=8), 0.0)
    assert one.carry(1_000, 0.0, 0.0, dice) == pytest.approx(0.002)


def test_reordered_packets_are_held_back_and_all_others_keep_their_order() -> None:
    one = link(Conditions(latency_ms=10, jitter_ms=3, reorder=0.2))
    dice = Dice(Random(SEED))
    arrivals = [one.carry(100, now, now, dice) for now in (index * 0.0005 for index in range(5_000))]
    newest = 0.0
    late = 0
    for arrival in arrivals:
        late += arrival < newest
        newest = max(newest, arrival)
    assert late > 0.05 * 5_000
    held = link(Conditions(latency_ms=10, reorder=1.0))
    delays = [held.carry(100, 0.0, 0.0, dice) for _ in range(2_000)]
    assert min(delays) >= 0.010
    assert 0.029 < max(delays) <= 0.030


def test_reordering_on_a_link_without_latency_takes_up_to_a_millisecond() -> None:
    held = link(Conditions(reorder=1.0))
    dice = Dice(Random(SEED))
    delays = [held.carry(100, 0.0, 0.0, dice) for _ in range(2_000)]
    assert 0.00099 < max(delays) <= 0.001


def test_new_conditions_hold_from_the_next_packet_on() -> None:
    one = link(Conditions(latency_ms=100))
    dice = Dice(Random(SEED))
    assert one.carry(1, 0.0, 0.0, dice) == 0.1
    one.configure(Conditions(latency_ms=10, loss=1.0), 10.0)
    assert one.carry(1, 0.0, 0.0, dice) == LOST
    one.configure(Conditions(latency_ms=10), 10.0)
    assert one.carry(1, 0.0, 0.0, dice) == 0.01
    assert one.packets == 3


def test_a_link_that_got_slower_is_slow_at_once() -> None:
    one = link(Conditions(latency_ms=1, jitter_ms=0.1))
    dice = Dice(Random(SEED))
    assert one.carry(1, 0.1, 0.0, dice) < 0.11  # announced ahead, at the old speed
    one.configure(Conditions(latency_ms=500, jitter_ms=0.1), 500.0)
    assert one.carry(1, 0.005, 0.005, dice) > 0.5


def test_the_same_conditions_again_change_nothing() -> None:
    conditions = Conditions(latency_ms=10, jitter_ms=30, jitter="uniform")
    once, again = link(conditions), link(conditions)
    first, second = Dice(Random(SEED)), Dice(Random(SEED))
    for index in range(500):
        now = index * 0.01
        again.configure(conditions, 10.0)
        assert once.carry(1, now, now, first) == again.carry(1, now, now, second)


@pytest.mark.parametrize(
    "conditions",
    [
        Conditions(latency_ms=10, jitter_ms=2),
        Conditions(latency_ms=10, jitter_ms=2, jitter="pareto", loss=0.1, reorder=0.1),
        Conditions(latency_ms=10, loss=0.3),
    ],
)
def test_scatter_draws_like_carry_when_packets_are_far_apart(conditions: Conditions) -> None:
    one, other = link(conditions), link(conditions)
    first, second = Dice(Random(SEED)), Dice(Random(SEED))
    for index in range(500):
        now = index * 1_000.0
        assert one.carry(10, now, now, first) == other.scatter(10, now, 0.01, second)
    assert (one.packets, one.bytes, one.lost) == (other.packets, other.bytes, other.lost)


def test_the_normal_law_to_its_tails() -> None:
    dice = Dice(Random(SEED))
    values = [dice.normal() for _ in range(100_000)]
    law = statistics.NormalDist()
    for bound in (-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0):
        share = sum(value < bound for value in values) / len(values)
        expected = law.cdf(bound)
        assert abs(share - expected) < 4 * math.sqrt(expected * (1 - expected) / len(values))


def test_extreme_uniform_numbers_are_survived() -> None:
    class Extreme(Random):
        def __init__(self, value: float) -> None:
            super().__init__(0)
            self.value = value

        def random(self) -> float:
            return self.value

    lowest: Callable[[float], Dice] = lambda value: Dice(Extreme(value))  # noqa: E731
    for jitter in ("uniform", "normal", "lognormal", "pareto"):
        for value in (0.0, 1.0 - 2.0**-53):
            one = link(Conditions(latency_ms=10, jitter_ms=5, jitter=jitter, reorder=0.5))
            arrival = one.carry(100, 1.0, 1.0, lowest(value))
            assert 1.001 - 1e-9 <= arrival < math.inf
