"""Episode files and the folder around them: whole or absent, equal content gives equal bytes, damage is named."""

import hashlib
import json
import os

import h5py
import numpy as np
import pytest

from robotattn.config import UsageError
from robotattn.data import store

ATTRIBUTES = {
    "attempt": 1,
    "seed": 2**62 + 12345,
    "instruction": "拿起红色方块",
    "success": True,
    "reason": "success",
    "hz": 10,
    "action_mode": "tool",
    "env": "{}",
    "target": 3,
}
ENV = {"hz": 10, "cameras": [{"name": "front", "width": 96}], "yaw": 0.5}
DESCRIPTION = {
    "schema": 1,
    "env": ENV,
    "seed": 0,
    "noise": 1.0,
    "episodes": 10,
    "versions": {"mujoco": "4.0.0", "numpy": "2.4.6"},
}


def columns(length=5, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "observations/state": rng.normal(size=(length, 13)).astype(np.float32),
        "observations/images/front": rng.integers(0, 256, (length, 8, 8, 3), dtype=np.uint8),
        "action": rng.normal(size=(length, 5)),
        "labels/present": np.array([True, True, False, False, False, False]),
        "labels/colour": np.array([3, 1, 0, 0, 0, 0]),
        "final/state": rng.normal(size=13).astype(np.float32),
    }


def test_an_episode_reads_back_bit_for_bit(tmp_path):
    written = columns()
    line = store.write_episode(tmp_path, 7, written, ATTRIBUTES)
    episode = store.read_episode(tmp_path / "episode_000007.hdf5", line["sha256"])
    assert set(episode.columns) == set(written) and episode.length == 5
    for name, column in written.items():
        assert episode.columns[name].dtype == column.dtype
        np.testing.assert_array_equal(episode.columns[name], column)
    assert episode.attributes == {**ATTRIBUTES, "schema": 1, "index": 7}


def test_the_manifest_line_says_what_is_in_the_file(tmp_path):
    line = store.write_episode(tmp_path, 7, columns(), ATTRIBUTES)
    content = (tmp_path / "episode_000007.hdf5").read_bytes()
    assert line == {
        "file": "episode_000007.hdf5",
        "index": 7,
        "length": 5,
        "seed": 2**62 + 12345,
        "instruction": "拿起红色方块",
        "outcome": "success",
        "attempt": 1,
        "sha256": hashlib.sha256(content).hexdigest(),
    }


def test_the_file_is_plain_hdf5_in_the_layout_of_act(tmp_path):
    store.write_episode(tmp_path, 0, columns(), ATTRIBUTES)
    with h5py.File(tmp_path / "episode_000000.hdf5") as file:
        assert file["/observations/images/front"].shape == (5, 8, 8, 3)
        assert file["/observations/state"].shape == (5, 13) and file["/action"].shape == (5, 5)
        assert file.attrs["instruction"] == "拿起红色方块"


def test_equal_content_gives_equal_bytes_in_any_order():
    forward, about = columns(), {"schema": 1, "index": 0, **ATTRIBUTES}
    backward = dict(reversed(forward.items()))
    dirty = [os.urandom(50_000) for _ in range(50)]  # so that memory that HDF5 forgot to clear would show
    del dirty
    assert store.encode_episode(forward, about) == store.encode_episode(backward, dict(reversed(about.items())))
    assert store.encode_episode(forward, about) != store.encode_episode(columns(seed=1), about)


def test_a_write_that_fails_leaves_no_episode_behind(tmp_path, monkeypatch):
    def no_space(handle):
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="No space"):
        store.write_episode(tmp_path, 0, columns(), ATTRIBUTES)
    assert not list(tmp_path.glob("*.hdf5"))
    store.remove_temporary(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: b"", r"is empty \(0 bytes\)"),
        (lambda content: content[:-1024], "cannot be opened as HDF5"),
        (lambda content: content[:100], "cannot be opened as HDF5"),
        (lambda content: b"not HDF5 at all" * 100, "cannot be opened as HDF5"),
    ],
)
def test_a_damaged_file_is_named_with_its_episode(tmp_path, damage, message):
    store.write_episode(tmp_path, 7, columns(), ATTRIBUTES)
    path = tmp_path / "episode_000007.hdf5"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(store.BadEpisode, match=f"episode_000007.hdf5: episode 7: {message}"):
        store.read_episode(path)


@pytest.mark.parametrize("place", [100, 2000, -300])
def test_one_changed_bit_is_found_by_the_hash(tmp_path, place):
    line = store.write_episode(tmp_path, 7, columns(), ATTRIBUTES)
    path = tmp_path / "episode_000007.hdf5"
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    with pytest.raises(store.BadEpisode, match=rf"episode 7: is damaged: {len(content)} bytes of sha256"):
        store.read_episode(path, line["sha256"])


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(store.BadEpisode, match=r"episode_000003\.hdf5: episode 3: No such file"):
        store.read_episode(store.episode_path(tmp_path, 3))


