"""What a replica can be told about time and sizes. :class:`RaftSettings` has a paragraph for each."""

from __future__ import annotations

import msgspec


class RaftSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The defaults are for replicas within a site, in processes that share two busy cores (decision 0032)."""

    heartbeat_interval_seconds: float = 0.04
    """How often a leader tells its replicas that it is there. Too low costs packets and wake-ups of every group; too high
    leaves less of the election timeout for a delay: four heartbeats should fit into it."""

    election_timeout_seconds: float = 0.18
    """How long a replica waits for its leader before it suspects it, at least; the replica that is to follow the leader waits
    up to a half more, others longer. Too low takes a leader that the scheduler, the disk or the garbage collector held up for
    dead; too high is the time without a leader after a crash."""

    max_election_timeout_seconds: float = 3.0
    """Where round trips are long the leader raises the timeout, to ``round_trips_per_timeout`` of them, but not above this."""

    round_trips_per_timeout: float = 4.0
    """How many of the slowest replica's round trips an election timeout has to be. An election takes two."""

    max_append_bytes: int = 1_048_576
    """Payload in one message, unless one entry alone has more. Too low costs a message for each little; too high makes
    heartbeats on the same link wait behind it."""

    max_inflight_bytes: int = 16_777_216
    """Payload on its way to one replica without an answer. It bounds throughput to this for each round trip."""

    max_inflight_messages: int = 128
    """Messages on their way to one replica without an answer."""

    max_entry_bytes: int = 16_777_216
    """Payload of one entry. A larger proposal is refused."""

    max_uncommitted_bytes: int = 67_108_864
    """Payload that a leader has proposed and that is not committed. Further proposals are refused until it is: memory is
    bounded when the quorum is slow or away."""

    max_waiting_reads: int = 100_000
    """Linearizable reads that wait for the quorum. Further ones are refused."""

    tail_bytes: int = 33_554_432
    """Payload of the newest entries that is kept in memory for replicas a little behind. Those farther behind are served from
    the disk."""

    handover_delay_seconds: float = 1.0
    """How long a replica with a higher priority must be there and caught up before the leader hands over to it. Too low hands
    over to one that comes and goes; too high leaves the leader far from its clients for as long."""

    max_handover_delay_seconds: float = 60.0
    """A hand-over that failed, or after which leadership came back within that time, doubles the delay of the next one, up to
    this."""

    caught_up_bytes: int = 1_048_576
    """A replica that lacks no more than this is caught up: it can be made a voter or the leader. What is missing passes
    before a hand-over, while proposals are refused."""

    def __post_init__(self) -> None:
        for field in ("heartbeat_interval_seconds", "election_timeout_seconds", "handover_delay_seconds"):
            if not 0.0 < getattr(self, field) <= 3_600.0:
                raise ValueError(f"`{field}` must be above 0, and at most an hour")
        if self.election_timeout_seconds < 2.0 * self.heartbeat_interval_seconds:
            raise ValueError("`election_timeout_seconds` must be at least twice `heartbeat_interval_seconds`")
        if self.max_election_timeout_seconds < self.election_timeout_seconds:
            raise ValueError("`max_election_timeout_seconds` must not be below `election_timeout_seconds`")
        if self.max_handover_delay_seconds < self.handover_delay_seconds:
            raise ValueError("`max_handover_delay_seconds` must not be below `handover_delay_seconds`")
        if not 1.0 <= self.round_trips_per_timeout <= 100.0:
            raise ValueError("`round_trips_per_timeout` must be between 1 and 100")
        for field in ("max_append_bytes", "max_inflight_bytes", "max_inflight_messages", "max_uncommitted_bytes"):
            if getattr(self, field) < 1:
                raise ValueError(f"`{field}` must be at least 1")
        if not 1 <= self.max_entry_bytes <= 1 << 28:
            raise ValueError("`max_entry_bytes` must be between 1 and 268,435,456")
        for field in ("max_waiting_reads", "tail_bytes", "caught_up_bytes"):
            if getattr(self, field) < 0:
                raise ValueError(f"`{field}` must not be negative")
