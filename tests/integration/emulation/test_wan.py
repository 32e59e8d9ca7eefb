"""A running WAN in both modes: delays, moves, cuts, faults, processes, commands. One WAN per mode serves all tests of it."""

from __future__ import annotations

import asyncio
import json
import os
import stat
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from nearcast.emulation.wan import Happening, Wan, WanStatus
from nearcast.errors import EmulationError
from nearcast.network.conditions import Conditions
from nearcast.scenario.events import ChangeLink, Crash, Event, Kill, Move, Pause, Restart, Start, Stop
from tests.integration.emulation.wans import PATIENCE_SECONDS, MarkedWan, marked_wan, modes, wait_until
from tests.integration.tools import require

pytestmark = pytest.mark.integration

ECHO = "import socket,threading\ndef serve(c):\n while d:=c.recv(65536): c.sendall(d)\ns=socket.create_server(('%s',7000))\n"
ECHO += "while True: threading.Thread(target=serve,args=(s.accept()[0],)).start()"

PING = """
import socket, statistics, sys, time
s = socket.create_connection((sys.argv[1], 7000), 10)
s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
took = []
for _ in range(int(sys.argv[2])):
    began = time.perf_counter()
    s.sendall(b"x")
    s.recv(1)
    took.append((time.perf_counter() - began) * 1000)
print(statistics.median(took))
"""

TOPOLOGY = f"""
name = "both"
[[sites]]
name = "east"
[[sites]]
name = "west"
[[links]]
between = ["east", "west"]
latency_ms = 20
[[hosts]]
name = "server"
site = "east"
[[hosts]]
name = "client"
site = "west"
access = {{ latency_ms = 5 }}
[[processes]]
name = "echo"
host = "server"
command = ["python", "-S", "-c", {json.dumps(ECHO.replace("%s", "{server}"))}]
ready = {{ port = 7000 }}
[[processes]]
name = "mqtt"
host = "server"
command = ["nearcast", "broker", "--host", "{{server}}", "--allow-anonymous", "--data", "{{data}}"]
ready = {{ port = 1883, log = "listening" }}
[[processes]]
name = "later"
host = "server"
command = ["sh", "-c", "trap 'echo goodbye; exit 0' TERM; echo hello; while true; do sleep 0.05; done"]
ready = {{ log = "hello" }}
manual = true
"""

Use = Callable[[Callable[[Wan], Awaitable[Any]]], Any]


@pytest.fixture(scope="module", params=modes())
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[MarkedWan, str]]:
    with marked_wan(tmp_path_factory.mktemp("wan")) as wan:
        wan.up(TOPOLOGY, f"--{request.param}", "--json")
        wan.wait_for_line("is up")
        yield wan, request.param


@pytest.fixture
def use(running: tuple[MarkedWan, str]) -> Use:
    """Do something with the WAN, in an event loop of its own."""

    def connect_and_do(action: Callable[[Wan], Awaitable[Any]]) -> Any:
        async def connected() -> Any:
            async with Wan.connect("both", base=running[0].base) as wan:
                return await action(wan)

        return asyncio.run(connected())

    return connect_and_do


async def round_trip_ms(wan: Wan, count: int = 5) -> float:
    done = await wan.run("client", ["python", "-S", "-c", PING, "{server}", str(count)], timeout_s=30)
    return float(done.check().output)


async def calm_round_trip_ms(wan: Wan, below: float) -> float:
    """Measured again while the machine is too busy for the bound."""
    deadline = asyncio.get_running_loop().time() + PATIENCE_SECONDS
    while True:
        result = await round_trip_ms(wan)
        if result < below or asyncio.get_running_loop().time() > deadline:
            return result


async def happening(wan: Wan, text: str, times: int = 1) -> Happening:
    """Wait for something that happens, or has happened, so many times."""
    async with asyncio.timeout(20):
        async for found in wan.watch():
            if text in found.text:
                times -= 1
                if times == 0:
                    return found
    raise AssertionError(text)


