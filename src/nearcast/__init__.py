"""Nearcast: geo-distributed publish/subscribe on ordinary MQTT."""

__version__ = "0.1.0"
