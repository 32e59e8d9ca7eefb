"""The comparison: brokers side by side, the same load, interleaved rounds.

Owns the order of measurements. In each round every broker is measured once per scenario, one right after the other, so that
a machine that slows down slows all of them.
"""

from __future__ import annotations

import fnmatch
import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import msgspec

from nearcast.bench.brokers import Broker, BrokerNotStarted
from nearcast.bench.patterns import Pattern
from nearcast.bench.process import core_split, machine, on_cores, raise_file_limit, stolen_seconds
from nearcast.bench.scenarios import SCENARIOS, WINDOW, Sample, Scenario, measure
from nearcast.errors import ConfigError, NearcastError


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    scenario: str
    broker: str
    round: int
    sample: Sample
    stolen_share: float = 0.0
    """Share of the machine that its hypervisor gave to others meanwhile."""


class Comparison(msgspec.Struct, kw_only=True):
    """Everything measured in one run, as it goes to JSON."""

    started: str
    machine: dict[str, str | int]
    brokers: dict[str, str]
    rounds: int
    seconds: float
    pinned: bool
    measurements: list[Measurement] = []
    failures: list[str] = []

    def samples(self, scenario: str, broker: str) -> list[Sample]:
        return [each.sample for each in self.measurements if (each.scenario, each.broker) == (scenario, broker)]


def choose_scenarios(patterns: list[str]) -> list[Scenario]:
    """Scenarios by name; ``*`` stands for anything. No pattern is all of them."""
    if not patterns:
        return SCENARIOS
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(scenario.name, pattern) for scenario in SCENARIOS):
            names = ", ".join(scenario.name for scenario in SCENARIOS)
            raise ConfigError(f"no scenario is called {pattern}; there are {names}")
    return [each for each in SCENARIOS if any(fnmatch.fnmatchcase(each.name, pattern) for pattern in patterns)]


def takes_part(broker: Broker, scenario: Scenario) -> bool:
    if scenario.load is not None and scenario.load.pattern is Pattern.SHARED_SUBSCRIPTION and not broker.mqtt5:
        return False
    return scenario.durable or not broker.persistent


def compare(
    brokers: list[Broker],
    scenarios: list[Scenario],
    rounds: int,
    seconds: float,
    step: Callable[[str], None],
) -> Comparison:
    """Measure everything; ``step`` hears what is about to be measured."""
    raise_file_limit()
    broker_cores, generator_cores = core_split()
    result = Comparison(
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=machine(),
        brokers={broker.name: broker.version() for broker in brokers},
        rounds=rounds,
        seconds=seconds,
        pinned=broker_cores is not None,
    )
    broken: set[str] = set()
    with on_cores(generator_cores):
        for scenario in scenarios:
            for number in range(1, rounds + 1):
                for broker in brokers:
                    if not takes_part(broker, scenario):
                        continue
                    step(f"{scenario.title} · {broker.name} · round {number}")
                    if broker.name in broken:
                        continue
                    stolen, begun = stolen_seconds(), time.monotonic()
                    try:
                        with broker.running(broker_cores, WINDOW) as running:
                            sample = measure(scenario, running, seconds, mqtt5=broker.mqtt5)
                    except BrokerNotStarted as error:
                        broken.add(broker.name)  # it will not start the next time either
                        result.failures.append(str(error))
                    except (NearcastError, OSError) as error:
                        result.failures.append(f"{broker.name}: {scenario.name}: {error}")
                    else:
                        result.measurements.append(
                            Measurement(
                                scenario=scenario.name,
                                broker=broker.name,
                                round=number,
                                sample=sample,
                                stolen_share=(stolen_seconds() - stolen) / (time.monotonic() - begun) / (os.cpu_count() or 1),
                            )
                        )
    return result


def count_steps(brokers: list[Broker], scenarios: list[Scenario], rounds: int) -> int:
    return rounds * sum(takes_part(broker, scenario) for scenario in scenarios for broker in brokers)


def to_json(comparison: Comparison, summary: list[dict[str, Any]]) -> bytes:
    return msgspec.json.format(msgspec.json.encode({**msgspec.to_builtins(comparison), "summary": summary}), indent=2)


def busy_machine() -> str | None:
    """A word of warning when others are using the machine."""
    load = os.getloadavg()[0]
    if load > 0.5:
        return f"the machine is busy (load average {load:.1f}): ratios and CPU per message suffer less than rates"
    return None