def test_delay_move_and_change_of_links(use: Use) -> None:
    async def scenario(wan: Wan) -> None:
        assert 50.0 <= await calm_round_trip_ms(wan, 70.0) < 70.0
        matrix = await wan.matrix()
        assert matrix.one_way_ms == ((0.0, 25.0), (25.0, 0.0))
        await wan.move("client", "east")
        assert 10.0 <= await calm_round_trip_ms(wan, 30.0) < 30.0
        conditions = await wan.access("client", latency_ms=0.0)
        assert conditions.latency_ms == 0.0
        assert await calm_round_trip_ms(wan, 10.0) < 10.0
        await wan.move("client", "west")
        changed = await wan.link("east", "west", latency_ms=40)
        assert changed.latency_ms == 40.0
        assert 80.0 <= await calm_round_trip_ms(wan, 100.0) < 100.0
        await wan.link("east", "west", latency_ms=20)
        await wan.access("client", latency_ms=5)

    use(scenario)


def test_changes_are_undone_after_their_time(use: Use) -> None:
    async def scenario(wan: Wan) -> None:
        await wan.link("east", "west", latency_ms=100, for_s=0.05)
        await wan.access("client", loss=0.5, for_s=0.05)
        await happening(wan, "link east ↔ west is as before")
        await happening(wan, "access of client is as before")
        assert (await wan.matrix()).one_way_ms[0][1] == 25.0
        assert (await wan.status()).hosts[1].access.loss == 0.0

    use(scenario)


def test_a_cut_stalls_and_healing_goes_on(use: Use) -> None:
    async def scenario(wan: Wan) -> None:
        # The connection is opened before the cut and asked during it: TCP has to get the byte through afterwards.
        program = PING.replace("took = []", "print('open', flush=True); sys.stdin.readline(); took = []")
        reading, writing = os.pipe()
        out_reading, out_writing = os.pipe()
        running = asyncio.create_task(
            wan.execute("client", ["python", "-S", "-c", program, "{server}", "1"], (reading, out_writing, 2))
        )
        output = os.fdopen(out_reading)
        assert await asyncio.to_thread(output.readline) == "open\n"
        await wan.cut("east", "west")
        assert (await wan.status()).cuts == ("east ↔ west",)
        assert (await wan.matrix()).one_way_ms[0][1] is None
        before = (await wan.status()).traffic.unreachable
        os.write(writing, b"go\n")
        async with asyncio.timeout(20):
            while (await wan.status()).traffic.unreachable == before:  # noqa: ASYNC110  # the keeper is asked
                await asyncio.sleep(0.01)
        assert not running.done()
        await wan.heal()
        assert await asyncio.wait_for(running, 30) == 0
        os.close(out_writing)
        assert float(await asyncio.to_thread(output.readline)) > 50.0
        output.close()
        os.close(reading)
        os.close(writing)

    use(scenario)


def test_a_cut_heals_by_itself(use: Use) -> None:
    async def scenario(wan: Wan) -> None:
        await wan.cut("server", for_s=0.05)
        await happening(wan, "healed server ↔ everything else")
        assert (await wan.status()).cuts == ()

    use(scenario)


def test_mqtt_between_hosts_survives_a_kill(use: Use) -> None:
    require("mosquitto_pub")
    require("mosquitto_sub")

    async def scenario(wan: Wan) -> None:
        publish = ["mosquitto_pub", "-h", "{server}", "-t", "kept", "-m", "me", "-q", "1", "-r"]
        (await wan.run("client", publish, timeout_s=20)).check()
        await wan.kill("mqtt")
        killed = _process(await wan.status(), "mqtt")
        assert (killed.state, killed.exit_code) == ("killed", -9)
        await wan.restart("mqtt")
        again = _process(await wan.status(), "mqtt")
        assert (again.state, again.starts) == ("running", killed.starts + 1)
        took = await wan.run("client", ["mosquitto_sub", "-h", "{server}", "-t", "kept", "-C", "1"], timeout_s=20)
        assert took.check().output == "me\n"
        assert any("listening" in line for line in await wan.logs("mqtt"))

    use(scenario)


def test_pause_and_resume(use: Use) -> None:
    async def scenario(wan: Wan) -> None:
        await wan.pause("echo")
        assert _process(await wan.status(), "echo").state == "paused"
        with pytest.raises(EmulationError, match="cannot be paused: it is paused"):
            await wan.pause("echo")
        with pytest.raises(TimeoutError):
            await wan.run("client", ["python", "-S", "-c", PING, "{server}", "1"], timeout_s=0.7)
        await wan.resume("echo")
        assert await round_trip_ms(wan) > 50.0

    use(scenario)


