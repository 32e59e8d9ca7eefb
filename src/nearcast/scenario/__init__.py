"""Deployments described as data: sites, hosts and links; processes and clients; what goes wrong and when.

The same description runs in the simulator and on the emulated WAN.
"""
