"""What a leader does: replicates its log, decides what is committed, confirms that it leads. One for each term it leads."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from nearcast.errors import NotLeader, ProposalRefused, RemoteProtocolError
from nearcast.raft.configuration import Configuration
from nearcast.raft.entries import CONFIGURATION, DATA, NOOP, Entry
from nearcast.raft.handover import Handover
from nearcast.raft.messages import (
    MAX_ENTRIES,
    MAX_RANK,
    Append,
    AppendResponse,
    Heartbeat,
    HeartbeatResponse,
    InstallSnapshot,
    ReadRequest,
    ReadResponse,
    TimeoutNow,
)
from nearcast.raft.progress import INSTALLING, PROBING, REPLICATING, Progress
from nearcast.raft.reads import Read, ReadQueue
from nearcast.raft.timing import election_timeout

if TYPE_CHECKING:
    from nearcast.raft.node import RaftNode


class Leading:
    """See the module."""

    def __init__(self, node: RaftNode) -> None:
        self.node = node
        self.progress: dict[int, Progress] = {}
        """Of all other replicas."""
        self.handover = Handover(self)
        self.reads = ReadQueue()
        self._round = 0
        self._heartbeat_s = node.now
        """When the next heartbeat is due."""
        self._quorum_s = node.now + node.timeout_s
        """When to look whether a majority still answers."""
        self._excused = False
        self._uncommitted: deque[Entry] = deque()
        self._uncommitted_bytes = 0
        self.first_index = node.view.last_index + 1
        """Of this term."""
        self._follow_configuration()
        self._append(NOOP, [])

    @property
    def is_settled(self) -> bool:
        """Whether an entry of this term is committed: from then on the commit index is known to be the newest (Raft §8)."""
        return self.node.commit >= self.first_index

    def next_deadline(self) -> float:
        return min(self._heartbeat_s, self._quorum_s)

    # --- proposals ------------------------------------------------------------------------------------------------------

    def propose(self, pieces: list[bytes]) -> int:
        """One entry; returns its index."""
        self._check_open()
        settings = self.node.settings
        size = 0
        for piece in pieces:
            size += len(piece)
        if size > settings.max_entry_bytes:
            raise ProposalRefused(f"an entry has at most {settings.max_entry_bytes:,} bytes, and this one {size:,}")
        if self._uncommitted_bytes and self._uncommitted_bytes + size > settings.max_uncommitted_bytes:
            raise ProposalRefused("too much waits for the quorum")
        return self._append(DATA, pieces)

    def change(self, configuration: Configuration) -> int:
        """Another configuration; returns its index."""
        node = self.node
        self._check_open()
        view = node.view
        if view.configuration_index > node.commit:
            raise ProposalRefused("another change of the replica set is under way")
        if not self.is_settled:
            # Without this, two leaders could each change the set by one, and the results need not overlap.
            raise ProposalRefused("the leader is new: nothing of its term is committed yet")
        problem = view.configuration.problem_with(configuration)
        if problem:
            raise ProposalRefused(problem)
        for replica in configuration.voters:
            if replica not in view.configuration.voters and not self.is_caught_up(replica):
                raise ProposalRefused(f"replica {replica} has to catch up as a learner first")
        index = self._append(CONFIGURATION, [configuration.encode()])
        self._follow_configuration()
        self.advance_commit()
        return index

    def is_caught_up(self, replica: int) -> bool:
        """Whether a replica lacks little, and is there."""
        node = self.node
        progress = self.progress.get(replica)
        if progress is None:
            return replica == node.id
        is_there = progress.heard and node.now - progress.heard_s < node.timeout_s
        behind = node.view.bytes_behind(progress.match)
        return is_there and progress.state == REPLICATING and behind <= node.settings.caught_up_bytes

    def transfer(self, target: int) -> None:
        """Hand over to a voter."""
        node = self.node
        if target not in node.view.configuration.voters or target == node.id:
            raise ProposalRefused(f"replica {target} cannot take over: it is no other voter")
        self.handover.begin(target, False)
        self.handover.advance()

    def read(self, source: int, token: int) -> None:
        """A linearizable read, of this replica or another one."""
        self.reads.add(Read(source, token))

    def asked(self, message: ReadRequest) -> None:
        """Another replica reads."""
        if self.reads.count < self.node.settings.max_waiting_reads:
            self.reads.add(Read(message.source, message.number))

    # --- answers --------------------------------------------------------------------------------------------------------

    def append_response(self, message: AppendResponse) -> None:
        progress = self._heard(message.source, message.priority)
        if progress is None:
            return
        node = self.node
        if not message.rejected:
            self._acknowledged(progress, message.index)
            return
        if message.index <= progress.match or (progress.state == PROBING and message.index != progress.next - 1):
            return  # of before: all up to there was acknowledged since, or it is asked somewhere else by now
        if progress.state == INSTALLING:
            return
        progress.probe(min(message.index, node.view.terms.last_at_most(message.hint_index, message.hint_term) + 1))

    def heartbeat_response(self, message: HeartbeatResponse) -> None:
        progress = self._heard(message.source, message.priority)
        if progress is None:
            return
        node = self.node
        if message.round > progress.round:
            progress.round = message.round
            progress.round_trips.measured(node.now - message.sent_s)
        progress.waiting = False
        self._acknowledged(progress, message.index)
        if progress.state == PROBING and message.received >= progress.next - 1:
            # It has what was asked, on a disk that takes its time: there is no need to wait for that, or to ask again.
            progress.replicate(min(message.received, node.view.last_index))
        progress.lost(message.received, message.round)
        self._confirm_reads()

    def snapshot_sent(self, replica: int, arrived: bool) -> None:
        """The driver brought a snapshot, or could not."""
        progress = self.progress.get(replica)
        if progress is not None and progress.state == INSTALLING:
            progress.probe(progress.snapshot_index + 1 if arrived else progress.match + 1)
            progress.waiting = True

    def unreachable(self, replica: int) -> None:
        """A link broke: what was on its way there is lost, perhaps. Its next answer to a heartbeat says."""
        progress = self.progress.get(replica)
        if progress is not None and progress.state == REPLICATING:
            progress.probe(progress.match + 1)
            progress.waiting = True

    def _heard(self, replica: int, priority: int) -> Progress | None:
        progress = self.progress.get(replica)
        if progress is not None:
            progress.heard_s = self.node.now
            progress.heard = True
            progress.priority = priority
        return progress

    def _acknowledged(self, progress: Progress, index: int) -> None:
        node = self.node
        if index > node.view.last_index:
            raise RemoteProtocolError(0x82, f"replica {progress.replica} acknowledges entry {index}, which there is not")
        news = progress.acknowledged(index)
        agrees = progress.state == PROBING and index >= progress.next - 1
        arrived = progress.state == INSTALLING and index >= progress.snapshot_index
        if agrees or arrived:
            progress.replicate()
        if news:
            self.advance_commit()
            self.handover.advance()

    # --- commitment -----------------------------------------------------------------------------------------------------

    def match_of(self, replica: int) -> int:
        """Up to where a replica's disk has this log."""
        if replica == self.node.id:
            return self.node.durability.persisted_index
        progress = self.progress.get(replica)
        return progress.match if progress is not None else 0

    def advance_commit(self) -> None:
        """What enough disks have is committed, if it is of this term; and with it all before it (Raft §5.4.2)."""
        node = self.node
        view = node.view
        configuration = view.configuration
        matches = sorted([self.match_of(replica) for replica in configuration.voters], reverse=True)
        index = matches[configuration.commit_quorum - 1]
        if index <= node.commit or not self.may_commit(index):
            return
        node.commit_up_to(index)
        while self._uncommitted and self._uncommitted[0].index <= index:
            self._uncommitted_bytes -= self._uncommitted.popleft().size
        if view.configuration_index <= index and node.id not in configuration.voters:
            self._leave()

    def may_commit(self, index: int) -> bool:
        """An entry of an earlier term may be on a majority and still be replaced: it commits with one of this term."""
        return self.node.view.term_of(index) == self.node.term

    def _leave(self) -> None:
        """The set goes on without this replica (thesis §4.2.2); the one that is most ready need not wait for its timeout."""
        node = self.node
        best = 0
        for replica in node.view.configuration.voters:
            if self.match_of(replica) == node.view.last_index and (not best or self._rank(replica) < self._rank(best)):
                best = replica
        self._flush_all()
        if best:
            node.send(TimeoutNow(node.id, best, node.term))
        node.step_down()

    # --- time -----------------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        node = self.node
        now = node.now
        if now >= self._quorum_s:
            if now - self._quorum_s > node.settings.heartbeat_interval_seconds and not self._excused:
                # This process stood still: answers wait to be read.
                self._excused = True
                self._quorum_s = now + 2.0 * node.settings.heartbeat_interval_seconds
            elif self.has_quorum():
                self._excused = False
                self._quorum_s = now + node.timeout_s
            else:
                node.step_down()
                return
        if now >= self._heartbeat_s:
            self._heartbeat_s = now + node.settings.heartbeat_interval_seconds
            self._measure()
            self._heartbeat()
            self.handover.tick()

    def has_quorum(self) -> bool:
        """Whether a majority answered lately (check-quorum; thesis §6.2)."""
        node = self.node
        configuration = node.view.configuration
        count = 0
        for replica in configuration.voters:
            progress = self.progress.get(replica)
            if replica == node.id or (progress is not None and node.now - progress.heard_s < node.timeout_s):
                count += 1
        return count >= configuration.majority

    def _measure(self) -> None:
        """Elections take round trips: where those are long, timeouts have to be."""
        node = self.node
        worst_s = 0.0
        for replica in node.view.configuration.voters:
            progress = self.progress.get(replica)
            if progress is not None and node.now - progress.heard_s < node.timeout_s:
                worst_s = max(worst_s, progress.round_trips.worst_s)
        node.patience_s = election_timeout(node.settings, worst_s)

    def _heartbeat(self) -> None:
        node = self.node
        self._round += 1
        for progress in self.progress.values():
            commit = min(node.commit, progress.match)
            progress.told_commit = max(progress.told_commit, commit)
            node.send(
                Heartbeat(
                    node.id,
                    progress.replica,
                    node.term,
                    commit,
                    self._round,
                    node.now,
                    self._rank(progress.replica),
                    node.patience_s,
                )
            )

    def _rank(self, replica: int) -> int:
        """How many voters are to stand for election before a replica: those that are there first, then by priority."""
        rank = 0
        mine = self._standing(replica)
        for other in self.node.view.configuration.voters:
            if other not in (replica, self.node.id) and self._standing(other) < mine:
                rank += 1
        return min(rank, MAX_RANK)

    def _standing(self, replica: int) -> tuple[bool, int, int]:
        progress = self.progress.get(replica)
        if progress is None:
            return True, 0, replica
        is_away = not progress.heard or self.node.now - progress.heard_s >= self.node.timeout_s
        return is_away, -progress.priority, replica

    # --- sending --------------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """All that was proposed, acknowledged and asked since the last time, in as few messages as it takes."""
        if self.reads.wants_round and self.is_settled:
            self._heartbeat()
            self.reads.begin(self._round, self.node.commit)
            self._confirm_reads()
        self._flush_all()

    def _flush_all(self) -> None:
        for progress in self.progress.values():
            self._replicate(progress)

    def _replicate(self, progress: Progress) -> None:
        node = self.node
        view = node.view
        settings = node.settings
        while progress.is_open(settings.max_inflight_bytes, settings.max_inflight_messages):
            probes = progress.state == PROBING
            if not probes and progress.next > view.last_index:
                break
            previous = progress.next - 1
            if previous < view.terms.base_index:
                self._send_snapshot(progress)
                return
            entries = view.entries(progress.next, settings.max_append_bytes, MAX_ENTRIES)
            if not entries and progress.next <= view.last_index and not probes:
                break  # being fetched
            size = 0
            for entry in entries:
                size += entry.size
            commit = node.commit
            node.send(Append(node.id, progress.replica, node.term, previous, view.term_of(previous), commit, entries))
            progress.sent(previous + len(entries), size, self._round)
            progress.told_commit = max(progress.told_commit, min(commit, previous + len(entries)))
        if progress.state == REPLICATING and progress.told_commit < min(node.commit, progress.match):
            # Nothing else is on its way that would say so.
            commit = min(node.commit, progress.match)
            progress.told_commit = commit
            node.send(Heartbeat(node.id, progress.replica, node.term, commit, 0, node.now, 0, 0.0))

    def _send_snapshot(self, progress: Progress) -> None:
        node = self.node
        snapshot = node.view.snapshot()
        if snapshot is None or snapshot.index < node.view.terms.base_index:
            progress.probe(progress.next)
            progress.waiting = True  # ask again with the next heartbeat
            return
        progress.install(snapshot.index)
        node.send(InstallSnapshot(node.id, progress.replica, node.term, snapshot))

    def _confirm_reads(self) -> None:
        """Reads whose round a majority answered may go ahead (thesis §6.4)."""
        oldest = self.reads.oldest_round()
        if not oldest:
            return
        node = self.node
        configuration = node.view.configuration
        rounds: list[int] = []
        for replica in configuration.voters:
            progress = self.progress.get(replica)
            rounds.append(self._round if replica == node.id else progress.round if progress is not None else 0)
        rounds.sort(reverse=True)
        for batch in self.reads.confirmed(rounds[configuration.majority - 1]):
            for read in batch.reads:
                if read.source == node.id:
                    node.allow_read(read.token, batch.index)
                else:
                    node.send(ReadResponse(node.id, read.source, node.term, read.token, batch.index))

    # --- inside ---------------------------------------------------------------------------------------------------------

    def _append(self, kind: int, pieces: list[bytes]) -> int:
        node = self.node
        entry = Entry(node.view.last_index + 1, node.term, kind, pieces)
        node.view.append(entry)
        self._uncommitted.append(entry)
        self._uncommitted_bytes += entry.size
        return entry.index

    def _check_open(self) -> None:
        if self.handover.target:
            raise ProposalRefused("leadership is being handed over")
        if self.node.id not in self.node.view.configuration.voters:
            raise NotLeader(0)

    def _follow_configuration(self) -> None:
        """Replicas came or went."""
        node = self.node
        replicas = node.view.configuration.replicas
        for replica in list(self.progress):
            if replica not in replicas:
                del self.progress[replica]
        for replica in replicas:
            if replica != node.id and replica not in self.progress:
                self.progress[replica] = Progress(replica, node.view.last_index + 1, node.now)
