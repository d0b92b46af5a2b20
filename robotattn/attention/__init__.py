"""A small attention library on torch alone: masks, kernels, positions, caches, layers, and an audit of them all."""

from robotattn.attention import masks
from robotattn.attention.audit import Audit, audit_mask, reachable
from robotattn.attention.caches import CacheOverflow, CrossKV, KeysValues, KVCache, PrefixKV, Scratch, kv_bytes
from robotattn.attention.efficient import (
    Linformer,
    Performer,
    linformer_attend,
    performer_attend,
    random_features,
    window_attend,
)
from robotattn.attention.fused import fuse
from robotattn.attention.kernels import attend, weights
from robotattn.attention.layers import (
    Attention,
    DecoderLayer,
    EncoderLayer,
    FeedForward,
    Layer,
    SwiGLU,
    TransformerConfig,
)
from robotattn.attention.masks import Mask
from robotattn.attention.positions import (
    Alibi,
    Buckets,
    Learned,
    LearnedGrid,
    Position,
    PositionKind,
    Rotary,
    Shaw,
    Sinusoidal,
    Timestamps,
    alibi_slopes,
    alternating,
    grid_sinusoidal,
    grid_turns,
    make_position,
    rotate,
    row_positions,
    sinusoidal,
)
from robotattn.attention.quantised import quantise
from robotattn.attention.scores import AdditiveAttention, gaussian_weights
from robotattn.attention.transformer import Decoder, Encoder, Transformer

__all__ = [
    "AdditiveAttention",
    "Alibi",
    "Attention",
    "Audit",
    "Buckets",
    "CacheOverflow",
    "CrossKV",
    "Decoder",
    "DecoderLayer",
    "Encoder",
    "EncoderLayer",
    "FeedForward",
    "KVCache",
    "KeysValues",
    "Layer",
    "Learned",
    "LearnedGrid",
    "Linformer",
    "Mask",
    "Performer",
    "Position",
    "PositionKind",
    "PrefixKV",
    "Rotary",
    "Scratch",
    "Shaw",
    "Sinusoidal",
    "SwiGLU",
    "Timestamps",
    "Transformer",
    "TransformerConfig",
    "alibi_slopes",
    "alternating",
    "attend",
    "audit_mask",
    "fuse",
    "gaussian_weights",
    "grid_sinusoidal",
    "grid_turns",
    "kv_bytes",
    "linformer_attend",
    "make_position",
    "masks",
    "performer_attend",
    "quantise",
    "random_features",
    "reachable",
    "rotate",
    "row_positions",
    "sinusoidal",
    "weights",
    "window_attend",
]
