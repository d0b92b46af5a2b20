"""Closed forms of the policies: how many tokens, parameters and operators each stage of a control step has.

Three stages: ``vision`` is a policy's `tokenize`, ``prefix`` and ``cross_kv`` its `prefill`, the last its `decode`.
A policy is described here once more, in sizes alone; the tests hold every description to the real modules.
"""

from dataclasses import dataclass

from robotattn.attention import TransformerConfig
from robotattn.latency.costs import (
    Cost,
    Costs,
    attention,
    convolution,
    kept,
    keys_values,
    kv_elements,
    launches,
    linear,
    linear_parameters,
    mlp,
    mlp_parameters,
    product,
    stack,
    stack_parameters,
    total,
)
from robotattn.policies import ACTConfig, AutoregressiveConfig, BlockwiseConfig, PolicyConfig
from robotattn.tokens.actions import BINS
from robotattn.tokens.grounding import POSE_SIZE
from robotattn.tokens.images import CONV_STRIDE, MAP_STRIDE
from robotattn.tokens.instruction import MAX_TOKENS
from robotattn.types import ACTION_SIZE, COLOURS, MAX_OBJECTS, STATE_SIZE

WAY = 8  # the way from the tool to the target, as the prefix gives it
OBJECT = POSE_SIZE + len(COLOURS)
TEXT_HEADS = 4
KINDS = (ACTConfig, AutoregressiveConfig, BlockwiseConfig)
STEMS = ("conv", "patch")


@dataclass(frozen=True)
class Stage:
    """What one stage does: `repeats` times `each`, and `once` what comes before and after. Means where steps differ."""

    each: Costs
    repeats: int = 1
    once: Costs = ()


def frames(config: PolicyConfig) -> int:
    """Return how many images of each camera a step sees."""
    return int(getattr(config, "frames", 1))


def size(config: PolicyConfig, layers: int, cross: bool = False) -> TransformerConfig:
    """Return the sizes of one of a policy's stacks."""
    kv_heads = getattr(config, "kv_heads", None)
    return TransformerConfig(layers, config.width, config.heads, config.feedforward, kv_heads=kv_heads, cross=cross)


def grounded(config: PolicyConfig) -> bool:
    """Tell whether the prefix has a target token."""
    return config.grounding if isinstance(config, ACTConfig) else True


