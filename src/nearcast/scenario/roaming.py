"""Where clients go that roam: to the broker or gateway of the site that their host moved to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from nearcast.scenario.events import Move
from nearcast.scenario.expansion import Client


def itinerary(client: Client, sites: Mapping[str, str], moves: Iterable[Move]) -> list[tuple[float, str]]:
    """When a client goes on to which host's broker or gateway; empty for one that does not roam. ``sites`` says where hosts
    are at first, ``moves`` how hosts move, in the order of time. A site without any of the client's keeps it where it is."""
    here = client.broker
    found: list[tuple[float, str]] = []
    for move in moves:
        if not client.roams or move.host != client.host:
            continue
        there = next((host for host in client.roams if sites[host] == move.site), here)
        if there != here:
            found.append((move.at_s, there))
            here = there
    return found
