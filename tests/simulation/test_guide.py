"""The example of docs/guides/simulating.md does what the guide says, and its correction corrects it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

GUIDE = (Path(__file__).resolve().parents[2] / "docs" / "guides" / "simulating.md").read_text()


def block(language: str, begin: str = "") -> str:
    found = re.search(rf"^```{language}\n({re.escape(begin)}.*?)^```", GUIDE, re.DOTALL | re.MULTILINE)
    assert found is not None
    return found.group(1)


def corrected(program: str) -> str:
    """The program with the guide's diff applied: each run of removed lines makes place for the added ones after it."""
    for removed, added in re.findall(r"((?:^-.*\n)+)((?:^\+.*\n)+)", block("diff"), re.MULTILINE):
        old, new = (re.sub(r"^[-+]", "", lines, flags=re.MULTILINE) for lines in (removed, added))
        assert program.count(old) == 1, old
        program = program.replace(old, new)
    return program


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "lease.py").write_text(block("python"))
    (tmp_path / "lease.toml").write_text(block("toml", "# lease.toml\n"))
    return tmp_path


def simulate(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nearcast", "simulate", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_the_deployment_does_what_is_shown(folder: Path) -> None:
    (folder / "plants.toml").write_text(block("toml", "# plants.toml\n"))
    run = simulate(folder, "plants.toml")
    assert run.returncode == 0, run.stdout + run.stderr
    shown = block("console", "$ nearcast simulate plants.toml\n").splitlines()
    assert [line for line in shown[2:] if line.strip() != "..." and line not in run.stdout.splitlines()] == []


def test_random_faults_added_to_it_break_nothing(folder: Path) -> None:
    plants = block("toml", "# plants.toml\n")
    rates = re.findall(r"`(\w+_per_minute = \d+)`", GUIDE)
    assert len(rates) == 3
    (folder / "plants.toml").write_text("\n".join([plants, "[random_faults]", *rates]))
    run = simulate(folder, "plants.toml", "--seeds", "5", "--jobs", "1")
    assert run.returncode == 0, run.stdout + run.stderr


def test_groups_form_as_it_says(folder: Path) -> None:
    (folder / "towns.toml").write_text(block("toml", "# towns.toml\n"))
    run = simulate(folder, "towns.toml", "--seeds", "3", "--jobs", "1")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "groups: 2" in simulate(folder, "towns.toml").stdout


def test_the_fabric_loses_nothing_while_clients_are_moved(folder: Path) -> None:
    (folder / "regions.toml").write_text(block("toml", "# regions.toml\n"))
    run = simulate(folder, "regions.toml")
    assert run.returncode == 0, run.stdout + run.stderr
    moved = re.search(r"moved: (\d+)", run.stdout)
    assert moved is not None
    assert int(moved[1]) > 5
    assert "lost: 0" in run.stdout


def test_broadcast_groups_lose_nothing_while_leaders_die(folder: Path) -> None:
    (folder / "motorway.toml").write_text(block("toml", "# motorway.toml\n"))
    run = simulate(folder, "motorway.toml", "--seeds", "3", "--jobs", "1")
    assert run.returncode == 0, run.stdout + run.stderr
    one = simulate(folder, "motorway.toml").stdout
    assert "lost: 0" in one
    assert re.search(r"flooded: [1-9]", one)


def test_the_lease_fails_as_shown(folder: Path) -> None:
    run = simulate(folder, "lease.toml", "--seeds", "20", "--shrink", "--jobs", "1")
    assert run.returncode == 1, run.stderr
    assert "2 clients hold the lease" in run.stdout
    kept = re.search(r"(\d+) of 20 seeds keep every invariant", run.stdout)
    assert kept is not None
    assert 10 <= int(kept.group(1)) < 20
    assert re.search(r"Faults: the 1 of \d+ that it takes\n +\d+  [\d.]+ s clock of client-\d jumps by", run.stdout)
    command = run.stdout.rpartition("Replay: nearcast simulate ")[2].split()
    again = simulate(folder, *command)
    assert again.returncode == 1
    assert "2 clients hold the lease" in again.stdout


def test_the_corrected_lease_holds(folder: Path) -> None:
    (folder / "lease.py").write_text(corrected(block("python")))
    run = simulate(folder, "lease.toml", "--seeds", "40", "--jobs", "1")
    assert run.returncode == 0, run.stdout
    assert "40 of 40 seeds keep every invariant" in run.stdout
