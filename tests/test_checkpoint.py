"""Checkpoints: what is saved comes back to the bit, and whatever is missing, damaged, newer or foreign is refused."""

import json
import os
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from robotattn import checkpoint
from robotattn.config import UsageError, dumps, parse, to_dict
from robotattn.evaluate import EvaluateConfig, evaluate
from robotattn.policies import ACTConfig, build
from robotattn.tokens.normaliser import Moments, Statistics
from robotattn.tokens.text import default_tokenizer

POLICY = ACTConfig(objects=True, width=16, heads=2, feedforward=16, text_width=16, chunk=4, encoder_layers=2)
DATASET = {"name": "demos", "sha256": "ab", "env": {"hz": 10}, "versions": {"mujoco": "4.0.0", "renderer": "softpipe"}}


def statistics(action=5, position=4, mean=0.25, key="action"):
    def moments(name, size):
        return Moments(tuple(f"{name}{i}" for i in range(size)), (mean,) * size, (0.5,) * size, 0.01)

    sizes = {"state": 13, key: action, "position": position}
    return Statistics({name: moments(name, size) for name, size in sizes.items()})


def write(folder, config=POLICY, seed=0):
    torch.manual_seed(seed)
    policy = build(config)
    policy.set_statistics(statistics())
    about = checkpoint.fingerprint(DATASET, steps=3, minutes=0.5)
    training = {"data": "demos", "policy": {"act": to_dict(config)}}
    checkpoint.save(folder, policy, training, default_tokenizer(), about)
    return policy


@pytest.fixture
def saved(tmp_path):
    write(tmp_path / "run" / "checkpoint")
    return tmp_path / "run" / "checkpoint"


def observation(tokenizer):
    generator = torch.Generator().manual_seed(0)
    ids, mask = tokenizer.encode(["pick up the red cube", "拿起蓝色方块"])
    return {
        "state": torch.randn(2, 13, generator=generator),
        "objects": torch.randn(2, 6, 10, generator=generator),
        "objects_mask": torch.tensor([[True] * 3 + [False] * 3] * 2),
        "text": torch.from_numpy(ids),
        "text_mask": torch.from_numpy(mask),
        "images": {},
    }


