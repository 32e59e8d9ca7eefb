"""The network model against dumb oracles and against what has to hold whatever the traffic."""

from __future__ import annotations

import itertools
import math
from random import Random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from nearcast.network.conditions import Conditions
from nearcast.network.latency import MatrixLatency
from nearcast.network.links import Link
from nearcast.network.network import FULL, LOST, UNREACHABLE, Network
from nearcast.network.queueing import REFUSED, Sequencer, Transmitter
from nearcast.network.routing import Graph


def pool(seed: int, reorder: bool = False, duplicate: bool = False) -> list[Conditions]:
    """Conditions of every kind, plain ones first. Drawing from a list is ten times as fast as drawing every field."""
    rng = Random(seed)
    made = [Conditions(), Conditions(latency_ms=5), Conditions(jitter_ms=5), Conditions(latency_ms=20, jitter_ms=0.01)]
    for jitter in ("uniform", "normal", "lognormal", "pareto"):
        for _ in range(10):
            made.append(
                Conditions(
                    latency_ms=rng.choice([0.0, 0.3, 5.0, 40.0]),
                    jitter_ms=rng.choice([0.0, 0.1, 3.0, 50.0]),
                    jitter=jitter,
                    loss=rng.choice([0.0, 0.0, 0.1, 0.5]),
                    bandwidth_mbps=rng.choice([0.0, 0.0, 0.1, 1.0, 100.0]),
                    queue_ms=rng.choice([1.0, 100.0, 1e6]),
                    reorder=rng.choice([0.0, 0.1, 0.5]) if reorder else 0.0,
                    duplicate=rng.choice([0.0, 0.1, 0.5]) if duplicate else 0.0,
                )
            )
    return made


ORDERED = pool(1)
UNRULY = pool(2, reorder=True, duplicate=True)

# Steps of a clock and, ahead of it, a packet's time on a link: what a link in the middle of many paths hears.
aheads = st.one_of(st.integers(0, 4), st.integers(0, 30))
announcements = st.lists(
    st.tuples(st.integers(0, 5), aheads, st.one_of(st.integers(0, 3), st.integers(0, 40))),
    max_size=60,
)


@given(announcements, st.one_of(st.none(), st.integers(0, 20)))
def test_a_transmitter_gives_each_packet_the_free_time_from_its_arrival_on(
    steps: list[tuple[int, int, int]], patience: int | None
) -> None:
    """The oracle marks free slots one by one in a set. Whole numbers, so that floats are exact."""
    transmitter = Transmitter()
    taken: set[int] = set()
    now = 0
    for step, ahead, duration in steps:
        now += step
        arrival = now + ahead
        free = itertools.islice((slot for slot in itertools.count(arrival) if slot not in taken), duration)
        slots = list(free)
        finish = slots[-1] + 1 if slots else None
        limit = 1e9 if patience is None else float(patience)
        answer = transmitter.book(float(arrival), float(duration), limit, float(now))
        if finish is None:
            continue  # an empty packet: at once or behind others, and it takes no capacity
        if finish - duration - arrival > limit:
            assert answer == REFUSED
        else:
            assert answer == finish
            taken.update(slots)


@given(announcements)
def test_a_transmitter_is_never_faster_than_its_rate_over_any_window(steps: list[tuple[int, int, int]]) -> None:
    transmitter = Transmitter()
    now = 0.0
    packets: list[tuple[float, float, float]] = []
    for step, ahead, duration in steps:
        now += step / 7
        arrival = now + ahead / 3
        packets.append((arrival, duration / 11, transmitter.book(arrival, duration / 11, 1e9, now)))
    for start, _, _ in packets:
        for _, _, end in packets:
            inside = sum(duration for arrival, duration, finish in packets if arrival >= start and finish <= end)
            assert inside <= max(end - start, 0.0) + 1e-9


@given(announcements)
def test_a_sequencer_keeps_everyone_in_order_and_moves_nobody_without_need(steps: list[tuple[int, int, int]]) -> None:
    sequencer = Sequencer()
    now = 0
    known: list[tuple[int, float]] = []
    for step, ahead, delay in steps:
        now += step
        departure = now + ahead
        wanted = float(departure + delay)
        lower = max((arrival for other, arrival in known if other <= departure), default=0.0)
        upper = min((arrival for other, arrival in known if other > departure), default=math.inf)
        arrival = sequencer.order(float(departure), wanted, float(now))
        assert arrival == min(max(wanted, lower), upper)
        known.append((departure, arrival))
    in_order = [arrival for _, arrival in sorted(known, key=lambda packet: packet[0])]
    assert in_order == sorted(in_order)


