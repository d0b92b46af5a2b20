"""Where images can be drawn: not in a forked child, not in a second thread, not without OpenGL; each is said."""

import subprocess
import sys
import threading

import numpy as np

from robotattn.envs import CameraConfig, EnvConfig, make_env

SMALL = (CameraConfig("front", 32, 32), CameraConfig("wrist", 48, 24))

CHILD = """
import multiprocessing
from robotattn.envs import CameraConfig, EnvConfig, make_env

def draw(env, queue):
    try:
        env = env or make_env(CONFIG)
        env.reset(seed=0)
        queue.put("rendered")
    except RuntimeError as error:
        queue.put(str(error))

def fork(env):
    queue = context.Queue()
    process = context.Process(target=draw, args=(env, queue))
    process.start()
    print(queue.get(timeout=20))
    process.join(20)

CONFIG = EnvConfig(cameras=(CameraConfig("front", 32, 32),))
context = multiprocessing.get_context("fork")
env = make_env(CONFIG)
env.reset(seed=0)
fork(env)
fork(None)
env.close()
fork(None)
"""


def test_rendering_in_a_forked_child_is_refused_and_never_hangs():
    """O02: display state made in the parent cannot be used in a forked child: not with the parent's environment, not
    with one of its own, and not after the parent has closed its last one."""
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, timeout=90)
    said = done.stdout.splitlines()
    assert len(said) == 3, done.stderr
    assert all("another process" in line and "'spawn'" in line for line in said)


def test_rendering_in_a_second_thread_is_refused():
    env = make_env(EnvConfig(cameras=SMALL))
    env.reset(seed=0)
    said: list[str] = []

    def render() -> None:
        try:
            env.step(np.zeros(5))
        except RuntimeError as error:
            said.append(str(error))

    thread = threading.Thread(target=render)
    thread.start()
    thread.join(20)
    assert not thread.is_alive() and "another thread" in said[0]


def test_a_missing_gl_library_is_named_with_the_command_that_installs_it():
    code = (
        "import os; os.environ['MUJOCO_GL'] = 'osmesa'; os.environ['PYOPENGL_PLATFORM'] = 'osmesa'\n"
        "import ctypes.util; ctypes.util.find_library = lambda name: None\n"
        "from robotattn.envs import CameraConfig, EnvConfig, make_env\n"
        "make_env(EnvConfig(cameras=(CameraConfig('front', 32, 32),))).reset(seed=0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "OpenGL could not be started (MUJOCO_GL=osmesa)" in done.stderr and "apt-get install" in done.stderr
