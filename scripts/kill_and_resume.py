"""Kill recording and training -9 at random moments, resume, and compare with runs that were left alone.

    python scripts/kill_and_resume.py [--kills 10]

Recording must end with the same hash for every file, training with the same weights, bit for bit. Prints what each kill
found, a table, and one JSON line; exit code 1 if anything differs.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from rich.console import Console
from rich.progress import track
from rich.table import Table

QUIET: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}


@dataclass(frozen=True)
class Torture:
    """How hard to try."""

    kills: int = 10
    """Kills of each."""
    episodes: int = 60
    """Episodes to record (state and one small camera)."""
    steps: int = 120
    """Training steps; a checkpoint every 5."""
    seed: int = 0
    """Of the moments."""


def main(torture: Torture) -> int:
    rng = np.random.default_rng(torture.seed)
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        recorded = compare("record", lambda out: record(out, torture), home, torture.kills, rng)
        data = home / "record_whole"
        trained = compare("train", lambda out: train(data, out, torture), home, torture.kills, rng)
    table = Table("stage", "kills", "seconds uninterrupted", "files compared", "different")
    for row in (recorded, trained):
        table.add_row(*(str(row[key]) for key in ("stage", "kills", "seconds", "files", "different")))
    Console().print(table)
    print(json.dumps({"script": "kill_and_resume", "record": recorded, "train": trained}))
    return 1 if recorded["different"] or trained["different"] else 0


def record(out: Path, torture: Torture) -> list[str]:
    flags = ["--episodes", str(torture.episodes), "--cameras", "front:32", "--object-tokens"]
    return ["record", "--out", str(out), *flags]


def train(data: Path, out: Path, torture: Torture) -> list[str]:
    flags = ["--steps", str(torture.steps), "--batch", "32", "--checkpoint-every", "5", "--threads", "1"]
    return ["train", "configs/act_state.yaml", "--data", str(data), "--out", str(out), "--resume", *flags]


def compare(
    stage: str, command: Callable[[Path], list[str]], home: Path, kills: int, rng: np.random.Generator
) -> dict[str, object]:
    """Run once undisturbed, once with kills spread over about as long, and compare what is left."""
    whole, broken = home / f"{stage}_whole", home / f"{stage}_broken"
    began = time.monotonic()
    subprocess.run([sys.executable, "-m", "robotattn", *command(whole)], check=True, **QUIET)
    seconds = time.monotonic() - began
    done = 0
    for _ in track(range(kills), f"{stage}: kills"):
        done += kill_after(command(broken), float(rng.uniform(0.1, 0.35)) * seconds)
    subprocess.run([sys.executable, "-m", "robotattn", *command(broken)], check=True, **QUIET)
    one, two = hashes(whole, stage), hashes(broken, stage)
    different = [name for name in one.keys() | two.keys() if one.get(name) != two.get(name)]
    return {"stage": stage, "kills": done, "seconds": round(seconds, 1), "files": len(one), "different": len(different)}


def kill_after(command: Sequence[str], seconds: float) -> bool:
    """Start a command in a process group of its own, kill it -9 after a while; False if it was done before."""
    process = subprocess.Popen([sys.executable, "-m", "robotattn", *command], start_new_session=True, **QUIET)
    try:
        process.wait(seconds)
        return False
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return True


def hashes(folder: Path, stage: str) -> dict[str, str]:
    """Name and hash of the files that must not differ."""
    pattern = "*" if stage == "record" else "checkpoint/model.safetensors"
    files = [path for path in sorted(folder.glob(pattern)) if path.is_file()]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Torture, description=__doc__)))
