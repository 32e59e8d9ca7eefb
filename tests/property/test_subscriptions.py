"""The subscription tree and the store of retained messages, each against the dumbest thing that could answer the same."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from nearcast.mqtt.effects import Effects
from nearcast.mqtt.publication import Publication, build
from nearcast.mqtt.retained import RetainedMessages
from nearcast.mqtt.session import Session
from nearcast.mqtt.subscriptions import Subscription, SubscriptionTree
from nearcast.mqtt.topics import filter_fault, matches, parse_shared, topic_fault

# A small alphabet, so that things meet: names that repeat, empty levels, and $ where it is special and where it is not.
_names = st.sampled_from(["a", "b", "", "$", "$x", "é"])
topics = st.lists(_names, min_size=1, max_size=4).map("/".join).filter(bool)
_filter_levels = st.sampled_from(["a", "b", "", "$", "$x", "é", "+", "+"])
filters = (
    st.tuples(st.lists(_filter_levels, max_size=4), st.sampled_from([[], ["#"]]))
    .map(lambda both: "/".join(both[0] + both[1]))
    .filter(bool)
)
shared = st.builds(lambda group, inner: f"$share/{group}/{inner}", st.sampled_from(["g", "h"]), filters)
clients = st.sampled_from(["c1", "c2", "c3"])


@given(topics, filters)
def test_the_strategies_draw_what_is_valid(topic: str, topic_filter: str) -> None:
    assert topic_fault(topic.encode(), 128) == ""
    assert filter_fault(topic_filter, 128) == ""


class Tree(RuleBasedStateMachine):
    """Random additions and removals; after each, every topic of a small world is matched both ways."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = SubscriptionTree()
        self.sessions = {name: Session(name, 1, Effects(False), 10, 10) for name in ("c1", "c2", "c3")}
        self.known: dict[tuple[str, str], Subscription] = {}
        self.topics: set[str] = {"a", "a/b", "/", "$x/a", "a/$x"}

    @rule(client=clients, topic_filter=filters | shared, qos=st.integers(0, 2))
    def add(self, client: str, topic_filter: str, qos: int) -> None:
        subscription = Subscription(self.sessions[client], topic_filter, qos)
        group, inner = parse_shared(topic_filter)
        before = self.tree.generation
        assert self.tree.add(group, inner, subscription) == ((client, topic_filter) not in self.known)
        assert self.tree.generation != before
        self.known[client, topic_filter] = subscription

    @rule(client=clients, topic_filter=filters | shared)
    def remove_any(self, client: str, topic_filter: str) -> None:
        group, inner = parse_shared(topic_filter)
        assert self.tree.remove(group, inner, client) == ((client, topic_filter) in self.known)
        self.known.pop((client, topic_filter), None)

    @rule(data=st.data())
    def remove_known(self, data: st.DataObject) -> None:
        if self.known:
            client, topic_filter = data.draw(st.sampled_from(sorted(self.known)))
            self.remove_any(client, topic_filter)

    @rule(topic=topics)
    def look_at(self, topic: str) -> None:
        self.topics.add(topic)

    @invariant()
    def answers_as_the_naive_matcher(self) -> None:
        assert self.tree.count == len(self.known)
        for topic in self.topics:
            plain = set()
            groups: dict[tuple[str, str], set[Subscription]] = {}
            for subscription in self.known.values():
                group, inner = parse_shared(subscription.topic_filter)
                if matches(inner, topic):
                    if group:
                        groups.setdefault((group, inner), set()).add(subscription)
                    else:
                        plain.add(subscription)
            found = self.tree.match(topic.encode())
            assert len(found.subscriptions) == len(plain)
            assert set(found.subscriptions) == plain
            assert len(found.groups) == len(groups)
            assert {(group.name, group.inner_filter): set(group.members.values()) for group in found.groups} == groups

    def teardown(self) -> None:
        for client, topic_filter in list(self.known):
            self.remove_any(client, topic_filter)
        # Nothing is left behind: an empty tree is one node.
        assert self.tree._root.is_empty()


TestTree = Tree.TestCase
TestTree.settings = settings(max_examples=80, stateful_step_count=30)


class Retained(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.store = RetainedMessages()
        self.known: dict[str, Publication] = {}

    @rule(topic=topics, payload=st.binary(max_size=5))
    def set(self, topic: str, payload: bytes) -> None:
        message = build(topic.encode(), payload, 0, True)
        self.store.set(topic.encode(), message)
        self.known[topic] = message

    @rule(topic=topics)
    def remove(self, topic: str) -> None:
        assert self.store.remove(topic.encode()) == (self.known.pop(topic, None) is not None)

    @rule(topic_filter=filters)
    def match(self, topic_filter: str) -> None:
        found = self.store.match(topic_filter)
        wanted = [message for topic, message in self.known.items() if matches(topic_filter, topic)]
        assert len(found) == len(wanted)
        assert set(found) == set(wanted)

    @rule(topic=topics)
    def get(self, topic: str) -> None:
        assert self.store.get(topic.encode()) is self.known.get(topic)

    @invariant()
    def counts(self) -> None:
        assert self.store.count == len(self.known)
        assert self.store.bytes == sum(len(message.packets) for message in self.known.values())
        assert set(self.store.all()) == set(self.known.values())


TestRetained = Retained.TestCase
TestRetained.settings = settings(max_examples=80, stateful_step_count=30)
