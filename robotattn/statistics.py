"""Statistics of success rates and latencies: intervals, paired tests, and how small a difference a test can see.

Counts and samples come in, closed forms or seeded resampling come out; numpy and nothing else, so that a bare machine
can use it. Sources: Wilson (1927) and Clopper & Pearson (1934) for one proportion; McNemar (1947) and Newcombe (1998,
method 10) for the same seeds run under two conditions; Efron's percentile bootstrap; order statistics (David &
Nagaraja) for percentiles; MLPerf Inference rules, appendix "Early Stopping Criterion".
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np


@dataclass(frozen=True)
class Estimate:
    """A value with its confidence interval ``[low, high]``."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class PairedDifference:
    """Success under B minus success under A over the same seeds, with its interval and the exact McNemar p value.

    only_a, only_b: seeds that succeeded under just one of the two; n: seeds in all.
    """

    difference: float
    low: float
    high: float
    p: float
    only_a: int
    only_b: int
    n: int


def wilson(successes: int, n: int, confidence: float = 0.95) -> Estimate:
    """Return a success rate with Wilson's score interval (no continuity correction)."""
    _check_counts(successes, n)
    z = _quantile(confidence)
    rate = successes / n
    centre = (rate + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
    low = 0.0 if successes == 0 else centre - half  # exact at the ends, where rounding leaves 1e-17
    high = 1.0 if successes == n else centre + half
    return Estimate(rate, low, high)


def clopper_pearson(successes: int, n: int, confidence: float = 0.95) -> Estimate:
    """Return a success rate with the exact interval of Clopper and Pearson (never covers less than asked)."""
    _check_counts(successes, n)
    tail = _tail(confidence)
    return Estimate(successes / n, 1 - _rate_bound(n - successes, n, tail), _rate_bound(successes, n, tail))


def bootstrap(
    samples: Sequence[float] | np.ndarray,
    rng: np.random.Generator,
    statistic: Callable[..., np.ndarray] = np.mean,
    confidence: float = 0.95,
    resamples: int = 10_000,
) -> Estimate:
    """Return `statistic` of the samples with its percentile bootstrap interval.

    samples: ``[n, ...]``, resampled along the first axis. statistic: takes ``axis=``, as numpy's reductions do.
    """
    data = np.asarray(samples, dtype=np.float64)
    if data.ndim == 0 or len(data) < 2:
        raise ValueError(f"{data.size} sample(s): a bootstrap needs at least 2")
    tail = _tail(confidence)
    values = [statistic(data[rng.integers(len(data), size=len(data))], axis=0) for _ in range(resamples)]
    low, high = np.quantile(values, [tail, 1 - tail], axis=0)
    return Estimate(float(statistic(data, axis=0)), float(low), float(high))


def paired_difference(
    a: Sequence[bool] | np.ndarray, b: Sequence[bool] | np.ndarray, confidence: float = 0.95
) -> PairedDifference:
    """Compare two runs over the same seeds: rate(b) - rate(a), Newcombe's interval, exact two-sided McNemar p.

    a, b: success of each seed, in the same order of seeds. Raises ValueError when the lengths differ or are 0.
    """
    first, second = _outcomes("a", a), _outcomes("b", b)
    if len(first) != len(second) or len(first) == 0:
        raise ValueError(f"a has {len(first)} outcomes and b {len(second)}: a pair needs one of each for every seed")
    both, only_a = int((first & second).sum()), int((first & ~second).sum())
    only_b, neither = int((~first & second).sum()), int((~first & ~second).sum())
    low, high = _newcombe(both, only_a, only_b, neither, confidence)
    n = len(first)
    return PairedDifference((only_b - only_a) / n, low, high, mcnemar(only_a, only_b), only_a, only_b, n)


def mcnemar(only_a: int, only_b: int) -> float:
    """Return the exact two-sided p value of two discordant counts: would a fair coin split them so unevenly?"""
    if min(only_a, only_b) < 0:
        raise ValueError(f"only_a={only_a}, only_b={only_b}: counts are not negative")
    if only_a + only_b == 0:
        return 1.0
    n = only_a + only_b
    return min(1.0, 2 * sum(math.comb(n, count) for count in range(min(only_a, only_b) + 1)) / 2**n)


def smallest_detectable_difference(n: int, p: float, power: float = 0.8, confidence: float = 0.95) -> float:
    """Return the smallest drop or rise of a success rate p that two independent runs of n episodes each would show.

    Solved from the two-sided normal test of two proportions (pooled variance under "no difference"), on the side of p
    that has more room; a paired comparison over the same seeds does better. Returns NaN when no rate is far enough.
    """
    if n < 1 or not 0 <= p <= 1 or not 0 < power < 1:
        raise ValueError(f"n={n}, p={p}, power={power}: n is at least 1, p in [0, 1], power in (0, 1)")
    z, z_power = _quantile(confidence), NormalDist().inv_cdf(power)

    def excess(difference: float) -> float:
        other = p - difference if p >= 0.5 else p + difference
        pooled = (p + other) / 2
        needed = z * math.sqrt(2 * pooled * (1 - pooled)) + z_power * math.sqrt(p * (1 - p) + other * (1 - other))
        return difference * math.sqrt(n) - needed

    room = max(p, 1 - p)
    if excess(room) < 0:
        return math.nan
    return _bisect(excess, 0.0, room)


def samples_needed(p: float, confidence: float = 0.99) -> int:
    """Return how many samples a percentile p (in (0, 1)) needs: the outermost one lies beyond it with this confidence.

    From 1 - p^n >= confidence: p50 needs 7 samples, p99 needs 459 and p99.9 needs 4603; p1 as many as p99.
    """
    if not 0 < p < 1 or not 0 < confidence < 1:
        raise ValueError(f"p={p}, confidence={confidence}: both are in (0, 1)")
    return math.ceil(math.log(1 - confidence) / math.log(max(p, 1 - p)))


def percentile(samples: Sequence[float] | np.ndarray, p: float, confidence: float = 0.95) -> Estimate:
    """Return the percentile p (in (0, 1)) of the samples, with a distribution-free interval of order statistics.

    Raises ValueError when there are fewer than `samples_needed` (a far tail that no sample has reached yet, or an end
    of the interval beyond the outermost sample) and for samples that are not finite.
    """
    data = np.sort(np.asarray(samples, dtype=np.float64).ravel())
    name, needed = f"p{100 * p:.10g}", max(samples_needed(p), samples_needed(p, 1 - _tail(confidence)))
    if len(data) < needed:
        raise ValueError(f"{name} needs at least {needed} samples, got {len(data)}")
    if not np.isfinite(data).all():
        raise ValueError(f"{name}: {int((~np.isfinite(data)).sum())} of {len(data)} samples are not finite")
    low, high = _order_ranks(len(data), p, confidence)
    return Estimate(float(np.quantile(data, p)), float(data[low - 1]), float(data[high - 1]))


def early_stopping(samples: Sequence[float] | np.ndarray, p: float = 0.9, confidence: float = 0.99) -> float:
    """Return MLPerf's single-stream estimate of a percentile: an order statistic that is not below it, so confidently.

    With n samples let t be the largest number for which t or fewer samples beyond the percentile would have been a
    surprise: P(binomial(n, 1 - p) <= t) <= 1 - confidence. The t - 1 largest are discarded and the largest of the rest
    is reported. Raises ValueError where t is 0: p90 needs 64 samples, p99 needs 662 (`early_stopping_needed`).
    """
    data = np.sort(np.asarray(samples, dtype=np.float64).ravel())
    name, needed = f"early-stopping p{100 * p:.10g}", early_stopping_needed(p, confidence)
    if len(data) < needed:
        raise ValueError(f"{name} needs at least {needed} samples, got {len(data)}")
    if not np.isfinite(data).all():
        raise ValueError(f"{name}: {int((~np.isfinite(data)).sum())} of {len(data)} samples are not finite")
    over = _last(lambda t: _binomial_cdf(t, len(data), 1 - p) <= 1 - confidence, 1, len(data))
    return float(data[len(data) - over])


def early_stopping_needed(p: float = 0.9, confidence: float = 0.99) -> int:
    """Return how many samples MLPerf's early stopping asks for: one may lie beyond, none is discarded."""
    if not 0 < p < 1 or not 0 < confidence < 1:
        raise ValueError(f"p={p}, confidence={confidence}: both are in (0, 1)")
    most = 2
    while _binomial_cdf(1, most, 1 - p) > 1 - confidence:
        most *= 2
    return 1 + _last(lambda n: _binomial_cdf(1, n, 1 - p) > 1 - confidence, 1, most)


def _order_ranks(n: int, p: float, confidence: float) -> tuple[int, int]:
    """Return the innermost ranks l < u from 1 to n that leave out at most half of 1 - confidence on either side.

    The number of samples at or below the quantile is binomial(n, p), and [X_(l), X_(u)) covers it when that number is
    in [l, u - 1].
    """
    tail = _tail(confidence)
    return _binomial_quantile(tail, n, p), _binomial_quantile(1 - tail, n, p) + 1


def _newcombe(both: int, only_a: int, only_b: int, neither: int, confidence: float) -> tuple[float, float]:
    """Combine the two Wilson intervals, with the correlation of the pairs (Newcombe 1998, method 10)."""
    n = both + only_a + only_b + neither
    a, b = wilson(both + only_a, n, confidence), wilson(both + only_b, n, confidence)
    margins = (both + only_a) * (only_b + neither) * (both + only_b) * (only_a + neither)
    cross = float(both * neither - only_a * only_b)
    if cross > 0:  # a continuity correction, for a positive association only
        cross = max(cross - n / 2, 0.0)
    phi = cross / math.sqrt(margins) if margins else 0.0
    down, up = (b.value - b.low, a.high - a.value), (b.high - b.value, a.value - a.low)
    difference = b.value - a.value
    return difference - _correlated(*down, phi), difference + _correlated(*up, phi)


def _correlated(x: float, y: float, phi: float) -> float:
    return math.sqrt(max(x * x - 2 * phi * x * y + y * y, 0.0))


def _outcomes(name: str, values: Sequence[bool] | np.ndarray) -> np.ndarray:
    array = np.asarray(values)
    if array.ndim != 1 or not np.isin(array, (0, 1)).all():
        raise ValueError(f"{name}: outcomes are one row of True and False, got shape {array.shape}")
    return array.astype(bool)


def _check_counts(successes: int, n: int) -> None:
    if n < 1 or not 0 <= successes <= n:
        raise ValueError(f"successes={successes}, n={n}: n is at least 1 and successes in [0, n]")


def _tail(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence={confidence} is not in (0, 1), such as 0.95")
    return (1 - confidence) / 2


def _quantile(confidence: float) -> float:
    return NormalDist().inv_cdf(1 - _tail(confidence))


def _rate_bound(count: int, n: int, tail: float) -> float:
    """Return the rate under which `count` or fewer of n happen with probability `tail`."""
    return 1.0 if count == n else _bisect(lambda rate: _binomial_cdf(count, n, rate) - tail, 1.0, 0.0)


def _binomial_cdf(count: int, n: int, rate: float) -> float:
    """Return P(binomial(n, rate) <= count).

    The tail away from the mean is summed outwards from its largest term, so that rounding stays near 1e-15 of it.
    """
    if count < 0 or count >= n or rate in (0.0, 1.0):
        return float(count >= (n if rate == 1.0 else 0))
    if count >= n * rate:  # P(X > count) is P(n - X < n - count): the same lower tail, seen from the other end
        return 1.0 - _lower_tail(n - count - 1, n, 1 - rate)
    return _lower_tail(count, n, rate)


def _lower_tail(count: int, n: int, rate: float) -> float:
    largest = math.lgamma(n + 1) - math.lgamma(count + 1) - math.lgamma(n - count + 1)
    largest += count * math.log(rate) + (n - count) * math.log1p(-rate)
    last = max(0, count - 10 - int(10 * math.sqrt(n * rate)))  # j below the mean: under exp(-j^2 / 2nr), here e^-50
    below = np.arange(count, last, -1)
    ratios = below / (n - below + 1) * ((1 - rate) / rate)
    return min(1.0, math.exp(largest) * (1.0 + float(np.cumprod(ratios).sum())))


def _binomial_quantile(probability: float, n: int, rate: float) -> int:
    """Return the smallest count at or below which binomial(n, rate) lies with at least this probability."""
    return 1 + _last(lambda count: _binomial_cdf(count, n, rate) < probability, -1, n)


def _last(holds: Callable[[int], bool], low: int, high: int) -> int:
    """Return the last integer in [low, high) for which `holds`, which it does at low and, once it stops, not again."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _bisect(function: Callable[[float], float], below: float, above: float) -> float:
    """Return where a monotonic function changes from negative (at `below`) to positive, to the last bit."""
    while True:
        middle = (below + above) / 2
        if middle in (below, above):
            return middle
        below, above = (middle, above) if function(middle) < 0 else (below, middle)
