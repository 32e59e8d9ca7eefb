"""Runs probes between hosts and gathers what they saw, and what else happened on the machine meanwhile.

Owns the probes' processes and sockets; what the numbers mean is :mod:`nearcast.emulation.measurement`'s to say.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from nearcast.emulation.namespaces import HostNamespace
from nearcast.emulation.probes import MIN_PAYLOAD_BYTES, Receiving, Sending, Sent, prepare_receiver
from nearcast.emulation.router import Router, RouterStatistics
from nearcast.errors import EmulationError

PORT: Final = 9077


class Circumstances(msgspec.Struct, frozen=True, kw_only=True):
    """What a measurement has to be read with."""

    stolen_share: float
    """Share of the cores that the hypervisor gave to others. Well above zero, tails say more about it than the router."""

    router_cpu_share: float | None = None
    """Of one core."""

    router_starved_share: float | None = None
    """Time that the router wanted to run and could not."""

    router_lateness_p99_ms: float | None = None
    """What the router itself says: 99th percentile of writing packets later than due."""


def exchange(
    hosts: Sequence[HostNamespace],
    pairs: Sequence[tuple[int, int]],
    packets_per_s: float,
    duration_s: float,
    payload_bytes: int,
    longest_ms: float,
    *,
    router: Router | None = None,
) -> tuple[Sent, npt.NDArray[np.int64], Circumstances]:
    """Send over all pairs in turn; returns what was sent, and rows of (pair, nanoseconds sent, nanoseconds received)."""
    receivers: list[socket.socket] = []
    senders: list[socket.socket] = []
    try:
        for index in sorted({target for _, target in pairs}):
            receivers.append(open_receiver(hosts[index]))
        for source, target in pairs:
            senders.append(open_sender(hosts[source], hosts[target].address))
        statistics = router.statistics() if router else None
        stolen_s, began = _stolen_s(), time.monotonic()
        quiet_s = 0.5 + longest_ms / 1000.0
        receiving = Receiving(descriptors=[one.fileno() for one in receivers], quiet_s=quiet_s)
        receiver = _start("receive", receiving, receivers)
        try:
            work = Sending(
                descriptors=[one.fileno() for one in senders],
                packets_per_s=packets_per_s,
                duration_s=duration_s,
                payload_bytes=max(payload_bytes, MIN_PAYLOAD_BYTES),
            )
            sent = msgspec.json.decode(run_probe("send", work, senders, duration_s * 3 + 30.0), type=Sent)
            output = _finish(receiver, quiet_s + 30.0)
        finally:
            receiver.kill()
            receiver.wait()
        elapsed_s = time.monotonic() - began
        stolen_share = (_stolen_s() - stolen_s) / elapsed_s / (os.cpu_count() or 1)
        circumstances = Circumstances(stolen_share=stolen_share)
        if router is not None and statistics is not None:
            circumstances = _circumstances(stolen_share, statistics, router.statistics(), sent.elapsed_s)
    finally:
        for one in [*senders, *receivers]:
            one.close()
    return sent, np.frombuffer(output, dtype=np.int64).reshape(-1, 3), circumstances


def _circumstances(stolen_share: float, before: RouterStatistics, after: RouterStatistics, elapsed_s: float) -> Circumstances:
    return Circumstances(
        stolen_share=stolen_share,
        router_cpu_share=(after.cpu_s - before.cpu_s) / elapsed_s,
        router_starved_share=(after.starved_s - before.starved_s) / elapsed_s,
        router_lateness_p99_ms=after.lateness.since(before.lateness).percentile_ms(99),
    )


def open_receiver(host: HostNamespace) -> socket.socket:
    def make() -> socket.socket:
        one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        prepare_receiver(one)
        one.bind((host.address, PORT))
        return one

    return host.call(make)


def open_sender(host: HostNamespace, address: str) -> socket.socket:
    def make() -> socket.socket:
        one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        one.connect((address, PORT))
        return one

    return host.call(make)


def _start(role: str, work: msgspec.Struct, sockets: Sequence[socket.socket]) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(  # noqa: S603
        [sys.executable, "-m", "nearcast.emulation.probes", role],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=[one.fileno() for one in sockets],
        start_new_session=True,
    )
    assert process.stdin is not None  # noqa: S101 - for the type checker: it is a pipe
    process.stdin.write(msgspec.json.encode(work) + b"\n")
    process.stdin.flush()
    return process


def _finish(process: subprocess.Popen[bytes], timeout_s: float) -> bytes:
    try:
        output, complaint = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise EmulationError(f"a probe did not finish within {timeout_s:g} s: the machine is overloaded") from None
    if complaint or process.returncode:
        last = complaint.decode(errors="replace").strip().splitlines()
        raise EmulationError(last[-1] if last else f"a probe ended with exit code {process.returncode}")
    return output


def run_probe(role: str, work: msgspec.Struct, sockets: Sequence[socket.socket], timeout_s: float) -> bytes:
    process = _start(role, work, sockets)
    try:
        return _finish(process, timeout_s)
    finally:
        process.kill()
        process.wait()


def _stolen_s() -> float:
    """Core time that this machine wanted and its hypervisor gave to others, since the start; 0 where nobody says."""
    try:
        fields = Path("/proc/stat").read_text().splitlines()[0].split()
        return int(fields[8]) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return 0.0
