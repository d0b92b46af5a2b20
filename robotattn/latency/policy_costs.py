"""Closed forms of the policies: how many tokens, parameters and operators each stage of a control step has.

Three stages: ``vision`` is a policy's `tokenize`, ``prefix`` and ``cross_kv`` its `prefill`, the last its `decode`.
Policies are described here once more, in sizes alone; the tests hold the description to the real modules. Launches that
belong to no matrix product (norms, masks, positions, caches, units) are counts of what the code does now.
"""

from dataclasses import dataclass

from robotattn.attention import TransformerConfig
from robotattn.latency import prefix_costs
from robotattn.latency.costs import (
    Cost,
    Costs,
    kept,
    keys_values,
    kv_elements,
    launches,
    linear,
    linear_parameters,
    mlp,
    mlp_parameters,
    stack,
    stack_parameters,
)
from robotattn.latency.prefix_costs import Described
from robotattn.policies import ACTConfig, AutoregressiveConfig, BlockwiseConfig
from robotattn.tokens.actions import BINS
from robotattn.types import ACTION_SIZE, STATE_SIZE

KINDS = (ACTConfig, AutoregressiveConfig, BlockwiseConfig)


@dataclass(frozen=True)
class Stage:
    """What one stage does: `repeats` times `each`, and `once` what comes before and after. Means where steps differ."""

    each: Costs
    repeats: int = 1
    once: Costs = ()


def size(config: Described, layers: int, cross: bool = False) -> TransformerConfig:
    """Return the sizes of one of a policy's stacks; of ACT's, the decoder alone shares heads."""
    kv_heads = None if isinstance(config, ACTConfig) and not cross else getattr(config, "kv_heads", None)
    return TransformerConfig(layers, config.width, config.heads, config.feedforward, kv_heads=kv_heads, cross=cross)


def action_tokens(config: Described) -> int:
    """Return the tokens that stand for a chunk of actions: one an action, or one a dimension."""
    return config.chunk * (ACTION_SIZE[config.action_mode] if isinstance(config, AutoregressiveConfig) else 1)


def cached_actions(config: Described) -> int:
    """Return the slots of a cache behind the prefix; ACT's queries attend without one."""
    return 0 if isinstance(config, ACTConfig) else action_tokens(config)


def cache(config: Described) -> TransformerConfig:
    """Return the sizes of the stack whose keys and values outlive the prefix."""
    if isinstance(config, ACTConfig):
        return size(config, config.decoder_layers, cross=True)
    return size(config, config.layers)


# ---------------------------------------------------------------------------------------------- parameters


def parameters(config: Described) -> int:
    """Return the parameters of a policy."""
    width, actions = config.width, ACTION_SIZE[config.action_mode]
    count = prefix_costs.parameters(config)
    if isinstance(config, ACTConfig):
        count += stack_parameters(size(config, config.encoder_layers))
        count += stack_parameters(size(config, config.decoder_layers, cross=True))
        count += config.chunk * width + linear_parameters(width, actions)
        return count + (_style_parameters(config) if config.latent else 0)
    table = 2 * actions * BINS * width + actions * BINS + width  # embeddings, scores, biases, the start token
    count += action_tokens(config) * width
    if isinstance(config, AutoregressiveConfig):
        return count + stack_parameters(size(config, config.layers)) + table
    flow = linear_parameters(actions, width) + mlp_parameters(2 * width, 2 * width, width)
    flow += linear_parameters(width, actions)
    return count + 2 * stack_parameters(size(config, config.layers)) + (flow if config.head == "flow" else table)


def _style_parameters(config: ACTConfig) -> int:
    width = config.width
    count = width + linear_parameters(ACTION_SIZE[config.action_mode], width) + linear_parameters(STATE_SIZE, width)
    encoder = TransformerConfig(max(config.encoder_layers, 1), width, config.heads, config.feedforward)
    count += stack_parameters(encoder) + linear_parameters(width, 2 * config.latent)
    return count + linear_parameters(config.latent, width)


# ---------------------------------------------------------------------------------------------- prefix and actions


def stages(config: Described, instruction: int, batch: int) -> dict[str, Stage]:
    """Return the stages of a control step, in their order."""
    prefix = sum(prefix_costs.groups(config, instruction).values())
    first = {"vision": Stage(prefix_costs.vision(config, instruction, batch))}
    if isinstance(config, ACTConfig):
        return first | _act(config, prefix, batch)
    if isinstance(config, AutoregressiveConfig):
        return first | _autoregressive(config, prefix, batch)
    return first | _blockwise(config, prefix, batch)


