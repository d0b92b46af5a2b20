"""Made-up demonstrations for trainings of a second, and what such a training leaves behind."""

import json

import numpy as np

from robotattn import checkpoint
from robotattn.data import store
from robotattn.policies import ACTConfig
from robotattn.train import TrainConfig
from robotattn.types import COLOURS, MAX_OBJECTS

POLICY = ACTConfig(objects=True, width=16, heads=2, feedforward=16, text_width=16, chunk=4, dropout=0.1)
ENV = {"cameras": [], "object_tokens": True, "action_mode": "tool", "language": "en", "hz": 10}


def write_demos(folder, episodes=3, frames=10, cameras=(), size=16, seed=0, spoil=lambda state: None):
    """Write a data set in which the arm moves straight to the target; spoil: changes an episode's states."""
    folder.mkdir(parents=True)
    env = ENV | {"cameras": [{"name": name, "width": size, "height": size} for name in cameras]}
    description = {"schema": store.SCHEMA, "env": env, "seed": seed, "noise": 0.0, "episodes": episodes, "versions": {}}
    store.open_dataset(folder, description)
    lines = {}
    for index in range(episodes):
        columns, attributes = _episode(np.random.default_rng([seed, index]), frames, cameras, size)
        spoil(columns["observations/state"])
        lines[index] = store.write_episode(folder, index, columns, attributes | {"env": json.dumps(env)})
    store.write_manifest(folder, lines)
    return folder


def _episode(rng, frames, cameras, size):
    present = np.arange(MAX_OBJECTS) < 3
    colour = rng.permutation(MAX_OBJECTS)
    position = rng.uniform([0.4, -0.2, 0.02, -0.5], [0.6, 0.2, 0.02, 0.5], (MAX_OBJECTS, 4)) * present[:, None]
    tool = np.linspace([0.4, 0.0, 0.3], position[0, :3], frames)
    state = rng.normal(size=(frames, 13))
    state[:, 8:11], state[:, 11:] = tool, [0.0, 1.0]
    objects = np.concatenate([position, np.eye(len(COLOURS))[colour] * present[:, None]], axis=1)
    goal = np.concatenate([position[0], [0.0]])
    still = np.broadcast_to
    columns = {
        "observations/state": state.astype(np.float32),
        "observations/objects": still(objects, (frames, MAX_OBJECTS, 10)).astype(np.float32),
        "action": np.zeros((frames, 5), np.float32),
        "expert_action": np.concatenate([tool + 0.1 * (position[0, :3] - tool), still(goal[3:], (frames, 2))], axis=1),
        "expert_joint": np.zeros((frames, 8), np.float32),
        "time/observation": np.arange(frames) / 10,
        "labels/position": still(position, (frames, MAX_OBJECTS, 4)).astype(np.float32),
        "labels/present": present,
        "labels/colour": colour,
        "final/state": state[-1].astype(np.float32),
    }
    for camera in cameras:
        columns[f"observations/images/{camera}"] = rng.integers(0, 256, (frames, size, size, 3), dtype=np.uint8)
        columns[f"labels/pixel/{camera}"] = rng.uniform(size=(frames, MAX_OBJECTS, 2)).astype(np.float32)
        columns[f"labels/visible/{camera}"] = still(present, (frames, MAX_OBJECTS)).copy()
    name = COLOURS[colour[0]]
    attributes = {"seed": 0, "instruction": f"pick up the {name} cube", "success": True, "reason": "success", "hz": 10}
    return columns, attributes | {"action_mode": "tool", "attempt": 0, "target": 0}


def training(data, out):
    """Return the configuration of a training of twelve steps."""
    return TrainConfig(
        data=data,
        out=out,
        policy=POLICY,
        steps=12,
        batch=8,
        warmup=3,
        ema=0.9,
        threads=1,
        device="cpu",
        checkpoint_every=4,
        log_every=3,
    )


def state_of(out):
    return checkpoint.load_state(out / "training_state.pt")


def metrics_of(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def timeless(lines):
    return [{k: v for k, v in line.items() if k not in ("minutes", "samples_per_second")} for line in lines]
