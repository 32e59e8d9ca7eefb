"""The nodes of a scenario as processes of the emulated WAN: which command a broker, gateway or controller is, and when it
starts and stops.

Owns nothing that runs: a topology with more processes comes out, and events. The fabric's secret is made by a process too, on
the WAN, so that nobody has to keep one beside a scenario; so is the configuration file that brokers share, where a scenario's
``settings`` say more than options can (``fabric``, ``limits``; ``lcm`` by broker).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

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

WRITER = "fabric-settings"
"""The process that writes the configuration file, in the same way."""

_SETTINGS_FILE = f"{{data}}/../{WRITER}/broker.toml"

STOP_TIMEOUT_S = 30.0
"""A node of a fabric hands its clients over before it ends."""


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """Where the brokers of a fabric record the messages that they process."""

    directory: str
    run: str
    """What the run is called in their events, and in those of clients."""


def with_nodes(scenario: Scenario, recorded: Recorded | None = None) -> Topology:
    """The scenario's topology with its nodes as processes, ahead of its own. Where one of its own has a broker's port (as a
    check of readiness), that one is the broker: Mosquitto, or Nearcast with options. Brokers of a fabric record
    what they process where ``recorded`` says."""
    topology = topology_of(scenario)
    taken = {(process.host, process.ready.port) for process in expand_processes(topology).processes}
    processes: list[Process] = []
    brokers = expand_brokers(scenario)
    if any(broker.fabric for broker in brokers):
        home = brokers[0].host if scenario.controller is None else scenario.controller.host
        processes.append(_secret(home))
        processes += _settings(scenario, home, recorded)
    if scenario.controller is not None:
        processes += _controller(scenario.controller)
    kept = scenario.settings.get("topics", ()) if scenario.protocol in MQTT_PROTOCOLS else ()
    durable = [rule["topic"] for rule in kept if rule.get("mode", "durable") == "durable"]
    started: set[str] = set()
    for broker in brokers:
        if (broker.host, broker.port) not in taken:
            made = _broker(broker, scenario, durable, recorded)
            # Brokers of a fabric find each other in whatever order they come; one after the other, they only take longer.
            together = broker.fabric and not made.manual and processes[-1].name in started
            processes.append(msgspec.structs.replace(made, together=together))
            if broker.fabric and not made.manual:
                started.add(made.name)
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

CONTROLLER_WRITER = "controller-settings"
"""The process that writes its configuration file."""


def _broker_process(broker: Broker) -> str:
    return f"{broker.host}-mqtt-{broker.port}"


def _secret(host: str) -> Process:
    # Its file is named whether it was made now or, after a restart of the host, is there already.
    return Process(name=MAKER, host=host, command=("nearcast", "secret", "{data}/secret"), ready=ReadyCheck(log="/secret: "))


def _settings(scenario: Scenario, host: str, recorded: Recorded | None) -> list[Process]:
    """The process that writes what the brokers of a fabric are told beside their options, if there is anything."""
    text = configuration(scenario, recorded)
    if not text:
        return []
    command = ("python", "-P", "-m", "nearcast.experiments.writing", "{data}/broker.toml", text)
    return [Process(name=WRITER, host=host, command=_literal(command), ready=ReadyCheck(log="/broker.toml: "))]


def _literal(command: tuple[str, ...]) -> tuple[str, ...]:
    """The last word as it is, whatever braces are in it."""
    return (*command[:-1], command[-1].replace("{", "{{").replace("}", "}}"))


def configuration(scenario: Scenario, recorded: Recorded | None = None) -> str:
    """The configuration file of a scenario's fabric: its settings but for what only options can say, because it is known to
    the WAN alone (addresses, the secret) or differs from broker to broker. Empty where that is nothing."""
    settings = scenario.settings if scenario.protocol == "fabric" else {}
    fabric = dict(settings.get("fabric", {}))
    if "groups" in fabric:
        fabric["groups"] = {key: value for key, value in fabric["groups"].items() if key not in ("cloud", "lcm")}
    fabric = {key: value for key, value in fabric.items() if key not in ("name", "site", "secret_file", "controller", "peers")}
    limits = settings.get("limits", {})
    lines: list[str] = []
    for name, table in (("fabric", fabric), ("limits", limits), ("recording", _recording(scenario, recorded))):
        if table:
            lines += [f"[{name}]", *_entries(table)]
    return "".join(f"{line}\n" for line in lines)


def _recording(scenario: Scenario, recorded: Recorded | None) -> dict[str, str]:
    if recorded is None:
        return {}
    cloud = _cloud(scenario)
    named = {} if cloud is None else {"cloud": str(urlsplit(cloud).hostname)}
    return {"directory": recorded.directory, "run": recorded.run, **named}


def _entries(table: Mapping[str, Any]) -> list[str]:
    return [f"{key} = {_toml(value)}" for key, value in table.items()]


def _toml(value: Any) -> str:
    """A value as TOML writes it on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False)


