"""A folder of a simulated disk: what the storages of the journal and of the topic log have in common."""

from __future__ import annotations

from nearcast.simulation.disks import Disk


class DiskFolder:
    """Reads the files of a folder by their names in it."""

    def __init__(self, disk: Disk, folder: str) -> None:
        self._disk = disk
        self._folder = folder

    def path(self, name: str) -> str:
        return self._folder + name

    def names(self) -> list[str]:
        return [name[len(self._folder) :] for name in self._disk.list(self._folder)]

    def size(self, name: str) -> int:
        return self._disk.length(self.path(name))

    def read(self, name: str, offset: int, size: int) -> bytes:
        return self._disk.read(self.path(name))[offset : offset + size]
