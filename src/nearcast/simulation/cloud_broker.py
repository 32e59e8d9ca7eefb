"""The cloud of a simulated fabric: an MQTT broker like any other, with a name that invariants can give it.

It is ours, but on its own, and knows nothing of fabrics or groups; to the fabric's brokers it might as well be another make.
"""

from __future__ import annotations

from collections.abc import Iterator

from nearcast.config import Limits
from nearcast.fabricconfig import Groups
from nearcast.mqtt.session import Session
from nearcast.mqtt.topics import matches
from nearcast.scenario.scenario import Broker
from nearcast.simulation.hosts import Host
from nearcast.simulation.mqtt_broker import SimulatedBroker
from nearcast.simulation.programs import ProgramNode

CLIENT_PREFIX = "nearcast/"
"""How the client identifiers of a fabric's brokers begin at the cloud (:mod:`nearcast.fabric.cloud`)."""


class CloudBroker(SimulatedBroker):
    """The cloud's process."""

    def __init__(
        self, host: Host, described: Broker, limits: Limits, snapshot_bytes: int, step_bytes: int, node: ProgramNode
    ) -> None:
        super().__init__(host, described.port, described.durable, limits, snapshot_bytes, step_bytes, node)
        self.name = described.name

    def sessions(self) -> Iterator[tuple[str, Session]]:
        """The sessions that brokers of the fabric have here, with the brokers' names."""
        for client_id, session in self.engine.sessions.by_client.items():
            if client_id.startswith(CLIENT_PREFIX):
                yield client_id[len(CLIENT_PREFIX) :], session

    def takers(self, topic: str, groups: Groups) -> set[str]:
        """The brokers that get messages to a topic from here, but for what they say to each other."""
        if topic.startswith(groups.prefix + "/"):
            return set()
        return {name for name, session in self.sessions() if any(matches(each, topic) for each in session.subscriptions)}
