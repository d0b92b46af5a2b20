"""The seven attention experiments: their mathematics by hand and by numpy, their verdicts, and the page."""

import math

import numpy as np
import pytest
import torch

from robotattn.attention import masks
from robotattn.experiments import e1_look_up as e1
from robotattn.experiments import e2_fetch as e2
from robotattn.experiments import e3_scale as e3
from robotattn.experiments import e4_positions as e4
from robotattn.experiments import e5_depth as e5
from robotattn.experiments import e6_masks as e6
from robotattn.experiments import e7_tokens as e7
from robotattn.experiments.result import exact, median, number, row, spread

# ------------------------------------------------------------------------------------------ verdicts


@pytest.mark.parametrize(
    ("measured", "verdict"),
    [(1.0, "agrees"), (2.0, "agrees"), (0.999, "differs"), (2.001, "differs"), (math.nan, "differs")],
)
def test_a_verdict_is_the_measurement_against_the_bound(measured: float, verdict: str):
    assert row("x", "1 to 2", measured, least=1.0, most=2.0).verdict == verdict


def test_bounds_are_told_as_text_and_a_row_without_one_is_refused():
    assert row("x", "", 1.0, least=0.9).bound == "at least 0.9"
    assert row("x", "", 1.0, most=3).bound == "at most 3"
    assert exact("x", "105", 105, 105).bound == "exactly 105"
    assert row("x", "", 1.0, least=175, most=250).bound == "175 to 250"
    with pytest.raises(ValueError, match="give a bound"):
        row("x", "", 1.0)


def test_numbers_and_spreads_are_short():
    assert [number(value) for value in (0, 24576, 0.331079, 1.23e-16, 225.5)] == [
        "0",
        "24,576",
        "0.3311",
        "1.2e-16",
        "225.5",
    ]
    assert spread([3.0, 1.0, 2.0], "cm") == "2 (1 to 3) cm"
    assert median([4, 1, 3, 2]) == 2.5


# ------------------------------------------------------------------------------------------ E1


def test_a_look_up_is_the_formula():
    keys, values = e1.objects()
    query = torch.tensor([[0.7, -1.1]], dtype=torch.float64)
    raised = [math.exp((0.7 * x - 1.1 * y) / math.sqrt(2)) for x, y in keys.tolist()]
    alpha, answer = e1.look_up(query, keys, values)
    assert alpha[0].tolist() == pytest.approx([one / sum(raised) for one in raised], abs=1e-15)
    wanted = [sum(r * v for r, v in zip(raised, column, strict=True)) / sum(raised) for column in values.T.tolist()]
    assert answer[0].tolist() == pytest.approx(wanted, abs=1e-15)


def test_the_distance_from_a_hull_is_right_inside_and_outside_a_square():
    square = torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])
    assert e1.outside(torch.tensor([[0.25, 0.5]]), square) == pytest.approx(-0.25)
    assert e1.outside(torch.tensor([[0.5, 0.5], [1.5, 0.5]]), square) == pytest.approx(0.5)


