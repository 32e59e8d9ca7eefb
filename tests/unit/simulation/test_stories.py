"""Stories: who is heard in them."""

from __future__ import annotations

from nearcast.errors import InvariantViolated
from nearcast.simulation.stories import LAST_LINES, tell
from nearcast.simulation.tracing import Tracer
from tests.unit.simulation.worlds import make_world


def test_a_host_that_talks_all_the_time_leaves_room_for_a_quiet_one() -> None:
    tracer = Tracer()
    world = make_world(hosts=3, tracer=tracer)
    for number in range(20):
        world.hosts[0].note(f"quiet {number}")
    tracer.fault("something breaks")
    for number in range(150):
        world.hosts[1].note(f"loud {number}")
        world.hosts[2].note("not involved")
    story = tell(tracer, ["h0", "h1", "h2"], InvariantViolated("no", ["h0", "h1"]), -1)
    lines = [line.split("  ")[-1].strip() for line in story.last]
    share = LAST_LINES // 4
    assert lines[:share] == [f"quiet {number}" for number in range(20 - share, 20)]
    assert lines[share] == "something breaks"
    assert lines[share + 1 :] == [f"loud {number}" for number in range(150 - LAST_LINES + share, 150)]


def test_of_very_many_the_last_lines_are_told() -> None:
    tracer = Tracer()
    world = make_world(hosts=50, tracer=tracer)
    for host in world.hosts:
        host.note(f"I am {host.name}")
    story = tell(tracer, [host.name for host in world.hosts], InvariantViolated("no"), -1)
    assert [line.split("  ")[-1].strip() for line in story.last] == [f"I am h{index}" for index in range(50 - LAST_LINES, 50)]
