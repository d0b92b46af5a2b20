"""A small attention library on torch alone: kernels, masks, positions and layers."""

from robotattn.attention.kernels import attend
from robotattn.attention.layers import Attention, Decoder, DecoderLayer, Encoder, EncoderLayer, FeedForward
from robotattn.attention.positions import LearnedGrid, sinusoidal

__all__ = [
    "Attention",
    "Decoder",
    "DecoderLayer",
    "Encoder",
    "EncoderLayer",
    "FeedForward",
    "LearnedGrid",
    "attend",
    "sinusoidal",
]
