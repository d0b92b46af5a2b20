"""Position encodings against closed forms, the papers' figures, and `transformers`."""

import math

import pytest
import torch

from robotattn.attention import (
    Alibi,
    Buckets,
    Learned,
    Position,
    Rotary,
    Shaw,
    Timestamps,
    alibi_slopes,
    grid_sinusoidal,
    make_position,
    positions,
    rotate,
    row_positions,
    sinusoidal,
)


def random(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_row_positions_count_real_tokens_only():
    valid = torch.tensor([[False, False, True, True], [True, True, True, False]])
    assert row_positions(valid).tolist() == [[0, 0, 0, 1], [0, 1, 2, 2]]
    assert row_positions(valid, torch.tensor([7.0, 2.0])).tolist() == [[6, 6, 7, 8], [2, 3, 4, 4]]


def test_a_rotation_is_by_position_over_base_to_the_component():
    x = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64).expand(1, 1, 1, 4)
    have = rotate(x, torch.tensor([3.0]))[0, 0, 0]
    for i, angle in enumerate((3.0, 3.0 / 100.0)):
        a, b = i + 1.0, i + 3.0
        want = (a * math.cos(angle) - b * math.sin(angle), b * math.cos(angle) + a * math.sin(angle))
        assert (have[i].item(), have[i + 2].item()) == pytest.approx(want, abs=1e-12)


def test_a_rotated_score_depends_on_the_distance_alone():
    q, k = random(1, 2, 5, 8), random(1, 2, 5, 8).flip(2)
    places = torch.arange(5, dtype=torch.float64)
    base = rotate(q, places) @ rotate(k, places).transpose(-1, -2)
    for shift in (1.0, 17.5, 1000.0):
        moved = rotate(q, places + shift) @ rotate(k, places + shift).transpose(-1, -2)
        torch.testing.assert_close(moved, base, rtol=0, atol=1e-12)
    assert (rotate(q, places + 1) @ rotate(k, places).transpose(-1, -2) - base).abs().max() > 0.1


def test_rotary_place_and_rotate_are_the_same_and_rows_may_differ():
    x, places = random(2, 3, 4, 6), torch.tensor([[0.0, 1, 2, 3], [5.0, 6, 7, 8]])
    turned = Rotary(6).place(places, places, torch.float64).turn(x)
    torch.testing.assert_close(turned, rotate(x, places), rtol=0, atol=0)
    torch.testing.assert_close(turned[1:], rotate(x[1:], places[1]), rtol=0, atol=0)


def test_alibi_slopes_are_those_of_the_paper():
    assert alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    assert alibi_slopes(4).tolist() == [2.0 ** (-2 * i) for i in range(1, 5)]
    assert alibi_slopes(6).tolist() == [*(2.0 ** (-2 * i) for i in range(1, 5)), 2.0**-1, 2.0**-3]


def test_alibi_is_minus_slope_times_distance():
    bias = Alibi(2).place(torch.tensor([[3.0]]), torch.arange(4.0)[None]).bias
    assert bias[0, :, 0].tolist() == [[-3 / 16, -2 / 16, -1 / 16, 0], [-3 / 256, -2 / 256, -1 / 256, 0]]


@pytest.mark.parametrize("bidirectional", [True, False])
def test_buckets_are_those_of_t5(bidirectional):
    from transformers.models.t5.modeling_t5 import T5Attention

    far = torch.arange(-300, 301)
    want = T5Attention._relative_position_bucket(far, bidirectional, num_buckets=32, max_distance=128)
    assert torch.equal(Buckets(2, 32, 128, bidirectional).bucket(far), want)


def test_shaw_adds_the_score_of_a_vector_for_each_clipped_distance():
    shaw, q = Shaw(2, 4).double(), random(1, 3, 5, 4)
    places = torch.arange(5.0)[None]
    have = shaw.place(places, places, torch.float64).scores(q, 0.5)
    for i in range(5):
        for j in range(5):
            vector = shaw.table[max(-2, min(2, j - i)) + 2]
            torch.testing.assert_close(have[0, :, i, j], q[0, :, i] @ vector * 0.5, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["alibi", "shaw", "buckets", "rotary"])
def test_relative_kinds_do_not_change_when_all_positions_move(kind):
    torch.manual_seed(0)
    position = make_position(kind, 8, 2, 4, limit=3).double()
    q, places = random(1, 2, 5, 4), torch.arange(5.0)[None]
    now, later = (position.place(p, p, torch.float64) for p in (places, places + 9))

    def scores(placed):
        extra = placed.scores(q, 0.5)
        return placed.turn(q) @ placed.turn(q).transpose(-1, -2) + (0.0 if extra is None else extra)

    torch.testing.assert_close(scores(now), scores(later), rtol=0, atol=1e-12)


def test_sines_of_two_positions_multiply_to_a_function_of_their_distance():
    code = sinusoidal(torch.arange(64, dtype=torch.float64), 32)
    product = code @ code.T
    for distance in range(64):
        line = product.diagonal(distance)
        assert line.std(correction=0) < 1e-12 and line[0] <= product[0, 0]


def test_learned_positions_beyond_the_table_are_refused():
    with pytest.raises(IndexError, match="position 4 is beyond the 4 learned positions"):
        Learned(4, 8).embed(torch.zeros(1, 1, 8), torch.tensor([[4.0]]))


def test_time_stamps_tell_milliseconds_and_minutes_apart():
    stamps = Timestamps(32)
    code = stamps.embed(torch.zeros(1, 4, 32), torch.tensor([[0.0, 0.004, 1.0, 60.0]]))[0]
    gaps = torch.cdist(code, code) + 10.0 * torch.eye(4)
    assert gaps.min() > 0.5
    one = stamps.embed(torch.zeros(1, 1, 32), torch.tensor([[0.01]]))[0, 0]
    assert one[0].item() == pytest.approx(math.sin(2 * math.pi), abs=1e-5)  # the shortest period is 0.01 s


def test_a_sinusoidal_grid_tells_rows_in_one_half_and_columns_in_the_other():
    grid = grid_sinusoidal(3, 4, 8).unflatten(0, (3, 4))
    torch.testing.assert_close(grid[2, 1, :4], sinusoidal(torch.tensor(2.0), 4))
    torch.testing.assert_close(grid[2, 1, 4:], sinusoidal(torch.tensor(1.0), 4))
    with pytest.raises(ValueError, match="multiple of 4, got 6"):
        grid_sinusoidal(3, 4, 6)


def test_every_kind_can_be_made_and_an_unknown_one_is_refused():
    for kind in positions.PositionKind.__args__:
        assert isinstance(make_position(kind, 8, 2, 4), Position)
    with pytest.raises(ValueError, match=r"'sinusoidal'.*got 'sine'"):
        make_position("sine", 8, 2, 4)


@pytest.mark.parametrize("make", [lambda: Rotary(5), lambda: Timestamps(5)])
def test_odd_widths_are_refused(make):
    with pytest.raises(ValueError, match="even, got 5"):
        make()
