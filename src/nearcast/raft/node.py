"""One replica of one replica set: the consensus core (Ongaro and Ousterhout, "In search of an understandable consensus
algorithm", extended version; Ongaro's thesis, "Consensus: bridging theory and practice").

A node reacts and never waits. It is told of messages (:meth:`RaftNode.step`), of time (:meth:`~RaftNode.tick`), of the disk
(:meth:`~RaftNode.persisted`) and of wishes (:meth:`~RaftNode.propose`, :meth:`~RaftNode.read`, ...), and collects what is to
be written and sent until :meth:`~RaftNode.ready` is asked: :class:`~nearcast.raft.ready.Ready` has the contract. Asking once
after many calls is what makes batches::

    node.step(message, now) ... node.propose(pieces, now) ... node.tick(now)
    while (ready := node.ready()) is not None:
        log.write(ready); links.send(ready.messages); readers.see(ready.commit)
        node.advance()
        if ready.must_sync: flusher.flush_then(lambda: node.persisted(ready.number, now))
    wake me at node.next_deadline()

Replicas are positive numbers, never used again: one that lost its disk joins anew, with another number. This module knows
neither disks, nor links, nor clocks, nor what entries mean.

=============== ===================================================== ====================
role            becomes another one when                              and then
=============== ===================================================== ====================
FOLLOWER        the leader was not heard for an election timeout      PRE_CANDIDATE
..              told to by the leader (TimeoutNow)                    CANDIDATE
PRE_CANDIDATE   a majority would vote for it                          CANDIDATE
CANDIDATE       a majority voted for it                               LEADER
LEADER          no majority answered for an election timeout          FOLLOWER, of nobody
..              the entry that removes it from the set is committed   FOLLOWER, of nobody
any but LEADER  a leader of its term is heard                         FOLLOWER
any             a higher term is heard of                             FOLLOWER
=============== ===================================================== ====================
"""

from __future__ import annotations

import math
import random
from itertools import pairwise
from typing import Final

from nearcast.errors import LocalProtocolError, NotLeader, ProposalRefused, RemoteProtocolError
from nearcast.raft.configuration import MAX_ID, Configuration
from nearcast.raft.durability import Durability
from nearcast.raft.elections import LOST, WON, Election
from nearcast.raft.entries import HardState, Snapshot
from nearcast.raft.following import Following
from nearcast.raft.handover import Patience
from nearcast.raft.leading import Leading
from nearcast.raft.messages import (
    MAX_PRIORITY,
    Append,
    AppendResponse,
    Heartbeat,
    HeartbeatResponse,
    InstallSnapshot,
    Message,
    ReadRequest,
    ReadResponse,
    TimeoutNow,
    VoteRequest,
    VoteResponse,
)
from nearcast.raft.ready import ReadState, Ready
from nearcast.raft.settings import RaftSettings
from nearcast.raft.storage import Log
from nearcast.raft.timing import UNRANKED, election_delay
from nearcast.raft.view import LogView

FOLLOWER: Final = 0
PRE_CANDIDATE: Final = 1
CANDIDATE: Final = 2
LEADER: Final = 3

ROLES: Final = ("follower", "pre-candidate", "candidate", "leader")


