"""Interactions of Raft replicas, word for word (see :mod:`tests.transcripts.raft_script`)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.transcripts.raft_script import Script

FILES = sorted((Path(__file__).parent / "raft").glob("*.txt"))
RULE = "----"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_transcript(path: Path) -> None:
    script = Script()
    made = []
    text = path.read_text()
    for block in text.split("\n\n"):
        commands = block.partition(f"\n{RULE}\n")[0].strip("\n")
        if all(line.startswith("#") for line in commands.splitlines()):
            made.append(commands)
            continue
        notes = [line for line in commands.splitlines() if line.startswith("#")]
        lines = [line for line in commands.splitlines() if not line.startswith("#")]
        result = script.run("\n".join(lines))
        made.append("\n".join([*notes, *lines, RULE, result]))
    new = "\n\n".join(made) + "\n"
    if os.environ.get("NEARCAST_REWRITE"):
        path.write_text(new)
        return
    assert new == text, "NEARCAST_REWRITE=1 writes it anew, if this is as it should be"


def test_there_are_transcripts() -> None:
    assert len(FILES) >= 8
