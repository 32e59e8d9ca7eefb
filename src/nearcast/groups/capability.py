"""The leadership capability measure (LCM): how many messages a second a broker could relay for a group (section II-C).

The paper lets leader election "build on properties such as the compute power or the current bandwidth to the cloud broker".
Both bound the same thing, so the measure is one number with a meaning: messages a second, the lower of what the processor
manages and what fits on the way to the cloud. How either is measured is known elsewhere (:mod:`nearcast.broker.capability`).
"""

from __future__ import annotations

import math
from typing import Final

USUAL_MESSAGE_BYTES: Final = 256.0
"""Size of a message on the wire before any was seen."""

STEPS_PER_DOUBLING: Final = 2
"""Measures are rounded to this many steps for each factor of two. Two machines of a kind never measure the same to the digit,
and which of them does better by one percent is no reason to move a large group to the leader of a small one."""

SHARE_OF_NEWS: Final = 0.2
"""How much a new measurement counts against those before."""

HYSTERESIS: Final = 0.75
"""A step is left only by so much of one beyond it: a measurement on the border does not go to and fro."""


class Capability:
    """A broker's LCM as measurements come in. All rates are smoothed; what was never measured bounds nothing."""

    def __init__(self) -> None:
        self.cpu_messages_per_s = math.nan
        self.cloud_bytes_per_s = math.nan
        self.message_bytes = USUAL_MESSAGE_BYTES
        self._step = math.nan

    def processor(self, messages_per_s: float, idle_share: float) -> None:
        """So many messages a second is what one core could handle, and this share of it has nothing else to do."""
        self.cpu_messages_per_s = _smoothed(self.cpu_messages_per_s, messages_per_s * min(max(idle_share, 0.05), 1.0))

    def cloud(self, bytes_per_s: float) -> None:
        """So much fits on the way to the cloud."""
        if bytes_per_s > 0.0:
            self.cloud_bytes_per_s = _smoothed(self.cloud_bytes_per_s, bytes_per_s)

    def messages(self, count: int, size_bytes: int) -> None:
        """Messages of this size in all were seen."""
        if count > 0:
            self.message_bytes = _smoothed(self.message_bytes, size_bytes / count)

    def lcm(self) -> float:
        """The measure as of now; 1 before anything was measured: above 0, which says that a broker had better not lead."""
        bounds = [self.cpu_messages_per_s, self.cloud_bytes_per_s / max(self.message_bytes, 1.0)]
        known = [bound for bound in bounds if not math.isnan(bound)]
        if not known:
            return 1.0
        exact = STEPS_PER_DOUBLING * math.log2(max(min(known), 1.0))
        if math.isnan(self._step) or abs(exact - self._step) > HYSTERESIS:
            self._step = float(round(exact))
        return float(round(2.0 ** (self._step / STEPS_PER_DOUBLING)))


def _smoothed(before: float, news: float) -> float:
    return news if math.isnan(before) else before + SHARE_OF_NEWS * (news - before)
