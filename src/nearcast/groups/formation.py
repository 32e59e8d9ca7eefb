"""How brokers find themselves together in groups (Hasenburg et al., sections II-C and II-D)."""

from __future__ import annotations

import random

from nearcast.groups import messages, rosters, views
from nearcast.groups.avoidance import Avoidance
from nearcast.groups.changes import Change, LeaderChanged, ViewChanged
from nearcast.groups.messages import Answer, Ask, Join, Leave, Message, Notice, Refuse, Update, Welcome
from nearcast.groups.neighbours import Neighbours
from nearcast.groups.rosters import Roster
from nearcast.groups.settings import FormationSettings
from nearcast.groups.steps import ASKING, FOREVER, IDLE, JOINING, MEASURING, Step
from nearcast.groups.thresholds import Thresholds
from nearcast.groups.views import Member, View

__all__ = ["Change", "Formation", "LeaderChanged", "Neighbours", "ViewChanged", "outranks"]


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
        self.probe_address = ""
        """Where this broker answers probes, if not where it takes links. Like ``lcm`` it may be set at any time."""
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
        self._step = Step()
        # Leading.
        self._roster = self._alone(1)
        self._ask_at = now + rng.random() * settings.ask_interval_s
        self._idle_s = settings.ask_interval_s
        self._avoidance = Avoidance(settings.retry_s)
        # Following: the leader's view; none while this broker leads.
        self._view: View | None = None
        self._check_at = FOREVER
        self._renew_at = FOREVER
        self._joined_at = now
        self._measured = False

    def begin(self, address: str, probe_address: str, version: int) -> None:
        """Where this broker is reached, as is known once its sockets are open, and a version above those of its earlier lives:
        messages that were flooded then may still be under way."""
        self.address = address
        self.probe_address = probe_address
        self._roster = self._alone(version)

    def _alone(self, version: int) -> Roster:
        leader = Member(self.name, self.address, version, self.probe_address)
        thresholds = self._thresholds
        return Roster(
            views.alone(leader, thresholds.join_ms, thresholds.leave_ms, self._rng.getrandbits(48) + 1), self._settings
        )

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
    def number(self) -> int:
        """Of what was said last. A Leave with it does not count for whoever hears from us again."""
        return self._number

    @property
    def candidate(self) -> Member | None:
        """The leader that this broker is about to join, or thinks of joining, if there is one: it should be measured."""
        return self._step.target if self._step.kind >= MEASURING else None

    def place_of(self, name: str) -> Member:
        """Where a broker takes links and answers probes, as far as is known."""
        if self._step.is_with(name) and self._step.target.address:
            return self._step.target
        member = self.view.members.get(name)
        return member if member is not None else Member(name, self._neighbours.address(name), 0)

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
        if self._view is not None:
            return min(self._step.deadline, self._check_at, self._renew_at)
        own = self._ask_at if self._step.kind == IDLE else self._step.deadline
        return min(own, self._roster.next_deadline())

    def tick(self, now: float) -> None:
        """Time has passed."""
        if now >= self._step.deadline:
            self._step_is_due(now)
        if self._view is None:
            self._keep_group(now)
            if self._step.kind == IDLE and now >= self._ask_at:
                self._look_around(now)
        elif now >= self._check_at and not self._leader_is_near(self._view, now):
            self.leaves += 1
            self._send(self.leader, Leave(self._number))
            self._lead(now)
        elif now >= self._renew_at:
            self._renew(self._view, now)

    def _step_is_due(self, now: float) -> None:
        step = self._step
        if step.kind == ASKING:
            self._avoidance.failed(step.target.name, now)
            self._give_up(now)
        elif step.kind == MEASURING:
            self._consider(now)
        elif step.tries < self._settings.join_tries:
            self._send_join(now)
        else:
            self._send(step.target.name, Leave(self._number))  # it may have heard us
            self._avoidance.failed(step.target.name, now)
            self._join_failed(now)

    # --- leading: whom to merge with ------------------------------------------------------------------------------------

    def _look_around(self, now: float) -> None:
        join_ms = self._thresholds.join_ms
        found = self._neighbours.nearest_leader(join_ms, now, self._avoidance.names(now))
        if not found:
            self._idle_s = min(self._idle_s * 1.5, self._settings.idle_interval_s)
            self._ask_later(now, self._idle_s)
            return
        self._idle_s = self._settings.ask_interval_s
        step = self._step
        step.begin(ASKING, self.place_of(found), now)
        step.deadline = now + self._settings.answer_timeout_s
        step.lcm = self.lcm
        step.size = len(self._roster.view.members)
        self.asks += 1
        self._number += 1
        self._send(found, Ask(self._number, step.lcm, step.size, join_ms, self._neighbours.latency_ms(found)))

    def _ask_later(self, now: float, about_s: float) -> None:
        self._ask_at = now + about_s * (0.5 + self._rng.random())

    def _give_up(self, now: float) -> None:
        """A leader's step is over."""
        self._step.end()
        self._ask_later(now, self._settings.ask_interval_s)

    def _asked(self, sender: str, ask: Ask, now: float) -> None:
        step = self._step
        if self._view is None and self._roster.remove(sender, now):
            self._changes.append(ViewChanged())  # whoever asks leads: it restarted, or its Leave is lost
        if self._view is not None:
            leader = self.place_of(self.leader)
            self._send(sender, Answer(ask.number, messages.REDIRECT, leader.name, leader.address))
        elif step.kind == ASKING and step.is_with(sender):
            # The questions crossed. Both sides decide by the same figures, so no answer is needed.
            if outranks(ask.lcm, ask.size, sender, step.lcm, step.size, self.name):
                self._begin_join(step.target, ask.threshold_ms, now)
            else:
                self._give_up(now)
        elif step.kind == JOINING and step.is_with(sender):
            self._send(sender, Answer(ask.number, messages.YOU_LEAD))
        elif step.kind != IDLE:
            self._send(sender, Answer(ask.number, messages.BUSY))
        elif ask.latency_ms >= self._thresholds.join_ms:
            self._send(sender, Answer(ask.number, messages.NO))  # near enough for its group, not for ours
        elif not outranks(ask.lcm, ask.size, sender, self.lcm, len(self._roster.view.members), self.name):
            self._send(sender, Answer(ask.number, messages.I_LEAD))
        elif self._thresholds.leave_ms < self._neighbours.latency_ms(sender) < FOREVER:
            self._send(sender, Answer(ask.number, messages.NO))  # we would leave again at once
        else:
            self._send(sender, Answer(ask.number, messages.YOU_LEAD))
            self._begin_join(self.place_of(sender), ask.threshold_ms, now)

    def _answered(self, sender: str, answer: Answer, now: float) -> None:
        step = self._step
        if step.kind != ASKING or not step.is_with(sender) or answer.number != self._number:
            return
        if answer.verdict == messages.I_LEAD:
            self._begin_join(step.target, self._thresholds.join_ms, now)
        elif answer.verdict == messages.YOU_LEAD:
            self._give_up(now)  # its Join follows
        else:
            self.refusals += 1
            if answer.verdict == messages.NO:
                self._avoidance.failed(sender, now)
            elif answer.verdict == messages.REDIRECT:
                self._avoidance.is_no_leader(sender, now)
            self._give_up(now)

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
        if self._view is None and join.reign and self._step.kind == JOINING and self._roster.note(sender, now):
            return  # it will hear in a moment whether we still lead
        if self._view is not None or self._step.kind == JOINING:
            # Who is about to follow another takes nobody in: two that did so to each other would both end up as members.
            hint = self._step.target if self._step.kind == JOINING else self.place_of(self.leader)
            self._send(sender, Refuse(join.number, hint.name, hint.address, hint.probe_address, self.view.join_ms))
            return
        if self._step.is_with(sender):
            self._give_up(now)  # the answer to our question was lost, or is late
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
        if self._view is not None and self._step.kind == IDLE and near and leader not in (self.name, self.leader):
            self._begin_join(self.place_of(leader), self._thresholds.join_ms, now)
            self._step.voluntary = True

    def _begin_join(self, leader: Member, threshold_ms: float, now: float) -> None:
        step = self._step
        step.begin(JOINING, leader, now)
        step.threshold_ms = threshold_ms
        step.first_number = self._number + 1
        self._send_join(now)

    def _send_join(self, now: float) -> None:
        step = self._step
        step.tries += 1
        step.deadline = now + self._settings.join_timeout_s
        self._number += 1
        version = self.view.version
        self._send(step.target.name, Join(self._number, self.lcm, self.address, self.probe_address, version, 0))

    def _join_failed(self, now: float) -> None:
        """A leader stays one, with its group. A member whose leader leads no more leads itself."""
        self.refusals += 1
        if self._view is None:
            self._give_up(now)
        elif self._step.voluntary:
            self._step.end()
        else:
            self._lead(now)

    def _welcomed(self, sender: str, welcome: Welcome, now: float) -> None:
        view = welcome.view
        step = self._step
        if view.leader != sender or self.name not in view.members:
            return
        if step.kind == JOINING and step.is_with(sender):
            if not step.first_number <= welcome.number <= self._number:
                return
            if view.version > self.view.version:
                self._avoidance.succeeded(sender)
                self._follow(view, now)
            elif step.tries < self._settings.join_tries:
                self._send_join(now)  # our own view has changed since: the new one must be above it
        elif self._view is not None and sender == self._view.leader:
            if view.version > self._view.version:
                self._view = view
                self._changes.append(ViewChanged())
        else:
            self._send(sender, Leave(welcome.number))

    def _refused(self, sender: str, refuse: Refuse, now: float) -> None:
        step = self._step
        leader = Member(refuse.leader, refuse.address, 0, refuse.probe_address)
        if step.kind == JOINING and step.is_with(sender):
            if not step.first_number <= refuse.number <= self._number:
                return
            if self._view is None or step.voluntary:
                self._avoidance.is_no_leader(sender, now)
                self._join_failed(now)
            else:
                self._send_on(leader, refuse.threshold_ms, step.hops + 1, now)
        elif self._view is not None and sender == self._view.leader and refuse.number == self._number:
            self._send_on(leader, refuse.threshold_ms, 1, now)

    def _follow(self, view: View, now: float) -> None:
        """The new leader has taken us in: now the group may know."""
        former = self.leader
        if self._view is None:
            self.leader_joins += 1
            leader = view.members[view.leader]
            notice = Notice(leader.name, leader.address, leader.probe_address, view.join_ms)
            for name in self._roster.view.members:
                if name != self.name and name not in view.members:
                    self.notifications += 1
                    self._send(name, notice)
        else:
            self.member_joins += 1
            self._send(former, Leave(self._number))
        self._step.end()
        self._view = view
        self._joined_at = now
        self._measured = False
        self._check_at = now + self._settings.check_interval_s * (0.5 + self._rng.random())
        self._renew_at = now + self._settings.renew_interval_s * (0.5 + self._rng.random())
        self._changes.append(LeaderChanged(former, view.leader))
        self._changes.append(ViewChanged())

    # --- following ------------------------------------------------------------------------------------------------------

    def _noticed(self, sender: str, notice: Notice, now: float) -> None:
        if self._view is not None and sender == self._view.leader:
            self._send_on(Member(notice.leader, notice.address, 0, notice.probe_address), notice.threshold_ms, 0, now)

    def _send_on(self, leader: Member, threshold_ms: float, hops: int, now: float) -> None:
        """Our leader leads no more, and says whom it follows: join that one if it is near, else lead."""
        step = self._step
        if step.is_with(leader.name) and not step.voluntary:
            return  # that is what we are doing
        if not leader.name or leader.name in (self.name, self.leader) or hops > self._settings.max_hops:
            self.splits += 1
            self._lead(now)
            return
        step.begin(MEASURING, leader, now)
        step.threshold_ms = threshold_ms
        step.hops = hops
        self._consider(now)

    def _consider(self, now: float) -> None:
        step = self._step
        latency_ms = self._neighbours.latency_ms(step.target.name)
        if latency_ms < step.threshold_ms:
            self._begin_join(step.target, step.threshold_ms, now)
        elif latency_ms == FOREVER and now < step.begun_at + self._settings.measure_timeout_s:
            step.deadline = now + self._settings.ask_interval_s
        else:
            self.splits += 1
            self._lead(now)

    def _updated(self, sender: str, update: Update, now: float) -> None:
        view = self._view
        if view is None or sender != view.leader:
            if not (self._step.kind == JOINING and self._step.is_with(sender)):
                self._send(sender, Leave(0))  # it still counts us in
            return
        after = update.applied(view)
        if after is not None:
            self._view = after
            self._changes.append(ViewChanged())
            if self.name not in after.members:
                self._renew(after, now)
        elif update.base > view.version or update.reign != view.reign:
            self._renew(view, now)

    def _leader_is_near(self, view: View, now: float) -> bool:
        self._check_at = now + self._settings.check_interval_s
        if self._step.kind != IDLE:
            return True  # about to have another
        latency_ms = self._neighbours.latency_ms(view.leader)
        if latency_ms < FOREVER:
            self._measured = True
            return latency_ms <= view.leave_ms
        return not self._measured and now < self._joined_at + self._settings.measure_timeout_s

    def _renew(self, view: View, now: float) -> None:
        self._renew_at = now + self._settings.renew_interval_s
        if self._step.kind != IDLE:
            return  # about to have another
        self._number += 1
        self._send(view.leader, Join(self._number, self.lcm, self.address, self.probe_address, view.version, view.reign))

    # --- losing others --------------------------------------------------------------------------------------------------

    def lost(self, name: str, now: float) -> None:
        """There is no way to this broker any more."""
        step = self._step
        if step.is_with(name):
            self._avoidance.failed(name, now)
            if step.kind == ASKING:
                self._give_up(now)
            else:
                self._join_failed(now)
        if self._view is None:
            if self._roster.remove(name, now):
                self._changes.append(ViewChanged())
                self._keep_group(now)
        elif name == self._view.leader:
            if step.kind == IDLE:
                self._lead(now)
            step.voluntary = False  # about to have another: there is no way back

    def regained(self, name: str, now: float) -> None:
        """There is a way to this broker again: if it is our leader, it may think that we have gone."""
        if self._view is not None and name == self._view.leader:
            self._renew_at = now

    def _lead(self, now: float) -> None:
        """Starts a group of its own."""
        former = self.leader
        version = self.view.version + 1
        self._step.end()
        self._view = None
        self._roster = self._alone(version)
        self._idle_s = self._settings.ask_interval_s
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
