"""ACT: loss over padding, what the auxiliary may see, grounding, joint targets, and the limits of its config."""

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

from robotattn.policies import ACTConfig, build
from robotattn.policies.base import action_errors, masked_mean
from robotattn.types import STATE

sys.path.insert(0, str(Path(__file__).parent))
from batches import batch, statistics

SMALL = {"width": 32, "heads": 2, "feedforward": 32, "text_width": 16, "stem_channels": 8, "vocabulary": 10, "chunk": 4}
PIXELS = ACTConfig(cameras={"front": (32, 32)}, colour_jitter=0.0, **SMALL)
STATES = ACTConfig(objects=True, **SMALL)


def make(config):
    torch.manual_seed(0)
    policy = build(config)
    policy.set_statistics(statistics(config.action_mode))
    return policy


# ------------------------------------------------------------------------------------------ loss over padding


@pytest.mark.parametrize(("padded", "expected"), [(0, 1.0), (3, 1.0), (4, 0.0)])
def test_a_constant_error_of_one_is_a_loss_of_one_however_much_is_padding(padded, expected):
    mask = (torch.arange(4) < 4 - padded)[None]
    predicted = torch.ones(1, 4, 3, requires_grad=True)
    loss = action_errors(predicted, torch.zeros(1, 4, 3), mask)
    assert loss.item() == expected
    loss.backward()
    assert predicted.grad.isfinite().all()
    assert predicted.grad[mask].eq(1 / 3 / max(4 - padded, 1)).all() and not predicted.grad[~mask].any()


def test_values_in_the_padding_do_not_count_even_if_they_are_nan():
    mask = torch.tensor([[True, False]])
    predicted = torch.tensor([[[2.0], [5.0]]], requires_grad=True)
    loss = action_errors(predicted, torch.tensor([[[1.0], [torch.nan]]]), mask)
    loss.backward()
    assert loss.item() == 1.0 and predicted.grad.tolist() == [[[1.0], [0.0]]]


def test_masked_mean_averages_over_the_batch_and_not_over_samples():
    values = torch.tensor([[1.0, 1.0], [4.0, 9.0]])
    assert masked_mean(values, torch.tensor([[True, True], [True, False]])).item() == 2.0


def test_the_latent_encoder_does_not_read_padded_actions():
    policy = make(dataclasses.replace(STATES, latent=4)).double()
    motion, gripper = torch.randn(2, 4, 4).double(), torch.rand(2, 4).double()
    mask = torch.arange(4) < torch.tensor([[4], [2]])
    state = torch.randn(2, 13).double()
    torch.manual_seed(1)
    before = policy.style(motion, gripper, mask, state)
    motion[1, 2:] += 1e3
    torch.manual_seed(1)
    after = policy.style(motion, gripper, mask, state)
    torch.testing.assert_close(after, before, rtol=0, atol=0)


# ------------------------------------------------------------------------------------------ what the auxiliary sees


@pytest.mark.parametrize("config", [PIXELS, STATES, dataclasses.replace(PIXELS, grounding=False)])
def test_the_predicted_target_pose_never_sees_proprioception(config):
    policy, data = make(config).eval(), batch(config)
    moved = data | {"state": data["state"] + 1.0}
    assert torch.equal(policy.prefix(data).pose, policy.prefix(moved).pose)
    assert (policy.act(data) - policy.act(moved)).abs().max() > 1e-4  # the actions do


