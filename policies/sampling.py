"""From scores of bins to a bin: greedy, or drawn with a temperature, the k best, or the smallest set of mass p."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float, Int


@dataclass(frozen=True)
class Sampling:
    """How to choose. temperature: 0 = greedy. top_k: 0 = all. top_p: keep the likeliest bins up to this mass."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature: {self.temperature} is not in [0, inf)")
        if self.top_k < 0:
            raise ValueError(f"top_k: {self.top_k} is less than 0")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p: {self.top_p} is not in (0, 1]")


GREEDY = Sampling()


def choose(
    logits: Float[Tensor, "*b n"], sampling: Sampling = GREEDY, generator: torch.Generator | None = None
) -> Int[Tensor, "*b"]:
    """Choose one of n for every row; raises ValueError if something is to be drawn without a generator."""
    if sampling.temperature == 0.0:
        return logits.argmax(dim=-1)
    if generator is None:
        raise ValueError(f"generator: needed to sample with temperature {sampling.temperature}")
    probabilities = kept(logits, sampling).softmax(dim=-1)
    drawn = torch.multinomial(probabilities.flatten(0, -2), 1, generator=generator)
    return drawn.view(logits.shape[:-1])


def kept(logits: Float[Tensor, "*b n"], sampling: Sampling) -> Float[Tensor, "*b n"]:
    """Return the logits at the temperature, with -inf for all that top-k and top-p leave out; the best one stays."""
    order = logits.argsort(dim=-1, descending=True, stable=True)
    logits = logits.float() / sampling.temperature
    rank = order.argsort(dim=-1)
    drop = rank >= sampling.top_k if sampling.top_k else torch.zeros_like(logits, dtype=torch.bool)
    mass = logits.masked_fill(drop, -torch.inf).softmax(dim=-1).gather(-1, order)
    before = (mass.cumsum(dim=-1) - mass).gather(-1, rank)  # of all likelier ones
    return logits.masked_fill(drop | ((before >= sampling.top_p) & (rank > 0)), -torch.inf)
