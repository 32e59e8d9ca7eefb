"""What a node can be told, as numbers: cheap to plan and to keep for a process that is paused."""

from typing import Final

RECEIVED: Final = 0
ACCEPTED: Final = 1
OPENED: Final = 2
STREAM_RECEIVED: Final = 3
WRITABLE: Final = 4
CLOSED: Final = 5
SYNCED: Final = 6
