"""Decisions as pure functions over snapshots: which broker serves which clients."""
