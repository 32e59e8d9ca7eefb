"""Functions that react to messages of replicated topics: what is deployed, the process that runs it, and who watches that.

What a function did is made part of the log by :mod:`nearcast.fabric.set_functions`; this package knows no log and no broker.
"""
