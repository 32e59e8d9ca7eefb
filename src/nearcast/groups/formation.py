"""How brokers find themselves together in groups (Hasenburg et al., sections II-C and II-D).

Every broker runs one of these machines and starts as the leader of a group of its own. Leaders that are near each other merge:
the more capable one leads on, the other becomes its member and tells its own members, and each of those follows if the new
leader is near it too, or starts a group of its own. That is all; where nobody is left to merge with, the groups are formed.
What follows is about doing it among many at once, over a network that loses, repeats and delays, with brokers that die.

A broker leads or follows, and is in the middle of at most one step:

=========  ==========  =====================================================  =============================================
stands as  step        began when                                             ends when
=========  ==========  =====================================================  =============================================
leader     idle        it started; it had to leave, or to split               it asks somebody, or is asked
leader     asking      a leader is below the join threshold: Ask              Answer; an Ask that crosses ours; time
leader     joining     the other is to lead: Join                             Welcome: *member*; Refuse, time: *leader*
member     idle        its leader's Welcome                                   Notice, Refuse: another leader is named;
                                                                              the leader is too far, or lost: *leader*
member     measuring   another leader was named                               it is near: joining; far, or time: *leader*
member     joining     that one is near; or whoever watches flows said so     Welcome: *member* there; Refuse: measuring what
                                                                              that one names; time: *leader*
=========  ==========  =====================================================  =============================================

**Who leads.** The larger capability (LCM), then the larger group, then the larger name. The one that is asked decides and
says so. When two ask each other, both know all six figures and need no answer. One that is asking, or joining, tells others
that it is busy, and waits are random, so that neighbours do not stay busy with each other.

**Nobody ends up without a leader.** A broker follows another only with a view whose version is above its own, which it raised
when it took others in: around a circle of followers versions would rise for ever. So there is none, whatever crosses. And a
leader that joins another takes nobody in until it is through, so that nobody is taken in just to be told to move on. It tells
its members only when it has been taken in itself: if the new leader dies in between, refuses, or is never heard of again, the
group is as it was.

**It ends.** Take the capabilities from the highest down, and for each the sizes of the groups led with it, largest first. A
merger makes one group larger, and else touches only groups led with less capability, or with the same and not larger: the
loser's, and those of its members that do not follow, who have no more capability than it. So each merger makes this list of
lists larger in dictionary order, and among finitely many brokers that cannot go on for ever. It ends when no two leaders are
below the join threshold, which is condition (i) of the paper; (ii) is what members see to. (All this for latencies and
capabilities that hold still.)

**Nothing swings.** Joining takes a latency below one threshold, leaving one above another that is higher, and latencies are
moving averages.

**What gets lost is put right.** Questions have numbers, and what does not fit the state is ignored. A member says every few
seconds whose it is and which view it has: a leader that has forgotten it takes it in again, one that has changed its view says
so, one that leads no more says who does. A leader drops members that fall silent, and a broker that is told of a group it does
not belong to sends a Leave. So the brokers of a group have the same view soon after the network lets them.

**Who follows whom is not told twice.** Views are told as differences, at most every few hundredths of a second, and in large
groups less often (:mod:`nearcast.groups.rosters`). Nothing here takes time that grows with the fabric, only with the group.
"""

from __future__ import annotations

from typing import Final

from nearcast.groups import messages, rosters
from nearcast.groups.changes import Change, LeaderChanged, ViewChanged
from nearcast.groups.memberships import Membership
from nearcast.groups.messages import Answer, Ask, Join, Leave, Message, Notice, Refuse, Update, Welcome
from nearcast.groups.neighbours import Neighbours
from nearcast.groups.standing import Standing
from nearcast.groups.steps import ASKING, FOREVER, IDLE, JOINING, MEASURING
from nearcast.groups.views import Member, View

MAX_AHEAD: Final = 1 << 48
"""How much higher than its own view's version a broker believes that of another to be. Versions begin with milliseconds of the
wall clock, so this is thousands of years: one that lies shall not bring everybody's to the end of all numbers."""

__all__ = ["Change", "Formation", "LeaderChanged", "Neighbours", "ViewChanged", "outranks"]


def outranks(lcm: float, size: int, name: str, other_lcm: float, other_size: int, other_name: str) -> bool:
    """Whether the first leader is to lead a merged group: by capability, then by the size of its group, then by name."""
    if lcm != other_lcm:
        return lcm > other_lcm
    if size != other_size:
        return size > other_size
    return name > other_name


