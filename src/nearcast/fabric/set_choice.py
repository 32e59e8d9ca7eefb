"""Which brokers a new replica set has: named, or chosen by where they are (Canal, section IV).

``colocated``: all at one site, so that a commit takes no longer than the site's network. ``distributed``: at as many sites
as there are replicas, so that the set outlives any of them. Among equals, those go first that are in the fewest sets already.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from nearcast.fabric.refusals import Refused
from nearcast.fabricconfig import ReplicaSet

Placement = Literal["colocated", "distributed"]


def choose(
    brokers: Sequence[tuple[str, str]], sets: Sequence[ReplicaSet], replicas: int, placement: Placement, site: str
) -> tuple[str, ...]:
    """Members for a new set. ``brokers``: names and sites of those that are there; ``site``: where they are to be, or where
    the first of them is. Raises :class:`Refused`."""
    load = Counter(name for each in sets for name in each.members)
    by_site: dict[str, list[str]] = {}
    for name, where in sorted(brokers, key=lambda broker: (load[broker[0]], broker[0])):
        by_site.setdefault(where, []).append(name)
    if placement == "colocated":
        return _colocated(by_site, replicas, site)
    return _distributed(by_site, replicas, site)


def _colocated(by_site: dict[str, list[str]], replicas: int, site: str) -> tuple[str, ...]:
    if site:
        names = by_site.get(site, [])
    else:
        names = max(by_site.values(), key=len, default=[])
    if len(names) < replicas:
        where = f"site {site!r} has" if site else "the largest site has"
        raise Refused(
            f"{where} {len(names)} brokers that are there, and the set is to have {replicas}: fewer replicas, or --members"
        )
    return tuple(names[:replicas])


def _distributed(by_site: dict[str, list[str]], replicas: int, site: str) -> tuple[str, ...]:
    if len(by_site) < replicas:
        raise Refused(
            f"brokers are at {len(by_site)} sites, and the set is to have {replicas} replicas at different ones: fewer"
            " replicas, --placement colocated, or --members"
        )
    sites = sorted(by_site, key=lambda where: (where != site, -len(by_site[where]), where))
    if site and site not in by_site:
        raise Refused(f"no broker is at site {site!r}")
    return tuple(by_site[where][0] for where in sites[:replicas])