def test_a_hard_look_up_has_no_slope_and_a_soft_one_has_that_of_finite_differences():
    keys, values = e1.objects()
    queries = torch.randn(50, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert e1.slopes(lambda q: e1.hard_look_up(q, keys, values), queries).abs().max() == 0
    soft = e1.slopes(lambda q: e1.look_up(q, keys, values)[1], queries)
    assert torch.allclose(e1.closed_slopes(queries, keys, values), soft, atol=1e-9)
    assert soft.abs().amax((1, 2)).min() > 1e-4


def test_regression_by_attention_of_two_samples_is_done_by_hand():
    x, y, ask = np.array([0.0, 1.0]), np.array([2.0, 4.0]), np.array([0.25])
    near, far = math.exp(-(0.25**2) / 0.5), math.exp(-(0.75**2) / 0.5)
    wanted = (2 * near + 4 * far) / (near + far)
    assert e1.by_attention(x, y, ask, 0.5) == pytest.approx([wanted], abs=1e-14)
    assert e1.nadaraya_watson(x, y, ask, 0.5) == pytest.approx([wanted], abs=1e-14)


# ------------------------------------------------------------------------------------------ E2


def test_scenes_hold_distinct_colours_inside_the_table_and_their_answers():
    scenes = e2.draw_scenes(np.random.default_rng(3), 500, 2, 5)
    assert set(scenes.valid.sum(1).tolist()) == {2, 3, 4, 5}
    place, colour = scenes.objects[..., :2], scenes.objects[..., 2:]
    assert place.abs().max() <= 0.4
    assert not scenes.objects[~scenes.valid].any()
    assert torch.equal(colour.sum(2), scenes.valid.float())
    assert colour.sum(1).max() == 1
    everyone = torch.arange(500)
    assert (scenes.a != scenes.b).all()
    assert scenes.valid[everyone, scenes.a].all() and scenes.valid[everyone, scenes.b].all()
    assert torch.equal(scenes.instruction, torch.cat([colour[everyone, scenes.a], colour[everyone, scenes.b]], 1))
    assert torch.equal(scenes.fetch, place[everyone, scenes.a])
    assert torch.allclose(scenes.vector, place[everyone, scenes.a] - place[everyone, scenes.b], atol=1e-7)
    assert e2.tests()[1].valid.all()


def test_sizes_of_the_layer_and_the_perceptron():
    count = {name: sum(p.numel() for p in model.parameters()) for name, model in
             (("one", e2.Fetcher(1)), ("two", e2.Fetcher(2)), ("perceptron", e2.Perceptron()))}  # fmt: skip
    assert count == {"one": 182, "two": 2 * (96 + 64 + 16) + 8 + 2, "perceptron": 8194}


@pytest.mark.parametrize("heads", [1, 2])
def test_gradients_of_the_layer_are_those_of_central_differences(heads: int):
    assert e2.gradient_error(heads) < 1e-9


def test_a_layer_set_by_hand_fetches_and_two_heads_give_a_difference():
    """Queries and keys that are the colours, values that are the places: what training has to find."""
    usual, six = e2.tests()
    for heads, task in ((1, "fetch"), (2, "vector")):
        layer = e2.Fetcher(heads)
        with torch.no_grad():
            for values in layer.parameters():
                values.zero_()
            for head in range(heads):
                for colour in range(6):
                    layer.layer.query.weight[8 * head + colour, 6 * head + colour] = 100.0
                    layer.layer.key.weight[8 * head + colour, 2 + colour] = 1.0
                for axis in (0, 1):
                    layer.layer.value.weight[2 * head + axis, axis] = 1.0
                    layer.layer.out.weight[axis, 2 * head + axis] = 1.0 if head == 0 else -1.0
        assert e2.error(layer, usual, task) < 1e-3
        assert e2.error(layer, six, task) < 1e-3
        on_a, on_b = e2.on_target(layer)
        assert (on_a[0], on_b[-1] if heads == 2 else 1) == pytest.approx((1, 1), abs=1e-6)


def test_one_layer_learns_to_fetch_within_250_steps_and_the_perceptron_does_not():
    layer = e2.train(e2.seeded(0, e2.Fetcher, 1), "fetch", 250, 0)
    perceptron = e2.train(e2.seeded(0, e2.Perceptron), "fetch", 250, 0)
    assert [step for step, _, _ in layer] == list(range(0, 251, 25))
    assert 175 <= e2.first_below(layer, 2.0) <= 250
    assert layer[-1][2] < 3
    assert perceptron[-1][1] > 20


def test_the_first_step_below_a_limit_is_found_or_lies_past_the_end():
    curve = [(0, 30.0, 30.0), (25, 1.9, 30.0), (50, 2.5, 30.0)]
    assert e2.first_below(curve, 2.0) == 25
    assert e2.first_below(curve, 1.0) == 75


# ------------------------------------------------------------------------------------------ E3


def test_the_norm_of_the_softmax_jacobian_is_that_of_autograd_and_of_closed_forms():
    scores = torch.randn(1, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(lambda x: x.softmax(0), scores[0])
    assert e3.jacobian_norms(scores.softmax(1))[0] == pytest.approx(float(jacobian.norm()), abs=1e-15)
    even, hard = torch.full((1, 16), 1 / 16, dtype=torch.float64), torch.eye(16, dtype=torch.float64)[:1]
    assert float(e3.jacobian_norms(even)) == pytest.approx(math.sqrt(15) / 16)
    assert float(e3.jacobian_norms(hard)) == 0


def test_unscaled_scores_spread_like_the_square_root_of_the_width():
    for width in (4, 64, 1024):
        found = e3.measure(width, torch.Generator().manual_seed(7))
        assert found.deviation == pytest.approx(math.sqrt(width), rel=0.1)
    assert found.largest[0] > 0.9 > 0.3 > found.largest[1]
    alone = e3.measure(1, torch.Generator().manual_seed(7))
    assert alone.largest[0] == alone.largest[1]


# ------------------------------------------------------------------------------------------ E4


def test_sinusoidal_products_are_a_sum_of_cosines_of_the_distance():
    frequency = 10_000.0 ** (-np.arange(16) / 16)
    far = np.arange(64)[:, None] - np.arange(64)
    assert e4.gram().numpy() == pytest.approx(np.cos(far[..., None] * frequency).sum(-1), abs=1e-4)
    assert e4.off_toeplitz(e4.gram()) < 1e-12
    assert e4.off_toeplitz(torch.tensor([[1.0, 2.0], [2.0, 1.5]])) == 0.5


def test_rotary_scores_are_products_of_complex_numbers():
    random = np.random.default_rng(0)
    query, key = random.normal(size=(2, 8))
    turn = np.exp(1j * (5.0 - 2.0) * 10_000.0 ** (-np.arange(4) / 4))
    wanted = ((query[:4] + 1j * query[4:]) * np.conj(key[:4] + 1j * key[4:]) * turn).real.sum()
    at = [torch.tensor([value], dtype=torch.float64) for value in (5.0, 2.0)]
    found = e4.rotary_scores(torch.from_numpy(query), torch.from_numpy(key), *at)
    assert float(found) == pytest.approx(wanted, abs=1e-13)
    assert e4.shift_error() < 1e-12


def test_a_reversed_reach_is_told_apart_by_positions_alone():
    found = {one.label: e4.reversal(one, 0) for one in e4.SETTINGS}
    same = {one.label for one in e4.SETTINGS if one.same}
    assert {label for label, change in found.items() if change < 1e-12} == same
    assert min(change for label, change in found.items() if label not in same) > 1e-2
    assert e4.equivariance_error() < 1e-12
    assert e4.invariance_error() < 1e-12


# ------------------------------------------------------------------------------------------ E5


def test_diversity_is_zero_for_equal_tokens_and_one_for_opposite_ones():
    token = torch.tensor([1.0, 2.0, 3.0])
    assert e5.diversity(token.expand(1, 4, 3)) == 0
    assert e5.diversity(torch.stack([token, -token])[None]) == pytest.approx(1)
    assert e5.diversity(torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])) == pytest.approx(math.sqrt(0.5))


