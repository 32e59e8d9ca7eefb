"""Plots of experiments: one look, drawn without a display."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from nearcast.errors import ConfigError, StorageUnavailable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Told apart by everyone, and in print."""


def require() -> None:
    """Say so, in one line, when plots cannot be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError(
            "experiments draw plots with matplotlib: install the extra `lab` (pip install 'nearcast[lab]')"
        ) from None


@contextlib.contextmanager
def saved(path: Path, title: str, x: str, y: str) -> Iterator[Axes]:
    """Axes to draw on; afterwards they are a PNG at ``path``."""
    require()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(visible=True, alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_prop_cycle(color=COLOURS)
    yield axes
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False)
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise StorageUnavailable(str(path), f"the plot cannot be written: {error.strerror}") from error


def cdf(axes: Axes, values: npt.ArrayLike, label: str, *, dashed: bool = False, colour: str | None = None) -> None:
    """The cumulative distribution of some values."""
    ordered = np.sort(np.asarray(values, dtype=float))
    if ordered.size == 0:
        return
    shares = np.arange(1, ordered.size + 1) / ordered.size
    axes.step(ordered, shares, where="post", label=label, linestyle="--" if dashed else "-", color=colour)
