"""Filters at the cloud against the plain reading of section 4.7, topic by topic, over all topics of a small world."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from nearcast.fabric.cloud_collapse import Collapsed
from nearcast.fabric.cloud_filters import CloudFilters, FilterTree, disjoint, generalization, intersection
from nearcast.mqtt.topics import filter_fault, matches

NAMES = ("a", "b", "", "$s")
TOPICS = [
    topic
    for size in (1, 2, 3)
    for levels in itertools.product(NAMES, repeat=size)
    if (topic := "/".join(levels)) and "$s" not in levels[1:]
]


def is_filter(text: str) -> bool:
    return not filter_fault(text, 10)


FILTERS = (
    st.builds(
        lambda levels, tail: "/".join([*levels, *tail]),
        st.lists(st.sampled_from((*NAMES, "+")), max_size=2),
        st.sampled_from(([], ["#"], ["+"], ["a"])),
    )
    .filter(is_filter)
    .filter(lambda text: "$s" not in text.split("/")[1:])
    .filter(lambda text: text != "/#")  # it overlaps + in the empty topic, which nobody can publish to
)
SETS = st.dictionaries(FILTERS, st.integers(0, 2), max_size=6)


def topics_of(topic_filter: str) -> set[str]:
    return {topic for topic in TOPICS if matches(topic_filter, topic)}


@given(FILTERS, FILTERS)
def test_an_intersection_matches_what_both_match(one: str, other: str) -> None:
    common = intersection(one, other)
    assert common == "" or is_filter(common)
    assert (topics_of(common) if common else set()) == topics_of(one) & topics_of(other)


@given(FILTERS, FILTERS)
def test_a_generalization_matches_what_either_matches(one: str, other: str) -> None:
    if intersection(one, other):
        assert topics_of(generalization(one, other)) >= topics_of(one) | topics_of(other)


@given(st.sets(FILTERS, max_size=6), FILTERS)
def test_a_tree_finds_what_covers_and_what_overlaps(filters: set[str], asked: str) -> None:
    tree = FilterTree()
    for topic_filter in filters:
        tree.add(topic_filter)
    others = [one for one in filters if one != asked]
    cover = tree.covering(asked, asked)
    if cover:
        assert topics_of(cover) >= topics_of(asked)
    overlap = tree.overlapping(asked)
    assert bool(overlap) == any(intersection(one, asked) for one in others)
    for topic in TOPICS[:60]:
        assert tree.matches(topic) == any(matches(one, topic) for one in filters)


@given(st.lists(FILTERS, max_size=6), FILTERS)
def test_a_tree_forgets_what_is_removed(filters: list[str], removed: str) -> None:
    tree = FilterTree()
    for topic_filter in filters:
        tree.add(topic_filter)
    tree.remove(removed)
    left = [one for one in filters if one != removed]
    for topic in TOPICS:
        assert tree.matches(topic) == any(matches(one, topic) for one in left)


@given(st.sets(FILTERS, max_size=8), FILTERS)
def test_a_tree_lists_what_a_filter_covers_and_overlaps(filters: set[str], asked: str) -> None:
    tree = FilterTree()
    for topic_filter in filters:
        tree.add(topic_filter)
    others = {one for one in filters if one != asked}
    assert sorted(tree.all_overlapping(asked)) == sorted(one for one in others if intersection(one, asked))
    covered = tree.covered_by(asked)
    assert len(covered) == len(set(covered))
    assert set(covered) == {one for one in others if intersection(one, asked) == one} - {"#"} | (
        {"#"} & others if asked == "#" else set()
    )


def collapsed(filters: dict[str, int]) -> Collapsed:
    made = Collapsed()
    for topic_filter, qos in filters.items():
        made.put(topic_filter, qos)
    return made


def check(made: Collapsed, filters: dict[str, int]) -> None:
    """That what is left is enough, no more than that, and known for what it is."""
    found = made.tops()
    for topic in TOPICS:
        wanted = [qos for one, qos in filters.items() if matches(one, topic)]
        got = [qos for one, qos in found.items() if matches(one, topic)]
        assert bool(wanted) == bool(got)
        if wanted:
            assert max(got) >= max(wanted)
    assert max(found.values(), default=0) == max(filters.values(), default=0)
    assert set(found) <= set(filters)
    for one, other in itertools.permutations(found, 2):
        assert not topics_of(one) <= topics_of(other) or not topics_of(one)
    assert made.overlapping == {one for one in found if any(other != one and intersection(one, other) for other in found)}
    assert all(made.qos(one) == qos for one, qos in found.items())


@given(SETS)
def test_collapsing_changes_nothing_but_the_number(filters: dict[str, int]) -> None:
    check(collapsed(filters), filters)


@settings(max_examples=50)
@given(st.lists(st.tuples(FILTERS, st.integers(-1, 2)), max_size=12))
def test_collapsing_change_by_change(changes: list[tuple[str, int]]) -> None:
    """-1 drops a filter. What is said to have changed is enough to keep a copy up to date."""
    made = Collapsed()
    filters: dict[str, int] = {}
    copy: dict[str, tuple[int, bool]] = {}
    for topic_filter, qos in changes:
        if qos >= 0:
            made.put(topic_filter, qos)
            filters[topic_filter] = qos
        elif topic_filter in filters:
            made.drop(topic_filter)
            del filters[topic_filter]
        check(made, filters)
        for changed in made.changed:
            if made.qos(changed) < 0:
                copy.pop(changed, None)
            else:
                copy[changed] = (made.qos(changed), changed in made.overlapping)
        made.changed.clear()
        assert copy == {one: (found, one in made.overlapping) for one, found in made.tops().items()}


@given(SETS)
def test_disjoint_filters_do_not_overlap_and_miss_nothing(filters: dict[str, int]) -> None:
    found = disjoint(collapsed(filters).tops())
    for one, other in itertools.combinations(found, 2):
        assert not intersection(one, other)
    for one, qos in filters.items():
        for topic in topics_of(one):
            assert any(matches(wide, topic) and found[wide] >= qos for wide in found)


@given(st.lists(st.tuples(FILTERS, st.integers(0, 2)), max_size=12), st.lists(FILTERS, min_size=1, max_size=3), st.data())
def test_counting_is_the_same_as_starting_over(held: list[tuple[str, int]], rules: list[str], data: st.DataObject) -> None:
    counted = CloudFilters(rules)
    for topic_filter, qos in held:
        counted.add(topic_filter, qos)
    gone = data.draw(st.integers(0, len(held)))
    for topic_filter, qos in held[:gone]:
        counted.remove(topic_filter, qos)
    fresh = CloudFilters(rules)
    for topic_filter, qos in held[gone:]:
        fresh.add(topic_filter, qos)
    assert counted.wanted() == fresh.wanted()


@given(
    st.lists(st.tuples(FILTERS, st.integers(0, 2), st.booleans()), max_size=20),
    st.lists(st.lists(FILTERS, min_size=1, max_size=3), min_size=1, max_size=3),
)
def test_changes_keep_a_copy_up_to_date(held: list[tuple[str, int, bool]], rules: list[list[str]]) -> None:
    """However many of them are taken at once, and whatever was added and removed in between."""
    counted = CloudFilters(rules[0])
    copy: dict[str, int] = {}
    for place, (topic_filter, qos, taken) in enumerate(held):
        counted.add(topic_filter, qos)
        if place % 3 == 2:
            counted.remove(topic_filter, qos)
        if place % 5 == 4:
            counted.set_rules(rules[place % len(rules)])
        if taken:
            for changed, wanted in counted.take_changes().items():
                if wanted < 0:
                    copy.pop(changed, None)
                else:
                    copy[changed] = wanted
            assert copy == counted.wanted()
            assert counted.take_changes() == {}
