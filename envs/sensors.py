"""What is measured in the world: proprioception, images, object tokens, and the privileged labels for training."""

from __future__ import annotations

import string
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import mujoco
import numpy as np
from gymnasium import spaces

from robotattn import instructions
from robotattn.envs.arm import yaw_of
from robotattn.envs.cameras import project
from robotattn.envs.scene import Index
from robotattn.types import COLOURS, MAX_OBJECTS, OBJECT_SIZE, STATE_SIZE, wrap_angle

if TYPE_CHECKING:
    from robotattn.envs.base import EnvConfig, TabletopEnv

CAMERAS = ("front", "top", "wrist")


def observation_space(config: EnvConfig) -> spaces.Dict:
    """The observation space of a configuration, as tabled in `robotattn.envs.base`."""
    parts: dict[str, spaces.Space] = {
        "state": spaces.Box(-10.0, 10.0, (STATE_SIZE,), np.float32),
        "velocity": spaces.Box(-100.0, 100.0, (7,), np.float32),
        "time": spaces.Box(0.0, 1e6, (1,), np.float64),
        "instruction": spaces.Text(max_length=200, min_length=0, charset=_charset()),
    }
    if config.cameras:
        parts["images"] = spaces.Dict(
            {c.name: spaces.Box(0, 255, (c.height, c.width, 3), np.uint8) for c in config.cameras}
        )
    for kind, low, high, dtype in (("depth", 0.0, 100.0, np.float32), ("segmentation", -1, 5, np.int8)):
        wanted = [camera for camera in config.cameras if getattr(camera, kind)]
        boxes: dict[str, spaces.Space] = {c.name: spaces.Box(low, high, (c.height, c.width), dtype) for c in wanted}
        if boxes:
            parts[kind] = spaces.Dict(boxes)
    if config.object_tokens:
        parts["objects"] = spaces.Box(-10.0, 10.0, (MAX_OBJECTS, OBJECT_SIZE), np.float32)
    return spaces.Dict(parts)


def _charset() -> str:
    known = {
        character
        for colour in COLOURS
        for phrases in ("train", "heldout")
        for sentence in instructions.sentences(colour, "both", phrases)
        for character in sentence
    }
    return "".join(sorted(known | set(string.ascii_letters + string.digits + string.punctuation + " ")))


def tool_pose(data: mujoco.MjData, index: Index) -> np.ndarray:
    """Tool pose ``[4]`` (x, y, z in m, yaw in rad)."""
    return np.array([*data.site_xpos[index.tool], yaw_of(data.site_xmat[index.tool])])


def proprioception(data: mujoco.MjData, index: Index) -> np.ndarray:
    """Proprioception ``[13]``, see `robotattn.types.STATE`."""
    x, y, z, yaw = tool_pose(data, index)
    width = data.qpos[7] + data.qpos[8]
    return np.array([*data.qpos[:7], width, x, y, z, np.sin(yaw), np.cos(yaw)], np.float32)


def object_poses(env: TabletopEnv) -> np.ndarray:
    """Poses ``[6, 4]`` of the cubes, yaw within ±45 degrees (a quarter turn changes nothing); absent ones zero."""
    bodies = env.index.cube_bodies
    rotation = env.data.xmat[bodies]
    yaw = wrap_angle(4 * np.arctan2(rotation[:, 3], rotation[:, 0])) / 4
    poses = np.column_stack([env.data.xpos[bodies], yaw])
    poses[len(env.layout.colour) :] = 0.0
    return poses


def object_tokens(env: TabletopEnv) -> np.ndarray:
    """Object tokens, float32 ``[6, 10]``: pose and colour one-hot; absent slots all zero."""
    tokens = np.zeros((MAX_OBJECTS, OBJECT_SIZE), np.float32)
    tokens[:, :4] = object_poses(env)
    tokens[np.arange(len(env.layout.colour)), 4 + env.layout.colour] = 1.0
    return tokens


def object_velocities(env: TabletopEnv) -> np.ndarray:
    """Linear velocities ``[6, 3]`` of the cubes (m/s, world frame); absent ones zero."""
    velocities = env.data.qvel[env.index.cube_dof[:, None] + np.arange(3)]
    velocities[len(env.layout.colour) :] = 0.0
    return velocities


def observe(env: TabletopEnv, only: Collection[str] | None = None) -> dict[str, Any]:
    """The observation of this instant, as tabled in `robotattn.envs.base`; or what some sensors see of it.

    only: names of cameras, and "objects"; what the joints say is always there, and costs nothing.
    """
    cameras = [camera for camera in env.config.cameras if only is None or camera.name in only]
    seen: dict[str, Any] = {
        "state": proprioception(env.data, env.index),
        "velocity": env.data.qvel[:7].astype(np.float32),
        "time": np.array([env.time]),
        "instruction": env.instruction,
    }
    if cameras:
        drawn = {c.name: env.renderer.draw(env.data, env.index.camera(c.name), c) for c in cameras}
        for kind, key in (("rgb", "images"), ("depth", "depth"), ("segmentation", "segmentation")):
            pictures = {name: picture[kind] for name, picture in drawn.items() if kind in picture}
            if pictures:
                seen[key] = pictures
    if env.config.object_tokens and (only is None or "objects" in only):
        seen["objects"] = object_tokens(env)
    return seen


def labels(env: TabletopEnv) -> dict[str, Any]:
    """Privileged labels: positions ``[6, 4]``, velocities ``[6, 3]`` (m/s), presence, colours, target slot, and pixels
    ``[6, 2]`` a camera."""
    count = len(env.layout.colour)
    present = np.arange(MAX_OBJECTS) < count
    colour = np.zeros(MAX_OBJECTS, np.int64)
    colour[:count] = env.layout.colour
    poses = object_poses(env)
    result: dict[str, Any] = {
        "position": poses.astype(np.float32),
        "velocity": object_velocities(env).astype(np.float32),
        "present": present,
        "colour": colour,
        "target": env.target,
        "pixel": {},
        "visible": {},
    }
    for camera in env.config.cameras:
        number, aspect = env.index.camera(camera.name), camera.width / camera.height
        pixel, inside = project(env.data, env.model, number, aspect, poses[:, :3])
        result["pixel"][camera.name] = pixel
        result["visible"][camera.name] = inside & present
    if env.expert_joint is not None:
        result["expert_joint"] = env.expert_joint
    return result
