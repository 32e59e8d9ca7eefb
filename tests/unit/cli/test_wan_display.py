"""What ``nearcast wan`` shows is readable in a terminal of 80 columns."""

from __future__ import annotations

from random import Random

from rich.console import Console, RenderableType

from nearcast.cli import wan_display as display
from nearcast.emulation.control import Matrix
from nearcast.scenario.assembly import build_network
from nearcast.scenario.files import load_topology


def matrix_of(name: str) -> Matrix:
    network, names = build_network(load_topology(name), Random(0))
    everyone = range(len(names))
    rows = tuple(tuple(network.one_way_ms(source, target) for target in everyone) for source in everyone)
    return Matrix(hosts=tuple(names), one_way_ms=rows)


def lines(shown: RenderableType, width: int = 80) -> list[str]:
    console = Console(width=width)
    with console.capture() as captured:
        console.print(shown)
    return [line.rstrip() for line in captured.get().splitlines()]


def test_alike_hosts_share_a_row() -> None:
    shown = lines(display.matrix_table(matrix_of("emma"), 80))
    assert [line.split() for line in shown[:4]] == [
        ["from", "\\", "to", "1", "2", "3"],
        ["1", "controller", "+2", "0.25", "49", "13.5"],
        ["2", "broker-east", "+11", "49", "0.25", "42.5"],
        ["3", "broker-west-1", "+12", "13.5", "42.5", "0.25"],
    ]
    assert shown[4] == "one way, ms, without jitter; - is no way; +1 is one more such host"


def test_what_does_not_fit_is_counted_and_nothing_is_cut() -> None:
    hosts = tuple(f"a-host-with-a-long-name-{number}" for number in range(30))
    rows = tuple(tuple(float(abs(a - b)) * 10.4 for b in range(30)) for a in range(30))
    shown = lines(display.matrix_table(Matrix(hosts=hosts, one_way_ms=rows), 80))
    assert not any("…" in line for line in shown)
    assert "22 hosts are not shown: --json has them" in shown[-1]
    assert max(map(len, shown[:-1])) <= 80


def test_a_matrix_of_some_rows_is_shown_as_far_as_it_goes() -> None:
    whole = matrix_of("iov")
    shown = lines(display.matrix_table(Matrix(hosts=whole.hosts, one_way_ms=whole.one_way_ms[:2]), 80))
    assert "7 hosts are not shown" in shown[-1]