@pytest.mark.parametrize(
    ("changes", "about", "message"),
    [
        ({"observations/state": np.zeros((4, 13))}, {}, r"/observations/state has the shape \(4, 13\), /action has 5"),
        ({"action": np.zeros((0, 5))}, {}, "holds no actions"),
        ({}, {"schema": 2}, "schema 2, this version reads 1"),
    ],
)
def test_a_file_that_is_not_an_episode_is_refused(tmp_path, changes, about, message):
    content = store.encode_episode(columns() | changes, {"schema": 1, "index": 0, **ATTRIBUTES, **about})
    store.episode_path(tmp_path, 0).write_bytes(content)
    with pytest.raises(store.BadEpisode, match=message):
        store.read_episode(store.episode_path(tmp_path, 0))


def test_a_file_without_its_attributes_is_refused(tmp_path):
    about = {name: value for name, value in ATTRIBUTES.items() if name not in ("seed", "hz")}
    store.episode_path(tmp_path, 0).write_bytes(store.encode_episode(columns(), {"schema": 1, "index": 0, **about}))
    with pytest.raises(store.BadEpisode, match="lacks the attributes seed, hz"):
        store.read_episode(store.episode_path(tmp_path, 0))


def test_a_torn_manifest_line_is_dropped_on_resume_and_named_otherwise(tmp_path):
    lines = {index: store.write_episode(tmp_path, index, columns(), ATTRIBUTES) for index in (2, 0)}
    for line in lines.values():
        store.append_line(tmp_path, line)
    with (tmp_path / "manifest.jsonl").open("a") as file:
        file.write(json.dumps(lines[0])[:40])
    assert [line["index"] for line in store.read_manifest(tmp_path, torn=True)] == [0, 2]
    with pytest.raises(UsageError, match=r"manifest.jsonl:3: not a manifest line"):
        store.read_manifest(tmp_path)
    store.write_manifest(tmp_path, lines)
    assert store.read_manifest(tmp_path) == [lines[0], lines[2]]


def test_a_folder_that_is_no_dataset_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"dataset\.json"):
        store.read_dataset(tmp_path)
    with pytest.raises(UsageError, match=r"manifest\.jsonl: not found"):
        store.read_manifest(tmp_path)
    (tmp_path / "holiday.jpg").touch()
    with pytest.raises(UsageError, match=r"holds holiday\.jpg; record to a new folder"):
        store.open_dataset(tmp_path, DESCRIPTION)
    (tmp_path / "dataset.json").write_text('{"schema": 99}')
    with pytest.raises(UsageError, match="not a dataset of schema 1"):
        store.read_dataset(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "seed: 0 there, 1 now"),
        ({"noise": 0.0}, "noise: 1.0 there, 0.0 now"),
        ({"env": {**ENV, "hz": 20}}, "env.hz: 10 there, 20 now"),
        ({"env": {**ENV, "cameras": []}}, "env.cameras.0.name: 'front' there, 'absent' now"),
        ({"versions": {"mujoco": "4.1.0", "numpy": "2.4.6"}}, "versions.mujoco: '4.0.0' there, '4.1.0' now"),
        ({"episodes": 9}, "episodes: holds 10, 9 asked for"),
    ],
)
def test_a_dataset_of_another_configuration_is_refused_naming_the_field(tmp_path, change, message):
    store.open_dataset(tmp_path, DESCRIPTION)
    with pytest.raises(UsageError, match=message):
        store.open_dataset(tmp_path, DESCRIPTION | change)
    assert store.read_dataset(tmp_path) == DESCRIPTION


def test_a_dataset_can_grow(tmp_path):
    store.open_dataset(tmp_path, DESCRIPTION)
    store.open_dataset(tmp_path, DESCRIPTION | {"episodes": 20, "versions": {"mujoco": "4.0.0", "numpy": "3.0"}})
    assert store.read_dataset(tmp_path)["episodes"] == 20


def test_a_second_recorder_is_kept_out(tmp_path):
    with (
        store.locked(tmp_path),
        pytest.raises(UsageError, match="another recording is running"),
        store.locked(tmp_path),
    ):
        pass
    with store.locked(tmp_path):
        pass


def test_the_hash_of_a_dataset_follows_its_episodes(tmp_path):
    lines = [store.write_episode(tmp_path, index, columns(seed=index), ATTRIBUTES) for index in range(3)]
    assert store.dataset_hash(lines) == store.dataset_hash(list(lines)) != store.dataset_hash(lines[:2])
