"""Token groups, images, grounding and normalisation."""

import json

import pytest
import torch
from torch import nn

from robotattn.tokens.grounding import EXTENT, Candidates, Grounding, bilinear_cells, cell_centres, pixel_loss
from robotattn.tokens.images import ImageTokens
from robotattn.tokens.instruction import InstructionEncoder
from robotattn.tokens.normaliser import Moments, Normaliser, Statistics
from robotattn.tokens.proprio import pose_vector
from robotattn.tokens.sequence import TokenGroup, concatenate


def moments(mean, scale, floor=0.01):
    return Moments(tuple(f"d{i}" for i in range(len(mean))), tuple(mean), tuple(scale), floor)


def images(*shape, seed=0):
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


# ------------------------------------------------------------------------------------------ sequence


def test_groups_keep_their_place_and_padding_becomes_zero():
    text = TokenGroup(torch.full((1, 3, 2), torch.nan), torch.tensor([[True, False, False]]))
    text.tokens[0, 0] = 1.0
    tokens = concatenate({"front": TokenGroup(torch.ones(1, 2, 2)), "instruction": text}, torch.zeros(1, 13))
    assert tokens.slices == {"front": slice(0, 2), "instruction": slice(2, 5)}
    assert tokens.mask.tolist() == [[True, True, True, False, False]]
    assert tokens.values.isfinite().all()
    torch.testing.assert_close(tokens.group("instruction"), torch.tensor([[[1.0, 1.0], [0.0, 0.0], [0.0, 0.0]]]))
    with pytest.raises(KeyError, match=r"no token group 'wrist', there are \['front', 'instruction'\]"):
        tokens.group("wrist")


@pytest.mark.parametrize("mask", [torch.ones(1, 3), torch.ones(1, 2, dtype=torch.bool)])
def test_a_group_mask_of_another_type_or_shape_is_refused(mask):
    with pytest.raises(ValueError, match=r"'text' must be bool \[1, 3\]"):
        concatenate({"text": TokenGroup(torch.ones(1, 3, 2), mask)}, torch.zeros(1, 13))


# ------------------------------------------------------------------------------------------ images


def test_patch_tokens_are_a_linear_map_of_each_patch():
    torch.manual_seed(0)
    module = ImageTokens({"front": (32, 48)}, 8, stem="patch", patch=16).eval()
    batch = images(2, 32, 48, 3)
    view = module({"front": batch})["front"]
    assert view.group.tokens.shape == (2, 6, 8) and view.grid == (2, 3)
    patch = batch[1, 16:32, 32:48].float() / 127.5 - 1.0  # the last one, RGB
    want = torch.einsum("hwc,dchw->d", patch, module.stem.embed.weight) + module.stem.embed.bias
    torch.testing.assert_close(view.features[1, 5], want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [(96, 96), (64, 96), (224, 224)])
