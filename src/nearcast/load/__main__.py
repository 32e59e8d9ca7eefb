"""``python -m nearcast.load SPEC``: run the clients of a specification; a summary as JSON on stdout at the end."""

from __future__ import annotations

import argparse
import sys

import msgspec

from nearcast.errors import ConfigError, NearcastError
from nearcast.load.process import run_load
from nearcast.load.spec import LoadSpec, read_spec


def main(arguments: list[str] | None = None) -> int:
    """The exit code: 0 also when it was told to end early, 1 when it failed."""
    parser = argparse.ArgumentParser(prog="python -m nearcast.load", description="Run the clients of a scenario.")
    parser.add_argument("spec", metavar="SPEC", help="a JSON file, see nearcast.load.spec.LoadSpec")
    parser.add_argument("--host", help="run the clients of this host only")
    parser.add_argument(
        "--address", action="append", default=[], metavar="HOST=ADDRESS", help="where a broker is; instead of its name"
    )
    options = parser.parse_args(arguments)
    try:
        spec = read_spec(options.spec)
        if options.host is not None:
            spec = msgspec.structs.replace(spec, host=options.host)
        summary = run_load(_with_addresses(spec, options.address))
    except NearcastError as error:
        sys.stderr.write(f"nearcast load: {' '.join(str(error).split())}\n")
        return 1
    sys.stdout.write(msgspec.json.encode(summary).decode() + "\n")
    if summary.error is not None:
        sys.stderr.write(f"nearcast load: {summary.error}\n")
        return 1
    return 0


def _with_addresses(spec: LoadSpec, given: list[str]) -> LoadSpec:
    addresses = dict(spec.addresses)
    for entry in given:
        host, equals, address = entry.partition("=")
        if not equals:
            raise ConfigError(f"--address {entry}: write HOST=ADDRESS")
        addresses[host] = address
    return msgspec.structs.replace(spec, addresses=addresses)


if __name__ == "__main__":
    raise SystemExit(main())
