"""Verification: a good dataset passes, and every way of spoiling one is found and named."""

import re

import numpy as np
import pytest

from robotattn.data import store
from robotattn.data.record import RecordConfig, record
from robotattn.data.verify import copied_state, replay_problems, verify
from robotattn.envs import EnvConfig, make_env
from robotattn.types import ActionMode

MODES: tuple[ActionMode, ...] = ("tool", "joint")


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """Three episodes for each action mode."""
    folders = {}
    for mode in MODES:
        folders[mode] = tmp_path_factory.mktemp(mode)
        record(RecordConfig(out=folders[mode], env=EnvConfig(action_mode=mode), episodes=3, workers=1))
    return folders


@pytest.fixture
def spoilt(good, tmp_path):
    """Return a function that changes episode 1 of a copy, manifest included, and gives the folder."""

    def spoil(change, mode="tool", relist=True):
        for path in good[mode].iterdir():
            (tmp_path / path.name).write_bytes(path.read_bytes())
        episode = store.read_episode(store.episode_path(tmp_path, 1))
        columns, about = dict(episode.columns), dict(episode.attributes)
        change(columns, about)
        line = store.write_episode(tmp_path, 1, columns, about)
        lines = {line["index"]: line for line in store.read_manifest(tmp_path)} | ({1: line} if relist else {})
        store.write_manifest(tmp_path, lines)
        return tmp_path

    return spoil


def problems(folder, **options):
    bad = verify(folder, **options)["bad"]
    assert all("episode_000001.hdf5: " in problem for problem in bad)
    return " | ".join(bad)


@pytest.mark.parametrize("mode", MODES)
def test_a_recorded_dataset_passes_bit_for_bit(good, mode):
    told = []
    report = verify(good[mode], lambda *news: told.append(news))
    assert report["bad"] == [] and report["episodes"] == report["replayed"] == 3
    assert report["same_versions"] and report["largest_difference"] == 0.0
    assert told == [("verify", done, 3) for done in (1, 2, 3)]


def test_actions_that_copy_the_measured_state_are_found(spoilt, good):
    def joints(columns, about):
        columns["action"][:, :7] = columns["observations/state"][:, :7]

    def tool(columns, about):
        columns["action"][:, :4] = 0.0

    assert "/action is the position measured before each step" in problems(spoilt(joints, "joint"))
    assert "/action is the position measured before each step" in problems(spoilt(tool))


@pytest.mark.parametrize("shift", [0, 1])
def test_a_copy_is_told_from_a_command_by_the_motion(shift):
    turn = np.linspace(-1, 1, 21)
    states = np.zeros((21, 13), np.float32)
    states[:, :7], states[:, 8:11] = turn[:, None], 0.2 * turn[:, None]
    states[:, 11], states[:, 12] = np.sin(turn), np.cos(turn)
    pose = np.column_stack([states[:, 8:11], turn])
    noise = np.random.default_rng(0).normal(0, 1e-5, (20, 1))
    gripper = np.ones((20, 1))
    when = ("before", "after")[shift]
    copy = np.hstack([states[shift : 20 + shift, :7] + noise, gripper])
    assert f"measured {when}" in str(copied_state(states, copy, "joint"))
    copy = np.hstack([pose[shift : 20 + shift] - pose[:20] + noise, gripper])
    assert f"measured {when}" in str(copied_state(states, copy, "tool"))
    copy = np.hstack([pose[shift : 20 + shift] + noise, gripper])
    assert f"measured {when}" in str(copied_state(states, copy, "tool"))
    ahead = np.hstack([states[1:, :7] + 0.05, gripper])
    assert copied_state(states, ahead, "joint") is None
    assert copied_state(states, np.hstack([np.full((20, 4), 0.05), gripper]), "tool") is None
    assert copied_state(states[:1].repeat(21, axis=0), ahead, "joint") == "the arm never moves"


def test_other_actions_do_not_replay(spoilt):
    def never_close(columns, about):
        columns["action"][:, 4] = 1.0

    found = problems(spoilt(never_close))
    assert "replay: ended after" in found and "'running'" in found and "the state differs from row" in found


def test_a_state_that_was_not_there_is_found_with_its_row(spoilt):
    def nudge(columns, about):
        columns["observations/state"][4, 2] += 1e-6

    assert "replay: the state differs from row 4 on" in problems(spoilt(nudge))


def test_another_machine_may_differ_a_little(good):
    episode = store.read_episode(store.episode_path(good["tool"], 0))
    episode.columns["observations/state"][3] += 1e-3
    env = make_env(EnvConfig())
    assert replay_problems(episode, env, exact=False) == ([], pytest.approx(1e-3, rel=1e-3))
    assert replay_problems(episode, env, exact=True)[0] == ["replay: the state differs from row 3 on, by up to 1.0e-03"]
    env.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda columns, about: about.update(success=False, reason="time_limit"), "is no success but 'time_limit'"),
        (lambda columns, about: about.update(env='{"hz": 20}'), "was recorded with another env"),
        (lambda columns, about: columns["time/observation"].__iadd__(0.05), "is not a clock of 10 Hz that starts at 0"),
        (lambda columns, about: columns.pop("expert_action"), "lacks /expert_action"),
        (
            lambda columns, about: columns["expert_action"].fill(np.nan),
            "/expert_action holds values that are not finite",
        ),
        (lambda columns, about: about.update(instruction="wave"), "the instruction is .* not 'wave'"),
    ],
)
def test_content_that_cannot_be_true_is_found(spoilt, change, message):
    assert re.search(message, problems(spoilt(change)))


def test_a_changed_file_and_a_wrong_line_are_found(spoilt):
    folder = spoilt(lambda columns, about: about.update(seed=5), relist=False)
    assert "is damaged" in problems(folder)
    lines = {line["index"]: line for line in store.read_manifest(folder)}
    content = store.read_episode(store.episode_path(folder, 1))
    lines[1] |= {"sha256": content.sha256}
    store.write_manifest(folder, lines)
    assert "seed: 5 in the file" in problems(folder, replay=False)


def test_what_is_missing_or_not_listed_is_found(spoilt):
    folder = spoilt(lambda columns, about: None)
    (folder / "episode_000002.hdf5").unlink()
    lines = {line["index"]: line for line in store.read_manifest(folder) if line["index"] != 1}
    store.write_manifest(folder, lines)
    with (folder / "manifest.jsonl").open("a") as file:
        file.write('{"torn')
    bad = verify(folder, replay=False)["bad"]
    assert len(bad) == 4
    for problem, part in zip(
        bad, ("3 lines, 2 of them", "not listed: 1", "1.hdf5: not listed", "2: No such"), strict=True
    ):
        assert part in problem
