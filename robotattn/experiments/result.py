"""What an experiment hands back: rows of quantity, published value, measurement and verdict, and a figure.

A verdict is computed, never written: the measured number lies inside the stated bound or it does not. A published
figure comes from random streams that nobody has any more, so a bound asks for agreement in kind (the same side of the
published threshold, the published range, or a stated tolerance), not for equal digits.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, SupportsFloat

from matplotlib.figure import Figure

SCHEMA = 1
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Row:
    """One comparison. low, high: the bound, both ends included. shown: the measurement as text (unit, spread)."""

    quantity: str
    published: str
    measured: float
    shown: str
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """Return "agrees" if the measurement lies within the bound; NaN never does."""
        return "agrees" if self.low <= self.measured <= self.high else "differs"

    @property
    def bound(self) -> str:
        """Return the bound as text."""
        if self.low == self.high:
            return f"exactly {number(self.low)}"
        if math.isinf(self.low):
            return f"at most {number(self.high)}"
        if math.isinf(self.high):
            return f"at least {number(self.low)}"
        return f"{number(self.low)} to {number(self.high)}"


@dataclass(frozen=True)
class Result:
    """One experiment's outcome. series: the numbers behind the figure, plain lists and floats."""

    title: str
    text: str
    rows: Sequence[Row]
    figure: Figure
    caption: str
    series: Mapping[str, Any]

    @property
    def agrees(self) -> bool:
        """Tell whether every row agrees."""
        return all(row.verdict == "agrees" for row in self.rows)

    def plain(self) -> dict[str, Any]:
        """Return everything but the figure as what JSON can hold."""
        rows = [
            {
                "quantity": row.quantity,
                "published": row.published,
                "measured": row.measured if math.isfinite(row.measured) else None,
                "shown": row.shown,
                "bound": row.bound,
                "verdict": row.verdict,
            }
            for row in self.rows
        ]
        kept = {"title": self.title, "text": self.text, "caption": self.caption, "agrees": self.agrees}
        return {"schema": SCHEMA, "kind": "experiment", **kept, "rows": rows, "series": dict(self.series)}


def row(
    quantity: str,
    published: str,
    measured: SupportsFloat,
    *,
    least: float = -math.inf,
    most: float = math.inf,
    shown: str | None = None,
) -> Row:
    """Make a row whose verdict is ``least <= measured <= most``; raises ValueError if that bounds nothing."""
    if math.isinf(least) and math.isinf(most):
        raise ValueError(f"{quantity}: give a bound, least or most or both")
    value = float(measured)
    return Row(quantity, published, value, number(value) if shown is None else shown, least, most)


def exact(quantity: str, published: str, measured: SupportsFloat, value: float, shown: str | None = None) -> Row:
    """Make a row whose verdict is equality, for counts and closed forms."""
    return row(quantity, published, measured, least=value, most=value, shown=shown)


def number(value: float) -> str:
    """Write a number with at most four digits, whole ones in full and very small ones as powers of ten."""
    if value == 0 or (float(value).is_integer() and abs(value) < 1e12):
        return f"{value:,.0f}"
    return f"{value:.1e}" if abs(value) < 1e-3 or abs(value) >= 1e5 else f"{value:.4g}"


def spread(values: Sequence[float], unit: str = "") -> str:
    """Write seeds as `median (lowest to highest) unit`."""
    low, middle, high = min(values), median(values), max(values)
    return f"{number(middle)} ({number(low)} to {number(high)}){' ' if unit else ''}{unit}"


def median(values: Sequence[float]) -> float:
    """Return the middle value; of an even number the mean of the middle two."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return float(ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2)
