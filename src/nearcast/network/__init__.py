"""What a packet experiences between two places: latency, jitter, loss, bandwidth, cuts. One model for both runtimes.

The simulator asks it when a message arrives; the emulated WAN's router asks it when to let a packet through. Pure: no clock,
no sockets, randomness handed in.
"""
