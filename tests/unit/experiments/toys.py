"""Small experiments that do what the frame has to cope with."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, ClassVar

from nearcast.errors import ConfigError
from nearcast.experiments import Bar, Experiment, Parameters, Run, at_least, at_most
from nearcast.recording import EventWriter, MessageEvent


class ToyParameters(Parameters, frozen=True, kw_only=True):
    duration_s: float = 30.0
    clients: int = 4


class Toy(Experiment[ToyParameters]):
    """Records an event, draws a plot, holds its bars when ``clients`` is at most 4."""

    name = "toy"
    summary = "Toys with the frame."
    parameters = ToyParameters
    quick: ClassVar[dict[str, Any]] = {"duration_s": 1.0, "scale": 0.5}

    def bars(self, parameters: ToyParameters) -> Sequence[Bar]:
        return [at_most("clients", 4, "how many"), at_least("rate_hz", 10)]

    def run(self, run: Run[ToyParameters]) -> None:
        run.step("playing")
        with EventWriter(run.events("toy"), "toy") as events:
            events.write(MessageEvent(kind="connected", at_ns=1, client="c"))
        with run.plot("line", "A line", "x", "y") as axes:
            axes.plot([0, 1], [0, 1], label="line")
        run.advance(0.5)
        run.keep("scenario.json", {"clients": run.parameters.clients})
        run.figure("seen", {"clients": run.parameters.clients, "broken": float("nan")})
        run.measured("clients", run.parameters.clients)
        run.measured("rate_hz", 10.0)
        run.table("by client", ["client", "messages", "delay (ms)"], [["first [a]", 12_345, 1.2345], ["second", 0, None]])


class Forgetful(Toy):
    """Never measures one of its bars."""

    def run(self, run: Run[ToyParameters]) -> None:
        run.measured("clients", 1)


class Interrupted(Toy):
    """Is told to end in the middle."""

    def run(self, run: Run[ToyParameters]) -> None:
        run.measured("clients", 1)
        run.step("waiting")
        signal.raise_signal(signal.SIGTERM if run.parameters.clients == 15 else signal.SIGINT)


class Talkative(Toy):
    """Prints, and so does a process it starts; measures what is no number."""

    def run(self, run: Run[ToyParameters]) -> None:
        sys.stdout.write("said by a library\n")
        subprocess.run(["echo", "said by a process"], check=True)
        run.measured("clients", math.nan)
        run.measured("rate_hz", math.inf)


class Failing(Toy):
    """Fails in a way that a user can do something about, or has a defect."""

    def run(self, run: Run[ToyParameters]) -> None:
        if run.parameters.clients == 0:
            raise ZeroDivisionError("a defect")
        raise ConfigError("the disk\nis full")


class Impossible(Toy):
    """Cannot run here."""

    def check(self, parameters: ToyParameters) -> None:
        raise ConfigError("needs root: use sudo")
