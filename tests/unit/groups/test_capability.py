"""The leadership capability measure as arithmetic."""

from __future__ import annotations

import math

import pytest

from nearcast.groups.capability import USUAL_MESSAGE_BYTES, Capability


def test_before_anything_is_measured_it_is_one() -> None:
    assert Capability().lcm() == 1.0


def test_it_is_the_lower_of_what_processor_and_network_bear() -> None:
    capability = Capability()
    capability.processor(65_536.0, 1.0)
    assert capability.lcm() == 65_536.0
    capability.cloud(1_024.0 * USUAL_MESSAGE_BYTES)
    assert capability.lcm() == 1_024.0


def test_large_messages_make_the_network_the_bound() -> None:
    small, large = Capability(), Capability()
    for capability, size in ((small, 64), (large, 65_536)):
        capability.processor(65_536.0, 1.0)
        capability.cloud(4_194_304.0)
        for _ in range(60):
            capability.messages(100, 100 * size)
    assert small.lcm() == 65_536.0
    assert large.lcm() == 64.0


def test_a_busy_machine_counts_for_less_but_never_for_nothing() -> None:
    busy = Capability()
    busy.processor(65_536.0, 0.25)
    assert busy.lcm() == 16_384.0
    overloaded = Capability()
    overloaded.processor(65_536.0, -3.0)
    assert overloaded.lcm() >= 1.0


def test_machines_of_a_kind_measure_the_same() -> None:
    measures = set()
    for percent in range(-4, 5):
        capability = Capability()
        capability.processor(65_536.0 * (1 + percent / 100), 1.0)
        measures.add(capability.lcm())
    assert measures == {65_536.0}


def test_a_measurement_on_a_border_does_not_go_to_and_fro() -> None:
    capability = Capability()
    border = 2.0 ** (16 + 0.25)
    measures = []
    for turn in range(200):
        capability.processor(border * (1.05 if turn % 2 else 0.95), 1.0)
        measures.append(capability.lcm())
    assert len(set(measures)) == 1


def test_a_lasting_change_is_followed() -> None:
    capability = Capability()
    capability.cloud(65_536.0 * USUAL_MESSAGE_BYTES)
    assert capability.lcm() == 65_536.0
    for _ in range(60):
        capability.cloud(1_024.0 * USUAL_MESSAGE_BYTES)
    assert capability.lcm() == pytest.approx(1_024.0)


def test_what_is_no_measurement_changes_nothing() -> None:
    capability = Capability()
    capability.cloud(0.0)
    capability.messages(0, 0)
    assert math.isnan(capability.cloud_bytes_per_s)
    assert capability.message_bytes == USUAL_MESSAGE_BYTES
