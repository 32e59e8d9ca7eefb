"""The process: what it does when somebody has its sockets, and where it plans."""

from __future__ import annotations

import asyncio
import socket
import threading
from pathlib import Path

import pytest

from nearcast.controller.config import ControllerConfig
from nearcast.controller.process import ControllerProcess
from nearcast.errors import ConfigError
from nearcast.fabric.topic_planner import PlanJob
from nearcast.placement.deciding import Plan
from nearcast.serving.secrets import make_secret
from nearcast.serving.sockets import bind_tcp


def free_for_tcp_only() -> socket.socket:
    """A socket that has a UDP port whose TCP port is free."""
    while True:
        taken = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        taken.bind(("127.0.0.1", 0))
        try:
            for probe in bind_tcp("127.0.0.1", taken.getsockname()[1], 1):
                probe.close()
        except ConfigError:
            taken.close()
            continue
        return taken


def test_a_port_that_is_taken_for_udp_is_said_and_any_other_will_do_where_any_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "secret"
    make_secret(secret)

    async def main() -> None:
        with free_for_tcp_only() as taken:
            port = taken.getsockname()[1]
            process = ControllerProcess(ControllerConfig(secret_file=str(secret), port=port, http_port=None))
            with pytest.raises(ConfigError, match=f"cannot answer probes on 127.0.0.1:{port} .UDP.: Address already in use"):
                await process.start()
            lucky = ControllerProcess(ControllerConfig(secret_file=str(secret), port=0, http_port=None))
            monkeypatch.setattr(type(lucky.listener), "port", property(lambda listener: port))
            await lucky.start()
            await lucky.stop()

    asyncio.run(main())


def test_a_plan_is_made_in_a_thread_and_one_that_fails_does_not_end_planning(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    make_secret(secret)
    threads: list[str] = []

    def fails() -> Plan:
        threads.append(threading.current_thread().name)
        raise ArithmeticError("a broker's coordinate was a joke")

    async def main() -> None:
        process = ControllerProcess(ControllerConfig(secret_file=str(secret), port=0, http_port=None))
        await process.start()
        topics = process.controller.topics
        told = asyncio.Event()
        planned = topics.planned

        def heard(job: PlanJob, now: float) -> None:
            planned(job, now)
            told.set()

        topics.planned = heard  # type: ignore[method-assign]
        elsewhere = topics.planner.elsewhere
        assert elsewhere is not None
        elsewhere(PlanJob(fails))
        await asyncio.wait_for(told.wait(), 20)
        assert topics.plans == 0
        await process.stop()

    asyncio.run(main())
    assert threads == ["planning_0"]