def _controller(controller: Controller) -> list[Process]:
    """Its process, and before it the one that writes what it is told beside its options, if there is anything."""
    address = f"{{{controller.host}}}"
    command = ["nearcast", "controller", "--fabric-secret", _SECRET_FILE]
    found: list[Process] = []
    if controller.settings:
        text = "".join(f"{line}\n" for line in ("[controller]", *_entries(controller.settings)))
        write = ("python", "-P", "-m", "nearcast.experiments.writing", "{data}/controller.toml", text)
        found.append(
            Process(
                name=CONTROLLER_WRITER,
                host=controller.host,
                command=_literal(write),
                ready=ReadyCheck(log="/controller.toml: "),
            )
        )
        command += ["--config", f"{{data}}/../{CONTROLLER_WRITER}/controller.toml"]
    command += ["--host", address, "--port", str(controller.port), "--http-port", str(controller.http_port)]
    command += ["--interval", f"{controller.interval_s:g}", "--period", f"{controller.interval_s:g}"]
    command += ["--ping-interval-ms", f"{controller.ping_interval_ms:g}"]
    found.append(
        Process(
            name=CONTROLLER,
            host=controller.host,
            command=tuple(command),
            ready=ReadyCheck(port=controller.port),
            manual=controller.start_s > 0,
            stop_timeout_s=STOP_TIMEOUT_S,
        )
    )
    return found


def _broker(broker: Broker, scenario: Scenario, durable_topics: list[str], recorded: Recorded | None) -> Process:
    # On its own host's address: in loopback mode, hosts are addresses of one machine.
    command = ["nearcast", "broker", "--host", f"{{{broker.host}}}", "--port", str(broker.port), "--allow-anonymous"]
    if broker.durable:
        command += ["--data", "{data}", "--sync", "fsync"]
        command += [option for topic in durable_topics for option in ("--durable", topic)]
    if broker.fabric:
        if configuration(scenario, recorded):
            command += ["--config", _SETTINGS_FILE]
        command += ["--name", broker.name, "--link-port", str(broker.link_port), *_fabric(scenario, broker)]
        command += _groups(scenario, broker)
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
    if isinstance(node, Broker) and _cloud(scenario) is not None:
        return words  # by the announcements of leaders
    option = "--peer" if isinstance(node, Broker) else "--broker"
    others = [other for other in expand_brokers(scenario) if other.fabric and other != node]
    return words + [word for other in others for word in (option, f"{{{other.host}}}:{other.link_port}")]


def _cloud(scenario: Scenario) -> str | None:
    """URL of the cloud of broadcast groups, as the scenario has it: with the name of a host."""
    found = scenario.settings.get("fabric", {}).get("groups", {}).get("cloud") if scenario.protocol == "fabric" else None
    return None if found is None else str(found)


def _groups(scenario: Scenario, broker: Broker) -> list[str]:
    """What a broker is told of broadcast groups beside the file: where the cloud is, and how capable it is itself."""
    words = []
    cloud = _cloud(scenario)
    if cloud is not None:
        url = urlsplit(cloud)
        known = url.hostname in topology_of(scenario).host_names()
        address = f"{{{url.hostname}}}" if known else str(url.hostname)
        words += ["--cloud", f"{url.scheme}://{address}:{url.port or 1883}"]
    lcm = scenario.settings.get("lcm", {}).get(broker.name) if scenario.protocol == "fabric" else None
    return words if lcm is None else [*words, "--lcm", f"{lcm:g}"]
