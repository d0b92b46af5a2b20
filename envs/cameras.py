"""Rendering, behind one small class: one OpenGL context a process, shared by its environments.

An OpenGL context belongs to one thread of one process: using it from a forked child or a second thread would hang, so
both are refused with a message. Workers must be spawned; the context is made when the first image is asked for.
"""

import importlib
import os
import threading
from dataclasses import dataclass
from typing import Any

import mujoco
import numpy as np

from robotattn.envs.gl import RenderingError, missing_gl_message


@dataclass(frozen=True)
class CameraConfig:
    """One camera: its name in the scene and what it returns."""

    name: str
    """front, top or wrist."""
    width: int = 96
    """Pixels."""
    height: int = 96
    """Pixels."""
    depth: bool = False
    """Also return depth (m), float32 [height, width]."""
    segmentation: bool = False
    """Also return the object slot behind each pixel, int8 [height, width]: 0-5 cubes, -1 anything else."""

    def __post_init__(self) -> None:
        for name in ("width", "height"):
            if not 8 <= getattr(self, name) <= 4096:
                raise ValueError(f"{name}: {getattr(self, name)} pixels, allowed is 8 to 4096")


class _Context:
    """The OpenGL context of this process, as large as the largest image asked for so far."""

    def __init__(self) -> None:
        self.users = 0
        self.size = (0, 0)
        self._process: int | None = None  # where a context was first made; a fork inherits its display for good
        self._owner: tuple[int, int] | None = None
        self._gl: Any = None
        self._mjr: Any = None

    def use(self, model: mujoco.MjModel) -> Any:
        """Make the context current, creating or growing it; raise RenderingError where that cannot work."""
        me = (os.getpid(), threading.get_ident())
        forked = self._process is not None and self._process != me[0]
        if forked or (self._owner is not None and self._owner != me):
            where = "another process" if forked else "another thread"
            raise RenderingError(
                f"rendering: the OpenGL context was made in {where} and cannot be used here. "
                "Start workers with the 'spawn' method (never 'fork') and render in the thread that made the context."
            )
        wanted = (model.vis.global_.offwidth, model.vis.global_.offheight)
        if self._mjr is None or wanted[0] > self.size[0] or wanted[1] > self.size[1]:
            self._create(model, (max(wanted[0], self.size[0]), max(wanted[1], self.size[1])))
        self._gl.make_current()
        return self._mjr

    def _create(self, model: mujoco.MjModel, size: tuple[int, int]) -> None:
        self.free()
        saved = model.vis.global_.offwidth, model.vis.global_.offheight
        model.vis.global_.offwidth, model.vis.global_.offheight = size
        try:
            self._gl = _gl_context_class()(*size)
            self._gl.make_current()
            self._mjr = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_100.value)
        except Exception as error:
            self._gl = self._mjr = None
            raise RenderingError(missing_gl_message(error)) from error
        finally:
            model.vis.global_.offwidth, model.vis.global_.offheight = saved
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN.value, self._mjr)
        self._mjr.readDepthMap = mujoco.mjtDepthMap.mjDEPTH_ZERONEAR
        self.size, self._owner = size, (os.getpid(), threading.get_ident())
        self._process = os.getpid()

    def free(self) -> None:
        if self._mjr is not None and self._owner == (os.getpid(), threading.get_ident()):
            self._gl.make_current()
            self._mjr.free()
            self._gl.free()
        self._gl = self._mjr = self._owner = None
        self.size = (0, 0)

    def release(self) -> None:
        """One user less; the last one out frees the context."""
        self.users -= 1
        if self.users == 0:
            self.free()


_context = _Context()


def _gl_context_class() -> Any:
    """The context class that MUJOCO_GL asks for now: mujoco itself looks only once, when it is first imported."""
    backend = os.environ.get("MUJOCO_GL", "").lower()
    if backend in ("egl", "osmesa"):
        return importlib.import_module(f"mujoco.{backend}").GLContext
    return mujoco.GLContext


def gl_renderer() -> str:
    """Name of the OpenGL renderer that draws in this process ('not used' before the first image)."""
    if _context._mjr is None:
        return "not used"
    from OpenGL import GL

    _context._gl.make_current()
    return GL.glGetString(GL.GL_RENDERER).decode()


