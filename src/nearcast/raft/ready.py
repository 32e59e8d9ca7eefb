"""What a replica wants done, and the contract about its order."""

from __future__ import annotations

from nearcast.raft.entries import Entry, HardState, Snapshot
from nearcast.raft.messages import Message


class ReadState:
    """A linearizable read may be answered once everything up to ``index`` is applied."""

    def __init__(self, token: int, index: int) -> None:
        self.token = token
        self.index = index


class Ready:
    """Work for whoever drives a replica. The order, which is all of the contract:

    1. **Send** ``messages`` whenever you like: before the writing, beside it, after it, in any order, or not at all. Nothing
       in a Ready waits for the same Ready: what may only be said once something is on disk (votes, acknowledgements, the
       first word in a new term) is kept back in the core, and comes in a later Ready, after :meth:`RaftNode.persisted`.
    2. **Write**, in this order: install ``snapshot``, which replaces the whole log; store ``hard_state``, over the one before;
       if there are ``entries``, cut the log behind ``entries[0].index - 1``, and append them. Writing means that
       :meth:`Log.entries` finds them; it does not mean that they are on disk.
    3. **Apply** what is committed: up to ``commit``. It is in the log by now. It never falls.
    4. Call :meth:`RaftNode.advance`. Only then ask for the next Ready. Steps, ticks and proposals may come in between.
    5. If ``must_sync``: once all that was written up to this Ready is on disk, call ``persisted(ready.number, now)``, any time
       later, from whatever flushed it. Readys in between need no call of their own: a number stands for all before it. Too
       early is a lie, and loses data; too late only costs time.

    A crash may lose any of what was written and not flushed, entries and hard state independently of each other; each log must
    come back as some earlier state of itself. A write that fails is a crash: drop the node, recover, and make a new one.
    """

    def __init__(self, number: int, must_sync: bool) -> None:
        self.number = number
        """Rises with each Ready that has something to write."""
        self.must_sync = must_sync
        self.snapshot: Snapshot | None = None
        self.hard_state: HardState | None = None
        self.entries: list[Entry] = []
        self.messages: list[Message] = []
        self.commit = 0
        self.reads: list[ReadState] = []
        self.failed_reads: list[int] = []
        """Tokens of reads that got lost with a leader: ask again, here or elsewhere."""
        self.term = 0
        self.leader = 0
        """Who leads, as far as this replica knows; 0: nobody."""
        self.leads = False
        """Whether this replica does, and everything of earlier terms is committed: what it reads now may be trusted to a read
        index, and what it proposes is not held up."""
