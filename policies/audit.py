"""An audit of a policy: no token may move what the policy's mask says does not depend on it, and all others must."""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from robotattn.attention import Audit, audit_mask
from robotattn.attention.audit import PERTURBATIONS
from robotattn.attention.masks import Mask
from robotattn.policies.base import Policy
from robotattn.tokens.sequence import Tokens


def audit_policy(
    policy: Policy,
    tokens: Tokens,
    mask: Mask | None = None,
    values: Sequence[str] = PERTURBATIONS,
    tolerance: float = 1e-12,
    generator: torch.Generator | None = None,
) -> Audit:
    """Perturb every token of observations, and every token that a chunk is decoded from, one at a time.

    mask: what the outputs may depend on, the policy's own if None; padding depends on nothing, and nothing on padding.
    tokens: of the type of the policy's weights; at the tolerance given, float64. See `audit_mask`.
    """
    rows, prefix, width = tokens.values.shape
    chunk = torch.randn(rows, policy.chunk_tokens, width, generator=generator, dtype=tokens.values.dtype)
    size = prefix + policy.chunk_tokens
    real = torch.cat([tokens.mask, tokens.mask.new_ones(rows, policy.chunk_tokens)], dim=1)
    allowed = (policy.mask(prefix) if mask is None else mask).tensor(size, size, real.device)

    def forward(x: Tensor) -> Tensor:
        return policy.sequence(dataclasses.replace(tokens, values=x[:, :prefix]), x[:, prefix:])

    x = torch.cat([tokens.values.detach(), chunk.to(tokens.values.device)], dim=1)
    return audit_mask(
        forward,
        x,
        allowed & real[:, None] & real[:, :, None],
        values=values,
        tolerance=tolerance,
        generator=generator,
    )
