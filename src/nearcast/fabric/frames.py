"""What travels on a link, as bytes: kinds of frames, and how they are cut out of a stream.

A frame is a length (four bytes, big-endian, not counting itself) and its content: one kind byte, then fields in the encoding
of :mod:`nearcast.mqtt.records` (LEB128 numbers, byte strings with their length). Fields are read with
:class:`~nearcast.mqtt.records.Fields`, which starts behind the kind byte. What the kinds of one family say is told where they
are handled; a kind that a node does not know ends the link, because versions are agreed before.
"""

from __future__ import annotations

from typing import Final

# Of the link itself (nearcast.fabric.links, nearcast.fabric.routes).
HELLO: Final = 1
PROOF: Final = 2
PING: Final = 3
PONG: Final = 4
GOODBYE: Final = 5
ROUTED: Final = 6
NEIGHBOURS: Final = 7
NEIGHBOURS_SEEN: Final = 8

# Messages between brokers (nearcast.fabric.channels).
CHANNEL: Final = 10
RECEIVED: Final = 11
MESSAGES: Final = 12
PROGRESS: Final = 13
BARRIER: Final = 14

# Who wants what (nearcast.fabric.interest).
INTEREST: Final = 20
INTEREST_ACK: Final = 21
INTEREST_ASK: Final = 22

# Who can take messages of shared subscriptions at once (nearcast.fabric.sharing).
GROUPS: Final = 25

# Retained messages (nearcast.fabric.replication).
RETAINED_SEEN: Final = 30
RETAINED: Final = 31

# Which client is where (nearcast.fabric.presence).
PRESENCE: Final = 35
SESSION_ASK: Final = 36
SESSION_ANSWER: Final = 37

# A session moves (nearcast.fabric.handover).
SHADOW: Final = 40
SHADOWED: Final = 41
STATE: Final = 42
INSTALLED: Final = 43
ABANDON: Final = 44

# Between a gateway and a broker (nearcast.fabric.trunks).
CLIENT_OPEN: Final = 60
CLIENT_DATA: Final = 61
CLIENT_CLOSE: Final = 62
CLIENT_WINDOW: Final = 63
MOVE: Final = 64
MOVE_READY: Final = 65
FREEZE: Final = 66
FROZEN: Final = 67
ADOPT: Final = 68
ADOPTED: Final = 69
RESUME: Final = 70
RESUMED: Final = 71
MOVE_FAILED: Final = 72
LEAVING: Final = 73
FOUND: Final = 74

# Between any node and the controller (nearcast.fabric.control).
REGISTER: Final = 80
MEMBERS: Final = 81
REPORT: Final = 82
CLASSES: Final = 83
ASSIGN: Final = 84
DRAIN: Final = 85
DEREGISTER: Final = 86

# Between the brokers of a broadcast group (nearcast.fabric.broadcast).
GROUP: Final = 90
RELAYED: Final = 91
RELAY_STATE: Final = 92
RELAY_LIVE: Final = 93
COVERED: Final = 94
RELAY_ASK: Final = 95

# Owned topics, between a gateway and a broker (nearcast.fabric.direct, nearcast.fabric.branches).
OWNER: Final = 100
OWNED_PUBLISH: Final = 101
OWNED_ACK: Final = 102
SOURCE_CLOSED: Final = 103
PLACE: Final = 104
FOLLOW: Final = 105

# Owned topics, between a broker and the controller (nearcast.fabric.owner_records).
OWNERS_ASK: Final = 110
OWNERS: Final = 111
OWNED: Final = 112
MIGRATE: Final = 113
MIGRATED: Final = 114
TELEMETRY: Final = 115
PLAN: Final = 116

# Replica sets, between brokers (nearcast.fabric.replica_sets).
SET_RAFT: Final = 120
SET_LEADER: Final = 121
SET_OPEN: Final = 122
SET_CHANNEL: Final = 123
SET_MESSAGES: Final = 124
SET_COMMITTED: Final = 125
SET_READER: Final = 126
SET_RECORDS: Final = 127
SET_READ: Final = 128
SET_PART: Final = 129

# The ring of replica sets, between brokers (nearcast.fabric.ring).
RING: Final = 135

# One broker reads another's logs (nearcast.fabric.reading_lines).
LINE_ASK: Final = 140
LINE_ANSWER: Final = 141

LENGTH_BYTES: Final = 4


_KINDS: Final[list[bytes]] = [bytes([kind]) for kind in range(256)]


def frame(kind: int, *fields: bytes) -> bytes:
    """One frame with its length, ready to be sent."""
    size = 1
    for field in fields:
        size += len(field)
    return b"".join((size.to_bytes(LENGTH_BYTES, "big"), _KINDS[kind], *fields))
