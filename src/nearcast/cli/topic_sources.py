"""Where ``nearcast topic list`` and ``show`` look: at a broker's log, at the controller, or at both.

Without a word from the user the log is looked at, and the controller, too, if the user has its secret or a token. Then one of
them may fail, and what the other knows is shown all the same, with a line that says what is missing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import typer

from nearcast.cli.topic_owned import knows_controller
from nearcast.errors import NearcastError

Answer = TypeVar("Answer")


class Sources:
    """See the module."""

    def __init__(self, *, only_owned: bool, only_kept: bool, secret: str | None, token_file: str | None) -> None:
        self._asks_log = not only_owned
        self._asks_controller = only_owned or (not only_kept and knows_controller(secret, token_file))
        self._errors: list[NearcastError] = []
        self._answers = 0

    def log(self, ask: Callable[[], Answer]) -> Answer | None:
        """What the broker's log says, if it is asked and answers."""
        return self._ask(ask) if self._asks_log else None

    def controller(self, ask: Callable[[], Answer]) -> Answer | None:
        """What the controller says, if it is asked and answers."""
        return self._ask(ask) if self._asks_controller else None

    def _ask(self, ask: Callable[[], Answer]) -> Answer | None:
        try:
            answer = ask()
        except NearcastError as error:
            self._errors.append(error)
            return None
        self._answers += 1
        return answer

    def finish(self, *, quietly: bool = False) -> None:
        """Raises if nobody answered; else says what is missing, unless that is to be expected."""
        if not self._answers and self._errors:
            if len(self._errors) == 1:
                raise self._errors[0]
            raise NearcastError("; and ".join(str(error) for error in self._errors))
        if not quietly:
            for error in self._errors:
                typer.secho(f"nearcast: {error}", fg=typer.colors.YELLOW, err=True)
