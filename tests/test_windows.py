"""Windows: exact values at every edge, against a slow loop; damage is named; sentences and colours fit the labels."""

import json
import shutil

import numpy as np
import pytest
import torch

from robotattn.config import UsageError
from robotattn.data import store
from robotattn.data.windows import Windows
from robotattn.instructions import sentences
from robotattn.tokens.text import default_tokenizer
from robotattn.types import COLOURS

TOKENIZER = default_tokenizer()
LENGTHS = (7, 3, 5)


def columns(rng, length, size, action_mode):
    """Random content of the right shapes; the yaws go all the way round."""
    yaw = rng.uniform(-np.pi, np.pi, length)
    state = rng.normal(size=(length, 13)).astype(np.float32)
    state[:, 11], state[:, 12] = np.sin(yaw), np.cos(yaw)
    count = int(rng.integers(2, 6))
    colour, present = np.zeros(6, np.int64), np.arange(6) < count
    colour[:count] = rng.permutation(6)[:count]
    objects = np.zeros((length, 6, 10), np.float32)
    objects[:, :count, :4] = rng.normal(size=(length, count, 4))
    objects[:, np.arange(count), 4 + colour[:count]] = 1.0
    expert = rng.uniform(-np.pi, np.pi, (length, 5))
    expert[:, 4] = rng.integers(0, 2, length)
    joints = rng.normal(size=(length, 8))
    result = {
        "observations/state": state,
        "observations/objects": objects,
        "action": rng.normal(size=(length, 5 if action_mode == "tool" else 8)),
        "expert_action": expert if action_mode == "tool" else joints,
        "expert_joint": joints,
        "labels/position": objects[..., :4],
        "labels/present": present,
        "labels/colour": colour,
        "time/observation": np.arange(length) / 10,
    }
    for camera in ("front", "wrist"):
        result[f"observations/images/{camera}"] = rng.integers(0, 256, (length, size, size, 3), dtype=np.uint8)
        result[f"labels/pixel/{camera}"] = rng.uniform(size=(length, 6, 2)).astype(np.float32)
        result[f"labels/visible/{camera}"] = rng.uniform(size=(length, 6)) < 0.5
    return result, int(rng.integers(count))


def write_dataset(folder, lengths=LENGTHS, size=4, action_mode="tool", language="both", seed=7, **other):
    """Write a dataset folder of random episodes; return their columns."""
    folder.mkdir(exist_ok=True)
    cameras = [{"name": "front"}, {"name": "wrist"}]
    env = {"cameras": cameras, "object_tokens": True, "action_mode": action_mode, "language": language, **other}
    store.open_dataset(folder, {"schema": 1, "env": env, "seed": 0, "noise": 1.0, "episodes": len(lengths)})
    rng, written, lines = np.random.default_rng(seed), [], {}
    for index, length in enumerate(lengths):
        content, target = columns(rng, length, size, action_mode)
        about = {"attempt": 1, "seed": index, "instruction": "", "success": True, "reason": "success", "hz": 10}
        about |= {"action_mode": action_mode, "env": json.dumps(env), "target": target}
        lines[index] = store.write_episode(folder, index, content, about)
        written.append((content, target))
    store.write_manifest(folder, lines)
    return written


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "demos"
    return folder, write_dataset(folder)


def windows(folder, chunk=4, cameras=("front", "wrist"), action_mode="tool", **options):
    return Windows(folder, chunk, cameras, action_mode, tokenizer=TOKENIZER, **options)


def every(loaded, seed=0):
    return loaded.batch(np.arange(len(loaded)), np.random.default_rng(seed))


