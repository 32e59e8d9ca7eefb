"""A moving median: what a path usually takes, of samples that met queues now and then (Ledlie et al., NSDI 2007)."""

from __future__ import annotations


class MovingMedian:
    """The median of the last ``size`` samples; of an even number of them the lower one, since queues only add."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._samples: list[float] = []

    def add(self, sample: float) -> float:
        """One more sample; returns the median with it."""
        samples = self._samples
        samples.append(sample)
        if len(samples) > self._size:
            del samples[0]
        return self.value()

    def value(self) -> float:
        """The median; there has to be a sample."""
        ordered = sorted(self._samples)
        return ordered[(len(ordered) - 1) // 2]
