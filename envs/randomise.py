"""What differs from episode to episode: layout and colours of the cubes and, on request, light, cameras and texture.

Every draw comes from a stream of its own, derived from the episode's seed, so that switching one kind of variation on
or naming another cube leaves everything else in the scene as it was.
"""

from dataclasses import dataclass

import mujoco
import numpy as np

from robotattn.envs.scene import CUBE_HALF
from robotattn.types import COLOURS, MAX_OBJECTS

X_RANGE, Y_RANGE = (0.38, 0.62), (-0.20, 0.20)  # of cube centres (m)
SPACING = 0.085  # between cube centres (m): room for the open fingers
RGB = {
    "red": (0.82, 0.12, 0.10),
    "green": (0.13, 0.60, 0.20),
    "blue": (0.12, 0.28, 0.80),
    "yellow": (0.92, 0.82, 0.12),
    "purple": (0.52, 0.18, 0.62),
    "orange": (0.95, 0.48, 0.08),
}
_STREAMS = {"layout": 0, "look": 1, "instruction": 2, "noise": 3, "motion": 4}


def generator(seed: int, stream: str) -> np.random.Generator:
    """The random stream of one kind of variation in the episode with this seed."""
    return np.random.default_rng([seed, _STREAMS[stream]])


@dataclass(frozen=True)
class Layout:
    """Where the cubes stand. Slots are in random order. position ``[n, 3]`` (m), yaw ``[n]`` (rad), colour ``[n]``."""

    position: np.ndarray
    yaw: np.ndarray
    colour: np.ndarray


Range = tuple[float, float]


def draw_layout(
    rng: np.random.Generator, count: int, yaw: float, x_range: Range = X_RANGE, y_range: Range = Y_RANGE
) -> Layout:
    """Draw `count` cubes of distinct colours, at least `SPACING` apart, yaw uniform in ±`yaw` (rad)."""
    while True:  # a crowded start can leave no room for the last cube: begin again
        centres: list[np.ndarray] = []
        for _ in range(200):
            candidate = np.array([rng.uniform(*x_range), rng.uniform(*y_range)])
            if all(np.hypot(*(candidate - other)) >= SPACING for other in centres):
                centres.append(candidate)
            if len(centres) == count:
                position = np.column_stack([np.array(centres), np.full(count, CUBE_HALF)])
                return Layout(position, rng.uniform(-yaw, yaw, count), rng.permutation(MAX_OBJECTS)[:count])


@dataclass(frozen=True)
class Look:
    """Strength of the visual variation, each 0 (off) to 1."""

    light: float = 0.0
    colour_jitter: float = 0.0
    camera_jitter: float = 0.0
    texture: bool = False


def apply_look(
    model: mujoco.MjModel,
    base: mujoco.MjModel,
    rng: np.random.Generator,
    look: Look,
    colour: np.ndarray,
    cubes: np.ndarray,
    table: int,
) -> None:
    """Write this episode's colours, light, camera poses and table texture into the model, starting from `base`.

    At strength 1 the light's power varies by ±50 % (each channel ±15 %) and its direction by about 35 degrees, colours
    by ±.15 a channel, cameras by 1 cm and 1 degree (standard deviations).
    """
    tint, lamp, sway, cloth = rng.spawn(4)
    _paint(model, tint, look.colour_jitter, colour, cubes)
    table_tint = base.geom_rgba[table, :3] + look.colour_jitter * tint.uniform(-0.15, 0.15, 3)
    model.geom_rgba[table, :3] = np.clip(table_tint, 0, 1)
    power = (1 + look.light * lamp.uniform(-0.5, 0.5)) * (1 + look.light * lamp.uniform(-0.15, 0.15, 3))
    model.light_diffuse[0] = base.light_diffuse[0] * power
    direction = base.light_dir[0] + look.light * np.append(lamp.uniform(-0.5, 0.5, 2), 0.0)
    model.light_dir[0] = direction / np.linalg.norm(direction)
    model.cam_pos[:] = base.cam_pos + look.camera_jitter * sway.normal(0, 0.01, base.cam_pos.shape)
    for camera in range(model.ncam):
        turn = np.zeros(4)
        mujoco.mju_axisAngle2Quat(turn, _unit(sway), look.camera_jitter * sway.normal(0, np.deg2rad(1)))
        mujoco.mju_mulQuat(model.cam_quat[camera], base.cam_quat[camera], turn)
    chosen = cloth.integers(-1, model.nmat) if look.texture else -1
    model.geom_matid[table] = chosen
    if chosen >= 0:
        model.geom_rgba[table, :3] = 1.0


def _paint(
    model: mujoco.MjModel, rng: np.random.Generator, strength: float, colour: np.ndarray, cubes: np.ndarray
) -> None:
    shades = np.array([RGB[COLOURS[index]] for index in colour])
    shades = shades + strength * rng.uniform(-0.15, 0.15, shades.shape)
    model.geom_rgba[cubes[: len(colour)], :3] = np.clip(shades, 0, 1)
    model.geom_rgba[cubes, 3] = (np.arange(len(cubes)) < len(colour)).astype(np.float32)


def _unit(rng: np.random.Generator) -> np.ndarray:
    vector = rng.normal(size=3)
    return vector / np.linalg.norm(vector)
