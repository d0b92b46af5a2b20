"""The tabletop world as a Gymnasium environment: everything that the tasks share.

Observation (dictionary)

| key | type, shape | meaning |
|---|---|---|
| state | float32 [13] | joint positions 0-6 (rad), finger width 7 (m), tool x y z 8-10 (m), sin, cos of its yaw 11-12 |
| velocity | float32 [7] | joint velocities (rad/s) |
| time | float64 [1] | seconds since reset, a multiple of the physics step of 2 ms |
| instruction | text | names the target, English or Chinese |
| images | uint8 [height, width, 3] a camera | RGB, first row at the top |
| depth, segmentation | on request, a camera | metres; object slot behind each pixel, -1 for anything else |
| objects | float32 [6, 10], on request | x, y, z (m), yaw (rad), colour one-hot; absent slots are zero |

Action, tool mode

| index | name | min | max | unit |
|---|---|---|---|---|
| 0-2 | dx, dy, dz: target relative to the tool now, world axes | -0.1 | 0.1 | m |
| 3 | dyaw | -0.5 | 0.5 | rad |
| 4 | gripper: 0 closed, 1 open | 0 | 1 | |

Action, joint mode

| index | name | min | max | unit |
|---|---|---|---|---|
| 0-6 | joint position targets | joint limits | joint limits | rad |
| 7 | gripper: 0 closed, 1 open | 0 | 1 | |

Actions beyond the bounds are clipped, non-finite ones are refused with ValueError. `step` never resets.

`step` is `send`, `advance`, `end_tick`, `observe`. A loop with a clock of its own calls these four itself, so that an
action can arrive, or a sensor look, in the middle of a control tick; physics does not depend on how it is cut.
`send` is `controls`, then `apply`: a loop with a safety filter puts it between the two.
"""

import copy
from abc import abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import gymnasium as gym
import mujoco
import numpy as np

from robotattn import instructions
from robotattn.control.safety import Workspace, require_finite
from robotattn.envs import sensors
from robotattn.envs.arm import Arm
from robotattn.envs.cameras import CameraConfig, Renderer
from robotattn.envs.randomise import X_RANGE, Y_RANGE, Layout, Look, Range, apply_look, draw_layout, generator
from robotattn.envs.scene import FINGER_TRAVEL, HOME, PARKED, Index, build
from robotattn.types import COLOURS, MAX_OBJECTS, ActionMode

TOOL_LIMIT = np.array([0.1, 0.1, 0.1, 0.5])  # of one command (m, m, m, rad)
PHYSICS_HZ = 500


