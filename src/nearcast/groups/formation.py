"""How brokers find themselves together in groups (Hasenburg et al., sections II-C and II-D)."""

from __future__ import annotations

import math
import random
from typing import Final, Protocol

from nearcast.groups import messages, rosters
from nearcast.groups.messages import Answer, Ask, Join, Leave, Message, Notice, Refuse, Update, Welcome
from nearcast.groups.settings import FormationSettings
from nearcast.groups.thresholds import Thresholds
from nearcast.groups.views import View

FOREVER: Final = math.inf

# What a broker is in the middle of.
IDLE: Final = 0
ASKING: Final = 1
MEASURING: Final = 2
JOINING: Final = 3


class Neighbours(Protocol):
    """What is known of other brokers."""

    def nearest_leader(self, below_ms: float, now: float) -> str:
        """The announced leader, other than this broker, with the least measured latency strictly below; "" if none."""

    def latency_ms(self, name: str) -> float:
        """Measured, one way; ``math.inf`` while it is unknown or the broker does not answer. Being asked is a reason to
        measure it."""

    def address(self, name: str) -> str:
        """Where it takes links, "host:port"; "" if unknown."""


class Change:
    """Something that the driver should know of."""


class LeaderChanged(Change):
    """The broker follows another leader than before; its own name means that it leads."""

    def __init__(self, former: str, present: str) -> None:
        self.former = former
        self.present = present


class ViewChanged(Change):
    """The group has other members than before, or other thresholds."""


def outranks(lcm: float, size: int, name: str, other_lcm: float, other_size: int, other_name: str) -> bool:
    """Whether the first leader is to lead a merged group: by capability, then by the size of its group, then by name."""
    if lcm != other_lcm:
        return lcm > other_lcm
    if size != other_size:
        return size > other_size
    return name > other_name


