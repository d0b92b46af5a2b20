"""Compare a control step of PickUp with one of robosuite's Lift: 20 Hz, three cameras at 96 px, one core, software GL.

Blocks of steps alternate (ours, peer, ours, peer, ...) between two worker processes that live through the whole run, so
that a busy machine slows both; the ratio is taken within each pair of blocks. The peer lives in a virtual environment
of its own, because it needs another MuJoCo; this file is also its worker, so up here only the standard library is used.

    python scripts/bench_peer_env.py [--venv .bench/robosuite] [--pairs 15] [--steps 20]
"""

import argparse
import json
import os
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

PEER = ("robosuite==1.5.2", "mujoco==3.3.2")
SIZE, HZ = 96, 20
START_LIMIT, BLOCK_LIMIT = 300, 120  # (s); a stuck OpenGL context never answers
ONE_CORE = {"MUJOCO_GL": "egl", "PYOPENGL_PLATFORM": "egl", "LP_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}

Step = Callable[[], list]
"""Advance the world by one control period under a new random command; return the camera images."""


def ours() -> tuple[Step, dict[str, str]]:
    import mujoco
    import numpy as np

    import robotattn
    from robotattn.envs import CameraConfig, EnvConfig, make_env

    cameras = tuple(CameraConfig(name, SIZE, SIZE) for name in ("front", "top", "wrist"))
    env = make_env(EnvConfig(hz=HZ, time_limit=600, cameras=cameras))
    env.reset(seed=0)
    rng = np.random.default_rng(0)
    reach = np.array([0.05, 0.05, 0.05, 0.25])  # (m, m, m, rad), as far as the peer's commands go in one step

    def step() -> list:
        observation, *_ = env.step(np.append(rng.uniform(-reach, reach), 1.0))
        return list(observation["images"].values())

    return step, {"robotattn": robotattn.__version__, "mujoco": mujoco.__version__}


def peer() -> tuple[Step, dict[str, str]]:
    import mujoco
    import numpy as np
    import robosuite

    cameras = ["frontview", "birdview", "robot0_eye_in_hand"]
    env = robosuite.make(
        "Lift",
        robots="Panda",
        has_renderer=False,
        has_offscreen_renderer=True,
        use_camera_obs=True,
        camera_names=cameras,
        camera_heights=SIZE,
        camera_widths=SIZE,
        control_freq=HZ,
        horizon=10**9,
        ignore_done=True,
    )
    env.reset()
    rng = np.random.default_rng(0)
    low, high = env.action_spec

    def step() -> list:
        observation, *_ = env.step(rng.uniform(low, high))
        return [observation[f"{name}_image"] for name in cameras]

    return step, {"robosuite": robosuite.__version__, "mujoco": mujoco.__version__}


def image_fault(before: list, after: list) -> str:
    """Say what is wrong with the pictures of two moments, "" if nothing: a broken renderer is a fast renderer."""
    if any(image.shape != (SIZE, SIZE, 3) for image in after):
        return f"images of shapes {[image.shape for image in after]}, asked for {(SIZE, SIZE, 3)}"
    if any(image.std() < 1 for image in after):
        return "a camera sees one flat colour"
    if any((a == b).all() for i, a in enumerate(after) for b in after[:i]):
        return "two cameras see the same picture"
    if any((a == b).all() for a, b in zip(before, after, strict=True)):
        return "a picture did not change in a second of motion"
    return ""


def work(make: Callable[[], tuple[Step, dict[str, str]]]) -> None:
    """Answer each line ``{"steps": n}`` with the milliseconds of n control steps, until the pipe closes."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not mix with the answers
    step, versions = make()
    before = step()
    for _ in range(HZ):
        after = step()
    print(json.dumps({"versions": versions, "fault": image_fault(before, after)}), file=answers, flush=True)
    for line in sys.stdin:
        milliseconds = []
        for _ in range(json.loads(line)["steps"]):
            start = time.perf_counter()
            after = step()
            milliseconds.append(1e3 * (time.perf_counter() - start))
        print(json.dumps({"ms": milliseconds, "fault": image_fault(before, after)}), file=answers, flush=True)


class Worker:
    """A worker process and the pipes to it."""

    def __init__(self, name: str, python: Path | str, log: Path):
        self.name, self.log = name, log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [str(python), __file__, "--worker", name],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=os.environ | ONE_CORE,
            )  # fmt: skip
        self.ready = self._answer(START_LIMIT)

    def block(self, steps: int) -> float:
        """Return the median milliseconds of a control step over a block of `steps`."""
        assert self._process.stdin
        self._process.stdin.write(json.dumps({"steps": steps}).encode() + b"\n")
        self._process.stdin.flush()
        answer = self._answer(BLOCK_LIMIT)
        if answer["fault"]:
            raise SystemExit(f"{self.name}: {answer['fault']}")
        return statistics.median(answer["ms"])

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()

    def _answer(self, limit: float) -> dict:
        assert self._process.stdout
        readable, _, _ = select.select([self._process.stdout], [], [], limit)
        line = self._process.stdout.readline() if readable else b""
        if not line:
            self.close()
            what = "ended" if readable else f"gave no answer in {limit} s"
            raise SystemExit(f"worker {self.name} {what}; its messages are in {self.log}")
        return json.loads(line)


def install_peer(folder: Path) -> Path:
    """Make the peer's virtual environment unless it is there; return its Python."""
    python = folder / "bin" / "python"
    installed = folder / "installed.txt"
    if not installed.exists() or installed.read_text() != " ".join(PEER):
        print(f"installing {' '.join(PEER)} into {folder}")
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *PEER], check=True)
        installed.write_text(" ".join(PEER))
    return python


