"""The shipped MQTT client on a simulated host: the same machine and the same patience as :mod:`nearcast.client`.

It behaves as the load client of the emulated WAN does: a message that is due without a connection is skipped at QoS 0 and
waits at QoS 1 and 2, up to a bound. What it does when its process ends is a choice the workload makes:

- with ``clean_start`` the next process knows nothing: what was not acknowledged is forgotten, the session begins anew;
- without, the client counts as one that keeps its session on stable storage, as the specification asks of whoever resumes one
  (section 4.1): the machine outlives the process. A client that resumes a session and has forgotten its own half can lose
  QoS 2 messages it sends under identifiers that the broker remembers, and gets some of them twice; that is not shown here.
"""

from __future__ import annotations

import math
from typing import Final

from nearcast.errors import LocalProtocolError
from nearcast.mqtt import reasons
from nearcast.mqtt.client_events import (
    ClientSettings,
    Connected,
    Disconnected,
    MessageReceived,
    PublishCompleted,
    Refused,
    SubscribeCompleted,
)
from nearcast.mqtt.client_machine import CLOSED, CONNECTED, ClientMachine
from nearcast.mqtt.client_reconnection import Backoff, Reconnection, is_final, is_temporary
from nearcast.mqtt.packets import MQTT_3_1_1, MQTT_5, Publish, SubscriptionRequest
from nearcast.scenario.expansion import Client
from nearcast.scenario.identity import Identity, encode_identity
from nearcast.scenario.schedule import publication_times
from nearcast.simulation import mqtt_facts as facts
from nearcast.simulation.hosts import Host
from nearcast.simulation.programs import Program
from nearcast.simulation.streams import Stream

# What the load client and nearcast.client choose.
BACKOFF: Final = Backoff(initial_seconds=0.25, max_seconds=5.0)
MAX_WAITING: Final = 1_000
KEPT_SESSION_SECONDS: Final = 86_400
OWN_SESSION_SECONDS: Final = 300
WINDOW: Final = 1_000
WINDOW_3_1_1: Final = 20
LEAVE_S: Final = 5.0
"""A client that leaves waits so long for answers to what it sent."""

#: A moment of the world is not always a moment of a skewed clock to the last bit.
_CLOCK_GRAIN_S: Final = 1e-6


def settings_for(client: Client) -> ClientSettings:
    """What a client of a workload asks of its broker."""
    version = MQTT_5 if client.protocol == "5.0" else MQTT_3_1_1
    return ClientSettings(
        client_id=client.name,
        version=version,
        clean_start=client.clean_start,
        keep_alive_seconds=client.keepalive_s,
        session_expiry_seconds=OWN_SESSION_SECONDS if client.clean_start else KEPT_SESSION_SECONDS,
        end_session_on_disconnect=client.clean_start,
        enforce_receive_maximum=False,
        acknowledge_on_receipt=False,
        max_inflight=WINDOW if version == MQTT_5 else WINDOW_3_1_1,
        max_waiting=MAX_WAITING,
    )


class Workload:
    """What outlives a client's process: how far its streams of messages are, and for a client that keeps its session, that."""

    def __init__(self, client: Client, seed: int) -> None:
        self.client = client
        self.numbers = client.numbers
        self.schedules = [publication_times(client, stream, seed) for stream in range(len(client.publish))]
        self.machine: ClientMachine | None = None
        self.unanswered: dict[int, facts.Message] = {}
        self.subscribed = False
        self.left = False

    def next_s(self) -> float:
        """When the next message is due, on the world's clock."""
        return min([schedule.next_s for schedule in self.schedules], default=math.inf)