def test_every_frame_is_one_window_with_what_was_seen_then(dataset):
    folder, written = dataset
    loaded = windows(folder, objects=True)
    assert len(loaded) == sum(LENGTHS)
    batch = every(loaded)
    for key, name in (("state", "observations/state"), ("objects", "observations/objects")):
        np.testing.assert_array_equal(batch[key], np.concatenate([content[name] for content, _ in written]))
    for camera in ("front", "wrist"):
        for got, name in (
            (batch["images"], "observations/images"),
            (batch["labels"]["pixel"], "labels/pixel"),
            (batch["labels"]["visible"], "labels/visible"),
        ):
            stored = np.concatenate([content[f"{name}/{camera}"] for content, _ in written])
            np.testing.assert_array_equal(got[camera], stored)
    np.testing.assert_array_equal(batch["labels"]["target"], np.repeat([target for _, target in written], LENGTHS))
    np.testing.assert_array_equal(batch["objects_mask"], batch["labels"]["present"])


def test_shapes_and_types_are_those_of_the_contract(dataset):
    batch = windows(dataset[0], objects=True).batch(np.array([0, 9]), np.random.default_rng(0))
    rows, length = 6 * len(sentences("red")), batch["text"].shape[1]
    expected = {
        "state": ((2, 13), torch.float32),
        "text": ((2, length), torch.int64),
        "text_mask": ((2, length), torch.bool),
        "objects": ((2, 6, 10), torch.float32),
        "objects_mask": ((2, 6), torch.bool),
        "actions": ((2, 4, 5), torch.float32),
        "actions_mask": ((2, 4), torch.bool),
    }
    labels = {
        "target": ((2,), torch.int64),
        "position": ((2, 6, 4), torch.float32),
        "present": ((2, 6), torch.bool),
        "names": ((2, 6), torch.int64),
        "sentences": ((rows, length), torch.int64),
        "sentences_mask": ((rows, length), torch.bool),
    }
    assert set(batch) == {*expected, "images", "labels"} and set(batch["labels"]) == {*labels, "pixel", "visible"}
    for got, wanted in ((batch, expected), (batch["labels"], labels)):
        assert {k: (tuple(got[k].shape), got[k].dtype) for k in wanted} == wanted
    assert batch["images"]["front"].dtype == torch.uint8


def test_targets_are_relative_to_the_tool_at_t_and_padded_with_the_last_one(dataset):
    folder, written = dataset
    batch, row = every(windows(folder, chunk=4, cameras=())), 0
    for content, _ in written:
        state, targets = content["observations/state"].astype(float), content["expert_action"]
        for t in range(len(state)):
            for k in range(4):
                target = targets[min(t + k, len(state) - 1)]
                yaw = target[3] - np.arctan2(state[t, 11], state[t, 12])
                yaw = np.arctan2(np.sin(yaw), np.cos(yaw))
                expected = [*(target[:3] - state[t, 8:11]), yaw, target[4]]
                np.testing.assert_allclose(batch["actions"][row, k], expected, atol=1e-6)
                assert bool(batch["actions_mask"][row, k]) == (t + k < len(state))
            row += 1
    assert batch["actions"][..., 3].abs().max() <= np.pi


def test_the_last_frame_of_an_episode_has_one_true_target(dataset):
    batch = windows(dataset[0], chunk=4).batch(np.array([6, 9, 14]), np.random.default_rng(0))
    assert batch["actions_mask"].tolist() == [[True, False, False, False]] * 3
    assert torch.equal(batch["actions"], batch["actions"][:, :1].expand(-1, 4, -1))


@pytest.mark.parametrize("recorded", ["tool", "joint"])
def test_joint_targets_are_absolute_whichever_way_was_recorded(tmp_path, recorded):
    written = write_dataset(tmp_path / "demos", action_mode=recorded)
    batch = every(windows(tmp_path / "demos", chunk=2, action_mode="joint"))
    content, _ = written[0]
    np.testing.assert_allclose(batch["actions"][1], content["expert_joint"][1:3], rtol=1e-6)


def spoken(row, mask):
    """Which colours a row of tokens may name: those with a sentence of just these tokens."""
    tokens = row[mask].tolist()
    return {c for c in COLOURS for t in sentences(c) if TOKENIZER.encode([t])[0][0].tolist() == tokens}


