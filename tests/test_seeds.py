"""Seed streams (case O09): disjoint between splits and base seeds, the same however they are asked for."""

import json

import gymnasium
import pytest

from robotattn.seeds import stream


def test_neighbouring_base_seeds_share_no_seed():
    seeds = [seed for base in range(3) for seed in stream("evaluate", base, 2000)]
    assert len(set(seeds)) == 6000


def test_splits_with_one_base_seed_share_no_seed():
    seeds = [seed for split in ("record", "evaluate", "validate") for seed in stream(split, 7, 2000)]
    assert len(set(seeds)) == 6000


def test_item_i_depends_on_split_base_and_i_only():
    whole = stream("record", 5, 20)
    assert stream("record", 5, 8) == whole[:8]
    assert stream("record", 5, 6, start=14) == whole[14:]
    assert [stream("record", 5, 1, start=i)[0] for i in range(20)] == whole


def test_seeds_are_the_ones_that_earlier_results_name():
    """A change here would silently make old and new results incomparable."""
    assert stream("evaluate", 0, 2) == [396350377331569912, 3140601310775157650]
    assert stream("record", 0, 1) == [945874700436188905]


def test_seeds_are_plain_integers_below_two_to_the_63_that_an_env_takes():
    seeds = stream("evaluate", 2**32 - 1, 1000)
    assert all(type(seed) is int and 0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) > 2**62  # the range is used
    assert json.loads(json.dumps(seeds)) == seeds
    assert gymnasium.utils.seeding.np_random(seeds[0])[1] == seeds[0]


def test_an_empty_stream_is_empty():
    assert stream("record", 0, 0) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("", 0, 1), "split=''"),
        (("record", -1, 1), "base=-1"),
        (("record", 2**32, 1), "base=4294967296"),
        (("record", 0, -1), "count=-1"),
        (("record", 0, 1, -3), "start=-3"),
        (("record", 0, 2, 2**32 - 1), "count=2"),
    ],
)
def test_values_out_of_range_are_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        stream(*arguments)
