"""The broker process: listeners, security, persistence and observability around the pure engine of :mod:`nearcast.mqtt`."""