class Formation(Standing):
    """One broker's part in it. See the module."""

    # --- time -----------------------------------------------------------------------------------------------------------

    def next_deadline(self) -> float:
        """When :meth:`tick` has something to do."""
        membership = self._membership
        if membership is not None:
            return min(self._step.deadline, membership.check_at, membership.renew_at)
        own = self._ask_at if self._step.kind == IDLE else self._step.deadline
        return min(own, self._roster.next_deadline())

    def tick(self, now: float) -> None:
        """Time has passed."""
        if now >= self._step.deadline:
            self._step_is_due(now)
        membership = self._membership
        if membership is None:
            self._keep_group(now)
            if self._step.kind == IDLE and now >= self._ask_at:
                self._look_around(now)
            return
        if now >= membership.check_at:
            membership.check_at = now + self._settings.check_interval_s
            # In the middle of a step this broker is about to have another leader.
            if self._step.kind == IDLE and not membership.is_near(self._neighbours, now):
                self.leaves += 1
                self._send(membership.view.leader, Leave(self._number))
                self._lead(now)
                return
        if now >= membership.renew_at:
            self._renew(membership, now)

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
        found = ""
        if not self.retired:
            found = self._neighbours.nearest_leader(self._thresholds.join_ms, now, self._avoidance.names(now))
        if not found:
            self._idle_s = min(self._idle_s * 1.5, self._settings.idle_interval_s)
            self._ask_later(now, self._idle_s)
            return
        self._idle_s = self._settings.ask_interval_s
        step = self._step
        step.begin(ASKING, self.place_of(found), now)
        step.lcm = self.lcm
        step.size = len(self._roster.view.members)
        self.asks += 1
        self._number += 1
        self._send_ask(now)

    def _send_ask(self, now: float) -> None:
        step = self._step
        step.tries += 1
        step.deadline = now + self._settings.answer_timeout_s
        latency_ms = self._neighbours.latency_ms(step.target.name)
        threshold_ms = self._thresholds.join_ms
        ask = Ask(self._number, step.lcm, step.size, threshold_ms, latency_ms, self.address, self.probe_address)
        self._send(step.target.name, ask)

    def _ask_later(self, now: float, about_s: float) -> None:
        self._ask_at = now + about_s * (0.5 + self._rng.random())

    def _give_up(self, now: float) -> None:
        """A leader's step is over."""
        self._step.end()
        self._ask_later(now, self._settings.ask_interval_s)

    def _asked(self, sender: str, ask: Ask, now: float) -> None:
        step = self._step
        if self.leads and self._roster.remove(sender, now):
            self._changes.append(ViewChanged())  # whoever asks leads: it restarted, or its Leave is lost
        if not self.leads:
            self._send(sender, Answer(ask.number, messages.FOLLOWS))
        elif self.retired:
            self._send(sender, Answer(ask.number, messages.NO))
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
        elif ask.size + len(self._roster.view.members) > messages.MAX_MEMBERS:
            self._send(sender, Answer(ask.number, messages.NO))
        elif not outranks(ask.lcm, ask.size, sender, self.lcm, len(self._roster.view.members), self.name):
            self._send(sender, Answer(ask.number, messages.I_LEAD))
        elif self._neighbours.latency_ms(sender) > self._thresholds.leave_ms:
            # We would leave again at once; or cannot tell. It asks again, and by then we have measured it, unless its pings
            # come through and ours do not.
            self._send(sender, Answer(ask.number, messages.NO))
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
            elif answer.verdict == messages.FOLLOWS:
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
        self._believe(sender, join.version)
        if self.leads and join.reign and self._step.kind == JOINING and self._roster.note(sender, now):
            return  # it will hear in a moment whether we still lead
        if not self.leads or self._step.kind == JOINING or self.retired:
            # Who is about to follow another takes nobody in, who would have to move on at once.
            hint = self._step.target if self._step.kind >= MEASURING else self.place_of(self.leader)
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
        if self.leads and self._roster.left(sender, leave.number, now):
            self._changes.append(ViewChanged())
            self._keep_group(now)

    # --- joining --------------------------------------------------------------------------------------------------------

    def join(self, leader: str, now: float) -> None:
        """Goes over to another leader, if this broker is a member, has nothing else to do, and the other is near enough. If
        that fails it stays where it is."""
        near = self._neighbours.latency_ms(leader) < self._thresholds.join_ms
        if not self.leads and self._step.kind == IDLE and near and leader not in (self.name, self.leader):
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
        if self.leads:
            self._give_up(now)
        elif self._step.voluntary:
            self._step.end()
        else:
            self._lead(now)

    def _welcomed(self, sender: str, welcome: Welcome, now: float) -> None:
        view = welcome.view
        step = self._step
        self._believe(sender, view.version)
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
        elif self._membership is not None and sender == self.leader:
            if view.version > self.view.version:
                self._membership.view = view
                self._changes.append(ViewChanged())
        else:
            self._send(sender, Leave(welcome.number))

    def _refused(self, sender: str, refuse: Refuse, now: float) -> None:
        step = self._step
        leader = Member(refuse.leader, refuse.address, 0, refuse.probe_address)
        if step.kind == JOINING and step.is_with(sender):
            if not step.first_number <= refuse.number <= self._number:
                return
            if self.leads or step.voluntary:
                self._avoidance.is_no_leader(sender, now)
                self._join_failed(now)
            else:
                self._send_on(leader, refuse.threshold_ms, step.hops + 1, now)
        elif not self.leads and sender == self.leader and refuse.number == self._number:
            self._send_on(leader, refuse.threshold_ms, 1, now)

    def _follow(self, view: View, now: float) -> None:
        """The new leader has taken us in: now the group may know."""
        former = self.leader
        if self.leads:
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
        measured = self._neighbours.latency_ms(view.leader) < FOREVER
        self._membership = Membership(view, measured, self._settings, self._rng, now)
        self._changes.append(LeaderChanged(former, view.leader))
        self._changes.append(ViewChanged())

    def retire(self, now: float) -> None:
        """This broker is about to stop: its members are to lead themselves, and nobody is to follow it any more."""
        self.retired = True
        if self.leads:
            if self._step.kind != IDLE:
                self._give_up(now)
            for name in self._roster.view.members:
                if name != self.name:
                    self.notifications += 1
                    self._send(name, Notice(self.name, self.address, self.probe_address, self._thresholds.join_ms))

    # --- following ------------------------------------------------------------------------------------------------------

    def _noticed(self, sender: str, notice: Notice, now: float) -> None:
        if not self.leads and sender == self.leader:
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
        self._believe(sender, update.version)
        membership = self._membership
        if membership is None or sender != membership.view.leader:
            if not (self._step.kind == JOINING and self._step.is_with(sender)):
                self._send(sender, Leave(0))  # it still counts us in
            return
        before = membership.view
        after = update.applied(before)
        if after is not None:
            membership.view = after
            self._changes.append(ViewChanged())
            if self.name not in after.members:
                self._renew(membership, now)
        elif update.base > before.version or update.reign != before.reign:
            self._renew(membership, now)

    def _renew(self, membership: Membership, now: float) -> None:
        membership.renew_at = now + self._settings.renew_interval_s
        if self._step.kind == IDLE:
            self._number += 1
            view = membership.view
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
        if self.leads:
            if self._roster.remove(name, now):
                self._changes.append(ViewChanged())
                self._keep_group(now)
        elif name == self.leader:
            if step.kind == IDLE:
                self._lead(now)
            step.voluntary = False  # about to have another: there is no way back

    def linked(self, name: str, now: float) -> None:
        """There is a link to this broker, now or again: what was said to it before may not have got there, and if it is our
        leader it may think that we have gone."""
        step = self._step
        if step.is_with(name) and step.tries < self._settings.join_tries:
            if step.kind == ASKING:
                self._send_ask(now)
            elif step.kind == JOINING:
                self._send_join(now)
        elif self._membership is not None and name == self.leader:
            self._renew(self._membership, now)

    def _lead(self, now: float) -> None:
        """Starts a group of its own."""
        former = self.leader
        version = self.view.version + 1
        self._step.end()
        self._membership = None
        self._roster = self._alone(version)
        self._idle_s = self._settings.ask_interval_s
        self._ask_later(now, self._settings.ask_interval_s)
        self._changes.append(LeaderChanged(former, self.name))
        self._changes.append(ViewChanged())

    # --- messages -------------------------------------------------------------------------------------------------------

    def handle(self, sender: str, message: Message, now: float) -> None:
        """A message arrived. What does not fit the state any more is ignored; what nobody means to say raises ValueError."""
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

    def _believe(self, sender: str, version: int) -> None:
        if version > self.view.version + MAX_AHEAD:
            raise ValueError(
                f"{sender} speaks of a view of version {version:,}; those of this group are at {self.view.version:,}"
            )
