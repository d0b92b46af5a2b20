"""Worlds: MuJoCo tabletop tasks as Gymnasium environments, and the experts that solve them.

Importing this registers ``robotattn/PickUp-v0``, so ``gym.make("robotattn.envs:robotattn/PickUp-v0")`` works at once.
"""

import os

# Software rendering on more than one thread is three times slower, and without a screen only EGL or OSMesa can draw.
os.environ.setdefault("LP_NUM_THREADS", "1")
if not os.environ.get("DISPLAY"):
    os.environ.setdefault("MUJOCO_GL", "egl")

import gymnasium as gym  # noqa: E402

from robotattn.envs.base import EnvConfig, TabletopEnv  # noqa: E402
from robotattn.envs.cameras import CameraConfig  # noqa: E402
from robotattn.envs.pick_up import PickUpEnv  # noqa: E402

TASKS: dict[str, type[TabletopEnv]] = {"pick_up": PickUpEnv}

gym.register("robotattn/PickUp-v0", entry_point="robotattn.envs.pick_up:PickUpEnv")


def make_env(config: EnvConfig | None = None) -> TabletopEnv:
    """The environment of a configuration, without wrappers; its time limit is its own."""
    config = config or EnvConfig()
    return TASKS[config.task](config)


__all__ = ["TASKS", "CameraConfig", "EnvConfig", "PickUpEnv", "TabletopEnv", "make_env"]
