"""A program on the controller's host: asks its HTTP interface one question, and prints the answer.

``python -m nearcast.experiments.asking http://127.0.0.1:8885/api/v1/moves SECRET-FILE``. The token is derived from the secret
of the fabric here, so that it is never an argument, which every process of a machine can see.
"""

from __future__ import annotations

import sys
import urllib.error
import urllib.request

from nearcast.controller.tokens import derived_token
from nearcast.errors import NearcastError
from nearcast.serving.secrets import read_secret

_PATIENCE_S = 10.0


def main(url: str, secret_file: str) -> int:
    """The program; returns its exit code."""
    try:
        token = derived_token(read_secret(secret_file))
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})  # noqa: S310  # made by experiments
        with urllib.request.urlopen(request, timeout=_PATIENCE_S) as answer:  # noqa: S310
            sys.stdout.write(answer.read().decode())
    except (urllib.error.URLError, OSError, NearcastError) as error:
        sys.stderr.write(f"{url}: {' '.join(str(error).split())}\n")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:3]))
