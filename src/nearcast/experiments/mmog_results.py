"""What came of a run of ``mmog``: bounds kept, losses of subscriptions that change, and what one avatar saw (figure 9)."""

from __future__ import annotations

from nearcast.experiments import plots
from nearcast.experiments.flows import Flows
from nearcast.experiments.mmog import (
    MARGIN_S,
    MmogParameters,
    avatar_name,
    avatar_topic,
    followings,
    memberships,
)
from nearcast.experiments.owned_results import Findings, Judged, judge
from nearcast.experiments.owned_runs import Told
from nearcast.experiments.run import Run
from nearcast.scenario.scenario import Scenario

BIN_S = 0.5


def evaluate(run: Run[MmogParameters], scenario: Scenario, told: Told) -> None:
    """Everything, from what was recorded."""
    parameters = run.parameters
    joined: dict[str, list[float]] = {avatar_topic(avatar): [] for avatar in range(parameters.avatars)}
    for each in followings(parameters):
        joined[avatar_topic(each.followed)].append(each.from_s)
    question = Judged(
        bound_ms=parameters.bound_ms,
        begin_s=parameters.warm_s,
        changes={topic: sorted(set(moments)) for topic, moments in joined.items()},
        change="new follower",
    )
    findings = judge(run, scenario, told, question)
    run.measured("regroupings", sum(each.at_s >= parameters.warm_s for each in memberships(parameters)))
    _losses(run, findings.flows)
    _draw(run, findings)


def _losses(run: Run[MmogParameters], flows: Flows) -> None:
    parameters = run.parameters
    expected = lost = 0
    for each in followings(parameters):
        due, missing = flows.missing(
            avatar_topic(each.followed),
            avatar_name(each.follower),
            max(each.from_s, parameters.warm_s) + MARGIN_S,
            min(each.until_s, parameters.warm_s + parameters.duration_s) - MARGIN_S,
        )
        expected += due
        lost += missing
    run.figure("followed", {"expected": expected, "lost": lost})
    run.table("messages of those that were followed", ["", "expected", "lost"], [["to their followers", expected, lost]])
    if parameters.qos:
        run.measured("lost", lost)


def _draw(run: Run[MmogParameters], findings: Findings) -> None:
    """Latency at the avatar that followed most others, by whom it followed."""
    parameters = run.parameters
    seen: dict[int, set[int]] = {}
    for each in followings(parameters):
        seen.setdefault(each.follower, set()).add(each.followed)
    chosen = max(range(parameters.avatars), key=lambda avatar: (len(seen.get(avatar, ())), -avatar))
    with run.plot("latency", f"What {avatar_name(chosen)} saw of each other (figure 9)", "time (s)", "latency (ms)") as axes:
        for number, other in enumerate(sorted(seen.get(chosen, ()))):
            found = findings.flows.deliveries(avatar_topic(other)).sent_between(parameters.warm_s, findings.end_s)
            own = found.only(found.subscriber == avatar_name(chosen))
            colour = plots.COLOURS[number % len(plots.COLOURS)]
            axes.plot(own.sent_s, own.latency_ms, linestyle="none", marker=".", markersize=2.0, color=colour)
        axes.axhline(parameters.bound_ms, linestyle="--", color="#444444", linewidth=1.0, label="bound")
        axes.set_ylim(bottom=0.0)
