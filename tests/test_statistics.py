"""Statistics against published values, scipy's own tests and exact enumeration of coverage."""

import math
import subprocess
import sys
from itertools import product

import numpy as np
import pytest
from scipy import stats

from robotattn.statistics import (
    bootstrap,
    clopper_pearson,
    early_stopping,
    early_stopping_needed,
    mcnemar,
    paired_difference,
    percentile,
    samples_needed,
    smallest_detectable_difference,
    wilson,
)


def pairs(both: int, only_a: int, only_b: int, neither: int) -> tuple[list[bool], list[bool]]:
    a = [True] * (both + only_a) + [False] * (only_b + neither)
    b = [True] * both + [False] * only_a + [True] * only_b + [False] * neither
    return a, b


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0000, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_reproduces_the_published_table(successes, n, low, high):
    """Newcombe (1998), Statistics in Medicine 17, table I, method 3."""
    interval = wilson(successes, n)
    assert interval.value == successes / n
    assert (interval.low, interval.high) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [(81, 263, 0.2527, 0.3676), (15, 148, 0.0578, 0.1617), (0, 20, 0.0000, 0.1684), (1, 29, 0.0009, 0.1776)],
)
def test_clopper_pearson_reproduces_the_published_table(successes, n, low, high):
    """Newcombe (1998), table I, method 5."""
    interval = clopper_pearson(successes, n)
    assert (interval.low, interval.high) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.999])
def test_both_intervals_equal_those_of_scipy_for_every_count(confidence):
    for n in (1, 2, 7, 50):
        for successes in range(n + 1):
            test = stats.binomtest(successes, n)
            for ours, method in ((wilson, "wilson"), (clopper_pearson, "exact")):
                theirs = test.proportion_ci(confidence, method=method)
                interval = ours(successes, n, confidence)
                assert (interval.low, interval.high) == pytest.approx((theirs.low, theirs.high), abs=1e-12)
                assert 0 <= interval.low <= interval.value <= interval.high <= 1


@pytest.mark.parametrize("n", [10_000, 1_000_000])
def test_clopper_pearson_of_many_trials_equals_the_quantiles_of_the_beta_distribution(n):
    for count in (0, 1, 60, n // 3, n // 2, n - 7, n - 1, n):
        for confidence in (0.95, 0.98, 1 - 1e-9):
            tail, ours = (1 - confidence) / 2, clopper_pearson(count, n, confidence)
            low = stats.beta.ppf(tail, count, n - count + 1) if count else 0
            high = stats.beta.ppf(1 - tail, count + 1, n - count) if count < n else 1
            assert (ours.low, ours.high) == pytest.approx((low, high), abs=1e-10, rel=0)


def test_no_miss_in_n_ticks_bounds_the_rate_as_the_closed_form_says():
    """One-sided 99 %: (1 - rate)^n = 0.01."""
    assert clopper_pearson(0, 459, 0.98).high == pytest.approx(1 - 0.01 ** (1 / 459), rel=1e-9)


def test_wilson_is_symmetric_and_exact_at_the_ends():
    for successes in range(31):
        a, b = wilson(successes, 30), wilson(30 - successes, 30)
        assert (a.low, a.high) == pytest.approx((1 - b.high, 1 - b.low), abs=1e-15)
    assert wilson(0, 30).low == 0.0 and wilson(30, 30).high == 1.0


def test_exact_coverage_is_what_each_interval_promises():
    """Sum the probability of every count whose interval holds the true rate."""
    n, rates = 50, np.linspace(0.01, 0.99, 197)
    mass = stats.binom.pmf(np.arange(n + 1)[:, None], n, rates)
    coverage = {}
    for name, method in (("wilson", wilson), ("exact", clopper_pearson)):
        intervals = [method(k, n) for k in range(n + 1)]
        inside = np.array([(i.low <= rates) & (rates <= i.high) for i in intervals])
        coverage[name] = (mass * inside).sum(0)
    assert coverage["exact"].min() >= 0.95
    assert 0.945 < coverage["wilson"].mean() < 0.96
    assert coverage["wilson"].min() > 0.83  # its known dip near 0 and 1


def test_counts_that_cannot_be_are_refused():
    for successes, n in ((-1, 10), (11, 10), (0, 0)):
        for method in (wilson, clopper_pearson):
            with pytest.raises(ValueError, match=rf"successes={successes}, n={n}"):
                method(successes, n)
    for confidence in (0, 1, 95):
        with pytest.raises(ValueError, match=f"confidence={confidence}"):
            wilson(5, 10, confidence)


def test_bootstrap_of_a_mean_agrees_with_the_normal_interval_and_scipy():
    data = np.random.default_rng(0).normal(3.0, 2.0, 400)
    ours = bootstrap(data, np.random.default_rng(1))
    theirs = stats.bootstrap(
        (data,), np.mean, method="percentile", n_resamples=10_000, rng=np.random.default_rng(2)
    ).confidence_interval
    half = 1.96 * data.std() / 20
    assert ours.value == data.mean()
    assert (ours.low, ours.high) == pytest.approx((data.mean() - half, data.mean() + half), abs=0.02)
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=0.02)


