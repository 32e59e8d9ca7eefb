"""How far other brokers are: pings, moving averages, and which leader is nearest (Hasenburg et al., section II-C).

What :class:`~nearcast.groups.formation.Formation` asks its neighbours for, measured. Whom to measure comes from the board of
announced leaders, from what views and notices say of addresses, and from what the formation asks about; pings are sent and
answered by whoever is the :class:`Pinger` (:class:`~nearcast.membership.monitoring.Monitor`). Sockets and clocks are unknown
here. *Latency* is one way, in milliseconds: half of the round trip, as in the paper's broker, and the mean of the last
``window`` answers.

==========  ============================================================  ==================================================
a broker    is one                                                        and is pinged
==========  ============================================================  ==================================================
new         that has not answered :data:`LEAST_PINGS` times               again soon after each answer
near        below twice the join threshold; or this broker's leader, or   every ``ping_interval_s``
            one that the formation asked about a moment ago
far         all others that answer                                        rarely: about every :data:`FAR_INTERVAL_S`
silent      that has answered nothing for ``fail_after_s``                less and less often, down to as rarely as a far one
beyond      whose position light in fibre does not reach in time          never
==========  ============================================================  ==================================================

A leader measures all leaders, so N leaders would send N² pings: those that are far cost next to nothing, and no broker sends
more than :data:`PINGS_PER_S`, however many there are. A member measures its leader, and whom it thinks of joining.

One ping can be wrong by any amount: it waited for a processor, or for a name to be resolved. So a broker counts as near only
after a few answers, and an average never mixes answers from before and after a silence, or from when it was far.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Collection, Sequence
from typing import Final, Protocol

from nearcast.groups.thresholds import Thresholds

FOREVER: Final = math.inf

LEAST_PINGS: Final = 3
"""Answers before a latency counts that a group may be formed on."""

BURST_INTERVAL_S: Final = 0.1
"""How long after an answer a new broker is pinged again."""

FAR_INTERVAL_S: Final = 60.0
"""How often a far broker is pinged. The weather of the network does not bring it near; a new route, or a move, may."""

PINGS_PER_S: Final = 500.0
"""More pings than this a broker does not send: 60 bytes each way, so about 0.25 Mbit/s."""

PINGS_BEFORE_SILENCE: Final = 10.0
"""A near broker that does not answer is pinged so often until it counts as silent: with half of the pings and answers lost,
that is wrong once in a thousand times."""

ASKED_FOR_S: Final = 10.0
"""A broker that the formation asked about is measured like a near one for so long."""

NEAR_FACTOR: Final = 2.0
"""Below this many join thresholds a broker is near."""

SWEEP_S: Final = 10.0
"""When there are too many, who need not be remembered is looked for as rarely as this."""

FIBRE_KM_PER_MS: Final = 204.19
"""Speed of light in fibre: 299.79 km/ms in a vacuum, divided by the refractive index of the usual glass, 1.4682. Cables are
not shorter than the shortest way on the ground, so no path in fibre is faster. (One by radio could be, by a third.)"""

LEAST_RADIUS_KM: Final = 6_335.4
"""The least radius of curvature that the Earth has anywhere (at the equator, northwards): between two latitudes and longitudes
no way on the ground is shorter than on a sphere of this size."""


class Announced(Protocol):
    """What a leader says of itself, as far as measuring is concerned."""

    @property
    def name(self) -> str: ...
    @property
    def address(self) -> str: ...
    @property
    def probe_address(self) -> str: ...
    @property
    def threshold_ms(self) -> float: ...
    @property
    def position(self) -> tuple[float, float] | None: ...


class Board(Protocol):
    """Leaders that announce themselves. ``version`` rises when one comes, goes, or says something else of itself."""

    @property
    def version(self) -> int: ...
    def announced(self) -> Sequence[Announced]: ...


class Answers(Protocol):
    """Who wants to hear of answers."""

    def ponged(self, name: str, round_trip_ms: float, now: float) -> None: ...


class Pinger(Protocol):
    """Sends pings, and tells whoever listens of the answers."""

    def listen(self, answers: Answers) -> None: ...
    def ping(self, name: str, address: str, now: float) -> None: ...
    def tick(self, now: float) -> None: ...
    def next_deadline(self) -> float: ...


class LatencySettings:
    """How often is measured, and what counts. Meanings as in ``[fabric.groups]``."""

    def __init__(
        self,
        ping_interval_s: float = 1.0,
        window: int = 20,
        fail_after_s: float = 5.0,
        position: tuple[float, float] | None = None,
        max_brokers: int = 32_768,
    ) -> None:
        self.ping_interval_s = ping_interval_s
        self.window = window
        self.fail_after_s = fail_after_s
        self.position = position
        self.max_brokers = max_brokers
        """That are remembered at most: more than there can be leaders of a region."""


def least_latency_ms(one: tuple[float, float] | None, other: tuple[float, float] | None) -> float:
    """What physics allows one way between two positions (latitude and longitude in degrees); 0 if one is unknown.

    A bound, not an estimate: whoever is farther than a threshold by this alone is farther in fact.
    """
    if one is None or other is None:
        return 0.0
    latitude, longitude = math.radians(one[0]), math.radians(one[1])
    other_latitude, other_longitude = math.radians(other[0]), math.radians(other[1])
    chord = (
        math.sin((other_latitude - latitude) / 2.0) ** 2
        + math.cos(latitude) * math.cos(other_latitude) * math.sin((other_longitude - longitude) / 2.0) ** 2
    )
    return 2.0 * LEAST_RADIUS_KM * math.asin(min(1.0, math.sqrt(chord))) / FIBRE_KM_PER_MS


class _Target:
    """A broker that is, was or may be measured."""

    def __init__(self, name: str, window: int) -> None:
        self.name = name
        self.address = ""
        self.probe_address = ""
        self.announced = False
        self.threshold_ms = FOREVER
        self.position: tuple[float, float] | None = None
        #: What physics allows at least.
        self.bound_ms = 0.0
        #: The last answers as a ring, one way; ``total_ms`` is their sum.
        self.answers_ms: list[float] = []
        self.window = window
        self.oldest = 0
        self.total_ms = 0.0
        self.answered_at = -FOREVER
        #: Pings before this have nothing to do with the answers that count.
        self.since = -FOREVER
        self.pinged_at = -FOREVER
        #: The first ping since the last answer.
        self.unanswered_since = FOREVER
        self.silent = False
        self.silent_pings = 0
        self.asked_at = -FOREVER
        self.due_at = FOREVER

    @property
    def average_ms(self) -> float:
        """Of the answers that count; infinite without any."""
        return self.total_ms / len(self.answers_ms) if self.answers_ms else FOREVER

    def begin_anew(self, now: float) -> None:
        self.answers_ms.clear()
        self.oldest = 0
        self.total_ms = 0.0
        self.since = now

    def add(self, latency_ms: float) -> None:
        answers = self.answers_ms
        if len(answers) < self.window:
            answers.append(latency_ms)
            self.total_ms += latency_ms
            return
        answers[self.oldest] = latency_ms
        self.oldest += 1
        if self.oldest == self.window:
            self.oldest = 0
        # Summed afresh: what is added and taken away a million times drifts.
        self.total_ms = math.fsum(answers)


class Latencies:
    """See the module. Is a :class:`~nearcast.groups.formation.Neighbours`."""

    def __init__(
        self,
        name: str,
        board: Board,
        thresholds: Thresholds,
        settings: LatencySettings,
        rng: random.Random,
        now: float,
    ) -> None:
        self.name = name
        self.pings_sent = 0
        self.answers = 0
        self._pinger: Pinger | None = None
        self._board = board
        self._board_version = -1
        self._thresholds = thresholds
        self._settings = settings
        self._rng = rng
        self._now = now
        self._leader = name
        self._targets: dict[str, _Target] = {}
        self._announced: set[str] = set()
        #: Announced leaders that answer and were below NEAR_FACTOR thresholds: where the nearest one is looked for.
        self._near: dict[str, _Target] = {}
        #: (when, at least how far, number) and whom to ping; entries whose time is not the target's any more are stale.
        self._due: list[tuple[float, float, int, _Target]] = []
        self._number = 0
        self._allowance = PINGS_PER_S / 10.0
        self._allowance_at = now
        self._swept_at = -FOREVER
        self._reach_ms = thresholds.largest_ms

    # --- what the driver says -------------------------------------------------------------------------------------------

    @property
    def pinger(self) -> Pinger | None:
        """Who sends pings, and tells us of the answers. Until there is one, nothing is measured."""
        return self._pinger

    @pinger.setter
    def pinger(self, pinger: Pinger | None) -> None:
        self._pinger = pinger
        if pinger is not None:
            pinger.listen(self)

    def belongs_to(self, leader: str, now: float) -> None:
        """This broker's leader; its own name: it leads."""
        self._now = now
        if leader == self._leader:
            return
        measured_all = self._measures_leaders()
        self._leader = leader
        if leader != self.name:
            self._want(self._target(leader), now)
        if self._measures_leaders() and not measured_all:
            for name in self._announced:
                self._want(self._targets[name], now)

    def learn(self, name: str, address: str, probe_address: str, now: float) -> None:
        """Somebody says where a broker takes links and answers probes (empty: there as well): a view, or who sends us on to
        it. What it announces itself counts more."""
        self._now = now
        if name == self.name or not address:
            return
        target = self._target(name)
        probe_address = probe_address or address
        if not target.announced and (target.address != address or target.probe_address != probe_address):
            self._moved(target, address, probe_address, now)

    def ponged(self, name: str, round_trip_ms: float, now: float) -> None:
        """A ping was answered."""
        self._now = now
        target = self._targets.get(name)
        if target is None or now - round_trip_ms / 1e3 < target.since - 1e-6:
            return
        self.answers += 1
        if now - target.answered_at > self._settings.fail_after_s + 2.0 * self._interval_s():
            # Silent, or pinged rarely, until now: what it was then says nothing of the path that it has today.
            target.begin_anew(now - round_trip_ms / 1e3)
        target.answered_at = now
        target.unanswered_since = FOREVER
        target.silent = False
        target.silent_pings = 0
        target.add(round_trip_ms / 2.0)
        self._classify(target)
        if self._is_wanted(target, now):
            self._plan(target, now)

    # --- what the formation asks ----------------------------------------------------------------------------------------

    def nearest_leader(self, below_ms: float, now: float, avoid: Collection[str] = ()) -> str:
        """The nearest leader that announces itself, strictly below both thresholds: ours as given, and what it announces; none
        of those to avoid."""
        self._now = now
        self._read_board(now)
        nearest, nearest_ms = "", below_ms
        for name, target in self._near.items():
            average_ms = target.average_ms
            if average_ms < nearest_ms and average_ms < target.threshold_ms and self._is_settled(target) and name not in avoid:
                if now - target.pinged_at > self._settings.fail_after_s + self._settings.ping_interval_s:
                    self._plan_at(target, now)  # known from long ago: measured again first
                else:
                    nearest, nearest_ms = name, average_ms
        return nearest

    def latency_ms(self, name: str) -> float:
        """Infinite while too little is known. Whom the formation asks about is measured from now on, for a while."""
        if name == self.name:
            return 0.0
        target = self._targets.get(name)
        if target is None:
            return FOREVER
        now = self._now
        if now - target.asked_at > ASKED_FOR_S and target.due_at > now + self._interval_s():
            target.asked_at = now
            if self._is_wanted(target, now):
                self._plan_at(target, now)
        target.asked_at = now
        if target.silent or not self._is_settled(target):
            return FOREVER
        return target.average_ms

    def announced_place(self, name: str) -> tuple[str, str, float] | None:
        """Where a leader takes links and answers probes, and its join threshold, while it announces itself."""
        self._read_board(self._now)
        target = self._targets.get(name)
        if target is None or not target.announced:
            return None
        return target.address, target.probe_address, target.threshold_ms

    def measured_ms(self, name: str) -> float:
        """What is known of a broker, if only by one answer long ago, for people to read; infinite without any."""
        target = self._targets.get(name)
        return FOREVER if target is None else target.average_ms

    def address(self, name: str) -> str:
        """Where links reach a broker; empty if unknown."""
        target = self._targets.get(name)
        return "" if target is None else target.address

    # --- time -----------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Send the pings that are due."""
        self._now = now
        self._read_board(now)
        pinger = self._pinger
        if pinger is None:
            return
        pinger.tick(now)
        self._allowance = min(PINGS_PER_S / 10.0, self._allowance + (now - self._allowance_at) * PINGS_PER_S)
        self._allowance_at = now
        due = self._due
        while due and due[0][0] <= now and self._allowance >= 1.0:
            at, _, _, target = heapq.heappop(due)
            if target.due_at != at:
                continue
            target.due_at = FOREVER
            if self._is_wanted(target, now):
                self._ping(pinger, target, now)

    def next_deadline(self) -> float:
        """When :meth:`tick` is needed next."""
        pinger = self._pinger
        if pinger is None:
            return FOREVER
        deadline = pinger.next_deadline()
        if self._due:
            earliest = self._due[0][0]
            if self._allowance < 1.0:
                earliest = max(earliest, self._allowance_at + (1.0 - self._allowance) / PINGS_PER_S)
            deadline = min(deadline, earliest)
        return deadline

    def _ping(self, pinger: Pinger, target: _Target, now: float) -> None:
        self._allowance -= 1.0
        self.pings_sent += 1
        target.pinged_at = now
        if target.unanswered_since == FOREVER:
            target.unanswered_since = now
        elif not target.silent and now - target.unanswered_since >= self._settings.fail_after_s:
            target.silent = True
            target.begin_anew(now)
            self._classify(target)
        pinger.ping(target.name, target.probe_address or target.address, now)
        self._plan(target, now)

    def _plan(self, target: _Target, now: float) -> None:
        """When it is pinged next, as of now: a ping or an answer has just been."""
        interval_s = self._interval_s()
        if target.unanswered_since < FOREVER:
            if target.silent:
                target.silent_pings = min(16, target.silent_pings + 1)
                interval_s = min(self._far_interval_s(), interval_s * 2.0 ** (target.silent_pings - 1))
            elif self._is_settled(target):
                # Before it counts as silent several pings must have been lost, not only a few on a bad path.
                interval_s = min(interval_s, self._settings.fail_after_s / PINGS_BEFORE_SILENCE)
            at = target.pinged_at + interval_s
        elif not self._is_close(target, now):
            at = target.pinged_at + self._far_interval_s()
        elif not self._is_settled(target):
            at = now + min(BURST_INTERVAL_S, interval_s)
        else:
            at = target.pinged_at + interval_s
        # Spread, so that brokers that started together do not ping together for ever.
        self._plan_at(target, max(now, at - 0.1 * (at - now) * self._rng.random()))

    def _interval_s(self) -> float:
        """Between two pings of a near broker: longer when there are very many."""
        return self._settings.ping_interval_s * max(1.0, len(self._near) / (PINGS_PER_S / 2.0))

    def _far_interval_s(self) -> float:
        return max(FAR_INTERVAL_S, len(self._announced) / (PINGS_PER_S / 4.0)) * (0.75 + 0.5 * self._rng.random())

    def _plan_at(self, target: _Target, at: float) -> None:
        target.due_at = at
        self._number += 1
        heapq.heappush(self._due, (at, target.bound_ms, self._number, target))
        if len(self._due) > 1_000 and len(self._due) > 4 * len(self._targets):
            self._due = [entry for entry in self._due if entry[3].due_at == entry[0]]
            heapq.heapify(self._due)

    # --- whom to measure ------------------------------------------------------------------------------------------------

    def _measures_leaders(self) -> bool:
        return self._leader == self.name

    def _is_wanted(self, target: _Target, now: float) -> bool:
        if not (target.probe_address or target.address):
            return False
        if target.name == self._leader or now - target.asked_at <= ASKED_FOR_S:
            return True
        return target.announced and self._measures_leaders() and target.bound_ms < self._reach_ms

    def _is_close(self, target: _Target, now: float) -> bool:
        """Whether it is measured often: near, and not by position alone; or what it is decides about our own group."""
        if target.name == self._leader or now - target.asked_at <= ASKED_FOR_S:
            return True
        return target.average_ms < NEAR_FACTOR * self._thresholds.join_ms

    def _is_settled(self, target: _Target) -> bool:
        """Whether its average counts."""
        answers = len(target.answers_ms)
        return answers >= LEAST_PINGS or answers >= target.window

    def _classify(self, target: _Target) -> None:
        if target.announced and not target.silent and target.average_ms < NEAR_FACTOR * self._thresholds.join_ms:
            self._near[target.name] = target
        else:
            self._near.pop(target.name, None)

    def _want(self, target: _Target, now: float) -> None:
        if target.due_at == FOREVER and self._is_wanted(target, now):
            self._plan_at(target, now)

    def _target(self, name: str) -> _Target:
        """What is known of a broker. When there are too many, nothing is kept of it."""
        target = self._targets.get(name)
        if target is None:
            target = _Target(name, self._settings.window)
            if len(self._targets) >= self._settings.max_brokers and self._now >= self._swept_at + SWEEP_S:
                self._swept_at = self._now
                for known in [known for known in self._targets.values() if not self._is_wanted(known, self._now)]:
                    if not known.announced:
                        del self._targets[known.name]
            if len(self._targets) < self._settings.max_brokers:
                self._targets[name] = target
        return target

    def _moved(self, target: _Target, address: str, probe_address: str, now: float) -> None:
        """It is somewhere else: what was measured has nothing to do with it."""
        if (target.probe_address or target.address) != (probe_address or address):
            target.begin_anew(now)
            target.unanswered_since = FOREVER
            target.silent = False
            target.silent_pings = 0
            target.due_at = FOREVER
        target.address = address
        target.probe_address = probe_address
        self._classify(target)
        self._want(target, now)

    def _read_board(self, now: float) -> None:
        board = self._board
        if board.version == self._board_version:
            return
        self._board_version = board.version
        present: set[str] = set()
        for entry in board.announced():
            name = entry.name
            if name == self.name:
                continue
            target = self._target(name)
            if name not in self._targets:
                continue
            present.add(name)
            target.threshold_ms = entry.threshold_ms
            newly = not target.announced
            if entry.position != target.position:
                target.position = entry.position
                target.bound_ms = least_latency_ms(self._settings.position, entry.position)
                newly = True
            target.announced = True
            self._announced.add(name)
            if target.address != entry.address or target.probe_address != entry.probe_address:
                self._moved(target, entry.address, entry.probe_address, now)
            elif newly:
                self._classify(target)
                self._want(target, now)
        for name in [name for name in self._announced if name not in present]:
            self._announced.discard(name)
            target = self._targets[name]
            target.announced = False
            target.threshold_ms = FOREVER
            self._near.pop(name, None)