def test_a_process_that_waits_is_started_and_stopped_by_events(use: Use) -> None:
    async def scenario(wan: Wan) -> None:
        assert _process(await wan.status(), "later").state == "waiting"
        await wan.apply(Restart(at_s=0, host="server"))
        assert _process(await wan.status(), "later").starts == 0, "nobody told it to start yet"
        await wan.apply(Start(at_s=0, process="later"))
        assert _process(await wan.status(), "later").state == "running"
        await wan.apply(Stop(at_s=0, process="later"))
        stopped = _process(await wan.status(), "later")
        assert (stopped.state, stopped.exit_code) == ("exited", 0)
        assert "goodbye" in await wan.logs("later")
        with pytest.raises(EmulationError, match="no process 'latter'; did you mean 'later'"):
            await wan.apply(Start(at_s=0, process="latter"))

    use(scenario)


def test_crash_and_start_of_a_host(use: Use) -> None:
    async def scenario(wan: Wan) -> None:
        await wan.apply(Crash(at_s=0, host="server"))
        status = await wan.status()
        assert not status.hosts[0].up
        assert {process.state for process in status.processes if process.name != "later"} == {"killed"}
        assert (await wan.matrix()).one_way_ms[1][0] is None
        with pytest.raises(EmulationError, match="server has crashed: start it, and echo with it"):
            await wan.start("echo")
        await wan.start("server")
        assert (await wan.status()).hosts[0].up
        assert await round_trip_ms(wan) > 50.0

    use(scenario)


def test_commands_on_hosts(use: Use, running: tuple[MarkedWan, str]) -> None:
    async def scenario(wan: Wan) -> None:
        done = await wan.run(
            "client",
            ["sh", "-c", "cat; echo $WORD >&2; echo '{server} {print}'; exit 3"],
            input="in",
            environment={"WORD": "out"},
        )
        assert done.code == 3
        assert done.error == "out\n"
        assert done.output.startswith("in")
        assert done.output.endswith(" {print}\n")
        assert "{server}" not in done.output
        with pytest.raises(EmulationError, match="exit code 3: out"):
            done.check()
        assert (await wan.run("client", ["sh", "-c", "kill -KILL $$"])).code == -9
        with pytest.raises(EmulationError, match="no program 'no-such-program'"):
            await wan.run("client", ["no-such-program"])
        with pytest.raises(EmulationError, match="no host 'clint'; did you mean 'client'"):
            await wan.run("clint", ["true"])
        with pytest.raises(EmulationError, match="more than 1000 bytes"):
            await wan.run("client", ["sh", "-c", "yes"], max_output_bytes=1000)
        # Programs find themselves in /proc although their process numbers are the WAN's own.
        found = await wan.run("client", ["python", "-c", "import psutil; print(psutil.Process().name(), len(psutil.pids()))"])
        name, count = found.check().output.split()
        assert name.startswith("python")
        assert int(count) < 20 or running[1] == "loopback"  # which may be without a PID namespace

    use(scenario)


def test_a_cancelled_command_is_killed(use: Use, running: tuple[MarkedWan, str]) -> None:
    async def scenario(wan: Wan) -> None:
        with pytest.raises(TimeoutError):
            await wan.run("client", ["sleep", "977"], timeout_s=0.3)
        await wan.status()

    use(scenario)
    wait_until(lambda: not any(line.endswith("sleep 977") for line in running[0].programs()), "the program's end")


def test_what_cannot_be_shown_is_said(use: Use, running: tuple[MarkedWan, str]) -> None:
    async def scenario(wan: Wan) -> WanStatus:
        return await wan.status()

    status: WanStatus = use(scenario)
    assert status.mode == running[1]
    if status.mode == "loopback":
        assert "server:1883/7000" in status.limits[0]
        assert any("lost packet" in limit for limit in status.limits)
    else:
        assert status.limits == ()


def test_names_resolve(use: Use, running: tuple[MarkedWan, str]) -> None:
    if running[1] == "loopback":
        pytest.skip("in loopback mode host names do not resolve, which it says")

    async def scenario(wan: Wan) -> None:
        done = await wan.run(
            "client", ["python", "-c", "import socket; print(socket.gethostbyname('server'), socket.gethostname())"]
        )
        assert done.check().output == "10.77.0.1 client\n"

    use(scenario)


