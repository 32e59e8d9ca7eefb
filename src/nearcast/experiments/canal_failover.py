"""``canal-failover``: how long a topic cannot be published to after its leader died (Canal, section IV-E).

Real brokers on this machine: three that keep a topic, and a fourth whose client publishes all the time, one message at QoS 1
after the other. The leader is killed (SIGKILL), or stands still (SIGSTOP: its connections stay open, so that only time tells),
again and again; each time it is measured until a message that was published afterwards is acknowledged. A subscriber gets
everything that was acknowledged, once and in order. Beside it, a Chord ring of the shipped machine that loses a set, in
virtual time (:mod:`.canal_ring`).
"""

from __future__ import annotations

import os
import random
import signal
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec
import numpy as np

from nearcast.bench.replicated import REPLICAS, TOPIC, ReplicatedFabric, replicated_fabric, until
from nearcast.bench.traffic import packet, text
from nearcast.bench.wire import open_session, read_packet, subscribe
from nearcast.errors import ConnectionClosed
from nearcast.experiments import plots
from nearcast.experiments.experiment import Bar, Experiment, Parameters, at_least, at_most
from nearcast.experiments.run import Run

MEDIAN_MS = 300.0
PAPER_MS = {"leader": 667.0, "ring": 1627.0}
WITNESS = REPLICAS
PATIENCE_S = 30.0
_PUBLISH_PAUSE_S = 0.001


