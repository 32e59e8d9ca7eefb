"""The core with one rule broken: the random runs must catch each. Plain Python only: compiled classes stay as they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from nearcast.raft.configuration import Configuration
from nearcast.raft.durability import Durability
from nearcast.raft.following import Following
from nearcast.raft.leading import Leading
from nearcast.raft.messages import Append, AppendResponse, Message, VoteRequest, VoteResponse
from nearcast.raft.node import LEADER, RaftNode
from nearcast.raft.reads import ReadQueue
from nearcast.raft.view import LogView


@dataclass(frozen=True)
class Mutant:
    """What is broken, and how."""

    name: str
    rule: str
    apply: Callable[[pytest.MonkeyPatch], None]


def _vote_not_persisted(patch: pytest.MonkeyPatch) -> None:
    """Answers at once, and the disk hears of the vote only with the next term or not at all."""

    def reply(node: RaftNode, message: Message) -> None:
        if isinstance(message, VoteResponse):
            node.durability.handed_vote = node.vote
            node.durability.handed_term = node.term
            node.send(message)
        else:
            node.send(message)

    patch.setattr(RaftNode, "reply", reply)


def _commits_old_terms(patch: pytest.MonkeyPatch) -> None:
    def may_commit(leading: Leading, index: int) -> bool:
        return True

    patch.setattr(Leading, "may_commit", may_commit)


def _acknowledges_before_sync(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Following, "on_disk", property(lambda following: following.received))
    append = Following.append

    def eager(following: Following, message: Append) -> None:
        append(following, message)
        following.persisted()

    patch.setattr(Following, "append", eager)


def _leader_counts_itself_before_sync(patch: pytest.MonkeyPatch) -> None:
    match_of = Leading.match_of

    def match(leading: Leading, replica: int) -> int:
        if replica == leading.node.id:
            return leading.node.view.last_index
        return match_of(leading, replica)

    patch.setattr(Leading, "match_of", match)


def _no_term_check_on_answers(patch: pytest.MonkeyPatch) -> None:
    """An acknowledgement of an earlier term counts in this one."""
    step = RaftNode.step

    def careless(node: RaftNode, message: Message, now: float) -> None:
        if isinstance(message, AppendResponse) and message.term < node.term and node.role == LEADER:
            index = min(message.index, node.view.last_index)
            message = AppendResponse(message.source, message.target, node.term, index)
        step(node, message, now)

    patch.setattr(RaftNode, "step", careless)


def _votes_for_shorter_logs(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LogView, "is_behind", lambda view, last_term, last_index: True)


def _votes_by_length_only(patch: pytest.MonkeyPatch) -> None:
    """The longer log wins, whatever the term of its end."""
    patch.setattr(LogView, "is_behind", lambda view, last_term, last_index: last_index >= view.last_index)


def _votes_twice(patch: pytest.MonkeyPatch) -> None:
    def grants(node: RaftNode, message: VoteRequest) -> bool:
        return node.view.is_behind(message.last_term, message.last_index)

    patch.setattr(RaftNode, "_grants", grants)


def _no_consistency_check(patch: pytest.MonkeyPatch) -> None:
    """Entries are taken wherever the term before them differs, as long as there is something before them."""
    append = Following.append

    def careless(following: Following, message: Append) -> None:
        view = following._node.view
        if message.previous_index <= view.last_index:
            previous_term = max(view.term_of(message.previous_index), 0)
            message = Append(
                message.source,
                message.target,
                message.term,
                message.previous_index,
                previous_term,
                message.commit,
                message.entries,
            )
        append(following, message)

    patch.setattr(Following, "append", careless)


def _stale_flushes_count(patch: pytest.MonkeyPatch) -> None:
    """A flush that was begun before the log was cut counts for what was written since."""
    patch.setattr(Durability, "cut", lambda durability, last_index: None)


def _stands_before_sync(patch: pytest.MonkeyPatch) -> None:
    """Asks for votes, and counts its own, before its term and log are on disk."""

    def hold(node: RaftNode, message: Message) -> None:
        if message.target == node.id:
            node.step(message, node.now)
        else:
            node.send(message)

    patch.setattr(RaftNode, "_hold", hold)


def _reads_without_quorum(patch: pytest.MonkeyPatch) -> None:
    """Who thinks it leads answers reads."""

    def begin(queue: ReadQueue, round_: int, commit: int) -> None:
        begun(queue, 0, commit)

    begun = ReadQueue.begin
    patch.setattr(ReadQueue, "begin", begin)
    patch.setattr(ReadQueue, "oldest_round", lambda queue: 1)


def _reads_before_first_commit(patch: pytest.MonkeyPatch) -> None:
    """A new leader answers reads with a commit index that is old."""
    patch.setattr(Leading, "is_settled", property(lambda leading: True))


def _small_quorum(patch: pytest.MonkeyPatch) -> None:
    """Half of the voters are enough to commit."""
    patch.setattr(Configuration, "commit_quorum", property(lambda configuration: max(1, len(configuration.voters) // 2)))


def _hard_commit_ahead_of_disk(patch: pytest.MonkeyPatch) -> None:
    """The hint in the hard state runs ahead of what is flushed."""
    ready = RaftNode.ready

    def eager(node: RaftNode) -> object:
        made = ready(node)
        if made is not None and made.hard_state is not None:
            made.hard_state.commit = node.commit
        return made

    patch.setattr(RaftNode, "ready", eager)


def _changes_two_at_once(patch: pytest.MonkeyPatch) -> None:
    """Configurations follow each other before they are committed, and by a leader that is new."""

    def change(leading: Leading, configuration: Configuration) -> int:
        index = leading._append(2, [configuration.encode()])
        leading._follow_configuration()
        leading.advance_commit()
        return index

    patch.setattr(Leading, "change", change)


MUTANTS = [
    Mutant("vote-not-persisted", "Raft, figure 2: vote and term are on disk before an answer", _vote_not_persisted),
    Mutant("commits-old-terms", "Raft §5.4.2: only entries of the current term commit by counting", _commits_old_terms),
    Mutant("acknowledges-before-sync", "an acknowledged entry is on disk", _acknowledges_before_sync),
    Mutant("leader-counts-itself-before-sync", "thesis §10.2.1: as for any other replica", _leader_counts_itself_before_sync),
    Mutant("no-term-check-on-answers", "Raft §5.1: what is of an earlier term does nothing", _no_term_check_on_answers),
    Mutant("votes-for-shorter-logs", "Raft §5.4.1: a leader has all that may be committed", _votes_for_shorter_logs),
    Mutant("votes-by-length-only", "Raft §5.4.1: the later term is more up to date", _votes_by_length_only),
    Mutant("votes-twice", "Raft §5.2: one vote a term", _votes_twice),
    Mutant("no-consistency-check", "Raft §5.3: entries follow what the leader has before them", _no_consistency_check),
    Mutant("stale-flushes-count", "a flush says nothing about what was written after it began", _stale_flushes_count),
    Mutant("stands-before-sync", "the log that wins votes survives a crash", _stands_before_sync),
    Mutant("reads-without-quorum", "thesis §6.4: a deposed leader answers no reads", _reads_without_quorum),
    Mutant("reads-before-first-commit", "thesis §6.4, step 1", _reads_before_first_commit),
    Mutant("small-quorum", "Raft §5.3: a majority", _small_quorum),
    Mutant("hard-commit-ahead-of-disk", "a commit index on disk covers only what is on that disk", _hard_commit_ahead_of_disk),
    Mutant("changes-two-at-once", "thesis §4.1, and the correction of 2015", _changes_two_at_once),
]
