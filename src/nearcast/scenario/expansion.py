"""Wildcards and counts spelt out: which hosts a pattern means, every process, every broker, every client. Both runtimes ask
here, so that a client has the same name, topics and broker in each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from nearcast.errors import ConfigError
from nearcast.scenario.identity import publisher_number
from nearcast.scenario.placeholders import fill, rename
from nearcast.scenario.rules import unknown
from nearcast.scenario.scenario import Broker, Gateway, Scenario
from nearcast.scenario.topology import Process, Topology
from nearcast.scenario.workload import OWN_HOST, Change, Clients, Publishing, Subscribing


class Client(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One MQTT client of a scenario, with nothing left to look up."""

    name: str
    """Unique in the scenario; its MQTT client identifier."""

    index: int
    """Its number on its host, within its group, from 0."""

    host: str
    broker: str
    """The host it connects to: a broker's or a gateway's."""

    port: int
    publish: tuple[Publishing, ...]
    """With placeholders filled in. The position is the stream of :func:`~nearcast.scenario.identity.publisher_number`."""

    subscribe: tuple[Subscribing, ...]
    protocol: str
    clean_start: bool
    keepalive_s: int
    start_s: float
    stop_s: float
    """When it stops publishing."""

    leave_s: float | None = None
    """When it disconnects for good; None: at the end of the run."""

    changes: tuple[Change, ...] = ()
    """Of its subscriptions, in the order of time, with placeholders filled in."""

    roams: tuple[str, ...] = ()
    """Hosts of the brokers or gateways that it goes on to when its own host moves to their sites
    (:func:`~nearcast.scenario.roaming.itinerary`); empty: it stays where it is."""

    @property
    def numbers(self) -> list[int]:
        """Of its streams, as in the identities of their messages."""
        return [publisher_number(self.name, stream, each.payload_bytes) for stream, each in enumerate(self.publish)]


def match_hosts(pattern: str, hosts: Sequence[str]) -> list[str]:
    """The hosts a name means: itself or, with a trailing ``*``, all that begin so. Empty if there are none."""
    if pattern.endswith("*"):
        return [host for host in hosts if host.startswith(pattern[:-1])]
    return [pattern] if pattern in hosts else []


def expand_processes(topology: Topology) -> Topology:
    """The topology with every process on one host, and ``{host}`` spelt out. What comes from a file is like this already."""
    hosts = topology.host_names()
    processes = tuple(
        _placed(process, host)
        for position, process in enumerate(topology.processes)
        for host in _matched(process.host, hosts, f"processes[{position}].host")
    )
    return topology if processes == topology.processes else msgspec.structs.replace(topology, processes=processes)


def process_name(process: Process, host: str) -> str:
    """What a process is called on one of the hosts it runs on."""
    return f"{process.name}-{host}" if process.host.endswith("*") else process.name


def _placed(process: Process, host: str) -> Process:
    return msgspec.structs.replace(
        process,
        name=process_name(process, host),
        host=host,
        command=tuple(rename(part, "host", host) for part in process.command),
        environment={name: rename(value, "host", host) for name, value in process.environment.items()},
    )


def topology_of(scenario: Scenario) -> Topology:
    """The topology of a scenario that was loaded, or made with one. A name alone has to be loaded first."""
    if isinstance(scenario.topology, str):
        raise ConfigError(
            f"the topology {scenario.topology!r} of scenario {scenario.name!r} is only a name: use load_scenario or resolve",
            key="topology",
        )
    return scenario.topology


def expand_brokers(scenario: Scenario) -> tuple[Broker, ...]:
    """Every broker on its own host, in the order of the scenario."""
    hosts = topology_of(scenario).host_names()
    return tuple(
        msgspec.structs.replace(broker, host=host)
        for position, broker in enumerate(scenario.brokers)
        for host in _matched(broker.host, hosts, f"brokers[{position}].host")
    )


def expand_gateways(scenario: Scenario) -> tuple[Gateway, ...]:
    """Every gateway on its own host, in the order of the scenario."""
    hosts = topology_of(scenario).host_names()
    return tuple(
        msgspec.structs.replace(gateway, host=host)
        for position, gateway in enumerate(scenario.gateways)
        for host in _matched(gateway.host, hosts, f"gateways[{position}].host")
    )


def expand_clients(scenario: Scenario) -> tuple[Client, ...]:
    """Every client, in the order of the scenario: group by group, host by host."""
    topology = topology_of(scenario)
    hosts, sites = topology.host_names(), sites_of(topology)
    return tuple(
        client
        for position, group in enumerate(scenario.clients)
        for client in _group(group, position, hosts, scenario.duration_s, sites)
    )


def _group(
    group: Clients, position: int, hosts: Sequence[str], duration_s: float, sites: Mapping[str, str]
) -> Iterator[Client]:
    beside = group.broker == OWN_HOST
    brokers = [] if beside else _matched(group.broker, hosts, f"clients[{position}].broker")
    number = 0
    for host in _matched(group.host, hosts, f"clients[{position}].host"):
        prefix = f"{group.name}@{host}" if group.host.endswith("*") else group.name
        for index in range(group.count):
            name = prefix if group.count == 1 else f"{prefix}-{index + 1}"
            words = {"client": name, "index": str(index), "host": host}
            yield Client(
                name=name,
                index=index,
                host=host,
                broker=_first(group, host, brokers, number, sites),
                port=group.port,
                publish=tuple(
                    msgspec.structs.replace(stream, topic=fill(stream.topic, words)) if "{" in stream.topic else stream
                    for stream in group.publish
                ),
                subscribe=tuple(
                    msgspec.structs.replace(wanted, filter=fill(wanted.filter, words)) if "{" in wanted.filter else wanted
                    for wanted in group.subscribe
                ),
                protocol=group.protocol,
                clean_start=group.clean_start,
                keepalive_s=group.keepalive_s,
                start_s=group.start_s,
                stop_s=duration_s if group.stop_s is None else min(group.stop_s, duration_s),
                leave_s=group.stop_s if group.leave else None,
                changes=tuple(_filled(change, words) for change in group.changes),
                roams=tuple(brokers) if group.roam else (),
            )
            number += 1


def _first(group: Clients, host: str, brokers: Sequence[str], number: int, sites: Mapping[str, str]) -> str:
    """The broker or gateway that a client of a group begins at."""
    if group.broker == OWN_HOST:
        return host
    if group.roam:
        here = next((broker for broker in brokers if sites[broker] == sites[host]), None)
        if here is not None:
            return here
    # In turn over the whole group, not from the first broker again on each host.
    return brokers[number % len(brokers)]


def _filled(change: Change, words: dict[str, str]) -> Change:
    return Change(
        at_s=change.at_s,
        subscribe=tuple(msgspec.structs.replace(each, filter=fill(each.filter, words)) for each in change.subscribe),
        unsubscribe=tuple(fill(each, words) for each in change.unsubscribe),
    )


def sites_of(topology: Topology) -> dict[str, str]:
    """Where each host is at first."""
    return {name: host.site for host in topology.hosts for name in host.names()}


def _matched(pattern: str, hosts: Sequence[str], key: str) -> list[str]:
    found = match_hosts(pattern, hosts)
    if not found:
        raise ConfigError(f"`{key}`: {unknown('host', pattern, hosts)}", key=key)
    return found
