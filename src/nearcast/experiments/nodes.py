"""The nodes of a scenario as processes of the emulated WAN: which command a broker, gateway or controller is, and when it
starts and stops.

Owns nothing that runs: a topology with more processes comes out, and events. The fabric's secret is made by a process too, on
the WAN, so that nobody has to keep one beside a scenario.
"""

from __future__ import annotations

import msgspec

from nearcast.scenario.events import Event, Start, Stop
from nearcast.scenario.expansion import expand_brokers, expand_gateways, expand_processes, topology_of
from nearcast.scenario.scenario import MQTT_PROTOCOLS, Broker, Controller, Gateway, Scenario
from nearcast.scenario.topology import Host, Process, ReadyCheck, Topology

HTTP_PORT = 19_100
"""Where the first broker of a fabric shows its figures, on the loopback interface of its host; the next has the next port: in
loopback mode, hosts have that interface in common."""

MAKER = "fabric-secret"
"""The process that makes the secret, and so the directory that it is in: beside those of all others."""

_SECRET_FILE = f"{{data}}/../{MAKER}/secret"

STOP_TIMEOUT_S = 30.0
"""A node of a fabric hands its clients over before it ends."""


def with_nodes(scenario: Scenario) -> Topology:
    """The scenario's topology with its nodes as processes, ahead of its own. Where one of its own has a broker's port (as a
    check of readiness), that one is the broker: Mosquitto, or Nearcast with options."""
    topology = topology_of(scenario)
    taken = {(process.host, process.ready.port) for process in expand_processes(topology).processes}
    processes: list[Process] = []
    brokers = expand_brokers(scenario)
    if any(broker.fabric for broker in brokers):
        home = brokers[0].host if scenario.controller is None else scenario.controller.host
        processes.append(_secret(home))
    if scenario.controller is not None:
        processes.append(_controller(scenario.controller))
    kept = scenario.settings.get("topics", ()) if scenario.protocol in MQTT_PROTOCOLS else ()
    durable = [rule["topic"] for rule in kept if rule.get("mode", "durable") == "durable"]
    for broker in brokers:
        if (broker.host, broker.port) not in taken:
            processes.append(_broker(broker, scenario, durable))
    for number, gateway in enumerate(expand_gateways(scenario)):
        processes.append(_gateway(gateway, scenario, together=number > 0))
    hosts = tuple(_with_ports(host, scenario) for host in topology.hosts)
    return msgspec.structs.replace(topology, hosts=hosts, processes=(*processes, *topology.processes))


def _with_ports(host: Host, scenario: Scenario) -> Host:
    """The host with the ports of its nodes that no check of readiness names: loopback mode carries only ports it is told."""
    names = set(host.names())
    ports = {broker.link_port for broker in expand_brokers(scenario) if broker.fabric and broker.host in names}
    if not ports <= set(host.ports):
        return msgspec.structs.replace(host, ports=(*host.ports, *sorted(ports - set(host.ports))))
    return host


def node_events(scenario: Scenario) -> list[Event]:
    """When nodes start that are not there from the beginning, and when they are asked to end."""
    events: list[Event] = []
    nodes: list[tuple[str, Broker | Gateway | Controller]] = []
    nodes += [(_broker_process(broker), broker) for broker in expand_brokers(scenario)]
    nodes += [(gateway.name, gateway) for gateway in expand_gateways(scenario)]
    if scenario.controller is not None:
        nodes.append((CONTROLLER, scenario.controller))
    for process, node in nodes:
        if node.start_s > 0:
            events.append(Start(at_s=node.start_s, process=process))
        if node.stop_s is not None:
            events.append(Stop(at_s=node.stop_s, process=process))
    return sorted(events, key=lambda event: event.at_s)


def http_ports(scenario: Scenario) -> dict[str, tuple[str, int]]:
    """Where the brokers of a fabric show their figures: host and port, by the broker's name."""
    brokers = [broker for broker in expand_brokers(scenario) if broker.fabric]
    return {broker.name: (broker.host, HTTP_PORT + number) for number, broker in enumerate(brokers)}


CONTROLLER = "controller"
"""The controller's process."""


def _broker_process(broker: Broker) -> str:
    return f"{broker.host}-mqtt-{broker.port}"


def _secret(host: str) -> Process:
    # Its file is named whether it was made now or, after a restart of the host, is there already.
    return Process(name=MAKER, host=host, command=("nearcast", "secret", "{data}/secret"), ready=ReadyCheck(log="/secret: "))


def _controller(controller: Controller) -> Process:
    address = f"{{{controller.host}}}"
    command = ["nearcast", "controller", "--fabric-secret", _SECRET_FILE]
    command += ["--host", address, "--port", str(controller.port), "--http-port", str(controller.http_port)]
    command += ["--interval", f"{controller.interval_s:g}", "--period", f"{controller.interval_s:g}"]
    command += ["--ping-interval-ms", f"{controller.ping_interval_ms:g}"]
    return Process(
        name=CONTROLLER,
        host=controller.host,
        command=tuple(command),
        ready=ReadyCheck(port=controller.port),
        manual=controller.start_s > 0,
        stop_timeout_s=STOP_TIMEOUT_S,
    )


def _broker(broker: Broker, scenario: Scenario, durable_topics: list[str]) -> Process:
    # On its own host's address: in loopback mode, hosts are addresses of one machine.
    command = ["nearcast", "broker", "--host", f"{{{broker.host}}}", "--port", str(broker.port), "--allow-anonymous"]
    if broker.durable:
        command += ["--data", "{data}", "--sync", "fsync"]
        command += [option for topic in durable_topics for option in ("--durable", topic)]
    if broker.fabric:
        command += ["--name", broker.name, "--link-port", str(broker.link_port), *_fabric(scenario, broker)]
        command += ["--http-port", str(http_ports(scenario)[broker.name][1])]
    return Process(
        name=_broker_process(broker),
        host=broker.host,
        command=tuple(command),
        ready=ReadyCheck(port=broker.port),
        manual=broker.start_s > 0,
        stop_timeout_s=STOP_TIMEOUT_S if broker.fabric else 10.0,
    )


def _gateway(gateway: Gateway, scenario: Scenario, *, together: bool) -> Process:
    command = ["nearcast", "gateway", "--host", f"{{{gateway.host}}}", "--port", str(gateway.port), "--name", gateway.name]
    command += _fabric(scenario, gateway)
    return Process(
        name=gateway.name,
        host=gateway.host,
        command=tuple(command),
        ready=ReadyCheck(port=gateway.port),
        manual=gateway.start_s > 0,
        together=together,
        stop_timeout_s=STOP_TIMEOUT_S,
    )


def _fabric(scenario: Scenario, node: Broker | Gateway) -> list[str]:
    """How a node finds the others: from the controller, or by their addresses."""
    site = {name: host.site for host in topology_of(scenario).hosts for name in host.names()}[node.host]
    words = ["--fabric-secret", _SECRET_FILE, "--site", site]
    controller = scenario.controller
    if controller is not None and (isinstance(node, Broker) or node.controller):
        return [*words, "--controller", f"{{{controller.host}}}:{controller.port}"]
    option = "--peer" if isinstance(node, Broker) else "--broker"
    others = [other for other in expand_brokers(scenario) if other.fabric and other != node]
    return words + [word for other in others for word in (option, f"{{{other.host}}}:{other.link_port}")]
