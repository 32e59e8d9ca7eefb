"""What an experiment is: parameters, bars that it is held to, and code that measures.

Owns the shape that every experiment has. It refuses to know folders, terminals and plots, which are the run's
(:mod:`nearcast.experiments.run`), and any particular experiment. To add one, write a module with a subclass of
:class:`Experiment` and name it in :mod:`nearcast.experiments.registry`; docs/guides/experiments.md walks through it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, get_origin

import msgspec

from nearcast.errors import ConfigError, InvalidValue

if TYPE_CHECKING:
    from nearcast.experiments.run import Run


class Parameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every experiment can be asked for. A subclass gives other defaults and adds fields (``--set key=value``)."""

    scale: float = 1.0
    """Size of the experiment, as a multiple of the published one: what it multiplies is the experiment's to say."""

    duration_s: float = 60.0
    """How long is measured, in seconds; of virtual time in the simulator."""

    seed: int = 1
    """All that is random follows from it."""

    def __post_init__(self) -> None:
        self.require(0.0 < self.scale <= 1e6, "scale", "must be above 0, and at most a million")
        self.require(0.0 < self.duration_s <= 1e6, "duration_s", "must be above 0, and at most a million seconds")

    def require(self, condition: bool, field: str, message: str) -> None:
        """For ``__post_init__`` of subclasses, after ``super().__post_init__()``: refuse the value of a field."""
        if not condition:
            raise InvalidValue(f"`{field}` {message}", key=field)


class Bound(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a value is held to: one of the two, or both."""

    at_least: float | None = None
    at_most: float | None = None

    def holds(self, value: float | None) -> bool:
        """Whether a value keeps to it; one that is missing, endless or not a number does not: JSON has no word for it."""
        if value is None or not math.isfinite(value):
            return False
        return (self.at_least is None or value >= self.at_least) and (self.at_most is None or value <= self.at_most)

    def __str__(self) -> str:
        parts = [f"≥ {self.at_least:,g}"] if self.at_least is not None else []
        parts += [f"≤ {self.at_most:,g}"] if self.at_most is not None else []
        return " and ".join(parts)


class Bar(msgspec.Struct, frozen=True, kw_only=True):
    """A claim that a run can fail: a value, and the bound that it is held to."""

    name: str
    """Lower case with underscores, unit included: ``delay_error_ms``."""

    bound: Bound
    meaning: str = ""
    """What the value is, in a line."""

    value: float | None = None
    """None until it has been measured."""

    ok: bool = False

    def measured(self, value: float | None) -> Bar:
        return msgspec.structs.replace(self, value=value, ok=self.bound.holds(value))


def at_least(name: str, bound: float, meaning: str = "") -> Bar:
    return Bar(name=name, bound=Bound(at_least=bound), meaning=meaning)


def at_most(name: str, bound: float, meaning: str = "") -> Bar:
    return Bar(name=name, bound=Bound(at_most=bound), meaning=meaning)


P = TypeVar("P", bound=Parameters)


class Experiment(Generic[P]):
    """Base of all experiments. Everything it needs to know comes in with the run; an instance keeps no state."""

    name: ClassVar[str]
    """As on the command line: lower case, words joined by ``-``."""

    summary: ClassVar[str]
    """One line for ``nearcast experiment list``."""

    parameters: type[P]
    """The type of its parameters; the defaults are the published experiment's."""

    quick: ClassVar[Mapping[str, Any]] = {}
    """What ``--quick`` sets instead of the defaults, so that it ends within 60 seconds."""

    def bars(self, parameters: P) -> Sequence[Bar]:
        """What a run with these parameters is held to. Fixed before it starts: a bar that is never measured is missed."""
        raise NotImplementedError

    def check(self, parameters: P) -> None:
        """Raise :class:`~nearcast.errors.NearcastError` when this cannot run here; called before anything is made."""

    def run(self, run: Run[P]) -> None:
        """Measure: give every bar its value, and whatever else is worth knowing as figures, plots and notes."""
        raise NotImplementedError


def effective_parameters(experiment: Experiment[P], given: Mapping[str, Any], *, quick: bool) -> P:
    """The experiment's defaults, changed by ``--quick``, changed by what was asked for. Words are turned into numbers; for
    a parameter that is a tuple or list, ``10,20,50`` is its items."""
    known = {field.name: field.type for field in msgspec.structs.fields(experiment.parameters)}
    asked = dict(given)
    for key, value in given.items():
        if key not in known:
            raise ConfigError(f"{experiment.name} has no parameter `{key}`; it has {', '.join(known)}", key=key)
        if isinstance(value, str) and get_origin(known[key]) in (tuple, list):
            asked[key] = [item.strip() for item in value.split(",") if item.strip()]
    try:
        return msgspec.convert({**(experiment.quick if quick else {}), **asked}, experiment.parameters, strict=False)
    except msgspec.ValidationError as error:
        message, _, place = str(error).partition(" - at `$.")
        raise ConfigError(f"`{place.rstrip('`')}`: {message}" if place else message) from None
