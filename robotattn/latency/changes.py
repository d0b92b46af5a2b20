"""What could be changed about a policy to make it faster: one change at a time, each a smaller configuration.

The list is what a designer can turn without a new architecture; what a change costs in success is measured elsewhere.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from robotattn.latency.prefix_costs import Described
from robotattn.policies import ACTConfig, BlockwiseConfig

Change = tuple[str, Described]
Fields = tuple[str, dict[str, Any]] | None
"""The name of a change and the fields it gives new values; None: nothing to change here."""


def changes(policy: Described) -> Iterator[Change]:
    """Yield every single change that this policy allows, with its name."""
    for one in (_cameras, _patch, _frames, _kv_heads, _chunk, _narrower, _layers, _steps):
        found = one(policy)
        if found is not None:
            name, fields = found
            try:
                yield name, replace(policy, **fields)
            except ValueError:  # sizes that do not fit together any more
                continue


def _cameras(policy: Described) -> Fields:
    if len(policy.cameras) < 2:
        return None
    *kept, last = policy.cameras.items()
    return f"one camera fewer (without {last[0]})", {"cameras": dict(kept)}


def _patch(policy: Described) -> Fields:
    if policy.stem != "patch" or not policy.cameras:
        return None
    return f"patch {policy.patch} → {2 * policy.patch}", {"patch": 2 * policy.patch}


def _frames(policy: Described) -> Fields:
    frames = getattr(policy, "frames", 1)
    return (f"frames {frames} → {frames - 1}", {"frames": frames - 1}) if frames > 1 else None


def _kv_heads(policy: Described) -> Fields:
    if not hasattr(policy, "kv_heads"):
        return None
    heads = policy.kv_heads or policy.heads
    fewer = next((n for n in range(heads // 2, 0, -1) if heads % n == 0), None)
    return None if fewer is None else (f"grouped queries: KV heads {heads} → {fewer}", {"kv_heads": fewer})


def _chunk(policy: Described) -> Fields:
    half = policy.chunk // 2
    return (f"chunk {policy.chunk} → {half}", {"chunk": half}) if half else None


def _narrower(policy: Described) -> Fields:
    step = math.lcm(2, policy.heads)
    width = 3 * policy.width // 4 // step * step
    if not 0 < width < policy.width:
        return None
    hidden = max(1, policy.feedforward * width // policy.width)
    return f"width {policy.width} → {width}", {"width": width, "feedforward": hidden}


def _layers(policy: Described) -> Fields:
    field = "encoder_layers" if isinstance(policy, ACTConfig) else "layers"
    layers = getattr(policy, field)
    return (f"layers {layers} → {layers - 1}", {field: layers - 1}) if layers > 1 else None


def _steps(policy: Described) -> Fields:
    if not isinstance(policy, BlockwiseConfig) or policy.head != "flow" or policy.steps < 2:
        return None
    return f"integration steps {policy.steps} → {policy.steps // 2}", {"steps": policy.steps // 2}
