"""The published ACT: LeRobot's sizes, its weights and its outputs, the form for inference, and training."""

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from robotattn import checkpoint
from robotattn.attention import alternating, grid_turns
from robotattn.policies import ACTResNet, ACTResNetConfig, build
from robotattn.policies.act_resnet import Style
from robotattn.policies.lerobot import load_lerobot
from robotattn.tokens.normaliser import Moments, Statistics
from robotattn.tokens.resnet import MEAN, SCALE
from robotattn.train import TrainConfig, train

sys.path.insert(0, str(Path(__file__).parent))
from batches import batch, statistics
from test_resnet import lively, reference
from test_train import write_demos

TINY = ACTResNetConfig(
    action_mode="joint",
    cameras={"front": (64, 96), "wrist": (64, 96)},
    instruction=False,
    chunk=6,
    width=32,
    heads=4,
    feedforward=48,
    encoder_layers=2,
    decoder_layers=2,
    style_layers=2,
    stem_channels=4,
    latent=8,
)


def make(config=TINY, seed=0, unit=False):
    """Build a policy with lively norms; unit: with statistics that change nothing."""
    torch.manual_seed(seed)
    policy = build(config)
    if policy.images is not None:
        lively(policy.images.trunk)
    sizes = {"state": 13, "action": 8, "position": 4}
    moments = {key: Moments(("x",) * n, (0.0,) * n, (1.0,) * n, 1.0) for key, n in sizes.items()}
    policy.set_statistics(Statistics(moments) if unit else statistics(config.action_mode))
    return policy.eval()


def their_weights(config, seed=3):
    """Draw weights under LeRobot's names, for a configuration's sizes."""
    g, width = torch.Generator().manual_seed(seed), config.width
    normal = lambda *shape: torch.randn(shape, generator=g, dtype=torch.float64)  # noqa: E731
    weights = {}

    def linear(name, rows, columns, *more):
        weights[f"{name}.weight"] = normal(rows, columns, *more) * columns**-0.5
        weights[f"{name}.bias"] = normal(rows) * 0.1

    def layer(name, attentions):
        for attention in attentions:
            weights[f"{name}.{attention}.in_proj_weight"] = normal(3 * width, width) * width**-0.5
            weights[f"{name}.{attention}.in_proj_bias"] = normal(3 * width)
            linear(f"{name}.{attention}.out_proj", width, width)
        linear(f"{name}.linear1", config.feedforward, width)
        linear(f"{name}.linear2", width, config.feedforward)
        for norm in range(1, len(attentions) + 2):
            weights[f"{name}.norm{norm}.weight"], weights[f"{name}.norm{norm}.bias"] = normal(width), normal(width)

    for index in range(config.encoder_layers):
        layer(f"encoder.layers.{index}", ["self_attn"])
    for index in range(config.decoder_layers):
        layer(f"decoder.layers.{index}", ["self_attn", "multihead_attn"])
    for index in range(config.style_layers):
        layer(f"vae_encoder.layers.{index}", ["self_attn"])
    weights["decoder.norm.weight"], weights["decoder.norm.bias"] = normal(width), normal(width)
    trunk = make(config).images.trunk.double()
    weights |= {f"backbone.{name}": value for name, value in trunk.state_dict().items()}
    linear("encoder_img_feat_input_proj", width, trunk.channels, 1, 1)
    linear("encoder_robot_state_input_proj", width, 13)
    linear("encoder_latent_input_proj", width, config.latent)
    linear("vae_encoder_robot_state_input_proj", width, 13)
    linear("vae_encoder_action_input_proj", width, 8)
    linear("vae_encoder_latent_output_proj", 2 * config.latent, width)
    linear("action_head", 8, width)
    weights["encoder_1d_feature_pos_embed.weight"] = normal(2, width)
    weights["decoder_pos_embed.weight"] = normal(config.chunk, width)
    weights["vae_encoder_cls_embed.weight"] = normal(1, width)
    weights["vae_encoder_pos_enc"] = torch.zeros(1, config.chunk + 2, width)
    return {f"model.{name}": value for name, value in weights.items()}


