"""A program beside a broker: waits until its broadcast group is as expected, and prints what the broker says of it.

``python -m nearcast.experiments.group_watch URL LEADER MEMBER...`` asks ``URL`` (``/healthz``) again and again until the
broker follows ``LEADER`` and its group has these members, leader included, with the way to the cloud open; exit code 1 after
``--patience`` seconds, with what it said last. Without a leader it asks once. Only the standard library: it runs beside what
is measured.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import time
import urllib.error
import urllib.request
from typing import Any

POLL_S = 0.1
PATIENCE_S = 30.0
_ANSWER_S = 5.0


def ask(url: str) -> dict[str, Any] | None:
    """What the broker says of its group; None while it says nothing."""
    try:
        with urllib.request.urlopen(url, timeout=_ANSWER_S) as answer:  # noqa: S310  # made by nearcast.experiments
            facts = json.loads(answer.read()).get("groups")
    except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError):
        return None
    return facts if isinstance(facts, dict) else None


def formed(facts: dict[str, Any] | None, leader: str, members: set[str]) -> bool:
    """Whether a group is as expected, and what is published reaches the cloud."""
    if facts is None or facts["leader"] != leader:
        return False
    known = {facts["name"], *(fellow["name"] for fellow in facts.get("fellows", ()))}
    connected = facts["name"] != leader or facts["cloud_state"] == "connected"
    return known == members and connected and facts["relay"] in ("live", "-")


def main(arguments: list[str] | None = None) -> int:
    """The program; returns its exit code."""
    parser = argparse.ArgumentParser(description="Wait for a broadcast group.")
    parser.add_argument("url")
    parser.add_argument("leader", nargs="?")
    parser.add_argument("members", nargs="*")
    parser.add_argument("--patience", type=float, default=PATIENCE_S, metavar="S")
    options = parser.parse_args(arguments)
    until = time.monotonic() + options.patience
    while True:
        facts = ask(options.url)
        good = options.leader is None or formed(facts, options.leader, set(options.members))
        if good or time.monotonic() >= until:
            sys.stdout.write(json.dumps(facts) + "\n")
            return 0 if good else 1
        time.sleep(POLL_S)


if __name__ == "__main__":
    raise SystemExit(main())
