"""Policies of several frames: tokens by frame, ages, velocities, and actions that only a velocity decides."""

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from batches import batch
from decoders import DECODERS, make
from examples import EVERY

HISTORIES = {name: config for name, config in EVERY.items() if name.endswith(" history")}
each = pytest.mark.parametrize("config", HISTORIES.values(), ids=HISTORIES)


@each
def test_older_frames_have_groups_of_their_own_of_the_same_size(config):
    tokens = make(config).tokenize(batch(config))
    scene = ["front", "objects"]
    order = [*scene, *(f"{name}@{ticks}" for ticks in (1, 2) for name in scene)]
    assert list(tokens.slices) == [*order, "instruction", "proprioception", "target"]
    sizes = {name: part.stop - part.start for name, part in tokens.slices.items()}
    assert sizes["front@2"] == sizes["front@1"] == sizes["front"] == 4 and sizes["objects@1"] == sizes["objects"] == 6


@each
def test_an_older_frame_alone_moves_its_own_tokens_and_the_target_token_and_no_other(config):
    policy, data = make(config), batch(config)
    before = policy.tokenize(data)
    images = data["images"]["front"].clone()
    images[:, 1] = 255 - images[:, 1]  # of three frames, the one a tick before
    after = policy.tokenize(data | {"images": {"front": images}})
    moved = {
        name for name, part in before.slices.items() if not torch.equal(before.values[:, part], after.values[:, part])
    }
    assert moved == {"front@1", "target"}


@each
def test_ages_are_read_from_the_batch_and_a_frame_of_age_zero_is_like_the_newest(config):
    policy, data = make(config), batch(config)
    tokens = policy.tokenize(data)
    other = policy.tokenize(data | {"ages": data["ages"] * 2.0})
    for name, part in tokens.slices.items():
        same = torch.equal(tokens.values[1:, part], other.values[1:, part])
        assert same == (name in ("front", "objects", "instruction")), name
    assert torch.equal(tokens.values[0], other.values[0])  # the start of its episode: all ages are 0
    torch.testing.assert_close(tokens.group("objects")[0], tokens.group("objects@2")[0])


@each
def test_frames_that_are_missing_are_refused(config):
    policy, data = make(config), batch(config)
    with pytest.raises(ValueError, match=r"objects: expected 3 frames, \[B, 3, ...\], got \[3, 2, 6, 10\]"):
        policy.tokenize(data | {"objects": data["objects"][:, 1:]})
    with pytest.raises(ValueError, match=r"camera 'front': expected uint8 \[B, 3, 32, 32, 3\]"):
        policy.tokenize(data | {"images": {"front": data["images"]["front"][:, 0]}})


def test_a_velocity_is_the_difference_of_the_poses_over_the_age():
    config = HISTORIES["act history"]
    policy, data = make(config), batch(config)
    for parameter in policy.prefix.motion.correction[2].parameters():
        torch.nn.init.zeros_(parameter)
    with torch.no_grad():
        seen = policy.prefix(data)
    poses = seen.poses.unflatten(0, (3, 3))  # rows, frames
    wanted = (poses[1:, -1] - poses[1:, 0])[..., :3] / data["ages"][1:, 0, None, None]
    torch.testing.assert_close(seen.velocity[1:], wanted)
    assert seen.velocity[0].abs().max() < 1e-4  # a frame that was repeated did not move
    truth = policy.normaliser.normalise("position", data["labels"]["position"])
    speed = ((truth[:, -1] - truth[:, 0])[..., :3] / data["ages"][:, 0, None, None].clamp(min=0.01))[1:]
    with torch.no_grad():
        errors = (policy.prefix(data, data["labels"]).velocity[1:, 1:] - speed).abs()
        losses = policy.loss(data)
    shown = (data["labels"]["present"])[1:, :, None].expand_as(errors)
    assert losses["velocity"].item() == pytest.approx(errors[shown].mean().item(), rel=1e-4)


def moving(config, size=8):
    """The same place now, another velocity in each row: the action is where the cube will be, 0.5 s later."""
    data = batch(config, size=1)
    data = {
        name: value if name in ("labels", "images") else value.repeat_interleave(size, 0)
        for name, value in data.items()
    }
    labels = data["labels"]
    labels |= {name: labels[name].repeat_interleave(size, 0) for name in ("target", "position", "present", "names")}
    speed = torch.linspace(-0.15, 0.15, size)
    data["ages"] = torch.tensor([0.1, 0.0]).repeat(size, 1)
    labels["position"][:, 0] = labels["position"][:, 1]
    labels["position"][:, 0, :, 1] -= 0.1 * speed[:, None]
    data["objects"] = torch.cat([labels["position"], data["objects"][..., 4:]], dim=-1)
    data["objects"] *= data["objects_mask"][..., None]
    data["history"] = data["state"][:, None].clone()
    data["actions"] = torch.zeros(size, config.chunk, 5)
    data["actions"][..., 1] = 0.5 * speed[:, None]
    data["actions_mask"] = torch.ones(size, config.chunk, dtype=torch.bool)
    return data, speed


@pytest.mark.parametrize("config", [EVERY["act state"], DECODERS["autoregressive"], DECODERS["flow"]])
def test_two_frames_tell_velocities_apart_that_one_frame_cannot(config):
    config = dataclasses.replace(config, frames=2, chunk=2, pose_weight=1.0)
    config = dataclasses.replace(config, action_weight=1.0) if hasattr(config, "action_weight") else config
    policy = make(config).train()
    data, speed = moving(config)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=4e-3, weight_decay=0.0)
    steps = 120
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 4e-3 * (1.0 - step / steps)
        optimizer.zero_grad()
        policy.loss(data)["loss"].backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
    policy.eval()
    found = policy.act(data)[:, 0, 1]
    assert np.corrcoef(found, speed)[0, 1] > 0.97
    still = data | {"objects": data["objects"][:, 1:].expand(-1, 2, -1, -1)}  # both frames show now
    assert policy.act(still)[:, 0, 1].std() < 1e-5 < 0.02 < found.std()
