"""Whatever of a WAN is killed, nothing of it stays: no process, namespace, device, socket or directory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.integration.emulation.wans import FAMILY, MarkedWan, marked_wan, require_namespaces, wait_until
from tests.integration.tools import optional

pytestmark = pytest.mark.integration


@pytest.fixture
def wan(tmp_path: Path) -> Iterator[MarkedWan]:
    with marked_wan(tmp_path) as running:
        yield running


def _interrupt(wan: MarkedWan) -> None:
    assert wan.process is not None
    wan.process.send_signal(signal.SIGINT)


def _terminate(wan: MarkedWan) -> None:
    assert wan.process is not None
    wan.process.send_signal(signal.SIGTERM)


def _kill_command(wan: MarkedWan) -> None:
    assert wan.process is not None
    wan.process.kill()


def _kill_launcher(wan: MarkedWan) -> None:
    wan.launcher().kill()


def _kill_keeper(wan: MarkedWan) -> None:
    wan.keeper().kill()


def _kill_launcher_and_keeper(wan: MarkedWan) -> None:
    launcher, keeper = wan.launcher(), wan.keeper()
    launcher.suspend()  # so that it cannot clean up in between
    keeper.kill()
    launcher.kill()


DEATHS: list[Callable[[MarkedWan], None]] = [
    _interrupt,
    _terminate,
    _kill_command,
    _kill_launcher,
    _kill_keeper,
    _kill_launcher_and_keeper,
]


@pytest.mark.parametrize("death", DEATHS, ids=lambda death: death.__name__.strip("_"))
def test_nothing_is_left(wan: MarkedWan, death: Callable[[MarkedWan], None]) -> None:
    require_namespaces()
    _die(wan, "namespaces", death)


@pytest.mark.parametrize("death", [_interrupt, _kill_command, _kill_keeper], ids=lambda death: death.__name__.strip("_"))
def test_nothing_is_left_in_loopback_mode(wan: MarkedWan, death: Callable[[MarkedWan], None]) -> None:
    _die(wan, "loopback", death)


def _die(wan: MarkedWan, mode: str, death: Callable[[MarkedWan], None]) -> None:
    wan.up(FAMILY, f"--{mode}")
    wan.wait_for_line("is up")
    wait_until(lambda: len([line for line in wan.survivors() if "sleep 100" in line]) == 4, "the whole family")
    death(wan)
    wait_until(lambda: not wan.survivors(), "the end of every process")
    wait_until(lambda: not wan.left_behind(), "the end of every file")


def test_nothing_but_a_recognised_directory_is_left_when_all_three_are_killed_at_once(wan: MarkedWan) -> None:
    require_namespaces()
    wan.up(FAMILY, "--namespaces")
    wan.wait_for_line("is up")
    processes = [psutil.Process(wan.process.pid), wan.launcher(), wan.keeper()]  # type: ignore[union-attr]
    for process in processes[:2]:
        process.suspend()
    for process in reversed(processes):
        process.kill()
    wait_until(lambda: not wan.survivors(), "the end of every process")
    assert wan.left_behind()
    listed = wan.run("list")
    assert listed.returncode == 0
    assert "no WAN is running" in listed.stdout
    assert wan.left_behind() == []


def test_a_keeper_that_was_killed_is_not_a_success(wan: MarkedWan) -> None:
    wan.up(FAMILY, "--loopback")
    wan.wait_for_line("is up")
    _kill_keeper(wan)
    assert wan.process is not None
    _, complaints = wan.process.communicate(timeout=30)
    assert wan.process.returncode == 1
    assert complaints == "nearcast: the keeper of WAN family was killed (SIGKILL), and the WAN with it\n"


def test_a_name_can_be_used_again_after_everything_was_killed(wan: MarkedWan) -> None:
    wan.up(FAMILY, "--loopback")
    wan.wait_for_line("is up")
    processes = [psutil.Process(wan.process.pid), wan.launcher(), wan.keeper()]  # type: ignore[union-attr]
    for process in processes[:2]:
        process.suspend()
    for process in reversed(processes):
        process.kill()
    wait_until(lambda: not wan.survivors(), "the end of every process")
    wan.end()
    wan.up(FAMILY, "--loopback")
    wan.wait_for_line("is up")


def test_the_end_of_the_router_is_said(wan: MarkedWan) -> None:
    require_namespaces()
    wan.up(FAMILY, "--namespaces")
    wan.wait_for_line("is up")
    router = next(line for line in wan.survivors() if "router_process" in line)
    os.kill(int(router.split()[0]), signal.SIGKILL)
    assert "no packet passes any more" in wan.wait_for_line("problem: the router ended by itself (SIGKILL)")
    assert "the router has ended" in wan.run("cut", "one").stderr
    assert wan.run("status").returncode == 0
    assert wan.run("down").returncode == 0
    wait_until(lambda: not wan.survivors(), "the end of every process")
    assert wan.left_behind() == []


def test_interrupt_during_the_start(wan: MarkedWan) -> None:
    wan.up(FAMILY.replace('"family complete" }', '"never said" }'), "--loopback")
    wan.wait_for_line("parent started")
    _interrupt(wan)
    assert wan.process is not None
    wan.process.communicate(timeout=30)
    assert wan.process.returncode == 130
    wait_until(lambda: not wan.survivors(), "the end of every process")
    assert wan.left_behind() == []


def test_a_process_that_does_not_want_to_end_is_killed(wan: MarkedWan) -> None:
    stubborn = FAMILY.replace('"sh", "-c", "', '"sh", "-c", "trap \'\' TERM; ').replace(
        "exec sleep 1004", "while :; do sleep 1; done"
    )
    wan.up(stubborn + "stop_timeout_s = 0.3\n", "--loopback")
    wan.wait_for_line("is up")
    _terminate(wan)
    assert wan.process is not None
    wan.process.communicate(timeout=30)
    wait_until(lambda: not wan.survivors(), "the end of every process")
    assert wan.left_behind() == []


def test_without_any_namespace_the_launcher_kills_what_the_keeper_leaves(wan: MarkedWan) -> None:
    """Root without capabilities may not even make a user namespace: no PID namespace does the work."""
    setpriv = optional("setpriv")
    wan.up(FAMILY, prefix=(str(setpriv), "--bounding-set=-all", "--inh-caps=-all"))
    wan.wait_for_line("cannot show: only TCP connections")
    wan.wait_for_line("is up")
    wait_until(lambda: len([line for line in wan.survivors() if "sleep 100" in line]) == 4, "the whole family")
    _kill_keeper(wan)
    wait_until(lambda: not wan.survivors(), "the end of every process")
    wait_until(lambda: not wan.left_behind(), "the end of every file")


def test_a_python_program_that_is_killed_takes_its_wan_with_it(wan: MarkedWan) -> None:
    topology = wan.directory / "topology.toml"
    topology.write_text(FAMILY)
    program = (
        "import asyncio, os, pathlib\n"
        "from nearcast.emulation.wan import Wan\n"
        "async def main():\n"
        f"    async with Wan.up({str(topology)!r}, mode='loopback', base=pathlib.Path({str(wan.base)!r})) as wan:\n"
        "        print('is up', flush=True)\n"
        "        await wan.ended()\n"
        "asyncio.run(main())\n"
    )
    wan.process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=wan.environment
    )
    wan.wait_for_line("is up")
    os.kill(wan.process.pid, signal.SIGKILL)
    wait_until(lambda: not wan.survivors(), "the end of every process")
    wait_until(lambda: not wan.left_behind(), "the end of every file")
