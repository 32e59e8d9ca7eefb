"""A program on a host of the emulated WAN: writes a text to a file, and says so.

``python -m nearcast.experiments.writing FILE TEXT``.
"""

from __future__ import annotations

import sys
from pathlib import Path


def main(file: str, text: str) -> int:
    """The program; returns its exit code."""
    try:
        Path(file).write_text(text, encoding="utf-8")
    except OSError as error:
        sys.stderr.write(f"{file}: {error.strerror}\n")
        return 1
    sys.stdout.write(f"{file}: {len(text.splitlines())} lines\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:3]))
