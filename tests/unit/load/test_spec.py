"""The specification of a load process: what is refused, and how."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from nearcast.errors import ConfigError
from nearcast.load import LoadSpec, read_spec
from nearcast.load.__main__ import main
from nearcast.load.spec import SharedClock
from nearcast.scenario.scenario import Broker, Scenario
from nearcast.scenario.topology import Host, Site, Topology
from nearcast.scenario.workload import Clients, Publishing

SCENARIO = Scenario(
    name="one",
    topology=Topology(name="t", sites=(Site(name="here"),), hosts=(Host(name="broker", site="here"),)),
    brokers=(Broker(host="broker"),),
    clients=(Clients(name="c", host="broker", broker="broker", publish=(Publishing(topic="t"),)),),
)


def test_a_specification_is_read_as_it_was_written(tmp_path: Path) -> None:
    spec = LoadSpec(scenario=SCENARIO, host="broker", seed=3, addresses={"broker": "127.0.0.1"})
    (tmp_path / "spec.json").write_bytes(msgspec.json.encode(spec))
    assert read_spec(tmp_path / "spec.json") == spec


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a load's specification"),
        (b"\xff\xfe", "not a load's specification"),
        (b'{"scenario": "absent"}', "no scenario 'absent'"),
        (b'{"scenario": 7}', "not a load's specification"),
        (b'{"scenario": "x", "hosts": "y"}', "unknown field `hosts`"),
    ],
)
def test_what_is_none_is_refused_in_one_line(
    tmp_path: Path, content: bytes, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "spec.json").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_spec(tmp_path / "spec.json")
    assert main([str(tmp_path / "spec.json")]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_an_absent_file_and_a_wrong_address_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "absent.json")]) == 1
    assert "No such file" in capsys.readouterr().err
    (tmp_path / "spec.json").write_bytes(msgspec.json.encode(LoadSpec(scenario=SCENARIO)))
    assert main([str(tmp_path / "spec.json"), "--address", "broker"]) == 1
    assert "write HOST=ADDRESS" in capsys.readouterr().err


def test_a_host_without_clients_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "spec.json").write_bytes(msgspec.json.encode(LoadSpec(scenario=SCENARIO)))
    assert main([str(tmp_path / "spec.json"), "--host", "bokrer"]) == 1
    assert "no host with clients 'bokrer'; did you mean 'broker'?" in capsys.readouterr().err


def test_a_scenario_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    wrong = msgspec.structs.replace(SCENARIO, clients=(Clients(name="c", host="nowhere", broker="broker"),))
    (tmp_path / "spec.json").write_bytes(msgspec.json.encode(LoadSpec(scenario=wrong)))
    with pytest.raises(ConfigError, match="no host 'nowhere'"):
        read_spec(tmp_path / "spec.json")


def test_the_shared_clock_is_the_monotonic_one_moved() -> None:
    first, second = SharedClock(1_000), SharedClock(2_000)
    before = first.now_ns()
    assert second.now_ns() - 1_000 >= before
    assert SharedClock().offset_ns > 0
