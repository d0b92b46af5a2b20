"""Delayed targets: a chunk that arrives a latency after its observation is trained on what the teacher does from then.

A latency is seldom a whole number of rows. Poses and joints are interpolated between the two rows around the instant:
the teacher is a feedback law that would have answered in between with something in between. (Predicting a row from its
two neighbours, on recorded demonstrations, interpolation is off by a third of what picking one of them is.) Rounding at
random would have the right mean too, but a loss with a median would learn the nearer row, and a flow two modes. The
gripper is open or closed, nothing in between: it is the later row's with the probability that makes its mean right,
drawn once a window, so that its sequence stays one that was recorded.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from robotattn.control.chunks import relative
from robotattn.types import ActionMode

Latency = Callable[[int, int], int]
"""(seed of an episode, number of an inference) → ns."""


@dataclass(frozen=True)
class Delay:
    """How long after their observation the targets of windows begin, in rows of the recording."""

    rows: np.ndarray
    """Whole rows, int64 ``[B]``."""
    part: np.ndarray
    """The rest, float64 ``[B]`` in [0, 1)."""
    later: np.ndarray
    """Whether the gripper is the later row's, bool ``[B]``; never where the rest is 0."""

    def of(self, windows: np.ndarray) -> "Delay":
        """Return the delays of some windows."""
        return Delay(self.rows[windows], self.part[windows], self.later[windows])

    def instants(self, rows: np.ndarray) -> np.ndarray:
        """Return the rows ``[B, H]`` that windows without a delay would read as instants with theirs (float64)."""
        return rows + (self.rows + self.part)[:, None]

    def read(self, column: np.ndarray, rows: np.ndarray, last: np.ndarray, mode: ActionMode) -> np.ndarray:
        """Read absolute targets ``[n, A]`` at `rows` ``[B, H]`` and the delay; after row `last` ``[B, 1]`` it stays."""
        rows = rows + self.rows[:, None]
        before, after = column[np.minimum(rows, last)], column[np.minimum(rows + 1, last)]
        way = relative(after, before[..., :4]) if mode == "tool" else after - before
        targets = before + self.part[:, None, None] * way
        targets[..., -1] = np.where(self.later[:, None], after[..., -1], before[..., -1])
        return targets


def draw(latency: Latency, period: int, count: int, generator: np.random.Generator) -> Delay:
    """Draw one latency a window; period: ns between rows.

    Each is inference 0 of an episode of its own, whose seed comes from the generator: nothing is kept between calls.
    Raises ValueError for a latency below 0.
    """
    seeds = generator.integers(2**63, size=count, dtype=np.uint64)
    times = np.array([latency(int(seed), 0) for seed in seeds], dtype=np.int64)
    if count and times.min() < 0:
        raise ValueError(f"latency: {times.min()} ns was drawn, allowed is 0 or more")
    rows, rest = np.divmod(times, period)
    part = rest / period
    return Delay(rows, part, generator.random(count) < part)
