"""Worlds: MuJoCo tabletop tasks as Gymnasium environments, and the experts that solve them.

Importing this registers ``robotattn/PickUp-v0``, so ``gym.make("robotattn.envs:robotattn/PickUp-v0")`` works at once.
"""

from robotattn.envs.gl import choose_backend

choose_backend()

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
