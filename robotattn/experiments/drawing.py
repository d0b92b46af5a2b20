"""The look that the figures share: no display, quiet axes, one palette, and pictures of matrices."""

import io
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

BLUE, RED, GREEN, PURPLE, OCHRE, GREY = "#1f5f8b", "#c8553d", "#588157", "#7b5ea7", "#b08900", "#5c6b73"
COLOURS = (BLUE, RED, GREEN, PURPLE, OCHRE, GREY)
STYLE: dict[Any, Any] = {"font.family": "sans-serif", "font.size": 9}


def panels(widths: Sequence[float], height: float = 3.4, total: float = 11.0) -> tuple[Figure, list[Axes]]:
    """Make one row of panels with these relative widths. height, total: of the figure (inch)."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(total, height), layout="constrained")
        axes = figure.subplots(1, len(widths), width_ratios=list(widths), squeeze=False)[0]
        for one in axes:
            one.spines[["top", "right"]].set_visible(False)
            one.grid(alpha=0.25, linewidth=0.6)
            one.set_axisbelow(True)
    return figure, list(axes)


def matrix(axes: Axes, values: np.ndarray, least: float | None = None, most: float | None = None) -> None:
    """Draw a matrix, row 0 at the top. least, most: values of the palest and the darkest blue."""
    axes.grid(visible=False)
    axes.imshow(values, cmap="Blues", aspect="equal", interpolation="nearest", vmin=least, vmax=most)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)


def legend(axes: Axes, **options: Any) -> None:
    """Add a legend without a frame. options: of matplotlib's legend."""
    settings: dict[str, Any] = {"frameon": False, "fontsize": 8, **options}
    axes.legend(**settings)


def png(figure: Figure, dots: int = 160) -> bytes:
    """Render a figure; the same figure gives the same bytes. dots: per inch."""
    for axes in figure.axes:
        title = axes.get_title()
        axes.set_title("")
        axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
    buffer = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(buffer, format="png", dpi=dots, facecolor="white", metadata={"Software": None})
    return buffer.getvalue()
