"""What holds for every test: hypothesis profiles, and the build that is meant to be under test.

The hot modules exist twice, compiled and plain. ``NEARCAST_EXPECT=compiled`` or ``plain`` (set by ``make test``) says which
one a run is about; a run that would import the other one, or an extension older than its source, stops before its first test.
"""

from __future__ import annotations

import os

import hypothesis
import pytest

from nearcast import compiled

# The default repeats itself: the same examples in every run, and a failure prints the blob that reproduces it.
# `HYPOTHESIS_PROFILE=explore` looks for new ones.
hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
hypothesis.settings.register_profile("explore", derandomize=False, deadline=None, print_blob=True, max_examples=2_000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def _flavour() -> str:
    return "compiled" if compiled.is_compiled() else "plain"


def pytest_report_header(config: pytest.Config) -> str:
    profile = hypothesis.settings.get_current_profile_name()
    seed = config.getoption("--hypothesis-seed", default=None)
    if seed is None:
        seed = "derived from each test" if profile == "ci" else "random, printed on failure"
    return f"nearcast: {_flavour()} hot modules; hypothesis profile {profile}, seed {seed}"


def pytest_sessionstart(session: pytest.Session) -> None:
    expected = os.environ.get("NEARCAST_EXPECT")
    if expected not in (None, "compiled", "plain"):
        pytest.exit(f"NEARCAST_EXPECT is 'compiled' or 'plain', not {expected!r}", returncode=4)
    if expected is not None and expected != _flavour():
        pytest.exit(f"these tests are for the {expected} hot modules, but {compiled.origin()} would be imported", returncode=4)
    stale = compiled.stale_sources()
    if stale:
        pytest.exit(f"compiled modules are older than {', '.join(stale)}: run `make install`", returncode=4)
