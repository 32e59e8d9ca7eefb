"""The ``nearcast`` command: the only place that reads the environment and composes the rest."""