def test_bootstrap_resamples_rows_and_repeats_with_the_same_generator():
    rows = np.array([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0]])  # second column = first + 1, in every resample

    def gap(data, axis):
        return (data[..., 1] - data[..., 0]).mean(axis=axis)

    one = bootstrap(rows, np.random.default_rng(5), gap, resamples=50)
    assert (one.value, one.low, one.high) == (1.0, 1.0, 1.0)
    data = rows.ravel()
    results = [bootstrap(data, np.random.default_rng(5), np.median, resamples=200) for _ in range(2)]
    assert results[0] == results[1]
    with pytest.raises(ValueError, match="1 sample"):
        bootstrap([3.0], np.random.default_rng(0))


@pytest.mark.parametrize(
    ("table", "difference", "low", "high", "p"),
    [
        ((36, 2, 12, 0), 0.2, 0.0569, 0.3404, 0.012939453125),  # Newcombe (1998) on paired data, method 10
        ((1, 7, 1, 12), -0.2857, -0.507, -0.026, 0.0703125),  # Fagerland, Lydersen & Laake (2014), airway data
    ],
)
def test_paired_difference_reproduces_published_examples(table, difference, low, high, p):
    result = paired_difference(*pairs(*table))
    assert result.difference == pytest.approx(difference, abs=5e-5)
    assert (result.low, result.high) == pytest.approx((low, high), abs=5e-4)
    assert result.p == p
    assert (result.only_a, result.only_b, result.n) == (table[1], table[2], sum(table))


def test_mcnemar_is_the_exact_sign_test():
    for only_a, only_b in product(range(12), range(12)):
        expected = stats.binomtest(only_a, only_a + only_b).pvalue if only_a + only_b else 1.0
        assert mcnemar(only_a, only_b) == pytest.approx(expected, abs=1e-12)
    with pytest.raises(ValueError, match="only_a=-1"):
        mcnemar(-1, 3)


def test_swapping_the_conditions_mirrors_the_difference():
    a, b = pairs(60, 5, 14, 21)
    forth, back = paired_difference(a, b), paired_difference(b, a)
    assert (back.difference, back.low, back.high) == pytest.approx((-forth.difference, -forth.high, -forth.low))
    assert back.p == forth.p


def test_identical_runs_differ_by_zero_and_pairing_narrows_the_interval():
    a, b = pairs(90, 0, 0, 10)
    same = paired_difference(a, b)
    assert same.difference == 0 and same.p == 1 and same.low <= 0 <= same.high
    agreeing, crossed = paired_difference(*pairs(45, 5, 5, 45)), paired_difference(*pairs(25, 25, 25, 25))
    assert agreeing.high - agreeing.low < 0.7 * (crossed.high - crossed.low)


