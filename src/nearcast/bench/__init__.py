"""The benchmark: a load generator that checks what it receives, and a comparison of brokers under the same load.

The generator writes and reads MQTT by itself, with NumPy over many packets at once. It shares no code with the broker it
measures: a mistake in one codec cannot cancel itself out in the other, and the generator stays fast enough to be idle while
the broker works.
"""
