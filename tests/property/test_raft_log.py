"""Parts of the Raft core against dumb oracles: terms as runs against a list of terms; the linearizability check against trying
all orders; a whole set against a list."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearcast.errors import InvariantViolated
from nearcast.raft.terms import UNKNOWN, TermRuns
from nearcast.simulation.raft_checks import Operation, check_linearizable
from tests.raft_cluster import Cluster


@given(st.lists(st.tuples(st.sampled_from(("append", "cut", "compact")), st.integers(0, 5)), max_size=60), st.integers(0, 3))
def test_term_runs(steps: list[tuple[str, int]], base: int) -> None:
    runs = TermRuns(base, base)
    known = {base: base}  # index to term
    for what, amount in steps:
        first, last = min(known), max(known)
        if what == "append":
            term = known[last] + amount // 3
            runs.append(term)
            known[last + 1] = term
        elif what == "cut":
            to = max(first, last - amount)
            runs.cut(to)
            known = {index: term for index, term in known.items() if index <= to}
        else:
            to = min(last, first + amount)
            runs.compact(to)
            known = {index: term for index, term in known.items() if index >= to}
        assert (runs.base_index, runs.last_index, runs.last_term) == (min(known), max(known), known[max(known)])
        for index in range(min(known) - 2, max(known) + 3):
            assert runs.term_of(index) == known.get(index, UNKNOWN)
            for term in range(-1, runs.last_term + 2):
                fitting = [at for at, of in known.items() if at <= index and of <= term]
                if index >= min(known):
                    assert runs.last_at_most(index, term) == max(fitting, default=min(known))
        assert [first for first, _ in runs.runs()] == sorted(first for first, _ in runs.runs())


def _has_an_order(operations: list[Operation], content: list[int]) -> bool:
    """Try all orders."""
    ended = [operation for operation in operations if operation.ended_s < 1e9]
    lasting = [operation for operation in operations if operation not in ended and operation.value in content]
    everything = ended + lasting
    for order in itertools.permutations(everything):
        topic: list[int] = []
        good = True
        for place, operation in enumerate(order):
            if any(later.ended_s < operation.began_s for later in order[place + 1 :]):
                good = False
                break
            if operation.reads:
                good = operation.position == len(topic)
            else:
                topic.append(operation.value)
                good = operation.ended_s > 1e9 or operation.position == len(topic)
            if not good:
                break
        if good and topic == content:
            return True
    return False


@pytest.mark.parametrize("block", range(4))
def test_linearizability_is_what_it_says(block: int) -> None:
    outcomes = [0, 0]
    for seed in range(block * 150, block * 150 + 150):
        rng = random.Random(seed)
        content = [1, 2, 3][: rng.randrange(4)]
        operations = []
        for value in (1, 2, 3, 0, 0)[: rng.randrange(1, 6)] if rng.random() < 0.3 else (*content, 0, 0):
            began_s = rng.random() * 10
            operation = Operation(1, began_s, value)
            if value == 0:
                operation.ended_s = began_s + rng.random() * 5
                operation.position = rng.randrange(len(content) + 1)
            elif value in content and rng.random() < 0.8:
                operation.ended_s = began_s + rng.random() * 5
                operation.position = content.index(value) + 1
            operations.append(operation)
        expected = _has_an_order(operations, content)
        try:
            check_linearizable(operations, {1: content})
        except InvariantViolated:
            found = False
        else:
            found = True
        assert found == expected, f"seed {seed}: {operations} {content}"
        outcomes[found] += 1
    assert min(outcomes) > 10


@given(st.integers(0, 1_000_000), st.lists(st.integers(1, 30), min_size=1, max_size=12))
def test_a_set_is_a_list(seed: int, batches: list[int]) -> None:
    """Without faults, a replica set is a list that everybody appends to."""
    cluster = Cluster(seed, 3)
    assert cluster.run_until(lambda: cluster.leader() is not None)
    leader = cluster.leader()
    assert leader is not None
    oracle: list[int] = []
    for batch in batches:
        for _ in range(batch):
            oracle.append(len(oracle) + 1)
            assert leader.publish(Operation(1, cluster.now, oracle[-1]))
        cluster.run(cluster.now + 0.01)
    assert cluster.run_until(lambda: all(replica.topics.get(1) == oracle for replica in cluster.replicas.values()))
