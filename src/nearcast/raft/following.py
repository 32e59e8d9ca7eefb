"""What a replica does with a leader's messages: takes entries, and acknowledges what is on its disk (Raft §5.3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nearcast.errors import RemoteProtocolError
from nearcast.raft.messages import (
    Append,
    AppendResponse,
    Heartbeat,
    HeartbeatResponse,
    InstallSnapshot,
    ReadRequest,
    ReadResponse,
)
from nearcast.raft.reads import AskedReads
from nearcast.raft.terms import UNKNOWN

if TYPE_CHECKING:
    from nearcast.raft.node import RaftNode


class Following:
    """One for the life of a node; :meth:`begin` when there is another term or leader."""

    def __init__(self, node: RaftNode) -> None:
        self._node = node
        self.received = node.commit
        """Up to here the log in memory is the leader's."""
        self._acknowledged = 0
        self.asked = AskedReads(node.draw_number())

    def begin(self) -> None:
        """Nothing is known of a leader but that it has what is committed (Raft §5.4.3)."""
        self.received = self._node.commit
        self._acknowledged = 0
        self._node.fail_reads(self.asked.abandoned())

    @property
    def on_disk(self) -> int:
        """What may be acknowledged."""
        return min(self.received, self._node.durability.persisted_index)

    def append(self, message: Append) -> None:
        """Entries, or the question whether the logs agree so far."""
        node = self._node
        view = node.view
        entries = message.entries
        index = message.previous_index
        end = index + len(entries)
        if index < node.commit:
            # What is committed is the same everywhere; only what is behind it can be news.
            entries = entries[node.commit - index :]
            index = min(end, node.commit)
        elif view.term_of(index) != message.previous_term:
            self._reject(message)
            return
        for position in range(len(entries)):
            entry = entries[position]
            term = view.term_of(entry.index)
            if term == entry.term:
                continue
            if term != UNKNOWN:
                if entry.index <= node.commit:
                    raise RemoteProtocolError(
                        0x82, f"replica {message.source} contradicts entry {entry.index}, which is committed"
                    )
                node.cut(entry.index - 1)
            for following in entries[position:]:
                view.append(following)
            break
        self.received = max(self.received, end)
        node.commit_up_to(min(message.commit, end))
        if end <= node.durability.persisted_index:
            self._acknowledge()

    def heartbeat(self, message: Heartbeat) -> None:
        """The leader is there. It has no more committed than this replica's disk has, as far as it says here."""
        node = self._node
        self.received = max(self.received, min(message.commit, node.view.last_index))
        node.commit_up_to(min(message.commit, node.view.last_index))
        if message.round:
            node.rank = message.rank
            node.patience_s = message.election_timeout_s
            node.reply(
                HeartbeatResponse(
                    node.id,
                    message.source,
                    node.term,
                    message.round,
                    message.sent_s,
                    self.on_disk,
                    self.received,
                    node.priority,
                )
            )

    def install(self, message: InstallSnapshot) -> None:
        """The driver has what the snapshot describes."""
        node = self._node
        snapshot = message.snapshot
        if snapshot.index > node.commit:
            if node.view.term_of(snapshot.index) == snapshot.term:
                self.received = max(self.received, snapshot.index)
                node.commit_up_to(snapshot.index)  # the log has it all: nothing to install
            else:
                node.install(snapshot)
                self.received = snapshot.index
        if snapshot.index <= node.durability.persisted_index:
            self._acknowledge()

    def persisted(self) -> None:
        """More is on disk."""
        if self.on_disk > self._acknowledged and self._node.leader not in (0, self._node.id):
            self._acknowledge()

    def read(self, token: int) -> None:
        """Ask the leader how far one must be; in :meth:`flush`, with all others that come meanwhile."""
        self.asked.add(token)

    def answered(self, message: ReadResponse) -> None:
        """Tokens that may be answered once all up to an index is applied."""
        for token in self.asked.answered(message.number):
            self._node.allow_read(token, message.index)

    def flush(self) -> None:
        """Questions that came up since the last time."""
        node = self._node
        asked = self.asked
        if asked.unanswered and node.now - asked.asked_s >= node.timeout_s:
            asked.ask_again()
        if asked.has_new and node.leader:
            node.send(ReadRequest(node.id, node.leader, node.term, asked.ask(node.now)))

    def _acknowledge(self) -> None:
        node = self._node
        self._acknowledged = max(self._acknowledged, self.on_disk)
        node.reply(AppendResponse(node.id, node.leader, node.term, self.on_disk, priority=node.priority))

    def _reject(self, message: Append) -> None:
        """Skip whole terms at a time on the way back (Raft §5.3, end)."""
        node = self._node
        view = node.view
        hint = view.terms.last_at_most(min(message.previous_index, view.last_index), message.previous_term)
        node.reply(
            AppendResponse(
                node.id, message.source, node.term, message.previous_index, True, hint, view.term_of(hint), node.priority
            )
        )
