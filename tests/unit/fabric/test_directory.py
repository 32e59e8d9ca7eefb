"""The directory of owners: compare-and-set, brokers' claims, and what is forgotten."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nearcast.fabric.directory import OwnerDirectory
from nearcast.fabric.owner_records import Owner


def test_who_decides_on_old_knowledge_is_told_the_truth() -> None:
    directory = OwnerDirectory()
    first = directory.compare_and_set(0, Owner("t", 10, "b1"))
    assert directory.find("t") == first == Owner("t", 10, "b1")
    assert directory.compare_and_set(0, Owner("t", 20, "b2")) == first, "it is owned by now"
    assert directory.compare_and_set(9, Owner("t", 20, "b2")) == first
    assert directory.compare_and_set(10, Owner("t", 10, "b2")) == first, "epochs rise"
    assert directory.compare_and_set(10, Owner("t", 20, "b2")) == Owner("t", 20, "b2")
    assert directory.topics_of("b1") == []
    assert directory.topics_of("b2") == ["t"]


# semantics: N19
def test_of_two_that_decide_at_the_same_moment_one_succeeds() -> None:
    directory = OwnerDirectory()
    directory.learn(Owner("t", 5, "b0"))
    outcomes = [directory.compare_and_set(5, Owner("t", epoch, name)) for epoch, name in ((7, "b1"), (8, "b2"))]
    assert outcomes == [Owner("t", 7, "b1")] * 2


def test_the_highest_epoch_that_a_broker_claims_holds() -> None:
    directory = OwnerDirectory()
    assert directory.learn(Owner("t", 5, "b1")) == Owner("t", 5, "b1")
    assert directory.learn(Owner("t", 4, "b2")) == Owner("t", 5, "b1")
    assert directory.learn(Owner("t", 6, "b2")) == Owner("t", 6, "b2")


def test_a_topic_is_given_up_by_its_owner_only() -> None:
    directory = OwnerDirectory()
    directory.learn(Owner("t", 5, "b1"))
    assert not directory.give_up("t", "b2", 5)
    assert not directory.give_up("t", "b1", 4), "it has it anew since"
    assert not directory.give_up("unknown", "b1", 4)
    assert directory.give_up("t", "b1", 5)
    assert (directory.find("t"), len(directory), directory.count_of("b1")) == (None, 0, 0)


def test_epochs_are_the_wall_clock_and_rise_whatever_that_does() -> None:
    directory = OwnerDirectory()
    assert directory.next_epoch(2.0) == 2_000_000
    assert directory.next_epoch(1.0) == 2_000_001, "the clock was set back"
    assert directory.next_epoch(1.0, above=5_000_000) == 5_000_001
    directory.learn(Owner("t", 9_000_000, "b1"))
    assert directory.next_epoch(3.0) == 9_000_001, "above all that were seen"


def test_a_directory_that_is_full_says_so_and_keeps_what_it_has() -> None:
    directory = OwnerDirectory(max_topics=1)
    directory.learn(Owner("a", 5, "b1"))
    assert directory.compare_and_set(0, Owner("b", 6, "b1")) == Owner("b", 0, "")
    assert directory.learn(Owner("c", 6, "b1")) == Owner("c", 0, "")
    assert directory.full == 2
    assert directory.learn(Owner("a", 7, "b2")) == Owner("a", 7, "b2")


TOPICS = st.sampled_from(["a", "b"])
BROKERS = st.sampled_from(["b1", "b2", "b3"])
EPOCHS = st.integers(1, 6)
STEPS = st.one_of(
    st.tuples(st.just("learn"), TOPICS, BROKERS, EPOCHS, EPOCHS),
    st.tuples(st.just("set"), TOPICS, BROKERS, EPOCHS, st.integers(0, 6)),
    st.tuples(st.just("give up"), TOPICS, BROKERS, EPOCHS, EPOCHS),
)


# semantics: N19
@given(st.lists(STEPS, max_size=40))
def test_whatever_is_said_epochs_of_a_topic_rise_and_everybody_has_what_the_directory_says(
    steps: list[tuple[str, str, str, int, int]],
) -> None:
    directory = OwnerDirectory()
    for step, topic, broker, epoch, expected in steps:
        before = directory.find(topic)
        if step == "learn":
            directory.learn(Owner(topic, epoch, broker))
        elif step == "set":
            after = directory.compare_and_set(expected, Owner(topic, epoch, broker))
            held = 0 if before is None else before.epoch
            refused = before if before is not None else Owner(topic, 0, "")
            assert after == (Owner(topic, epoch, broker) if held == expected and epoch > held else refused)
        else:
            directory.give_up(topic, broker, epoch)
        now = directory.find(topic)
        assert before is None or now is None or now.epoch >= before.epoch
        for owner in directory.owners():
            assert owner.topic in directory.topics_of(owner.owner)
        assert sum(directory.count_of(name) for name in ("b1", "b2", "b3")) == len(directory)
