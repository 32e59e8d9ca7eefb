"""``python -m nearcast`` is the ``nearcast`` command."""

from nearcast.cli.main import main

if __name__ == "__main__":
    main()