def test_sentences_name_their_objects_and_the_text_names_the_target(dataset):
    folder, written = dataset
    batch, episode = every(windows(folder)), np.repeat(np.arange(3), LENGTHS)
    labels, drawn = batch["labels"], set()
    for row in range(len(episode)):
        content, target = written[episode[row]]
        for slot in range(6):
            name = labels["names"][row, slot]
            if not content["labels/present"][slot]:
                assert name == 0
                continue
            named = spoken(labels["sentences"][name], labels["sentences_mask"][name])
            assert named == {COLOURS[content["labels/colour"][slot]]}
            drawn.add(int(name))
        assert torch.equal(batch["text"][row], labels["sentences"][labels["names"][row, target]])
        assert torch.equal(batch["text_mask"][row], labels["sentences_mask"][labels["names"][row, target]])
    assert len(drawn) > 20  # the templates vary


def test_the_language_of_the_dataset_is_kept(tmp_path):
    write_dataset(tmp_path / "demos", language="zh")
    loaded = windows(tmp_path / "demos")
    assert len(loaded.sentences) == 6 * len(sentences("red", "zh"))
    assert spoken(loaded.sentences[0], loaded.sentences_mask[0]) == {"red"}


def test_permuted_colours_agree_between_tokens_and_sentences(dataset):
    folder, written = dataset
    batch = every(windows(folder, cameras=(), objects=True, permute_colours=True))
    plain, changed = every(windows(folder, cameras=(), objects=True)), 0
    assert torch.equal(batch["objects"][..., :4], plain["objects"][..., :4])
    for row, index in enumerate(np.repeat(np.arange(3), LENGTHS)):
        content, target = written[index]
        present = content["labels/present"]
        hot = batch["objects"][row, :, 4:]
        assert hot.sum(dim=1).tolist() == present.astype(float).tolist()
        shown = hot.argmax(dim=1).numpy()
        assert len(set(shown[present])) == present.sum()
        for slot in np.flatnonzero(present):
            name = batch["labels"]["names"][row, slot]
            assert spoken(batch["labels"]["sentences"][name], batch["labels"]["sentences_mask"][name]) == {
                COLOURS[shown[slot]]
            }
        assert spoken(batch["text"][row], batch["text_mask"][row]) == {COLOURS[shown[target]]}
        changed += (shown[present] != content["labels/colour"][present]).any()
    assert changed > 5


def test_a_batch_depends_on_indices_and_generator_alone(dataset):
    loaded, indices = windows(dataset[0]), np.array([3, 3, 14, 0])
    first, again = (loaded.batch(indices, np.random.default_rng(5)) for _ in range(2))
    assert torch.equal(first["text"], again["text"]) and torch.equal(first["actions"], again["actions"])
    other = loaded.batch(indices, np.random.default_rng(6))
    assert not torch.equal(first["labels"]["names"], other["labels"]["names"])


def test_a_batch_owns_its_memory(dataset):
    loaded = windows(dataset[0])
    before = loaded.batch(np.array([0]), np.random.default_rng(0))
    before["images"]["front"].zero_()
    before["state"].zero_()
    assert loaded.batch(np.array([0]), np.random.default_rng(0))["images"]["front"].any()


def test_the_first_episodes_can_be_used_alone(dataset):
    loaded = windows(dataset[0], episodes=2)
    assert len(loaded) == 10 and len(loaded.lines) == 2
    assert loaded.hash != windows(dataset[0]).hash
    with pytest.raises(UsageError, match="episodes: 4, the dataset has 1 to 3"):
        windows(dataset[0], episodes=4)


@pytest.mark.parametrize("damage", [lambda content: b"", lambda content: content[:-1024]])
def test_a_damaged_file_is_named_or_left_out(tmp_path, damage):
    folder = tmp_path / "demos"
    write_dataset(folder)
    path = folder / "episode_000001.hdf5"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UsageError, match=r"episode_000001\.hdf5: episode 1: is .*on_bad=skip leaves it out"):
        windows(folder)
    loaded = windows(folder, on_bad="skip")
    assert len(loaded) == 12 and len(loaded.skipped) == 1 and "episode 1" in loaded.skipped[0]
    assert [line["index"] for line in loaded.lines] == [0, 2]
    assert not loaded.batch(np.array([6]), np.random.default_rng(0))["actions_mask"][0, 1]


