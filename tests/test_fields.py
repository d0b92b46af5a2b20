"""What no policy's config may hold: refused by the name of the field and the value."""

import sys
from pathlib import Path
from typing import get_args

import pytest

from robotattn.policies import ACTConfig, ACTResNetConfig, AutoregressiveConfig, BlockwiseConfig, PolicyConfig

sys.path.insert(0, str(Path(__file__).parent))
from examples import name_of, names

SHARED = [
    ({"objects": False}, "cameras: empty, and objects is false"),
    ({"chunk": 0}, "chunk: 0 is less than 1"),
    ({"feedforward": 0}, "feedforward: 0 is less than 1"),
    ({"width": 30, "heads": 4}, "width: 30 is not an even multiple of heads"),
    ({"kv_heads": 3}, r"kv_heads: 3 does not divide heads \(4\)"),
    ({"kv_heads": 0}, r"kv_heads: 0 does not divide heads \(4\)"),
    ({"pose_weight": -1.0}, r"pose_weight: -1\.0 is less than 0"),
    ({"colour_jitter": -0.1}, "colour_jitter: -0.1 is not in"),
    ({"text_width": 10}, "text_width: 10 is not a multiple of 4"),
    ({"cameras": {"front": (90, 96)}}, r"cameras: front: height and width must be multiples of 16, got \[90, 96\]"),
    ({"cameras": {"target": (96, 96)}}, "cameras: 'target' is the name of another token group"),
    ({"patch": 8}, "patch: the conv stem has patches of 16, not 8"),
]
OWN = [
    (ACTResNetConfig, {"width": 30, "heads": 4}, r"width: 30 is not a multiple of 4 and of heads \(4\)"),
    (ACTResNetConfig, {"cameras": {"front": (90, 31)}}, r"cameras: front: height and width must be at least 32"),
    (ACTResNetConfig, {"cameras": {"latent": (96, 96)}}, "cameras: 'latent' is the name of another token group"),
    (ACTResNetConfig, {"dropout": 1.5}, r"dropout: 1.5 is not in \[0, 1.0\]"),
    (ACTConfig, {"decoder_layers": 0}, "decoder_layers: 0 is less than 1"),
    (ACTConfig, {"kl_weight": float("nan")}, "kl_weight: nan is less than 0"),
    (ACTConfig, {"dropout": 1.5}, r"dropout: 1.5 is not in \[0, 1.0\]"),
    (AutoregressiveConfig, {"layers": 0}, "layers: 0 is less than 1"),
    (AutoregressiveConfig, {"action_weight": -1.0}, r"action_weight: -1\.0 is less than 0"),
    (BlockwiseConfig, {"layers": 0}, "layers: 0 is less than 1"),
    (BlockwiseConfig, {"steps": 0}, "steps: 0 is less than 1"),
    (BlockwiseConfig, {"action_weight": -1.0}, r"action_weight: -1\.0 is less than 0"),
]


def shared():
    """Every policy with every change to fields that it has; the published ACT has limits of its own for some."""
    for kind in get_args(PolicyConfig):
        for changes, message in SHARED:
            own = kind is ACTResNetConfig and set(changes) & {"width", "cameras"}
            if set(changes) <= names(kind) and not own:
                yield pytest.param(kind, changes, message, id=f"{name_of(kind)} {changes}")


@pytest.mark.parametrize(("kind", "changes", "message"), list(shared()))
def test_impossible_shared_fields_are_refused_by_every_policy(kind, changes, message):
    with pytest.raises(ValueError, match=message):
        kind(**{"objects": True} | changes)


@pytest.mark.parametrize(("kind", "changes", "message"), OWN)
def test_impossible_fields_of_one_policy_are_refused(kind, changes, message):
    with pytest.raises(ValueError, match=message):
        kind(**{"objects": True} | changes)