def _act(config: ACTConfig, prefix: int, batch: int) -> dict[str, Stage]:
    encoder, decoder = size(config, config.encoder_layers), size(config, config.decoder_layers, cross=True)
    tokens = Cost(read=batch * prefix * config.width)
    encoded = (tokens, *stack(encoder, prefix, batch), *launches(8))
    queries = Cost(weights=config.chunk * config.width, kernels=int(config.grounding) + 1)
    joint = config.action_mode == "joint" and config.joints_from == "current"
    decoded = stack(decoder, config.chunk, batch, context=prefix, masked=False)
    head = linear(batch * config.chunk, config.width, ACTION_SIZE[config.action_mode])
    end = launches(7 + 6 * joint)
    return {
        "prefix": Stage(encoded),
        "cross_kv": Stage(keys_values(decoder, prefix, batch)),
        "decode": Stage((queries, *decoded, *head, *end)),
    }


def _prefilled(config: Described, prefix: int, batch: int) -> Costs:
    """Return the operators of a prefix that is read in blocks."""
    stack_size = size(config, cache(config).layers)
    tokens = Cost(read=batch * prefix * config.width)
    return (tokens, *stack(stack_size, prefix, batch), *kept(stack_size, prefix, batch), *launches(36))


def _copied(config: Described, prefix: int, batch: int) -> Costs:
    """Return the operators that make room behind a prefix: its keys and values are copied into a larger cache."""
    elements = kv_elements(cache(config)) * prefix * batch
    return (Cost(read=elements, written=elements, kernels=4 * cache(config).layers + 10),)


def _autoregressive(config: AutoregressiveConfig, prefix: int, batch: int) -> dict[str, Stage]:
    steps, kv, joint = action_tokens(config), cache(config), config.action_mode == "joint"
    each = (
        *_step(kv, prefix, steps, batch, 17),
        *linear(batch, config.width, BINS),
        *launches(3 + 11 * config.expected),
    )
    once = (*_copied(config, prefix, batch), *launches(14 + joint - 4 * config.expected))
    return {"prefix": Stage(_prefilled(config, prefix, batch)), "decode": Stage(each, steps, once)}


def _step(config: TransformerConfig, prefix: int, steps: int, batch: int, glue: int) -> Costs:
    """Return the mean operators of one token at a time: with the step, the cached tokens grow by one."""
    first = stack(config, 1, batch, cached=prefix)
    last = stack(config, 1, batch, cached=prefix + steps - 1)
    mean = tuple(_halfway(a, b) for a, b in zip(first, last, strict=True))
    return (*mean, *kept(config, 1, batch), *launches(glue))


def _halfway(a: Cost, b: Cost) -> Cost:
    both = a + b  # every count that grows with the step is even
    return Cost(both.flops // 2, both.weights // 2, both.read // 2, both.written // 2, both.passed // 2, 0, a.kernels)


def _blockwise(config: BlockwiseConfig, prefix: int, batch: int) -> dict[str, Stage]:
    kv, width, actions, chunk = cache(config), config.width, ACTION_SIZE[config.action_mode], config.chunk
    joint = config.action_mode == "joint"
    prefilled = (*_prefilled(config, prefix, batch), *launches(1))
    if config.head == "autoregressive":
        scores = Cost(2 * batch * actions * width * BINS, actions * BINS * (width + 1), kernels=2)
        each = (*_step(kv, prefix, chunk, batch, 17), scores, *launches(4))
        once = (*_copied(config, prefix, batch), *launches(12 + joint))
        return {"prefix": Stage(prefilled), "decode": Stage(each, chunk, once)}
    rows, twice = batch * chunk, 2 if config.method == "midpoint" else 1
    velocity = (*linear(rows, actions, width), *mlp(rows, 2 * width, 2 * width, width), *linear(rows, width, actions))
    passed = (*stack(kv, chunk, batch, cached=prefix), *kept(kv, chunk, batch), *launches(30))
    each = tuple(cost * twice for cost in (*velocity, *passed))
    once = (*_copied(config, prefix, batch), *launches(8 + joint))
    return {"prefix": Stage(prefilled), "denoise": Stage((*each, *launches(2 * twice)), config.steps, once)}
