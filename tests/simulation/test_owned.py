"""Topics of class ``owned`` in random fabrics: what they promise holds, whatever moves and whatever goes wrong."""

from __future__ import annotations

import pytest

from nearcast.simulation.runs import simulate
from tests.simulation.owned_fabrics import owned_fabric

#: Each of these once broke an invariant.
FOUND = (2, 4, 59, 89, 117, 1001, 1009, 1121, 1227, 4039, 4064, 4104, 4134, 5037, 7031, 7054, 8109, 8150)


@pytest.mark.parametrize("number", [*range(100, 120), *FOUND])
def test_random_fabrics_with_owned_topics(number: int) -> None:
    outcome = simulate(owned_fabric(number), number)
    assert outcome.violation is None, f"python -m tests.simulation.owned_fabrics {number}: {outcome.violation}"