def groups(config: PolicyConfig, instruction: int) -> dict[str, int]:
    """Return the tokens of each group, in the order of the sequence."""
    stride = CONV_STRIDE if config.stem == "conv" else config.patch
    counts: dict[str, int] = {}
    for age in range(frames(config)):
        for name, (height, width) in config.cameras.items():
            counts[name if age == 0 else f"{name}@{age}"] = (height // stride) * (width // stride)
    counts |= {"objects": MAX_OBJECTS} if config.objects else {}
    counts |= {"instruction": instruction, "proprioception": 1}
    counts |= {"target": 1} if grounded(config) else {}
    return counts | ({"latent": 1} if isinstance(config, ACTConfig) and config.latent else {})


def action_tokens(config: PolicyConfig) -> int:
    """Return the tokens that stand for a chunk of actions: one an action, or one a dimension."""
    return config.chunk * (ACTION_SIZE[config.action_mode] if isinstance(config, AutoregressiveConfig) else 1)


def cached_actions(config: PolicyConfig) -> int:
    """Return the slots of a cache behind the prefix; ACT's queries attend without one."""
    return 0 if isinstance(config, ACTConfig) else action_tokens(config)


def cache(config: PolicyConfig) -> TransformerConfig:
    """Return the sizes of the stack whose keys and values outlive the prefix."""
    return size(config, config.decoder_layers if isinstance(config, ACTConfig) else config.layers)


# ---------------------------------------------------------------------------------------------- parameters


def parameters(config: PolicyConfig) -> int:
    """Return the parameters of a policy."""
    width, actions = config.width, ACTION_SIZE[config.action_mode]
    count = _prefix_parameters(config)
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


def _prefix_parameters(config: PolicyConfig) -> int:
    width, text = config.width, config.text_width
    count = _stem_parameters(config) if config.cameras else 0
    count += mlp_parameters(OBJECT, width, width) if config.objects else 0
    count += (config.vocabulary + MAX_TOKENS + 5) * text  # embeddings, positions, the pool's query and two norms
    layer = stack_parameters(TransformerConfig(1, text, TEXT_HEADS, 2 * text))
    count += layer - 2 * text  # a layer alone has no final norm
    count += linear_parameters(text, width) + linear_parameters(STATE_SIZE, width)
    if grounded(config):
        found = _found(config)
        count += sum(linear_parameters(text, features) for features, _, _ in _sources(config))
        count += mlp_parameters(found, 2 * width, POSE_SIZE) + found * POSE_SIZE
        return count + mlp_parameters(_fused(config), 2 * width, width)
    seen = width * (len(config.cameras) + config.objects) + text
    return count + (mlp_parameters(seen, 2 * width, POSE_SIZE) if config.pose_weight > 0 else 0)


def _stem_parameters(config: PolicyConfig) -> int:
    stride = CONV_STRIDE if config.stem == "conv" else config.patch
    grids = sum(height // stride + width // stride for height, width in config.cameras.values())
    placed = (grids + len(config.cameras)) * config.width
    return placed + total(_stem(config, 1, (stride, stride))).weights


def _style_parameters(config: ACTConfig) -> int:
    width = config.width
    count = width + linear_parameters(ACTION_SIZE[config.action_mode], width) + linear_parameters(STATE_SIZE, width)
    encoder = TransformerConfig(max(config.encoder_layers, 1), width, config.heads, config.feedforward)
    count += stack_parameters(encoder) + linear_parameters(width, 2 * config.latent)
    return count + linear_parameters(config.latent, width)


# ---------------------------------------------------------------------------------------------- vision


def vision(config: PolicyConfig, instruction: int, batch: int) -> Costs:
    """Return the operators from images, text ids and state to tokens."""
    counts, width, text = groups(config, instruction), config.width, config.text_width
    parts = [_images(config, batch), _text(config, instruction, batch), launches(3)]  # and the normalised state
    parts += [linear(batch * instruction, text, width), linear(batch, STATE_SIZE, width)]
    if config.objects:
        parts += [launches(9), mlp(batch * MAX_OBJECTS, OBJECT, width, width)]
    masked = 1 + config.objects
    parts += [_ground(config, batch) if grounded(config) else _pooled_pose(config, batch)]
    before = len(counts) - ("latent" in counts)
    parts += [launches(2 * masked + (before - masked) + 2)]
    if isinstance(config, ACTConfig) and config.latent:
        parts += [launches(1), linear(batch, config.latent, width), launches(2 * before + 3)]
    left = Cost(written=batch * sum(counts.values()) * width)
    return (*(cost for part in parts for cost in part), left)


def _stem(config: PolicyConfig, images: int, image: tuple[int, int]) -> Costs:
    height, width = image
    if config.stem == "patch":
        return convolution(images, (3, config.width), config.patch, height * width // config.patch**2)
    channels, middle = config.stem_channels, config.width // 2
    sizes = [(3, channels, 4, MAP_STRIDE), (channels, channels, 3, MAP_STRIDE)]
    sizes += [(channels, middle, 3, 2 * MAP_STRIDE), (middle, config.width, 3, CONV_STRIDE)]
    layers = [convolution(images, (a, b), k, (height // s) * (width // s)) for a, b, k, s in sizes]
    return (*(cost for layer in layers for cost in layer), *launches(3))


def _images(config: PolicyConfig, batch: int) -> Costs:
    costs: Costs = launches(12 * len(config.cameras) * frames(config))  # places of tokens, and of cells of the map
    for image in dict.fromkeys(config.cameras.values()):
        count = batch * frames(config) * list(config.cameras.values()).count(image)
        pixels = 3 * count * image[0] * image[1]
        costs = (*costs, Cost(raw=pixels, passed=pixels, kernels=4), *_stem(config, count, image))
    return costs


def _text(config: PolicyConfig, instruction: int, batch: int) -> Costs:
    text = config.text_width
    layer = TransformerConfig(1, text, TEXT_HEADS, 2 * text)
    embedded = Cost(weights=2 * instruction * text, raw=8 * batch * instruction, kernels=2)
    pooled = attention(TransformerConfig(1, text, 1, 0), batch, 1, instruction)
    return (embedded, *stack(layer, instruction, batch), *launches(2 + 3 + 1), *pooled)


def _sources(config: PolicyConfig) -> list[tuple[int, int, int]]:
    """Return for each source of grounding its features, coordinates and candidates."""
    sources = []
    for height, width in config.cameras.values():
        stride = MAP_STRIDE if config.stem == "conv" else config.patch
        features = config.stem_channels if config.stem == "conv" else config.width
        sources.append((features, 2, (height // stride) * (width // stride)))
    return sources + ([(config.width, POSE_SIZE, MAX_OBJECTS)] if config.objects else [])


def _found(config: PolicyConfig) -> int:
    return sum(features + places + 1 for features, places, _ in _sources(config))


def _fused(config: PolicyConfig) -> int:
    return _found(config) + config.text_width + POSE_SIZE + WAY + STATE_SIZE


def _ground(config: PolicyConfig, batch: int) -> Costs:
    found, hidden = _found(config), 2 * config.width
    parts = [launches(2 * config.objects)]
    for features, places, cells in _sources(config):
        parts += [linear(batch, config.text_width, features), product(batch, 1, features, cells), launches(5)]
        parts += [product(batch, 1, cells, features), product(batch, 1, cells, places)]
    parts += [mlp(batch, found, hidden, POSE_SIZE), linear(batch, found, POSE_SIZE, bias=False), launches(3)]
    parts += [launches(22), mlp(batch, _fused(config), hidden, config.width)]
    return tuple(cost for part in parts for cost in part)


def _pooled_pose(config: PolicyConfig, batch: int) -> Costs:
    assert isinstance(config, ACTConfig)
    if config.pose_weight == 0:
        return ()
    seen = config.width * (len(config.cameras) + config.objects) + config.text_width
    means = launches(len(config.cameras) + 6 * config.objects + 1)
    return (*means, *mlp(batch, seen, 2 * config.width, POSE_SIZE))


# ---------------------------------------------------------------------------------------------- prefix and actions


def stages(config: PolicyConfig, instruction: int, batch: int) -> dict[str, Stage]:
    """Return the stages of a control step, in their order."""
    prefix = sum(groups(config, instruction).values())
    first = {"vision": Stage(vision(config, instruction, batch))}
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


def _prefilled(config: PolicyConfig, prefix: int, batch: int) -> Costs:
    """Return the operators of a prefix that is read in blocks."""
    stack_size = size(config, cache(config).layers)
    tokens = Cost(read=batch * prefix * config.width)
    return (tokens, *stack(stack_size, prefix, batch), *kept(stack_size, prefix, batch), *launches(36))


def _copied(config: PolicyConfig, prefix: int, batch: int) -> Costs:
    """Return the operators that make room behind a prefix: its keys and values are copied into a larger cache."""
    elements = kv_elements(cache(config)) * prefix * batch
    return (Cost(read=elements, written=elements, kernels=4 * cache(config).layers + 10),)


def _autoregressive(config: AutoregressiveConfig, prefix: int, batch: int) -> dict[str, Stage]:
    steps, kv, joint = action_tokens(config), cache(config), config.action_mode == "joint"
    each = (
        *_step(kv, prefix, steps, batch, 52),
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
        each = (*_step(kv, prefix, chunk, batch, 52), scores, *launches(4))
        once = (*_copied(config, prefix, batch), *launches(12 + joint))
        return {"prefix": Stage(prefilled), "decode": Stage(each, chunk, once)}
    rows, twice = batch * chunk, 2 if config.method == "midpoint" else 1
    velocity = (*linear(rows, actions, width), *mlp(rows, 2 * width, 2 * width, width), *linear(rows, width, actions))
    passed = (*stack(kv, chunk, batch, cached=prefix), *kept(kv, chunk, batch), *launches(56))
    each = tuple(cost * twice for cost in (*velocity, *passed))
    once = (*_copied(config, prefix, batch), *launches(8 + joint))
    return {"prefix": Stage(prefilled), "denoise": Stage((*each, *launches(2 * twice)), config.steps, once)}
