"""Experiments as a user runs them, reduced: real processes, the real command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from nearcast.emulation import namespaces
from nearcast.recording import check
from tests.integration.tools import require

pytestmark = pytest.mark.integration


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "nearcast", "experiment", *arguments]


def performed(folder: Path, *arguments: str) -> dict[str, Any]:
    run = subprocess.run(
        command(*arguments, "--json", "--out", str(folder)), capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode in (0, 1), run.stderr
    outcome: dict[str, Any] = json.loads(run.stdout)
    assert outcome["complete"], run.stderr
    assert (run.returncode == 0) == outcome["ok"]
    return outcome


def test_agreement_of_simulator_and_emulated_wan(tmp_path: Path) -> None:
    """In namespaces where they are possible, else in loopback mode; the test below runs in loopback mode everywhere."""
    outcome = performed(tmp_path / "out", "agreement", "--quick", "--duration", "2")
    bars = {bar["name"]: bar for bar in outcome["bars"]}
    # How far medians are apart says something about this machine now; that nothing is lost says something about the code.
    assert bars["worst_median_difference_ms"]["value"] is not None
    for name in ("lost_simulated", "lost_emulated", "duplicated", "deliveries_compared", "simulator_model_error_ms"):
        assert bars[name]["ok"], bars[name]
    assert outcome["figures"]["emulation"]["mode"] == ("namespaces" if namespaces.available() is None else "loopback")
    for events in outcome["events"]:
        assert check(tmp_path / "out" / events).problems == ()
    assert (tmp_path / "out" / outcome["plots"][0]).stat().st_size > 10_000


@pytest.mark.skipif(namespaces.available() is not None, reason="nodes measure over UDP, which loopback mode does not carry")
def test_emmas_clients_move_and_neither_lose_nor_repeat_anything(tmp_path: Path) -> None:
    outcome = performed(tmp_path / "out", "emma", "--scale", "0.1", "--duration", "20")
    bars = {bar["name"]: bar for bar in outcome["bars"]}
    # Latencies and gaps say something about this machine now; the rest says something about the code.
    for name in (*(f"{what}_qos_{qos}" for what in ("lost", "duplicated") for qos in range(3)), "connections_lost", "moves"):
        assert bars[name]["ok"], (bars[name], outcome["notes"], outcome["figures"].get("first_losses"))
    assert bars["intra_region_excess_ms"]["value"] is not None
    assert [table["title"] for table in outcome["tables"]][:2] == ["messages", "latency by topic"]
    assert check(tmp_path / "out" / outcome["events"][0]).problems == ()
    assert processes_about(tmp_path / "out") == []


needs_datagrams = pytest.mark.skipif(
    namespaces.available() is not None, reason="nodes measure over UDP, which loopback mode does not carry"
)


@needs_datagrams
def test_all_topics_change_owners_at_once(tmp_path: Path) -> None:
    """Figure 7 of ePulsar. How long clients got nothing says something about this machine now; what they got does not."""
    outcome = performed(tmp_path / "out", "migration", "--quick")
    bars = {bar["name"]: bar for bar in outcome["bars"]}
    for name in ("lost", "duplicated", "out_of_order", "failed", "moved"):
        assert bars[name]["ok"], (bars[name], outcome["notes"])
    assert bars["median_downtime_ms"]["value"] is not None
    assert {phase["workflow"] for phase in outcome["figures"]["phases"]} == {"handover", "release"}
    assert all((tmp_path / "out" / plot).stat().st_size > 10_000 for plot in outcome["plots"])
    assert processes_about(tmp_path / "out") == []


@needs_datagrams
@pytest.mark.parametrize(("name", "change"), [("uav", "zone_changes"), ("mmog", "regroupings")])
def test_owners_follow_the_clients_of_their_topics(name: str, change: str, tmp_path: Path) -> None:
    """Figures 8 and 9 of ePulsar. Latencies say something about this machine now, too."""
    outcome = performed(tmp_path / "out", name, "--quick")
    bars = {bar["name"]: bar for bar in outcome["bars"]}
    for bar in (change, "migrations", "lost"):
        assert bars[bar]["ok"], (bars[bar], outcome["notes"], outcome["figures"].get("first_losses"))
    assert bars["within_bound_percent"]["value"] is not None
    assert bars["longest_violation_s"]["value"] is not None
    assert check(tmp_path / "out" / outcome["events"][0]).problems == ()
    assert (tmp_path / "out" / outcome["plots"][0]).stat().st_size > 10_000
    assert processes_about(tmp_path / "out") == []


@pytest.mark.skipif(namespaces.available() is not None, reason="brokers measure over UDP, which loopback mode does not carry")
def test_excess_data_of_real_brokers_with_mosquitto_as_the_cloud(tmp_path: Path) -> None:
    """Tables I and II of the broadcast-group paper. Which groups form with 5 ms depends on how busy this machine is."""
    require("mosquitto")
    out = tmp_path / "out"
    outcome = performed(out, "iov", "--duration", "3", "--set", "strategies=flooding,relay")
    bars = {bar["name"]: bar for bar in outcome["bars"]}
    for name in ("flooding_groups", "relay_groups", "lost", "duplicated"):
        assert bars[name]["ok"], (bars[name], outcome["notes"])
    for strategy in ("flooding", "relay"):
        for flow in ("telemetry", "monitoring"):
            assert bars[f"{strategy}_{flow}_excess_percent"]["ok"], (outcome["tables"], outcome["notes"])
        assert check(out / "events" / strategy).problems == ()
    assert processes_about(out) == []


def test_ctrl_c_in_the_middle_of_the_wan_keeps_what_is_there(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    process = subprocess.Popen(
        command("agreement", "--duration", "30", "--set", "loopback=true", "--json", "--out", str(folder)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 60
        while not (folder / "load/emulation/start").exists():
            assert process.poll() is None
            assert time.monotonic() < deadline, "the load never began"
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=30)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert process.returncode == 130, err
    outcome = json.loads(out)
    assert (outcome["complete"], outcome["error"]) == (False, "interrupted")
    assert outcome["figures"]["simulation"]["events"] > 0
    assert "incomplete" in err
    assert json.loads((folder / "figures.json").read_text()) == outcome
    assert processes_about(folder) == []


def processes_about(folder: Path) -> list[str]:
    """Command lines of processes that name the folder: what a run has left behind."""
    found = []
    for process in psutil.process_iter():
        try:
            line = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if str(folder) in line:
            found.append(line)
    return found