def test_exact_coverage_of_the_paired_interval():
    """Enumerate every table of 20 pairs for some true cell probabilities."""
    n, covered = 20, []
    tables = np.array([t for t in product(range(n + 1), repeat=3) if sum(t) <= n])
    tables = np.column_stack([tables, n - tables.sum(1)])
    results = [paired_difference(*pairs(*table)) for table in tables]
    for cells in ([0.5, 0.1, 0.2, 0.2], [0.7, 0.05, 0.15, 0.1], [0.25, 0.25, 0.25, 0.25]):
        mass = stats.multinomial.pmf(tables, n, cells)
        inside = np.array([r.low <= cells[2] - cells[1] <= r.high for r in results])
        covered.append((mass * inside).sum())
    assert min(covered) > 0.94


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ([True], [True, False], "a has 1 outcomes and b 2"),
        ([], [], "a has 0 outcomes"),
        ([0, 1, 2], [0, 1, 1], "a: outcomes are one row of True and False"),
        ([[True]], [[True]], r"shape \(1, 1\)"),
    ],
)
def test_outcomes_that_do_not_pair_are_refused(a, b, message):
    with pytest.raises(ValueError, match=message):
        paired_difference(a, b)


def test_smallest_detectable_difference_inverts_the_textbook_sample_size():
    """Fleiss, Levin & Paik: 93 a group tell 0.5 from 0.7 (80 % power), 388 tell 0.5 from 0.6."""
    assert smallest_detectable_difference(93, 0.5) == pytest.approx(0.2, abs=1e-3)
    assert smallest_detectable_difference(388, 0.5) == pytest.approx(0.1, abs=1e-3)


def test_the_detectable_difference_is_detected_as_often_as_the_power_says():
    n, p = 200, 0.9
    other = p - smallest_detectable_difference(n, p, power=0.8)
    a, b = np.random.default_rng(0).binomial(n, [[p], [other]], size=(2, 40_000)) / n
    pooled = (a + b) / 2
    found = np.abs(a - b) > 1.96 * np.sqrt(2 * pooled * (1 - pooled) / n)
    assert found.mean() == pytest.approx(0.8, abs=0.02)


def test_more_episodes_see_smaller_differences_and_one_sees_none():
    seen = [smallest_detectable_difference(n, 0.95) for n in (20, 50, 200, 1000)]
    assert seen == sorted(seen, reverse=True)
    assert math.isnan(smallest_detectable_difference(1, 1.0))
    with pytest.raises(ValueError, match=r"n=0, p=0\.5"):
        smallest_detectable_difference(0, 0.5)


@pytest.mark.parametrize(("p", "needed"), [(0.5, 7), (0.9, 44), (0.99, 459), (0.999, 4603), (0.01, 459)])
def test_a_percentile_refuses_fewer_samples_than_its_tail_needs(p, needed):
    assert samples_needed(p) == needed
    assert percentile(np.arange(needed), p).value == pytest.approx(p * (needed - 1))
    with pytest.raises(ValueError, match=rf"p{100 * p:g} needs at least {needed} samples, got {needed - 1}"):
        percentile(np.arange(needed - 1), p)


def test_a_higher_confidence_needs_samples_beyond_both_ends():
    with pytest.raises(ValueError, match="p99 needs at least 528 samples, got 500"):
        percentile(np.arange(500), 0.99, confidence=0.99)


def test_the_interval_of_a_median_is_the_tabulated_pair_of_order_statistics():
    """n = 100: the 40th and the 61st sample (sign-test tables)."""
    interval = percentile(np.random.default_rng(0).permutation(np.arange(1, 101)), 0.5)
    assert (interval.value, interval.low, interval.high) == (50.5, 40, 61)


