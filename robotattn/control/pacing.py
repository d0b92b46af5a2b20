"""Waiting for a schedule, and what is said of one that was missed. Times are int64 nanoseconds; numpy only."""

from collections.abc import Callable

import numpy as np

SPIN_NS = 2_000_000
"""The last 2 ms before a tick are waited out awake: a sleeping thread is woken late by up to that much."""


def wait_until(due_ns: int, clock: Callable[[], int], sleep: Callable[[float], object]) -> bool:
    """Sleep, then spin, until the clock reads `due_ns`; return False at once where it already does."""
    left = due_ns - clock()
    if left <= 0:
        return False
    if left > SPIN_NS:
        sleep((left - SPIN_NS) / 1e9)
    while clock() < due_ns:
        pass
    return True


def longest_run(missed: np.ndarray) -> int:
    """The most ticks in a row that missed; bool ``[ticks]``."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], missed.astype(np.int8), [0]))))
    return int((edges[1::2] - edges[::2]).max(initial=0))
