"""Closed forms of the building blocks: what a linear layer, an attention, a stack of layers costs, without building it.

A multiplication and an addition are 2 FLOPs. Counts are of elements, so that the bytes follow from a number format.
Norms, activations, softmaxes and additions count as launches, not as FLOPs: under 1 % of a transformer's arithmetic.
Sizes of a stack come as a `TransformerConfig`; the same forms serve our policies and models that are only described.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields

from robotattn.attention import TransformerConfig


@dataclass(frozen=True)
class Cost:
    """What one operator does."""

    flops: int = 0
    weights: int = 0
    """Parameters read."""
    read: int = 0
    """Elements read that an earlier stage left in memory: cached keys and values, tokens."""
    written: int = 0
    """Elements left in memory for a later stage."""
    passed: int = 0
    """Elements that a program of separate operators writes and reads in between; a fused one need not."""
    raw: int = 0
    """Bytes read whose size does not depend on the number format: images and token ids."""
    kernels: int = 0
    """Launches on an accelerator; views are none."""

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(Cost)})

    def __mul__(self, times: int) -> "Cost":
        return Cost(**{f.name: getattr(self, f.name) * times for f in fields(Cost)})


Costs = tuple[Cost, ...]


def total(costs: Iterable[Cost]) -> Cost:
    """Return the sum."""
    return sum(costs, Cost())


def launches(count: int) -> Costs:
    """Return so many kernels that move next to nothing: norms, additions, masks, constants."""
    return (Cost(kernels=count),)


def linear(rows: int, inputs: int, outputs: int, bias: bool = True) -> Costs:
    """Return the cost of a linear layer on `rows` vectors; the bias is part of its kernel."""
    weights = inputs * outputs + (outputs if bias else 0)
    return (Cost(2 * rows * inputs * outputs, weights, passed=rows * (inputs + outputs), kernels=1),)


def product(batch: int, rows: int, inner: int, columns: int) -> Costs:
    """Return the cost of a batch of matrix products without weights."""
    moved = batch * (rows * inner + inner * columns + rows * columns)
    return (Cost(2 * batch * rows * inner * columns, passed=moved, kernels=1),)


def convolution(batch: int, channels: tuple[int, int], kernel: int, cells: int) -> Costs:
    """Return the cost of a square convolution. channels: in and out; cells: of the output's grid."""
    into, out = channels
    size = into * kernel**2
    return (Cost(2 * batch * cells * out * size, out * size + out, passed=batch * cells * out, kernels=1),)


def mlp(rows: int, inputs: int, hidden: int, outputs: int) -> Costs:
    """Return the cost of two linear layers and the activation between them."""
    return (*linear(rows, inputs, hidden), *launches(1), *linear(rows, hidden, outputs))


def attention(config: TransformerConfig, batch: int, queries: int, fresh: int, cached: int = 0) -> Costs:
    """Return the cost of softmax(q k^T) v over fresh keys of this pass and cached ones of an earlier one."""
    keys, width = fresh + cached, config.heads * config.head
    pairs = batch * queries * keys
    row = 2 * config.kv * config.head * batch
    passed = 2 * batch * queries * width + 2 * config.heads * pairs + row * fresh
    return (Cost(4 * pairs * width, read=row * cached, passed=passed, kernels=1),)


