"""Masks as predicates: what each one shows, how they combine, and what they turn into."""

import pytest
import torch

from robotattn.attention import masks
from robotattn.attention.masks import Blocks, Causal, Everything, Padding, Prefix, Rule, Window, Written

VALID = torch.tensor([[False, True, True, True], [True, True, True, False]])

PICTURES = {
    "everything": (Everything(), "#### #### #### ####"),
    "causal": (Causal(), "#... ##.. ###. ####"),
    "window": (Window(2), "##.. ###. .### ..##"),
    "causal window": (Window(2) & Causal(), "#... ##.. .##. ..##"),
    "prefix": (Prefix(2), "##.. ##.. ##.. ##.."),
    "prefix language model": (Prefix(2) | Causal(), "##.. ##.. ###. ####"),
    "blocks": (Blocks((2, 1, 1)), "##.. ##.. ###. ####"),
    "blocks, last one open": (Blocks((1, 2)), "#... #### #### ####"),
    "padding": (Padding(VALID), ".### .### .### .###"),
    "padded causal": (Causal() & Padding(VALID), ".... .#.. .##. .###"),
    "written": (Written(3), "###. ###. ###. ###."),
    "opposite": (~Causal(), ".### ..## ...# ...."),
    "rule": (Rule(lambda row, query, key: (query + key) % 2 == 0, "even"), "#.#. .#.# #.#. .#.#"),
}


@pytest.mark.parametrize("name", PICTURES)
def test_a_mask_draws_itself(name):
    mask, picture = PICTURES[name]
    assert mask.text(4, 4) == picture.replace(" ", "\n")
    want = [[int(cell == "#") for cell in line] for line in picture.split()]
    assert mask.picture(4, 4).tolist() == want and mask.picture(4, 4).dtype == torch.uint8


@pytest.mark.parametrize("name", PICTURES)
@pytest.mark.parametrize("new", [1, 2, 4])
def test_the_rows_of_later_slots_are_the_last_rows_of_the_whole(name, new):
    mask, _ = PICTURES[name]
    whole = mask.tensor(4, 4)
    assert torch.equal(mask.tensor(torch.arange(4 - new, 4), 4), whole[..., 4 - new :, :])


@pytest.mark.parametrize("name", PICTURES)
def test_settled_is_what_the_picture_says(name):
    mask, _ = PICTURES[name]
    for old in range(5):
        for new in range(5 - old):
            assert mask.settled(old, new) == (not mask.tensor(4, 4)[..., :old, old : old + new].any()), (old, new)


def test_rows_that_differ_give_a_mask_for_each_row():
    mask = Causal() & Padding(VALID)
    assert mask.tensor(4, 4).shape == (2, 1, 4, 4) and mask.rows == 2
    assert torch.equal(mask.tensor(4, 4)[:, 0], Causal().tensor(4, 4) & VALID[:, None])
    assert mask.text(4, 4, row=1) == "#...\n##..\n###.\n###."
    assert Causal().tensor(4, 4).shape == (4, 4)


def test_keys_beyond_the_known_validity_are_padding():
    assert Padding(VALID).tensor(1, 6)[:, 0, 0].tolist() == [[*row, False, False] for row in VALID.tolist()]


def test_a_mask_that_hides_nothing_becomes_none():
    assert Everything().build(3, 4) is None
    assert Causal().build(torch.tensor([5]), 6) is None
    assert torch.equal(Causal().build(2, 2), torch.tensor([[True, False], [True, True]]))
    assert Padding(torch.ones(2, 3, dtype=torch.bool)).build(3, 3) is None


def test_written_takes_a_tensor_so_that_a_graph_need_not_know_the_length():
    assert Written(torch.tensor([2])).tensor(1, 4).tolist() == [[True, True, False, False]]


def test_masks_for_batches_of_different_sizes_do_not_combine():
    with pytest.raises(ValueError, match="2 and 3 rows"):
        Padding(VALID) & Padding(torch.ones(3, 4, dtype=torch.bool))


def test_a_mask_says_what_it_is():
    mask = (Prefix(5) | Causal()) & ~Window(3) & Padding(VALID)
    assert repr(mask) == "(((Prefix(length=5) | Causal()) & ~Window(size=3)) & Padding([2, 4]))"


def test_validity_must_be_boolean_and_have_rows():
    for bad in (torch.ones(2, 3), torch.ones(3, dtype=torch.bool)):
        for make in (masks.padding, Padding):
            with pytest.raises(TypeError, match="must be bool"):
                make(bad)
