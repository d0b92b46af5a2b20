"""What holds for every policy: shapes, independence of the rows, learning, saving."""

import dataclasses
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from robotattn.policies import ACTResNetConfig, build
from robotattn.types import ACTION_SIZE

sys.path.insert(0, str(Path(__file__).parent))
from batches import batch, rows, statistics
from examples import CONFIGS

# the published decoder starts from zeros: whatever its first layer looks at, it reads the bias of the values
IDLE = [f"decoder.0.attention.{name}.{kind}" for name, kind in (("query", "weight"), ("query", "bias"))]
IDLE += ["decoder.0.attention.key.weight", "decoder.0.attention.value.weight"]


@pytest.fixture(params=CONFIGS, name="config")
def each_config(request):
    return CONFIGS[request.param]


def make(config, **changes):
    """Build a policy from a config with those of the changes that it has a field for."""
    torch.manual_seed(0)
    has = {field.name for field in dataclasses.fields(config)}
    policy = build(dataclasses.replace(config, **{name: value for name, value in changes.items() if name in has}))
    policy.set_statistics(statistics(config.action_mode))
    return policy


def test_actions_are_chunks_in_physical_units_with_an_open_or_closed_gripper(config):
    actions = make(config).eval().act(batch(config))
    assert actions.shape == (3, config.chunk, ACTION_SIZE[config.action_mode])
    assert actions.isfinite().all() and not actions.requires_grad
    assert set(actions[..., -1].unique().tolist()) <= {0.0, 1.0}


def test_a_row_alone_gives_the_same_actions_as_in_a_batch(config):
    policy = make(config).eval()
    observations = batch(config, size=4)
    together = policy.act(observations)
    for row in range(4):
        alone = policy.act(rows(observations, slice(row, row + 1)))
        torch.testing.assert_close(alone[0], together[row], rtol=1e-4, atol=1e-5)


def test_decoding_twice_from_one_memory_gives_the_same_and_leaves_it_unchanged(config):
    policy = make(config).eval()
    with torch.no_grad():
        memory = policy.prefill(policy.tokenize(batch(config)))
        before = [part.clone() for pair in memory.context for part in pair]
        first, second = policy.decode(memory), policy.decode(memory)
    assert torch.equal(first, second)
    assert all(torch.equal(a, b) for a, b in zip(before, [p for pair in memory.context for p in pair], strict=True))
    with pytest.raises(dataclasses.FrozenInstanceError):
        memory.mask = None


def test_text_padding_does_not_matter(config):
    policy = make(config).eval()
    observations = batch(config)
    longer = dict(observations)
    longer["text"] = torch.cat([observations["text"], torch.full((3, 5), 7)], dim=1)
    longer["text_mask"] = torch.cat([observations["text_mask"], torch.zeros(3, 5, dtype=torch.bool)], dim=1)
    torch.testing.assert_close(policy.act(longer), policy.act(observations), rtol=1e-5, atol=1e-6)


def test_the_instruction_matters(config):
    policy = make(config).eval()
    observations = batch(config)
    other = observations | {"text": observations["labels"]["sentences"][[5, 4, 3]], "text_mask": torch.ones(3, 4) > 0}
    tokens, changed = policy.tokenize(observations).values, policy.tokenize(other).values
    assert (tokens - changed).abs().amax(dim=(1, 2)).min() > 1e-3


def test_padded_actions_move_neither_loss_nor_gradient(config):
    policy = make(config, latent=0)
    clean, spoilt = batch(config), batch(config)
    spoilt["actions"] = clean["actions"].masked_fill(~clean["actions_mask"][..., None], torch.nan)
    gradients = []
    for data in (clean, spoilt):
        torch.manual_seed(1)
        policy.zero_grad()
        policy.loss(data)["loss"].backward()
        gradients.append([p.grad.clone() for p in policy.parameters() if p.grad is not None])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("layers", [1, 4])
