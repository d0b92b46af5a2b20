"""The same Llama twice, for bench_decoders.py: from transformers, and from our parts with its weights.

Both decode greedily from a prefix and say when each token was there. The Llama can be taught a noisy rule, so that its
scores have the margins of a trained model.
"""

import copy
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from torch.nn import functional as F

from robotattn.attention import Transformer, TransformerConfig, quantise
from robotattn.attention.masks import Causal

BINS = 256  # action tokens; ids from there on are the rest of the prefix
ROWS, SCENE = 16, 8  # sequences of a step that teaches the Llama, and tokens of their prefix
NOISE = (0.18, 0.64, 0.18)  # of an action token: the bin below the rule's, the rule's, the bin above
LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Sizes:
    """Of the models compared."""

    width: int = 512
    layers: int = 6
    heads: int = 8
    hidden: int = 2048
    vocabulary: int = 1024
    prefix: int = 605
    tokens: int = 56
    pixels: int = 224
    instruction: int = 15
    chunk: int = 8
    steps: int = 10


FULL = Sizes()
QUICK = Sizes(width=64, layers=2, heads=2, hidden=128, vocabulary=300, prefix=40, tokens=8, pixels=32, chunk=4, steps=3)


def llama(sizes: Sizes) -> Any:
    """Return the Llama of transformers, random weights."""
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        sys.exit("bench_decoders compares with the Llama of transformers, which is missing: pip install -e .[dev]")
    config = LlamaConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.width,
        intermediate_size=sizes.hidden,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        max_position_embeddings=sizes.prefix + sizes.tokens,
        rms_norm_eps=1e-5,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


class Ours(nn.Module):
    """The same Llama from our parts: embedding, stack, scores."""

    def __init__(self, theirs: Any, sizes: Sizes) -> None:
        super().__init__()
        self.embedding = copy.deepcopy(theirs.model.embed_tokens)
        self.head = copy.deepcopy(theirs.lm_head)
        self.stack = Transformer(
            TransformerConfig(
                sizes.layers,
                sizes.width,
                sizes.heads,
                sizes.hidden,
                norm_kind="rms",
                activation="swiglu",
                bias=False,
                position="rotary",
            )
        )
        state = {"norm.weight": theirs.model.norm.weight}
        for i, layer in enumerate(theirs.model.layers):
            parts = {
                "attention.query": layer.self_attn.q_proj,
                "attention.key": layer.self_attn.k_proj,
                "attention.value": layer.self_attn.v_proj,
                "attention.out": layer.self_attn.o_proj,
                "feedforward.gate": layer.mlp.gate_proj,
                "feedforward.up": layer.mlp.up_proj,
                "feedforward.down": layer.mlp.down_proj,
                "attention_norm": layer.input_layernorm,
                "feedforward_norm": layer.post_attention_layernorm,
            }
            state |= {f"layers.{i}.{name}.weight": part.weight for name, part in parts.items()}
        self.stack.load_state_dict(state)
        self.eval().requires_grad_(False)

    @torch.inference_mode()
    def decode(self, prefix: Tensor, count: int, given: Tensor | None = None) -> tuple[Tensor, list[float]]:
        """Return greedy tokens ``[B, count]`` and the clock (s) at the start and behind each of them.

        given: tokens to go on from instead of its own (teacher forcing).
        """
        times = [time.perf_counter()]
        cache, last, drawn = self.stack.cache(len(prefix), prefix.shape[1] + count), prefix, []
        for step in range(count):
            out = self.stack(self.embedding(last), Causal(), cache=cache)
            last = self.head(out[:, -1]).argmax(dim=-1, keepdim=True)
            drawn.append(last)
            times.append(time.perf_counter())
            last = last if given is None else given[:, step : step + 1]
        return torch.cat(drawn, dim=1), times

    def rounded(self) -> "Ours":
        """Return a copy with int8 weights in its stack; embedding and head stay, as is usual."""
        return quantise(self, keep=("head",))


class Stopwatch:
    """A streamer for `generate` that reads the clock at each token."""

    def __init__(self) -> None:
        self.times = [time.perf_counter()]

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def generate(theirs: Any, prefix: Tensor, count: int, static: bool) -> tuple[Tensor, list[float]]:
    """Return what `Ours.decode` returns, by transformers; its compilation is off, as it is by itself on CPUs."""
    watch = Stopwatch()
    kind = {"cache_implementation": "static", "disable_compile": True} if static else {}
    out = theirs.generate(
        prefix,
        attention_mask=torch.ones_like(prefix),
        max_new_tokens=count,
        do_sample=False,
        use_cache=True,
        streamer=watch,
        **kind,
    )
    return out[:, prefix.shape[1] :], [watch.times[0], *watch.times[2:]]  # the first call hands over the prefix


def prompt(sizes: Sizes, count: int, seed: int, length: int | None = None) -> Tensor:
    """Return prefixes ``[count, length]``: random tokens of the scene, and an action token at the end."""
    draws = torch.Generator().manual_seed(1_000 + seed)
    length = sizes.prefix if length is None else length
    scene = torch.randint(BINS, sizes.vocabulary, (count, length - 1), generator=draws)
    return torch.cat([scene, torch.randint(0, BINS, (count, 1), generator=draws)], dim=1)


def rule(seed: int) -> Tensor:
    """Return for each action token the likeliest next one."""
    return torch.randperm(BINS, generator=torch.Generator().manual_seed(seed))


def train(theirs: Any, sizes: Sizes, steps: int, seed: int) -> list[float]:
    """Teach the Llama a noisy rule and return the loss at the start and the end.

    An action token is the rule's of the one before with probability 0.64, and else the bin above or below: as often
    right, and as narrowly, as binned policies trained on demonstrations are.
    """
    draws, follow = torch.Generator().manual_seed(seed), rule(seed)
    theirs.train().requires_grad_(True)
    optimiser = torch.optim.AdamW(theirs.parameters(), betas=(0.9, 0.95))
    losses = []
    for step in track(range(steps), "training", console=Console(stderr=True)):
        long = step % 2 and step >= steps * 3 // 4  # short prefixes are cheap; at last, those of the comparison
        rows, scene = (1, sizes.prefix) if long else (ROWS, SCENE)
        tokens = [prompt(sizes, rows, seed + 1_000 + step, scene)]
        noise = torch.multinomial(torch.tensor(NOISE).expand(rows, 3), sizes.tokens, True, generator=draws) - 1
        for shift in noise.unbind(dim=1):
            tokens.append((follow[tokens[-1][:, -1:]] + shift[:, None]) % BINS)
        ids = torch.cat(tokens, dim=1)
        with torch.autocast("cpu", torch.bfloat16):
            scores = theirs(ids[:, :-1]).logits[:, scene - 1 :].float()
        loss = F.cross_entropy(scores.flatten(0, 1), ids[:, scene:].flatten())
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        for group in optimiser.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / 10)
        optimiser.step()
        losses.append(loss.item())
    theirs.eval().requires_grad_(False)
    return [round(losses[0], 3), round(float(np.mean(losses[-5:])), 3)]
