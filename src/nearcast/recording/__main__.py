"""``python -m nearcast.recording DIRECTORY``: what is in a recording, and what is wrong with it; then the exit code is 1."""

from __future__ import annotations

import argparse
import sys

import msgspec

from nearcast.errors import NearcastError
from nearcast.recording.reader import check


def main(arguments: list[str] | None = None) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(prog="python -m nearcast.recording", description="Check recorded events.")
    parser.add_argument("directory", metavar="DIRECTORY", help="files of recorded events, also in directories below it")
    options = parser.parse_args(arguments)
    try:
        found = check(options.directory)
    except NearcastError as error:
        sys.stderr.write(f"nearcast recording: {error}\n")
        return 1
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(found)).decode() + "\n")
    return 1 if found.problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