@pytest.mark.parametrize(("n", "p"), [(7, 0.5), (100, 0.5), (459, 0.99), (1000, 0.95), (4603, 0.999), (459, 0.01)])
def test_the_order_statistics_cover_the_percentile_at_least_as_often_as_asked(n, p):
    interval = percentile(np.arange(1, n + 1), p)
    below = stats.binom(n, p)
    low, high = int(interval.low), int(interval.high)
    assert below.cdf(high - 1) - below.cdf(low - 1) >= 0.95
    assert below.cdf(low - 1) <= 0.025 and below.sf(high - 1) <= 0.025
    assert below.cdf(low) > 0.025 and below.sf(high - 2) > 0.025  # no narrower pair does


def test_samples_that_are_not_finite_are_refused():
    with pytest.raises(ValueError, match="p50: 2 of 10 samples are not finite"):
        percentile([*range(8), np.nan, np.inf], 0.5)
    with pytest.raises(ValueError, match=r"p=1\.5"):
        percentile(range(10), 1.5)


def passing(over: int, p: float) -> int:
    """LoadGen's search: the fewest samples under the bound that allow `over` above it, at 99 % confidence."""
    under = int(over * p / (1 - p))
    while stats.binom.cdf(over, under + over, 1 - p) > 0.01:
        under += 1
    return under


@pytest.mark.parametrize(
    ("n", "discarded"),
    [(64, 0), (80, 0), (81, 1), (100, 2), (201, 9), (659, 47), (708, 51), (79_944, 7_796)],
)
def test_early_stopping_discards_as_many_samples_as_the_published_runs(n, discarded):
    """What LoadGen's summaries print for p90: 100 queries, "would discard 2"; ... 79944, "would discard 7796"."""
    ranks = np.random.default_rng(0).permutation(n) + 1
    assert early_stopping(ranks) == n - discarded


@pytest.mark.parametrize("p", [0.5, 0.9, 0.95, 0.99])
def test_early_stopping_is_the_rule_of_mlperf(p):
    """Discard t - 1 for the largest t with n >= h(t) + t."""
    steps = [passing(over, p) + over for over in range(1, 6)]
    assert early_stopping_needed(p) == steps[0]
    for over, n in enumerate(steps, start=1):
        assert early_stopping(np.arange(n), p) == n - over
        if over > 1:
            assert early_stopping(np.arange(n - 1), p) == n - 1 - (over - 1)


@pytest.mark.parametrize(("p", "needed"), [(0.9, 64), (0.99, 662)])
def test_early_stopping_refuses_fewer_samples_than_loadgen_by_name(p, needed):
    assert early_stopping_needed(p) == needed
    with pytest.raises(
        ValueError, match=rf"early-stopping p{100 * p:g} needs at least {needed} samples, got {needed - 1}"
    ):
        early_stopping(np.zeros(needed - 1), p)
    with pytest.raises(ValueError, match="1 of 700 samples are not finite"):
        early_stopping([*range(699), np.nan], p)
    with pytest.raises(ValueError, match=r"p=1\.0, confidence=0\.99"):
        early_stopping(range(700), 1.0)


def test_early_stopping_is_a_confident_upper_bound_of_the_percentile():
    """100 samples: the third largest, below the true p90 as often as fewer than 3 of 100 exceed it (0.2 %)."""
    samples = np.random.default_rng(3).exponential(size=(500, 100))
    below = sum(early_stopping(run) < math.log(10) for run in samples)
    assert below <= stats.binom.ppf(0.9999, 500, stats.binom.cdf(2, 100, 0.1))


def test_statistics_imports_nothing_but_numpy():
    program = "import sys; sys.modules['scipy'] = None; import robotattn.statistics as s; print(s.wilson(3, 9).low)"
    done = subprocess.run([sys.executable, "-c", program], check=True, timeout=60, capture_output=True, text=True)
    assert float(done.stdout) == wilson(3, 9).low
