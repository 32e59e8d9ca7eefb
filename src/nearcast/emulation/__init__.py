"""Deployments as real processes on an emulated WAN: network namespaces and a user-space router, or, without root, delayed
loopback connections. :class:`nearcast.emulation.wan.Wan` is the way in."""
