"""Choose the OpenGL backend before MuJoCo is imported, and say what to do where there is none."""

import os


class RenderingError(RuntimeError):
    """Nothing can be drawn here, or not by this process or thread; the message says what to do."""


def choose_backend() -> None:
    """Set MUJOCO_GL and LP_NUM_THREADS if not set, then import mujoco; RenderingError where OpenGL is missing.

    Without a screen only EGL or OSMesa can draw, and software rendering on more than one thread is three times slower.
    """
    os.environ.setdefault("LP_NUM_THREADS", "1")
    if not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl")
    try:
        import mujoco  # noqa: F401  (it loads the backend's library at once)
    except (AttributeError, ImportError, OSError) as error:
        raise RenderingError(missing_gl_message(error)) from error


def missing_gl_message(error: BaseException) -> str:
    """Name the backend that failed and the command that installs it."""
    backend = os.environ.get("MUJOCO_GL", "not set")
    return (
        f"rendering: OpenGL could not be started (MUJOCO_GL={backend}): {error}. On Debian or Ubuntu: "
        "apt-get install -y libegl1 libgl1 libgl1-mesa-dri libglib2.0-0, then set MUJOCO_GL=egl and LP_NUM_THREADS=1"
    )
