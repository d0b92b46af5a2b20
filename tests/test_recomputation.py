"""What the observation fixed is computed once; and policies whose layers are fused or rounded still act as they did."""

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from robotattn.attention import fuse, quantise
from robotattn.policies import ACTConfig, AutoregressiveConfig, BlockwiseConfig, build

sys.path.insert(0, str(Path(__file__).parent))
from batches import batch, statistics

SMALL = {"width": 32, "heads": 2, "feedforward": 32, "text_width": 16, "stem_channels": 8, "vocabulary": 10, "chunk": 3}
SIGHT = {"objects": True, "cameras": {"front": (32, 32)}, "colour_jitter": 0.0}
CONFIGS = {
    "act": ACTConfig(**SIGHT, **SMALL),
    "autoregressive": AutoregressiveConfig(layers=2, **SIGHT, **SMALL),
    "flow": BlockwiseConfig(layers=2, steps=4, **SIGHT, **SMALL),
    "blockwise autoregressive": BlockwiseConfig(layers=2, head="autoregressive", **SIGHT, **SMALL),
}


def calls(policy, work):
    """Return, for each module that ran, how often it did and how many tokens (of each row) it saw at most."""
    count, most = Counter(), Counter()

    def note(name):
        def hook(_, args):
            count[name] += 1
            if args and isinstance(args[0], torch.Tensor) and args[0].dim() == 3:
                most[name] = max(most[name], args[0].shape[1])

        return hook

    hooks = [part.register_forward_pre_hook(note(name)) for name, part in policy.named_modules()]
    work()
    for hook in hooks:
        hook.remove()
    return count, most


@pytest.fixture(params=CONFIGS)
def case(request):
    config = CONFIGS[request.param]
    torch.manual_seed(0)
    policy = build(config).eval()
    policy.set_statistics(statistics(config.action_mode))
    with torch.no_grad():
        memory = policy.prefill(policy.tokenize(batch(config, size=2)))
        count, most = calls(policy, lambda: policy.decode(memory))
    return request.param, policy, memory, count, most


def test_decoding_runs_no_part_that_reads_the_observation(case):
    name, _, _, count, _ = case
    seen = [part for part in count if part.startswith(("prefix", "normaliser"))]
    assert seen == []
    if name != "autoregressive":  # there, the same layers read prefix and actions
        assert [part for part in count if part.startswith("encoder")] == []


def test_act_projects_no_keys_and_values_of_the_context_again(case):
    name, policy, _, count, _ = case
    if name == "act":
        layers = len(policy.decoder.layers)
        projections = [part for part in count if part.endswith((".cross.key", ".cross.value"))]
        assert projections == []
        assert sum(count[f"decoder.layers.{i}.cross.query"] for i in range(layers)) == layers


def test_no_projection_of_keys_or_values_ever_sees_more_than_the_new_tokens(case):
    name, policy, memory, _, most = case
    projections = {part: size for part, size in most.items() if part.endswith((".key", ".value"))}
    new = {"act": policy.config.chunk, "flow": policy.config.chunk}.get(name, 1)
    assert projections and set(projections.values()) == {new}
    assert memory.mask.shape[1] > new


def test_decoding_again_gives_the_same_and_leaves_the_memory_as_it_was(case):
    _, policy, memory, _, _ = case
    before = [part.clone() for pair in memory.context for part in pair]
    with torch.no_grad():
        assert torch.equal(policy.decode(memory), policy.decode(memory))
    after = [part for pair in memory.context for part in pair]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_flow_runs_the_actions_net_once_a_step(case):
    name, policy, _, count, _ = case
    if name == "flow":
        assert count["expert"] == policy.config.steps


def test_a_fused_policy_acts_as_the_original(case):
    name, policy, memory, _, _ = case
    fused = fuse(policy)
    data = batch(policy.config, size=2)
    if name.endswith("autoregressive"):
        assert torch.equal(fused.decode(memory), policy.decode(memory))
    torch.testing.assert_close(fused.act(data), policy.act(data), rtol=0, atol=1e-4)


def test_a_policy_with_int8_weights_acts_nearly_as_the_original(case):
    name, policy, _, _, _ = case
    data = batch(policy.config, size=2)
    want = policy.act(data)
    for rounded in (quantise(policy), quantise(fuse(policy))):
        have = rounded.act(data)
        assert have.isfinite().all() and have.shape == want.shape
        if name in ("act", "flow"):  # bins of random weights are ties
            assert (have - want)[..., :-1].abs().mean() < 0.1 * want[..., :-1].abs().mean()
