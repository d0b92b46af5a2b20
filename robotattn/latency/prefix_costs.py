"""Closed forms of the prefix that all policies share: tokens, parameters, and the operators from images to tokens.

The prefix is described here once more, in sizes alone; the tests hold the description to the real modules. Launches
that belong to no matrix product (norms, masks, coordinates, units) are counts of what the code does now.
"""

from robotattn.attention import TransformerConfig
from robotattn.latency.costs import (
    Cost,
    Costs,
    attention,
    convolution,
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
from robotattn.policies import ACTConfig, AutoregressiveConfig, BlockwiseConfig
from robotattn.tokens.grounding import POSE_SIZE
from robotattn.tokens.images import CONV_STRIDE, MAP_STRIDE
from robotattn.tokens.instruction import MAX_TOKENS
from robotattn.types import COLOURS, MAX_OBJECTS, STATE_SIZE

WAY = 8  # the way from the tool to the target, as the prefix gives it
VELOCITY = 3
OBJECT = POSE_SIZE + len(COLOURS)
TEXT_HEADS = 4
STEMS = ("conv", "patch")

Described = ACTConfig | AutoregressiveConfig | BlockwiseConfig
"""The policies that have closed forms; others are built and counted."""


def frames(config: Described) -> int:
    """Return how many images of each camera a step sees."""
    return int(getattr(config, "frames", 1))


def grounded(config: Described) -> bool:
    """Tell whether the prefix has a target token."""
    return config.grounding if isinstance(config, ACTConfig) else True


def groups(config: Described, instruction: int) -> dict[str, int]:
    """Return the tokens of each group, in the order of the sequence."""
    stride = CONV_STRIDE if config.stem == "conv" else config.patch
    seen = {name: (height // stride) * (width // stride) for name, (height, width) in config.cameras.items()}
    seen |= {"objects": MAX_OBJECTS} if config.objects else {}
    counts = {f"{name}@{age}" if age else name: count for age in range(frames(config)) for name, count in seen.items()}
    counts |= {"instruction": instruction, "proprioception": 1}
    counts |= {"target": 1} if grounded(config) else {}
    return counts | ({"latent": 1} if isinstance(config, ACTConfig) and config.latent else {})


def parameters(config: Described) -> int:
    """Return the parameters of a policy's prefix."""
    width, text, looks = config.width, config.text_width, frames(config)
    count = _stem_parameters(config) if config.cameras else 0
    count += mlp_parameters(OBJECT, width, width) if config.objects else 0
    count += (config.vocabulary + MAX_TOKENS + 5) * text  # embeddings, positions, the pool's query and two norms
    layer = stack_parameters(TransformerConfig(1, text, TEXT_HEADS, 2 * text))
    count += layer - 2 * text  # a layer alone has no final norm
    count += linear_parameters(text, width) + linear_parameters(STATE_SIZE * looks, width)
    count += width**2 if looks > 1 else 0  # the stamp of a frame's age
    if grounded(config):
        found = _found(config)
        count += mlp_parameters(_motion(config), 2 * width, VELOCITY) if looks > 1 else 0
        count += sum(linear_parameters(text, features) for features, _, _ in _sources(config))
        count += mlp_parameters(found, 2 * width, POSE_SIZE) + found * POSE_SIZE
        return count + mlp_parameters(_fused(config), 2 * width, width)
    seen = width * (len(config.cameras) + config.objects) + text
    return count + (mlp_parameters(seen, 2 * width, POSE_SIZE) if config.pose_weight > 0 else 0)


def _stem_parameters(config: Described) -> int:
    stride = CONV_STRIDE if config.stem == "conv" else config.patch
    grids = sum(height // stride + width // stride for height, width in config.cameras.values())
    placed = (grids + len(config.cameras)) * config.width
    return placed + total(_stem(config, 1, (stride, stride))).weights


def vision(config: Described, instruction: int, batch: int) -> Costs:
    """Return the operators from images, text ids and state to tokens."""
    counts, width, text, looks = groups(config, instruction), config.width, config.text_width, frames(config)
    parts = [_images(config, batch), _text(config, instruction, batch), launches(3)]  # and the normalised state
    parts += [linear(batch * instruction, text, width), linear(batch, STATE_SIZE * looks, width)]
    if config.objects:
        parts += [launches(9), mlp(batch * looks * MAX_OBJECTS, OBJECT, width, width)]
    masked = 1 + config.objects * looks
    parts += [_ground(config, batch) if grounded(config) else _pooled_pose(config, batch)]
    parts += [_history(config, batch) if looks > 1 else ()]
    before = len(counts) - ("latent" in counts)
    parts += [launches(2 * masked + (before - masked) + 2)]
    if isinstance(config, ACTConfig) and config.latent:
        parts += [launches(1), linear(batch, config.latent, width), launches(2 * before + 3)]
    left = Cost(written=batch * sum(counts.values()) * width)
    return (*(cost for part in parts for cost in part), left)


def _stem(config: Described, images: int, image: tuple[int, int]) -> Costs:
    height, width = image
    if config.stem == "patch":
        return convolution(images, (3, config.width), config.patch, height * width // config.patch**2)
    channels, middle = config.stem_channels, config.width // 2
    sizes = [(3, channels, 4, MAP_STRIDE), (channels, channels, 3, MAP_STRIDE)]
    sizes += [(channels, middle, 3, 2 * MAP_STRIDE), (middle, config.width, 3, CONV_STRIDE)]
    layers = [convolution(images, (a, b), k, (height // s) * (width // s)) for a, b, k, s in sizes]
    return (*(cost for layer in layers for cost in layer), *launches(3))


def _images(config: Described, batch: int) -> Costs:
    costs: Costs = launches(12 * len(config.cameras))  # places of tokens, and of cells of the map
    for image in dict.fromkeys(config.cameras.values()):
        count = batch * frames(config) * list(config.cameras.values()).count(image)
        pixels = 3 * count * image[0] * image[1]
        costs = (*costs, Cost(raw=pixels, passed=pixels, kernels=4), *_stem(config, count, image))
    return costs


def _text(config: Described, instruction: int, batch: int) -> Costs:
    text = config.text_width
    layer = TransformerConfig(1, text, TEXT_HEADS, 2 * text)
    embedded = Cost(weights=2 * instruction * text, raw=8 * batch * instruction, kernels=2)
    pooled = attention(TransformerConfig(1, text, 1, 0), batch, 1, instruction)
    return (embedded, *stack(layer, instruction, batch), *launches(2 + 3 + 1), *pooled)


def _sources(config: Described) -> list[tuple[int, int, int]]:
    """Return for each source of grounding its features, coordinates and candidates."""
    sources = []
    for height, width in config.cameras.values():
        stride = MAP_STRIDE if config.stem == "conv" else config.patch
        features = config.stem_channels if config.stem == "conv" else config.width
        sources.append((features, 2, (height // stride) * (width // stride)))
    return sources + ([(config.width, POSE_SIZE, MAX_OBJECTS)] if config.objects else [])


def _found(config: Described) -> int:
    return sum(features + places + 1 for features, places, _ in _sources(config))


def _fused(config: Described) -> int:
    moved = POSE_SIZE * (frames(config) - 1) + VELOCITY * (frames(config) > 1)
    return _found(config) + config.text_width + POSE_SIZE + WAY + STATE_SIZE + moved


def _motion(config: Described) -> int:
    return frames(config) * POSE_SIZE + (frames(config) - 1) * (POSE_SIZE + 1)


def _history(config: Described, batch: int) -> Costs:
    """Return what several frames cost beside more tokens: the stamps of their ages, rates, the target's velocity."""
    each = len(config.cameras) + config.objects
    stamps = (*launches(32 + each * frames(config)), *linear(batch * frames(config), config.width, config.width, False))
    if not grounded(config):
        return stamps
    return (*stamps, *launches(7), *mlp(batch, _motion(config), 2 * config.width, VELOCITY))


def _ground(config: Described, batch: int) -> Costs:
    found, hidden, rows = _found(config), 2 * config.width, batch * frames(config)
    parts = [launches(2 * config.objects)]
    for features, places, cells in _sources(config):
        parts += [linear(rows, config.text_width, features), product(rows, 1, features, cells), launches(5)]
        parts += [product(rows, 1, cells, features), product(rows, 1, cells, places)]
    parts += [mlp(rows, found, hidden, POSE_SIZE), linear(rows, found, POSE_SIZE, bias=False), launches(3)]
    parts += [launches(22), mlp(batch, _fused(config), hidden, config.width)]
    return tuple(cost for part in parts for cost in part)


def _pooled_pose(config: Described, batch: int) -> Costs:
    assert isinstance(config, ACTConfig)
    if config.pose_weight == 0:
        return ()
    seen = config.width * (len(config.cameras) + config.objects) + config.text_width
    means = launches(len(config.cameras) + 6 * config.objects + 1)
    return (*means, *mlp(batch * frames(config), seen, 2 * config.width, POSE_SIZE))
