"""What the documentation shows is true: files load, the reference is up to date, links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from nearcast.configfile import load_broker_config
from nearcast.controller.config import load_controller_config
from nearcast.gateway.config import load_gateway_config
from nearcast.scenario.files import load_scenario, load_topology
from nearcast.simulation.runs import simulate

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def written(page: Path, directory: Path) -> list[Path]:
    """The TOML blocks of a page as files."""
    paths = []
    for number, text in enumerate(blocks(page, "toml")):
        named = re.match(r"# ([\w-]+\.toml)\n", text)
        paths.append(directory / (named.group(1) if named else f"{number}.toml"))
        paths[-1].write_text(text)
    return paths


def test_references_are_up_to_date() -> None:
    run = subprocess.run(
        [sys.executable, ROOT / "scripts/config_reference.py", "--check"], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "toml")], ids=lambda page: page.stem)
def test_files_in_the_documentation_load(page: Path, tmp_path: Path) -> None:
    """A block that begins with ``# name.toml`` is a file of that name, which other blocks of the page may refer to."""
    for path in written(page, tmp_path):
        content = tomllib.loads(path.read_text())
        if "sites" in content:
            load_topology(path)
        elif "topology" in content:
            load_scenario(path)
        elif "controller" in content:
            load_controller_config(path)
        elif "brokers" in content:
            load_gateway_config(path)
        else:
            load_broker_config(path)


def test_the_example_of_a_scenario_runs(tmp_path: Path) -> None:
    topology, scenario = written(ROOT / "docs/reference/topology.md", tmp_path)
    assert (topology.name, scenario.name) == ("town.toml", "rush-hour.toml")
    outcome = simulate(load_scenario(scenario), seed=7)
    assert outcome.violation is None
    assert any("move car" in fault for fault in outcome.faults), "the car gets to the other site"
    assert any("power" in fault for fault in outcome.faults)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