class RaftNode:
    """See the module."""

    def __init__(self, replica: int, log: Log, settings: RaftSettings, rng: random.Random, now: float) -> None:
        if not 0 < replica <= MAX_ID:
            raise LocalProtocolError(f"{replica} is no replica's number")
        recovered = log.recovered()
        hard_state = recovered.hard_state
        self.id = replica
        self.settings = settings
        self.now = now
        self.view = LogView(log, recovered, settings.tail_bytes)
        self.durability = Durability(hard_state, self.view.last_index)
        self.term = hard_state.term
        self.vote = hard_state.vote
        if self.view.last_term > self.term:  # the hard state is older than the log: a crash lost it, and no vote went out
            self.term = self.view.last_term
            self.vote = 0
        self.commit = max(self.view.terms.base_index, min(hard_state.commit, self.view.last_index))
        """Everything up to here is decided."""
        self.role = FOLLOWER
        self.leader = 0
        """Who leads, as far as is known; 0: nobody."""
        self.leading: Leading | None = None
        self.patience = Patience(settings.handover_delay_seconds, settings.max_handover_delay_seconds)
        self.priority = 0
        self.rank = UNRANKED
        """How many others are to stand for election before this replica."""
        self.patience_s = 0.0
        """The election timeout as the last leader wished it."""
        self._rng = rng
        self.following = Following(self)
        self._election: Election | None = None
        self._election_s = now
        """When to stand for election."""
        self._heard_s = -math.inf
        """When the leader was last heard."""
        self._led_term = self.term
        """The newest term that had a leader, as far as is known."""
        self._excused = False
        self._outgoing: list[Message] = []
        self._snapshot: Snapshot | None = None
        self._reads: list[ReadState] = []
        self._failed_reads: list[int] = []
        self._unadvanced = False
        self._advancing_to = 0
        self._told_commit = self.commit
        self._told_term = self.term
        self._told_leader = 0
        self._told_leads = False
        self._wait_for_leader()

    # --- events ---------------------------------------------------------------------------------------------------------

    def step(self, message: Message, now: float) -> None:
        """A message came. Raises :class:`~nearcast.errors.RemoteProtocolError` if what it says cannot be."""
        self._pass(now)
        if message.target != self.id:
            return
        if message.term > self.term:
            if not self._takes_higher(message):
                return
        elif message.term < self.term:
            self._answer_lower(message)
            return
        if isinstance(message, Append):
            self._hear(message.source)
            self.following.append(message)
        elif isinstance(message, Heartbeat):
            self._hear(message.source)
            self.following.heartbeat(message)
        elif isinstance(message, InstallSnapshot):
            self._hear(message.source)
            self.following.install(message)
        elif isinstance(message, VoteRequest):
            self._asked_for_vote(message)
        elif isinstance(message, VoteResponse):
            self._voted(message)
        elif isinstance(message, TimeoutNow):
            if self.role != LEADER and self._may_stand():
                self._stand(True)
        elif isinstance(message, ReadResponse):
            self.following.answered(message)
        elif self.leading is not None:
            if isinstance(message, AppendResponse):
                self.leading.append_response(message)
            elif isinstance(message, HeartbeatResponse):
                self.leading.heartbeat_response(message)
            elif isinstance(message, ReadRequest):
                self.leading.asked(message)

    def tick(self, now: float) -> None:
        """Time passed: call it at :meth:`next_deadline`, or more often."""
        self._pass(now)
        if self.leading is not None:
            self.leading.tick()
        elif now >= self._election_s:
            late_s = now - self._election_s
            if late_s > self.settings.heartbeat_interval_seconds and not self._excused and self.role == FOLLOWER:
                # This process stood still, and the leader's messages wait to be read.
                self._excused = True
                self._election_s = now + 2.0 * self.settings.heartbeat_interval_seconds
            elif self._may_stand():
                self._ask_before_standing()
            else:
                self._wait_for_leader()

    def next_deadline(self) -> float:
        """When the next :meth:`tick` is due, if nothing happens before."""
        if self.leading is not None:
            return self.leading.next_deadline()
        if self.following.asked.unanswered:
            return min(self._election_s, self.following.asked.asked_s + self.timeout_s)
        return self._election_s

    def persisted(self, number: int, now: float) -> None:
        """Everything that Readys up to this number wrote is on disk."""
        self._pass(now)
        for message in self.durability.persisted(number):
            if message.target == self.id:
                self.step(message, now)
            else:
                self._outgoing.append(message)
        if self.leading is not None:
            self.leading.advance_commit()
        else:
            self.following.persisted()

    def unreachable(self, replica: int, now: float) -> None:
        """The link to a replica broke. One that was the leader is suspected at once, and not only after its timeout."""
        self._pass(now)
        if self.leading is not None:
            self.leading.unreachable(replica)
        elif replica == self.leader:
            self._heard_s = -math.inf
            hurry_s = 0.1 * self.timeout_s * (max(self.rank, 0) + self._rng.random())
            self._election_s = min(self._election_s, now + hurry_s)

    def snapshot_sent(self, replica: int, arrived: bool, now: float) -> None:
        """The driver brought a replica what an InstallSnapshot describes, or gave up."""
        self._pass(now)
        if self.leading is not None:
            self.leading.snapshot_sent(replica, arrived)

    def entries_fetched(self) -> None:
        """Entries that :meth:`Log.entries` did not have at hand are there now. The next Ready sends them."""

    def compacted(self, base_index: int) -> None:
        """The log does not keep entries up to this one any more, which are committed; its snapshot stands in for them."""
        if base_index > self.commit:
            raise LocalProtocolError(f"entry {base_index} is not committed and cannot be compacted")
        if base_index > self.view.written_index:
            raise LocalProtocolError(f"entry {base_index} is not written and cannot be compacted")
        self.view.compact(base_index)

    # --- wishes ---------------------------------------------------------------------------------------------------------

    def propose(self, pieces: list[bytes], now: float) -> int:
        """Append an entry to the log of the set; returns the index that it has, if it is committed in this term.

        :class:`~nearcast.errors.NotLeader` or :class:`~nearcast.errors.ProposalRefused`: nothing was done.
        """
        self._pass(now)
        return self._leadership().propose(pieces)

    def change(self, configuration: Configuration, now: float) -> int:
        """Make the replica set another one, by one voter at most; returns the index of the entry that says so.

        A replica that is to vote is added as a learner first, and can be made a voter once it :meth:`is_caught_up`. As
        :meth:`propose` otherwise.
        """
        self._pass(now)
        return self._leadership().change(configuration)

    def transfer(self, target: int, now: float) -> None:
        """Hand leadership over. Proposals are refused until it happened, or an election timeout has passed."""
        self._pass(now)
        self._leadership().transfer(target)

    def read(self, token: int, now: float) -> None:
        """Ask how far this replica has to be to read what is true now (linearizable; thesis §6.4).

        The answer comes in :attr:`Ready.reads`, or the token in :attr:`Ready.failed_reads`. Any replica may ask. What is
        committed may be read without asking, at the risk that more is.
        """
        self._pass(now)
        count = self.leading.reads.count if self.leading is not None else self.following.asked.count
        if count >= self.settings.max_waiting_reads:
            raise ProposalRefused("too many reads wait for the quorum")
        if self.leading is not None:
            self.leading.read(self.id, token)
        elif self.leader:
            self.following.read(token)
        else:
            raise NotLeader(0)

    def set_priority(self, priority: int, now: float) -> None:
        """How much this replica ought to lead, compared with others; the leader hears of it with the next answer."""
        self._pass(now)
        if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
            raise LocalProtocolError(f"a priority is between -{MAX_PRIORITY:,} and {MAX_PRIORITY:,}")
        self.priority = priority

    def is_caught_up(self, replica: int) -> bool:
        """Whether a replica is there and lacks little: only the leader knows."""
        return self._leadership().is_caught_up(replica)

    # --- work for the driver --------------------------------------------------------------------------------------------

    def ready(self) -> Ready | None:
        """What is to be done now; None: nothing."""
        if self._unadvanced:
            raise LocalProtocolError("advance() comes before the next ready()")
        if self.leading is not None:
            self.leading.flush()
        else:
            self.following.flush()
        durability = self.durability
        entries = self.view.unhanded()
        changed = self.term != durability.handed_term or self.vote != durability.handed_vote
        must_sync = changed or bool(entries) or self._snapshot is not None
        leads = self.leading is not None and self.leading.is_settled
        is_news = (
            self.commit != self._told_commit
            or self.term != self._told_term
            or self.leader != self._told_leader
            or leads != self._told_leads
        )
        if not (must_sync or is_news or self._outgoing or self._reads or self._failed_reads):
            return None
        if must_sync:
            durability.handed(self.view.last_index, self.term, self.vote)
        ready = Ready(durability.number, must_sync)
        if must_sync:
            commit = min(self.commit, durability.persisted_index)
            if changed or commit != durability.handed_commit:
                durability.handed_commit = commit
                ready.hard_state = HardState(self.term, self.vote, commit)
        ready.snapshot = self._snapshot
        ready.entries = entries
        ready.messages = self._outgoing
        ready.reads = self._reads
        ready.failed_reads = self._failed_reads
        ready.commit = self._told_commit = self.commit
        ready.term = self._told_term = self.term
        ready.leader = self._told_leader = self.leader
        ready.leads = self._told_leads = leads
        self._snapshot = None
        self._outgoing = []
        self._reads = []
        self._failed_reads = []
        self._advancing_to = self.view.handed_index = self.view.last_index
        self._unadvanced = True
        return ready

    def advance(self) -> None:
        """What the last Ready had is written (not: flushed), and its commit index applied."""
        if not self._unadvanced:
            raise LocalProtocolError("there is no Ready to advance from")
        self._unadvanced = False
        self.view.written(min(self._advancing_to, self.view.handed_index))

    # --- for the parts --------------------------------------------------------------------------------------------------

    @property
    def timeout_s(self) -> float:
        """The election timeout that holds now."""
        return max(self.settings.election_timeout_seconds, min(self.patience_s, self.settings.max_election_timeout_seconds))

    def send(self, message: Message) -> None:
        """Send something that promises nothing."""
        self._outgoing.append(message)

    def reply(self, message: Message) -> None:
        """Send something in this term's name: not before term and vote are on disk (Raft, figure 2)."""
        if self.durability.is_promised(self.term, self.vote):
            self._outgoing.append(message)
        else:
            self.durability.hold(message, self.term, self.vote)

    def commit_up_to(self, index: int) -> None:
        """This much is decided, or more."""
        if index > self.commit:
            if index > self.view.last_index:
                raise LocalProtocolError(f"entry {index} cannot be committed: the log ends at {self.view.last_index}")
            self.commit = index

    def cut(self, last_index: int) -> None:
        """What follows an entry was never committed, and another leader has something else there."""
        if last_index < self.commit:
            raise LocalProtocolError(f"entry {self.commit} is committed and cannot be cut off")
        self.view.cut(last_index)
        self.durability.cut(last_index)

    def install(self, snapshot: Snapshot) -> None:
        """A snapshot replaces the log."""
        self.view.install(snapshot)
        self.durability.install()
        self.commit = snapshot.index
        self._snapshot = snapshot

    def draw_number(self) -> int:
        """One that no other process draws."""
        return self._rng.getrandbits(60)

    def allow_read(self, token: int, index: int) -> None:
        self._reads.append(ReadState(token, index))

    def fail_reads(self, tokens: list[int]) -> None:
        self._failed_reads.extend(tokens)

    def step_down(self) -> None:
        """Lead no more, in the same term, and know nobody who does."""
        self._follow(self.term, 0)

    # --- elections ------------------------------------------------------------------------------------------------------

    def _takes_higher(self, message: Message) -> bool:
        """A message of a later term: become a follower in it, unless it only asks, or must not disturb."""
        if isinstance(message, VoteRequest):
            if not message.transfer and self._hears_leader():
                return False  # a leader is there: whoever does not hear it shall not depose it (thesis §4.2.3)
            if message.pre:
                return True
        elif isinstance(message, VoteResponse) and message.pre and message.granted:
            return True  # of the term that would be
        is_leader = isinstance(message, (Append, Heartbeat, InstallSnapshot))
        self._follow(message.term, message.source if is_leader else 0)
        return True

    def _answer_lower(self, message: Message) -> None:
        """A message of an earlier term does nothing. Its sender may have to learn that."""
        if isinstance(message, (Append, Heartbeat, InstallSnapshot)):
            self.reply(AppendResponse(self.id, message.source, self.term, 0, priority=self.priority))
        elif isinstance(message, VoteRequest):
            self.reply(VoteResponse(self.id, message.source, self.term, False, message.pre))

    def _asked_for_vote(self, message: VoteRequest) -> None:
        if message.pre and message.term == self.term and self._hears_leader():
            return
        grants = self._grants(message)
        if message.pre:
            # Nothing is promised: nothing waits for the disk.
            self.send(VoteResponse(self.id, message.source, message.term if grants else self.term, grants, True))
            return
        if grants:
            self.vote = message.source
            self._wait_for_leader()
        self.reply(VoteResponse(self.id, message.source, self.term, grants, False))

    def _grants(self, message: VoteRequest) -> bool:
        """One vote a term (Raft §5.2), and only for a log that has all that may be committed (§5.4.1)."""
        is_free = (
            message.term > self.term  # only asked
            or self.vote == message.source
            or (self.vote == 0 and self.leader == 0)
        )
        return is_free and self.view.is_behind(message.last_term, message.last_index)

    def _voted(self, message: VoteResponse) -> None:
        election = self._election
        if election is None or election.pre != message.pre or (message.granted and message.term != election.term):
            return
        election.voted(message.source, message.granted)
        self._count(election)

    def _count(self, election: Election) -> None:
        outcome = election.outcome(self.view.configuration)
        if outcome == LOST:
            self._follow(self.term, 0)
            self._stand_again()
        elif outcome == WON:
            if election.pre:
                self._stand(False)
            else:
                self._lead()

    def _ask_before_standing(self) -> None:
        """Would they vote for this replica? A replica that is cut off, or behind, disturbs nobody (thesis §9.6)."""
        self.role = PRE_CANDIDATE
        self.leader = 0
        self._excused = False
        self.following.begin()
        self._election_s = self.now + self.timeout_s * (0.5 + 0.25 * self._rng.random())
        election = self._election = Election(self.term + 1, True)
        election.voted(self.id, True)
        self._ask_for_votes(election, False)
        self._count(election)

    def _stand(self, transfer: bool) -> None:
        """Stand for election (Raft §5.2). The own vote and the questions wait for the disk: a log that is shorter after a
        crash must not win with votes that the longer one got."""
        self._begin_term(self.term + 1)
        self.role = CANDIDATE
        self.vote = self.id
        self._stand_again()
        election = self._election = Election(self.term, False)
        self._hold(VoteResponse(self.id, self.id, self.term, True, False))
        self._ask_for_votes(election, transfer)

    def _ask_for_votes(self, election: Election, transfer: bool) -> None:
        view = self.view
        for replica in view.configuration.voters:
            if replica == self.id:
                continue
            request = VoteRequest(self.id, replica, election.term, view.last_index, view.last_term, election.pre, transfer)
            if election.pre:
                self.send(request)
            else:
                self._hold(request)

    def _lead(self) -> None:
        self.role = LEADER
        self.leader = self.id
        self._led_term = self.term
        self._election = None
        self.patience.elected(self.now)
        self.leading = Leading(self)

    def _follow(self, term: int, leader: int) -> None:
        """Be a follower, of somebody or of nobody yet."""
        if self.leading is not None:
            self.fail_reads([read.token for read in self.leading.reads.abandoned() if read.source == self.id])
        self.leading = None
        self._election = None
        self.role = FOLLOWER
        if term > self.term:
            self._begin_term(term)
        if leader != self.leader:
            self.leader = leader
            self.following.begin()
        self._wait_for_leader()

    def _begin_term(self, term: int) -> None:
        """What was about to be said in the term before need not be said."""
        self.term = term
        self.vote = 0
        self.leader = 0
        self.durability.forget_held()
        self.following.begin()

    def _hear(self, leader: int) -> None:
        """The leader of this term is there."""
        if self.role != FOLLOWER or self.leader != leader:
            if self.role == LEADER:
                raise RemoteProtocolError(0x82, f"replica {leader} leads in term {self.term}, and so does replica {self.id}")
            self._follow(self.term, leader)
        self._heard_s = self.now
        self._led_term = self.term
        self._wait_for_leader()

    def _hears_leader(self) -> bool:
        """Whether there is a leader, for all this replica knows. A little sooner than a replica stands for election, no: it
        would have to stand again."""
        if self.role == LEADER:
            return True
        lease_s = self.timeout_s - self.settings.heartbeat_interval_seconds
        return self.leader != 0 and self.now - self._heard_s < lease_s

    def _wait_for_leader(self) -> None:
        self._excused = False
        self._election_s = self.now + election_delay(self._slow_s(), self.rank, self._rng)

    def _stand_again(self) -> None:
        self._election_s = self.now + self._slow_s() * (0.75 + 0.5 * self._rng.random())

    def _slow_s(self) -> float:
        """The election timeout while elections fail: an election takes two flushes, and disks may be slower than anybody
        thought. Each further term without a leader doubles it, for everybody, since all hear of terms."""
        vain = self.term - self._led_term - 1
        if vain <= 0:
            return self.timeout_s
        longest_s = max(self.timeout_s, self.settings.max_election_timeout_seconds)
        return min(self.timeout_s * 2.0 ** min(vain, 10), longest_s)

    def _may_stand(self) -> bool:
        return self.id in self.view.configuration.voters

    # --- inside ---------------------------------------------------------------------------------------------------------

    def _hold(self, message: Message) -> None:
        self.durability.hold(message, self.term, self.vote)

    def _pass(self, now: float) -> None:
        self.now = max(self.now, now)

    def _leadership(self) -> Leading:
        if self.leading is None:
            raise NotLeader(self.leader)
        return self.leading

    def validate(self) -> None:
        """What must hold between any two calls; for tests. Raises :class:`~nearcast.errors.LocalProtocolError`."""
        view = self.view
        durability = self.durability
        self._must(view.terms.base_index <= self.commit <= view.last_index, "commit index outside of the log")
        self._must(view.written_index <= view.handed_index <= view.last_index, "written before it was handed out")
        self._must(durability.persisted_index <= view.handed_index, "on disk before it was handed out")
        self._must(view.last_term <= self.term, "an entry of a term to come")
        self._must((self.role == LEADER) == (self.leading is not None), "leads and does not")
        self._must((self.role in (PRE_CANDIDATE, CANDIDATE)) == (self._election is not None), "stands and does not")
        self._must(self.following.received <= view.last_index, "received more than there is")
        runs = view.terms.runs()
        for before, after in pairwise(runs):
            self._must(before[0] < after[0] and before[1] < after[1], "terms fall")
        if self.leading is not None:
            self._must(self.vote == self.id and self.leader == self.id, "leads without its own vote")
            for progress in self.leading.progress.values():
                self._must(progress.match < progress.next <= view.last_index + 1, "sends what there is not")
                self._must(progress.inflight_bytes >= 0, "less than nothing on its way")

    def _must(self, holds: bool, otherwise: str) -> None:
        if not holds:
            raise LocalProtocolError(f"replica {self.id}, {ROLES[self.role]}, term {self.term}: {otherwise}")
