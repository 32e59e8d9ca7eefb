"""What a running broker takes over from a new configuration."""

from __future__ import annotations

from nearcast.broker.reloading import changed_keys, is_reloadable, merge
from nearcast.config import (
    AccessRule,
    BrokerConfig,
    Limits,
    Listener,
    Observability,
    Persistence,
    Security,
    TopicLogSettings,
    TopicRule,
)

OLD = BrokerConfig()


def test_nothing_changed() -> None:
    assert changed_keys(OLD, BrokerConfig()) == []


def test_changes_are_named() -> None:
    new = BrokerConfig(
        listeners=(Listener(allow_anonymous=False),),
        limits=Limits(max_inflight=5),
        security=Security(acl=(AccessRule(action="allow", topic="#"),), verification_threads=4),
        persistence=Persistence(directory="x"),
        observability=Observability(log_level="debug", http_port=1),
    )
    changed = changed_keys(OLD, new)
    assert changed == [
        "listeners[0].allow_anonymous",
        "limits.max_inflight",
        "security.acl",
        "security.verification_threads",
        "persistence.directory",
        "observability.http_port",
        "observability.log_level",
    ]
    assert [key for key in changed if not is_reloadable(key)] == [
        "security.verification_threads",
        "persistence.directory",
        "observability.http_port",
    ]
    merged = merge(OLD, new)
    assert merged.listeners[0].allow_anonymous is False
    assert merged.limits.max_inflight == 5
    assert merged.security.acl
    assert merged.security.verification_threads == OLD.security.verification_threads
    assert merged.persistence == OLD.persistence
    assert merged.observability.log_level == "debug"
    assert merged.observability.http_port is None


def test_client_certificates_and_their_names_change_together() -> None:
    named = Listener(
        kind="tls",
        certificate_file="a",
        key_file="b",
        ca_file="c",
        client_certificates="required",
        certificate_username=True,
    )
    plain = Listener(kind="tls", certificate_file="a", key_file="b")
    for old, new in ((named, plain), (plain, named)):
        assert merge(BrokerConfig(listeners=(old,)), BrokerConfig(listeners=(new,))).listeners == (new,)


def test_other_listeners_need_a_restart() -> None:
    new = BrokerConfig(listeners=(Listener(port=1884),))
    assert changed_keys(OLD, new) == ["listeners"]
    assert not is_reloadable("listeners")
    assert merge(OLD, new).listeners == OLD.listeners


def test_what_merges_is_what_is_called_reloadable() -> None:
    """After a merge, exactly the keys that need a restart still differ."""
    new = BrokerConfig(
        limits=Limits(max_qos=1),
        security=Security(connect_burst=1, verification_threads=9, allow_anonymous=True),
        persistence=Persistence(sync="os"),
        observability=Observability(http_host="0.0.0.0", top_n=1, log_format="json", sys_interval_seconds=1),
        server_reference="x",
        response_information="y",
        shutdown_timeout_seconds=1,
    )
    left = changed_keys(merge(OLD, new), new)
    assert left == [key for key in changed_keys(OLD, new) if not is_reloadable(key)]


def test_rules_of_topics_are_taken_over_and_the_log_is_not() -> None:
    persistence = Persistence(directory="d")
    old = BrokerConfig(persistence=persistence, topics=(TopicRule(topic="a"),))
    new = BrokerConfig(
        persistence=persistence, topics=(TopicRule(topic="b"),), topic_log=TopicLogSettings(segment_bytes=65_536)
    )
    assert changed_keys(old, new) == ["topics", "topic_log.segment_bytes"]
    assert [is_reloadable(key) for key in changed_keys(old, new)] == [True, False]
    merged = merge(old, new)
    assert merged.topics == new.topics
    assert merged.topic_log == old.topic_log