def refusal(folder):
    with pytest.raises(UsageError) as caught:
        checkpoint.load(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def rewrite_weights(folder, change):
    tensors = change(safetensors.torch.load_file(folder / "model.safetensors"))
    safetensors.torch.save_file(tensors, folder / "model.safetensors")


def rewrite_config(folder, **fields):
    training = {"data": "demos", "policy": {"act": to_dict(replace(POLICY, **fields))}}
    (folder / "config.yaml").write_text(dumps(training))


def test_a_loaded_policy_acts_to_the_bit_like_the_saved_one(tmp_path):
    policy = write(tmp_path / "c").eval()
    loaded = checkpoint.load(tmp_path / "c")
    batch = observation(loaded.tokenizer)
    assert torch.equal(loaded.policy.act(batch), policy.act(batch))
    assert not loaded.policy.training
    assert loaded.policy.statistics == statistics()
    assert loaded.config == POLICY
    assert loaded.tokenizer.to_json() == default_tokenizer().to_json()
    assert loaded.env == {"hz": 10}
    assert loaded.training["data"] == "demos"


def test_the_fingerprint_tells_versions_data_and_hashes(saved):
    about = checkpoint.load(saved).fingerprint
    assert about["format"] == checkpoint.FORMAT
    assert about["versions"]["torch"] == torch.__version__
    assert about["versions"]["numpy"] == np.__version__
    assert about["dataset"] == {"name": "demos", "sha256": "ab"}
    assert about["training"] == {"steps": 3, "minutes": 0.5}
    assert set(about["sha256"]) == {"model.safetensors", "config.yaml", "normalisation.json", "tokenizer.json"}


def test_differences_names_what_is_another_version_here():
    about = checkpoint.fingerprint(DATASET)
    about["recorded_with"]["mujoco"] = checkpoint.versions()["mujoco"]
    assert checkpoint.differences(about) == []
    about["versions"]["torch"] = "1.0"
    assert checkpoint.differences(about) == [f"torch is {torch.__version__} here, trained with 1.0"]
    del about["versions"]["torch"]
    assert checkpoint.differences(about, renderer="llvmpipe") == ["renderer is llvmpipe here, recorded with softpipe"]


def test_equal_policies_give_equal_files(tmp_path):
    write(tmp_path / "a")
    write(tmp_path / "b")
    for name in checkpoint.FILES:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_a_run_folder_stands_for_its_checkpoint(saved):
    assert checkpoint.load(saved.parent).config == POLICY
    assert "no checkpoint here" in refusal(saved.parent.parent)


def test_a_policy_without_statistics_is_not_saved(tmp_path):
    with pytest.raises(ValueError, match="without statistics"):
        checkpoint.save(tmp_path / "c", build(POLICY), {}, default_tokenizer(), {})
    assert not (tmp_path / "c").exists()


# --- damaged, missing, newer, dangerous (O36)


@pytest.mark.parametrize("name", checkpoint.FILES)
def test_a_missing_file_is_named(saved, name):
    (saved / name).unlink()
    assert f"incomplete checkpoint, missing {name}" in refusal(saved)


@pytest.mark.parametrize("name", checkpoint.FILES)
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_half_a_file_is_refused(saved, name, share):
    content = (saved / name).read_bytes()
    (saved / name).write_bytes(content[: int(len(content) * share)])
    said = refusal(saved)  # half a configuration may be a whole one, of another policy than the weights are
    assert str(saved) in said and name in said


@pytest.mark.parametrize("name", ["model.safetensors", "normalisation.json", "tokenizer.json", "config.yaml"])
def test_one_changed_byte_is_noticed(saved, name):
    content = bytearray((saved / name).read_bytes())
    place = content.rindex(b"0") if name != "model.safetensors" else len(content) - 1
    content[place] ^= 1
    (saved / name).write_bytes(content)
    assert str(saved) in refusal(saved)


def test_line_ends_may_change(saved):
    for name in checkpoint.FILES[1:]:
        (saved / name).write_bytes((saved / name).read_bytes().replace(b"\n", b"\r\n"))
    assert checkpoint.load(saved).config == POLICY


def test_a_newer_format_is_refused(saved):
    about = json.loads((saved / "fingerprint.json").read_text())
    (saved / "fingerprint.json").write_text(json.dumps(about | {"format": checkpoint.FORMAT + 1}))
    assert "format 2 is newer than this program, which reads up to 1" in refusal(saved)
    (saved / "fingerprint.json").write_text("[]")
    assert "has no format number" in refusal(saved)


class Malice:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_pickle_that_would_run_code_is_refused_and_does_not_run(saved, tmp_path):
    trap = str(tmp_path / "trap")
    (saved / "model.safetensors").write_bytes(pickle.dumps(Malice(trap)))
    assert "damaged, or not a safetensors file" in refusal(saved)
    torch.save({"format": 1, "step": Malice(trap)}, tmp_path / "training_state.pt")
    with pytest.raises(UsageError, match=r"training_state\.pt: damaged or unsafe, refused \(UnpicklingError\)"):
        checkpoint.load_state(tmp_path / "training_state.pt")
    (tmp_path / "training_state.pt").write_bytes(pickle.dumps(Malice(trap)))
    with pytest.raises(UsageError, match="damaged or unsafe"):
        checkpoint.load_state(tmp_path / "training_state.pt")
    assert not Path(trap).exists()


def test_a_training_state_of_tensors_and_plain_values_loads_in_safe_mode(tmp_path):
    path = tmp_path / "training_state.pt"
    state = {
        "step": 3,
        "weights": {"a": torch.arange(4.0)},
        "config": {"betas": [0.9, 0.98], "data": "demos", "n": None},
    }
    checkpoint.save_state(path, state)
    loaded = checkpoint.load_state(path)
    assert torch.equal(loaded.pop("weights")["a"], torch.arange(4.0))
    assert loaded == {"format": 1, "step": 3, "config": state["config"]}
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(UsageError, match="damaged or unsafe"):
        checkpoint.load_state(path)
    checkpoint.save_state(path, {"format": 2})
    with pytest.raises(UsageError, match="format 2 is newer"):
        checkpoint.load_state(path)
    with pytest.raises(UsageError, match="no such training state"):
        checkpoint.load_state(tmp_path / "nothing.pt")


# --- weights that do not fit (O37)


def test_weights_of_two_layers_are_refused_for_three(saved):
    rewrite_config(saved, encoder_layers=3)
    message = refusal(saved)
    assert "the weights do not fit the policy" in message
    assert "missing: encoder.layers.2." in message
    rewrite_config(saved, encoder_layers=1)
    assert "unexpected: encoder.layers.1." in refusal(saved)


def test_a_prefix_on_every_name_is_refused_with_both_lists(saved):
    rewrite_weights(saved, lambda tensors: {f"module.{name}": tensor for name, tensor in tensors.items()})
    message = refusal(saved)
    count = len(build(POLICY).state_dict())
    assert f"{count} missing: " in message
    assert f"{count} unexpected: module." in message


def test_tensors_of_another_shape_or_type_are_listed(saved):
    rewrite_config(saved, chunk=5)
    assert "1 of another shape: queries (needs [5, 16], has [4, 16])" in refusal(saved)
    rewrite_config(saved)
    rewrite_weights(saved, lambda tensors: tensors | {"queries": tensors["queries"].half()})
    assert "1 of another type: queries" in refusal(saved)


def test_another_number_of_cameras_is_refused(saved):
    rewrite_config(saved, cameras={"front": (32, 32)})
    assert "missing: " in refusal(saved)


def test_other_weights_of_the_same_shapes_are_noticed(saved, tmp_path):
    write(tmp_path / "other", seed=1)
    shutil.copy(tmp_path / "other" / "model.safetensors", saved)
    assert "model.safetensors: was changed after the checkpoint was written" in refusal(saved)


# --- statistics (O18)


def test_new_statistics_beside_old_weights_are_noticed(saved):
    (saved / "normalisation.json").write_text(statistics(mean=0.26).to_json())
    assert "normalisation.json: was changed after the checkpoint was written" in refusal(saved)


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        (statistics(key="actions"), "key 'action' is missing"),
        (statistics(action=8), "'action' has 8 dimensions, this policy needs 5"),
    ],
)
def test_statistics_of_another_kind_are_refused_even_with_a_matching_hash(saved, wrong, expected):
    (saved / "normalisation.json").write_text(wrong.to_json())
    about = json.loads((saved / "fingerprint.json").read_text())
    about["sha256"]["normalisation.json"] = checkpoint._hash("normalisation.json", wrong.to_json().encode())
    (saved / "fingerprint.json").write_text(json.dumps(about))
    assert expected in refusal(saved)


