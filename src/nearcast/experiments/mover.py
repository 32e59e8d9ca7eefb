"""A program beside the controller: asks for all owned topics to be at one broker, and waits until they are.

``python -m nearcast.experiments.mover http://127.0.0.1:8885 SECRET-FILE BROKER COUNT`` waits until there are ``COUNT`` topics
with an owner, asks for each that is elsewhere to be moved, all at once, and prints as JSON when it began to ask and when the
last one had arrived (wall clock). The token is derived from the secret here, so that it is never an argument.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import time
import urllib.parse
from typing import Any

from nearcast.controller.tokens import derived_token
from nearcast.errors import NearcastError
from nearcast.serving.secrets import read_secret

POLL_S = 0.05
_ANSWER_S = 20.0


class Api:
    """The controller's HTTP interface over one connection."""

    def __init__(self, url: str, secret_file: str) -> None:
        parts = urllib.parse.urlsplit(url)
        self._connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=_ANSWER_S)
        self._headers = {
            "Authorization": f"Bearer {derived_token(read_secret(secret_file))}",
            "Content-Type": "application/json",
        }

    def ask(self, method: str, path: str, content: object = None) -> tuple[int, Any]:
        """Status and answer."""
        body = None if content is None else json.dumps(content)
        self._connection.request(method, f"/api/v1/{path}", body, self._headers)
        answer = self._connection.getresponse()
        return answer.status, json.loads(answer.read() or b"null")

    def owners(self) -> dict[str, str]:
        """Owned topics that have an owner."""
        status, page = self.ask("GET", "topics?limit=10000")
        if status != 200:
            raise NearcastError(f"the controller answers {status}: {page}")
        return {topic["topic"]: topic["owner"] for topic in page["topics"] if topic["owner"]}


def move_all(api: Api, target: str, count: int, patience_s: float) -> dict[str, object]:
    """See the module."""
    until = time.monotonic() + patience_s
    while len(owners := api.owners()) < count:
        if time.monotonic() >= until:
            raise NearcastError(f"after {patience_s:g} s, {len(owners)} of {count} topics have an owner")
        time.sleep(POLL_S)
    began = time.time()
    asked = 0
    for topic, owner in owners.items():
        if owner != target:
            status, answer = api.ask("POST", "migrations", {"topic": topic, "target": target})
            if status >= 300:
                raise NearcastError(f"{topic} was not moved: {answer.get('detail', status)}")
            asked += 1
    while elsewhere := [topic for topic, owner in api.owners().items() if owner != target]:
        if time.monotonic() >= until:
            raise NearcastError(f"after {patience_s:g} s, {len(elsewhere)} topics are elsewhere, {elsewhere[0]} among them")
        time.sleep(POLL_S)
    return {"began": began, "ended": time.time(), "asked": asked, "missing": len(elsewhere)}


def main(arguments: list[str] | None = None) -> int:
    """The program; returns its exit code."""
    parser = argparse.ArgumentParser(description="Move all owned topics to a broker.")
    parser.add_argument("url")
    parser.add_argument("secret_file")
    parser.add_argument("target")
    parser.add_argument("count", type=int)
    parser.add_argument("--patience", type=float, default=60.0, metavar="S")
    options = parser.parse_args(arguments)
    try:
        found = move_all(Api(options.url, options.secret_file), options.target, options.count, options.patience)
    except (OSError, http.client.HTTPException, ValueError, NearcastError) as error:
        sys.stderr.write(f"{' '.join(str(error).split())}\n")
        return 1
    sys.stdout.write(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
