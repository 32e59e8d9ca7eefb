"""The topic log: messages of durable topics, kept in order, readable by index.

One append-only log holds the messages of all durable topics of a broker, and a mapping per topic leads from its strictly
increasing index to the place in the log (Canal, section III-D). Pure: files, threads and sockets belong to whoever drives it.
"""
