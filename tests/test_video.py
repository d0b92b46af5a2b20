"""Videos: true colours on every path from the simulator to the film, and no lost frames (O19)."""

from dataclasses import replace

import cv2
import matplotlib.image
import numpy as np
import pytest

from robotattn import rollouts, video
from robotattn.agents import ConstantAgent
from robotattn.data import store
from robotattn.data.record import RecordConfig, record
from robotattn.data.windows import Windows
from robotattn.envs import CameraConfig, EnvConfig, make_env
from robotattn.envs.experts import PickUpExpert
from robotattn.loop import run_episodes
from robotattn.seeds import stream
from robotattn.tokens.text import default_tokenizer
from robotattn.types import Observation

SEEDS = stream("evaluate", 5, 20)


def half_red_half_blue(time):
    image = np.zeros((64, 64, 3), np.uint8)
    image[:, :32, 0] = image[:, 32:, 2] = 255
    return Observation({"front": image, "wrist": image}, np.zeros(13, np.float32), "", None, time)


def test_red_stays_red_in_the_video_and_in_the_filmstrip(tmp_path):
    observations = [half_red_half_blue(k / 10) for k in range(7)]
    frames = [video.picture(observation, "pick up the red cube 红") for observation in observations]
    assert video.write(tmp_path / "film.mp4", frames, 10) == 7
    capture = cv2.VideoCapture(str(tmp_path / "film.mp4"))  # OpenCV hands out blue, green, red
    good, frame = capture.read()
    capture.release()
    assert good and frame.shape[:2] == frames[0].shape[:2]
    np.testing.assert_allclose(frame[120, 30], [0, 0, 255], atol=12)
    np.testing.assert_allclose(frame[120, 210], [255, 0, 0], atol=12)
    np.testing.assert_allclose(video.read(tmp_path / "film.mp4")[3][120, 30], [255, 0, 0], atol=12)
    video.write_png(tmp_path / "strip.png", video.filmstrip(observations))
    strip = matplotlib.image.imread(tmp_path / "strip.png")  # another library, red first
    np.testing.assert_allclose(strip[80, 20], [1, 0, 0], atol=0.01)
    np.testing.assert_allclose(strip[80, 140], [0, 0, 1], atol=0.01)
    assert strip.shape == (2 * video.STRIP_SIDE + video.CAPTION_HEIGHT, 6 * video.STRIP_SIDE, 3)


def test_a_filmstrip_shows_all_of_a_wide_camera():
    """Red at the left border and blue at the right one, of an image twice as wide as it is high."""
    image = np.zeros((48, 96, 3), np.uint8)
    image[:, :12], image[:, -12:] = (250, 0, 0), (0, 0, 250)
    seen = Observation({"front": image, "wrist": image[:, 24:72]}, np.zeros(13, np.float32), "", None, 0.0)
    strip = video.filmstrip([seen, seen])
    assert strip.shape == (80 + 160 + video.CAPTION_HEIGHT, 2 * 160, 3)
    assert strip[40, 5].argmax() == strip[40, 165].argmax() == 0 and strip[40, 154].argmax() == 2
    assert min(strip[40, 5].max(), strip[40, 154].max()) > 240


def test_a_rendered_red_cube_is_red_in_the_video(tmp_path):
    env = make_env(EnvConfig(cameras=(CameraConfig("top", 96, 96),), time_limit=0.3))
    agent = ConstantAgent(np.zeros(5), 0.1)
    episode = next(run_episodes([env], agent, SEEDS[:1], keep=lambda seed: True))
    labels = episode.rows[0].labels
    env.close()
    frames = [video.picture(step.observation) for step in episode.rows]
    video.write(tmp_path / "film.mp4", frames, 10)
    shown, live = video.read(tmp_path / "film.mp4")[0], episode.rows[0].observation.images["top"]
    for slot in np.flatnonzero(labels["present"] & labels["visible"]["top"]):
        u, v = labels["pixel"]["top"][slot]
        there = live[int(v * 96), int(u * 96)].astype(int)
        np.testing.assert_allclose(shown[int(v * 240), int(u * 240)], there, atol=40)
        assert np.argmax(there) == {0: 0, 1: 1, 2: 2}.get(int(labels["colour"][slot]), np.argmax(there))


def test_red_and_blue_are_the_same_live_in_the_dataset_in_training_and_in_the_video(tmp_path):
    """O19: one scene with all six cubes, and the mean colour around the red and the blue one on every path."""
    world = EnvConfig(cameras=(CameraConfig("top", 96, 96),), min_objects=6, max_objects=6)
    record(RecordConfig(out=tmp_path / "demos", env=world, episodes=1, noise=0.0, workers=1))
    stored = store.read_episode(store.episode_path(tmp_path / "demos", 0))
    windows = Windows(tmp_path / "demos", 1, ("top",), "tool", tokenizer=default_tokenizer())
    env = make_env(world)
    seeds = [stored.attributes["seed"]]
    episode = next(run_episodes([env], PickUpExpert([env]), seeds, keep=lambda seed: True))
    env.close()
    film = rollouts.film(tmp_path / "videos", 0, episode, 10)
    pictures = {
        "live": episode.rows[0].observation.images["top"],
        "dataset": stored.columns["observations/images/top"][0],
        "training": windows.batch(np.array([0]), np.random.default_rng(0))["images"]["top"][0].numpy(),
        "video": video.read(tmp_path / film["video"])[0][: video.PICTURE_HEIGHT],
    }
    labels = episode.rows[0].labels
    for name, picture in pictures.items():
        side = len(picture)
        red, blue = (
            picture[int(v * side) - 1 : int(v * side) + 1, int(u * side) - 1 : int(u * side) + 1].mean(axis=(0, 1))
            for u, v in (labels["pixel"]["top"][list(labels["colour"]).index(index)] for index in (0, 2))
        )
        assert red[0] > 2 * red[2] and blue[2] > 2 * blue[0], (name, red, blue)
    np.testing.assert_array_equal(pictures["dataset"], pictures["live"])
    np.testing.assert_array_equal(pictures["training"], pictures["live"])
    whole = [picture.mean(axis=(0, 1)) for picture in pictures.values()]
    np.testing.assert_allclose(whole[3], whole[0], atol=3)


def test_a_video_that_lost_frames_is_an_error(tmp_path, monkeypatch):
    frames = [video.picture(half_red_half_blue(0.0))] * 3
    monkeypatch.setattr(video, "count", lambda path: 2)
    with pytest.raises(video.VideoError, match="2 frames can be read back, 3 were written"):
        video.write(tmp_path / "film.mp4", frames, 10)
    assert not (tmp_path / "film.mp4").exists()
    with pytest.raises(video.VideoError, match="no camera"):
        video.picture(replace(half_red_half_blue(0.0), images={}))