@dataclass(frozen=True)
class EnvConfig:
    """What an environment is made of."""

    task: Literal["pick_up", "pick_moving", "pick_reversing", "pick_disturbed"] = "pick_up"
    """Which task: cubes at rest, on a belt, on a belt that reverses twice, or the named one jumps when reached for."""
    hz: int = 10
    """Control rate (Hz); must divide the physics rate of 500 Hz."""
    time_limit: float = 6.0
    """Seconds until an episode is cut."""
    action_mode: ActionMode = "tool"
    """tool: end-effector targets relative to the tool; joint: absolute joint targets."""
    cameras: tuple[CameraConfig, ...] = ()
    """Cameras to render, each with its own size."""
    object_tokens: bool = False
    """Give object poses and colours in the observation (privileged)."""
    min_objects: int = 2
    """Fewest cubes."""
    max_objects: int = 5
    """Most cubes."""
    yaw: float = 0.5
    """Cubes are turned by up to this much either way (rad)."""
    light: float = 0.0
    """Strength of light variation, 0 to 1 (above 1 is allowed for stress tests)."""
    colour_jitter: float = 0.0
    """Strength of colour variation, 0 to 1."""
    camera_jitter: float = 0.0
    """Strength of camera pose variation, 0 to 1."""
    texture: bool = False
    """Draw a table texture for each episode."""
    language: Literal["en", "zh", "both"] = "both"
    """Language of the instructions."""
    phrases: Literal["train", "heldout"] = "train"
    """Which set of sentence templates."""

    def __post_init__(self) -> None:
        if self.hz < 1 or PHYSICS_HZ % self.hz:
            allowed = [hz for hz in range(1, PHYSICS_HZ + 1) if PHYSICS_HZ % hz == 0]
            raise ValueError(
                f"hz: {self.hz} does not divide the physics rate of {PHYSICS_HZ} Hz; allowed are {allowed}"
            )
        if not 1 <= self.min_objects <= self.max_objects <= MAX_OBJECTS:
            raise ValueError(
                f"min_objects, max_objects: {self.min_objects}, {self.max_objects}, "
                f"allowed is 1 <= min <= max <= {MAX_OBJECTS}"
            )
        if not 0 < self.time_limit <= 600:
            raise ValueError(f"time_limit: {self.time_limit} s, allowed is above 0 and up to 600")
        if not 0 <= self.yaw <= np.pi:
            raise ValueError(f"yaw: {self.yaw} rad, allowed is 0 to pi")
        for name in ("light", "colour_jitter", "camera_jitter"):
            if not 0 <= getattr(self, name) <= 2:
                raise ValueError(f"{name}: {getattr(self, name)}, allowed is 0 to 2")
        names = [camera.name for camera in self.cameras]
        if len(set(names)) < len(names) or not set(names) <= set(sensors.CAMERAS):
            raise ValueError(f"cameras: {names}, allowed are {list(sensors.CAMERAS)}, each at most once")


