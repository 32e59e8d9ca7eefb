"""MQTT 3.1.1 and 5.0 as pure machines: packets, codec, topic filters, subscriptions, sessions, and the broker engine.

Nothing here knows a socket, a file, a task or a clock. Bytes, events and ``now`` go in; bytes and records come out.
"""