class Theirs:
    """LeRobot's ACT written out once more in torch's own attention, from weights under its names, without dropout."""

    def __init__(self, config, weights):
        self.config, self.weights = config, {name.removeprefix("model."): w for name, w in weights.items()}

    def part(self, name, x):
        return F.linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def norm(self, name, x):
        return F.layer_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def attention(self, name, q, k, v, padding=None):
        module = nn.MultiheadAttention(self.config.width, self.config.heads, batch_first=True, dtype=torch.float64)
        module.load_state_dict({n.removeprefix(f"{name}."): w for n, w in self.weights.items() if n.startswith(name)})
        return module(q, k, v, key_padding_mask=padding, need_weights=False)[0]

    def feedforward(self, name, x):
        return self.part(f"{name}.linear2", self.part(f"{name}.linear1", x).relu())

    def encode(self, name, layers, x, places, padding=None):
        for layer in (f"{name}.layers.{index}" for index in range(layers)):
            y = self.attention(f"{layer}.self_attn", x + places, x + places, x, padding)
            x = self.norm(f"{layer}.norm1", x + y)
            x = self.norm(f"{layer}.norm2", x + self.feedforward(layer, x))
        return x

    def latent(self, state, actions, padding):
        """Mean and log variance of the latent."""
        rows, width = len(state), self.config.width
        first = self.weights["vae_encoder_cls_embed.weight"].expand(rows, 1, -1)
        arm = self.part("vae_encoder_robot_state_input_proj", state)[:, None]
        x = torch.cat([first, arm, self.part("vae_encoder_action_input_proj", actions)], dim=1)
        places = torch.zeros(x.shape[1], width, dtype=torch.float64)
        for place in range(x.shape[1]):
            for i in range(width):
                angle = place / 10_000 ** (2 * (i // 2) / width)
                places[place, i] = math.cos(angle) if i % 2 else math.sin(angle)
        padding = torch.cat([torch.zeros(rows, 2, dtype=torch.bool), padding], dim=1)
        out = self.encode("vae_encoder", self.config.style_layers, x, places, padding)[:, 0]
        return self.part("vae_encoder_latent_output_proj", out).chunk(2, dim=-1)

    def __call__(self, state, images, latent):
        x = [self.part("encoder_latent_input_proj", latent), self.part("encoder_robot_state_input_proj", state)]
        x, places = [token[:, None] for token in x], [self.weights["encoder_1d_feature_pos_embed.weight"]]
        for image in images:  # [B, 3, h, w], one camera after the other
            seen = reference(self.weights, image, "backbone.")
            w, b = (self.weights[f"encoder_img_feat_input_proj.{kind}"] for kind in ("weight", "bias"))
            x.append(F.conv2d(seen, w, b).flatten(2).transpose(1, 2))
            places.append(their_grid(*seen.shape[2:], self.config.width))
        x, places = torch.cat(x, dim=1), torch.cat(places)
        memory = self.encode("encoder", self.config.encoder_layers, x, places)
        queries = self.weights["decoder_pos_embed.weight"]
        x = torch.zeros(len(state), *queries.shape, dtype=torch.float64)
        for layer in (f"decoder.layers.{index}" for index in range(self.config.decoder_layers)):
            x = self.norm(f"{layer}.norm1", x + self.attention(f"{layer}.self_attn", x + queries, x + queries, x))
            read = self.attention(f"{layer}.multihead_attn", x + queries, memory + places, memory)
            x = self.norm(f"{layer}.norm2", x + read)
            x = self.norm(f"{layer}.norm3", x + self.feedforward(layer, x))
        return self.part("action_head", self.norm("decoder.norm", x))


def their_grid(rows, columns, width):
    """Positions of a map, number by number."""
    half = width // 2
    out = torch.zeros(rows, columns, width, dtype=torch.float64)
    for r in range(rows):
        for c in range(columns):
            for i in range(half):
                for start, turn in ((0, (r + 1) / (rows + 1e-6)), (half, (c + 1) / (columns + 1e-6))):
                    angle = 2 * math.pi * turn / 10_000 ** (2 * (i // 2) / half)
                    out[r, c, start + i] = math.cos(angle) if i % 2 else math.sin(angle)
    return out.flatten(0, 1)


def pixels(image):
    mean, scale = (torch.tensor(x, dtype=torch.float64)[:, None, None] for x in (MEAN, SCALE))
    return (image.permute(0, 3, 1, 2).double() / 255.0 - mean) / scale


def predict(policy, observations):
    with torch.no_grad():
        return policy.predict(policy.prefill(policy.tokenize(observations)))


def test_lerobots_configuration_has_its_number_of_parameters():
    config = ACTResNetConfig(action_mode="joint", cameras=dict.fromkeys("abc", (224, 224)), instruction=False)
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in ACTResNet(config).parameters())
    keys = 512 * (config.encoder_layers + config.style_layers + 2 * config.decoder_layers)  # biases a softmax ignores
    assert count == 51_606_408 - keys  # counted in lerobot 0.4.4 with a state of 13 and an action of 8 numbers
    assert abs(count / 51.6e6 - 1.0) < 0.02


def test_grid_positions_are_the_published_ones():
    torch.testing.assert_close(grid_turns(3, 5, 16).double(), their_grid(3, 5, 16), rtol=0, atol=1e-5)
    first = grid_turns(2, 4, 8)[1]  # row 1 of 2, column 2 of 4: half a turn each
    torch.testing.assert_close(first[[0, 1, 4, 5]], torch.tensor([0.0, -1.0, 0.0, -1.0]), rtol=0, atol=1e-5)
    slow = torch.tensor([math.sin(math.pi / 100), math.cos(math.pi / 100)])
    torch.testing.assert_close(first[[2, 3]], slow, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="multiple of 4, got 6"):
        grid_turns(2, 2, 6)


def test_sines_and_cosines_alternate():
    expected = torch.tensor([math.sin(3.0), math.cos(3.0), math.sin(0.03), math.cos(0.03)])
    torch.testing.assert_close(alternating(torch.tensor(3.0), 4), expected)


def test_lerobots_weights_give_lerobots_actions():
    weights = their_weights(TINY)
    policy = make(unit=True)
    load_lerobot(policy, weights)
    observations = batch(TINY, size=2)
    images = [pixels(observations["images"][name]) for name in TINY.cameras]
    nothing = torch.zeros(2, TINY.latent, dtype=torch.float64)
    expected = Theirs(TINY, weights)(observations["state"].double(), images, nothing)
    assert expected.std() > 0.1
    for ours in (policy, policy.optimised()):
        torch.testing.assert_close(predict(ours, observations).double(), expected, rtol=0, atol=1e-4)


def test_lerobots_weights_give_its_latent_in_training():
    weights = their_weights(TINY)
    policy = make(unit=True)
    load_lerobot(policy, weights)
    data = batch(TINY, size=3)
    data["actions_mask"][1, 3:] = False
    actions, state = data["actions"].double(), data["state"].double()
    mean, log_variance = Theirs(TINY, weights).latent(state, actions, ~data["actions_mask"])
    torch.manual_seed(5)
    sample, divergence = policy.style(data["actions"], data["actions_mask"], data["state"])
    torch.manual_seed(5)
    expected = mean + (log_variance / 2).exp() * torch.randn(3, TINY.latent)
    torch.testing.assert_close(sample.double(), expected, rtol=1e-4, atol=1e-4)
    kl = torch.distributions.Normal(mean, (log_variance / 2).exp())
    prior = torch.distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean))
    expected = torch.distributions.kl_divergence(kl, prior).sum(-1).mean()
    torch.testing.assert_close(divergence.double(), expected, rtol=1e-4, atol=1e-4)


def test_weights_that_do_not_fit_are_refused_by_name_and_change_nothing():
    policy, weights = make(), their_weights(TINY)
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    missing = {name: w for name, w in weights.items() if name != "model.action_head.bias"}
    for bad, message in (
        (missing, r"action_head\.bias is missing"),
        (weights | {"model.surprise": torch.zeros(1)}, "nothing here takes .*surprise"),
        (weights | {"model.action_head.bias": torch.zeros(14)}, r"action_head\.bias has shape \[14\], needed \[8\]"),
    ):
        with pytest.raises(ValueError, match=message):
            load_lerobot(policy, bad)
    assert all(torch.equal(value, before[name]) for name, value in policy.state_dict().items())
    with pytest.raises(ValueError, match="no counterpart there"):
        load_lerobot(make(replace(TINY, instruction=True)), weights)


def test_the_form_for_inference_gives_the_same_actions():
    config = replace(TINY, instruction=True, objects=True, pose_weight=1.0)
    policy = make(config)
    expected = predict(policy, batch(config))
    fast = policy.optimised()
    torch.testing.assert_close(predict(fast, batch(config)), expected, rtol=1e-4, atol=1e-5)
    assert not any(parameter.requires_grad for parameter in fast.parameters()) and not fast.training
    assert all(parameter.requires_grad for parameter in policy.parameters())
    half = predict(policy.optimised(torch.bfloat16), batch(config))
    assert half.dtype == torch.float32 and half.isfinite().all()
    assert (half - expected).abs().mean() < 0.1 * expected.std()
    assert policy.optimised(torch.bfloat16).act(batch(config)).dtype == torch.float32


def test_without_instruction_tokens_the_text_is_not_read():
    policy, observations = make(), batch(TINY)
    other = {key: value for key, value in observations.items() if not key.startswith("text")}
    assert torch.equal(policy.act(observations), policy.act(other))
    names = list(policy.tokenize(observations).slices)
    assert names == ["latent", "proprioception", "front", "wrist"]


def test_the_last_layer_of_the_latents_encoder_works_on_one_token_only_and_gives_the_same():
    torch.manual_seed(0)
    style, data = Style(TINY).eval(), batch(TINY)
    widths = []
    style.encoder[-1].feedforward.register_forward_hook(lambda module, args, out: widths.append(args[0].shape[1]))
    style(data["actions"], data["actions_mask"], data["state"])
    assert widths == [1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cameras": {"front": (16, 64)}}, r"cameras: front: height and width must be at least 32, got \[16, 64\]"),
        ({"cameras": {"latent": (64, 64)}}, "'latent' is the name of another token group"),
        ({"cameras": {}}, "such a policy would see nothing"),
        ({"width": 30}, "width: 30 is not a multiple of 4 and of heads"),
        ({"dropout": 1.5}, r"dropout: 1.5 is not in \[0, 1.0\]"),
        ({"style_layers": 0}, "style_layers: 0 is less than 1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        replace(TINY, **change)


def test_it_trains_on_recorded_demonstrations_and_its_checkpoint_acts_alike(tmp_path):
    demos = write_demos(tmp_path / "demos", cameras=("front",), size=64)
    policy = replace(TINY, action_mode="tool", cameras={"front": (64, 64)}, instruction=True)
    config = TrainConfig(demos, tmp_path / "run", policy, steps=2, batch=4, checkpoint_every=2, log_every=1, threads=1)
    train(config)
    first, second = (checkpoint.load(tmp_path / "run" / "checkpoint") for _ in range(2))
    assert isinstance(first.policy, ACTResNet) and first.policy.config == policy
    observations = batch(policy)
    assert torch.equal(first.policy.eval().act(observations), second.policy.eval().act(observations))