def test_the_target_token_holds_target_and_arm():
    policy, data = make(PIXELS).eval(), batch(PIXELS)
    token = policy.tokenize(data).group("target")
    other = data["labels"]["sentences"][[5, 4, 3]]
    for change in (
        {"state": data["state"] + 1.0},
        {"text": other},
        {"images": {"front": data["images"]["front"] // 2}},
    ):
        assert (policy.tokenize(data | change).group("target") - token).abs().max() > 1e-4


def test_groups_come_in_a_fixed_order():
    config = ACTConfig(cameras={"wrist": (32, 32), "front": (32, 32)}, objects=True, latent=2, **SMALL)
    tokens = make(config).tokenize(batch(config))
    order = ["wrist", "front", "objects", "instruction", "proprioception", "target", "latent"]
    assert list(tokens.slices) == order
    assert tokens.slices["front"] == slice(4, 8) and tokens.values.shape[1] == 4 + 4 + 6 + 4 + 3


# ------------------------------------------------------------------------------------------ grounding


def test_one_sentence_for_each_object_gives_the_grounding_that_each_sentence_has_alone():
    policy, data = make(PIXELS).eval(), batch(PIXELS)
    labels = data["labels"]
    together = policy.prefix(data, labels)
    assert together.pose.shape == (3, 7, 5)
    for slot in range(6):
        rows = labels["names"][:, slot]
        asked = data | {"text": labels["sentences"][rows], "text_mask": labels["sentences_mask"][rows]}
        alone = policy.prefix(asked)
        torch.testing.assert_close(alone.pose[:, 0], together.pose[:, 1 + slot], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(policy.prefix(data).tokens.values, together.tokens.values, rtol=1e-4, atol=1e-5)


def test_attention_is_supervised_only_where_the_object_is_seen():
    policy, data = make(PIXELS), batch(PIXELS)
    labels = data["labels"]
    seen = policy.prefix(data, labels)
    before = policy.prefix.losses(seen, labels)
    hidden = ~(labels["visible"]["front"] & labels["present"])
    labels["pixel"]["front"] = labels["pixel"]["front"].masked_fill(hidden[..., None], torch.nan)
    labels["position"] = labels["position"] + hidden[..., None] * 100.0
    after = policy.prefix.losses(seen, labels)
    torch.testing.assert_close(after["attention"], before["attention"], rtol=0, atol=0)
    torch.testing.assert_close(after["pose"], before["pose"], rtol=0, atol=0)


def test_a_batch_in_which_nothing_is_seen_has_no_attention_loss():
    policy, data = make(PIXELS), batch(PIXELS)
    data["labels"]["visible"]["front"] = torch.zeros(3, 6, dtype=torch.bool)
    losses = policy.loss(data)
    losses["loss"].backward()
    assert losses["attention"] == 0.0 and losses["pose"] == 0.0
    assert all(p.grad.isfinite().all() for p in policy.parameters() if p.grad is not None)


def test_position_error_is_the_distance_to_the_target_in_metres():
    policy, data = make(STATES).eval(), batch(STATES)
    labels = data["labels"]
    losses = policy.loss(data)
    pose = policy.prefix(data).pose[:, 0, :3]
    metres = policy.normaliser.denormalise("position", torch.nn.functional.pad(pose, (0, 1)))[:, :3]
    truth = labels["position"][torch.arange(3), labels["target"], :3]
    assert losses["position_error"].item() == pytest.approx((metres - truth).norm(dim=-1).mean().item(), rel=1e-5)


def test_without_attention_labels_the_loss_leaves_attention_out():
    data = batch(PIXELS)
    weighed, free = make(PIXELS).loss(data), make(dataclasses.replace(PIXELS, attention_labels=False)).loss(data)
    gap = weighed["loss"] - free["loss"]
    torch.testing.assert_close(gap, PIXELS.attention_weight * weighed["attention"])


def test_labels_without_other_sentences_still_teach_the_target():
    policy, data = make(PIXELS), batch(PIXELS)
    labels = {k: v for k, v in data["labels"].items() if not k.startswith(("sentences", "names"))}
    losses = policy.loss(data | {"labels": labels})
    assert losses["pose"] > 0.0 and losses["attention"] > 0.0


def test_attention_maps_are_distributions_over_each_cameras_cells():
    config = ACTConfig(cameras={"front": (32, 48), "wrist": (32, 32)}, **SMALL)
    maps = make(config).eval().attention_map(batch(config))
    assert {name: tuple(m.shape) for name, m in maps.items()} == {"front": (3, 8, 12), "wrist": (3, 8, 8)}
    for attention in maps.values():
        torch.testing.assert_close(attention.sum(dim=(1, 2)), torch.ones(3))
    assert make(dataclasses.replace(config, grounding=False)).attention_map(batch(config)) == {}


def test_the_order_of_object_slots_does_not_matter():
    policy, data = make(STATES).eval(), batch(STATES)
    order = torch.tensor([3, 5, 0, 1, 4, 2])
    shuffled = data | {"objects": data["objects"][:, order], "objects_mask": data["objects_mask"][:, order]}
    torch.testing.assert_close(policy.act(shuffled), policy.act(data), rtol=1e-5, atol=1e-5)


def test_what_absent_slots_hold_does_not_matter():
    policy, data = make(STATES).eval(), batch(STATES)
    spoilt = data["objects"].masked_fill(~data["objects_mask"][..., None], torch.nan)
    assert torch.equal(policy.act(data | {"objects": spoilt}), policy.act(data))


# ------------------------------------------------------------------------------------------ depth


@pytest.mark.parametrize("layers", [1, 4, 7])
def test_every_decoder_layer_gets_a_gradient_and_changes_the_actions(layers):
    """O16."""
    policy = make(dataclasses.replace(STATES, decoder_layers=layers))
    data = batch(STATES, size=8)
    policy.loss(data)["loss"].backward()
    assert [name for name, p in policy.named_parameters() if p.grad is None or not p.grad.any()] == []
    policy.eval()
    before = policy.act(data)
    for layer in policy.decoder.layers:
        with torch.no_grad():
            layer.feedforward[2].bias += torch.randn(32)
        after = policy.act(data)
        assert (after - before)[..., :-1].abs().amax(dim=(1, 2)).min() > 1e-4
        before = after


# ------------------------------------------------------------------------------------------ actions


def test_the_training_target_decodes_to_the_demonstrated_action():
    for mode, joints_from in (("tool", "current"), ("joint", "current"), ("joint", "absolute")):
        config = dataclasses.replace(STATES, action_mode=mode, joints_from=joints_from)
        policy, data = make(config).eval(), batch(config)
        motion = policy._shift(policy.normaliser.normalise("action", data["actions"])[..., :-1], data["state"], -1.0)
        logit = data["actions"][..., -1] * 2.0 - 1.0
        policy._predict = lambda memory, motion=motion, logit=logit: (motion, logit)
        torch.testing.assert_close(policy.act(data), data["actions"], rtol=1e-5, atol=1e-6)


def test_relative_joint_targets_move_with_the_joints():
    config = dataclasses.replace(STATES, action_mode="joint")
    policy, data = make(config).eval(), batch(config)
    memory = policy.prefill(policy.tokenize(data))
    state = memory.state.clone()
    state[:, STATE["joint_position"]] += 0.25
    with torch.no_grad():
        gap = policy.decode(dataclasses.replace(memory, state=state)) - policy.decode(memory)
    torch.testing.assert_close(gap[..., :7], torch.full_like(gap[..., :7], 0.25), rtol=0, atol=1e-5)


def test_a_state_far_outside_the_demonstrations_stays_finite():
    policy, data = make(PIXELS).eval(), batch(PIXELS)
    assert policy.act(data | {"state": data["state"] + 1e6}).isfinite().all()