class Renderer:
    """Draws one environment's cameras. Cheap to make; the costly context behind it is shared and lazily created."""

    def __init__(self, model: mujoco.MjModel) -> None:
        self.model = model
        self._scene: Any = None
        self._option = mujoco.MjvOption()
        self._option.sitegroup[:] = 0
        self._camera = mujoco.MjvCamera()
        self._camera.type = mujoco.mjtCamera.mjCAMERA_FIXED
        self._closed = False

    def draw(self, data: mujoco.MjData, camera: int, config: CameraConfig) -> dict[str, np.ndarray]:
        """Render one camera: 'rgb' uint8 [height, width, 3] and, on request, 'depth' and 'segmentation'."""
        if self._closed:
            raise RenderingError("rendering: the environment was closed")
        context = self._begin(data, camera)
        rect = mujoco.MjrRect(0, 0, config.width, config.height)
        rgb = np.empty((config.height, config.width, 3), np.uint8)
        depth = np.empty((config.height, config.width), np.float32) if config.depth else None
        mujoco.mjr_render(rect, self._scene, context)
        mujoco.mjr_readPixels(rgb, depth, rect, context)
        result = {"rgb": np.ascontiguousarray(rgb[::-1])}  # OpenGL's first row is the lowest
        if depth is not None:
            result["depth"] = self._metres(depth[::-1])
        if config.segmentation:
            result["segmentation"] = self._segment(rect, context, rgb)
        return result

    def _begin(self, data: mujoco.MjData, camera: int) -> Any:
        context = _context.use(self.model)
        if self._scene is None:
            _context.users += 1
            self._scene = mujoco.MjvScene(self.model, maxgeom=200)
            for flag in (
                mujoco.mjtRndFlag.mjRND_SHADOW,
                mujoco.mjtRndFlag.mjRND_REFLECTION,
                mujoco.mjtRndFlag.mjRND_SKYBOX,
            ):
                self._scene.flags[flag] = False
        self._camera.fixedcamid = camera
        everything = mujoco.mjtCatBit.mjCAT_ALL.value
        mujoco.mjv_updateScene(self.model, data, self._option, None, self._camera, everything, self._scene)
        return context

    def _metres(self, depth: np.ndarray) -> np.ndarray:
        """Depth buffer (0 near, 1 far) as metres along the viewing axis."""
        extent = self.model.stat.extent
        near, far = self.model.vis.map.znear * extent, self.model.vis.map.zfar * extent
        return (near / (1.0 - depth.astype(np.float64) * (1.0 - near / far))).astype(np.float32)

    def _segment(self, rect: mujoco.MjrRect, context: Any, rgb: np.ndarray) -> np.ndarray:
        self._scene.flags[mujoco.mjtRndFlag.mjRND_SEGMENT] = True
        self._scene.flags[mujoco.mjtRndFlag.mjRND_IDCOLOR] = True
        try:
            mujoco.mjr_render(rect, self._scene, context)
            mujoco.mjr_readPixels(rgb, None, rect, context)
        finally:
            self._scene.flags[mujoco.mjtRndFlag.mjRND_SEGMENT] = False
            self._scene.flags[mujoco.mjtRndFlag.mjRND_IDCOLOR] = False
        code = rgb[::-1].astype(np.int32) @ np.array([1, 256, 65536])
        slots = np.full(self._scene.ngeom + 1, -1, np.int8)  # entry 0: background
        for geom in self._scene.geoms[: self._scene.ngeom]:
            if geom.objtype == mujoco.mjtObj.mjOBJ_GEOM and geom.segid >= 0:
                name = mujoco.mj_id2name(self.model, mujoco.mjtObj.mjOBJ_GEOM, geom.objid) or ""
                if name.startswith("cube"):
                    slots[geom.segid + 1] = int(name[4:])
        return slots[np.where(code < len(slots), code, 0)]

    def close(self) -> None:
        if self._scene is not None and not self._closed:
            self._scene = None
            _context.release()
        self._closed = True


def project(
    data: mujoco.MjData, model: mujoco.MjModel, camera: int, aspect: float, points: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Where points ``[N, 3]`` (m) appear in a camera: (u right, v down) in [0, 1] of the image, and whether inside.

    Points behind the camera or outside the image are clipped to its border and marked as not inside.
    """
    local = (points - data.cam_xpos[camera]) @ data.cam_xmat[camera].reshape(3, 3)  # x right, y up, -z forward
    ahead = np.maximum(-local[:, 2], 1e-6)
    half = np.tan(np.deg2rad(model.cam_fovy[camera]) / 2)
    u = 0.5 + local[:, 0] / ahead / (2 * half * aspect)
    v = 0.5 - local[:, 1] / ahead / (2 * half)
    pixel = np.stack([u, v], axis=1)
    inside = (local[:, 2] < 0) & (pixel >= 0).all(axis=1) & (pixel <= 1).all(axis=1)
    return np.clip(pixel, 0, 1).astype(np.float32), inside