class Formation:
    """One broker's part in it. See the module."""

    def __init__(
        self,
        name: str,
        address: str,
        settings: FormationSettings,
        neighbours: Neighbours,
        thresholds: Thresholds,
        lcm: float,
        rng: random.Random,
        now: float,
    ) -> None:
        self.name = name
        self.address = address
        self.lcm = lcm
        self.asks = 0
        self.leader_joins = 0
        self.member_joins = 0
        self.notifications = 0
        self.refusals = 0
        self.leaves = 0
        self.splits = 0
        self.messages_sent = 0
        self._settings = settings
        self._neighbours = neighbours
        self._thresholds = thresholds
        self._rng = rng
        self._outgoing: list[tuple[str, Message]] = []
        self._changes: list[Change] = []
        self._number = rng.getrandbits(30)
        # Leading.
        self._roster = rosters.alone(name, address, 1, thresholds.join_ms, thresholds.leave_ms, settings)
        self._ask_at = now + rng.random() * settings.ask_interval_s
        self._idle_s = settings.ask_interval_s
        self._left_alone = ""
        self._left_alone_until = now
        # Following: ``_view`` is the leader's; none while this broker leads.
        self._view: View | None = None
        self._check_at = FOREVER
        self._renew_at = FOREVER
        self._joined_at = now
        self._measured = False
        # What is under way.
        self._step = IDLE
        self._target = ""
        self._target_address = ""
        self._target_threshold_ms = 0.0
        self._deadline = FOREVER
        self._first_number = 0
        self._tries = 0
        self._hops = 0
        self._may_stay = False
        self._asked_lcm = 0.0
        self._asked_size = 0

    # --- what others read -----------------------------------------------------------------------------------------------

    @property
    def view(self) -> View:
        """The group this broker is in, as far as it knows."""
        view = self._view
        return view if view is not None else self._roster.view

    @property
    def leader(self) -> str:
        """Who leads it: this broker itself, or another."""
        view = self._view
        return view.leader if view is not None else self.name

    @property
    def leads(self) -> bool:
        return self._view is None

    @property
    def candidate(self) -> str:
        """The leader this broker is about to join, or thinks of joining; "" if none."""
        return self._target if self._step == JOINING or self._step == MEASURING else ""

    def address_of(self, name: str) -> str:
        """Where a broker that messages go to takes links, as far as this machine was told; else what the neighbours know."""
        if name == self._target and self._target_address:
            return self._target_address
        member = self.view.members.get(name)
        if member is not None and member.address:
            return member.address
        return self._neighbours.address(name)

    def take_outgoing(self) -> list[tuple[str, Message]]:
        """What is to be sent to whom, in order."""
        taken = self._outgoing
        if taken:
            self._outgoing = []
        return taken

    def take_changes(self) -> list[Change]:
        """What happened since the last call, in order."""
        taken = self._changes
        if taken:
            self._changes = []
        return taken

    # --- time -----------------------------------------------------------------------------------------------------------

    def next_deadline(self) -> float:
        """When :meth:`tick` has something to do."""
        if self._view is None:
            own = self._ask_at if self._step == IDLE else self._deadline
            return min(own, self._roster.next_deadline())
        return min(self._deadline, self._check_at, self._renew_at)

    def tick(self, now: float) -> None:
        """Time has passed."""
        if self._step != IDLE and now >= self._deadline:
            self._step_is_due(now)
        if self._view is None:
            self._keep_group(now)
            if self._step == IDLE and now >= self._ask_at:
                self._look_around(now)
        elif now >= self._check_at and not self._leader_is_near(self._view, now):
            self.leaves += 1
            self._send(self.leader, Leave(self._number))
            self._lead(now)
        elif now >= self._renew_at:
            self._renew(self._view, now)

    def _step_is_due(self, now: float) -> None:
        if self._step == ASKING:
            self._give_up(now, self._settings.retry_s)
        elif self._step == MEASURING:
            self._consider(now)
        elif self._tries < self._settings.join_tries:
            self._send_join(now)
        else:
            self._send(self._target, Leave(self._number))  # it may have heard us
            self._join_failed(now)

    # --- leading: whom to merge with ------------------------------------------------------------------------------------

    def _look_around(self, now: float) -> None:
        join_ms = self._thresholds.join_ms
        found = self._neighbours.nearest_leader(join_ms, now)
        if not found or found == self.name or (found == self._left_alone and now < self._left_alone_until):
            self._idle_s = min(self._idle_s * 1.5, self._settings.idle_interval_s)
            self._ask_later(now, self._idle_s)
            return
        self._idle_s = self._settings.ask_interval_s
        self._step = ASKING
        self._target = found
        self._target_address = self._neighbours.address(found)
        self._deadline = now + self._settings.answer_timeout_s
        self._asked_lcm = self.lcm
        self._asked_size = len(self._roster.view.members)
        self.asks += 1
        self._number += 1
        latency_ms = self._neighbours.latency_ms(found)
        self._send(found, Ask(self._number, self._asked_lcm, self._asked_size, join_ms, latency_ms))

    def _ask_later(self, now: float, about_s: float) -> None:
        self._ask_at = now + about_s * (0.5 + self._rng.random())

    def _give_up(self, now: float, leave_alone_s: float) -> None:
        """Nothing came of the merge. Who did not answer, or said no, is left alone for a while."""
        if leave_alone_s > 0:
            self._left_alone = self._target
            self._left_alone_until = now + leave_alone_s
        self._rest()
        self._ask_later(now, self._settings.ask_interval_s)

    def _rest(self) -> None:
        self._step = IDLE
        self._target = ""
        self._target_address = ""
        self._deadline = FOREVER
        self._may_stay = False

    def _asked(self, sender: str, ask: Ask, now: float) -> None:
        if self._view is not None:
            self._send(sender, Answer(ask.number, messages.REDIRECT, self.leader, self.address_of(self.leader)))
        elif self._step == ASKING and self._target == sender:
            # The questions crossed. Both sides decide by the same four figures, so no answer is needed.
            if outranks(ask.lcm, ask.size, sender, self._asked_lcm, self._asked_size, self.name):
                self._begin_join(sender, self._target_address, ask.threshold_ms, now)
            else:
                self._give_up(now, 0.0)
        elif self._step == JOINING and self._target == sender:
            self._send(sender, Answer(ask.number, messages.YOU_LEAD))
        elif self._step != IDLE:
            self._send(sender, Answer(ask.number, messages.BUSY))
        elif ask.latency_ms >= self._thresholds.join_ms:
            self._send(sender, Answer(ask.number, messages.NO))  # near enough for its group, not for ours
        elif not outranks(ask.lcm, ask.size, sender, self.lcm, len(self._roster.view.members), self.name):
            self._send(sender, Answer(ask.number, messages.I_LEAD))
        elif self._thresholds.leave_ms < self._neighbours.latency_ms(sender) < FOREVER:
            self._send(sender, Answer(ask.number, messages.NO))  # we would leave again at once
        else:
            self._send(sender, Answer(ask.number, messages.YOU_LEAD))
            self._begin_join(sender, self._neighbours.address(sender), ask.threshold_ms, now)

    def _answered(self, sender: str, answer: Answer, now: float) -> None:
        if self._step != ASKING or sender != self._target or answer.number != self._number:
            return
        if answer.verdict == messages.I_LEAD:
            self._begin_join(sender, self._target_address, self._thresholds.join_ms, now)
        elif answer.verdict == messages.YOU_LEAD:
            self._give_up(now, 0.0)  # its Join follows
        else:
            self.refusals += 1
            self._give_up(now, self._settings.retry_s if answer.verdict == messages.NO else 0.0)

    # --- leading: the group ---------------------------------------------------------------------------------------------

    def _keep_group(self, now: float) -> None:
        roster = self._roster
        for name in roster.silent(now):
            roster.remove(name, now)
            self._changes.append(ViewChanged())
        if roster.set_thresholds(self._thresholds.join_ms, self._thresholds.leave_ms, now):
            self._changes.append(ViewChanged())
        update = roster.update(now)
        if update is not None:
            for member in roster.view.members.values():
                if member.name != self.name and member.joined_version != update.version:
                    self._send(member.name, update)

    def _join_asked(self, sender: str, join: Join, now: float) -> None:
        if self._view is not None or self._step == JOINING:
            # Who is about to follow another takes nobody in: two that did so to each other would both end up as members.
            hint = self._target if self._step == JOINING else self.leader
            self._send(sender, Refuse(join.number, hint, self.address_of(hint), self.view.join_ms))
            return
        if self._step == ASKING and self._target == sender:
            self._give_up(now, 0.0)  # the answer to our question was lost, or is late
        done = self._roster.admit(sender, join, now)
        if done == rosters.ADMITTED:
            self._changes.append(ViewChanged())
        if done != rosters.RENEWED:
            self._send(sender, Welcome(join.number, self._roster.view))
        self._keep_group(now)

    def _left(self, sender: str, leave: Leave, now: float) -> None:
        if self._view is None and self._roster.left(sender, leave.number, now):
            self._changes.append(ViewChanged())
            self._keep_group(now)

    # --- joining --------------------------------------------------------------------------------------------------------

    def join(self, leader: str, now: float) -> None:
        """Goes over to another leader, if this broker is a member, has nothing else to do, and the other is near enough. If
        that fails it stays where it is."""
        near = self._neighbours.latency_ms(leader) < self._thresholds.join_ms
        if self._view is not None and self._step == IDLE and near and leader not in (self.name, self.leader):
            self._begin_join(leader, self._neighbours.address(leader), self._thresholds.join_ms, now)
            self._may_stay = True

    def _begin_join(self, leader: str, address: str, threshold_ms: float, now: float) -> None:
        self._step = JOINING
        self._target = leader
        self._target_address = address
        self._target_threshold_ms = threshold_ms
        self._tries = 0
        self._first_number = self._number + 1
        self._send_join(now)

    def _send_join(self, now: float) -> None:
        self._tries += 1
        self._number += 1
        self._deadline = now + self._settings.join_timeout_s
        self._send(self._target, Join(self._number, self.lcm, self.address, self.view.version, False))

    def _join_failed(self, now: float) -> None:
        """A leader stays one, with its group. A member that was left by its leader leads itself."""
        self.refusals += 1
        stays = self._may_stay
        if self._view is None:
            self._give_up(now, self._settings.retry_s)
        elif stays:
            self._rest()
        else:
            self._lead(now)

    def _welcomed(self, sender: str, welcome: Welcome, now: float) -> None:
        view = welcome.view
        if view.leader != sender or self.name not in view.members:
            return
        if self._step == JOINING and sender == self._target:
            if not self._first_number <= welcome.number <= self._number:
                return
            if view.version > self.view.version:
                self._follow(view, now)
            elif self._tries < self._settings.join_tries:
                self._send_join(now)  # our own view has changed since: the new one must be above it
        elif self._view is not None and sender == self._view.leader:
            if view.version > self._view.version:
                self._view = view
                self._changes.append(ViewChanged())
        else:
            self._send(sender, Leave(welcome.number))

    def _refused(self, sender: str, refuse: Refuse, now: float) -> None:
        if self._step == JOINING and sender == self._target:
            if not self._first_number <= refuse.number <= self._number:
                return
            if self._view is None or self._may_stay:
                self._join_failed(now)
            else:
                self._send_on(refuse.leader, refuse.address, refuse.threshold_ms, self._hops + 1, now)
        elif self._view is not None and sender == self._view.leader and refuse.number == self._number:
            self._send_on(refuse.leader, refuse.address, refuse.threshold_ms, 1, now)

    def _follow(self, view: View, now: float) -> None:
        """The new leader has taken us in: now the group may know."""
        former = self.leader
        if self._view is None:
            self.leader_joins += 1
            notice = Notice(view.leader, self._target_address, view.join_ms)
            for name in self._roster.view.members:
                if name != self.name and name not in view.members:
                    self.notifications += 1
                    self._send(name, notice)
        else:
            self.member_joins += 1
            self._send(former, Leave(self._number))
        self._rest()
        self._view = view
        self._ask_at = FOREVER
        self._joined_at = now
        self._measured = False
        self._check_at = now + self._settings.check_interval_s * (0.5 + self._rng.random())
        self._renew_at = now + self._settings.renew_interval_s * (0.5 + self._rng.random())
        self._changes.append(LeaderChanged(former, view.leader))
        self._changes.append(ViewChanged())

    # --- following ------------------------------------------------------------------------------------------------------

    def _noticed(self, sender: str, notice: Notice, now: float) -> None:
        view = self._view
        if view is not None and sender == view.leader:
            self._send_on(notice.leader, notice.address, notice.threshold_ms, 0, now)

    def _send_on(self, leader: str, address: str, threshold_ms: float, hops: int, now: float) -> None:
        """Our leader leads no more, and says whom it follows: join that one if it is near, else lead."""
        if self._step == JOINING and self._target == leader and not self._may_stay:
            return
        self._rest()
        if not leader or leader == self.name or leader == self.leader or hops > self._settings.max_hops:
            self.splits += 1
            self._lead(now)
            return
        self._hops = hops
        self._step = MEASURING
        self._target = leader
        self._target_address = address
        self._target_threshold_ms = threshold_ms
        self._joined_at = now
        self._consider(now)

    def _consider(self, now: float) -> None:
        latency_ms = self._neighbours.latency_ms(self._target)
        if latency_ms < self._target_threshold_ms:
            self._begin_join(self._target, self._target_address, self._target_threshold_ms, now)
        elif latency_ms == FOREVER and now < self._joined_at + self._settings.measure_timeout_s:
            self._deadline = now + self._settings.ask_interval_s
        else:
            self.splits += 1
            self._lead(now)

    def _updated(self, sender: str, update: Update, now: float) -> None:
        view = self._view
        if view is None or sender != view.leader:
            if self._step != JOINING or self._target != sender:
                self._send(sender, Leave(0))  # it still counts us in
            return
        after = update.applied(view)
        if after is not None:
            self._view = after
            self._changes.append(ViewChanged())
            if self.name not in after.members:
                self._renew(after, now)
        elif update.base > view.version:
            self._renew(view, now)

    def _leader_is_near(self, view: View, now: float) -> bool:
        self._check_at = now + self._settings.check_interval_s
        if self._step != IDLE:
            return True  # about to have another
        latency_ms = self._neighbours.latency_ms(view.leader)
        if latency_ms < FOREVER:
            self._measured = True
            return latency_ms <= view.leave_ms
        return not self._measured and now < self._joined_at + self._settings.measure_timeout_s

    def _renew(self, view: View, now: float) -> None:
        self._renew_at = now + self._settings.renew_interval_s
        if self._step == JOINING:
            return
        self._number += 1
        self._send(view.leader, Join(self._number, self.lcm, self.address, view.version, True))

    # --- losing others --------------------------------------------------------------------------------------------------

    def lost(self, name: str, now: float) -> None:
        """There is no way to this broker any more."""
        if self._step != IDLE and name == self._target:
            if self._step == ASKING:
                self._give_up(now, self._settings.retry_s)
            elif self._view is None or name != self._view.leader:
                self._join_failed(now)
        view = self._view
        if view is None:
            if self._roster.remove(name, now):
                self._changes.append(ViewChanged())
                self._keep_group(now)
        elif name == view.leader and (self._step == IDLE or self._may_stay):
            self._lead(now)

    def _lead(self, now: float) -> None:
        """Starts a group of its own."""
        former = self.leader
        version = self.view.version + 1
        self._rest()
        self._view = None
        self._check_at = FOREVER
        self._renew_at = FOREVER
        thresholds = self._thresholds
        self._roster = rosters.alone(self.name, self.address, version, thresholds.join_ms, thresholds.leave_ms, self._settings)
        self._ask_later(now, self._settings.ask_interval_s)
        self._changes.append(LeaderChanged(former, self.name))
        self._changes.append(ViewChanged())

    # --- messages -------------------------------------------------------------------------------------------------------

    def handle(self, sender: str, message: Message, now: float) -> None:
        """A message arrived. What does not fit the state any more is ignored."""
        if isinstance(message, Ask):
            self._asked(sender, message, now)
        elif isinstance(message, Answer):
            self._answered(sender, message, now)
        elif isinstance(message, Join):
            self._join_asked(sender, message, now)
        elif isinstance(message, Welcome):
            self._welcomed(sender, message, now)
        elif isinstance(message, Refuse):
            self._refused(sender, message, now)
        elif isinstance(message, Update):
            self._updated(sender, message, now)
        elif isinstance(message, Notice):
            self._noticed(sender, message, now)
        elif isinstance(message, Leave):
            self._left(sender, message, now)

    def _send(self, to: str, message: Message) -> None:
        self.messages_sent += 1
        self._outgoing.append((to, message))
