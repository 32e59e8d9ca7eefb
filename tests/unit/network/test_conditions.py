"""Conditions: what is refused, and how they are said."""

from __future__ import annotations

import math

import msgspec
import pytest

from nearcast.network.conditions import Conditions


def test_words() -> None:
    everything = Conditions(latency_ms=1, jitter_ms=2, loss=0.5, bandwidth_mbps=3, reorder=0.01, duplicate=0.02)
    assert everything.described() == "1 ms, ± 2 ms normal, 50 % loss, 3 Mb/s, 1 % reordered, 2 % doubled"
    assert Conditions(latency_ms=12.5).described() == "12.5 ms"


@pytest.mark.parametrize("field", ["latency_ms", "jitter_ms", "bandwidth_mbps", "queue_ms"])
@pytest.mark.parametrize("value", [-1.0, math.inf, math.nan])
def test_amounts_are_finite_and_not_negative(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"`{field}`"):
        msgspec.convert({field: value}, Conditions)


@pytest.mark.parametrize("field", ["loss", "reorder", "duplicate"])
@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan])
def test_shares_are_between_nothing_and_all(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"`{field}`"):
        msgspec.convert({field: value}, Conditions)