class TabletopEnv(gym.Env[dict[str, Any], np.ndarray]):
    """Arm, table and cubes. A task subclass says what success is."""

    belt: ClassVar[bool] = False  # whether the cubes stand on a belt
    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012 (Gymnasium's own convention)

    def __init__(self, config: EnvConfig | None = None, render_mode: str | None = None) -> None:
        self.config = config or EnvConfig()
        self.render_mode = render_mode
        largest = [max((getattr(c, side) for c in self.config.cameras), default=0) for side in ("width", "height")]
        self.model = build(image_size=(largest[0], largest[1]), belt=self.belt)
        self.base_model = copy.copy(self.model)
        self.data = mujoco.MjData(self.model)
        self.index = Index(self.model)
        self.arm = Arm()
        self.workspace = Workspace()
        self.renderer = Renderer(self.model)
        self.observation_space = sensors.observation_space(self.config)
        self.action_space = self._action_space()
        self.substeps = PHYSICS_HZ // self.config.hz
        self.max_ticks = max(1, round(self.config.time_limit * self.config.hz))
        self.episode_seed = -1
        self.expert_joint: np.ndarray | None = None  # set by an expert: the joint targets of its clean command

    def _action_space(self) -> gym.spaces.Box:
        if self.config.action_mode == "tool":
            low, high = np.append(-TOOL_LIMIT, 0.0), np.append(TOOL_LIMIT, 1.0)
        else:
            low, high = np.append(self.arm.low, 0.0), np.append(self.arm.high, 1.0)
        return gym.spaces.Box(low.astype(np.float32), high.astype(np.float32), dtype=np.float32)

    # --- episode -----------------------------------------------------------------------------------------------------

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start the episode of this seed. options: objects (int), other (bool: name another cube of the same scene)."""
        super().reset(seed=seed)
        options = options or {}
        unknown = set(options) - {"objects", "other"}
        if unknown:
            raise ValueError(f"options: {sorted(unknown)} not known, allowed are ['objects', 'other']")
        self.episode_seed = int(seed) if seed is not None else int(self.np_random.integers(2**62))
        self.layout = self._draw_layout(options.get("objects"))
        look = Look(self.config.light, self.config.colour_jitter, self.config.camera_jitter, self.config.texture)
        apply_look(
            self.model, self.base_model, generator(self.episode_seed, "look"), look,
            self.layout.colour, self.index.cube_geoms, self.index.table,
        )  # fmt: skip
        self._draw_instruction(bool(options.get("other", False)))
        self._place()
        self.tick, self.physics_steps, self.expert_joint = 0, 0, None
        self.start_task()
        return self.observe(), self._info("running")

    def _draw_layout(self, objects: int | None) -> Layout:
        rng = generator(self.episode_seed, "layout")
        count = int(rng.integers(self.config.min_objects, self.config.max_objects + 1))
        if objects is not None and not 1 <= objects <= MAX_OBJECTS:
            raise ValueError(f"options: objects = {objects}, allowed is 1 to {MAX_OBJECTS}")
        return draw_layout(rng, objects or count, self.config.yaw, *self.start_area())

    def start_area(self) -> tuple[Range, Range]:
        """Where cubes may stand at the start: the ranges of x and y (m)."""
        return X_RANGE, Y_RANGE

    def _draw_instruction(self, other: bool) -> None:
        rng = generator(self.episode_seed, "instruction")
        count = len(self.layout.colour)
        self.target = int(rng.integers(count))
        if other:
            if count < 2:
                raise ValueError("options: other = True needs at least two cubes in the scene")
            self.target = (self.target + 1) % count
        colour = COLOURS[self.layout.colour[self.target]]
        self.instruction, self.language = instructions.draw(colour, rng, self.config.language, self.config.phrases)

    def _place(self) -> None:
        mujoco.mj_resetData(self.model, self.data)  # warm start, controls and time included
        self.data.qpos[:7] = self.data.ctrl[:7] = HOME
        self.data.qpos[7:9] = self.data.ctrl[7] = FINGER_TRAVEL
        for slot in range(MAX_OBJECTS):
            self._place_cube(slot)
        self.start_motion()
        mujoco.mj_forward(self.model, self.data)

    def _place_cube(self, slot: int) -> None:
        present = slot < len(self.layout.colour)
        address, geom, body = (a[slot] for a in (self.index.cube_qpos, self.index.cube_geoms, self.index.cube_bodies))
        self.model.geom_contype[geom], self.model.geom_conaffinity[geom] = (1, 3) if present else (0, 0)
        self.model.body_gravcomp[body] = 0.0 if present else 1.0  # an absent cube floats where it is parked
        position = self.layout.position[slot] if present else PARKED + np.array([0, 0.06 * slot, 0])
        yaw = self.layout.yaw[slot] if present else 0.0
        self.data.qpos[address : address + 7] = [*position, np.cos(yaw / 2), 0, 0, np.sin(yaw / 2)]

    def step(self, action: np.ndarray) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Advance one control period; see the module for the action."""
        self.send(action)
        self.advance(self.substeps)
        terminated, truncated, info = self.end_tick()
        return self.observe(), float(terminated), terminated, truncated, info

    def advance(self, steps: int) -> None:
        """Run physics steps of 2 ms, with what happens by itself at their boundaries, then refresh what is seen.

        Any split of the steps over calls gives the same bits: what is refreshed here is not part of the state.
        """
        while steps > 0:
            run = min(steps, self.event_within())
            mujoco.mj_step(self.model, self.data, nstep=run)
            self.physics_steps, steps = self.physics_steps + run, steps - run
            self.world_event()
        self.refresh()

    def refresh(self) -> None:
        """Bring body, tool and camera poses to the state now: after mj_step they belong to the one before."""
        mujoco.mj_kinematics(self.model, self.data)
        mujoco.mj_camlight(self.model, self.data)

    def end_tick(self) -> tuple[bool, bool, dict[str, Any]]:
        """Count a control tick and judge: whether the task ended the episode, whether the clock did, and info."""
        mujoco.mj_forward(self.model, self.data)  # contacts, too, belong to an earlier state until then
        self.tick += 1
        success = self.judge()
        truncated = not success and self.tick >= self.max_ticks  # at a tie success wins
        return success, truncated, self._info("success" if success else "time_limit" if truncated else "running")

    @property
    def time(self) -> float:
        """Seconds since reset: the physics steps counted, without the rounding errors of a running sum."""
        return self.physics_steps / PHYSICS_HZ

    def send(self, action: np.ndarray) -> None:
        """Set the actuator targets from an action; in tool mode it is relative to the tool pose now."""
        self.apply(self.controls(action))

    def controls(self, action: np.ndarray) -> np.ndarray:
        """What an action asks for now: seven joint targets (rad) and the gripper (0 closed, 1 open), float64 ``[8]``.

        Changes nothing, so that a safety filter can stand between this and `apply`.
        """
        action = require_finite(action, self.action_space.shape[0])  # type: ignore[index]
        action = np.clip(action, self.action_space.low, self.action_space.high)  # type: ignore[attr-defined]
        if self.config.action_mode == "tool":
            return np.append(self.joints_for(self.tool_pose() + action[:4]), action[4])
        return action

    def apply(self, controls: np.ndarray) -> None:
        """Set the actuator targets: ``[8]``, as `controls` gives them."""
        self.data.ctrl[:7] = controls[:7]
        self.data.ctrl[7] = controls[7] * FINGER_TRAVEL

    def joints_for(self, pose: np.ndarray) -> np.ndarray:
        """Joint targets ``[7]`` for a tool pose ``[4]``, kept inside the workspace."""
        wanted = np.append(self.workspace.clip(pose[:3]), pose[3])
        return self.arm.solve(wanted, self.data.qpos[:7])

    # --- what the task defines ---------------------------------------------------------------------------------------

    def start_motion(self) -> None:
        """Give what moves by itself its velocity."""

    def event_within(self) -> int:
        """Physics steps that may run before the world has to be looked at for an event, at least 1."""
        return PHYSICS_HZ

    def world_event(self) -> None:
        """Let happen what is due at this boundary of two physics steps."""

    @abstractmethod
    def start_task(self) -> None:
        """Forget the last episode's progress."""

    @abstractmethod
    def judge(self) -> bool:
        """Whether the task's strict predicate holds now; called once a tick."""

    @abstractmethod
    def failure(self) -> str:
        """In one word, how far the episode got."""

    # --- what is seen ------------------------------------------------------------------------------------------------

    def joints(self) -> np.ndarray:
        """Joint positions now ``[7]`` (rad)."""
        return self.data.qpos[:7].copy()

    def tool_pose(self) -> np.ndarray:
        """Tool pose now, ``[4]``."""
        return sensors.tool_pose(self.data, self.index)

    def observe(self, only: Collection[str] | None = None) -> dict[str, Any]:
        """What is seen at this instant, also in the middle of a tick; its `time` is exact. only: some sensors."""
        return sensors.observe(self, only)

    def labels(self) -> dict[str, Any]:
        """Privileged labels for training: object poses, velocities, colours, pixels; never seen by a policy."""
        return sensors.labels(self)

    def _info(self, reason: str) -> dict[str, Any]:
        colour = COLOURS[self.layout.colour[self.target]]
        failure = "" if reason == "success" else self.failure()
        episode = {"objects": len(self.layout.colour), "colour": colour, "language": self.language, "failure": failure}
        return {"success": reason == "success", "reason": reason, "episode": episode | self.story()}

    def story(self) -> dict[str, float | int | bool]:
        """What else there is to say of the episode, as plain numbers."""
        return {"time": self.time}

    def render(self) -> np.ndarray:
        """The front camera at 480 x 480, uint8 RGB."""
        camera = CameraConfig("front", 480, 480)
        return self.renderer.draw(self.data, self.index.camera("front"), camera)["rgb"]

    def close(self) -> None:
        self.renderer.close()
