"""The tabletop scene as one MuJoCo model: arm, table, cameras, and six cubes of which some are present."""

from dataclasses import dataclass
from functools import cached_property

import mujoco
import numpy as np

from robotattn.assets import path
from robotattn.types import MAX_OBJECTS

HOME = np.array(
    [0.0, -0.353, 0.0, -2.521, 0.0, 2.168, 0.785]
)  # (rad): tool at x .42, z .30 m, out of the top camera's way
FINGER_TRAVEL = 0.04  # of each finger (m)
CUBE_HALF = 0.02  # (m)
CUBE_MASS = 0.05  # (kg)
PARKED = np.array([0.5, 0.0, -0.5])  # under the table, out of every camera's sight (m)
BELT_MASS = 20.0  # (kg): 400 times a cube, so that neither cubes nor fingers slow it
BELT_RESPONSE = 0.05  # (s): a reversal from 15 cm/s stays below the 9.8 m/s^2 at which a cube would slide
BELT_HALF = np.array([0.15, 2.0, 0.01])  # longer than it and the cubes on it travel in an episode (m)
BELT_X = 0.46  # of its middle line; its top is where the table's would be (m)
SUNK = 0.002  # the table below the belt (m)


def build(cubes: int = MAX_OBJECTS, image_size: tuple[int, int] = (640, 480), belt: bool = False) -> mujoco.MjModel:
    """Compile the scene with room for images up to (width, height) pixels, with a belt along y on request."""
    spec = mujoco.MjSpec.from_file(str(path("tabletop/scene.xml")))
    for index in range(cubes):
        _add_cube(spec, index)
    if belt:
        _add_belt(spec)
    width, height = image_size
    spec.visual.global_.offwidth = max(
        width, spec.visual.global_.offwidth
    )  # grows to the largest camera, never shrinks
    spec.visual.global_.offheight = max(height, spec.visual.global_.offheight)
    return spec.compile()


def _add_cube(spec: mujoco.MjSpec, index: int) -> None:
    body = spec.worldbody.add_body(name=f"cube{index}", pos=PARKED + np.array([0, 0.06 * index, 0]))
    body.add_freejoint(name=f"cube{index}")
    body.add_geom(
        name=f"cube{index}",
        type=mujoco.mjtGeom.mjGEOM_BOX,
        size=[CUBE_HALF] * 3,
        mass=CUBE_MASS,
        condim=4,
        friction=[1.0, 0.005, 0.0001],
        contype=1,
        conaffinity=3,
    )


def _add_belt(spec: mujoco.MjSpec) -> None:
    """Add a heavy body on a slide with a velocity actuator: what lies on it is carried by friction.

    A mocap body moved from outside would not do: it has no velocity, so it drags nothing.
    """
    spec.geom("table").pos[2] -= SUNK
    body = spec.worldbody.add_body(name="belt", pos=[BELT_X, 0.0, -BELT_HALF[2]])
    body.add_joint(name="belt", type=mujoco.mjtJoint.mjJNT_SLIDE, axis=[0, 1, 0])
    body.add_geom(
        name="belt",
        type=mujoco.mjtGeom.mjGEOM_BOX,
        size=BELT_HALF,
        mass=BELT_MASS,
        contype=1,
        conaffinity=3,
        rgba=[0.24, 0.25, 0.28, 1.0],
    )
    spec.add_exclude(bodyname1="world", bodyname2="belt")  # it slides through the table, not on it
    gain = BELT_MASS / BELT_RESPONSE
    motor = spec.add_actuator(name="belt", target="belt", trntype=mujoco.mjtTrn.mjTRN_JOINT)
    motor.set_to_velocity(kv=gain)


@dataclass(frozen=True)
class Index:
    """Where things are in the model's arrays."""

    model: mujoco.MjModel

    def _of(self, kind: mujoco.mjtObj, name: str) -> int:
        found = mujoco.mj_name2id(self.model, kind, name)
        if found < 0:
            raise KeyError(f"no {kind.name} named {name!r} in the scene")
        return found

    @cached_property
    def tool(self) -> int:
        return self._of(mujoco.mjtObj.mjOBJ_SITE, "tool")

    @cached_property
    def cube_bodies(self) -> np.ndarray:
        return np.array([self._of(mujoco.mjtObj.mjOBJ_BODY, f"cube{i}") for i in range(MAX_OBJECTS)])

    @cached_property
    def cube_geoms(self) -> np.ndarray:
        return np.array([self._of(mujoco.mjtObj.mjOBJ_GEOM, f"cube{i}") for i in range(MAX_OBJECTS)])

    @cached_property
    def cube_qpos(self) -> np.ndarray:
        """First of the seven position coordinates of each cube."""
        return self.model.jnt_qposadr[self.model.body_jntadr[self.cube_bodies]]

    @cached_property
    def cube_dof(self) -> np.ndarray:
        """First of the six velocity coordinates of each cube: its linear velocity comes first, in the world frame."""
        return self.model.body_dofadr[self.cube_bodies]

    @cached_property
    def belt(self) -> tuple[int, int, int]:
        """The belt's position coordinate, velocity coordinate and control."""
        joint = self._of(mujoco.mjtObj.mjOBJ_JOINT, "belt")
        control = self._of(mujoco.mjtObj.mjOBJ_ACTUATOR, "belt")
        return int(self.model.jnt_qposadr[joint]), int(self.model.jnt_dofadr[joint]), control

    @cached_property
    def pads(self) -> tuple[int, int]:
        return self._of(mujoco.mjtObj.mjOBJ_GEOM, "left_pad"), self._of(mujoco.mjtObj.mjOBJ_GEOM, "right_pad")

    @cached_property
    def fingers(self) -> tuple[int, int, int]:
        """The other parts of the hand that may touch what it holds."""
        names = ("left_finger", "right_finger", "palm")
        left, right, palm = (self._of(mujoco.mjtObj.mjOBJ_GEOM, name) for name in names)
        return left, right, palm

    @cached_property
    def table(self) -> int:
        return self._of(mujoco.mjtObj.mjOBJ_GEOM, "table")

    def camera(self, name: str) -> int:
        return self._of(mujoco.mjtObj.mjOBJ_CAMERA, name)
