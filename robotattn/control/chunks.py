"""Chunks of planned actions, of which each comes some time after what it was planned from, become commands.

Action k of a chunk belongs to time anchor + k * period. How a late chunk is handled says when the next one is asked
for, and where the anchor lies:

| handling | asks again | anchor |
|---|---|---|
| hold | after n actions, and the last command stays meanwhile | arrival: begins at action 0 |
| naive | back to back, and the old chunk runs on | arrival: begins at action 0, however stale |
| skip | back to back | observation: begins at the action whose time is now |
| skip-executed | back to back | observation, plus the time in which nothing was run: nobody did what is skipped |
| continue | after n actions, and the old chunk runs on | as skip-executed |
| queue | when no more than a share of the chunk is left | as skip-executed |
| ensemble | back to back; what all chunks say of now is averaged (ACT) | as skip-executed |
| real-time | back to back, planned on from what will run meanwhile | as skip-executed |

Plain skip is unsafe from a standstill, at the start or after a chunk ran out: it leaves out what nobody did. Beyond a
chunk's end the last command stays. A chunk in tool coordinates is relative to the tool pose of its observation; a
command is rebased to the pose of the instant that sends it, so it means the same target however late.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from robotattn.control.clock import on_grid
from robotattn.types import ACTION_SIZE, Command, Plan, Running, wrap_angle

Handling = Literal["hold", "naive", "skip", "skip-executed", "continue", "queue", "ensemble", "real-time"]
Phase = Literal["cold", "running", "held"]
ACT_DECAY = 0.01  # m of ACT's temporal ensembling (Zhao et al. 2023)
REMEMBERED = 10  # latencies that tell how many actions will run before the next chunk is there


@dataclass(frozen=True)
class ChunkOptions:
    """How chunks are executed."""

    execute: int = 1
    """hold, continue: actions executed of each chunk before planning again."""
    ensemble: float | None = None
    """Temporal ensembling: weight exp(-m i) for the i-th oldest prediction of an instant (m here)."""
    handling: Handling = "hold"
    """What becomes of a late chunk, see the module."""
    threshold: float = 0.5
    """queue: asks again when this share of the chunk, or less, is left."""
    in_flight: int = 1
    """Inferences that may run at the same time."""

    def __post_init__(self) -> None:
        if self.execute < 1:
            raise ValueError(f"execute: {self.execute} is not a positive number of actions")
        if self.execute > 1 and self.handling not in ("hold", "continue"):
            raise ValueError(f"execute: {self.execute}, allowed with {self.handling} is 1: it does not count actions")
        if self.ensemble is not None and self.execute != 1:
            raise ValueError(f"ensemble: needs a new chunk at every tick, so execute must be 1, not {self.execute}")
        if self.ensemble is not None and not np.isfinite(self.ensemble):
            raise ValueError(f"ensemble: {self.ensemble} is not a finite decay rate")
        if self.ensemble is not None and self.handling not in ("hold", "ensemble"):
            raise ValueError(f"ensemble: {self.ensemble}, allowed with {self.handling} is none")
        if not 0 < self.threshold <= 1:
            raise ValueError(f"threshold: {self.threshold}, allowed is above 0 and up to 1")
        if self.in_flight < 1 or (self.in_flight > 1 and self.kind in ("hold", "continue", "queue")):
            raise ValueError(
                f"in_flight: {self.in_flight}, allowed with {self.kind} is {'1' if self.in_flight > 1 else '1 or more'}"
            )

    @property
    def kind(self) -> Handling:
        """The handling, which a decay alone also names."""
        return "ensemble" if self.ensemble is not None else self.handling


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


@dataclass(eq=False)
class _Chunk:
    """A plan on its way, and when it has come, one that runs. Times in ns."""

    plan: Plan
    number: int  # in the order of the observations
    seen: int  # the observation's time
    ready: int  # when it comes
    length: int  # actions that may be run
    targets: np.ndarray = field(init=False)
    period: int = field(init=False)
    anchor: int = -1
    taken: int = -1  # when it took effect

    def __post_init__(self) -> None:
        self.targets = absolute(self.plan.actions, self.plan.anchor)
        self.period = round(self.plan.period * 1e9)

    def index(self, now: int) -> int | None:
        """The action whose time is now; None before the first and after the last."""
        index = (now - self.anchor) // self.period
        return index if 0 <= index < self.length else None

    @property
    def end(self) -> int:
        return self.anchor + self.length * self.period


class ChunkQueue:
    """The chunks of one episode, those on their way included; times are ns since its reset, which `reset` begins.

    At an instant: `arrive`, then if `due` a plan is made from the observation of now, on from what is `running`, and
    `start`ed (and `arrive` again: it may take no time), then `look_up`. `next_event` says when to come back. finite:
    refuse plans with numbers that are not; False where a safety filter stands behind the queue.
    """

    def __init__(self, options: ChunkOptions, finite: bool = True) -> None:
        self.options, self.finite = options, finite
        self.reset()

    def reset(self) -> None:
        self.inferences = 0
        self.overtaken = 0  # chunks that came after one that had seen more
        self._launched: dict[int, int] = {}  # plans being made: number → when was seen what they are made of
        self._flights: list[_Chunk] = []
        self._chunks: list[_Chunk] = []  # oldest first; all but an ensemble have one
        self._ran: list[tuple[int, int]] = []  # intervals in which chunks were run that are replaced now
        self._latencies: deque[int] = deque(maxlen=REMEMBERED)
        self._sent: tuple[tuple[int, int], ...] = ()  # of the last command: numbers of chunks, and actions

    # ------------------------------------------------------------------------------------------ asking

    def due(self, now: int) -> bool:
        """Whether a plan is to be made from what is seen now; asked once a control tick."""
        if len(self._launched) + len(self._flights) >= self.options.in_flight:
            return False
        if not self._chunks:
            return True
        newest = self._chunks[-1]
        if self.options.kind in ("hold", "continue"):
            return now >= newest.taken + min(self.options.execute, len(newest.targets)) * newest.period
        if self.options.kind == "queue":
            return newest.end - now <= self.options.threshold * newest.length * newest.period
        return True

    def running(self, now: int) -> Running | None:
        """What will be run from now on, unless a chunk comes; None if nothing is."""
        if not self._chunks or (index := self._chunks[-1].index(now)) is None:
            return None
        chunk = self._chunks[-1]
        rows = chunk.targets[index : chunk.length]
        frozen = -(-max(self._latencies, default=0) // chunk.period)
        return Running(rows, chunk.plan.period, min(frozen, len(rows)))

    def start(self, now: int, plan: Plan, latency: int) -> None:
        """Send off a plan made from what was seen now; it comes `latency` later."""
        self.land(self.launch(now), plan, now + latency)

    def launch(self, now: int) -> int:
        """Note that a plan is being made from what is seen now, and nobody knows for how long; return its number."""
        self._launched[self.inferences] = now
        self.inferences += 1
        return self.inferences - 1

    def land(self, number: int, plan: Plan, ready: int) -> None:
        """Hand over the plan that was launched under this number; it comes at `ready`."""
        if plan.actions.ndim != 2 or len(plan.actions) == 0:
            raise ValueError(f"plan: actions of shape {plan.actions.shape}, allowed is [H, A] with H >= 1")
        if self.finite and not np.isfinite(plan.actions).all():
            raise ValueError("plan: a non-finite action; the policy's output is not usable")
        length = len(plan.actions)
        if self.options.kind == "hold":
            length = min(length, self.options.execute)
        self._flights.append(_Chunk(plan, number, self._launched.pop(number), ready, length))

    # ------------------------------------------------------------------------------------------ arrivals

    def arrive(self, now: int) -> list[int]:
        """Take over the chunks that have come by now; return their numbers."""
        come = sorted((chunk for chunk in self._flights if chunk.ready <= now), key=lambda chunk: chunk.ready)
        for chunk in come:
            self._flights.remove(chunk)
            self._latencies.append(chunk.ready - chunk.seen)
            self._take(chunk, now)
        return [chunk.number for chunk in come]

    def _take(self, chunk: _Chunk, now: int) -> None:
        chunk.taken, chunk.anchor = now, self._anchor(chunk, now)
        if self.options.kind == "ensemble":
            self._chunks = [old for old in self._chunks if old.end > now]
            self._chunks = sorted([*self._chunks, chunk], key=lambda one: one.number)
        elif self._chunks and self._chunks[-1].number > chunk.number:
            self.overtaken += 1
            return
        else:
            self._chunks = [chunk]
        self._begin_run(chunk, now)

    def _anchor(self, chunk: _Chunk, now: int) -> int:
        if self.options.kind in ("hold", "naive"):
            return now
        if self.options.kind == "skip":
            return chunk.seen
        return now - self._time_run(chunk.seen, now)

    def _begin_run(self, chunk: _Chunk, now: int) -> None:
        """Note for how long the chunks before were run, and that this one runs from now to its end."""
        before = [(begin, min(end, now)) for begin, end in self._ran if begin < now]
        if self.options.kind == "ensemble":  # an older chunk may outlast a newer one
            end = max(one.end for one in self._chunks)
        else:
            end = chunk.end
        self._ran = [*before[-2 * REMEMBERED :], (now, max(now, end))]

    def _time_run(self, begin: int, end: int) -> int:
        """For how long, between two instants, there was an action of a chunk to run."""
        return sum(max(0, min(end, last) - max(begin, first)) for first, last in self._ran)

    # ------------------------------------------------------------------------------------------ commands

    def look_up(self, now: int, pose: np.ndarray) -> Command | None:
        """The command to send now, or None if the last one stays. pose: the tool's now, ``[4]``."""
        active = self._active(now)
        key = tuple((chunk.number, index) for chunk, index in active)
        if not active or key == self._sent:
            return None
        self._sent = key
        chunk, index = active[-1]
        if len(active) > 1:
            action = self._blend(active)
        elif now == chunk.seen:  # planned from this very instant: nothing is rebased, and nothing rounded
            action = chunk.plan.actions[index]
        else:
            action = chunk.targets[index]
        if chunk.plan.anchor is not None and (len(active) > 1 or now != chunk.seen):
            action = relative(action, pose)
        expert = None if chunk.plan.expert is None else absolute(chunk.plan.expert[index], chunk.plan.anchor)
        return Command(action=action, age=(now - chunk.seen) / 1e9, expert=expert)

    @property
    def sent(self) -> tuple[int, int]:
        """The last command's chunk, counted from 0, and its action there; of an ensemble the newest chunk's."""
        return self._sent[-1]

    def phase(self, now: int) -> Phase:
        """Whether a chunk has an action for now, had one, or none has come yet."""
        if not self._chunks:
            return "cold"
        return "running" if self._active(now) else "held"

    def seen(self) -> int | None:
        """When the newest chunk's observation was taken (ns), None before the first chunk."""
        return self._chunks[-1].seen if self._chunks else None

    def next_event(self, now: int) -> int | None:
        """The first physics step after now at which a chunk comes, or another action's time begins."""
        times = [chunk.ready for chunk in self._flights]
        for chunk in self._chunks:
            following = (now - chunk.anchor) // chunk.period + 1
            if following < chunk.length:
                times.append(chunk.anchor + max(0, following) * chunk.period)
        return min((on_grid(max(time, now + 1)) for time in times), default=None)

    def _active(self, now: int) -> list[tuple[_Chunk, int]]:
        """The chunks that say what to do now, oldest first, and which of their actions."""
        found = ((chunk, chunk.index(now)) for chunk in self._chunks)
        return [(chunk, index) for chunk, index in found if index is not None]

    def _blend(self, active: list[tuple[_Chunk, int]]) -> np.ndarray:
        """Weighted mean of every chunk that covers now, the oldest with weight 1 (ACT, 2023).

        A gripper that each of them wants open or shut is opened or shut, as the most say by weight: half open is what
        none of them means, and no demonstration ever shows.
        """
        covering = np.stack([chunk.targets[index] for chunk, index in active])
        decay = ACT_DECAY if self.options.ensemble is None else self.options.ensemble
        weights = np.exp(-decay * np.arange(len(covering)))
        weights /= weights.sum()
        blended = weights @ covering
        if active[-1][0].plan.anchor is not None:  # blend the yaw around the newest one: angles wrap
            newest = covering[-1, 3]
            blended[3] = wrap_angle(newest + weights @ wrap_angle(covering[:, 3] - newest))
        if len(blended) in ACTION_SIZE.values() and np.isin(covering[:, -1], (0.0, 1.0)).all():
            blended[-1] = float(blended[-1] >= 0.5)
        return blended
