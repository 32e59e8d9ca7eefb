"""The controller as a process: its machines wired to sockets, clock and signals, and its HTTP API."""
