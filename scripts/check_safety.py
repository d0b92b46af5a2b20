"""Send random and adversarial actions through the safety filter into the simulated arm and look at every physics step.

    python scripts/check_safety.py --sequences 10000
    python scripts/check_safety.py --sequences 0 --episodes 50

Checked: joint positions and speeds, the tool against its workspace, every part of the arm against the table; how
fast the speeds that commands ask for rise; that filtering twice changes nothing more; and what a command costs.
With --episodes the scripted expert works with and without the filter.
"""

import copy
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace

import numpy as np
import tyro

from robotattn.console import Progress, table
from robotattn.control.safety import JOINTS, Interventions, Limits, SafetyFilter
from robotattn.envs import EnvConfig, TabletopEnv, make_env
from robotattn.envs.experts import EXPERTS
from robotattn.seeds import stream
from robotattn.sight import read_observation
from robotattn.types import ActionMode

RATES = (10, 20, 50)  # (Hz)
TASKS = ("pick_up", "pick_moving")
SECONDS = 0.6  # of a sequence
PAST_STOP = 0.005  # how far the simulated joint stops give way (rad)
PAST_BORDER = 0.01  # how far the servo may run past a border of the workspace (m); the table it may not touch


@dataclass(frozen=True)
class Check:
    """What to run."""

    sequences: int = 10_000
    """Sequences of actions, spread over tool and joint mode, 10, 20 and 50 Hz, table and belt."""
    episodes: int = 0
    """Episodes of the expert for each task, rate and kind of limits."""
    seed: int = 0
    """Of everything that is drawn."""


Draw = Callable[[np.random.Generator, TabletopEnv, int], np.ndarray]
"""Actions ``[ticks, A]`` for an environment that was reset."""


def bounds(env: TabletopEnv) -> tuple[np.ndarray, np.ndarray]:
    return env.action_space.low.astype(np.float64), env.action_space.high.astype(np.float64)  # type: ignore[attr-defined]


def anywhere(rng: np.random.Generator, env: TabletopEnv, ticks: int) -> np.ndarray:
    low, high = bounds(env)
    return rng.uniform(low, high, (ticks, len(low)))


def far_beyond(rng: np.random.Generator, env: TabletopEnv, ticks: int) -> np.ndarray:
    return anywhere(rng, env, ticks) * rng.choice([3.0, 30.0, 1e6])


def to_and_fro(rng: np.random.Generator, env: TabletopEnv, ticks: int) -> np.ndarray:
    low, high = bounds(env)
    return np.where((np.arange(ticks)[:, None] + rng.integers(0, 2, len(low))) % 2, low, high)


def into_a_corner(rng: np.random.Generator, env: TabletopEnv, ticks: int) -> np.ndarray:
    low, high = bounds(env)
    return np.tile(np.where(rng.random(len(low)) < 0.5, low, high), (ticks, 1))


def corners(rng: np.random.Generator, env: TabletopEnv, ticks: int) -> np.ndarray:
    low, high = bounds(env)
    return np.where(rng.random((ticks, len(low))) < 0.5, low, high)


def broken(rng: np.random.Generator, env: TabletopEnv, ticks: int) -> np.ndarray:
    actions = anywhere(rng, env, ticks)
    where = rng.random(actions.shape) < 0.1
    actions[where] = rng.choice([np.nan, np.inf, -np.inf], where.sum())
    return actions


