"""Turn chunks of planned actions into one command a tick: an action queue, or ACT's temporal ensemble.

A chunk in tool coordinates is planned relative to the tool pose of its observation; it is rebased here to the tool pose
of the tick that executes it, so that a command means the same target however late it is sent.
"""

from dataclasses import dataclass

import numpy as np

from robotattn.types import Command, Plan, wrap_angle


@dataclass(frozen=True)
class ChunkOptions:
    """How chunks are executed."""

    execute: int = 1
    """Actions executed of each chunk before planning again."""
    ensemble: float | None = None
    """Temporal ensembling: weight exp(-m i) for the i-th oldest prediction of a tick (m here); needs execute = 1."""

    def __post_init__(self) -> None:
        if self.execute < 1:
            raise ValueError(f"execute: {self.execute} is not a positive number of actions")
        if self.ensemble is not None and self.execute != 1:
            raise ValueError(f"ensemble: needs a new chunk at every tick, so execute must be 1, not {self.execute}")
        if self.ensemble is not None and not np.isfinite(self.ensemble):
            raise ValueError(f"ensemble: {self.ensemble} is not a finite decay rate")


def absolute(actions: np.ndarray, anchor: np.ndarray | None) -> np.ndarray:
    """Targets in the world frame: tool offsets ``[..., 5]`` plus their anchor ``[4]``; joint targets as they are."""
    if anchor is None:
        return actions
    targets = np.array(actions, dtype=np.float64)
    targets[..., :4] += anchor
    targets[..., 3] = wrap_angle(targets[..., 3])
    return targets


def relative(targets: np.ndarray, pose: np.ndarray) -> np.ndarray:
    """Tool targets ``[..., 5]`` as offsets from a tool pose ``[4]``, the yaw by the shorter way round."""
    offsets = np.array(targets, dtype=np.float64)
    offsets[..., :4] -= pose
    offsets[..., 3] = wrap_angle(offsets[..., 3])
    return offsets


class ChunkQueue:
    """The chunks of one episode. `reset` between episodes; `put` when `needs_plan`; `next` once a tick."""

    def __init__(self, options: ChunkOptions) -> None:
        self.options = options
        self.reset()

    def reset(self) -> None:
        self._plans: list[tuple[int, Plan, np.ndarray]] = []  # (tick of action 0, plan, absolute targets)
        self._tick = 0

    @property
    def needs_plan(self) -> bool:
        if not self._plans:
            return True
        start, plan, _ = self._plans[-1]
        return self._tick - start >= min(self.options.execute, len(plan.actions))

    def put(self, plan: Plan) -> None:
        if plan.actions.ndim != 2 or len(plan.actions) == 0:
            raise ValueError(f"plan: actions of shape {plan.actions.shape}, allowed is [H, A] with H >= 1")
        if not np.isfinite(plan.actions).all():
            raise ValueError("plan: a non-finite action; the policy's output is not usable")
        kept = self._plans if self.options.ensemble is not None else []
        kept = [entry for entry in kept if self._tick - entry[0] < len(entry[2])]
        self._plans = [*kept, (self._tick, plan, absolute(plan.actions, plan.anchor))]

    def next(self, pose: np.ndarray) -> Command:
        """The command of this tick; `pose` is the tool pose now, ``[4]``."""
        start, plan, targets = self._plans[-1]
        index = self._tick - start
        target = targets[index] if self.options.ensemble is None else self._blend()
        action = relative(target, pose) if plan.anchor is not None else target
        expert = None if plan.expert is None else absolute(plan.expert[index], plan.anchor)
        self._tick += 1
        return Command(action=action, age=index, expert=expert)

    def _blend(self) -> np.ndarray:
        """Weighted mean of every chunk that covers this tick, the oldest with weight 1 (ACT, 2023)."""
        covering = np.stack([targets[self._tick - start] for start, _, targets in self._plans])
        weights = np.exp(-float(self.options.ensemble or 0.0) * np.arange(len(covering)))
        weights /= weights.sum()
        blended = weights @ covering
        if self._plans[-1][1].anchor is not None:  # blend the yaw around the newest one: angles wrap
            newest = covering[-1, 3]
            blended[3] = wrap_angle(newest + weights @ wrap_angle(covering[:, 3] - newest))
        return blended
