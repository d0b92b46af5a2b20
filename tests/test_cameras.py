"""Images, depth, segmentation and projected labels."""

import gc
import shutil

import mujoco
import numpy as np
import psutil
import pytest

from robotattn.assets import path
from robotattn.envs import CameraConfig, EnvConfig, cameras, make_env, scene
from robotattn.envs.cameras import project
from robotattn.types import COLOURS


def test_every_camera_has_its_own_size_also_above_the_default_buffer():
    """O03: the offscreen buffer grows to the largest camera and never shrinks what the scene asks for."""
    large = EnvConfig(cameras=(CameraConfig("front", 1280, 720), CameraConfig("wrist", 64, 48)))
    images = make_env(large).reset(seed=0)[0]["images"]
    assert images["front"].shape == (720, 1280, 3) and images["wrist"].shape == (48, 64, 3)
    assert images["front"].dtype == np.uint8
    assert make_env(EnvConfig()).model.vis.global_.offwidth == 640


@pytest.mark.parametrize(
    ("asked", "buffer"), [((64, 64), (960, 540)), ((1280, 720), (1280, 720)), ((500, 800), (960, 800))]
)
def test_a_buffer_that_the_scene_declares_is_kept_or_grows(tmp_path, monkeypatch, asked, buffer):
    """O03: the scene's own 960 x 540."""
    for folder in ("panda", "tabletop"):
        shutil.copytree(path(folder), tmp_path / folder)
    text = (tmp_path / "tabletop/scene.xml").read_text()
    declared = '<visual>\n    <global offwidth="960" offheight="540"/>'
    (tmp_path / "tabletop/scene.xml").write_text(text.replace("<visual>", declared))
    monkeypatch.setattr(scene, "path", lambda name: tmp_path / name)
    env = make_env(EnvConfig(cameras=(CameraConfig("front", *asked),)))
    assert (env.model.vis.global_.offwidth, env.model.vis.global_.offheight) == buffer
    assert env.reset(seed=0)[0]["images"]["front"].shape == (asked[1], asked[0], 3)
    env.close()


def test_a_small_and_a_large_environment_share_the_process():
    """O03: making a larger camera after a smaller one must not spoil the smaller one's images."""
    small = make_env(EnvConfig(cameras=(CameraConfig("front", 32, 32),)))
    before = small.reset(seed=0)[0]["images"]["front"]
    make_env(EnvConfig(cameras=(CameraConfig("front", 900, 700),))).reset(seed=0)
    np.testing.assert_array_equal(small.reset(seed=0)[0]["images"]["front"], before)


def test_images_are_red_green_blue_with_the_first_row_on_top():
    """O19: on saturated colours a swapped channel shows at once."""
    env = make_env(EnvConfig(cameras=(CameraConfig("front", 96, 96),)))
    image = env.reset(seed=0, options={"objects": 6})[0]["images"]["front"]
    labels = env.labels()
    seen = {}
    for slot in range(6):
        column, row = (labels["pixel"]["front"][slot] * 96).astype(int)
        seen[COLOURS[labels["colour"][slot]]] = image[row, column].astype(int)
    assert seen["red"][0] > 2 * seen["red"][2] and seen["blue"][2] > 2 * seen["blue"][0]
    assert seen["green"][1] > 2 * seen["green"][0] and seen["yellow"][2] < seen["yellow"][1]


def test_projected_pixels_agree_with_the_segmentation_in_every_camera():
    three = tuple(CameraConfig(name, 160, 120, segmentation=True) for name in ("front", "top", "wrist"))
    env = make_env(EnvConfig(cameras=three))
    hits = 0
    for seed in range(6):
        observation, _ = env.reset(seed=seed)
        labels = env.labels()
        for name in ("front", "top", "wrist"):
            picture = observation["segmentation"][name]
            for slot in np.flatnonzero(labels["visible"][name]):
                rows, columns = np.nonzero(picture == slot)
                inside = (
                    rows.min(initial=9) > 2
                    and rows.max(initial=0) < 117
                    and columns.min(initial=9) > 2
                    and columns.max(initial=0) < 157
                )
                if len(rows) < 60 or not inside:
                    continue  # cut by the border or behind the arm
                centre = np.array([columns.mean() + 0.5, rows.mean() + 0.5]) / [160, 120]
                occluded = len(rows) < 0.6 * max(
                    (picture == other).sum() for other in np.flatnonzero(labels["present"])
                )
                if not occluded:
                    np.testing.assert_allclose(labels["pixel"][name][slot], centre, atol=0.02)
                    hits += 1
    assert hits > 30


def test_depth_is_in_metres_along_the_viewing_axis():
    env = make_env(EnvConfig(cameras=(CameraConfig("top", 64, 64, depth=True),)))
    observation, _ = env.reset(seed=0)
    corner = observation["depth"]["top"][2, 2]  # bare table: the camera hangs 1.6 m above it
    assert corner == pytest.approx(1.6, abs=2e-3)


def test_a_point_behind_the_camera_is_not_inside_the_image():
    env = make_env(EnvConfig())
    env.reset(seed=0)
    camera = mujoco.mj_name2id(env.model, mujoco.mjtObj.mjOBJ_CAMERA, "front")
    pixel, inside = project(env.data, env.model, camera, 1.0, np.array([[2.0, 0.0, 1.5], [0.5, 0.0, 0.0]]))
    assert inside.tolist() == [False, True]
    assert ((pixel >= 0) & (pixel <= 1)).all()


def test_two_hundred_environments_one_after_another_leave_memory_flat():
    """O04: one renderer a process, freed with its last environment."""
    config = EnvConfig(cameras=(CameraConfig("front", 64, 64),))

    def cycle(times: int) -> None:
        for seed in range(times):
            env = make_env(config)
            env.reset(seed=seed)
            env.step(np.zeros(5))
            env.render()
            env.close()

    cycle(10)
    gc.collect()
    before, users = psutil.Process().memory_info().rss, cameras._context.users
    cycle(200)
    gc.collect()
    assert psutil.Process().memory_info().rss - before < 50e6
    assert cameras._context.users == users


def test_two_hundred_resets_of_one_environment_leave_memory_flat():
    """O04: no renderer an episode."""
    env = make_env(EnvConfig(cameras=(CameraConfig("front", 64, 64), CameraConfig("wrist", 32, 32))))
    env.reset(seed=0)
    before, users = psutil.Process().memory_info().rss, cameras._context.users
    for seed in range(200):
        env.reset(seed=seed)
    assert psutil.Process().memory_info().rss - before < 50e6
    assert cameras._context.users == users
    env.close()


def test_a_closed_environment_says_so():
    env = make_env(EnvConfig(cameras=(CameraConfig("front", 32, 32),)))
    env.reset(seed=0)
    env.close()
    env.close()
    with pytest.raises(RuntimeError, match="closed"):
        env.step(np.zeros(5))
