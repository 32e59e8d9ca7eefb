"""All that was reported of some topics, as what is decided on: the work of one task of Spark, and of the driver after it.

A task has every row of its topics (:mod:`.telemetry_tables`) and makes :class:`~nearcast.placement.topics.Topics` of them with
the functions that a controller uses. Samples are exact, so they take the place of the crowd that their broker reported: they
are summarised into one crowd a topic, which is merged with those of brokers that report crowds only.

Most topics are well where they are. :func:`is_pressing` says which could be part of a plan; a plan of these alone is the plan
of all (``tests/property/test_telemetry_pipeline.py``), so only they go to the driver.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nearcast.mqtt.topics import matches
from nearcast.pipeline.telemetry_tables import Samples, list_array, list_rows, split_rows
from nearcast.placement.gathering import Rows, topics_of
from nearcast.placement.policies import latency_violated, overloaded
from nearcast.placement.topics import UNOWNED, Fleet, PlacementSettings, Topics
from nearcast.telemetry.places import Floats, Mask, Places
from nearcast.telemetry.summaries import summarise_samples

MICROSECONDS: Final = 1_000_000
"""An epoch is when its owner was decided, in these."""

Bound = tuple[str, float]
"""A topic filter, and the bound of topics that it matches, in milliseconds."""

_TOTALS: Final = (
    "struct<topics: bigint, samples: bigint, refused: bigint, unreported: bigint, violated: bigint, unowned: bigint>"
)
SUMMARIES: Final = (
    "topic string, owner string, epoch bigint, bound_ms double, worst_ms double, deviation_ms double, rate double, "
    "producers bigint, producer_vector array<double>, producer_height double, producer_adjustment double, "
    "consumers bigint, consumer_vector array<double>, consumer_height double, consumer_adjustment double, "
    f"violated boolean, pressing boolean, totals {_TOTALS}"
)
"""A topic each; ``worst_ms`` is E(t), ``deviation_ms`` W(t). A row without a topic has the totals of a task."""


class Totals(msgspec.Struct, frozen=True):
    """What there was."""

    topics: int = 0
    samples: int = 0
    """Clients' parts in topics, one by one; 0 where brokers report crowds."""
    refused: int = 0
    """Samples whose coordinate is none."""
    unreported: int = 0
    """Samples of topics that no broker reported: nobody knows who owns them."""
    violated: int = 0
    unowned: int = 0
    """Topics whose owner does not report. They are left to the controller, which knows whether it lives."""

    def __add__(self, other: Totals) -> Totals:
        return Totals(*(mine + theirs for mine, theirs in zip(_counts(self), _counts(other), strict=True)))


def _counts(totals: Totals) -> tuple[int, ...]:
    return msgspec.structs.astuple(totals)


def gather(table: pa.Table, fleet: Fleet, bounds: Sequence[Bound] = ()) -> tuple[Topics, Totals]:
    """Topics of all these rows, each topic's rows being complete. Owners are rows of ``fleet``."""
    reports, samples, refused = split_rows(table)
    topics = topics_of([reports], fleet, {})
    unreported = 0
    if len(samples):
        crowds, unreported = _crowds_of_samples(samples, topics, fleet)
        topics = topics_of([reports, crowds], fleet, {})
    if bounds:
        topics.bound_ms = np.array([_bound(name, bounds, given) for name, given in _bounded(topics)], np.float64)
    topics.moved_at = topics.epochs / MICROSECONDS
    totals = Totals(
        len(topics),
        len(samples) - unreported,
        refused,
        unreported,
        int(latency_violated(topics).sum()),
        int((topics.owner == UNOWNED).sum()),
    )
    return topics, totals


def _crowds_of_samples(samples: Samples, topics: Topics, fleet: Fleet) -> tuple[Rows, int]:
    """One crowd a topic and role, and how many samples belong to no topic that was reported."""
    found = pc.index_in(samples.topics, value_set=pa.array(topics.names, pa.string()))
    roles, places, unreported = samples.roles, samples.places, found.null_count
    if unreported:
        known = found.is_valid().to_numpy(zero_copy_only=False)
        found, roles, places = found.drop_null(), roles[known], places.rows(known)
    # A broker that is not usable may have no coordinate; row 0 stands in where there is no owner, and is masked.
    owner_known = (topics.owner != UNOWNED) & fleet.usable[topics.owner] if len(fleet) else np.zeros(len(topics), np.bool_)
    owners = fleet.places.rows(np.maximum(topics.owner, 0)) if len(fleet) else Places.empty(len(topics))
    summaries = summarise_samples(found.to_numpy(), roles, places, owners, owner_known)
    names = [fleet.names[owner] if owner != UNOWNED else "" for owner in topics.owner.tolist()]
    rows = Rows(list(topics.names), names, topics.epochs, summaries.producers, summaries.consumers, np.zeros(len(topics)))
    return rows, int(unreported)


def _bounded(topics: Topics) -> Iterator[tuple[str, float]]:
    return zip(topics.names, topics.bound_ms.tolist(), strict=True)


