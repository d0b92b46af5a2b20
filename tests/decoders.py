"""Small policies whose actions follow a prefix, and what their tests share."""

import dataclasses

import torch
from batches import batch, rows, statistics

from robotattn.policies import AutoregressiveConfig, BlockwiseConfig, build

SMALL = {"width": 32, "heads": 2, "feedforward": 32, "text_width": 16, "stem_channels": 8, "vocabulary": 10, "chunk": 3}
TOKENS = AutoregressiveConfig(objects=True, layers=2, **SMALL)
FLOW = BlockwiseConfig(objects=True, layers=2, **SMALL)
BINS = dataclasses.replace(FLOW, head="autoregressive")
DECODERS = {"autoregressive": TOKENS, "flow": FLOW, "blocks": BINS}
BINNED = {"autoregressive": TOKENS, "blocks": BINS}


def make(config, **changes):
    """Build a policy in evaluation mode, with statistics, always of the same weights."""
    torch.manual_seed(0)
    policy = build(dataclasses.replace(config, **changes)).eval()
    policy.set_statistics(statistics(config.action_mode))
    return policy


def remembered(policy, data):
    with torch.no_grad():
        return policy.prefill(policy.tokenize(data))


def exact(policy, data):
    """Return tokens in float64, and move the policy there too (it sees in float32)."""
    with torch.no_grad():
        tokens = policy.tokenize(data)
    policy.double()
    return dataclasses.replace(tokens, values=tokens.values.double(), state=tokens.state.double())


def by_token(policy, values):
    """View ``[B, H, A, ...]`` as ``[B, tokens, dimensions a token, ...]``: an action is one token, or one a number."""
    count = policy.chunk_tokens
    return values.reshape(len(values), count, -1, *values.shape[3:])


def check_shift(policy):
    """Change one token after the other: only the scores of later ones may move, and all of them must."""
    memory = policy.prefill(exact(policy, rows(batch(policy.config), slice(0, 1))))
    ids, count = torch.full((1, *policy.units.shape), 100), policy.chunk_tokens
    with torch.no_grad():
        before = by_token(policy, policy.scores(memory, ids))[0]
        for place in range(count):
            changed = ids.clone()
            by_token(policy, changed)[:, place] = 200
            after = by_token(policy, policy.scores(memory, changed))[0]
            moved = (after - before).abs().flatten(1).amax(dim=1) > 1e-9
            assert moved.tolist() == [False] * (place + 1) + [True] * (count - place - 1)
