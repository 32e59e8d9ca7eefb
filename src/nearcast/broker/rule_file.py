"""What a controller decided about topics, kept beside the journal: a fabric that is started again, with a controller that
has just begun as well, still knows which topics are of which class and which replica sets it has."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

import msgspec

from nearcast.broker.files import replace_file
from nearcast.errors import StorageUnavailable
from nearcast.fabric.control import ClassRules
from nearcast.serving import logs

NAME: Final = "rules"

_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(ClassRules)


class RuleFile:
    """One broker's copy."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / NAME
        self._stamp = 0

    def load(self) -> ClassRules | None:
        """The rules that were in use last; none if there were none, or they make no sense any more, which is told."""
        try:
            rules = _DECODER.decode(self._path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            reason = f"{error}; the controller's are waited for"
            logs.event(logging.WARNING, "the saved topic rules cannot be used", path=str(self._path), reason=reason)
            return None
        self._stamp = rules.stamp
        return rules

    def save(self, rules: ClassRules) -> None:
        """Keep these, if they are newer."""
        if rules.stamp <= self._stamp:
            return
        self._stamp = rules.stamp
        try:
            replace_file(self._path, self._path.with_name(NAME + ".new"), _ENCODER.encode(rules))
        except StorageUnavailable as error:
            logs.event(logging.ERROR, "topic rules cannot be saved", path=error.path, reason=str(error))
