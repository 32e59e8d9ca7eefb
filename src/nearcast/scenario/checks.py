"""Rules that span several entries: names taken or unknown, sites that cannot reach each other, events for nobody.

Each problem says where it is (:data:`~nearcast.configfile.Steps`), so that a file's reader can name the line. What one entry
alone can get wrong, its struct refuses by itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from nearcast.configfile import Steps, key_of
from nearcast.errors import ConfigError
from nearcast.scenario import places
from nearcast.scenario.events import ChangeLink, Cut, Event, Heal, Move, Start, Stop
from nearcast.scenario.expansion import match_hosts, process_name
from nearcast.scenario.movement import Waypoints
from nearcast.scenario.placeholders import placeholders
from nearcast.scenario.rules import shown, unknown
from nearcast.scenario.scenario import MQTT_PROTOCOLS, Scenario
from nearcast.scenario.topology import MAX_HOSTS, Host, Topology
from nearcast.scenario.workload import MAX_CLIENTS, OWN_HOST


class Problem(NamedTuple):
    """Why a description cannot be used, and which entry is at fault."""

    steps: Steps
    message: str

    def error(self) -> ConfigError:
        """For a description that came from no file."""
        return ConfigError(self.message, key=key_of(self.steps))


def check_topology(topology: Topology) -> None:
    """Raise :class:`~nearcast.errors.ConfigError` for the first problem."""
    for problem in topology_problems(topology):
        raise problem.error()


def check_scenario(scenario: Scenario, topology: Topology) -> None:
    """Raise :class:`~nearcast.errors.ConfigError` for the first problem of a scenario on its (good) topology."""
    for problem in scenario_problems(scenario, topology):
        raise problem.error()


def topology_problems(topology: Topology) -> Iterator[Problem]:
    """Everything wrong with a topology, in the order of its file."""
    taken: dict[str, str] = {}
    for position, site in enumerate(topology.sites):
        yield from _claim(taken, site.name, ("sites", position, "name"))
    sites = [site.name for site in topology.sites]
    known_sites = set(sites)
    directions: dict[tuple[str, str], str] = {}
    for position, link in enumerate(topology.links):
        for end, name in enumerate(link.between):
            if name not in known_sites:
                yield _problem(("links", position, "between", end), unknown("site", name, sites))
        first, second = link.between
        for direction in ((first, second),) if link.one_way else ((first, second), (second, first)):
            if direction in directions:
                told = f"{direction[0]} to {direction[1]} is described by {directions[direction]} already"
                yield _problem(("links", position, "between"), told)
            directions[direction] = f"links[{position}]"
    total = 0
    for position, host in enumerate(topology.hosts):
        total += host.count
        if total > MAX_HOSTS:
            yield _problem(("hosts", position, "count"), f"more than {MAX_HOSTS:,} hosts in all")
            return
        if host.site not in known_sites:
            yield _problem(("hosts", position, "site"), unknown("site", host.site, sites))
        for name in host.names():
            yield from _claim(taken, name, ("hosts", position, "name"))
    yield from _unreachable(topology, directions)
    yield from _process_problems(topology)


def _process_problems(topology: Topology) -> Iterator[Problem]:
    hosts = _Hosts(topology)
    names: dict[str, str] = {}
    for position, process in enumerate(topology.processes):
        yield from hosts.some(process.host, ("processes", position, "host"))
        for host in match_hosts(process.host, hosts.names):
            yield from _claim(names, process_name(process, host), ("processes", position, "name"))
        texts: list[tuple[Steps, str]] = [(("command", index), part) for index, part in enumerate(process.command)]
        texts += [(("environment", name), value) for name, value in process.environment.items()]
        for steps, text in texts:
            for name in placeholders(text):
                if name not in ("data", "host") and name not in hosts.known:
                    message = f"{{{name}}} is neither {{data}} nor {{host}} nor a host: {unknown('host', name, hosts.names)}"
                    yield _problem(("processes", position, *steps), message)


def _unreachable(topology: Topology, directions: Collection[tuple[str, str]]) -> Iterator[Problem]:
    """Sites that no links lead to or from need a model, and for a model by distance a place on Earth."""
    onward: dict[str, list[str]] = {site.name: [] for site in topology.sites}
    back: dict[str, list[str]] = {site.name: [] for site in topology.sites}
    for source, target in directions:
        if source in onward and target in onward:
            onward[source].append(target)
            back[target].append(source)
    start = topology.sites[0].name
    reached, reaching = _reach(start, onward), _reach(start, back)
    if len(reached) == len(reaching) == len(onward):
        return
    model = topology.model
    if model is None:
        for site in topology.sites:
            if site.name not in reached or site.name not in reaching:
                source, target = (start, site.name) if site.name not in reached else (site.name, start)
                message = f"nothing leads from {source} to {target}: add a link, or a [model] for sites without links"
                yield _problem(("links",), message)
                return
    elif model.kind in ("fibre", "linear"):
        for position, site in enumerate(topology.sites):
            where: Steps = ("sites", position)
            if not site.located:
                if len(_reach(site.name, onward)) < len(onward) or len(_reach(site.name, back)) < len(onward):
                    message = f"{site.name} needs a city or coordinates: the {model.kind} model goes by distance"
                    yield _problem(where, message)
            elif site.city is not None:
                try:
                    places.coordinates_of(site.city)
                except ConfigError as error:
                    yield _problem((*where, "city"), str(error))


def _reach(start: str, ways: dict[str, list[str]]) -> set[str]:
    found = {start}
    pending = [start]
    while pending:
        for other in ways[pending.pop()]:
            if other not in found:
                found.add(other)
                pending.append(other)
    return found


def scenario_problems(scenario: Scenario, topology: Topology) -> Iterator[Problem]:
    """Everything wrong with a scenario, in the order of its file."""
    hosts = _Hosts(topology)
    listening: dict[tuple[str, int], str] = {}
    for position, broker in enumerate(scenario.brokers):
        ports = (broker.port, broker.link_port) if broker.fabric else (broker.port,)
        yield from _claim_ports(listening, hosts, broker.host, ports, ("brokers", position))
    for position, gateway in enumerate(scenario.gateways):
        yield from _claim_ports(listening, hosts, gateway.host, (gateway.port,), ("gateways", position))
        if not any(broker.fabric for broker in scenario.brokers):
            yield _problem(("gateways", position), "has no broker to go to: none of [[brokers]] has `fabric = true`")
    if scenario.controller is not None:
        yield from hosts.one(scenario.controller.host, ("controller", "host"))
        ports = (scenario.controller.port, scenario.controller.http_port)
        yield from _claim_ports(listening, hosts, scenario.controller.host, ports, ("controller",))
    yield from _client_problems(scenario, topology, hosts, listening)
    end_s = scenario.duration_s + scenario.settle_s
    processes = _process_names(topology)
    sites = {site.name for site in topology.sites}
    for position, event in enumerate(scenario.events):
        yield from _event_problems(event, ("events", position), hosts, sites, processes)
        if event.at_s > end_s:
            yield _problem(("events", position, "at_s"), f"the run is over after {end_s:g} s (duration_s + settle_s)")
    located = {site.name for site in topology.sites if site.located}
    for position, mobility in enumerate(scenario.mobility):
        for index, name in enumerate(mobility.sites):
            if name not in located:
                message = f"{name} has no city or coordinates" if name in sites else unknown("site", name, sites)
                yield _problem(("mobility", position, "sites", index), message)
        for index, pattern in enumerate(mobility.hosts if isinstance(mobility, Waypoints) else ()):
            yield from hosts.some(pattern, ("mobility", position, "hosts", index))
        if isinstance(mobility, Waypoints) and not mobility.sites and len(located) < 2:
            message = f"needs two sites with a city or coordinates at least, and {topology.name} has {len(located)}"
            yield _problem(("mobility", position), message)
    faults = scenario.random_faults
    if faults is not None:
        for position, pattern in enumerate(faults.hosts):
            yield from hosts.some(pattern, ("random_faults", "hosts", position))
        if faults.quiet_s >= scenario.duration_s:
            message = f"with `duration_s` {scenario.duration_s:g} no time is left for faults: shorten it"
            yield _problem(("random_faults", "quiet_s"), message)


def _claim_ports(
    listening: dict[tuple[str, int], str], hosts: _Hosts, pattern: str, ports: tuple[int, ...], steps: Steps
) -> Iterator[Problem]:
    """A node listens on these ports of the hosts that a pattern means."""
    yield from hosts.some(pattern, (*steps, "host"))
    where = key_of(steps)
    for host in match_hosts(pattern, hosts.names):
        for port in ports:
            before = listening.setdefault((host, port), where)
            if before != where:
                yield _problem(steps, f"port {port} of {host} is taken by {before} already")


def _client_problems(
    scenario: Scenario, topology: Topology, hosts: _Hosts, listening: Collection[tuple[str, int]]
) -> Iterator[Problem]:
    groups: dict[str, str] = {}
    names: dict[str, str] = {}
    programs = {host for process in topology.processes for host in match_hosts(process.host, hosts.names)}
    total = 0
    for position, group in enumerate(scenario.clients):
        yield from _claim(groups, group.name, ("clients", position, "name"))
        yield from hosts.some(group.host, ("clients", position, "host"))
        at = match_hosts(group.host, hosts.names)
        brokers = at if group.broker == OWN_HOST else match_hosts(group.broker, hosts.names)
        if group.broker != OWN_HOST:
            yield from hosts.some(group.broker, ("clients", position, "broker"))
        total += group.count * len(at)
        if total > MAX_CLIENTS:
            yield _problem(("clients", position, "count"), f"more than {MAX_CLIENTS:,} clients in all")
            return
        if not group.host.endswith("*"):
            # Only plain names can meet: the ones with a wildcard hold an @.
            for number in range(1, group.count + 1):
                name = group.name if group.count == 1 else f"{group.name}-{number}"
                yield from _claim(names, name, ("clients", position, "name"))
        if scenario.protocol in MQTT_PROTOCOLS:
            for host in brokers:
                if (host, group.port) not in listening and host not in programs:
                    message = f"nothing listens on port {group.port} of {host}: add it to [[brokers]] or [[gateways]]"
                    yield _problem(("clients", position, "broker"), message)
                    break


def _process_names(topology: Topology) -> list[str]:
    hosts = topology.host_names()
    return [process_name(process, host) for process in topology.processes for host in match_hosts(process.host, hosts)]


def _event_problems(
    event: Event, steps: Steps, hosts: _Hosts, sites: Collection[str], processes: Collection[str]
) -> Iterator[Problem]:
    if isinstance(event, Cut):
        for field, names in (("source", event.source), ("target", event.target)):
            for index, name in enumerate(names):
                if name not in sites and name not in hosts.known:
                    yield _problem((*steps, field, index), unknown("host or site", name, [*hosts.names, *sites]))
    elif isinstance(event, ChangeLink):
        for index, name in enumerate(event.between):
            if name not in sites:
                yield _problem((*steps, "between", index), unknown("site", name, sites))
    elif isinstance(event, Start | Stop):
        if event.process not in processes:
            yield _problem((*steps, "process"), unknown("process", event.process, processes))
    elif not isinstance(event, Heal):
        yield from hosts.one(event.host, (*steps, "host"))
        if isinstance(event, Move) and event.site not in sites:
            yield _problem((*steps, "site"), unknown("site", event.site, sites))


def event_problems(event: Event, topology: Topology) -> Iterator[Problem]:
    """What is wrong with one event on a topology: for events that come at run time."""
    return _event_problems(event, (), _Hosts(topology), {site.name for site in topology.sites}, _process_names(topology))


class _Hosts:
    """The names of hosts, and what to say about a name that is none."""

    def __init__(self, topology: Topology) -> None:
        self.names = topology.host_names()
        self.known = set(self.names)
        self._groups: dict[str, Host] = {host.name: host for host in topology.hosts if host.count > 1}

    def one(self, name: str, steps: Steps) -> Iterator[Problem]:
        """Nothing if ``name`` is one host."""
        if name in self.known:
            return
        group = self._groups.get(name)
        if group is not None:
            message = f"{name} stands for {group.count} hosts, {name}-1 to {name}-{group.count}: name one of them"
            yield _problem(steps, message)
        else:
            yield _problem(steps, unknown("host", name, self.names))

    def some(self, pattern: str, steps: Steps) -> Iterator[Problem]:
        """Nothing if ``pattern`` is a host, or has a trailing ``*`` and matches any."""
        if not pattern.endswith("*"):
            group = self._groups.get(pattern)
            if group is not None and pattern not in self.known:
                message = f"{pattern} stands for {group.count} hosts: write {pattern}-* for all of them"
                yield _problem(steps, message)
            else:
                yield from self.one(pattern, steps)
        elif not match_hosts(pattern, self.names):
            yield _problem(steps, f"no host begins with {shown(pattern[:-1])}")


def _claim(taken: dict[str, str], name: str, steps: Steps) -> Iterator[Problem]:
    before = taken.setdefault(name, key_of(steps[:-1]))
    if before != key_of(steps[:-1]):
        yield _problem(steps, f"the name {name} is taken by {before} already")


def _problem(steps: Steps, message: str) -> Problem:
    return Problem(steps, f"`{key_of(steps)}`: {message}" if steps else message)