def test_without_residuals_tokens_collapse_and_with_a_norm_they_do_not():
    assert max(e5.trace(e5.COLLAPSE, 3).diversity[5:]) < 1e-10
    bare, normed = e5.trace(e5.BARE, 3), e5.trace(e5.PRE, 3)
    assert bare.rms[-1] > 1e4 > 10 > normed.rms[-1]
    assert normed.diversity[-1] > 0.1
    assert len(normed.rms) == len(normed.diversity) == 24


# ------------------------------------------------------------------------------------------ E6


def test_dot_products_are_105_with_a_cache_and_525_without():
    model, seen = e6.make_model(), e6.observations(2)
    causal = e6.MASKS["causal"]
    assert sum(e6.cached(model, seen, causal).products) == 105
    assert sum(e6.recompute(model, seen, causal).products) == 525
    block = e6.MASKS["block"]
    assert sum(e6.cached(model, seen, block).products) == 36 + sum(range(7, 15)) == 120
    assert sum(e6.recompute(model, seen, block).products) == 660


def test_the_block_mask_is_the_one_of_the_text():
    picture = e6.MASKS["block"].picture(14, 14)
    wanted = torch.ones(14, 14).tril()
    wanted[:6, :6] = 1
    assert torch.equal(picture, wanted.to(picture.dtype))


def test_the_random_models_do_not_depend_on_global_random_numbers():
    torch.manual_seed(1)
    first = e6.make_model().stack.state_dict(), e4.random_layer("shaw", 0).state_dict(), e5.trace(e5.PRE, 0)
    torch.manual_seed(2)
    again = e6.make_model().stack.state_dict(), e4.random_layer("shaw", 0).state_dict(), e5.trace(e5.PRE, 0)
    assert first[2] == again[2]
    for one, other in zip(first[:2], again[:2], strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_cache_is_right_for_causal_and_block_and_wrong_for_bidirectional():
    model, seen = e6.make_model(1), e6.observations(4, seed=1)
    for name, mask in e6.MASKS.items():
        full = e6.recompute(model, seen, mask)
        errors = e6.disagreement(e6.cached(model, seen, mask, full.actions), full)
        assert errors[0] < 1e-12  # nothing is old yet
        assert (max(errors[1:]) < 1e-12) == (name != "bidirectional"), name
        assert e6.is_refused(model, mask) == (name == "bidirectional")


def test_padded_rows_equal_single_rows_and_a_wrong_mask_would_be_seen(monkeypatch):
    model = e6.make_model()
    assert max(e6.padding_error(model, name) for name in ("causal", "block")) < 1e-12
    monkeypatch.setitem(e6.MASKS, "block", masks.Causal())
    assert e6.padding_error(model, "block") > 1e-3


# ------------------------------------------------------------------------------------------ E7


def test_tokens_of_cameras_and_patches():
    assert [e7.tokens(1, patch) - 1 for patch in (16, 8)] == [196, 784]
    assert e7.tokens(2, 16, frames=3, actions=8, instruction=5) == 2 * 196 * 3 + 3 + 8 + 5
    assert e7.real_patches(4, 32) == 4 * 49


def test_counted_flops_are_those_of_matrix_products_done_by_hand():
    small = e7.Size("tiny", 1, 8, 2)
    found = e7.counted(small, 3)
    assert found.linear == 4 * (2 * 3 * 8 * 8) + 2 * (2 * 3 * 8 * 32)  # four projections, two layers of the MLP
    assert found.attention == 2 * (2 * (2 * 3 * 3 * 4))  # scores and sums, for two heads of width 4
    assert found == e7.formula(3, 8)
    assert e7.crossing(small) == 48


def test_bytes_and_parameters():
    assert e7.cache_bytes(e7.SMALL, 605, torch.float32, device="cpu") == 14_868_480
    assert e7.cache_formula(e7.SMALL, 605, torch.float32) == 14_868_480
    assert e7.cache_bytes(e7.SEVEN, 10, torch.bfloat16, kv_heads=8) == 2 * 32 * 10 * 1024 * 2
    assert e7.block_parameters(e7.Size("tiny", 1, 8, 2)) == (4 * 64, 8 * 64)