def _bound(name: str, bounds: Sequence[Bound], given: float) -> float:
    """The first rule that matches counts, as in the brokers' own; none: what was reported."""
    for topic_filter, bound_ms in bounds:
        if matches(topic_filter, name):
            return bound_ms
    return given


def is_pressing(topics: Topics, fleet: Fleet, settings: PlacementSettings) -> Mask:
    """Topics that a plan may move: those above their bound, and all of a broker that has too much. Not those whose owner
    does not report: it may be well, and only the controller knows."""
    pressing = latency_violated(topics)
    if len(fleet):
        over = overloaded(fleet, settings) | fleet.leaving
        pressing |= over[topics.owner]
    pressing &= topics.owner != UNOWNED
    return pressing


def summariser(
    fleet: Fleet, settings: PlacementSettings, bounds: Sequence[Bound], *, everything: bool
) -> Callable[[Iterable[Any]], Iterator[Any]]:
    """For ``mapInArrow`` over rows that are together by topic: :data:`SUMMARIES` of all topics, or of pressing ones."""

    def summarise(batches: Iterable[Any]) -> Iterator[Any]:
        parts = list(batches)
        if not parts:
            return
        table = pa.Table.from_batches(parts)
        del parts
        topics, totals = gather(table, fleet, bounds)
        del table
        pressing = is_pressing(topics, fleet, settings)
        chosen = np.arange(len(topics)) if everything else np.flatnonzero(pressing)
        yield to_batch(topics, fleet, pressing, chosen, totals)

    return summarise


def to_batch(topics: Topics, fleet: Fleet, pressing: Mask, chosen: Any, totals: Totals) -> pa.RecordBatch:
    """The chosen rows as :data:`SUMMARIES`, and a last one with the totals."""
    owners = [fleet.names[owner] if owner != UNOWNED else "" for owner in topics.owner[chosen].tolist()]
    columns = {
        "topic": pa.array([topics.names[row] for row in chosen.tolist()], pa.string()),
        "owner": pa.array(owners, pa.string()),
        "epoch": pa.array(topics.epochs[chosen]),
        "bound_ms": pa.array(topics.bound_ms[chosen]),
        "worst_ms": pa.array(topics.worst_ms[chosen]),
        "deviation_ms": pa.array(topics.deviation_ms[chosen]),
        "rate": pa.array(topics.rate[chosen]),
        **_side("producer", topics.producers, topics.producer_counts, chosen),
        **_side("consumer", topics.consumers, topics.consumer_counts, chosen),
        "violated": pa.array(latency_violated(topics)[chosen]),
        "pressing": pa.array(pressing[chosen]),
    }
    last = {name: pa.nulls(1, column.type) for name, column in columns.items()}
    counted = pa.array([msgspec.to_builtins(totals)])
    together = {name: pa.concat_arrays([column, last[name]]) for name, column in columns.items()}
    together["totals"] = pa.concat_arrays([pa.nulls(len(chosen), counted.type), counted])
    return pa.RecordBatch.from_pydict(together)


def _side(name: str, places: Places, counts: Any, chosen: Any) -> dict[str, pa.Array]:
    return {
        f"{name}s": pa.array(counts[chosen]),
        f"{name}_vector": list_array(places.vectors[chosen]),
        f"{name}_height": pa.array(places.heights[chosen]),
        f"{name}_adjustment": pa.array(places.adjustments[chosen]),
    }


def from_table(table: pa.Table, fleet: Fleet) -> tuple[Topics, Totals]:
    """What tasks made, put together: topics in the order of their names, whichever task had them; and all totals."""
    counted = table.filter(pc.is_valid(table.column("totals"))).column("totals")
    totals = Totals()
    for each in counted.to_pylist():
        totals += Totals(**each)
    table = table.filter(pc.is_null(table.column("totals"))).sort_by("topic").combine_chunks()
    positions = {name: row for row, name in enumerate(fleet.names)}
    owner = np.array([positions.get(name, UNOWNED) for name in table.column("owner").to_pylist()], np.int64)
    epochs = table.column("epoch").to_numpy()
    topics = Topics(
        table.column("topic").to_pylist(),
        _places(table, "producer"),
        table.column("producers").to_numpy(),
        _places(table, "consumer"),
        table.column("consumers").to_numpy(),
        deviation_ms=_column(table, "deviation_ms"),
        worst_ms=_column(table, "worst_ms"),
        bound_ms=_column(table, "bound_ms"),
        owner=owner,
        rate=_column(table, "rate"),
        moved_at=epochs / MICROSECONDS,
        epochs=epochs,
    )
    return topics, totals


def _places(table: pa.Table, name: str) -> Places:
    lists = table.column(f"{name}_vector")
    vectors, _ = list_rows(pa.concat_arrays(lists.chunks) if lists.num_chunks else pa.array([], lists.type))
    return Places(vectors, _column(table, f"{name}_height"), _column(table, f"{name}_adjustment"))


def _column(table: pa.Table, name: str) -> Floats:
    floats: Floats = table.column(name).to_numpy().copy()
    return floats
