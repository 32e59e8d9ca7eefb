"""Where clients are and how long their messages may take: from the run's scenario, or as given."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from nearcast.errors import ConfigError
from nearcast.mqtt.topics import matches
from nearcast.pipeline.evaluation.filters import pattern
from nearcast.pipeline.evaluation.inputs import RecordedRun
from nearcast.scenario.events import Move
from nearcast.scenario.expansion import expand_clients, topology_of
from nearcast.scenario.scenario import Scenario
from nearcast.scenario.timeline import timeline

LONG_AGO = -(2**63)
FOR_EVER = 2**63 - 1
MAX_SITES = 30_000
_VIRTUAL_NS = 10**15
"""A run whose events begin before this (eleven days after 1970) was simulated: its clock begins at 0."""

_UNITS = {"ns": 1.0, "us": 1e3, "µs": 1e3, "ms": 1e6, "s": 1e9, "m": 60e9, "h": 3600e9}


def parse_duration_ns(text: str, what: str) -> int:
    """Nanoseconds: ``50ms``, ``1.5s``, ``200us``, ``2m``. The unit has to be said."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ns|us|µs|ms|s|m|h)\s*", text)
    if found is None or not math.isfinite(value := float(found[1]) * _UNITS[found[2]]) or value > 1e18:
        raise ConfigError(f"{what} {text!r}: write a number and a unit, like 50ms or 1.5s")
    return round(value)


@dataclass(frozen=True)
class Bound:
    """How long deliveries of topics that match ``filter`` may take."""

    filter: str
    bound_ns: int
    run: str | None = None
    """Only in this run; None: in all."""

    def __post_init__(self) -> None:
        pattern(self.filter)

    def holds(self, run: str, topic: str) -> bool:
        """Whether it is one for this topic."""
        return self.run in (None, run) and matches(self.filter, topic)

    @classmethod
    def parse(cls, text: str) -> Bound:
        """``50ms`` for every topic, or ``FILTER=50ms``."""
        topic_filter, equals, duration = text.rpartition("=")
        if equals and not topic_filter:
            raise ConfigError(f"--bound {text!r}: write 50ms, or FILTER=50ms")
        bound_ns = parse_duration_ns(duration, "--bound")
        if bound_ns <= 0:
            raise ConfigError(f"--bound {text!r}: must be above zero")
        return cls(topic_filter or "#", bound_ns)


def all_bounds(given: Sequence[Bound], runs: Sequence[RecordedRun]) -> list[Bound]:
    """The bounds in the order in which they are asked: given ones for filters, the scenario's, the given one for the rest."""
    rest = [bound for bound in given if bound.filter == "#"]
    if len(rest) > 1:
        raise ConfigError("--bound for every topic is given twice: one of them needs a filter, FILTER=50ms")
    scenario = []
    for run in runs:
        if run.folder is not None and run.folder.scenario is not None:
            scenario += [Bound(topic, bound_ns, run.name) for topic, bound_ns in _scenario_bounds(run.folder.scenario)]
    return [bound for bound in given if bound.filter != "#"] + scenario + rest


def _scenario_bounds(scenario: Scenario) -> Iterator[tuple[str, int]]:
    """Bounds of topics that a scenario publishes to."""
    seen: set[tuple[str, int]] = set()
    for group in scenario.clients:
        for publishing in group.publish:
            bound_ms = publishing.bound_ms
            if bound_ms is not None:
                # A topic with placeholders is as many topics: each level that has one may be anything.
                levels = ["+" if "{" in level else level for level in publishing.topic.split("/")]
                found = ("/".join(levels), round(bound_ms * 1e6))
                if found not in seen:
                    seen.add(found)
                    yield found


class Place(NamedTuple):
    """A client at a site for a while."""

    run: str
    client: str
    site: str
    from_ns: int
    until_ns: int


def sites_of(runs: Sequence[RecordedRun], file: str | Path | None, starts_ns: dict[str, int]) -> list[Place]:
    """Where the clients of each run are: from a file for all runs, or from their scenarios; empty when nobody says it."""
    if file is not None:
        clients = read_sites(Path(file))
        return [Place(run.name, client, site, LONG_AGO, FOR_EVER) for run in runs for client, site in clients.items()]
    found: list[Place] = []
    for run in runs:
        if run.folder is not None and run.folder.scenario is not None:
            found += _scenario_sites(run, run.folder.scenario, starts_ns[run.name])
    return found


def _scenario_sites(run: RecordedRun, scenario: Scenario, first_ns: int) -> Iterator[Place]:
    try:
        hosts = {name: host.site for host in topology_of(scenario).hosts for name in host.names()}
        clients = expand_clients(scenario)
        seed = run.folder.seed if run.folder is not None else 1
        moves = [event for event in timeline(scenario, seed) if isinstance(event, Move)]
    except ConfigError:
        return  # a trace of movements that is gone, for one: no sites is better than wrong ones
    start_ns = _start_ns(run, first_ns)
    stays: dict[str, list[tuple[int, str]]] = {host: [(LONG_AGO, site)] for host, site in hosts.items()}
    for move in moves:
        stays[move.host].append((start_ns + round(move.at_s * 1e9), move.site))
    for client in clients:
        there = stays[client.host]
        for position, (from_ns, site) in enumerate(there):
            until_ns = there[position + 1][0] if position + 1 < len(there) else FOR_EVER
            yield Place(run.name, client.name, site, from_ns, until_ns)


def _start_ns(run: RecordedRun, first_ns: int) -> int:
    """When a scenario began, on the clock of its events."""
    if first_ns < _VIRTUAL_NS:
        return 0
    if run.folder is not None:
        for path in (run.folder.path / "load" / run.part / "start", run.folder.path / "load" / "start"):
            try:
                return int(path.read_text())
            except (OSError, ValueError):
                continue
    return first_ns


def read_sites(path: Path) -> dict[str, str]:
    """``client,site`` from a CSV with that header, or a JSON object."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot be read: {getattr(error, 'strerror', None) or error}", path=str(path)) from error
    if path.suffix.lower() == ".json":
        try:
            found = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"not JSON: {error}", path=str(path)) from error
        if not isinstance(found, dict) or not all(isinstance(site, str) for site in found.values()):
            raise ConfigError('sites are an object {"client": "site", ...}', path=str(path))
        sites = dict(found)
    else:
        rows = csv.reader(text.splitlines())
        if [name.strip() for name in next(rows, [])] != ["client", "site"]:
            raise ConfigError("the first line has to be client,site", path=str(path), line=1)
        sites = {}
        for row in rows:
            if not row:
                continue
            if len(row) != 2 or not row[0].strip() or not row[1].strip():
                raise ConfigError("a line is a client and its site", path=str(path), line=rows.line_num)
            sites[row[0].strip()] = row[1].strip()
    if len(set(sites.values())) > MAX_SITES:
        raise ConfigError(f"more than {MAX_SITES:,} sites", path=str(path))
    return sites
