"""The fields that the configs of all policies share: how they are checked, and how the parts of a loss are weighed.

Every config is a flat dataclass of its own (a file shows all there is); what is said of the shared fields is said here.
"""

from collections.abc import Mapping
from typing import Literal, Protocol

from torch import Tensor

OBJECTS = "objects"
VELOCITY_SHARE = 0.1  # of the pose's weight: over a tick of 0.1 s, an error of the pose is ten of them a second
RESERVED = frozenset({OBJECTS, "instruction", "proprioception", "target", "latent"})


class Fields(Protocol):
    """The fields that every policy's config has."""

    @property
    def cameras(self) -> dict[str, tuple[int, int]]: ...
    @property
    def objects(self) -> bool: ...
    @property
    def frames(self) -> int: ...
    @property
    def frame_gap(self) -> int: ...
    @property
    def vocabulary(self) -> int: ...
    @property
    def chunk(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int | None: ...
    @property
    def feedforward(self) -> int: ...
    @property
    def text_width(self) -> int: ...
    @property
    def stem(self) -> Literal["conv", "patch"]: ...
    @property
    def patch(self) -> int: ...
    @property
    def stem_channels(self) -> int: ...
    @property
    def pose_weight(self) -> float: ...
    @property
    def attention_weight(self) -> float: ...
    @property
    def colour_jitter(self) -> float: ...


def at_least(config: object, least: float, *names: str) -> None:
    """Raise ValueError for the first of the named fields that is below `least`, or NaN."""
    for name in names:
        if not getattr(config, name) >= least:
            raise ValueError(f"{name}: {getattr(config, name)} is less than {least}")


def check_fields(config: Fields, *, sizes: tuple[str, ...] = (), weights: tuple[str, ...] = ()) -> None:
    """Raise ValueError, naming field and value, for shared fields that are out of range or do not fit together.

    sizes, weights: further fields of this config that must be at least 1, and at least 0.
    """
    shared = (
        "frames",
        "frame_gap",
        "vocabulary",
        "width",
        "heads",
        "patch",
        "stem_channels",
        "text_width",
        "chunk",
        "feedforward",
    )
    at_least(config, 1, *shared, *sizes)
    at_least(config, 0, "pose_weight", "attention_weight", *weights)
    if not config.cameras and not config.objects:
        raise ValueError("cameras: empty, and objects is false: such a policy would see nothing")
    if config.width % config.heads or config.width % 2:
        raise ValueError(f"width: {config.width} is not an even multiple of heads ({config.heads})")
    if config.kv_heads is not None and (config.kv_heads < 1 or config.heads % config.kv_heads):
        raise ValueError(f"kv_heads: {config.kv_heads} does not divide heads ({config.heads})")
    if config.text_width % 4:
        raise ValueError(f"text_width: {config.text_width} is not a multiple of 4 (the text encoder has 4 heads)")
    if not 0.0 <= config.colour_jitter <= 0.9:
        raise ValueError(f"colour_jitter: {config.colour_jitter} is not in [0, 0.9]")
    _check_cameras(config)


def _check_cameras(config: Fields) -> None:
    if config.stem == "conv" and config.patch != 16:
        raise ValueError(f"patch: the conv stem has patches of 16, not {config.patch}; use stem: patch")
    for name, size in config.cameras.items():
        if name in RESERVED:
            raise ValueError(f"cameras: {name!r} is the name of another token group ({sorted(RESERVED)})")
        if "@" in name:
            raise ValueError(f"cameras: {name!r}: @ marks the tokens of older frames, as in front@1")
        if any(pixels < config.patch or pixels % config.patch for pixels in size):
            raise ValueError(f"cameras: {name}: height and width must be multiples of {config.patch}, got {list(size)}")


def auxiliary_weights(config: Fields) -> dict[str, float]:
    """Return the weights of the losses that a prefix adds to those of the actions."""
    pose = config.pose_weight
    return {"pose": pose, "attention": config.attention_weight, "velocity": pose * VELOCITY_SHARE}


def total(actions: Tensor, parts: Mapping[str, Tensor], weights: Mapping[str, float]) -> dict[str, Tensor]:
    """Return ``loss``: the actions' own and the weighted parts, where they are there; beside it all parts, detached."""
    loss = actions
    for name, weight in weights.items():
        if name in parts:
            loss = loss + weight * parts[name]
    return {"loss": loss, **{name: part.detach() for name, part in parts.items()}}
