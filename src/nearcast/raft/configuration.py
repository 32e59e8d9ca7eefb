"""Who belongs to a replica set, and which changes are allowed (thesis, chapter 4).

A configuration is the payload of an entry, and holds from the moment a replica has that entry in its log, committed or not.
Voters decide; learners only receive, until they have caught up and are made voters. One voter is added or removed at a time:
any majority before and any majority after the change then have a replica in common, and no joint phase is needed.

``write_quorum`` lets an entry wait for more replicas than a majority (ePulsar §3.5). Elections stay with the majority: it
meets every larger quorum too.
"""

from __future__ import annotations

import struct
from typing import Final

from nearcast.errors import RemoteProtocolError

MAX_REPLICAS: Final = 64
"""In one set, learners included."""
MAX_CONTEXT_BYTES: Final = 65_536
MAX_ID: Final = (1 << 63) - 1

_HEAD: Final = struct.Struct("<BBBBI")
_VERSION: Final = 1


class Configuration:
    """See the module. ``context`` is the driver's: names, addresses, sites."""

    def __init__(
        self, voters: tuple[int, ...], learners: tuple[int, ...] = (), write_quorum: int = 0, context: bytes = b""
    ) -> None:
        self.voters = tuple(sorted(voters))
        self.learners = tuple(sorted(learners))
        self.write_quorum = write_quorum
        self.context = context

    @property
    def replicas(self) -> tuple[int, ...]:
        """All of them, voters first."""
        return self.voters + self.learners

    @property
    def majority(self) -> int:
        """How many voters elect a leader and confirm one."""
        return len(self.voters) // 2 + 1

    @property
    def commit_quorum(self) -> int:
        """On how many voters' disks an entry must be before it is committed."""
        return max(self.majority, min(self.write_quorum, len(self.voters)))

    def with_learner(self, replica: int) -> Configuration:
        """With one more replica, which does not vote."""
        learners = self.learners if replica in self.learners else (*self.learners, replica)
        return Configuration(self.voters, learners, self.write_quorum, self.context)

    def with_voter(self, replica: int) -> Configuration:
        """With one more voter, which was a learner perhaps."""
        voters = self.voters if replica in self.voters else (*self.voters, replica)
        return Configuration(voters, _without(self.learners, replica), self.write_quorum, self.context)

    def without(self, replica: int) -> Configuration:
        """Without a replica."""
        return Configuration(_without(self.voters, replica), _without(self.learners, replica), self.write_quorum, self.context)

    def with_context(self, context: bytes) -> Configuration:
        """The same replicas, told something else."""
        return Configuration(self.voters, self.learners, self.write_quorum, context)

    def problem_with(self, following: Configuration) -> str:
        """Why ``following`` may not come next; empty if it may."""
        if not following.voters:
            return "a replica set needs a voter"
        if len(following.replicas) > MAX_REPLICAS:
            return f"a replica set has at most {MAX_REPLICAS} replicas"
        if len(set(following.replicas)) != len(following.replicas):
            return "a replica is listed twice"
        if len(set(self.voters) ^ set(following.voters)) > 1:
            return "voters are added and removed one at a time"
        return ""

    def encode(self) -> bytes:
        """As an entry's payload."""
        head = _HEAD.pack(_VERSION, len(self.voters), len(self.learners), self.write_quorum, len(self.context))
        return head + struct.pack(f"<{len(self.replicas)}Q", *self.replicas) + self.context

    @staticmethod
    def decode(data: bytes) -> Configuration:
        """What :meth:`encode` made; anything else is a :class:`~nearcast.errors.RemoteProtocolError`."""
        if len(data) < _HEAD.size:
            raise RemoteProtocolError(0x81, "a configuration is cut short")
        version, voter_count, learner_count, write_quorum, context_bytes = _HEAD.unpack_from(data)
        count = voter_count + learner_count
        if version != _VERSION or count > MAX_REPLICAS or context_bytes > MAX_CONTEXT_BYTES:
            raise RemoteProtocolError(0x81, "not a configuration")
        ids_end = _HEAD.size + 8 * count
        if len(data) != ids_end + context_bytes:
            raise RemoteProtocolError(0x81, "a configuration has the wrong length")
        replicas: tuple[int, ...] = struct.unpack_from(f"<{count}Q", data, _HEAD.size)
        if len(set(replicas)) != count or any(not 0 < replica <= MAX_ID for replica in replicas):
            raise RemoteProtocolError(0x81, "a configuration lists what is no replica")
        voters, learners = replicas[:voter_count], replicas[voter_count:]
        if voters != tuple(sorted(voters)) or learners != tuple(sorted(learners)):
            raise RemoteProtocolError(0x81, "a configuration is out of order")
        return Configuration(voters, learners, write_quorum, data[ids_end:])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Configuration) and self.encode() == other.encode()

    def __hash__(self) -> int:
        return hash(self.encode())

    def __repr__(self) -> str:
        text = f"voters {','.join(map(str, self.voters))}"
        if self.learners:
            text += f", learners {','.join(map(str, self.learners))}"
        if self.write_quorum:
            text += f", write quorum {self.write_quorum}"
        return text


NOBODY: Final = Configuration(())
"""What a replica begins with that is to join a set: it learns the rest from the log."""


def _without(replicas: tuple[int, ...], replica: int) -> tuple[int, ...]:
    return tuple([other for other in replicas if other != replica])
