"""The brokers of a controller, as deciding about owners sees them."""

from __future__ import annotations

from collections.abc import Iterable

from nearcast.fabric import frames
from nearcast.fabric.control import pack
from nearcast.fabric.directory_client import parts
from nearcast.fabric.owner_records import Owner, Owners
from nearcast.fabric.refusals import Refused
from nearcast.fabric.registry import Entry


class Roster:
    """Looks at the controller's nodes, which the controller changes."""

    def __init__(self, entries: dict[str, Entry]) -> None:
        self._entries = entries

    def get(self, name: str) -> Entry | None:
        return self._entries.get(name)

    def brokers(self) -> list[Entry]:
        """Brokers that are members."""
        return [entry for entry in self._entries.values() if entry.is_broker and entry.usable]

    def dead(self) -> list[str]:
        """Brokers that are known to be gone."""
        return [name for name in self._entries if self.is_dead(name)]

    def is_up(self, name: str) -> bool:
        entry = self._entries.get(name)
        return entry is not None and entry.is_broker and entry.usable

    def is_dead(self, name: str) -> bool:
        """Whether a broker is known to be gone; one that never registered here may be there."""
        entry = self._entries.get(name)
        return entry is not None and not entry.usable

    def may_own(self, name: str) -> bool:
        """Whether a broker may get topics."""
        entry = self._entries.get(name)
        return entry is not None and entry.is_broker and entry.usable and not entry.shunned and entry.link is not None

    def check_target(self, name: str) -> None:
        """Raises Refused for a broker that a person cannot give topics to."""
        entry = self._entries.get(name)
        if entry is None:
            raise Refused(f"there is no broker {name!r}; `nearcast nodes` lists them", missing=True)
        if not entry.is_broker:
            raise Refused(f"{name} is a gateway; brokers own topics")
        if not entry.usable:
            raise Refused(f"broker {name} is {entry.state}")
        if entry.leaving:
            raise Refused(f"broker {name} is stopping")
        if entry.draining:
            raise Refused(f"broker {name} is being drained; `nearcast drain {name} --stop` ends that")

    def tell(self, name: str, owners: Iterable[Owner]) -> None:
        """Tell a broker who owns these, if it can be told."""
        entry = self._entries.get(name)
        if entry is None or entry.link is None:
            return
        for part, _ in parts(list(owners)):
            entry.link.send(pack(frames.OWNERS, Owners(part)))

    def tell_all(self, owners: list[Owner]) -> None:
        for entry in self._entries.values():
            if entry.is_broker:
                self.tell(entry.name, owners)
