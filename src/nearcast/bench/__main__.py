"""``python -m nearcast.bench``: the benchmark commands without the rest of the command line."""

from nearcast.bench.commands import app

app()