def start_peer(python: Path, log: Path) -> Worker:
    """Start the peer, again if its pictures are wrong.

    In its first process numba compiles for some 20 s, and then every camera was seen to return the same old picture,
    ten times too fast (why is not known). The second process finds the compiled code on disk and renders properly.
    """
    worker = Worker("robosuite", python, log)
    if worker.ready["fault"]:
        worker.close()
        worker = Worker("robosuite", python, log)
    return worker


def measure(workers: tuple[Worker, Worker], pairs: int, steps: int) -> list[tuple[float, float]]:
    """Run the alternating blocks; return (ours, peer) milliseconds a control step for each pair."""
    for worker in workers:
        if worker.ready["fault"]:
            raise SystemExit(f"{worker.name}: {worker.ready['fault']}")
        worker.block(steps)  # warm-up
    return [(workers[0].block(steps), workers[1].block(steps)) for _ in range(pairs)]


def show(rows: list[tuple[float, float]], workers: tuple[Worker, Worker], steps: int) -> None:
    """Print the table, then one line of JSON."""
    ratios = [peer_ms / ours_ms for ours_ms, peer_ms in rows]
    medians = [statistics.median(column) for column in zip(*rows, strict=True)]
    print(f"{'pair':>6} {'robotattn ms':>13} {'robosuite ms':>13} {'ratio':>7}")
    for number, (row, ratio) in enumerate(zip(rows, ratios, strict=True), start=1):
        print(f"{number:>6} {row[0]:>13.2f} {row[1]:>13.2f} {ratio:>7.1f}")
    print(f"{'median':>6} {medians[0]:>13.2f} {medians[1]:>13.2f} {statistics.median(ratios):>7.1f}")
    result = {
        "benchmark": "control step, 20 Hz, 3 cameras at 96 px, one core",
        "ms": dict(zip(("robotattn", "robosuite"), medians, strict=True)),
        "ratio": {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)},
        "pairs": len(rows),
        "steps": steps,
        "versions": {worker.name: worker.ready["versions"] for worker in workers},
    }
    print(json.dumps(result))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, default=Path(".bench/robosuite"), help="folder of the peer's environment")
    parser.add_argument("--pairs", type=int, default=15, help="pairs of blocks")
    parser.add_argument("--steps", type=int, default=20, help="control steps a block")
    parser.add_argument("--worker", choices=("robotattn", "robosuite"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return work(ours if options.worker == "robotattn" else peer)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # one core for both; children inherit it
    python = install_peer(options.venv.absolute())
    workers: list[Worker] = []
    try:
        workers.append(Worker("robotattn", sys.executable, options.venv / "robotattn.log"))
        workers.append(start_peer(python, options.venv / "robosuite.log"))
        show(measure((workers[0], workers[1]), options.pairs, options.steps), (workers[0], workers[1]), options.steps)
    finally:
        for worker in workers:
            worker.close()


if __name__ == "__main__":
    main()