# --- written in one piece


@pytest.mark.parametrize("killed_at", [1, 2, 3])
def test_a_writer_killed_at_any_rename_leaves_the_old_or_the_new_checkpoint(saved, monkeypatch, killed_at):
    old = checkpoint.load(saved).policy.state_dict()["queries"]
    calls, rename = iter(range(1, 10)), Path.rename

    def dying(self, target):
        if next(calls) == killed_at:
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", dying)
    try:
        write(saved, seed=1)
    except KeyboardInterrupt:
        assert torch.equal(checkpoint.load(saved).policy.state_dict()["queries"], old)
    monkeypatch.undo()
    new = write(saved, seed=1).state_dict()["queries"]
    assert torch.equal(checkpoint.load(saved.parent).policy.state_dict()["queries"], new)
    assert [path.name for path in saved.parent.iterdir()] == ["checkpoint"]


def test_a_file_is_replaced_only_when_it_is_whole(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def dying(file):
        file.write(b"ne")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checkpoint.replace_file(path, dying)
    assert path.read_bytes() == b"old"
    checkpoint.replace_file(path, lambda file: file.write(b"new"))
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


# ------------------------------------------------------------------------------------------ what is shipped


SHIPPED = sorted((Path(__file__).parents[1] / "assets/checkpoints").iterdir())


@pytest.mark.parametrize("folder", SHIPPED, ids=lambda folder: folder.name)
def test_a_shipped_policy_picks_up_and_tells_no_ones_paths(folder, tmp_path):
    loaded = checkpoint.load(folder)
    training, _ = parse((folder / "config.yaml").read_text(), "config.yaml")
    assert not any(Path(str(path)).is_absolute() for path in (training["data"], training["out"]))
    result = evaluate(EvaluateConfig(folder, episodes=2, seed=7, workers=0, videos=0, out=tmp_path / "e"))
    assert result["success"]["successes"] >= 1 and loaded.env["cameras"]
