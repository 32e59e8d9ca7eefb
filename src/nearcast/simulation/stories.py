"""The last things that happened to those involved in a failure, as text that a person can follow."""

from __future__ import annotations

import traceback
from collections.abc import Sequence

import msgspec

from nearcast.errors import InvariantViolated
from nearcast.simulation.tracing import WORLD, Line, Tracer

LAST_LINES = 40
MAX_CHAIN = 12
_NAME_WIDTH = 24


class Story(msgspec.Struct, frozen=True):
    """Why it came to this, as far as messages tell, and what the hosts involved did last."""

    chain: tuple[str, ...]
    """From the first cause that is known to the event in which the invariant broke."""

    last: tuple[str, ...]
    """The last lines of the hosts involved and of the faults, by time."""

    raised: tuple[str, ...] = ()
    """Where the exception came from, if a node raised one."""

    def text(self) -> str:
        parts: list[str] = []
        if self.raised:
            parts += ["What the node raised:", *(f"  {line}" for line in self.raised), ""]
        if self.chain:
            parts += ["How it came about:", *(f"  {line}" for line in self.chain), ""]
        return "\n".join([*parts, "What those involved did last:", *(f"  {line}" for line in self.last)])


def tell(tracer: Tracer, names: Sequence[str], violation: InvariantViolated, cause: int) -> Story:
    """The story of a run that has just failed in event ``cause``. Nobody involved means that everybody may be."""
    involved = set(violation.hosts)
    wanted = {index for index, name in enumerate(names) if name in involved} or set(range(len(names)))
    own = [line for index in wanted for line in tracer.lines.get(index, ())]
    own.sort(key=lambda line: line.order)
    # Half of the room is shared out evenly, so that a host that talks all the time does not leave a quiet one without a word.
    share = LAST_LINES // 2 // max(1, len(wanted))
    reserved = [line for index in wanted for line in list(tracer.lines.get(index, ()))[-share:]] if share else []
    taken = {line.order for line in reserved}
    latest = [line for line in own if line.order not in taken][len(reserved) - LAST_LINES :]
    own = sorted(reserved + latest, key=lambda line: line.order)
    # All faults since then, and the last few before: what was broken already.
    faults = list(tracer.lines.get(WORLD, ()))
    since = (latest or own)[0].at_s if own else 0.0
    early = [line for line in faults if line.at_s < since][-5:]
    lines = sorted(own + early + [line for line in faults if line.at_s >= since], key=lambda line: line.order)
    width = min(_NAME_WIDTH, max([len(name_of(line, names)) for line in lines], default=0))
    return Story(
        chain=tuple(show(line, names, width) for line in _chain(tracer, cause)),
        last=tuple(show(line, names, width) for line in lines),
        raised=_raised(violation.__cause__),
    )


def name_of(line: Line, names: Sequence[str]) -> str:
    return "(fault)" if line.host == WORLD else names[line.host]


def show(line: Line, names: Sequence[str], width: int = 0) -> str:
    """One line: when, who, what, and the message it was an answer to."""
    reason = f"  [in #{line.cause}]" if line.host != WORLD and line.cause >= 0 and line.cause != line.number else ""
    return f"{line.at_s:12.6f} s  {name_of(line, names):<{width}}  {line.text}{reason}"


def _raised(error: BaseException | None) -> tuple[str, ...]:
    if error is None:
        return ()
    return tuple("".join(traceback.format_exception(error)).rstrip().split("\n"))


def _chain(tracer: Tracer, cause: int) -> list[Line]:
    """Messages backwards: this event was the arrival of a message, which was sent while another one arrived, ..."""
    found: list[Line] = []
    number = cause
    while len(found) < MAX_CHAIN:
        line = tracer.sent_lines.get(number)
        if line is None:
            break
        found.append(line)
        number = line.cause
    found.reverse()
    return found
