"""What somebody deploys: the code, which topics it reacts to, and what it may use."""

from __future__ import annotations

import re
from typing import Final

import msgspec

MAX_SOURCE_BYTES: Final = 262_144
"""Of one function. All brokers have the code of all functions."""
MAX_FILES: Final = 200

_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_IDENTIFIER: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")


def _require(condition: bool, field: str, message: str) -> None:
    if not condition:
        raise ValueError(f"`{field}` {message}")


class Function(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One function. Its name is unique in the fabric; a later ``version`` takes over where the one before stopped."""

    name: str
    """Letters, digits, ``_``, ``.`` and ``-``."""

    topic: str
    """Which topics of replica sets it reacts to: a name or a filter."""

    entry: str
    """The Python function's name in ``main.py``; for a native one, ``program``."""

    files: dict[str, bytes]
    """By path: ``main.py`` and whatever it imports; or ``program``."""

    version: int = 1
    """Rises with each deployment."""

    native: bool = False
    """Whether it is a program, called once for each message as ``program TOPIC INDEX`` with the message on standard input;
    each line ``TOPIC<TAB>payload`` of its output is published."""

    from_start: bool = False
    """Whether messages count that were there before it was deployed first."""

    timeout_seconds: float = 5.0
    """How long one message may take. Too low gives up what is merely slow; too high lets one message hold up its topics."""

    retries: int = 2
    """How often a message that fails is tried again before it is put aside."""

    batch: int = 256
    """Messages handed over at a time at most. Too low costs a commit for few; too high makes a failure repeat many."""

    max_state_bytes: int = 65_536
    """Of ``ctx.state``, as written with each batch that changed it."""

    max_output_bytes: int = 8_388_608
    """Of what one batch publishes."""

    max_memory_bytes: int = 536_870_912
    """Address space of its process; 0: what the machine has. Too low fails imports of large libraries."""

    removed: bool = False
    """Whether it is not to run any more."""

    def __post_init__(self) -> None:
        _require(_NAME.fullmatch(self.name) is not None, "name", "is 1 to 64 letters, digits, _, . and -")
        _require(0 < len(self.topic.encode()) <= 65_535, "topic", "must be a topic or a filter")
        _require(_IDENTIFIER.fullmatch(self.entry) is not None, "entry", "must be the name of a function")
        _require(self.removed or 0 < len(self.files) <= MAX_FILES, "files", f"must be 1 to {MAX_FILES} files")
        size = sum(map(len, self.files.values()))
        _require(size <= MAX_SOURCE_BYTES, "files", f"have {size:,} bytes, and {MAX_SOURCE_BYTES:,} are the most")
        for path in self.files:
            parts = path.split("/")
            fits = all(part and part not in (".", "..") and part.isprintable() and len(part) <= 128 for part in parts)
            _require(fits and len(parts) <= 8, "files", f"{path!r} is no path inside a package")
        main = "program" if self.native else "main.py"
        _require(self.removed or main in self.files, "files", f"lack {main}")
        _require(0.01 <= self.timeout_seconds <= 3_600, "timeout_seconds", "must be between 0.01 and 3,600")
        _require(0 <= self.retries <= 100, "retries", "must be between 0 and 100")
        _require(1 <= self.batch <= 65_536, "batch", "must be between 1 and 65,536")
        _require(0 <= self.max_state_bytes <= 4_194_304, "max_state_bytes", "must be between 0 and 4,194,304")
        _require(0 <= self.max_output_bytes <= 16_777_216, "max_output_bytes", "must be between 0 and 16,777,216")
        least = 67_108_864
        _require(self.max_memory_bytes == 0 or self.max_memory_bytes >= least, "max_memory_bytes", f"is below {least:,}")
