"""Small configs of every policy that there is: a new one in `PolicyConfig` is tested without another line."""

import dataclasses
from typing import get_args

from robotattn.policies import ACTConfig, ACTResNetConfig, AutoregressiveConfig, BlockwiseConfig, PolicyConfig

SMALL = {"width": 32, "heads": 2, "feedforward": 32, "text_width": 16, "stem_channels": 8, "vocabulary": 10, "chunk": 4}
CAMERAS = {"front": (32, 32), "wrist": (32, 48)}
RESNET = {"encoder_layers": 1, "style_layers": 1, "dropout": 0.0, "pose_weight": 1.0}  # of the published ACT
SIGHTS = {
    "state": {"objects": True},
    "pixels": {"cameras": CAMERAS},
    "shared keys": {"objects": True, "kv_heads": 1},
    "history": {"cameras": {"front": (32, 32)}, "objects": True, "frames": 3},
}


def small(kind, **fields):
    """Make a config of a policy, small."""
    sizes = SMALL | (RESNET if kind is ACTResNetConfig else {})
    return kind(**{name: value for name, value in sizes.items() if name in names(kind)} | fields)


def names(kind):
    """Return the names of a config's fields."""
    return {field.name for field in dataclasses.fields(kind)}


def name_of(kind):
    """Return a policy's name as it stands in a configuration file."""
    return kind.__name__.removesuffix("Config").lower()


EVERY = {
    f"{name_of(kind)} {sight}": small(kind, **fields)
    for kind in get_args(PolicyConfig)
    for sight, fields in SIGHTS.items()
    if set(fields) <= names(kind) and (fields.get("frames", 1) == 1 or kind is not ACTResNetConfig)
}
CONFIGS = EVERY | {
    "act pixels and state": small(ACTConfig, cameras=CAMERAS, objects=True),
    "act patches": small(ACTConfig, cameras=CAMERAS, stem="patch"),
    "act plain": small(ACTConfig, cameras=CAMERAS, grounding=False),
    "act plain state": small(ACTConfig, objects=True, grounding=False),
    "act plain history": small(ACTConfig, cameras=CAMERAS, grounding=False, frames=2),
    "act joint": small(ACTConfig, cameras=CAMERAS, action_mode="joint"),
    "act latent": small(ACTConfig, objects=True, latent=4),
    "actresnet joint": small(ACTResNetConfig, objects=True, action_mode="joint"),
    "autoregressive joint": small(AutoregressiveConfig, objects=True, action_mode="joint"),
    "autoregressive expected value": small(AutoregressiveConfig, objects=True, expected=True),
    "blockwise joint": small(BlockwiseConfig, objects=True, action_mode="joint"),
    "blockwise midpoint": small(BlockwiseConfig, objects=True, method="midpoint", steps=4),
    "blockwise autoregressive": small(BlockwiseConfig, objects=True, head="autoregressive"),
    "blockwise autoregressive joint": small(BlockwiseConfig, objects=True, head="autoregressive", action_mode="joint"),
}
