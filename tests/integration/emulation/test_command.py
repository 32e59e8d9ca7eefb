"""``nearcast wan`` as a user types it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from nearcast.experiments.measures import measure
from nearcast.scenario.files import load_scenario
from tests.integration.emulation.wans import FAMILY, MarkedWan, marked_wan, modes, require_namespaces, wait_until
from tests.integration.tools import optional, require

pytestmark = pytest.mark.integration

#: Sites with places, so that hosts can move at random.
CITY = """
name = "city"
[model]
inflation = 1
base_ms = 5
[[sites]]
name = "north"
latitude = 48.25
longitude = 16.35
[[sites]]
name = "south"
latitude = 48.15
longitude = 16.35
[[hosts]]
name = "car"
site = "north"
count = 3
"""


@pytest.fixture
def wan(tmp_path: Path) -> Iterator[MarkedWan]:
    with marked_wan(tmp_path) as running:
        yield running


def test_a_command_gives_its_output_and_exit_code(wan: MarkedWan) -> None:
    process = wan.up(FAMILY, "--loopback", "--host", "two", "--", "sh", "-c", "echo {one}; exit 7")
    output, complaints = process.communicate(timeout=60)
    assert process.returncode == 7, complaints
    assert output == "127.77.0.3\n" or output.startswith("127.")
    assert "cannot show: only TCP connections to declared ports" in complaints
    assert wan.left_behind() == []


def test_ctrl_c_ends_with_a_summary(wan: MarkedWan) -> None:
    process = wan.up(FAMILY, "--loopback")
    wan.wait_for_line("is up")
    process.send_signal(signal.SIGINT)
    output, complaints = process.communicate(timeout=60)
    assert process.returncode == 0, complaints
    assert "WAN family was up for" in output
    assert complaints == ""


def test_json_is_json(wan: MarkedWan) -> None:
    process = wan.up(FAMILY, "--loopback", "--json", "--duration", "0.2")
    output, complaints = process.communicate(timeout=60)
    assert process.returncode == 0, complaints
    *happenings, last = [json.loads(line) for line in output.splitlines()]
    assert {"limit", "started", "ready", "state"} <= {happening["kind"] for happening in happenings}
    assert last["summary"]["mode"] == "loopback"
    assert len(last["summary"]["limits"]) > 3


def test_looking_and_changing(wan: MarkedWan) -> None:
    wan.up(FAMILY, "--loopback")
    wan.wait_for_line("is up")
    assert "family  family, loopback, up" in wan.run("list").stdout
    assert wan.run("link", "east", "west", "--latency", "33", "--loss", "1").stdout == "east ↔ west: 33 ms, 1 % loss\n"
    assert wan.run("access", "two", "--latency", "2").returncode == 0
    assert wan.run("cut", "two", "--for", "100").returncode == 0
    now = json.loads(wan.run("status", "--json").stdout)
    assert now["status"]["cuts"] == ["two ↔ everything else"]
    assert now["matrix"]["one_way_ms"][0][1] is None
    assert wan.run("heal").returncode == 0
    assert json.loads(wan.run("matrix", "--json").stdout)["one_way_ms"][0][1] == 35.0
    assert wan.run("move", "two", "east").returncode == 0
    assert json.loads(wan.run("matrix", "--json").stdout)["one_way_ms"][0][1] == 2.0
    assert "family complete" in wan.run("logs", "parent").stdout
    assert wan.execute("two", "--", "sh", "-c", "read word; echo $word; exit 5", input="hello\n").stdout == "hello\n"
    assert wan.execute("two", "sh", "-c", "exit 5").returncode == 5
    assert wan.run("crash", "one").returncode == 0
    assert "crashed" in wan.run("status").stdout
    assert wan.run("start", "one").returncode == 0
    assert wan.run("down").returncode == 0
    assert wan.process is not None
    assert "taken down by another command" in wan.process.communicate(timeout=30)[0]
    assert wan.process.returncode == 0


def test_mistakes_are_one_line(wan: MarkedWan) -> None:
    assert wan.run("status").stderr == "nearcast: no WAN is running: start one with `nearcast wan up TOPOLOGY`\n"
    assert "did you mean uav" in wan.run("up", "uaw").stderr
    wan.up(FAMILY, "--loopback")
    wan.wait_for_line("is up")
    again = wan.run("up", str(wan.directory / "topology.toml"))
    assert "family is running already" in again.stderr
    assert again.stderr.count("\n") == 1
    assert wan.run("kill", "parnet").stderr == "nearcast: no process or host 'parnet'; did you mean 'parent'?\n"
    assert "say what to change" in wan.run("link", "east", "west").stderr
    assert "jitter` must be one of" in wan.run("link", "east", "west", "--jitter-shape", "odd").stderr
    assert wan.run("cut", "mars").stderr.startswith("nearcast: no host or site 'mars'")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (('"sh", "-c"', '"no-such-program"'), "there is no program 'no-such-program'"),
        (
            ("echo family complete; exec sleep 1004", "echo oh no; exit 3"),
            "ended (exit code 3) before it was ready; it said: oh no",
        ),
        (('log = "family complete"', "port = 7000, timeout_s = 0.3"), "accepts no connection at port 7000"),
        (('log = "family complete"', 'log = "never", timeout_s = 0.3'), "has not written 'never'"),
    ],
    ids=["missing", "exit", "port", "log"],
)
def test_a_process_that_does_not_start(wan: MarkedWan, change: tuple[str, str], complaint: str) -> None:
    process = wan.up(FAMILY.replace(*change), "--loopback")
    _, complaints = process.communicate(timeout=60)
    assert process.returncode == 1
    assert complaint in complaints
    assert complaints.count("\n") == 1
    wait_until(lambda: not wan.survivors(), "the end of every process")
    assert wan.left_behind() == []


def test_a_command_ends_with_whoever_ran_it_and_gets_its_signals(wan: MarkedWan) -> None:
    wan.up(FAMILY, "--loopback")
    wan.wait_for_line("is up")
    program = "trap 'exit 9' INT; echo trapped; while :; do sleep 0.01; done"
    with subprocess.Popen(
        wan.command("exec", "two", "sh", "-c", program), stdout=subprocess.PIPE, text=True, env=wan.environment
    ) as trapping:
        assert trapping.stdout is not None
        assert trapping.stdout.readline() == "trapped\n"
        trapping.send_signal(signal.SIGINT)
        assert trapping.wait(30) == 9
    with subprocess.Popen(wan.command("exec", "two", "sleep", "4321"), env=wan.environment) as sleeping:
        wait_until(lambda: any(line.endswith("sleep 4321") for line in wan.programs()), "the program")
        sleeping.kill()
    wait_until(lambda: not any(line.endswith("sleep 4321") for line in wan.programs()), "the program's end")


def test_what_left_its_group_is_paused_and_killed_too(wan: MarkedWan) -> None:
    """The family has a child in a session of its own, and one whose parent is gone as well."""

    def family() -> dict[str, str]:
        lines = [line.split() for line in wan.programs() if "sleep 100" in line]
        return {words[-1]: psutil.Process(int(words[0])).status() for words in lines}

    wan.up(FAMILY, "--loopback")
    wan.wait_for_line("is up")
    wait_until(lambda: len(family()) == 4, "the whole family")
    assert wan.run("pause", "parent").returncode == 0
    wait_until(lambda: set(family().values()) == {psutil.STATUS_STOPPED}, "a family that stands still")
    assert wan.run("resume", "parent").returncode == 0
    wait_until(lambda: set(family().values()) == {psutil.STATUS_SLEEPING}, "a family that goes on")
    assert wan.run("kill", "one").returncode == 0
    wait_until(lambda: family() == {}, "the end of the family")
    assert wan.run("start", "parent").returncode == 0
    wait_until(lambda: len(family()) == 4, "the whole family")
    assert wan.run("restart", "parent").returncode == 0
    wait_until(lambda: len([line for line in wan.programs() if "sleep 100" in line]) == 4, "one family, not two")
    assert wan.run("stop", "parent").returncode == 0
    wait_until(lambda: family() == {}, "the end of the family")


def test_down_does_not_wait_for_a_start_that_hangs(wan: MarkedWan) -> None:
    once = "test -e {data}/been || echo family complete; touch {data}/been; exec sleep 1004"
    hanging = FAMILY[: FAMILY.index("command =")] + f'command = ["sh", "-c", "{once}"]\n'
    wan.up(hanging + 'ready = { log = "family complete", timeout_s = 600 }\n', "--loopback")
    wan.wait_for_line("is up")
    assert wan.run("kill", "parent").returncode == 0
    with subprocess.Popen(wan.command("start", "parent"), stderr=subprocess.PIPE, text=True, env=wan.environment) as starting:
        wait_until(lambda: '"state":"starting"' in wan.run("status", "--json").stdout, "a start that hangs")
        assert wan.process is not None
        wan.process.send_signal(signal.SIGINT)
        wan.process.communicate(timeout=30)
        assert "ended (SIGTERM) before it was ready" in starting.communicate(timeout=30)[1]
    assert wan.left_behind() == []


def test_an_unmodified_mosquitto(wan: MarkedWan) -> None:
    require_namespaces()
    for tool in ("mosquitto", "mosquitto_pub", "mosquitto_sub"):
        require(tool)
    (wan.directory / "mosquitto.conf").write_text("listener 1883 0.0.0.0\nallow_anonymous true\n")
    command = 'command = ["mosquitto", "-c", "mosquitto.conf"]\nready = { port = 1883 }\n'
    talk = "mosquitto_pub -h one -t kept -m me -q 1 -r && mosquitto_sub -h one -t kept -C 1 -W 20"
    process = wan.up(FAMILY[: FAMILY.index("command =")] + command, "--namespaces", "--host", "two", "--", "sh", "-c", talk)
    output, complaints = process.communicate(timeout=60)
    assert (process.returncode, output) == (0, "me\n"), complaints


def test_two_wans_at_once(wan: MarkedWan) -> None:
    wan.up(FAMILY, "--loopback")
    wan.wait_for_line("is up")
    other = wan.run("up", str(wan.directory / "topology.toml"), "--loopback", "--name", "other", "--detach")
    assert other.returncode == 0, other.stderr
    assert "several WANs are running (family, other)" in wan.run("status").stderr
    addresses: set[str] = set()
    for name in ("family", "other"):
        addresses.update(
            host["address"] for host in json.loads(wan.run("status", "-n", name, "--json").stdout)["status"]["hosts"]
        )
    assert len(addresses) == 4
    assert wan.run("down", "--all").returncode == 0


def test_detached(wan: MarkedWan) -> None:
    process = wan.up(FAMILY, "--loopback", "--detach", "--name", "apart", "--out", "kept")
    output, complaints = process.communicate(timeout=60)
    assert process.returncode == 0, complaints
    assert "WAN apart is up" in output
    assert "apart" in wan.run("list").stdout
    assert wan.run("down", "apart").returncode == 0
    wait_until(lambda: not wan.survivors(), "the end of every process")
    assert wan.left_behind() == []
    assert "family complete" in (wan.directory / "kept" / "logs" / "parent.log").read_text()


def test_movement_by_trace_and_at_random(wan: MarkedWan) -> None:
    trace = wan.directory / "trace.csv"
    trace.write_text("time_s,host,site\n0.1,car-1,south\n")
    (wan.directory / "city.toml").write_text(CITY)
    too_fast = wan.run("up", str(wan.directory / "city.toml"), "--loopback", "--waypoint", "20000", "--moving", "car-3")
    assert "shorten `step_s`" in too_fast.stderr
    arguments = (
        "--mobility",
        str(trace),
        "--waypoint",
        "5000",
        "--moving",
        "car-3",
        "--duration",
        "6",
        "--json",
        "--seed",
        "5",
    )
    wan.up(CITY, "--loopback", *arguments)
    assert "car-1 moved to south" in wan.wait_for_line("car-1 moved")
    assert "car-3 moved to" in wan.wait_for_line("car-3 moved")


def test_without_root_it_falls_back_and_says_so(wan: MarkedWan) -> None:
    setpriv = optional("setpriv")
    prefix = (str(setpriv), "--bounding-set=-all", "--inh-caps=-all")
    process = wan.up(FAMILY, "--host", "two", "--", "true", prefix=prefix)
    _, complaints = process.communicate(timeout=60)
    assert process.returncode == 0, complaints
    assert "cannot show: " in complaints
    reason = "root may not do everything here" if os.geteuid() == 0 else "network namespaces need root"
    assert f"loopback mode is used: {reason}" in complaints
    process = wan.up(FAMILY, "--namespaces", prefix=prefix)
    _, complaints = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "may not do everything here" in complaints or "need root" in complaints
    assert wan.left_behind() == []


def test_ready_made_topologies_are_listed_and_shown(wan: MarkedWan) -> None:
    listed = wan.run("topologies").stdout
    assert all(name in listed for name in ("uav", "mmog", "iov", "emma", "canal"))
    shown = json.loads(wan.run("show", "uav", "--json").stdout)
    hosts = shown["matrix"]["hosts"]
    assert shown["matrix"]["one_way_ms"][hosts.index("broker-1")][hosts.index("broker-2")] == 15.0
    assert "broker-1" in wan.run("show", "uav").stdout


#: A broker at one site, a publisher at another, a subscriber at a third; the broker is killed in between, a clock goes wrong.
SCENARIO = """
name = "plants"
duration_s = 3
settle_s = 3
[topology]
name = "three-sites"
sites = [{ name = "vienna" }, { name = "graz" }, { name = "linz" }]
links = [{ between = ["vienna", "graz"], latency_ms = 5 }, { between = ["vienna", "linz"], latency_ms = 10 }]
hosts = [{ name = "broker", site = "vienna" }, { name = "machine", site = "graz" }, { name = "office", site = "linz" }]
[[brokers]]
host = "broker"
durable = true
[[clients]]
name = "sensor"
host = "machine"
broker = "broker"
clean_start = false
publish = [{ topic = "plant/{client}", rate_hz = 20, qos = 1 }]
[[clients]]
name = "dashboard"
host = "office"
broker = "broker"
clean_start = false
subscribe = [{ filter = "plant/#", qos = 1 }]
[[events]]
kind = "kill"
at_s = 1
host = "broker"
restart_after_s = 0.2
[[events]]
kind = "skew"
at_s = 1
host = "machine"
offset_s = 10
"""


@pytest.mark.parametrize("mode", modes())
def test_a_scenario_runs_with_its_clients_to_its_end(wan: MarkedWan, mode: str) -> None:
    process = wan.up(SCENARIO, f"--{mode}", "--json", "--out", "results")
    output, complaints = process.communicate(timeout=90)
    assert process.returncode == 0, complaints
    *happenings, last = [json.loads(line) for line in output.splitlines()]
    texts = [happening["text"] for happening in happenings]
    begun = texts.index("6 s on the emulated WAN")
    assert "the processes of broker are killed" in texts[begun:], "after the clients' beginning"
    clients = last["summary"]["clients"]
    assert clients["complete"] is True
    assert set(clients["hosts"]) == {"machine", "office"}
    delivery = clients["delivery"]
    assert (delivery["published"], delivery["lost"]) == (60, 0), "kept sessions of a durable broker lose nothing"
    assert clients["latency"]["p50_ms"] >= 15
    assert "only the simulator has wrong clocks: left out (1 of the scenario)" in clients["notes"]
    assert measure(wan.directory / clients["events"], load_scenario(wan.directory / "topology.toml")).delivery.published == 60
    again = wan.up(SCENARIO, f"--{mode}", "--out", "results").communicate(timeout=60)
    assert "results has the events of a run already" in again[1]
    assert wan.left_behind() == []


def test_clients_end_with_a_table_when_asked_to(wan: MarkedWan) -> None:
    process = wan.up(SCENARIO, "--loopback", "--duration", "600")
    wan.wait_for_line("603 s on the emulated WAN")
    wan.wait_for_line("broker-mqtt-1883 is ready")
    process.send_signal(signal.SIGINT)
    output, complaints = process.communicate(timeout=60)
    assert process.returncode == 130, complaints
    assert "incomplete: plants ended early" in output
    rows = output.partition("max ms\n")[2].splitlines()
    assert [line.split()[0] for line in rows[:3]] == ["machine", "office", "all"]


def test_a_scenario_without_its_clients_says_so(wan: MarkedWan) -> None:
    process = wan.up(SCENARIO, "--loopback", "--", "echo", "done")
    output, complaints = process.communicate(timeout=60)
    assert (process.returncode, output) == (0, "done\n"), complaints
    assert "the clients of plants are not started" in complaints
    process = wan.up(SCENARIO, "--loopback", "--no-clients", "--duration", "0.2")
    output, complaints = process.communicate(timeout=60)
    assert (process.returncode, complaints) == (0, "")
    assert "clients of" not in output


def test_a_protocol_of_the_simulator_is_not_for_the_wan(wan: MarkedWan) -> None:
    refused = wan.run("up", "probes")
    assert refused.returncode == 1
    assert "exists in the simulator only: nearcast simulate probes" in refused.stderr
    shown = wan.run("show", "swarms")
    assert shown.returncode == 0, shown.stderr
    assert "nearcast broker" in shown.stdout
