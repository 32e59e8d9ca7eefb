"""The clients of a scenario as real MQTT clients: one process for a host, thousands of clients in it.

``python -m nearcast.load SPEC`` runs them; docs/guides/experiments.md says how experiments use it.
"""

from nearcast.load.process import run_load
from nearcast.load.spec import LoadSpec, read_spec
from nearcast.load.tally import LoadSummary

__all__ = ["LoadSpec", "LoadSummary", "read_spec", "run_load"]