class FailoverParameters(Parameters, frozen=True, kw_only=True):
    """``scale`` multiplies the 1,000 losses of the leader. There is no duration."""

    frozen: float = 0.5
    """Which share of the lost leaders stands still before it is killed; the others are killed at once."""

    rings: int = 100
    """Losses of a set on the simulated ring."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(0 <= self.frozen <= 1, "frozen", "is a share: between 0 and 1")
        self.require(1 <= self.rings <= 10_000, "rings", "must be between 1 and 10,000")

    @property
    def losses(self) -> int:
        return max(2, round(1_000 * self.scale))


class Loss(msgspec.Struct, frozen=True, kw_only=True):
    """A leader that was lost."""

    leader: str
    frozen: bool
    after_ms: float
    """Until a message that was published after the loss was acknowledged."""


class CanalFailover(Experiment[FailoverParameters]):
    name = "canal-failover"
    summary = (
        "Leaders are killed and stand still: time until publishes succeed, nothing lost; against a Chord ring (Canal, IV-E)."
    )
    parameters = FailoverParameters
    quick: ClassVar[Mapping[str, Any]] = {"scale": 0.006, "rings": 5}

    def bars(self, parameters: FailoverParameters) -> Sequence[Bar]:
        return [
            at_most("median_ms", MEDIAN_MS, "from the loss of a leader to an acknowledged publish"),
            at_most("lost", 0, "acknowledged messages that a subscriber never got"),
            at_most("duplicated", 0, "messages that it got more than once"),
            at_most("out_of_order", 0, "messages that it got after a later one"),
            at_least("losses", parameters.losses, "of leaders"),
        ]

    def check(self, parameters: FailoverParameters) -> None:
        plots.require()

    def run(self, run: Run[FailoverParameters]) -> None:
        parameters = run.parameters
        losses: list[Loss] = []
        run.step("starting brokers")
        with replicated_fabric(brokers=REPLICAS + 1, preferred=False) as fabric:
            received = Received(fabric.addresses[WITNESS])
            with Stream(fabric.addresses[WITNESS]) as stream:
                try:
                    run.step(f"{parameters.losses} losses of a leader")
                    _lose(run, fabric, stream, losses)
                finally:
                    _keep(run, losses)
            until("not everything was delivered", lambda: received.count >= stream.acknowledged)
            received.close()
        lost, duplicated, disorder = received.judge(stream.acknowledged)
        run.measured("lost", lost)
        run.measured("duplicated", duplicated)
        run.measured("out_of_order", disorder)
        run.measured("losses", len(losses))
        run.figure("acknowledged", stream.acknowledged)
        self._ring(run, losses)

    def _ring(self, run: Run[FailoverParameters], losses: list[Loss]) -> None:
        from nearcast.experiments.canal_ring import restabilisations

        run.step("a Chord ring, in virtual time")
        ring_ms = [seconds * 1e3 for seconds in restabilisations(run.parameters.rings, run.parameters.seed)]
        killed = [loss.after_ms for loss in losses if not loss.frozen]
        frozen = [loss.after_ms for loss in losses if loss.frozen]
        rows: list[tuple[str | float, ...]] = []
        for name, values, paper in (
            ("leader killed", killed, PAPER_MS["leader"]),
            ("leader stands still", frozen, PAPER_MS["leader"]),
            ("ring whole again", ring_ms, PAPER_MS["ring"]),
        ):
            if values:
                rows.append((name, len(values), *(round(float(each), 1) for each in _summary(values)), paper))
        run.table(
            "Until the topic is there again, ms (section IV-E)",
            ("what", "times", "median", "p90", "p99", "worst", "paper"),
            rows,
        )
        run.figure("ring_ms", ring_ms)
        run.note(
            "a set that loses a minority stays on the ring: the ring's time is what each loss would cost without replicas"
        )
        with run.plot("failover", "Until publishes succeed again", "ms", "share of losses") as axes:
            plots.cdf(axes, killed, "leader killed")
            plots.cdf(axes, frozen, "leader stands still")
            plots.cdf(axes, ring_ms, "Chord ring whole again (virtual time)", dashed=True)
            axes.set_xscale("log")


def _summary(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(np.quantile(values, (0.5, 0.9, 0.99, 1.0)))


def _keep(run: Run[FailoverParameters], losses: list[Loss]) -> None:
    """What there is so far, also when it ends early."""
    run.keep("losses.json", losses)
    if losses:
        run.measured("median_ms", round(float(np.median([loss.after_ms for loss in losses])), 1))
        run.figure("losses", len(losses))


def _lose(run: Run[FailoverParameters], fabric: ReplicatedFabric, stream: Stream, losses: list[Loss]) -> None:
    parameters = run.parameters
    rng = random.Random(parameters.seed)
    for number in range(parameters.losses):
        until("publishing stopped", lambda: stream.acknowledged > 0 and stream.healthy(0.2))
        until("a set is not whole", lambda: _is_whole(fabric))
        time.sleep(rng.random() * 0.05)  # anywhere between two heartbeats
        leader = fabric.leader(WITNESS)
        broker = fabric.names.index(leader)
        process = fabric.processes[broker]
        freezes = rng.random() < parameters.frozen
        began = time.monotonic()
        os.killpg(process.pid, signal.SIGSTOP if freezes else signal.SIGKILL)
        after_s = stream.acknowledged_after(began)
        if freezes:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        losses.append(Loss(leader=leader, frozen=freezes, after_ms=1e3 * after_s))
        fabric.start(broker)
        run.advance((number + 1) / parameters.losses)


def _is_whole(fabric: ReplicatedFabric) -> bool:
    """Whether all replicas are there, and have what is committed."""
    leader = fabric.leader(WITNESS)
    if not leader:
        return False
    facts = [fabric.facts(broker)["sets"][0] for broker in range(REPLICAS)]
    newest = max(each["commit"] for each in facts)
    return all(each["leader"] == leader and each["commit"] >= newest - 50 for each in facts)


class Stream:
    """A client that publishes one message after the other, each when the one before was acknowledged."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.acknowledged = 0
        self._peer = open_session(address, "canal-publisher", 4)
        self._peer.settimeout(PATIENCE_S)
        self._changed = threading.Condition()
        self._last: tuple[float, float] = (0.0, 0.0)
        self._stopping = False
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)

    def __enter__(self) -> Stream:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping = True
        self._thread.join(PATIENCE_S)
        self._peer.close()

    def _run(self) -> None:
        try:
            while not self._stopping:
                number = self.acknowledged
                body = text(f"{TOPIC}/failover") + struct.pack(">HQ", number % 65_535 + 1, number)
                sent = time.monotonic()
                self._peer.sendall(packet(0x32, body))
                first_byte, _ = read_packet(self._peer)
                if first_byte != 0x40:
                    raise ConnectionClosed(f"the broker answered a PUBLISH with a packet of kind {first_byte >> 4}")
                with self._changed:
                    self.acknowledged += 1
                    self._last = (sent, time.monotonic())
                    self._changed.notify_all()
                time.sleep(_PUBLISH_PAUSE_S)
        except (OSError, ConnectionClosed) as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def healthy(self, within_s: float) -> bool:
        """Whether something was acknowledged so lately."""
        return time.monotonic() - self._last[1] < within_s

    def acknowledged_after(self, moment: float) -> float:
        """Seconds from a moment until a message that was published later was acknowledged."""
        with self._changed:
            done = self._changed.wait_for(lambda: self._failure is not None or self._last[0] > moment, PATIENCE_S)
            if self._failure is not None:
                raise ConnectionClosed(f"publishing ended: {self._failure}")
            if not done:
                raise ConnectionClosed(f"nothing was acknowledged for {PATIENCE_S:g} s after a leader was lost")
            return self._last[1] - moment


class Received:
    """A subscriber, and the numbers that it got."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.numbers: list[int] = []
        self._peer = open_session(address, "canal-subscriber", 4)
        subscribe(self._peer, [f"{TOPIC}/failover"], 1, 4)
        self._peer.settimeout(None)
        self._thread = threading.Thread(target=self._run, name="subscriber", daemon=True)
        self._thread.start()

    @property
    def count(self) -> int:
        return len(self.numbers)

    def _run(self) -> None:
        try:
            while True:
                first_byte, body = read_packet(self._peer)
                if first_byte >> 4 != 3:
                    continue
                end = 2 + int.from_bytes(body[:2], "big")
                if first_byte & 0x06:
                    self._peer.sendall(b"\x40\x02" + body[end : end + 2])
                    end += 2
                self.numbers.append(int.from_bytes(body[end : end + 8], "big"))
        except (OSError, ConnectionClosed):
            return

    def close(self) -> None:
        self._peer.close()

    def judge(self, acknowledged: int) -> tuple[int, int, int]:
        """(lost, duplicated, out of order)."""
        seen = set(self.numbers)
        disorder = sum(later < earlier for earlier, later in zip(self.numbers, self.numbers[1:], strict=False))
        return len(set(range(acknowledged)) - seen), len(self.numbers) - len(seen), disorder