def test_every_parameter_gets_a_gradient(config, layers):
    policy = make(config, encoder_layers=layers, decoder_layers=layers, layers=layers).train()
    policy.loss(batch(config, size=8))["loss"].backward()
    idle = [name for name, p in policy.named_parameters() if p.grad is None or not p.grad.any()]
    assert idle == (IDLE if isinstance(config, ACTResNetConfig) else [])


def test_loss_is_the_only_part_with_a_gradient_and_every_part_is_finite(config):
    losses = make(config).loss(batch(config))
    assert {"loss", "action", "gripper", "pose", "position_error"} <= set(losses)
    assert [name for name, value in losses.items() if value.requires_grad] == ["loss"]
    assert all(value.dim() == 0 and value.isfinite() for value in losses.values())


def test_it_overfits_one_batch(config):
    policy = make(config, colour_jitter=0.0, kl_weight=0.0, chunk=2, action_weight=1.0).train()
    data = batch(policy.config, size=2)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=4e-3, weight_decay=0.0)
    steps = 400 if getattr(config, "head", "") == "flow" else 150  # of which each sees only one noise
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 4e-3 * (1.0 - step / steps)
        optimizer.zero_grad()
        losses = policy.loss(data)
        losses["loss"].backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
    assert losses["position_error"] < 0.03
    if steps == 150:
        assert losses["action"] < 0.06 and losses["gripper"] < 0.06
    policy.eval()
    valid = data["actions_mask"]
    error = (policy.act(data) - data["actions"])[valid].abs()
    if steps == 150:
        assert error.max() < 0.04
    else:  # a velocity field learned from single draws, integrated in a few steps: near everywhere, not exact
        assert error.mean() < 0.05


def test_mixed_precision_on_a_cpu_stays_finite_and_near(config):
    policy = make(config, colour_jitter=0.0, latent=0).train()
    torch.manual_seed(1)  # flow draws times and noise
    full = policy.loss(batch(config))
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = policy.loss(batch(config))
    mixed["loss"].backward()
    assert all(p.grad.isfinite().all() for p in policy.parameters() if p.grad is not None)
    torch.testing.assert_close(mixed["loss"], full["loss"], rtol=0.03, atol=0.03)


def test_weights_saved_and_loaded_give_the_same_actions(config, tmp_path):
    policy = make(config).eval()
    save_file(policy.state_dict(), tmp_path / "model.safetensors")
    torch.manual_seed(1)
    other = build(config).eval()
    other.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=True)
    with pytest.raises(RuntimeError, match="no statistics"):  # statistics are not among the weights
        other.act(batch(config))
    other.set_statistics(policy.statistics)
    assert torch.equal(other.act(batch(config)), policy.act(batch(config)))


def test_without_statistics_a_policy_refuses_to_act_and_to_learn(config):
    policy = build(config)
    for use in (policy.act, policy.loss):
        with pytest.raises(RuntimeError, match="no statistics: call set_statistics"):
            use(batch(config))


def test_statistics_of_another_action_size_are_refused(config):
    other = {"tool": "joint", "joint": "tool"}[config.action_mode]
    with pytest.raises(ValueError, match="'action' has"):
        build(config).set_statistics(statistics(other))


def test_moving_a_batch_keeps_its_content(config):
    data = batch(config)
    moved = build(config).move(data)
    assert moved.keys() == data.keys() and torch.equal(moved["labels"]["position"], data["labels"]["position"])
    assert all(image.dtype == torch.uint8 for image in moved["images"].values())


def test_what_another_row_sees_changes_nothing(config):
    policy, data = make(config).eval(), batch(config)
    before = policy.act(data)
    spoilt = data | {name: data[name].clone() for name in ("state", "objects")}
    spoilt["state"][1] += 1e6
    spoilt["objects"][1, ..., :4] += 1e6
    spoilt["images"] = {name: image.clone() for name, image in data["images"].items()}
    for image in spoilt["images"].values():
        image[1] = 255 - image[1]
    after = policy.act(spoilt)
    assert torch.equal(after[[0, 2]], before[[0, 2]]) and not torch.equal(after[1], before[1])
