"""Counters of a network as a table: what people read and what goes over a control socket."""

from __future__ import annotations

from typing import Literal

import msgspec

LinkKind = Literal["link", "model", "local", "up", "down"]


class LinkFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What one direction of one link has carried."""

    kind: LinkKind
    """``link``: explicit, between sites. ``model``: a pair of sites joined by the latency model. ``local``: within a site.
    ``up`` and ``down``: a host's access link."""

    source: str
    """Site; for ``up``, the number of the endpoint."""

    target: str
    """Site; for ``down``, the number of the endpoint."""

    packets: int
    """Packets that came to the link, those it lost or refused included."""

    bytes: int
    lost: int
    full: int


class NetworkFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What a network has been asked to carry, and what it did not."""

    packets: int
    bytes: int
    lost: int
    full: int
    unreachable: int
    duplicated: int
    links: tuple[LinkFigures, ...]
    """Only links that have carried something."""
