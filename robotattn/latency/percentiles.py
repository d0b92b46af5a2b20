"""Percentiles of durations with their intervals, and a refusal by name of those that have too few samples.

In go nanoseconds, out come milliseconds in a plain dictionary; numpy only.
"""

from collections.abc import Sequence

import numpy as np

from robotattn.statistics import early_stopping, early_stopping_needed, percentile, samples_needed

PERCENTILES = (0.5, 0.9, 0.95, 0.99, 0.999)


def summary(durations: Sequence[int] | np.ndarray) -> dict[str, object]:
    """Percentiles, extremes and mean (ms) of at least one duration (ns).

    ``intervals`` holds the 95 % interval of order statistics of each percentile, ``early_stopping_p90`` MLPerf's
    single-stream estimate (not below the p90, with 99 % confidence). What has too few samples is None (an interval:
    absent) and ``refused`` says how many it needs. Raises ValueError for no durations at all.
    """
    milliseconds = np.asarray(durations, np.float64) / 1e6
    if len(milliseconds) == 0:
        raise ValueError("0 durations: a summary needs at least one")
    result: dict[str, object] = {"n": len(milliseconds)}
    intervals: dict[str, list[float]] = {}
    needed = {f"p{100 * p:g}": samples_needed(p) for p in PERCENTILES} | {"early_stopping_p90": early_stopping_needed()}
    refused = {name: _refusal(n, len(milliseconds)) for name, n in needed.items() if len(milliseconds) < n}
    for p in PERCENTILES:
        name = f"p{100 * p:g}"
        result[name] = None
        if name not in refused:
            estimate = percentile(milliseconds, p)
            result[name], intervals[name] = estimate.value, [estimate.low, estimate.high]
    result["early_stopping_p90"] = None if "early_stopping_p90" in refused else early_stopping(milliseconds)
    extremes = {name: float(getattr(milliseconds, name)()) for name in ("min", "max", "mean")}
    return result | extremes | {"intervals": intervals} | ({"refused": refused} if refused else {})


def _refusal(needed: int, samples: int) -> str:
    return f"needs {needed} samples, has {samples}"
