"""A replica that stands for election counts its votes (Raft §5.2; pre-vote: thesis §9.6)."""

from __future__ import annotations

from typing import Final

from nearcast.raft.configuration import Configuration

PENDING: Final = 0
WON: Final = 1
LOST: Final = 2


class Election:
    """One candidacy: with ``pre``, a question that changes nobody's term; else an election."""

    def __init__(self, term: int, pre: bool) -> None:
        self.term = term
        """The one that is, or would be, fought for."""
        self.pre = pre
        self.votes: dict[int, bool] = {}

    def voted(self, replica: int, granted: bool) -> None:
        """A replica's first word counts."""
        self.votes.setdefault(replica, granted)

    def outcome(self, configuration: Configuration) -> int:
        """As things stand. Only voters count."""
        granted = denied = 0
        for replica in configuration.voters:
            vote = self.votes.get(replica)
            if vote is True:
                granted += 1
            elif vote is False:
                denied += 1
        if granted >= configuration.majority:
            return WON
        if len(configuration.voters) - denied < configuration.majority:
            return LOST
        return PENDING
