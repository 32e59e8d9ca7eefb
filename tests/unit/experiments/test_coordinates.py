"""The experiment `coordinates`: matrices from files, and a whole run on a given one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from nearcast.coordinates import topologies
from nearcast.errors import ConfigError
from nearcast.experiments.coordinates import Coordinates
from nearcast.experiments.coordinates_model import read_matrix
from nearcast.experiments.experiment import effective_parameters
from nearcast.experiments.run import perform


def test_both_kinds_of_files_are_read(tmp_path: Path) -> None:
    np.savez(tmp_path / "m.npz", rtt_ms=np.array([[0.0, 10.0, np.nan], [12.0, 0.0, 7.0], [5.0, np.nan, 0.0]]))
    (tmp_path / "m.csv").write_text("0,10,\n12,0,7\n5,nan,0\n")
    wanted = [[0.0, 11.0, 5.0], [11.0, 0.0, 7.0], [5.0, 7.0, 0.0]]
    assert read_matrix(tmp_path / "m.npz").tolist() == wanted
    assert read_matrix(tmp_path / "m.csv").tolist() == wanted


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("1,2\n3\n", "line 2: 1 numbers"),
        ("1,x\n", "line 1"),
        ("", "0 nodes"),
        ("0,1,2\n1,0,3\n", "2 × 3"),
        ("0,-1\n-1,0\n", "negative"),
        ("0,nan\nnan,0\n", "no round-trip time"),
        ("0\n", "1 nodes"),
    ],
)
def test_what_is_no_matrix_is_refused_in_one_line(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "m.csv"
    path.write_text(content)
    with pytest.raises(ConfigError, match=said):
        read_matrix(path)


def test_a_file_without_the_key_and_one_that_is_not_there(tmp_path: Path) -> None:
    np.savez(tmp_path / "m.npz", other=np.zeros((2, 2)))
    with pytest.raises(ConfigError, match="no key `rtt_ms`"):
        read_matrix(tmp_path / "m.npz")
    with pytest.raises(ConfigError, match="cannot read"):
        read_matrix(tmp_path / "absent.csv")
    (tmp_path / "bad.npz").write_bytes(b"PK nothing")
    with pytest.raises(ConfigError, match="not a NumPy file"):
        read_matrix(tmp_path / "bad.npz")


def test_a_given_matrix_is_run_on(tmp_path: Path) -> None:
    path = tmp_path / "m.npz"
    np.savez(path, rtt_ms=topologies.internet(30, np.random.default_rng(1)))
    experiment = Coordinates()
    parameters = effective_parameters(experiment, {"matrix": str(path), "duration_s": "40", "nodes": "20"}, quick=False)
    outcome = perform(experiment, parameters, tmp_path / "out")
    assert outcome.complete
    assert outcome.figures["accuracy"]["median_error"] < 0.25
    assert any("20 of 30 nodes" in note for note in outcome.notes)
