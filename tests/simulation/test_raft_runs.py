"""Random runs of the Raft core: none breaks anything; with a rule of the core broken, some do."""

from __future__ import annotations

import pytest

from nearcast import compiled
from tests.paper import test_raft
from tests.raft_mutants import MUTANTS, Mutant
from tests.raft_runs import Run, failures

SEEDS = range(1, 301)
"""``python -m tests.raft_runs --seeds 10000`` runs more."""
PAPER_TESTS = {
    "commits-old-terms": test_raft.test_figure_8_entries_of_earlier_terms_commit_with_one_of_this,
    "hard-commit-ahead-of-disk": test_raft.test_the_commit_index_on_disk_covers_what_is_on_that_disk,
    "stands-before-sync": test_raft.test_a_candidate_asks_once_its_own_vote_is_on_disk,
}
MUTANT_SEEDS = range(1, 1001)
"""At most: the first one that finds it ends the search."""


@pytest.mark.parametrize("first", range(SEEDS.start, SEEDS.stop, 50))
def test_random_runs_keep_every_promise(first: int) -> None:
    found = list(failures(range(first, first + 50)))
    assert not found, f"python -m tests.raft_runs --seeds 1 --first {found[0][0]} --trace: {found[0][1]}"


def test_runs_do_something() -> None:
    run = Run(7)
    run.go()
    assert len(run.cluster.safety.leaders) >= 2
    assert run.cluster.safety.commit > 20
    assert sum(operation.position >= 0 for operation in run.cluster.operations) > 20


def test_a_seed_is_a_run() -> None:
    runs = [Run(11), Run(11)]
    for run in runs:
        run.cluster.trace = []
        run.go()
    assert runs[0].cluster.trace == runs[1].cluster.trace


@pytest.mark.skipif(compiled.is_compiled(), reason="compiled classes cannot be broken on purpose")
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_broken_rule_is_found(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.apply(monkeypatch)
    if mutant.name in PAPER_TESTS:
        # It takes a coincidence that a thousand runs do not bring about.
        with pytest.raises(AssertionError):
            PAPER_TESTS[mutant.name]()
        return
    found = next(iter(failures(MUTANT_SEEDS)), None)
    assert found is not None, f"{len(MUTANT_SEEDS)} runs did not notice: {mutant.rule}"
