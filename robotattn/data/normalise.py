"""Statistics of a dataset: mean and scale of what a policy sees and of the targets that it is trained on.

The scale is the standard deviation, with a floor: a dimension that (almost) never moved in the demonstrations would
otherwise turn a millimetre into hundreds of standard deviations at test time. Dimensions under the floor are named.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from robotattn.data.windows import POSITION, STATE, Windows
from robotattn.tokens.normaliser import Moments, Statistics, Steps

FLOOR = 0.01  # (m, rad): what moves less than a centimetre or half a degree is not blown up to full scale
STEP_FLOOR = 0.001  # the same for one step of a chunk: the first action alone moves by millimetres
PERCENTILES = (1.0, 99.0)  # of a step's range: a few far-out values would make all bins coarse
BLOCK = 4096  # windows at a time

STATE_NAMES = (*(f"joint {i}" for i in range(7)), "finger width", "tool x", "tool y", "tool z", "sin yaw", "cos yaw")
ACTION_NAMES = {
    "tool": ("dx", "dy", "dz", "dyaw", "gripper"),
    "joint": (*(f"joint {i}" for i in range(7)), "gripper"),
}
POSITION_NAMES = ("x", "y", "z", "yaw")


def statistics(windows: Windows, floor: float = FLOOR, warn: Callable[[str], None] = warnings.warn) -> Statistics:
    """Return the moments of state, action and position over every window of a dataset.

    action: over the targets inside the episodes, relative to the tool and delayed where the policy's are. position:
    over the cubes that are present. `warn` is told which dimensions have the floor as their scale. Raises ValueError
    for values that are not finite.
    """
    positions = windows.frames[POSITION][windows.present[windows.episode]]
    moments = {
        "state": _moments("state", STATE_NAMES, [windows.frames[STATE]], floor),
        "action": _moments("action", ACTION_NAMES[windows.action_mode], _actions(windows), floor),
        "position": _moments("position", POSITION_NAMES, [positions], floor),
    }
    if found := [f"{key}: {', '.join(m.under_floor())}" for key, m in moments.items() if m.under_floor()]:
        warn(f"{windows.folder}: hardly ever moves, so its scale is the floor {floor:g}: {'; '.join(found)}")
    return Statistics(moments, _steps(windows))


def _steps(windows: Windows) -> Steps:
    """Describe each step of the chunk apart, as the offset from the arm at the chunk's start."""
    names = ACTION_NAMES[windows.action_mode]
    offsets, mask = _offsets(windows)
    inside = [offsets[mask[:, step], step].astype(np.float64) for step in range(windows.chunk)]
    inside = [values if len(values) else np.zeros((1, len(names))) for values in inside]  # longer than any episode
    moments = tuple(_moments(f"action {step}", names, [values], STEP_FLOOR) for step, values in enumerate(inside))
    ends = [np.percentile(values, PERCENTILES, axis=0) for values in inside]
    low = tuple(tuple(bottom.tolist()) for bottom, _ in ends)
    return Steps(moments, low, tuple(tuple(np.maximum(top, bottom + STEP_FLOOR).tolist()) for bottom, top in ends))


def _offsets(windows: Windows) -> tuple[np.ndarray, np.ndarray]:
    """Return all targets as offsets ``[n, H, A]`` (the gripper as it is), and which lie inside the episodes."""
    actions, mask = windows.typical_actions(np.arange(len(windows)))
    if windows.action_mode == "joint":
        actions[..., :-1] -= windows.frames[STATE][:, None, : actions.shape[-1] - 1]
    return actions, mask


def _actions(windows: Windows) -> Iterator[np.ndarray]:
    for start in range(0, len(windows), BLOCK):
        actions, mask = windows.typical_actions(np.arange(start, min(start + BLOCK, len(windows))))
        yield actions[mask]


def _moments(key: str, names: tuple[str, ...], blocks: Iterable[np.ndarray], floor: float) -> Moments:
    """Pool the moments of blocks ``[n, D]`` in float64 (Chan, Golub and LeVeque 1983: no cancellation)."""
    count, mean, square = 0, np.zeros(len(names)), np.zeros(len(names))
    for block in blocks:
        if not np.isfinite(block).all():
            bad = [names[d] for d in np.flatnonzero(~np.isfinite(block).all(axis=0))]
            raise ValueError(f"{key}: {', '.join(bad)}: the dataset holds values that are not finite")
        values = block.astype(np.float64)
        shift = values.mean(axis=0) - mean
        total = count + len(values)
        square += ((values - values.mean(axis=0)) ** 2).sum(axis=0) + shift**2 * count * len(values) / total
        mean += shift * len(values) / total
        count = total
    scale = np.maximum(np.sqrt(square / count), floor)
    return Moments(names, tuple(mean.tolist()), tuple(scale.tolist()), floor)
