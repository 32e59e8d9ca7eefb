"""What every long-running process here is built from: listening sockets, TLS, admission, logs. It knows no MQTT session."""
