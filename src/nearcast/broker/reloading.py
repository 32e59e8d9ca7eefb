"""What changes when the configuration is read again (SIGHUP), and what only a restart can change."""

from __future__ import annotations

from typing import Any

import msgspec

from nearcast.config import BrokerConfig, Listener

#: Keys that a running broker takes over. Everything else needs a restart, and is kept as it was.
RELOADABLE_PREFIXES = (
    "limits.",
    "security.",
    "topics",
    "observability.log_level",
    "observability.log_format",
    "observability.log_events_per_second",
    "observability.sys_interval_seconds",
    "observability.top_n",
    "shutdown_timeout_seconds",
)

#: The same, within one listener. What is checked together is here together, so that new and old never make up a listener that
#: neither of the two configurations describes.
RELOADABLE_LISTENER_KEYS = (
    "certificate_file",
    "key_file",
    "ca_file",
    "client_certificates",
    "certificate_username",
    "allow_anonymous",
)

#: The thread pool exists by the time a reload comes.
FIXED_KEYS = ("security.verification_threads",)


def changed_keys(old: Any, new: Any, prefix: str = "") -> list[str]:
    """The dotted names of everything that differs between two configurations."""
    if isinstance(old, msgspec.Struct) and type(old) is type(new):
        found: list[str] = []
        for field in msgspec.structs.fields(old):
            name = f"{prefix}.{field.name}" if prefix else field.name
            found.extend(changed_keys(getattr(old, field.name), getattr(new, field.name), name))
        return found
    if prefix == "listeners" and [listener.name for listener in old] == [listener.name for listener in new]:
        found = []
        for number, (before, after) in enumerate(zip(old, new, strict=True)):
            found.extend(changed_keys(before, after, f"listeners[{number}]"))
        return found
    return [] if old == new else [prefix]


def is_reloadable(key: str) -> bool:
    """Whether a running broker takes over this key."""
    if key in FIXED_KEYS:
        return False
    if key.startswith("listeners["):
        return key.rpartition(".")[2] in RELOADABLE_LISTENER_KEYS
    return key.startswith(RELOADABLE_PREFIXES)


def merge(old: BrokerConfig, new: BrokerConfig) -> BrokerConfig:
    """The configuration a running broker has after a reload: new where it can be, old elsewhere."""
    listeners: tuple[Listener, ...] = old.listeners
    if [listener.name for listener in old.listeners] == [listener.name for listener in new.listeners]:
        listeners = tuple(
            msgspec.structs.replace(before, **{key: getattr(after, key) for key in RELOADABLE_LISTENER_KEYS})
            for before, after in zip(old.listeners, new.listeners, strict=True)
        )
    threads = old.security.verification_threads
    observability = msgspec.structs.replace(
        new.observability, http_port=old.observability.http_port, http_host=old.observability.http_host
    )
    return msgspec.structs.replace(
        old,
        listeners=listeners,
        limits=new.limits,
        security=msgspec.structs.replace(new.security, verification_threads=threads),
        topics=new.topics,
        observability=observability,
        shutdown_timeout_seconds=new.shutdown_timeout_seconds,
    )
