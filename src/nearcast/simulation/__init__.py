"""Deployments in virtual time: deterministic, by the thousand nodes, with faults; one seed is one run.

``World`` holds hosts on a network model; a ``Node`` is what a host runs; an ``Invariant`` says what must hold; a ``Protocol``
puts them together for a scenario. See docs/guides/simulating.md.
"""

from nearcast.errors import InvariantViolated as InvariantViolated
from nearcast.simulation.disks import Disk as Disk
from nearcast.simulation.hosts import Host as Host
from nearcast.simulation.hosts import Node as Node
from nearcast.simulation.invariants import Invariant as Invariant
from nearcast.simulation.invariants import Protocol as Protocol
from nearcast.simulation.streams import Stream as Stream
from nearcast.simulation.world import World as World
