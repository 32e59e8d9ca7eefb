"""A session that travels is the same on arrival, whatever its client did before."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from nearcast.fabric.session_state import Agreement, decode_session, encode_connection, encode_session, install
from nearcast.mqtt.packets import MQTT_3_1_1, MQTT_5
from tests.fabric_harness import Mesh
from tests.gateway_harness import Gateway, run_all

TOPICS = ("a", "b/c", "b/d")
ACTIONS = st.one_of(
    st.tuples(st.just("publish"), st.sampled_from(TOPICS), st.integers(0, 2), st.binary(max_size=40)),
    st.tuples(st.just("own"), st.sampled_from(TOPICS), st.integers(0, 2), st.binary(max_size=40)),
    st.tuples(st.just("subscribe"), st.sampled_from((*TOPICS, "b/+", "$share/g/a")), st.integers(0, 2), st.just(b"")),
    st.tuples(st.just("answer"), st.just(""), st.just(0), st.just(b"")),
)


@settings(max_examples=60, deadline=None)
@given(version=st.sampled_from((MQTT_3_1_1, MQTT_5)), durable=st.booleans(), actions=st.lists(ACTIONS, max_size=40))
def test_it_arrives_as_it_left(version: int, durable: bool, actions: list[tuple[str, str, int, bytes]]) -> None:
    mesh = Mesh()
    here, there = mesh.add("here", durable=durable), mesh.add("there", durable=durable)
    gateway = Gateway(mesh, "gateway")
    publisher = gateway.mqtt_client("here", "publisher")
    client = gateway.mqtt_client("here", "client", version, clean_start=False, expiry=100, alias_maximum=2)
    client.acknowledges = False
    for action, topic, qos, payload in actions:
        if action == "publish":
            publisher.publish(topic, payload, qos)
        elif action == "own":
            client.publish(topic, payload, qos)
        elif action == "subscribe":
            client.subscribe(topic, qos)
        else:
            client.answer()
            client.acknowledges = False
        run_all(mesh, gateway)
    session = here.engine.sessions.by_client["client"]
    assert session.connection is not None
    sent = encode_session(here.fabric, session, mesh.now)
    agreed = encode_connection(session.connection)

    arrived = decode_session(there.fabric, sent, mesh.now)
    install(there.fabric, arrived, mesh.now)
    assert encode_session(there.fabric, arrived, mesh.now) == sent
    assert (arrived.inflight_bytes, arrived.queued_messages, arrived.queued_bytes) == (
        session.inflight_bytes,
        session.queued_messages,
        session.queued_bytes,
    )
    assert there.engine.stats.inflight_messages == len(session.inflight)

    agreement = Agreement(agreed)
    connection = there.engine.open(agreement.peer, there.client(), mesh.now)
    assert agreement.apply(connection) == b""
    assert encode_connection(connection) == agreed

    if there.journal is not None:
        there.flush()
        there.journal.sync()
        there.crash()
        again = there.engine.sessions.by_client["client"]
        assert list(again.inflight) == list(session.inflight)
        assert again.queued_messages == session.queued_messages
        assert set(again.subscriptions) == set(session.subscriptions)
        assert (again.received_ids or set()) == (session.received_ids or set())
