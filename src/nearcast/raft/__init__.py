"""Consensus: the log of a replica set, kept the same on all of its replicas (Ongaro and Ousterhout 2014; Ongaro's thesis).

Pure: :class:`nearcast.raft.node.RaftNode` is told of messages, time and what the disk has, and says what to write and send.
``docs/concepts/raft.md`` is the way in.
"""
