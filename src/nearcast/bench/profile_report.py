"""A profile as a table, and what follows from it in words."""

from __future__ import annotations

from rich import box
from rich.table import Table

from nearcast.bench.profile import Point, Profile


def profile_table(profile: Profile) -> Table:
    """Every load, by the rate that was asked for."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in (
        "topics",
        "producers",
        "consumers",
        "bytes",
        "out msg/s",
        "delivered/s",
        "p50 ms",
        "p95 ms",
        "p99 ms",
        "CPU",
    ):
        table.add_column(column, justify="right")
    table.add_column("")
    for point in sorted(profile.points, key=lambda point: point.workload.out_rate):
        load = point.workload
        table.add_row(
            *(f"{value:,}" for value in (load.topics, load.producers, load.consumers, load.payload_bytes)),
            f"{load.out_rate:,.0f}",
            f"{point.out_rate:,.0f}",
            *(f"{value:.2f}" for value in (point.p50_ms, point.p95_ms, point.p99_ms)),
            "-" if point.cpu_share is None else f"{point.cpu_share:.2f}",
            _verdict(point, profile.within_ms),
        )
    return table


def _verdict(point: Point, within_ms: float) -> str:
    if not point.meaningful:
        return "[yellow]the generator was late[/]"
    if not point.kept_up:
        return "[red]did not keep up[/]"
    return "" if point.p95_ms <= within_ms else f"[red]p95 above {within_ms:g} ms[/]"


def profile_lines(profile: Profile) -> list[str]:
    """What the points say."""
    lines = []
    if profile.correlations:
        shown = ", ".join(f"{name} {value:+.2f}" for name, value in list(profile.correlations.items())[:4])
        lines.append(f"p95 goes with (rank correlation): {shown}")
    late = sum(not point.meaningful for point in profile.points)
    if late:
        lines.append(f"[yellow]note:[/] {late} loads were sent late and say nothing: measure on a quieter machine")
    if profile.threshold is None or profile.out_rate_limit is None:
        lines.append(
            "[bold red]no threshold:[/] no load was good below every bad one; raise --within-ms, or use a quieter machine"
        )
        return lines
    beyond = "" if profile.reached else ", the highest that was tried: no load was too much"
    lines.append(
        f"[bold]{profile.threshold:,.0f} messages/s[/] passed on with p95 within {profile.within_ms:g} ms "
        f"(QoS {profile.qos}){beyond}"
    )
    lines.append("for the controller's configuration, with some distance kept:")
    lines.append(f"\\[controller.placement]\nout_rate_limit = {profile.out_rate_limit:.0f}")
    return lines
