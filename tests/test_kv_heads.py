"""Grouped and shared keys and values: fewer bytes in every cache, by the closed form; all heads by default."""

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

from robotattn.attention import Attention
from robotattn.attention.caches import kv_bytes
from robotattn.policies import build

sys.path.insert(0, str(Path(__file__).parent))
from batches import batch
from decoders import DECODERS, make, remembered
from examples import EVERY, names

STATE = {name: config for name, config in EVERY.items() if name.endswith(" state") and "kv_heads" in names(config)}
each = pytest.mark.parametrize("config", (STATE | DECODERS).values(), ids=STATE | DECODERS)


def layers_of(config):
    return getattr(config, "decoder_layers", None) or config.layers


@each
@pytest.mark.parametrize("kv_heads", [None, 4, 2, 1])
def test_the_bytes_kept_for_decoding_are_those_of_the_closed_form(config, kv_heads):
    config = dataclasses.replace(config, heads=4, kv_heads=kv_heads)
    memory = remembered(make(config), batch(config))
    real = sum(part.numel() * part.element_size() for pair in memory.context for part in pair)
    assert real == kv_bytes(layers_of(config), kv_heads or 4, 32 // 4, memory.mask.shape[1], batch=3)


@each
def test_as_many_key_heads_as_heads_is_the_default(config):
    one, other = make(config), make(config, kv_heads=config.heads)
    assert list(one.state_dict()) == list(other.state_dict())
    assert torch.equal(one.act(batch(config)), other.act(batch(config)))


@each
def test_every_layer_whose_keys_and_values_are_kept_has_fewer_of_them(config):
    before, after = (build(c) for c in (config, dataclasses.replace(config, kv_heads=1)))
    shared = [m for m in after.modules() if isinstance(m, Attention) and m.heads == 2 and m.kv_heads == 1]
    assert len(shared) >= layers_of(config)
    saved, half = (sum(p.numel() for p in policy.parameters()) for policy in (before, after)), config.width // 2
    assert next(saved) - next(saved) == len(shared) * (2 * config.width * half + half)  # two matrices and a bias