@st.composite
def networks(draw: st.DrawFn, choices: list[Conditions]) -> Network:
    """Four sites with some links, a model or none, and two endpoints at each site."""
    size = 4
    pairs = list(itertools.combinations(range(size), 2))
    drawn = iter(draw(st.lists(st.sampled_from(choices), min_size=32, max_size=32)))
    links = draw(st.lists(st.sampled_from(["none", "both", "one way"]), min_size=len(pairs), max_size=len(pairs)))
    rng = Random(draw(st.integers(0, 1_000)))
    rows = [[rng.choice([0.0, 1.0, 30.0]) for _ in range(size)] for _ in range(size)]
    latency = MatrixLatency(rows) if draw(st.booleans()) else None
    network = Network([str(site) for site in range(size)], latency, rng, next(drawn))
    for (a, b), kind in zip(pairs, links, strict=True):
        if kind != "none":
            network.connect(a, b, next(drawn), kind == "one way")
    for site in range(size):
        network.set_local(site, next(drawn))
        for _ in range(2):
            network.join(site, next(drawn))
    return network


sends = st.lists(
    st.tuples(
        st.integers(0, 7), st.integers(0, 7), st.sampled_from([1, 40, 1500]), st.sampled_from([0.0, 0.0001, 0.003, 0.2])
    ),
    min_size=1,
    max_size=60,
)


@given(networks(ORDERED), sends)
def test_without_reordering_packets_from_one_to_another_keep_their_order(
    network: Network, packets: list[tuple[int, int, int, float]]
) -> None:
    now = 0.0
    newest: dict[tuple[int, int], float] = {}
    for source, target, size, step in packets:
        now += step
        arrival = network.transit(source, target, size, now)
        if arrival >= 0.0:
            assert arrival >= newest.get((source, target), 0.0)
            newest[source, target] = arrival


@given(networks(UNRULY), sends)
def test_no_packet_is_faster_than_a_tenth_of_the_latency_and_every_answer_is_counted(
    network: Network, packets: list[tuple[int, int, int, float]]
) -> None:
    now = 0.0
    outcomes = {LOST: 0, FULL: 0, UNREACHABLE: 0}
    copies = 0
    for source, target, size, step in packets:
        now += step
        shortest = 0.1 * network.one_way_ms(source, target) / 1000
        arrival = network.transit(source, target, size, now)
        copy = network.take_duplicate()
        if arrival < 0.0:
            outcomes[arrival] += 1
            assert copy < 0.0
        else:
            assert now + shortest - 1e-9 <= arrival < math.inf
        if copy >= 0.0:
            copies += 1
            assert copy >= now + shortest - 1e-9
    assert outcomes == {LOST: network.lost, FULL: network.full, UNREACHABLE: network.unreachable}
    assert (network.packets, network.bytes) == (len(packets), sum(size for _, _, size, _ in packets))
    assert network.duplicated == copies


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("cut"), st.sets(st.integers(0, 5)), st.sets(st.integers(0, 5)), st.booleans()),
            st.tuples(st.just("heal"), st.integers(0, 20)),
            st.tuples(st.just("all")),
        ),
        max_size=25,
    )
)
def test_cuts_stop_what_they_say_and_nothing_else(steps: list[tuple[object, ...]]) -> None:
    """The oracle writes every pair of every cut down."""
    network = Network(["here"], None, Random(0))
    hosts = [network.join(0) for _ in range(6)]
    active: dict[int, set[tuple[int, int]]] = {}
    handles: list[int] = []
    for step in steps:
        if step[0] == "cut":
            _, sources, targets, one_way = step
            assert isinstance(sources, set)
            assert isinstance(targets, set)
            handle = network.cut(sorted(sources), sorted(targets), bool(one_way))
            pairs = set(itertools.product(sources, targets))
            active[handle] = pairs if one_way else pairs | {(b, a) for a, b in pairs}
            handles.append(handle)
        elif step[0] == "heal":
            assert isinstance(step[1], int)
            handle = handles[step[1]] if step[1] < len(handles) else 0
            network.heal(handle)
            active.pop(handle, None)
        else:
            network.heal_all()
            active.clear()
        stopped: set[tuple[int, int]] = set().union(*active.values())
        for a, b in itertools.permutations(hosts, 2):
            assert (network.transit(a, b, 1, 0.0) == UNREACHABLE) is ((a, b) in stopped)
            assert math.isinf(network.one_way_ms(a, b)) is ((a, b) in stopped)