def test_an_unfinished_dataset_is_refused(tmp_path):
    folder = tmp_path / "demos"
    write_dataset(folder)
    lines = store.read_manifest(folder)
    store.write_manifest(folder, {line["index"]: line for line in lines[:2]})
    with pytest.raises(UsageError, match="2 of 3 episodes are there; finish with the same record command"):
        windows(folder)
    assert len(windows(folder, on_bad="skip")) == len(windows(folder, episodes=2)) == 10


def test_further_folders_come_after_the_first_as_they_are(dataset, tmp_path):
    """Other tasks and light may be mixed in; no window sees over the border of a folder."""
    folder, written = dataset
    more = write_dataset(tmp_path / "more", (4, 6), seed=8, task="pick_moving", light=1.0)
    both = windows(folder, also=[tmp_path / "more"], objects=True, frames=2)
    assert len(both) == sum(LENGTHS) + 10 and both.description == store.read_dataset(folder)
    alone, batch = every(windows(folder, objects=True, frames=2)), every(both)
    for name in ("state", "objects", "actions", "actions_mask", "history", "ages"):
        assert torch.equal(batch[name][: sum(LENGTHS)], alone[name])
    states = np.concatenate([content["observations/state"] for content, _ in more])
    np.testing.assert_array_equal(batch["state"][sum(LENGTHS) :], states)
    np.testing.assert_array_equal(batch["labels"]["target"][sum(LENGTHS) :], np.repeat([t for _, t in more], (4, 6)))
    border = sum(LENGTHS)
    assert torch.equal(batch["history"][border, 0], batch["state"][border]) and batch["ages"][border, 0] == 0.0
    assert len(windows(folder, also=[tmp_path / "more"], episodes=1)) == LENGTHS[0] + 4
    hashes = {windows(folder, also=also).hash for also in ([], [tmp_path / "more"], [folder])}
    assert len(hashes) == 3
    np.testing.assert_array_equal(np.concatenate([c["observations/state"] for c, _ in written]), alone["state"])


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"hz": 20}, "more: env.hz: 20, but .*demos has None"),
        ({"language": "en"}, "more: env.language: en, but .*demos has both"),
        ({"action_mode": "joint"}, "more: env.action_mode: joint, but .*demos has tool"),
    ],
)
def test_folders_that_do_not_go_together_are_refused(dataset, tmp_path, other, message):
    write_dataset(tmp_path / "more", **other)
    with pytest.raises(UsageError, match=message):
        windows(dataset[0], also=[tmp_path / "more"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cameras": ("top",)}, r"cameras: no top; recorded are \['front', 'wrist'\]"),
        ({"permute_colours": True}, "permute_colours: only for object tokens without cameras"),
    ],
)
def test_what_was_not_recorded_cannot_be_asked_for(dataset, options, message):
    with pytest.raises(UsageError, match=message):
        windows(dataset[0], **options)


def test_tool_targets_need_a_tool_recording(tmp_path):
    write_dataset(tmp_path / "demos", action_mode="joint")
    with pytest.raises(UsageError, match="tool targets asked for, joint targets were recorded"):
        windows(tmp_path / "demos")


def test_a_loaded_dataset_needs_its_files_no_more(tmp_path):
    """Everything is in memory: a batch is a gather, and no file is opened for it."""
    write_dataset(tmp_path / "demos")
    loaded = windows(tmp_path / "demos", objects=True)
    before = every(loaded)
    shutil.rmtree(tmp_path / "demos")
    after = every(loaded)
    for name in ("state", "objects", "actions", "text"):
        assert torch.equal(after[name], before[name])
    assert torch.equal(after["images"]["front"], before["images"]["front"])
