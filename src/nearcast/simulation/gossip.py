"""The gossip of a simulated node: the machine that ships, with randomness of its own.

Its draws are not the host's: a node draws the same numbers for everything else whether it has a coordinate or not.
"""

from __future__ import annotations

import random

from nearcast.membership.gossip import Gossip, GossipSettings
from nearcast.simulation.hosts import Host


def simulated_gossip(host: Host, name: str, port: int, epoch: int, secret: bytes) -> Gossip:
    """A node's gossip, at a port of its host. ``epoch`` is the process's, of which there is another after each start."""
    rng = random.Random(f"gossip {name} {epoch}")
    settings = GossipSettings()
    return Gossip(name, f"{host.name}:{port}", secret, settings, rng, host.now, life=int(host.wall * 1e6))
