"""Events of simulated MQTT clients in the schema of recorded events: what a load process records of real ones; and of
simulated brokers, what real ones record with ``--record``."""

from __future__ import annotations

from nearcast.mqtt.publication import Publication
from nearcast.recording import EventWriter, Kind, MessageEvent, message_id
from nearcast.scenario.expansion import expand_clients
from nearcast.scenario.identity import decode_identity
from nearcast.scenario.scenario import Scenario
from nearcast.scenario.workload import Subscribing
from nearcast.simulation import mqtt_facts as facts
from nearcast.simulation.hosts import Host
from nearcast.simulation.invariants import Invariant
from nearcast.simulation.mqtt_broker import SimulatedBroker
from nearcast.simulation.programs import ProgramNode


class Recorder(Invariant):
    """Sees every fact of a run; nothing can violate it. Times are the world's, which no host's skew touches."""

    def __init__(self, scenario: Scenario, writer: EventWriter, *, processed: bool = False) -> None:
        self._writer = writer
        self._processed = processed
        clients = expand_clients(scenario)
        self._brokers = {client.name: (client.broker,) for client in clients}
        self._subscriptions = {client.name: client.subscribe for client in clients}
        self._streams = {number: (client.name, stream) for client in clients for stream, number in enumerate(client.numbers)}

    def observed(self, host: Host, fact: object) -> None:
        at_ns = round(host.world.now * 1e9)
        if isinstance(fact, facts.Delivered):
            self._delivered(fact, at_ns)
        elif isinstance(fact, facts.Published):
            self._sent("published", fact.message, at_ns)
        elif isinstance(fact, facts.Acknowledged):
            self._sent("acknowledged", fact.message, at_ns)
        elif isinstance(fact, facts.Refused):
            self._sent("refused", fact.message, at_ns, fact.reason)
        elif isinstance(fact, facts.Skipped):
            self._sent("skipped", fact.message, at_ns, fact.reason)
        elif isinstance(fact, facts.ClientConnected):
            self._connection("connected", fact.client, at_ns)
        elif isinstance(fact, facts.Subscribed):
            for wanted in self._subscriptions[fact.client]:
                self._connection("subscribed", fact.client, at_ns, wanted=wanted)
        elif isinstance(fact, facts.ClientDisconnected):
            self._connection("disconnected", fact.client, at_ns, fact.reason)
        elif isinstance(fact, facts.ClientLeft):
            self._connection("disconnected", fact.client, at_ns, "left, as the scenario says")
        elif self._processed and isinstance(fact, facts.BrokerStarted) and isinstance(host.node, ProgramNode):
            for program in host.node.programs:
                if isinstance(program, SimulatedBroker):
                    program.engine.effects.witness = _Witness(host, self._writer)

    def _sent(self, kind: Kind, message: facts.Message, at_ns: int, reason: str | None = None) -> None:
        self._writer.write(
            MessageEvent(
                kind=kind,
                at_ns=at_ns,
                client=message.client,
                message_id=message_id(message.publisher, message.sequence),
                stream=message.stream,
                sequence=message.sequence,
                topic=message.topic,
                publisher=message.client,
                due_ns=round(message.due_s * 1e9),
                sent_ns=None if kind == "skipped" else round(message.sent_s * 1e9),
                qos=message.qos,
                retained=message.retain,
                size_bytes=len(message.payload),
                path=self._brokers[message.client],
                reason=reason,
            )
        )

    def _delivered(self, fact: facts.Delivered, at_ns: int) -> None:
        identity = decode_identity(fact.payload)
        stream = None if identity is None else self._streams.get(identity.publisher)
        if identity is None or stream is None:
            return
        self._writer.write(
            MessageEvent(
                kind="delivered",
                at_ns=at_ns,
                client=fact.client,
                message_id=message_id(identity.publisher, identity.sequence),
                stream=stream[1],
                sequence=identity.sequence,
                topic=fact.topic,
                publisher=stream[0],
                subscriber=fact.client,
                sent_ns=identity.sent_ns,
                received_ns=at_ns,
                qos=fact.qos,
                retained=fact.retained,
                size_bytes=len(fact.payload),
                path=self._brokers[fact.client],
            )
        )

    def _connection(
        self, kind: Kind, client: str, at_ns: int, reason: str | None = None, wanted: Subscribing | None = None
    ) -> None:
        self._writer.write(
            MessageEvent(
                kind=kind,
                at_ns=at_ns,
                client=client,
                topic=None if wanted is None else wanted.filter,
                qos=None if wanted is None else wanted.qos,
                path=self._brokers[client],
                reason=reason,
            )
        )


class _Witness:
    """What the brokers of a host process. A simulated cloud is a broker of ours and records for itself, so that what it was
    given need not be."""

    def __init__(self, host: Host, writer: EventWriter) -> None:
        self._host = host
        self._writer = writer

    def processed(self, publication: Publication, now: float) -> None:
        for payload in publication.payloads():
            identity = decode_identity(payload)
            if identity is not None:
                self._writer.write(
                    MessageEvent(
                        kind="processed",
                        at_ns=round(self._host.world.now * 1e9),
                        client=self._host.name,
                        message_id=message_id(identity.publisher, identity.sequence),
                        sequence=identity.sequence,
                        topic=publication.topic.decode("utf-8"),
                        sent_ns=identity.sent_ns,
                        qos=publication.qos,
                        retained=publication.retain,
                        size_bytes=len(payload),
                        path=(self._host.name,),
                    )
                )

    def relayed(self, publication: Publication, index: int, now: float) -> None:
        pass