def stack(
    config: TransformerConfig,
    tokens: int,
    batch: int = 1,
    cached: int = 0,
    context: int = 0,
    masked: bool = True,
    padded: bool = True,
) -> Costs:
    """Return the cost of a pass of `tokens` through all layers and the final norm, by kind of operator.

    cached: tokens of earlier passes whose keys and values are read. context: tokens that every layer attends to, whose
    keys and values are given (see `keys_values`). masked, padded: tokens, and the context, have a bool mask, which a
    fused kernel first makes a bias of.
    """
    rows, inside = batch * tokens, config.heads * config.head
    shared = config.kv != config.heads and tokens > 1  # then queries are gathered by key head, and put back
    mask = launches(3 * masked + 2 * (cached > 0) + (2 + masked) * shared)  # 2: keys and values go into the cache
    parts: list[Costs] = [launches(2)]  # norm and residual
    parts += [linear(rows, config.width, inside, config.bias), _keys_values(config, rows, config.width)]
    parts += [attention(config, batch, tokens, tokens, cached), mask, linear(rows, inside, config.width, config.bias)]
    if config.cross and context:
        parts += [launches(2), linear(rows, config.width, inside, config.bias)]
        parts += [attention(config, batch, tokens, 0, context), launches(3 * padded + 2 * shared)]
        parts += [linear(rows, inside, config.width, config.bias)]
    if config.hidden:
        parts += [launches(2), _feedforward(config, rows)]
    norm = launches(1 if config.norm == "pre" else 0)
    return (*(cost * config.layers for part in parts for cost in part), *norm)


def keys_values(config: TransformerConfig, tokens: int, batch: int = 1) -> Costs:
    """Return the cost of projecting a context into every layer's keys and values and keeping them."""
    width = config.width if config.context_width is None else config.context_width
    made = _keys_values(config, batch * tokens, width)
    kept = Cost(written=2 * config.kv * config.head * tokens * batch)
    return tuple(cost * config.layers for cost in (*made, kept))


def kept(config: TransformerConfig, tokens: int, batch: int = 1) -> Costs:
    """Return the cost of keeping the keys and values of a pass through all layers."""
    return (Cost(written=kv_elements(config) * tokens * batch),)


def kv_elements(config: TransformerConfig) -> int:
    """Return the elements that one token leaves in a cache: 2 L heads_kv d_head."""
    return 2 * config.layers * config.kv * config.head


def linear_parameters(inputs: int, outputs: int, bias: bool = True) -> int:
    """Return the parameters of a linear layer."""
    return inputs * outputs + (outputs if bias else 0)


def mlp_parameters(inputs: int, hidden: int, outputs: int) -> int:
    """Return the parameters of two linear layers with biases."""
    return linear_parameters(inputs, hidden) + linear_parameters(hidden, outputs)


def stack_parameters(config: TransformerConfig) -> int:
    """Return the parameters of a stack without positions and q/k norms: layers and, with pre-norm, the final norm."""
    norm = 0 if config.norm == "none" else config.width * (2 if config.norm_kind == "layer" else 1)
    layer = _attention_parameters(config, config.width) + norm
    if config.cross:
        layer += _attention_parameters(config, config.context_width or config.width) + norm
    if config.hidden:
        gated = config.activation == "swiglu"
        matrices = 3 * config.width * config.hidden
        plain = 2 * config.width * config.hidden + (config.hidden + config.width if config.bias else 0)
        layer += (matrices if gated else plain) + norm
    return config.layers * layer + (norm if config.norm == "pre" else 0)


def _attention_parameters(config: TransformerConfig, context: int) -> int:
    inside, kv = config.heads * config.head, config.kv * config.head
    biases = inside + kv + config.width if config.bias else 0  # of queries, values and the output; keys have none
    return 2 * config.width * inside + 2 * context * kv + biases


def _keys_values(config: TransformerConfig, rows: int, width: int) -> Costs:
    kv = config.kv * config.head
    return (*linear(rows, width, kv, bias=False), *linear(rows, width, kv, config.bias))


def _feedforward(config: TransformerConfig, rows: int) -> Costs:
    if config.activation != "swiglu":
        first, last = linear(rows, config.width, config.hidden, config.bias), config.bias
        return (*first, *launches(1), *linear(rows, config.hidden, config.width, last))
    gate = linear(rows, config.width, config.hidden, bias=False)
    return (*gate, *gate, *launches(2), *linear(rows, config.hidden, config.width, bias=False))
