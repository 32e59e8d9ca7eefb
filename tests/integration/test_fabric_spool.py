"""Brokers as processes: what waits for another broker goes to disk when there is much of it, and survives ``kill -9``."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from nearcast.mqtt.packets import Connect, Properties, PubAck, Publish, Subscribe, SubscriptionRequest
from nearcast.serving.secrets import make_secret
from tests.integration.broker.running import wait_for
from tests.integration.brokers import NearcastBroker

COUNT = 3_000
SMALL_QUEUE = "[fabric]\nmax_queued_bytes = 200000\ncatch_up_bytes_per_second = 0\n"


def test_a_long_outage_goes_to_disk_and_nothing_of_it_is_lost(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    make_secret(secret)
    with ExitStack() as stack:
        started: list[NearcastBroker] = []
        for name in "ab":
            home = tmp_path / name
            home.mkdir()
            arguments = ["--name", name, "--fabric-secret", str(secret)]
            if started:
                arguments += ["--peer", started[0].link_address]
            started.append(stack.enter_context(NearcastBroker(home, SMALL_QUEUE, data=True, arguments=arguments)))
        a, b = started
        wait_for("the link", lambda: a.sees("b") and b.sees("a"))
        session = Properties(session_expiry_interval=3_600)
        with b.connect(Connect("sleeper", version=5, clean_start=True, properties=session)) as sleeper:
            sleeper.send(Subscribe(1, [SubscriptionRequest("t", 1)]))
            sleeper.receive()
        b.kill()
        wait_for("the loss of b", lambda: a.sees())
        sent = [b"%05d" % number + b"." * 300 for number in range(COUNT)]
        with a.connect() as speaker:
            for start in range(0, COUNT, 20):
                for number in range(start, start + 20):
                    speaker.send(Publish("t", sent[number], 1, packet_id=number + 1))
                for _ in range(20):
                    assert isinstance(speaker.receive(), PubAck)
        assert a.metric("broker_queued_messages", broker="b") == COUNT
        assert a.metric("broker_dropped_messages", broker="b") == 0
        wait_for("the files", lambda: a.metric("broker_spilled_bytes", broker="b") > COUNT * 200)
        assert list((a.data / "spool").iterdir())
        a.kill()
        (a.data / "spool" / "99-1").write_bytes(b"left by a crash")
        a.start()
        assert not (a.data / "spool" / "99-1").exists()
        assert a.metric("broker_queued_messages", broker="b") == COUNT
        b.start()
        with b.connect(Connect("sleeper", version=5, clean_start=False, properties=session)) as sleeper:
            found: list[bytes] = []
            while len(found) < COUNT:
                packet = sleeper.receive()
                if isinstance(packet, Publish):
                    found.append(packet.payload)
                    sleeper.send(PubAck(packet.packet_id))
        assert found == sent
        wait_for("the confirmation", lambda: a.metric("broker_queued_messages", broker="b") == 0)
        wait_for("the files to go", lambda: not list((a.data / "spool").iterdir()))
