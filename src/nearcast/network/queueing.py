"""Bandwidth and order of one direction of a link, for packets that are announced ahead of time and out of turn.

A packet's whole way is computed at the moment it is sent. So the last link of a path hears of a packet that comes from afar
(and gets here in 100 ms) before it hears of one from next door that is sent later and gets here sooner. Handling them in the
order of hearing would make the near one wait for the far one. Both classes below therefore keep what is booked in the future,
ordered by time on the link, and let a packet take the place its own time gives it. What lies before ``now`` is forgotten:
nothing can arrive at the link there any more.

Times are seconds. ``now`` must not go back; a packet's time on the link is ``now`` or later.
"""

from __future__ import annotations

from typing import Final

from mypy_extensions import i64

REFUSED: Final = -1.0

_COMPACT_AT: Final = 64


def _after(times: list[float], moment: float, first: i64) -> i64:
    """Position in ``times``, sorted from ``first`` on, of the first one later than ``moment``."""
    low: i64 = first
    high: i64 = len(times)
    while low < high:
        middle: i64 = (low + high) >> 1
        if times[middle] <= moment:
            low = middle + 1
        else:
            high = middle
    return low


class Transmitter:
    """Sends one bit at a time. A packet takes what capacity is free from its arrival at the link on.

    Busy time is a list of intervals. A packet that finds some of the time after its arrival taken uses the gaps, also piece by
    piece: that keeps the capacity exact over every window, wastes none, and lets no packet finish before one that was there
    first, because the earlier one has taken all there was in between.
    """

    def __init__(self) -> None:
        # The last interval is kept apart: almost every packet only touches that one.
        self._start = 0.0
        self._end = 0.0
        self._starts: list[float] = []
        self._ends: list[float] = []
        self._head: i64 = 0

    def book(self, arrival: float, duration: float, patience: float, now: float) -> float:
        """When the last bit has left; :data:`REFUSED`, nothing booked, if the packet would wait longer than ``patience``."""
        if arrival >= self._end:
            if self._end > now:  # someone may still come in before it
                self._keep(now)
            self._start = arrival
            self._end = arrival + duration
            return self._end
        if arrival >= self._start:
            if self._end - arrival > patience:
                return REFUSED
            self._end += duration
            return self._end
        return self._book_between(arrival, duration, patience)

    def busy_until(self) -> float:
        """When everything booked so far has left."""
        return self._end

    def _keep(self, now: float) -> None:
        starts = self._starts
        ends = self._ends
        head = self._head
        booked: i64 = len(ends)
        while head < booked and ends[head] <= now:
            head += 1
        if head >= _COMPACT_AT and head * 2 >= booked:
            del starts[:head]
            del ends[:head]
            head = 0
        self._head = head
        starts.append(self._start)
        ends.append(self._end)

    def _book_between(self, arrival: float, duration: float, patience: float) -> float:
        starts = self._starts
        ends = self._ends
        booked: i64 = len(ends)
        first = _after(ends, arrival, self._head)
        start = arrival
        if first < booked and starts[first] < arrival:
            start = starts[first]
        # Walk over the intervals from `first` on, spending `left` in the gaps before each; the kept-apart one comes last.
        moment = arrival
        left = duration
        position = first
        while position <= booked:
            next_start = starts[position] if position < booked else self._start
            next_end = ends[position] if position < booked else self._end
            if moment < next_start:
                gap = next_start - moment
                if gap >= left:
                    break
                left -= gap
            moment = next_end
            position += 1
        finish = moment + left
        if finish - duration - arrival > patience:
            return REFUSED
        # Everything from `start` to `finish` is busy now: one interval.
        if position > booked:
            del starts[first:]
            del ends[first:]
            self._start = start
            self._end = finish
        else:
            starts[first:position] = [start]
            ends[first:position] = [finish]
        return finish


class Sequencer:
    """Keeps packets in the order in which they set out, however much time each was given."""

    def __init__(self) -> None:
        self._departure = 0.0
        self._arrival = 0.0
        self._departures: list[float] = []
        self._arrivals: list[float] = []
        self._head: i64 = 0
        self._floor = 0.0
        """Arrival of the last packet that is forgotten."""

    def order(self, departure: float, arrival: float, now: float) -> float:
        """``arrival``, moved as little as possible so that nobody overtakes anybody."""
        if departure >= self._departure:
            if arrival < self._arrival:
                arrival = self._arrival
            if self._departure > now:  # someone may still set out before it
                self._keep(now)
            else:
                self._floor = self._arrival
                self._head = len(self._departures)
            self._departure = departure
            self._arrival = arrival
            return arrival
        return self._order_between(departure, arrival)

    def _keep(self, now: float) -> None:
        departures = self._departures
        arrivals = self._arrivals
        head = self._head
        known: i64 = len(departures)
        while head < known and departures[head] <= now:
            self._floor = arrivals[head]
            head += 1
        if head >= _COMPACT_AT and head * 2 >= known:
            del departures[:head]
            del arrivals[:head]
            head = 0
        self._head = head
        departures.append(self._departure)
        arrivals.append(self._arrival)

    def _order_between(self, departure: float, arrival: float) -> float:
        departures = self._departures
        arrivals = self._arrivals
        position = _after(departures, departure, self._head)
        lower = arrivals[position - 1] if position > self._head else self._floor
        upper = arrivals[position] if position < len(arrivals) else self._arrival
        # Never too early for the packet's own latency: the one ahead of which it is put set out later and needs as long.
        if arrival > upper:
            arrival = upper
        if arrival < lower:
            arrival = lower
        departures.insert(position, departure)
        arrivals.insert(position, arrival)
        return arrival