@given(
    st.integers(2, 7).flatmap(
        lambda size: st.tuples(
            st.just(size),
            st.dictionaries(st.tuples(st.integers(0, size - 1), st.integers(0, size - 1)), st.integers(0, 6), max_size=20),
        )
    ),
    st.randoms(use_true_random=False),
)
def test_paths_are_as_short_as_floyd_and_warshall_say(drawn: tuple[int, dict[tuple[int, int], int]], rng: Random) -> None:
    size, edges = drawn
    edges = {(a, b): latency for (a, b), latency in edges.items() if a != b}
    # Latency first, then links: one number, because there are fewer than 1,000 links.
    cost = {pair: latency * 1_000 + 1 for pair, latency in edges.items()}
    least = {(a, b): 0.0 if a == b else cost.get((a, b), math.inf) for a in range(size) for b in range(size)}
    for middle, a, b in itertools.product(range(size), repeat=3):
        least[a, b] = min(least[a, b], least[a, middle] + least[middle, b])
    paths = []
    for _ in range(2):
        graph = Graph(size)
        shuffled = list(edges.items())
        rng.shuffle(shuffled)
        for (a, b), latency in shuffled:
            graph.add(a, b, Link(Conditions(latency_ms=latency), float(latency)))
        ends = {id(link): divmod(key, size) for key, link in graph.links.items()}
        found: dict[tuple[int, int], list[tuple[int, int]] | None] = {}
        for a, b in itertools.permutations(range(size), 2):
            path = graph.path(a, b)
            found[a, b] = None if path is None else [ends[id(link)] for link in path]
            if path is None:
                assert least[a, b] == math.inf
                continue
            assert sum(link.latency_ms * 1_000 + 1 for link in path) == least[a, b]
            hops = [ends[id(link)] for link in path]
            assert [hop[0] for hop in hops] == [a, *(hop[1] for hop in hops[:-1])]
            assert hops[-1][1] == b
        paths.append(found)
    assert paths[0] == paths[1]


changes = st.lists(
    st.one_of(
        st.tuples(st.just("connect"), st.integers(0, 3), st.integers(0, 3), st.sampled_from(UNRULY), st.booleans()),
        st.tuples(st.just("disconnect"), st.integers(0, 3), st.integers(0, 3), st.booleans()),
        st.tuples(st.just("move"), st.integers(0, 3), st.integers(0, 3)),
        st.tuples(st.just("access"), st.integers(0, 3), st.sampled_from(UNRULY)),
        st.tuples(st.just("local"), st.integers(0, 3), st.sampled_from(UNRULY)),
    ),
    max_size=12,
)


@given(changes, st.booleans())
def test_a_network_that_was_changed_is_like_one_that_was_made_so(steps: list[tuple[Any, ...]], modelled: bool) -> None:
    """Whatever is remembered (routes, trees, links of pairs), no change is missed; traffic goes on meanwhile."""
    latency = MatrixLatency([[abs(a - b) * 7.0 + (a > b) for b in range(4)] for a in range(4)]) if modelled else None
    links: dict[tuple[int, int], Conditions] = {}
    places = [0, 1, 2, 3]
    access = [Conditions()] * 4
    local = [Conditions()] * 4

    def made() -> Network:
        network = Network(["a", "b", "c", "d"], latency, Random(1))
        for (a, b), conditions in links.items():
            network.connect(a, b, conditions, one_way=True)
        for index in range(4):
            network.set_local(index, local[index])
            network.join(places[index], access[index])
        return network

    network = made()
    for now, (kind, *details) in enumerate(steps):
        match kind, details:
            case "connect", [a, b, conditions, one_way] if a != b:
                network.connect(a, b, conditions, one_way)
                links[a, b] = conditions
                if not one_way:
                    links[b, a] = conditions
            case "disconnect", [a, b, one_way]:
                network.disconnect(a, b, one_way)
                links.pop((a, b), None)
                if not one_way:
                    links.pop((b, a), None)
            case "move", [endpoint, site]:
                network.move(endpoint, site)
                places[endpoint] = site
            case "access", [endpoint, conditions]:
                network.set_access(endpoint, conditions)
                access[endpoint] = conditions
            case "local", [site, conditions]:
                network.set_local(site, conditions)
                local[site] = conditions
        fresh = made()
        for a, b in itertools.product(range(4), repeat=2):
            assert network.one_way_ms(a, b) == fresh.one_way_ms(a, b)
            assert network.link_conditions(a, b) == links.get((a, b))
            arrival = network.transit(a, b, 100, float(now))
            assert (arrival == UNREACHABLE) is math.isinf(fresh.one_way_ms(a, b))
            assert arrival < 0.0 or arrival >= now
