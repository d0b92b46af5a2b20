"""Exponential moving average of the weights: noisy training weights go in, a smoother policy comes out."""

import copy

import torch
from torch import nn


class Average:
    """A second model whose weights follow those of `model`; `model` itself is left alone.

    decay: of the average, reached slowly: min(decay, (1 + t) / (10 + t)) at update t, so that the random first weights
    are soon forgotten.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, model: nn.Module, updates: int) -> None:
        """Move towards the weights of `model`; updates: how many there were before this one."""
        decay = min(self.decay, (1 + updates) / (10 + updates))
        for weight, newer in zip(self.model.parameters(), model.parameters(), strict=True):
            weight.lerp_(newer, 1 - decay)
        for buffer, newest in zip(self.model.buffers(), model.buffers(), strict=True):
            buffer.copy_(newest)
