"""What messages between brokers are sent for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearcast.fabric import errands

Names = st.text(st.characters(min_codepoint=33, max_codepoint=0x2FF), min_size=1, max_size=20)
Numbers = st.integers(0, 2**63)
Rests = st.sampled_from(["", "\0", "\0$share/group/a/+", "\0\6$share/group/a/+\0$share/other/#"])


@given(Numbers, Rests)
def test_flooded(view: int, rest: str) -> None:
    via = errands.flooded(view) + rest
    assert errands.is_errand(via)
    assert errands.without_errand(via) == rest
    errand = errands.parse(via)
    assert (errand.kind, errand.view, errand.rest) == (errands.FLOODED, view, rest)


@given(Numbers, Numbers, Rests)
def test_pushed(turn: int, view: int, rest: str) -> None:
    errand = errands.parse(errands.pushed(turn, view) + rest)
    assert (errand.kind, errand.turn, errand.view, errand.rest) == (errands.PUSHED, turn, view, rest)


@given(Names, Numbers, Numbers, st.one_of(st.just(""), Names), Rests)
def test_carried(origin: str, epoch: int, sequence: int, relayed_by: str, rest: str) -> None:
    errand = errands.parse(errands.carried(origin, epoch, sequence, relayed_by) + rest)
    assert errand.kind == errands.CARRIED
    assert (errand.origin, errand.epoch, errand.sequence) == (origin, epoch, sequence)
    assert (errand.relayed_by, errand.rest) == (relayed_by, rest)


@pytest.mark.parametrize("via", ["", "\0", "\0$share/g/a", "$share/g/a", "\1$share/g/a"])
def test_what_is_sent_for_shared_or_plain_subscribers_is_no_errand(via: str) -> None:
    assert not errands.is_errand(via)
    assert errands.without_errand(via) == via


@pytest.mark.parametrize("via", ["\0029", "\2nine\5", "\3\5", "\3 9\5", "\4\5", "\4a b \7c\5", "\4x y z\5", "\1\5"])
def test_what_makes_no_sense_is_refused(via: str) -> None:
    with pytest.raises(ValueError, match=r"messages|literal"):
        errands.parse(via)
