"""What a leader keeps of its group: the view, which changes its members have not been told yet, and who has gone silent."""

from __future__ import annotations

import math
from typing import Final

from nearcast.groups.messages import Join, Update
from nearcast.groups.settings import FormationSettings
from nearcast.groups.views import Member, View

FOREVER: Final = math.inf

#: What :meth:`Roster.admit` did.
RENEWED: Final = 0
BEHIND: Final = 1
ADMITTED: Final = 2

#: Renewals that a member may miss.
MISSES: Final = 4


class Roster:
    """The group of one leader, from its first view on. Each time a broker begins to lead it gets a new one."""

    def __init__(self, view: View, settings: FormationSettings) -> None:
        self.view = view
        self._name = view.leader
        self._settings = settings
        self._told_version = view.version
        self._changed: dict[str, Member | None] = {}
        self._tell_at = FOREVER
        self._told_at = -FOREVER
        #: When each member was last heard of, who was heard of longest ago first.
        self._heard: dict[str, float] = {}
        self._numbers: dict[str, int] = {}

    def admit(self, sender: str, join: Join, now: float) -> int:
        """A Join arrived. RENEWED: nothing is to be said; BEHIND: it should get the whole view; ADMITTED: that too, and the
        view changed."""
        self._heard.pop(sender, None)
        self._heard[sender] = now
        self._numbers[sender] = join.number
        view = self.view
        member = view.members.get(sender)
        same_place = member is not None and join.address == member.address and join.probe_address == member.probe_address
        if member is not None and same_place and join.version <= view.version:
            if join.version < member.joined_version:
                return BEHIND  # the Welcome is lost, or still under way
            if join.reign == view.reign:
                return BEHIND if join.version < self._told_version else RENEWED
        version = max(view.version, join.version) + 1
        admitted = Member(sender, join.address, version, join.probe_address)
        self.view = view.with_member(admitted)
        self._changed[sender] = admitted
        self._due(now)
        return ADMITTED

    def note(self, sender: str, now: float) -> bool:
        """A member was heard of. Whether it is one."""
        if sender not in self._heard:
            return False
        self._heard.pop(sender)
        self._heard[sender] = now
        return True

    def remove(self, name: str, now: float) -> bool:
        """A member is gone. Whether it was one."""
        if name == self._name or name not in self.view.members:
            return False
        self._heard.pop(name, None)
        self._numbers.pop(name, None)
        self.view = self.view.without(name, self.view.version + 1)
        self._changed[name] = None
        self._due(now)
        return True

    def left(self, name: str, number: int, now: float) -> bool:
        """A Leave arrived. It counts unless the member has joined again since. Whether it did."""
        if number and self._numbers.get(name, 0) > number:
            return False
        return self.remove(name, now)

    def set_thresholds(self, join_ms: float, leave_ms: float, now: float) -> bool:
        """Whether they are others than before."""
        view = self.view
        if view.join_ms == join_ms and view.leave_ms == leave_ms:
            return False
        self.view = view.with_thresholds(join_ms, leave_ms, view.version + 1)
        self._due(now)
        return True

    def silent(self, now: float) -> list[str]:
        """Members that have not been heard of for too long."""
        found = []
        for name, heard_at in self._heard.items():
            if now < heard_at + MISSES * self._settings.renew_interval_s:
                break
            found.append(name)
        return found

    def update(self, now: float) -> Update | None:
        """What is to be told to the members now, if anything."""
        if now < self._tell_at:
            return None
        view = self.view
        joined = [member for member in self._changed.values() if member is not None]
        left = [name for name, member in self._changed.items() if member is None]
        message = Update(view.reign, self._told_version, view.version, view.join_ms, view.leave_ms, joined, left)
        self._changed = {}
        self._told_version = view.version
        self._told_at = now
        self._tell_at = FOREVER
        return message

    def next_deadline(self) -> float:
        if not self._heard:
            return self._tell_at
        longest_ago = next(iter(self._heard.values()))
        return min(self._tell_at, longest_ago + MISSES * self._settings.renew_interval_s)

    def _due(self, now: float) -> None:
        if self._tell_at == FOREVER:
            interval_s = max(self._settings.view_interval_s, len(self.view.members) / self._settings.updates_per_s)
            self._tell_at = max(now, self._told_at + interval_s)