def jumps(rng: np.random.Generator, env: TabletopEnv, ticks: int) -> np.ndarray:
    return np.repeat(anywhere(rng, env, ticks // 3 + 1), 3, axis=0)[:ticks]


def into_the_table(rng: np.random.Generator, env: TabletopEnv, ticks: int) -> np.ndarray:
    if env.config.action_mode == "tool":
        sideways, yaw, gripper = rng.uniform(-0.1, 0.1, 2), rng.uniform(-0.5, 0.5), rng.integers(2)
        return np.tile([*sideways, -0.1, yaw, gripper], (ticks, 1))
    place = rng.uniform([0.2, -0.7, -0.3, -2.0], [0.8, 0.7, 0.05, 2.0])
    return np.tile(np.append(env.arm.solve(place, env.data.qpos[:JOINTS], 60), rng.integers(2)), (ticks, 1))


DRAWS: tuple[Draw, ...] = (anywhere, far_beyond, to_and_fro, into_a_corner, corners, broken, jumps, into_the_table)


@dataclass
class Worst:
    """The worst that was seen of one kind of sequence."""

    sequences: int = 0
    commands: int = 0
    changed: int = 0
    position: float = -np.inf
    """Beyond a joint's range (rad)."""
    speed: float = 0.0
    """Share of the limit."""
    acceleration: float = 0.0
    """Of what commands ask for; share of the limit."""
    rise: float = 0.0
    """Of the arm's peak speed from one control period to the next, over the period; share of the acceleration limit."""
    border: float = -np.inf
    """Of the tool beyond its workspace (m)."""
    lowest: float = np.inf
    """Height of the lowest part of the arm (m)."""
    changed_twice: int = 0
    """Commands that a second filtering changed."""

    def meet(self, other: "Worst") -> None:
        for name in ("sequences", "commands", "changed", "changed_twice"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("position", "speed", "acceleration", "rise", "border"):
            setattr(self, name, max(getattr(self, name), getattr(other, name)))
        self.lowest = min(self.lowest, other.lowest)

    @property
    def shares(self) -> tuple[float, ...]:
        return self.position, self.speed, self.acceleration, self.rise

    @property
    def kept(self) -> bool:
        """Whether every limit was kept."""
        moves = self.position <= PAST_STOP and self.speed <= 1.0 and self.acceleration <= 1.0 + 1e-6
        return moves and self.border <= PAST_BORDER and self.lowest > 0.0 and self.changed_twice == 0


@dataclass
class Trial:
    """One sequence: an environment somewhere in its workspace at rest, and a filter before it."""

    env: TabletopEnv
    costs: list[float] = field(default_factory=list)
    """Time of each call of the filter (us)."""

    def run(self, rng: np.random.Generator, draw: Draw, seed: int) -> Worst:
        env = self.env
        env.reset(seed=seed)
        if rng.random() < 0.5:
            self._start_elsewhere(rng)
        self.filter = SafetyFilter(replace(Limits(), workspace=env.workspace), env.arm.reach)
        self.filter.reset(env.data.qpos[:JOINTS])
        worst, self.peak, self.asked = Worst(sequences=1), np.zeros(JOINTS), np.zeros(JOINTS)
        for action in draw(rng, env, max(6, round(SECONDS * env.config.hz))):
            worst.changed_twice += self._send(action, age=5.0 * (rng.random() < 0.02))
            self._compare(worst)
            self._watch(worst)
        worst.commands, worst.changed = self.filter.report.commands, self.filter.report.changed
        return worst

    def _start_elsewhere(self, rng: np.random.Generator) -> None:
        """Put the arm at rest anywhere in the workspace that it reaches, pointing down."""
        env, limits = self.env, Limits()
        low, high = np.array(env.workspace.low), np.array(env.workspace.high)
        joints = env.arm.solve(np.append(rng.uniform(low, high), rng.uniform(-1, 1)), env.data.qpos[:JOINTS], 60)
        *tool, lowest = env.arm.reach(joints)
        if (tool >= low).all() and (tool <= high).all() and lowest > limits.clearance:
            env.data.qpos[:JOINTS] = env.data.ctrl[:JOINTS] = joints
            env.refresh()

    def _send(self, action: np.ndarray, age: float) -> bool:
        """Send an action through the filter; return whether filtering a second time would change it again."""
        env, joints, period = self.env, self.env.data.qpos[:JOINTS].copy(), 1 / self.env.config.hz
        asked = env.controls(action) if np.isfinite(action).all() else action
        again = copy.copy(self.filter)  # in the same state, with a report of its own
        again.report = Interventions()
        before = time.perf_counter_ns()
        safe = self.filter(asked, joints, period, age)
        self.costs.append((time.perf_counter_ns() - before) / 1000)
        env.apply(safe)
        return again(safe, joints, period).tobytes() != safe.tobytes()

    def _compare(self, worst: Worst) -> None:
        """Compare the speed that the actuator targets ask for with what the ones before asked for."""
        limits, before = self.filter.limits, self.asked
        self.asked = (self.env.data.ctrl[:JOINTS] - self.env.data.qpos[:JOINTS]) / limits.response
        more = np.maximum(self.asked - np.maximum(before, 0.0), np.minimum(before, 0.0) - self.asked)
        worst.acceleration = max(worst.acceleration, float((more * self.env.config.hz / limits.acceleration).max()))

    def _watch(self, worst: Worst) -> None:
        """Run a control period and look at the arm after every physics step."""
        env, limits, box, before = self.env, self.filter.limits, self.env.workspace, self.peak
        seen = np.empty((env.substeps, 2 * JOINTS + 4))  # positions, speeds, what `reach` tells
        for row in seen:
            env.advance(1)
            joints = env.data.qpos[:JOINTS]
            row[:JOINTS], row[JOINTS:-4], row[-4:] = joints, env.data.qvel[:JOINTS], env.arm.reach(joints)
        joints, speed, tool, lowest = seen[:, :JOINTS], np.abs(seen[:, JOINTS:-4]), seen[:, -4:-1], seen[:, -1]
        self.peak = speed.max(axis=0)
        rise = (self.peak - before) * env.config.hz / limits.acceleration
        now = Worst(
            position=float(np.maximum(limits.low - joints, joints - limits.high).max()),
            speed=float((self.peak / limits.speed).max()),
            rise=float(rise.max()),
            border=float(np.maximum(box.low - tool, tool - box.high).max()),
            lowest=float(lowest.min()),
        )
        worst.meet(now)


def sequences(count: int, seed: int, progress: Callable[[str, int, int], None]) -> tuple[dict[str, Worst], list[float]]:
    """Run sequences, each drawn from the seed and its own number; the worst by mode and kind, and costs (us)."""
    trials: dict[tuple[ActionMode, int, str], Trial] = {}
    worst: dict[str, Worst] = {}
    modes: tuple[ActionMode, ...] = ("tool", "joint")
    kinds = [(mode, hz, task, draw) for draw in DRAWS for task in TASKS for hz in RATES for mode in modes]
    for number in range(count):
        mode, hz, task, draw = kinds[number % len(kinds)]
        key = mode, hz, task
        if key not in trials:
            trials[key] = Trial(make_env(EnvConfig(task=task, hz=hz, action_mode=mode)))  # type: ignore[arg-type]
        seen = trials[key].run(np.random.default_rng([seed, number]), draw, number)
        worst.setdefault(f"{mode}, {draw.__name__.replace('_', ' ')}", Worst()).meet(seen)
        progress("sequences", number + 1, count)
    return worst, [cost for trial in trials.values() for cost in trial.costs]


def expert(task: str, hz: int, limits: Limits | None, seeds: list[int]) -> dict[str, float]:
    """The expert's episodes under limits, or without any."""
    env = make_env(EnvConfig(task=task, hz=hz))  # type: ignore[arg-type]
    agent, times, commands, changed, first = EXPERTS[task]([env]), list[float](), 0, 0, 0
    safety = SafetyFilter(replace(limits or Limits(), workspace=env.workspace), env.arm.reach)
    for seed in seeds:
        raw, _ = env.reset(seed=seed)
        agent.reset(0)
        safety.reset(env.data.qpos[:JOINTS])
        ended = [False, False]
        while not any(ended):
            asked = env.controls(agent.plan([0], [read_observation(raw)])[0].actions[0])
            env.apply(safety(asked, env.data.qpos[:JOINTS].copy(), 1 / hz) if limits else asked)
            env.advance(env.substeps)
            *ended, info = env.end_tick()
            raw = env.observe()
        times += [env.time] if info["success"] else []
        first += bool(info["success"] and info["episode"]["tries"] == 1)
        commands, changed = commands + safety.report.commands, changed + safety.report.changed
    quick = sum(value <= 3.0 for value in times)
    share = changed / commands if commands else 0.0
    return {
        "success": len(times),
        "in_3_s": quick,
        "first_try": first,
        "median_s": float(np.median(times)),
        "changed": share,
    }


def expert_rows(episodes: int, seed: int, progress: Callable[[str, int, int], None]) -> Iterator[dict[str, object]]:
    seeds = stream("evaluate", seed, episodes)
    cases = [(task, hz) for task in EXPERTS for hz in RATES]
    for number, (task, hz) in enumerate(cases):
        for name, limits in (("none", None), ("datasheet", Limits())):
            yield {"task": task, "hz": hz, "limits": name, "episodes": episodes, **expert(task, hz, limits, seeds)}
        progress("expert", number + 1, len(cases))


def show(worst: dict[str, Worst]) -> None:
    titles = (
        "sequences of",
        "number",
        "changed",
        "stop (rad)",
        "speed",
        "acceleration",
        "rise",
        "border (mm)",
        "low (mm)",
    )
    rows = [
        (kind, w.sequences, w.changed / w.commands, *w.shares, 1e3 * w.border, 1e3 * w.lowest)
        for kind, w in worst.items()
    ]
    table("the worst at any physics step; speed, acceleration and rise as shares of the limit", rows, titles)


def main(check: Check) -> int:
    with Progress() as progress:
        worst, costs = sequences(check.sequences, check.seed, progress)
        experts = list(expert_rows(check.episodes, check.seed, progress)) if check.episodes else []
    result: dict[str, object] = {"script": "check_safety", **asdict(check)}
    if worst:
        total = Worst()
        for seen in worst.values():
            total.meet(seen)
        show({**worst, "all": total})
        microseconds = {"median": float(np.median(costs)), "p99": float(np.quantile(costs, 0.99))}
        result |= {"worst": asdict(total), "kept": total.kept, "microseconds": microseconds}
    if experts:
        table("the expert", (list(row.values()) for row in experts), list(experts[0]))
        result["expert"] = experts
    print(json.dumps(result))
    return 0 if result.get("kept", True) else 1


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Check, description=__doc__)))
