"""Worlds: MuJoCo tabletop tasks as Gymnasium environments, and the experts that solve them.

Importing this registers ``robotattn/PickUp-v0``, so ``gym.make("robotattn.envs:robotattn/PickUp-v0")`` works at once;
PickMoving, PickReversing and PickDisturbed are the same with cubes that do not wait.
"""

from robotattn.envs.gl import choose_backend

choose_backend()

import gymnasium as gym  # noqa: E402

from robotattn.envs.base import EnvConfig, TabletopEnv  # noqa: E402
from robotattn.envs.cameras import CameraConfig  # noqa: E402
from robotattn.envs.pick_disturbed import PickDisturbedEnv  # noqa: E402
from robotattn.envs.pick_moving import PickMovingEnv, PickReversingEnv  # noqa: E402
from robotattn.envs.pick_up import PickUpEnv  # noqa: E402

TASKS: dict[str, type[TabletopEnv]] = {
    "pick_up": PickUpEnv,
    "pick_moving": PickMovingEnv,
    "pick_reversing": PickReversingEnv,
    "pick_disturbed": PickDisturbedEnv,
}

gym.register("robotattn/PickUp-v0", entry_point="robotattn.envs.pick_up:PickUpEnv")
gym.register("robotattn/PickMoving-v0", entry_point="robotattn.envs.pick_moving:PickMovingEnv")
gym.register("robotattn/PickReversing-v0", entry_point="robotattn.envs.pick_moving:PickReversingEnv")
gym.register("robotattn/PickDisturbed-v0", entry_point="robotattn.envs.pick_disturbed:PickDisturbedEnv")


def make_env(config: EnvConfig | None = None) -> TabletopEnv:
    """The environment of a configuration, without wrappers; its time limit is its own."""
    config = config or EnvConfig()
    return TASKS[config.task](config)


__all__ = [
    "TASKS",
    "CameraConfig",
    "EnvConfig",
    "PickDisturbedEnv",
    "PickMovingEnv",
    "PickReversingEnv",
    "PickUpEnv",
    "TabletopEnv",
    "make_env",
]
