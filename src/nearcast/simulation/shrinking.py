"""Fewer faults that still break it: drop parts of a failing schedule for as long as the run goes on failing."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from nearcast.errors import SimulationLimit
from nearcast.scenario.scenario import Scenario
from nearcast.simulation.runs import Options, Outcome, simulate

MAX_RUNS = 300
"""Runs that shrinking may cost, at most."""

Shrunk = Callable[[int, int], None]
"""Told after each attempt: how many runs so far, and how many faults are left."""


def shrink(
    scenario: Scenario,
    failed: Outcome,
    options: Options = Options(),  # noqa: B008 - frozen
    *,
    max_runs: int = MAX_RUNS,
    told: Shrunk | None = None,
) -> Outcome:
    """The run with the fewest faults found that ends in the same kind of violation; at worst the given one.

    Halves are dropped first, then quarters, down to single faults: no fault of the result can be left out alone (unless
    ``max_runs`` was reached before that was known). The faults that stay keep their times and everything else.
    """
    if failed.violation is None:
        return failed
    best = failed
    runs = 0
    size = max(1, len(best.applied))
    while best.applied:
        size = max(1, min(size, len(best.applied)))
        dropped = False
        start = 0
        while start < len(best.applied) and runs < max_runs:
            kept = best.applied[:start] + best.applied[start + size :]
            attempt = _attempt(scenario, failed.seed, msgspec.structs.replace(options, only=kept))
            runs += 1
            if attempt is not None and attempt.violation is not None and attempt.violation.kind == failed.violation.kind:
                best = attempt
                dropped = True
            else:
                start += size
            if told is not None:
                told(runs, len(best.applied))
        if runs >= max_runs or (size == 1 and not dropped):
            break
        if size > 1:
            size = (size + 1) // 2
    return best


def _attempt(scenario: Scenario, seed: int, options: Options) -> Outcome | None:
    """A run with fewer faults; None if it runs away, which is not the failure that is looked for."""
    try:
        return simulate(scenario, seed, options)
    except SimulationLimit:
        return None
