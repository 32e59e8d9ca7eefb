"""One seed is one run: in another process, with another hash seed, compiled or plain."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import nearcast
from nearcast import compiled

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import json, sys
import msgspec
from nearcast.scenario.files import load_scenario
from nearcast.simulation.runs import Options, simulate
from nearcast import compiled

found = {"compiled": compiled.is_compiled()}
register = load_scenario("tests/simulation/register.toml")
for seed in (1, 2, 19):
    outcome = simulate(register, seed, Options(directory="tests/simulation"))
    found[f"register {seed}"] = [outcome.digest, outcome.events, str(outcome.violation), outcome.figures]
probes = msgspec.structs.replace(load_scenario("probes"), duration_s=0.3, settle_s=0.5)
outcome = simulate(probes, 1)
found["probes"] = [outcome.digest, outcome.events, str(outcome.violation), outcome.figures]
outcome = simulate(load_scenario("groups"), 1)
found["groups"] = [outcome.digest, outcome.events, str(outcome.violation), outcome.figures]
sys.path.insert(0, ".")
from tests.simulation.bulk import bulk_digest
found["streams"] = bulk_digest(3)
print(json.dumps(found))
"""


def outcome_of(hash_seed: str, source: Path | None = None) -> dict[str, object]:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    if source is not None:
        environment["PYTHONPATH"] = str(source)
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    found: dict[str, object] = json.loads(run.stdout)
    return found


def test_any_process_and_hash_seed() -> None:
    first = outcome_of("0")
    assert outcome_of("12345") == first
    assert outcome_of("random") == first


@pytest.mark.skipif(not compiled.is_compiled(), reason="the hot modules are not compiled here; `make test` compiles them")
def test_compiled_and_plain(tmp_path: Path) -> None:
    package = Path(nearcast.__file__).parent
    shutil.copytree(package, tmp_path / "nearcast", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    here = outcome_of("0")
    plain = outcome_of("0", tmp_path)
    assert (here.pop("compiled"), plain.pop("compiled")) == (True, False)
    assert here == plain
