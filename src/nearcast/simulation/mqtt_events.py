"""Message events of a simulated MQTT run, in the words of :mod:`nearcast.recording.schema`: one vocabulary for both runtimes.

Hand :class:`MessageEvents` to :func:`nearcast.simulation.runs.simulate` as an observer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nearcast.scenario.expansion import expand_clients
from nearcast.scenario.identity import decode_identity, publisher_number
from nearcast.scenario.scenario import Scenario
from nearcast.simulation import mqtt_facts as facts
from nearcast.simulation.hosts import Host
from nearcast.simulation.invariants import Invariant


class MessageEvents(Invariant):
    """Calls ``sink`` with the fields of every event. Times are nanoseconds since the start of the run.

    In place of ``message_id``, which :func:`nearcast.recording.schema.message_id` makes, there is the ``publisher_number``.
    """

    def __init__(self, scenario: Scenario, sink: Callable[[dict[str, Any]], None]) -> None:
        self._sink = sink
        self._clients = {client.name: client for client in expand_clients(scenario)}
        self._streams = {
            publisher_number(client.name, stream): (client, stream)
            for client in self._clients.values()
            for stream in range(len(client.publish))
        }

    def observed(self, host: Host, fact: object) -> None:
        at_ns = int(host.world.now * 1e9)
        if isinstance(fact, facts.Delivered):
            self._delivered(at_ns, fact)
        elif isinstance(fact, facts.Published):
            self._tell("published", at_ns, fact.message)
        elif isinstance(fact, facts.Acknowledged):
            self._tell("acknowledged", at_ns, fact.message)
        elif isinstance(fact, facts.Refused):
            self._tell("refused", at_ns, fact.message, fact.reason)
        elif isinstance(fact, facts.Skipped):
            self._tell("skipped", at_ns, fact.message, fact.reason)
        elif isinstance(fact, facts.ClientConnected):
            self._sink({"kind": "connected", "at_ns": at_ns, "client": fact.client})
        elif isinstance(fact, facts.ClientDisconnected):
            self._sink({"kind": "disconnected", "at_ns": at_ns, "client": fact.client, "reason": fact.reason})

    def _delivered(self, at_ns: int, fact: facts.Delivered) -> None:
        identity = decode_identity(fact.payload)
        if identity is None or identity.publisher not in self._streams:
            return
        publisher, stream = self._streams[identity.publisher]
        self._sink(
            {
                "kind": "delivered",
                "at_ns": at_ns,
                "client": fact.client,
                "publisher_number": identity.publisher,
                "stream": stream,
                "sequence": identity.sequence,
                "topic": fact.topic,
                "publisher": publisher.name,
                "subscriber": fact.client,
                "sent_ns": identity.sent_ns,
                "received_ns": at_ns,
                "qos": fact.qos,
                "retained": fact.retained,
                "size_bytes": len(fact.payload),
                "path": (publisher.host, publisher.broker, self._clients[fact.client].host),
            }
        )

    def _tell(self, kind: str, at_ns: int, message: facts.Message, reason: str | None = None) -> None:
        event: dict[str, Any] = {
            "kind": kind,
            "at_ns": at_ns,
            "client": message.client,
            "publisher_number": message.publisher,
            "stream": message.stream,
            "sequence": message.sequence,
            "topic": message.topic,
            "publisher": message.client,
            "due_ns": int(message.due_s * 1e9),
            "sent_ns": int(message.sent_s * 1e9),
            "qos": message.qos,
            "size_bytes": len(message.payload),
        }
        if reason is not None:
            event["reason"] = reason
        self._sink(event)
