"""Broadcast groups: brokers that organise themselves by measured latency (Hasenburg et al., section II)."""
