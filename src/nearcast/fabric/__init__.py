"""Many brokers as one: links between them, message identity, interest tables, topic classes, sessions that move.

Everything here is pure: frames and time in, frames out. :class:`~nearcast.fabric.fabric.Fabric` is one broker's side of it.
"""
