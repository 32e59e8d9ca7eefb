"""Every exception Nearcast raises on purpose.

Facts are attributes, so that callers never parse messages. Whatever reaches a user is one line that says what to do next;
a traceback in front of a user is a defect.
"""

from collections.abc import Iterable


class NearcastError(Exception):
    """Root of everything Nearcast raises on purpose."""


class LocalProtocolError(NearcastError):
    """We were about to break a protocol ourselves: a bug on this side, or a misuse of an API."""


class RemoteProtocolError(NearcastError):
    """The peer broke the protocol.

    ``reason_code`` is the MQTT 5 reason code that describes how (0x81 malformed packet, 0x82 protocol error, 0x95 packet
    too large, ...); it goes out in a DISCONNECT or CONNACK where the peer's version has one.
    """

    def __init__(self, reason_code: int, message: str) -> None:
        super().__init__(message)
        self.reason_code = reason_code
        self.message = message


class ConnectionRefused(NearcastError):
    """A broker answered CONNECT with a refusal. ``server_reference`` names another broker to use, if it gave one."""

    def __init__(self, reason_code: int, message: str, server_reference: str | None = None) -> None:
        super().__init__(message)
        self.reason_code = reason_code
        self.server_reference = server_reference


class ConnectionClosed(NearcastError):
    """The connection ended while something still needed it. ``reason_code`` is the peer's DISCONNECT code, if it sent one."""

    def __init__(self, message: str, reason_code: int | None = None) -> None:
        super().__init__(message)
        self.reason_code = reason_code


class RequestRefused(NearcastError):
    """The peer answered a PUBLISH, SUBSCRIBE or UNSUBSCRIBE with an error reason code (0x80 or above)."""

    def __init__(self, reason_code: int, message: str) -> None:
        super().__init__(message)
        self.reason_code = reason_code


class ConfigError(NearcastError):
    """A configuration cannot be used. ``key`` and ``line`` say where, ``path`` which file, as far as they are known."""

    def __init__(self, message: str, *, path: str | None = None, key: str | None = None, line: int | None = None) -> None:
        place = path or ""
        if line is not None:
            place += f":{line}"
        super().__init__(f"{place}: {message}" if place else message)
        self.path = path
        self.key = key
        self.line = line


class InvalidValue(ConfigError, ValueError):
    """A setting has a value that it cannot have. A ``ValueError`` too: msgspec, reading a file, adds the place to those."""


class StorageCorrupt(NearcastError):
    """A file on disk holds something it cannot hold. Everything before ``offset`` in ``path`` was good.

    ``torn`` says that the file merely ends too early, as a write that a crash cut short leaves it.
    """

    def __init__(self, path: str, offset: int, message: str, *, torn: bool = False) -> None:
        super().__init__(f"{path}: byte {offset}: {message}")
        self.path = path
        self.offset = offset
        self.torn = torn


class UnknownRecord(NearcastError):
    """A journal record is whole, and of a ``kind`` that no version up to this one writes."""

    def __init__(self, kind: int) -> None:
        super().__init__(f"record of unknown kind {kind}")
        self.kind = kind


class StorageUnavailable(NearcastError):
    """The disk does not take or give what is stored (full, read-only, gone, in use, written by a newer version).

    ``path`` is the file or directory that failed.
    """

    def __init__(self, path: str, message: str) -> None:
        super().__init__(f"{path}: {message}")
        self.path = path


class TopicUnknown(NearcastError):
    """No message of this ``topic`` is in the log, and none was ever."""

    def __init__(self, topic: str, message: str) -> None:
        super().__init__(message)
        self.topic = topic


class RecordUnavailable(NearcastError):
    """The log does not have this ``index`` of a ``topic``: it was removed (below ``first_index``) or is not there yet."""

    def __init__(self, topic: str, index: int, first_index: int, next_index: int) -> None:
        if index < first_index and next_index > first_index:
            why = f"it was removed by retention; the oldest there is {first_index}"
        elif index < first_index:
            why = "all records up to now were removed"
        else:
            why = f"the newest there is {next_index - 1}" if next_index > first_index else "the topic is empty"
        super().__init__(f"topic {topic!r} has no record {index}: {why}")
        self.topic = topic
        self.index = index
        self.first_index = first_index
        self.next_index = next_index


class BatchRefused(NearcastError):
    """A batch that was handed in on the bulk port was not taken; the message says why and what to do."""


class NotLeader(NearcastError):
    """Only the leader of a replica set can do this. ``leader`` is the replica that leads, as far as is known; 0: nobody."""

    def __init__(self, leader: int) -> None:
        super().__init__(f"replica {leader} leads" if leader else "there is no leader at the moment")
        self.leader = leader


class ProposalRefused(NearcastError):
    """The leader does not take this now; the message says why. Nothing of it was done."""


class PipelineError(NearcastError):
    """A Spark job cannot run or failed for a reason that its user can do something about."""


class EmulationError(NearcastError):
    """Something of the emulated WAN failed or was asked for in a way it cannot serve: an unknown host, a router that ended."""


class EmulationUnavailable(EmulationError):
    """This machine cannot give hosts network namespaces of their own; the message says what is missing."""


class InvariantViolated(NearcastError):
    """Something that must always hold does not. ``hosts`` are the names of those involved, for the story."""

    def __init__(self, message: str, hosts: Iterable[object] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.hosts = tuple(str(getattr(host, "name", host)) for host in hosts)


class NodeFailed(InvariantViolated):
    """A simulated node raised an exception that it should have handled; the cause is the exception itself."""


class SimulationLimit(NearcastError):
    """A simulated protocol runs away: too many events in all, at one instant, or waiting."""