class SimulatedClient(Program):
    """One client, for the life of its host's process."""

    def __init__(self, host: Host, workload: Workload, broker: Host, streams: dict[Stream, Program]) -> None:
        """``streams`` says whose stream is whose: a client adds its own, and takes it away when it is done with it."""
        self.host = host
        self.client = workload.client
        self.broker = broker
        self.workload = workload
        self.stream: Stream | None = None
        self._streams = streams
        self._attempts = Reconnection(BACKOFF, host.rng)
        self._connect_at = math.inf
        self._give_up_at = math.inf
        self._accepted = False
        self.machine, self._fresh = self._begin()

    def _begin(self) -> tuple[ClientMachine, bool]:
        """The machine to go on with, and whether it is a new one."""
        workload = self.workload
        machine = workload.machine
        if machine is not None and not self.client.clean_start:
            machine.lose(self.host.now, "the process ended")
            machine.take()
            machine.take_events()
            return machine, False
        machine = ClientMachine(settings_for(self.client))
        workload.machine = machine
        workload.unanswered = {}
        workload.subscribed = False
        return machine, True

    def start(self) -> None:
        if self.workload.left:
            return
        self.host.observe(facts.ClientStarted(self.client.name, self._fresh))
        self._connect_at = self.host.now + max(0.0, self.client.start_s - self.host.world.now)
        # What would have been published while there was no process never came to be.
        for schedule in self.workload.schedules:
            while schedule.next_s < self.host.world.now:
                schedule.advance()

    # --- streams --------------------------------------------------------------------------------------------------------

    def opened(self, stream: Stream) -> None:
        if stream is self.stream:
            self._give_up_at = math.inf
            self.machine.connect(self.host.now)
            self._act()

    def received(self, stream: Stream, data: bytes) -> None:
        if stream is self.stream:
            self.machine.receive(data, self.host.now)
            self._act()

    def lost(self, stream: Stream, reason: str) -> None:
        """The stream ended by itself."""
        if stream is not self.stream:
            return
        self._let_go()
        if self.machine.state == CLOSED:
            self._try_again()
        else:
            self.machine.lose(self.host.now, f"the connection was lost: {reason}")
            self._act()

    def _connect(self) -> None:
        self._connect_at = math.inf
        self._accepted = False
        self._give_up_at = self.host.now + self.machine.settings.connect_timeout_seconds
        self.stream = self.host.connect(self.broker.index, self.client.port)
        self._streams[self.stream] = self

    def _let_go(self) -> Stream | None:
        stream, self.stream = self.stream, None
        if stream is not None:
            self._streams.pop(stream, None)
        return stream

    def _try_again(self) -> None:
        self._give_up_at = math.inf
        self._connect_at = self.host.now + self._attempts.next_delay_seconds()

    def _hang_up(self) -> None:
        stream = self._let_go()
        if stream is not None and self._accepted:
            stream.close()
        elif stream is not None:
            # As the real one: a CONNECT that arrives after all must not take the session from the next attempt.
            stream.reset()

    # --- the machine ----------------------------------------------------------------------------------------------------

    def _act(self) -> None:
        """What follows every call into the machine: its events, its output."""
        host = self.host
        name = self.client.name
        machine = self.machine
        over = False
        again = True
        for event in machine.take_events():
            if isinstance(event, MessageReceived):
                message = event.message
                host.observe(facts.Delivered(name, message.topic, message.payload, message.qos, message.retain))
                machine.acknowledge(message, host.now)
            elif isinstance(event, PublishCompleted):
                self._answered(event)
            elif isinstance(event, SubscribeCompleted):
                if max(event.reason_codes) < 0x80:
                    host.observe(facts.Subscribed(name))
                else:
                    host.note(f"{name}: a subscription was refused")
            elif isinstance(event, Connected):
                self._accepted = True
                self._attempts.connected(host.now)
                host.observe(facts.ClientConnected(name, event.session_present))
                self._subscribe()
            elif isinstance(event, Refused):
                over = True
                again = is_temporary(event.reason_code)
                host.observe(facts.ClientDisconnected(name, event.message))
            elif isinstance(event, Disconnected):
                over = True
                again = not is_final(event)
                self._attempts.lost(host.now)
                host.observe(facts.ClientDisconnected(name, event.message))
        self._write()
        if over:
            self._hang_up()
            if not again:
                # The client is at its end, a session taken over for example; the application opens another one.
                host.note(f"{name} begins anew")
                self.machine, fresh = self._begin()
                host.observe(facts.ClientStarted(name, fresh))
            self._try_again()

    def _write(self) -> None:
        output = self.machine.take()
        if output and self.stream is not None:
            self.stream.write(output[0] if len(output) == 1 else b"".join(output))

    def _subscribe(self) -> None:
        if self.client.subscribe and not self.workload.subscribed:
            self.workload.subscribed = True
            wanted = [SubscriptionRequest(each.filter, each.qos) for each in self.client.subscribe]
            self.machine.subscribe(wanted, None, self.host.now)

    def _answered(self, event: PublishCompleted) -> None:
        message = self.workload.unanswered.pop(event.token)
        if event.reason_code < 0x80:
            self.host.observe(facts.Acknowledged(message))
        else:
            reason = event.reason_string or reasons.name(event.reason_code)
            self.host.observe(facts.Refused(message, reason))

    # --- publishing -----------------------------------------------------------------------------------------------------

    def _publish_due(self) -> None:
        now_s = self.host.world.now
        for stream, schedule in enumerate(self.workload.schedules):
            while schedule.next_s <= now_s:
                self._publish(stream, schedule.sequence, schedule.next_s, now_s)
                schedule.advance()
        self._act()

    def _publish(self, stream: int, sequence: int, due_s: float, now_s: float) -> None:
        publishing = self.client.publish[stream]
        number = self.workload.numbers[stream]
        payload = encode_identity(Identity(number, sequence, int(now_s * 1e9)), publishing.payload_bytes)
        qos = publishing.qos
        message = facts.Message(
            number, sequence, self.client.name, stream, publishing.topic, qos, publishing.retain, payload, due_s, now_s
        )
        machine = self.machine
        if qos == 0 and machine.state != CONNECTED:
            self.host.observe(facts.Skipped(message, "no connection"))
            return
        if qos == 0 and self.stream is not None and self.stream.congested:
            self.host.observe(facts.Skipped(message, "the connection is too slow"))
            return
        if qos and machine.unacknowledged >= MAX_WAITING:
            self.host.observe(facts.Skipped(message, f"{MAX_WAITING} messages of this client wait already"))
            return
        self.host.observe(facts.Published(message))
        try:
            token = machine.publish(Publish(publishing.topic, payload, qos, publishing.retain), self.host.now)
        except LocalProtocolError as error:
            self.host.observe(facts.Refused(message, str(error)))
            return
        if qos:
            self.workload.unanswered[token] = message

    # --- time -----------------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        now = self.host.now
        if self._leave_s() <= self.host.world.now:
            self._leave()
        if self.workload.left:
            return
        if self._connect_at <= now:
            self._connect()
        elif self._give_up_at <= now:
            # No connection in time.
            stream = self._let_go()
            if stream is not None:
                stream.reset()
            self._try_again()
        if self.machine.next_deadline() <= now:
            self.machine.tick(now)
            self._act()
        if self.workload.next_s() <= self.host.world.now:
            self._publish_due()

    def _leave_s(self) -> float:
        """When it is time to go for good: the client's time, once all that it sent is answered or it has waited for that."""
        leave_s = self.client.leave_s
        if leave_s is None or self.workload.left:
            return math.inf
        return leave_s + LEAVE_S if self.workload.unanswered else leave_s

    def _leave(self) -> None:
        self.workload.left = True
        self.host.observe(facts.ClientLeft(self.client.name))
        self.machine.disconnect(self.host.now)
        self.machine.take_events()
        self._write()
        self._hang_up()
        self._connect_at = self._give_up_at = math.inf

    def next_deadline(self) -> float:
        """When :meth:`tick` is needed next, on the host's own clock."""
        if self.workload.left:
            return math.inf
        deadline = min(self._connect_at, self._give_up_at, self.machine.next_deadline())
        due_in_s = min(self.workload.next_s(), self._leave_s()) - self.host.world.now
        if due_in_s < math.inf:
            deadline = min(deadline, self.host.now + max(due_in_s, _CLOCK_GRAIN_S))
        return deadline