def test_wrong_requests_are_one_line(use: Use) -> None:
    async def scenario(wan: Wan) -> None:
        for attempt, message in [
            (wan.move("client", "nowhere"), "no site 'nowhere'"),
            (wan.kill("ehco"), "did you mean 'echo'"),
            (wan.kill("client"), "no process of the topology runs on client"),
            (wan.link("east", "east", latency_ms=1), "two different sites"),
            (wan.link("east", "west", latency=1), "no condition 'latency'; did you mean 'latency_ms'"),
            (wan.link("east", "west", loss=2), "`loss` must be between 0 and 1"),
            (wan.logs("nothing"), "no process 'nothing'"),
            (wan.cut("mars"), "no host or site 'mars'"),
            (wan.resume("echo"), "is not paused: it is running"),
        ]:
            with pytest.raises(EmulationError, match=message):
                await attempt

    use(scenario)


def test_the_control_socket_is_private_and_takes_garbage(running: tuple[MarkedWan, str], use: Use) -> None:
    path = running[0].base / "both" / "control.sock"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700

    async def garbage() -> None:
        reader, writer = await asyncio.open_unix_connection(path, limit=1 << 20)
        assert msgspec.json.decode(await reader.readline())["nearcast_wan"] == 1
        for line in (
            b"\x00\xff\xfe",
            b"{",
            b"[]",
            b'{"id": 7, "do": "nothing"}',
            b'{"id": 8, "do": "status", "more": 1}',
            b"",
        ):
            writer.write(line + b"\n")
            answer = msgspec.json.decode(await asyncio.wait_for(reader.readline(), 10))
            assert "not a request" in answer["error"]
        writer.write(b"[" * 100_000 + b"\n")
        assert "not a request" in (await asyncio.wait_for(reader.readline(), 10)).decode()
        writer.write(b'{"id": 9, "do": "exec", "host": "client", "command": ["true"]}\n')
        assert "standard input" in (await asyncio.wait_for(reader.readline(), 10)).decode()
        writer.write(b"x" * 1_000_000)
        assert "at most" in (await asyncio.wait_for(reader.readline(), 10)).decode()
        try:
            assert await asyncio.wait_for(reader.read(), 10) == b""
        except OSError:
            pass
        writer.close()

    asyncio.run(garbage())

    async def still_there(wan: Wan) -> None:
        assert (await wan.status()).state == "up"

    use(still_there)


def test_events_happen_at_their_time(running: tuple[MarkedWan, str], tmp_path: Path) -> None:
    topology = tmp_path / "topology.toml"
    topology.write_text(TOPOLOGY.replace("both", "events").partition('[[processes]]\nname = "mqtt"')[0])
    events: list[Event] = [
        Move(at_s=0.1, host="client", site="east"),
        Kill(at_s=0.2, host="server", restart_after_s=0.1),
        ChangeLink(at_s=0.15, between=("east", "west"), conditions=Conditions(latency_ms=7)),
        Pause(at_s=0.18, host="server", for_s=0.01),
    ]

    async def scenario() -> None:
        async with Wan.up(topology, mode=running[1], events=events, base=tmp_path / "wans", output=tmp_path / "out") as wan:  # type: ignore[arg-type]
            began = (await wan.status()).started_s
            assert began is not None
            moved = await happening(wan, "client moved to east")
            assert moved.at_s - began >= 0.099  # rounded
            changed = await happening(wan, "link east ↔ west: 7 ms")
            paused = await happening(wan, "server stands still")
            killed = await happening(wan, "the processes of server are killed")
            assert moved.at_s <= changed.at_s <= paused.at_s <= killed.at_s
            await happening(wan, "server goes on")
            await happening(wan, "echo is ready", times=2)
            status = await wan.status()
            assert status.pending_events == 0
            assert _process(status, "echo").starts == 2
            assert _process(status, "echo").state == "running"

    asyncio.run(scenario())
    assert "start 2" in (tmp_path / "out" / "logs" / "echo.log").read_text()
    assert not (tmp_path / "wans" / "events").exists()


def _process(status: WanStatus, name: str) -> Any:
    return next(process for process in status.processes if process.name == name)