def test_convolutional_stem_gives_a_stride_4_map_and_stride_16_tokens(size):
    module = ImageTokens({"front": size}, 16, channels=8).eval()
    view = module({"front": images(1, *size, 3)})["front"]
    assert view.grid == (size[0] // 4, size[1] // 4)
    assert view.features.shape == (1, size[0] * size[1] // 16, 8)
    assert view.group.tokens.shape == (1, size[0] * size[1] // 256, 16)


def test_cameras_stacked_equal_cameras_one_at_a_time():
    torch.manual_seed(0)
    cameras = {"front": (32, 32), "wide": (32, 64), "wrist": (32, 32)}
    together = ImageTokens(cameras, 16, channels=8).eval()
    batch = {name: images(2, *size, 3, seed=i) for i, (name, size) in enumerate(cameras.items())}
    views = together(batch)
    assert list(views) == list(cameras)
    for i, (name, size) in enumerate(cameras.items()):
        alone = ImageTokens({name: size}, 16, channels=8).eval()
        alone.stem.load_state_dict(together.stem.state_dict())
        alone.positions[0].load_state_dict(together.positions[i].state_dict())
        alone.identity.data = together.identity.data[i : i + 1]
        view = alone(batch)[name]
        torch.testing.assert_close(view.group.tokens, views[name].group.tokens, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(view.features, views[name].features, rtol=1e-5, atol=1e-5)


def test_the_same_picture_from_two_cameras_gives_different_tokens():
    module = ImageTokens({"left": (32, 32), "right": (32, 32)}, 16, channels=8).eval()
    views = module({"left": images(1, 32, 32, 3), "right": images(1, 32, 32, 3)})
    assert (views["left"].group.tokens - views["right"].group.tokens).abs().max() > 1e-3


def test_colour_jitter_acts_while_training_only_and_stays_within_its_strength():
    torch.manual_seed(0)
    module = ImageTokens({"front": (32, 32)}, 16, channels=8, jitter=0.1)
    grey = torch.full((64, 32, 32, 3), 128, dtype=torch.uint8)
    jittered, plain = module._pixels(grey), module.eval()._pixels(grey)
    torch.testing.assert_close(plain, torch.full_like(plain, 128 / 127.5 - 1.0))
    shift = jittered - plain
    assert shift.flatten(1).std(dim=0).max() > 0.03 and shift.abs().max() < 0.2
    assert torch.equal(shift[:, :1, :1].expand_as(shift), shift)  # one colour cast for a whole image, nothing moves


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({}, r"'front' is missing from the batch, which has \[\]"),
        ({"front": torch.zeros(1, 32, 32, 3)}, "expected uint8"),
        ({"front": images(1, 32, 48, 3)}, r"expected uint8 \[B, 32, 32, 3\]"),
        ({"front": images(1, 3, 32, 32)}, r"got torch.uint8 \[1, 3, 32, 32\]"),
    ],
)
def test_foreign_images_are_refused(batch, message):
    with pytest.raises(ValueError, match=message):
        ImageTokens({"front": (32, 32)}, 8)(batch)


def test_image_sizes_must_fit_the_stride():
    with pytest.raises(ValueError, match="'front': 40 x 32 pixels are no multiples of 16"):
        ImageTokens({"front": (40, 32)}, 8)


# ------------------------------------------------------------------------------------------ instruction


def test_an_instruction_in_a_padded_batch_equals_it_alone():
    torch.manual_seed(0)
    encoder = InstructionEncoder(50, 16).double()
    short, long = torch.tensor([[3, 4]]), torch.arange(9)[None]
    batch = torch.cat([torch.cat([short, torch.full((1, 7), 49)], dim=1), long])
    mask = torch.arange(9) < torch.tensor([[2], [9]])
    both = encoder(batch, mask)
    for row, ids in enumerate((short, long)):
        alone = encoder(ids, torch.ones_like(ids, dtype=torch.bool))
        torch.testing.assert_close(both.pooled[row], alone.pooled[0], rtol=0, atol=1e-12)
        torch.testing.assert_close(both.tokens[row, : ids.shape[1]], alone.tokens[0], rtol=0, atol=1e-12)
    assert not both.tokens[0, 2:].any()


def test_a_sentence_without_tokens_is_finite_and_leaves_its_neighbour_alone():
    torch.manual_seed(0)
    encoder = InstructionEncoder(50, 16)
    ids = torch.tensor([[1, 2], [3, 4]])
    out = encoder(ids, torch.tensor([[False, False], [True, True]]))
    (out.pooled.square().sum() + out.tokens.square().sum()).backward()
    assert not out.tokens[0].any() and out.pooled.isfinite().all()
    assert all(p.grad.isfinite().all() for p in encoder.parameters())
    alone = encoder(ids[1:], torch.ones(1, 2, dtype=torch.bool))
    torch.testing.assert_close(out.pooled[1], alone.pooled[0])


def test_word_order_matters():
    torch.manual_seed(0)
    encoder, mask = InstructionEncoder(50, 16), torch.ones(1, 3, dtype=torch.bool)
    a, b = encoder(torch.tensor([[1, 2, 3]]), mask), encoder(torch.tensor([[3, 2, 1]]), mask)
    assert (a.pooled - b.pooled).abs().max() > 1e-3


def test_instructions_too_long_or_with_a_float_mask_are_refused():
    encoder = InstructionEncoder(50, 16)
    ids = torch.zeros(1, 97, dtype=torch.long)
    with pytest.raises(ValueError, match="at most 96 tokens, got 97"):
        encoder(ids, torch.ones(1, 97, dtype=torch.bool))
    with pytest.raises(ValueError, match="text mask must be bool"):
        encoder(ids[:, :3], torch.ones(1, 3))


# ------------------------------------------------------------------------------------------ grounding


def test_bilinear_cells_average_to_the_point():
    points = torch.rand(100, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 0.8 + 0.1
    cells, weights = bilinear_cells(points, 6, 8)  # half a cell is at most 1/12 of the image
    centres = cell_centres(6, 8)[0].double() / (2 * EXTENT) + 0.5
    torch.testing.assert_close((centres[cells] * weights[..., None]).sum(1), points, rtol=0, atol=1e-6)
    torch.testing.assert_close(weights.sum(-1), torch.ones(100, dtype=torch.float64))


@pytest.mark.parametrize(("point", "cell"), [((0.0, 0.0), 0), ((1.0, 1.0), 23), ((0.99, 0.0), 5)])
def test_points_at_the_border_fall_into_the_border_cell(point, cell):
    cells, weights = bilinear_cells(torch.tensor(point), 4, 6)
    assert weights[cells == cell].sum().item() == pytest.approx(1.0)
    assert ((cells >= 0) & (cells < 24)).all()


def test_a_single_row_of_cells_is_a_valid_map():
    cells, weights = bilinear_cells(torch.tensor([0.5, 0.3]), 1, 2)
    assert sorted(set(cells.tolist())) == [0, 1] and weights.sum() == 1.0


def test_pixel_loss_is_the_cross_entropy_of_the_cells_around_the_point():
    uniform = torch.full((1, 1, 24), 1 / 24).log()
    assert pixel_loss(uniform, torch.tensor([[[0.4, 0.6]]]), 4, 6).item() == pytest.approx(3.1780538, abs=1e-5)
    hidden = pixel_loss(uniform, torch.full((1, 1, 2), torch.nan), 4, 6)  # what a camera does not see may be anything
    assert hidden.isfinite().all()


def test_grounding_finds_the_candidate_that_answers_the_query():
    torch.manual_seed(0)
    grounding = Grounding({"map": (4, 2)}, text=4, hidden=8)
    nn.init.eye_(grounding.queries[0].weight)
    nn.init.zeros_(grounding.queries[0].bias)
    features = 60.0 * torch.eye(4)[None].repeat(1, 2, 1)[:, :6]  # 6 cells: 0 1 2 3 0 1
    candidates = {"map": Candidates(features, cell_centres(2, 3))}
    out = grounding(candidates, torch.eye(4)[None, 2:4])  # asked for 2 and for 3
    found = out.descriptor[0, :, :7]
    torch.testing.assert_close(found[0], torch.tensor([0.0, 0, 60, 0, 20 / 3, -5.0, 1.0]), rtol=0, atol=1e-4)
    torch.testing.assert_close(found[1], torch.tensor([0.0, 0, 0, 60, -20 / 3, 5.0, 1.0]), rtol=0, atol=1e-4)


def test_grounding_ignores_masked_candidates_even_if_nothing_is_left():
    torch.manual_seed(0)
    grounding = Grounding({"objects": (4, 5)}, text=4, hidden=8)
    features, places = torch.randn(2, 3, 4, requires_grad=True), torch.randn(2, 3, 5)
    mask = torch.tensor([[True, False, True], [False, False, False]])
    out = grounding({"objects": Candidates(features, places, mask)}, torch.randn(2, 1, 4))
    assert out.attention["objects"][0, 0].exp()[1] == 0.0
    out.pose.sum().backward()
    assert features.grad.isfinite().all() and out.pose.isfinite().all()


def test_a_quarter_turn_of_a_cube_is_the_same_pose():
    position = torch.tensor([[0.5, 0.1, 0.02, 0.3], [0.5, 0.1, 0.02, 0.3 + torch.pi / 2]])
    a, b = pose_vector(position, position)
    torch.testing.assert_close(a, b)


# ------------------------------------------------------------------------------------------ normalisation


def test_normalise_subtracts_the_mean_and_divides_by_the_scale():
    normaliser = Normaliser({"state": 2})
    normaliser.set_statistics(Statistics({"state": moments([1.0, -2.0], [2.0, 0.5])}))
    assert normaliser.normalise("state", torch.tensor([3.0, -1.0])).tolist() == [1.0, 2.0]
    assert normaliser.denormalise("state", torch.tensor([1.0, 2.0])).tolist() == [3.0, -1.0]


def test_constant_dimensions_stay_finite_and_come_back_within_1e_5():
    entry = moments([1.0, 0.3, 0.0], [0.01, 0.01, 300.0])  # constant; spread under the floor; an outlier
    assert entry.under_floor() == ("d0", "d1")
    normaliser = Normaliser({"action": 3})
    normaliser.set_statistics(Statistics({"action": entry}))
    value = torch.tensor([[1.0, 0.3005, -2.0], [1.0, 0.2995, 9000.0]])
    back = normaliser.denormalise("action", normaliser.normalise("action", value))
    torch.testing.assert_close(back, value, rtol=1e-6, atol=1e-5)
    assert normaliser.normalise("action", value).abs().max() < 100


@pytest.mark.parametrize(
    ("mean", "scale", "message"),
    [
        ([0.0], [0.0], "d0: mean and scale must be finite and the scale at least the floor 0.01"),
        ([0.0], [float("nan")], "d0: mean and scale must be finite"),
        ([float("inf")], [1.0], "d0: mean and scale must be finite"),
        ([0.0, 1.0], [1.0], "as many names as means and scales"),
    ],
)
def test_impossible_moments_are_refused(mean, scale, message):
    with pytest.raises(ValueError, match=message):
        moments(mean, scale)


def test_without_statistics_every_call_raises():
    normaliser = Normaliser({"state": 2})
    with pytest.raises(RuntimeError, match="has no statistics"):
        normaliser.normalise("state", torch.zeros(2))
    with pytest.raises(RuntimeError, match="has no statistics"):
        normaliser.denormalise("state", torch.zeros(2))


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({}, r"key 'state' is missing, found \[\]"),
        ({"observation.state": moments([0.0], [1.0])}, r"key 'state' is missing, found \['observation.state'\]"),
        ({"state": moments([0.0] * 3, [1.0] * 3)}, "'state' has 3 dimensions, this policy needs 2"),
    ],
)
def test_statistics_that_are_missing_renamed_or_of_another_size_are_refused(entries, message):
    normaliser = Normaliser({"state": 2})
    with pytest.raises(ValueError, match=message):
        normaliser.set_statistics(Statistics(entries))
    with pytest.raises(RuntimeError):
        normaliser.normalise("state", torch.zeros(2))


def test_values_of_another_size_or_key_are_refused():
    normaliser = Normaliser({"state": 2})
    normaliser.set_statistics(Statistics({"state": moments([0.0, 0.0], [1.0, 1.0])}))
    with pytest.raises(ValueError, match=r"state: expected 2 dimensions, got shape \(4, 1\)"):
        normaliser.normalise("state", torch.zeros(4, 1))
    with pytest.raises(KeyError, match=r"no statistics for 'action', there are \['state'\]"):
        normaliser.normalise("action", torch.zeros(2))


def test_statistics_are_no_weights():
    assert Normaliser({"state": 2, "action": 5}).state_dict() == {}


def test_statistics_survive_json_bit_for_bit_and_keep_their_hash():
    statistics = Statistics({"state": moments([0.1, 1 / 3], [1e-2, 2 / 7]), "action": moments([0.0], [1.0])})
    back = Statistics.from_json(statistics.to_json())
    assert back == statistics and back.hash == statistics.hash
    assert Statistics({"action": moments([0.0], [1.0])}).hash != statistics.hash


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda body: body.update(version=3), "version 3, this program reads 1 to 2"),
        (lambda body: body["moments"]["state"].update(mean=[0.0]), "do not match their hash"),
        (lambda body: body.pop("hash"), "expected exactly the fields"),
        (lambda body: body["moments"]["state"].pop("floor"), "statistics of 'state': expected exactly the fields"),
    ],
)
def test_a_changed_statistics_file_is_refused(change, message):
    body = json.loads(Statistics({"state": moments([0.1], [1.0])}).to_json())
    change(body)
    with pytest.raises(ValueError, match=message):
        Statistics.from_json(json.dumps(body))
    with pytest.raises(ValueError, match="not JSON"):
        Statistics.from_json("{")
