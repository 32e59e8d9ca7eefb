"""``nearcast controller`` as a process for the tests, and a whole fabric that registers with it."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from nearcast.cli.controller_client import ControllerClient
from nearcast.cli.main import main
from nearcast.serving.secrets import make_secret
from tests.integration.broker.running import wait_for
from tests.integration.brokers import NearcastBroker, running, started_together
from tests.integration.gateways import NearcastGateway


class NearcastController(NearcastBroker):
    """The controller. A later start of the same object uses the same ports."""

    def __init__(self, directory: Path, secret: Path, arguments: Sequence[str] = ()) -> None:
        super().__init__(directory, arguments=arguments)
        self.secret = secret

    def launch(self) -> subprocess.Popen[bytes]:
        self._ready_path.unlink(missing_ok=True)
        command = [sys.executable, "-m", "nearcast", "controller", *self._given, "--ready-file", str(self._ready_path)]
        command += ["--fabric-secret", str(self.secret)]
        command += ["--port", str(self.ready.get("port", 0)), "--http-port", str(self.ready.get("http_port", 0))]
        with self.log_path.open("ab") as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        self.process = process
        self.launches += 1
        running.append(self)
        return process

    @property
    def _given(self) -> list[str]:
        # Without what a broker's command line has.
        return [word for word in self._arguments if word not in ("--config", str(self.config_path))]

    @property
    def link_address(self) -> str:
        return f"127.0.0.1:{self.ready['port']}"

    @property
    def api(self) -> str:
        return f"http://127.0.0.1:{self.ready['http_port']}"

    def client(self) -> ControllerClient:
        return ControllerClient(self.api, str(self.secret), None)

    def nodes(self) -> dict[str, dict[str, Any]]:
        """All nodes by name."""
        return {node["name"]: node for node in self.client().get("/nodes")}

    def states(self) -> dict[str, str]:
        return {name: node["state"] for name, node in self.nodes().items()}


class ControlledFabric:
    """A controller, and brokers and gateways that know nothing but its address."""

    def __init__(self, directory: Path, controller_arguments: Sequence[str] = ()) -> None:
        self.directory = directory
        self.secret = directory / "fabric.secret"
        make_secret(self.secret)
        self._stack = ExitStack()
        self.nodes: dict[str, NearcastBroker] = {}
        home = directory / "controller"
        home.mkdir()
        # Fast enough that a test need not wait for a period.
        arguments = ["--interval", "2", "--ping-interval-ms", "20", "--period", "1", *controller_arguments]
        self.controller = NearcastController(home, self.secret, arguments)
        self._stack.enter_context(self.controller)

    def _arguments(self, name: str) -> tuple[Path, list[str]]:
        home = self.directory / name
        home.mkdir()
        return home, ["--name", name, "--fabric-secret", str(self.secret), "--controller", self.controller.link_address]

    def start(self, *names: str, gateway: str = "", data: bool = False, config: str = "") -> None:
        """Brokers of these names, and a gateway if it has one; all start at the same time."""
        made: list[NearcastBroker] = []
        for name in names:
            home, arguments = self._arguments(name)
            made.append(NearcastBroker(home, config, data=data, arguments=[*arguments, "--site", "here"]))
        if gateway:
            home, arguments = self._arguments(gateway)
            made.append(NearcastGateway(home, arguments=arguments))
        started_together(made, self._stack)
        self.nodes |= {node.directory.name: node for node in made}

    def wait_for_states(self, **states: str) -> None:
        wait_for(f"nodes {states}", lambda: states.items() <= self.controller.states().items())

    def nearcast(self, *words: str, code: int = 0) -> str:
        """A command with the controller's address and the secret; its output, and what it says when it fails. It runs in this
        process, which spares a second for each; :meth:`nearcast_process` is the same as users have it."""
        written = io.BytesIO()
        output, errors = io.TextIOWrapper(written, "utf-8", write_through=True), io.StringIO()
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(output), redirect_stderr(errors):
            for name, value in self._environment.items():
                patch.setenv(name, value)
            with pytest.raises(SystemExit) as ended:
                main(words)
        said = written.getvalue().decode()
        assert ended.value.code == code, said + errors.getvalue()
        return said if code == 0 else errors.getvalue()

    @property
    def _environment(self) -> dict[str, str]:
        return {"NEARCAST_API": self.controller.api, "NEARCAST_FABRIC_SECRET": str(self.secret)}

    def nearcast_process(self, *words: str, code: int = 0) -> str:
        """A command as a process of its own."""
        environment = os.environ | self._environment
        done = subprocess.run(
            [sys.executable, "-m", "nearcast", *words],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout if code == 0 else done.stderr

    def json(self, *words: str) -> Any:
        return json.loads(self.nearcast(*words, "--json"))

    def __enter__(self) -> ControlledFabric:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.__exit__(kind, error, trace)
