"""The line through measured latencies, its held-out error, and the budgets it leaves (robotattn/latency/budget.py)."""

import math

import numpy as np
import pytest
from scipy.optimize import nnls

from robotattn.latency.budget import (
    Budget,
    Point,
    Shape,
    agreement,
    assign,
    cross_validate,
    fit,
    fits,
    independent,
    largest,
    nonnegative,
    pooled,
    r_squared,
    table,
)

A, B, C, E = 2.0, 0.05, 0.3, 1e-6


def exact(prefix: int, actions: int, kv: int, kind: str = "act", noise: float = 0.0) -> Point:
    ms = A + B * prefix + C * actions + E * kv + noise
    return Point(kind, "eager", prefix, actions, kv, {"p50": ms, "p99": 1.5 * ms, "max": 2 * ms})


def grid(kind: str = "act") -> list[Point]:
    return [
        exact(prefix, actions, heads * 512 * (prefix + actions), kind)
        for prefix in (40, 100, 250, 600)
        for actions in (8, 16)
        for heads in (1, 4)
    ]


def test_a_line_without_noise_is_recovered_exactly():
    found = fit(grid())
    assert (found.a, found.b, found.c, found.e) == pytest.approx((A, B, C, E), rel=1e-9)
    assert found.r2 == pytest.approx(1.0) and found.r2_held_out == pytest.approx(1.0)
    assert found.error < 1e-9 and found.worst < 1e-9 and found.untold == () and found.n == 16
    assert fit(grid(), "p99").b == pytest.approx(1.5 * B)


def test_a_term_that_never_varies_on_its_own_is_named_and_left_to_the_others():
    points = [exact(prefix, 8, 100 * prefix) for prefix in (10, 20, 40, 80, 160)]  # actions fixed, KV follows prefix
    found = fit(points)
    assert found.untold == ("c", "e") and found.c == found.e == 0.0
    assert found.a == pytest.approx(A + 8 * C) and found.b == pytest.approx(B + 100 * E)
    assert found.predict(300, 8, 30_000) == pytest.approx(A + B * 300 + C * 8 + E * 30_000)


def test_coefficients_are_never_negative_and_equal_scipys_nnls():
    generator = np.random.default_rng(0)
    for _ in range(20):
        design = generator.random((30, 4)) * [1, 1e3, 10, 1e6]
        target = design @ generator.normal(0, 1, 4) + generator.normal(0, 1, 30)
        mine, theirs = nonnegative(design, target), nnls(design / [1, 1e3, 10, 1e6], target)[0] / [1, 1e3, 10, 1e6]
        assert mine == pytest.approx(theirs, rel=1e-6, abs=1e-12)
        assert (mine >= 0).all()


def test_nothing_fits_a_negative_target_and_the_zero_line_is_returned():
    assert nonnegative(np.ones((3, 1)), -np.ones(3)) == pytest.approx([0.0])


def test_a_dependent_column_is_the_later_one():
    first = np.array([1.0, 2.0, 4.0])
    assert independent(np.stack([np.ones(3), first, 3 * first - 1, first**2], axis=1)) == [0, 1, 3]
    assert independent(np.zeros((3, 2))) == []


def test_a_curve_is_not_called_a_line():
    """Four points on a parabola, a fifth far out: held out, it is missed by what a line must miss."""
    points = [Point("act", "eager", n, 8, 0, {"p50": (n / 10) ** 2}) for n in (10, 20, 30, 40, 200)]
    found = fit(points)
    assert found.r2_held_out < 0.9 < found.r2 and found.worst > 0.5


def test_held_out_means_that_the_prediction_did_not_see_the_point():
    points = grid()
    spoiled = [*points[:-1], exact(600, 16, 4 * 512 * 616, noise=30.0)]
    clean, other = fit(points), fit(spoiled)
    assert other.held_out[-1] == pytest.approx(clean.held_out[-1])  # fitted without the spoiled point: unchanged


def test_repeats_of_a_point_are_never_split_between_fit_and_held_out():
    groups = [(10, 8), (20, 8), (10, 8), (30, 8), (20, 8), (40, 8)]
    folds = assign(groups, 4)
    assert folds[0] == folds[2] and folds[1] == folds[4] and set(folds) == {0, 1, 2, 3}
    assert (assign(groups, 4) == folds).all()


def test_relative_weights_serve_the_small_ones():
    design = np.array([[1.0], [1.0], [1.0], [1.0]])
    target = np.array([1.0, 1.0, 1.0, 100.0])
    plain = cross_validate(design, target, list(range(4)))
    weighed = cross_validate(design, target, list(range(4)), relative=True)
    assert plain[0] == pytest.approx(34.0)  # the mean of 1, 1, 100
    assert weighed[0] == pytest.approx(2.01 / 2.0001)


def test_what_cannot_be_fitted_is_refused_by_name():
    few = [exact(n, 8, 0) for n in (10, 20, 20)]
    with pytest.raises(ValueError, match="2 different ones"):
        fit(few)
    with pytest.raises(ValueError, match="one kind"):
        fit([*grid(), *grid("blockwise")])
    short = [*grid(), Point("act", "eager", 50, 8, 0, {"p50": 3.0})]
    with pytest.raises(ValueError, match="p99: 1 of 17 points"):
        fit(short, "p99")
    found, refused = fits([*grid(), exact(10, 8, 0, "blockwise")])
    assert list(found) == [("act", "eager")] and "1 different" in refused["blockwise eager p50"]


def test_pooled_error_is_over_every_kind():
    points = [*grid(), *grid("blockwise")]
    found, _ = fits(points)
    assert pooled(points, found)["n"] == 32 and pooled(points, found)["r2"] == pytest.approx(1.0)
    assert agreement(np.array([1.0, 2.0]), np.array([1.1, 1.0])) == pytest.approx(
        {"r2": 1 - 1.01 / 0.5, "error": 0.3, "worst": 0.5, "n": 2}
    )
    assert math.isnan(r_squared(np.ones(3), np.ones(3)))


def test_the_largest_budget_is_solved_by_hand():
    """20 ms = 2 + 0.05 N + 0.3 * 8 + 1e-6 * 1000 (N + 8): N = 15.592 / 0.051 = 305.7; (305 - 17) / 36 = 8 cameras."""
    found = fit(grid())
    shape = Shape(per_camera=36, other=17, actions=8, kv_per_token=1000)
    assert largest(found, shape, 50.0, "p50") == Budget(50.0, "p50", 305, 8, False)
    assert largest(found, shape, 10.0, "p50").extrapolated  # 1874 tokens; 600 were measured
    assert largest(found, shape, 500.0, "p50") == Budget(500.0, "p50", 0, 0, False)
    assert largest(found, shape, 50.0, "p50", periods=0.5).tokens == 109  # half the period is the camera's


def test_a_flat_line_has_no_limit_or_no_room():
    points = [Point("act", "eager", n, 8, 0, {"p50": 5.0}) for n in (10, 20, 30, 40)]
    found, shape = fit(points), Shape(16, 4, 8, 100)
    assert largest(found, shape, 100.0, "p50").tokens is None
    assert largest(found, shape, 250.0, "p50").tokens == 0


def test_the_table_has_a_row_for_every_statistic_and_rate():
    found = {statistic: fit(grid(), statistic) for statistic in ("p99", "max")}
    rows = table(found, Shape(36, 17, 8, 1000))
    assert [(row.statistic, row.hz) for row in rows] == [
        (s, hz) for s in ("p99", "max") for hz in (10, 20, 30, 50, 100)
    ]
    assert all(p99.tokens >= most.tokens for p99, most in zip(rows[:5], rows[5:], strict=True))
