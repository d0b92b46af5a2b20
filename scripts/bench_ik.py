"""Time the inverse kinematics against mink on the same targets: median time and error of both, and the ratio.

    pip install mink daqp; python scripts/bench_ik.py

mink is needed by this comparison only.
"""

import json
import statistics
import time
from dataclasses import dataclass

import mink
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from robotattn.envs.arm import ITERATIONS, Arm
from robotattn.envs.scene import HOME


@dataclass(frozen=True)
class Bench:
    """What to measure."""

    targets: int = 100
    """Targets, each about one control step (up to 5 cm, 0.2 rad) away from where the arm is."""
    seed: int = 0
    """Of the targets."""


def main(bench: Bench) -> None:
    arm, rng = Arm(), np.random.default_rng(bench.seed)
    names = ("own", "mink")
    times: dict[str, list[float]] = {name: [] for name in names}
    errors: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(bench.targets):
        pose = np.array(
            [rng.uniform(0.38, 0.62), rng.uniform(-0.2, 0.2), rng.uniform(0.02, 0.25), rng.uniform(-0.5, 0.5)]
        )
        start = arm.solve(pose, HOME, 60)
        target = pose + rng.uniform(-1, 1, 4) * [0.03, 0.03, 0.02, 0.2]
        for name, solve in (("own", arm.solve), ("mink", lambda p, s: with_mink(arm, p, s))):
            began = time.perf_counter()
            joints = solve(target, start)
            times[name].append(1e3 * (time.perf_counter() - began))
            errors[name].append(1e3 * float(np.abs(arm.tool_pose(joints)[:3] - target[:3]).max()))
    ratio = statistics.median(theirs / ours for ours, theirs in zip(times["own"], times["mink"], strict=True))
    table = Table("solver", "median ms", "largest error (mm)")
    for name in names:
        table.add_row(name, f"{statistics.median(times[name]):.3f}", f"{max(errors[name]):.2f}")
    Console().print(table)
    medians = {name: statistics.median(times[name]) for name in names}
    print(json.dumps({"script": "bench_ik", "median_ms": medians, "median_ratio": ratio}))


def with_mink(arm: Arm, pose: np.ndarray, start: np.ndarray) -> np.ndarray:
    """The same task for mink: a frame task on the tool, as many iterations, the same stopping rule."""
    configuration = mink.Configuration(arm.model, np.append(start, [0.0, 0.0]))
    task = mink.FrameTask("tool", "site", position_cost=1.0, orientation_cost=1.0, lm_damping=1e-6)
    half = pose[3] / 2
    rotation = mink.SO3(np.array([0.0, np.cos(half), np.sin(half), 0.0]))  # Rz(yaw) Rx(pi)
    task.set_target(mink.SE3.from_rotation_and_translation(rotation, pose[:3]))
    for _ in range(ITERATIONS):
        if np.abs(task.compute_error(configuration)).max() < 2e-4:
            break
        configuration.integrate_inplace(mink.solve_ik(configuration, [task], 1.0, "daqp"), 1.0)
    return configuration.q[:7].copy()


if __name__ == "__main__":
    main(tyro.cli(Bench, description=__doc__))
