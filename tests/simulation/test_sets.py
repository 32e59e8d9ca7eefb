"""Replica sets in random fabrics: what they promise holds, whatever fails and wherever clients go."""

from __future__ import annotations

import pytest

from nearcast.simulation.runs import simulate
from tests.simulation.set_fabrics import set_fabric

#: Each of these once broke an invariant, or never came to an end.
FOUND = (39, 92, 131)


@pytest.mark.parametrize("number", [*range(1, 13), *FOUND])
def test_random_fabrics_with_replica_sets(number: int) -> None:
    outcome = simulate(set_fabric(number), number)
    assert outcome.violation is None, f"python -m tests.simulation.set_fabrics {number}: {outcome.violation}"
