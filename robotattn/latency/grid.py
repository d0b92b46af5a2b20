"""A grid of policies: `cameras=1:4 patch=8,16,32 policy=act,blockwise` → the configurations that it names.

An axis is a field of the policies' configurations, or one of: policy (the kind), cameras (how many), size (pixels of
their sides), layers (ACT: of its encoder). Combinations that cannot be are named and left out.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, get_args

from robotattn.config import UsageError, from_dict, name_of, to_dict
from robotattn.latency.prefix_costs import Described
from robotattn.policies import ACTConfig, AutoregressiveConfig, PolicyConfig

KINDS: dict[str, type[Described]] = {name_of(kind): kind for kind in get_args(Described)}
CAMERAS = ("front", "wrist", "left", "right", "top", "rear", "side", "palm")
SPECIAL = ("policy", "cameras", "size", "layers")
NEUTRAL = {"frames": 1}
"""What a policy without the field does anyway: no reason to leave it out."""
ONLY = {"stem": ("conv", "patch"), "head": ("flow", "autoregressive"), "method": ("euler", "midpoint")}
BASE = AutoregressiveConfig(
    cameras={"front": (96, 96)}, chunk=8, width=192, heads=8, feedforward=384, layers=4, stem="patch"
)
"""What is swept when no configuration is named: a few milliseconds to a few tens of them on one core."""


def described(policy: PolicyConfig, source: object) -> Described:
    """Return a policy that has closed forms; raises UsageError, naming where it came from, for another kind."""
    if not isinstance(policy, Described):
        raise UsageError(f"{source}: {name_of(type(policy))} has no closed forms, allowed: {', '.join(KINDS)}")
    return policy


@dataclass(frozen=True)
class Candidate:
    """One configuration of a grid, and the values that made it."""

    policy: Described
    values: tuple[tuple[str, Any], ...]

    @property
    def kind(self) -> str:
        """The policy's name, as a configuration file writes it."""
        return name_of(type(self.policy))

    @property
    def label(self) -> str:
        """The values as the user wrote them."""
        return " ".join(f"{name}={value}" for name, value in self.values)


def grid(texts: Sequence[str], base: Described = BASE) -> tuple[list[Candidate], list[str]]:
    """Return the grid's configurations, each once, and the combinations that were left out, with the reason.

    texts: axes such as ``cameras=1:4`` (both ends included) or ``patch=8,16``. base: where no axis says otherwise.
    Raises UsageError for an axis or a value that no policy has, and if nothing is left.
    """
    axes = dict(axis(text) for text in texts)
    if len(axes) != len(texts):
        raise UsageError(f"sweep: {' '.join(texts)}: an axis is given twice")
    found, left_out = dict[str, Candidate](), []
    for values in itertools.product(*axes.values()):
        chosen = tuple(zip(axes, values, strict=True))
        try:
            policy = apply(base, dict(chosen))
        except ValueError as error:
            left_out.append(f"{' '.join(f'{name}={value}' for name, value in chosen)}: {error}")
        else:
            found.setdefault(repr(policy), Candidate(policy, chosen))
    if not found:
        raise UsageError(f"sweep: no combination can be: {left_out[0]}")
    return list(found.values()), left_out


def axis(text: str) -> tuple[str, list[Any]]:
    """Read ``patch=8,16,32`` or ``cameras=1:4``; raises UsageError naming what is allowed."""
    name, equals, given = text.partition("=")
    allowed = names()
    if not equals or not given or name not in allowed:
        raise UsageError(f"sweep: {text}: an axis is NAME=VALUE,VALUE or NAME=FIRST:LAST; names: {', '.join(allowed)}")
    words = list(KINDS) if name == "policy" else ONLY.get(name)
    values = [value for part in given.split(",") for value in _values(text, part, words)]
    return name, list(dict.fromkeys(values))


def names() -> list[str]:
    """The axes that there are: what is special here, and every field that is a whole number or a word."""
    whole = {field.name for kind in KINDS.values() for field in fields(kind) if field.type in (int, int | None)}
    return [*SPECIAL, *ONLY, *sorted(whole - {"layers", "vocabulary"} | {"frames", "kv_heads"})]


def _values(text: str, part: str, words: Sequence[str] | None) -> list[Any]:
    if words is not None:
        if part not in words:
            raise UsageError(f"sweep: {text}: {part}, allowed: {', '.join(words)}")
        return [part]
    first, colon, last = part.partition(":")
    if not first.isdecimal() or (colon and not last.isdecimal()):
        raise UsageError(f"sweep: {text}: {part or 'nothing'} is not a whole number, or FIRST:LAST")
    return list(range(int(first), int(last) + 1)) if colon else [int(first)]


def apply(base: Described, values: Mapping[str, Any]) -> Described:
    """Return the base with these values; raises ValueError for what this kind of policy lacks or cannot be."""
    policy = as_kind(base, values["policy"]) if "policy" in values else base
    known = {field.name for field in fields(policy)}
    changes = {name: value for name, value in values.items() if name not in SPECIAL}
    changes = {name: value for name, value in changes.items() if name in known or NEUTRAL.get(name) != value}
    changes |= _sight(policy, values) | _layers(policy, values)
    if values.get("patch", 16) != 16 and "stem" not in values:
        changes["stem"] = "patch"  # the convolutional stem has patches of 16 only
    for name in changes:
        if name not in known:
            raise ValueError(f"{name_of(type(policy))} has no {name}")
    return replace(policy, **changes)


def as_kind(base: Described, kind: str) -> Described:
    """Return another kind of policy with everything that the two have in common."""
    cls = KINDS[kind]
    if isinstance(base, cls):
        return base
    mine = {field.name for field in fields(cls)}
    shared = {name: value for name, value in to_dict(base).items() if name in mine and not name.endswith("_weight")}
    return _relayer(from_dict(cls, shared, "sweep"), layers_of(base))


def layers_of(policy: Described) -> int:
    """How many layers the prefix passes through."""
    return policy.encoder_layers if isinstance(policy, ACTConfig) else policy.layers


def _relayer(policy: Described, layers: int) -> Described:
    return replace(policy, **_layers(policy, {"layers": layers}))


def _layers(policy: Described, values: Mapping[str, Any]) -> dict[str, Any]:
    if "layers" not in values:
        return {}
    return {"encoder_layers" if isinstance(policy, ACTConfig) else "layers": values["layers"]}


def _sight(policy: Described, values: Mapping[str, Any]) -> dict[str, Any]:
    """The cameras of these values: the policy's own first, then more of the first one's size."""
    if "cameras" not in values and "size" not in values:
        return {}
    sizes = dict(policy.cameras) or {CAMERAS[0]: (96, 96)}
    count, usual = values.get("cameras", len(sizes)), next(iter(sizes.values()))
    names = list(dict.fromkeys((*sizes, *CAMERAS)))
    if count > len(names):
        raise ValueError(f"cameras: {count}, at most {len(names)} have names")
    side = values.get("size")
    return {"cameras": {name: (side, side) if side else sizes.get(name, usual) for name in names[:count]}}
