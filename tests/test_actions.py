"""Action tokens: 256 bins and their edges, zero in the middle of one, and nothing decodes silently wrong (O29)."""

import math

import pytest
import torch

from robotattn.tokens.actions import BINS, ActionBins

ULP = 1 + 2.0**-23


def bins(low=-1.0, high=1.0, chunk=1, size=1, **more):
    module = ActionBins(chunk, size, **more)
    module.set_ranges(torch.full((chunk, size), low), torch.full((chunk, size), high))
    return module


def column(*values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype)[:, None, None]


def test_two_hundred_and_fifty_seven_edges_bound_256_bins_of_one_width():
    module = bins(-0.2, 0.3)
    edges = module.edges()[0, 0].double()
    assert len(edges) == BINS + 1 == 257
    torch.testing.assert_close(edges.diff(), torch.full((256,), 0.5 / 255).double(), rtol=1e-4, atol=0)
    assert edges[0] <= -0.2 + 1e-7 and edges[-1] >= 0.3 - 1e-7
    assert edges[0] > -0.2 - 0.5 / 255 and edges[-1] < 0.3 + 0.5 / 255


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_values_of_o29_have_ids_from_0_to_255(dtype):
    """O29: -1, +1, just and far outside, and 0."""
    module = bins()
    ids, clipped = module.encode(column(-1.0, 1.0, -1.0001, 1.5, 0.0, dtype=dtype))
    minus, plus, outside, far, zero = ids.flatten().tolist()
    assert (minus, outside, far, zero) == (0, 0, 255, 127)
    assert plus in (254, 255)  # the grid is a bin longer than the range, and +1 the edge between its last two bins
    assert clipped.flatten().tolist() == [False, False, True, True, False]
    assert clipped.sum() == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("low", "high"), [(-1.0, 1.0), (-0.013, 0.002), (0.0, 1.0), (0.2, 0.7), (-0.3, -0.1)])
def test_a_round_trip_is_off_by_at_most_half_a_bin(low, high, dtype):
    module = bins(low, high)
    values = torch.linspace(low, high, 5001, dtype=dtype)[:, None, None]
    ids, clipped = module.encode(values)
    assert ids.min() >= 0 and ids.max() <= 255 and not clipped.any()
    half = module.get_buffer("width").item() / 2
    assert (module.decode(ids) - values).abs().max() <= half * (1 + 1e-4)
    assert (ids.flatten().diff() >= 0).all() and len(ids.unique()) >= 255


def test_an_edge_belongs_to_the_bin_on_its_right_and_its_neighbours_to_theirs():
    """O29: edges and the next numbers on either side."""
    module = bins(-0.25, 0.75, bins=5)  # width 1/4: every edge is a binary fraction
    edges = module.edges()[0, 0]
    assert edges.tolist() == [-0.375, -0.125, 0.125, 0.375, 0.625, 0.875]
    inner = edges[1:-1]
    assert module.encode(inner[:, None, None])[0].flatten().tolist() == [1, 2, 3, 4]
    for beside in (-1.0, 1.0):  # one number further, it is one of the two bins beside the edge
        near = torch.nextafter(inner, torch.tensor(beside))[:, None, None]
        ids = module.encode(near)[0]
        assert ((ids.flatten() - torch.tensor([1, 2, 3, 4])).abs() <= 1).all()
        assert (module.decode(ids) - near).abs().max() <= 0.125 * (1 + 1e-6)
    first, last = edges[0], edges[-1]
    ids, clipped = module.encode(torch.stack([first, last, first * ULP, last * ULP])[:, None, None])
    assert ids.flatten().tolist() == [0, 4, 0, 4]
    assert clipped.flatten().tolist() == [False, False, True, True]


@pytest.mark.parametrize(("low", "high"), [(-1.0, 1.0), (-0.013, 0.002), (0.0, 1.0), (-0.07, 0.0)])
def test_stay_is_exactly_zero(low, high):
    module = bins(low, high)
    ids, clipped = module.encode(column(0.0))
    assert module.decode(ids).item() == 0.0 and not clipped.any()


def test_a_closed_and_an_open_gripper_are_exact():
    module = bins(0.0, 1.0)
    torch.testing.assert_close(module.decode(module.encode(column(0.0, 1.0))[0]), column(0.0, 1.0), rtol=0, atol=1e-6)


def test_infinite_values_are_clipped_and_counted():
    ids, clipped = bins().encode(column(-math.inf, math.inf))
    assert ids.flatten().tolist() == [0, 255] and clipped.all()


def test_nan_is_refused():
    """O29."""
    with pytest.raises(ValueError, match="NaN has no bin"):
        bins().encode(column(0.0, math.nan))


@pytest.mark.parametrize("ids", [[-1], [256], [0, 300]])
def test_an_id_that_is_no_bin_is_refused(ids):
    """O29: no loop-hole below or above the range."""
    with pytest.raises(ValueError, match="action ids must be 0 to 255, got"):
        bins().decode(torch.tensor(ids)[:, None, None])


@pytest.mark.parametrize("ids", [torch.zeros(1, 1, 1), torch.zeros(1, 1, 1, dtype=torch.bool)])
def test_ids_that_are_no_integers_are_refused(ids):
    with pytest.raises(TypeError, match="action ids must be integers"):
        bins().decode(ids)


def test_every_step_and_dimension_has_its_own_range():
    module = ActionBins(2, 2)
    low, high = torch.tensor([[-0.01, -1.0], [-0.1, -10.0]]), torch.tensor([[0.01, 1.0], [0.1, 10.0]])
    module.set_ranges(low, high)
    values = torch.stack([low, high, low / 3, high / 7])
    ids, _ = module.encode(values)
    assert (ids == ids[:, :1, :1]).all()  # the same share of each range, the same bin
    assert ((module.decode(ids) - values).abs() <= module.get_buffer("width") * 0.5001).all()
    assert torch.equal(module.decode(ids[:, :1]), module.decode(ids)[:, :1])  # the first steps alone


def test_the_mean_over_bins_is_that_of_their_centres():
    module = bins(-0.3, 0.5, chunk=2, size=3)
    probabilities = torch.rand(4, 256).softmax(dim=-1)
    centres = module.decode(torch.arange(256)[:, None, None].expand(-1, 2, 3))[:, 1, 2]
    torch.testing.assert_close(module.mean(probabilities, 1, 2), probabilities @ centres, rtol=1e-4, atol=1e-6)
    assert module.nearest(centres, 1, 2).tolist() == list(range(256))


@pytest.mark.parametrize(("low", "high"), [(1.0, 1.0), (1.0, -1.0), (math.nan, 1.0), (0.0, math.inf)])
def test_an_empty_range_is_refused(low, high):
    with pytest.raises(ValueError, match="every range must be finite, its low end below its high end"):
        bins(low, high)


def test_ranges_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"ranges must be \[3, 2\] \(steps, dimensions\), got \[2, 3\]"):
        ActionBins(3, 2).set_ranges(torch.zeros(2, 3), torch.ones(2, 3))


def test_without_ranges_nothing_is_encoded_or_decoded():
    module = ActionBins(1, 1)
    for use, value in ((module.encode, column(0.0)), (module.decode, torch.zeros(1, 1, 1).long())):
        with pytest.raises(RuntimeError, match="no statistics: call set_statistics"):
            use(value)


def test_ranges_are_no_weights():
    assert not bins().state_dict()
