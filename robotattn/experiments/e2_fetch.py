"""E2 Cross-attention learns to fetch: one small layer against a perceptron with 45 times its parameters.

A table of 80 cm x 80 cm with 2 to 5 cubes of different colours out of 6. An object token is [x, y (m), colour one-hot];
the instruction is the one-hot of colour A and that of another colour B. Fetch: where is A? Vector: A's place minus B's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeVar

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

from robotattn.attention import Attention, masks
from robotattn.experiments.drawing import BLUE, GREEN, OCHRE, RED, legend, matrix, panels
from robotattn.experiments.result import Progress, Result, Row, exact, median, row, spread

Task = Literal["fetch", "vector"]
Model = TypeVar("Model", bound=nn.Module)
Curve = list[tuple[int, float, float]]  # step, test error with 2 to 5 cubes, with 6 (cm)
COLOURS = 6
HALF = 0.4  # of the table's side (m)
BATCH, RATE, EVERY = 32, 0.01, 25  # scenes a step; of Adam; steps between two tests
FETCH_STEPS, VECTOR_STEPS = 600, 1500
SEEDS = (0, 1, 2, 3, 4)
TEST_SEED, TEST_SCENES = 1000, 200


@dataclass(frozen=True)
class Scenes:
    """Scenes with their answers. objects [n, 6, 8] (empty slots zero), valid [n, 6], instruction [n, 12], a and b:
    slots of the two colours named [n], fetch and vector: the answers [n, 2] (m)."""

    objects: Tensor
    valid: Tensor
    instruction: Tensor
    a: Tensor
    b: Tensor
    fetch: Tensor
    vector: Tensor

    def part(self, some: slice) -> "Scenes":
        """Return some of the scenes."""
        return Scenes(*(getattr(self, name)[some] for name in self.__dataclass_fields__))


def draw_scenes(random: np.random.Generator, count: int, fewest: int, most: int) -> Scenes:
    """Draw scenes of `fewest` to `most` cubes; the slots' order says nothing about the colours."""
    cubes, all_scenes = random.integers(fewest, most + 1, count), np.arange(count)
    valid = np.arange(COLOURS) < cubes[:, None]
    colour = np.eye(COLOURS)[random.random((count, COLOURS)).argsort(1)]
    place = random.uniform(-HALF, HALF, (count, COLOURS, 2))
    a = random.integers(0, cubes)
    b = (a + random.integers(1, cubes)) % cubes  # another cube of the scene
    instruction = np.concatenate([colour[all_scenes, a], colour[all_scenes, b]], 1)
    objects = np.concatenate([place, colour], 2) * valid[..., None]
    at_a, at_b = place[all_scenes, a], place[all_scenes, b]
    numbers = [torch.tensor(part, dtype=torch.float32) for part in (objects, instruction, at_a, at_a - at_b)]
    slots = (torch.tensor(a), torch.tensor(b))
    return Scenes(numbers[0], torch.tensor(valid), numbers[1], *slots, *numbers[2:])


class Fetcher(nn.Module):
    """One layer of cross-attention: the instruction asks, the cubes answer; d_k = 8, d_v = 2 a head."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.layer = Attention(
            2 * COLOURS,
            heads,
            kernel="reference",
            head_width=8,
            value_width=2,
            context_width=2 + COLOURS,
            out_width=2,
            bias=False,
            out_bias=True,
        )

    def forward(self, scenes: Scenes) -> Tensor:
        """Return the answers ``[n, 2]`` (m)."""
        context = self.layer.keys_values(scenes.objects)
        return self.layer(scenes.instruction[:, None], context, masks.padding(scenes.valid))[:, 0]

    def weights(self, scenes: Scenes) -> Tensor:
        """Return how much each head looks at each slot, ``[n, heads, 6]``."""
        context = self.layer.keys_values(scenes.objects)
        return self.layer.weights(scenes.instruction[:, None], context, masks.padding(scenes.valid))[:, :, 0]


class Perceptron(nn.Module):
    """The baseline 60-64-64-2: it reads the six slots and the instruction side by side."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (COLOURS * (2 + COLOURS) + 2 * COLOURS, 64, 64)
        hidden = [part for i, o in pairwise(sizes) for part in (nn.Linear(i, o), nn.ReLU())]
        self.net = nn.Sequential(*hidden, nn.Linear(64, 2))

    def forward(self, scenes: Scenes) -> Tensor:
        """Return the answers ``[n, 2]`` (m)."""
        return self.net(torch.cat([scenes.objects.flatten(1), scenes.instruction], 1))


def loss(model: nn.Module, scenes: Scenes, task: Task) -> Tensor:
    """Return the mean of half the squared distance to the answer (m²)."""
    return 0.5 * (model(scenes) - getattr(scenes, task)).square().sum(1).mean()


def error(model: nn.Module, scenes: Scenes, task: Task) -> float:
    """Return the mean distance to the answer (cm)."""
    with torch.no_grad():
        return float(100 * (model(scenes) - getattr(scenes, task)).norm(dim=1).mean())


def tests() -> tuple[Scenes, Scenes]:
    """Return the two fixed test sets: 2 to 5 cubes, and 6, a number that no training scene has."""
    random = np.random.default_rng(TEST_SEED)
    return draw_scenes(random, TEST_SCENES, 2, 5), draw_scenes(random, TEST_SCENES, 6, 6)


def seeded(seed: int, make: Callable[..., Model], *arguments: int) -> Model:
    """Build a model whose first weights depend on the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make(*arguments)


def train(model: nn.Module, task: Task, steps: int, seed: int) -> Curve:
    """Train on fresh scenes; return (step, error with 2 to 5 cubes, with 6 (cm)) every 25 steps."""
    scenes, (usual, six) = draw_scenes(np.random.default_rng(seed), BATCH * steps, 2, 5), tests()
    optimiser = torch.optim.Adam(model.parameters(), lr=RATE)
    curve = [(0, error(model, usual, task), error(model, six, task))]
    for step in range(1, steps + 1):
        optimiser.zero_grad()
        torch.autograd.backward(loss(model, scenes.part(slice((step - 1) * BATCH, step * BATCH)), task))
        optimiser.step()
        if step % EVERY == 0:
            curve.append((step, error(model, usual, task), error(model, six, task)))
    return curve


def first_below(curve: Curve, limit: float) -> int:
    """Return the first tested step with an error below the limit (cm); past the last step if there is none."""
    return next((step for step, usual, _ in curve if usual < limit), curve[-1][0] + EVERY)


def on_target(model: Fetcher) -> tuple[list[float], list[float]]:
    """Return each head's mean weight on cube A and on cube B, over the test scenes of 2 to 5 cubes."""
    scenes, _ = tests()
    with torch.no_grad():
        looked = model.weights(scenes)
    there = [looked.gather(2, slot[:, None, None].expand(-1, looked.shape[1], 1)) for slot in (scenes.a, scenes.b)]
    return there[0].mean((0, 2)).tolist(), there[1].mean((0, 2)).tolist()


def gradient_error(heads: int = 1, step: float = 1e-5) -> float:
    """Return the largest difference of autograd and central differences, over the parameters of the layer."""
    model = seeded(0, Fetcher, heads).double()
    drawn = draw_scenes(np.random.default_rng(0), BATCH, 2, 5)
    doubles = {name: getattr(drawn, name).double() for name in ("objects", "instruction", "fetch", "vector")}
    scenes = Scenes(**{**vars(drawn), **doubles})
    torch.autograd.backward(loss(model, scenes, "fetch"))
    worst = 0.0
    for values, gradient in ((p.detach().view(-1), p.grad.view(-1)) for p in model.parameters() if p.grad is not None):
        for i in range(len(values)):
            worst = max(worst, abs(float(gradient[i]) - _slope(model, scenes, values, i, step)))
    return worst


@torch.no_grad()
def _slope(model: nn.Module, scenes: Scenes, values: Tensor, i: int, step: float) -> float:
    before, both = values[i].item(), []
    for value in (before + step, before - step):
        values[i] = value
        both.append(float(loss(model, scenes, "fetch")))
    values[i] = before
    return (both[0] - both[1]) / (2 * step)


@dataclass(frozen=True)
class Trained:
    """The curves of one seed, and what the heads look at in the end. first: the head of `pair` that took A."""

    fetch: Curve
    perceptron: Curve
    one_head: Curve
    two_heads: Curve
    fetch_weight: float
    pair_weights: tuple[float, float]
    pair: Fetcher
    first: int


def train_all(seed: int) -> Trained:
    """Train the four models of one seed."""
    layer, pair = seeded(seed, Fetcher, 1), seeded(seed, Fetcher, 2)
    fetch = train(layer, "fetch", FETCH_STEPS, seed)
    perceptron = train(seeded(seed, Perceptron), "fetch", FETCH_STEPS, seed)
    one_head = train(seeded(seed, Fetcher, 1), "vector", VECTOR_STEPS, seed)
    two_heads = train(pair, "vector", VECTOR_STEPS, seed)
    on_a, on_b = on_target(pair)
    first = int(on_a[1] > on_a[0])  # the head that took A
    looks = (on_a[first], on_b[1 - first])
    return Trained(fetch, perceptron, one_head, two_heads, on_target(layer)[0][0], looks, pair, first)


def run(progress: Progress) -> Result:
    """Run the experiment."""
    seeds = []
    for i, seed in enumerate(SEEDS, 1):
        seeds.append(train_all(seed))
        progress("e2 seeds", i, len(SEEDS))
    figure = _draw(seeds)
    series = {name: [getattr(one, name) for one in seeds] for name in ("fetch", "perceptron", "one_head", "two_heads")}
    return Result(
        "Cross-attention learns to fetch",
        "The instruction is the query, the cubes are keys and values. One layer finds the named cube after about two "
        "hundred steps and does so among six cubes, which it never saw together; a perceptron with 45 times its "
        "parameters does neither, because it must learn every slot and colour apart. One head gives one weighted "
        "average and no difference of two places; two heads do.",
        _rows(seeds),
        figure,
        "From the left: fetch, test error of the layer and the perceptron (five seeds; broken lines: six cubes); "
        "vector, one head against two; what the two heads look at in eight test scenes after training (A and B: the "
        "cubes named).",
        series,
    )


def _rows(seeds: list[Trained]) -> list[Row]:
    # The first weights and the unit of length behind the published steps are not known, and both move the medians (of
    # 24 seeds each: fetch 175 to 275, vector 262 to 500). So steps are held to a factor of two of the published median.
    layer, perceptron = seeded(0, Fetcher, 1), seeded(0, Perceptron)
    steps = [first_below(one.fetch, 2.0) for one in seeds]
    then = [{s: e for s, e, _ in one.perceptron}.get(step, 0.0) for one, step in zip(seeds, steps, strict=True)]
    six = [one.fetch[-1][2] for one in seeds]
    weight = [one.fetch_weight for one in seeds]
    stuck = [one.one_head[-1][1] for one in seeds]
    pair_steps = [first_below(one.two_heads, 3.0) for one in seeds]
    last = [one.two_heads[-1][1] for one in seeds]
    heads = [[one.pair_weights[i] for one in seeds] for i in (0, 1)]
    return [
        exact("parameters of the layer, one head", "182", _size(layer), 182),
        exact("parameters of the perceptron", "8194", _size(perceptron), 8194),
        row("gradient against central differences, all 182", "equal", gradient_error(), most=1e-8),
        row("fetch: steps until < 2 cm", "225 (175 to 250)", median(steps), least=113, most=450, shown=spread(steps)),
        row("fetch: the perceptron at that step (cm)", "> 20, about 25", min(then), least=20, shown=spread(then)),
        row("fetch, 6 cubes, after 600 steps (cm)", "< 3", max(six), most=3, shown=spread(six)),
        row("fetch: mean weight on the target", "about 0.97", median(weight), least=0.94, shown=spread(weight)),
        row("vector, 1 head, 1500 steps (cm)", "> 20, about 28", min(stuck), least=20, shown=spread(stuck)),
        row("vector, 2 heads: steps until < 3 cm", "425 (350 to 550)", median(pair_steps), least=213, most=850,
            shown=spread(pair_steps)),
        row("vector, 2 heads, in the end (cm)", "< 1", max(last), most=1, shown=spread(last)),
        row("vector: weight of the head on A", "0.98", median(heads[0]), least=0.94, shown=spread(heads[0])),
        row("vector: weight of the head on B", "0.97", median(heads[1]), least=0.94, shown=spread(heads[1])),
    ]  # fmt: skip


def _size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _draw(seeds: list[Trained]) -> Figure:
    figure, (fetch, vector, heads) = panels((1.2, 1.2, 1.0), height=3.6, total=13.0)
    for i, one in enumerate(seeds):
        _curve(fetch, one.fetch, BLUE, "layer, 182 parameters", i)
        _curve(fetch, one.perceptron, RED, "perceptron, 8,194 parameters", i)
        _curve(vector, one.one_head, OCHRE, "one head", i)
        _curve(vector, one.two_heads, GREEN, "two heads", i)
    for axes, title, limit in ((fetch, "fetch: where is A?", 2.0), (vector, "vector: A minus B", 3.0)):
        axes.axhline(limit, color="black", linewidth=0.8, linestyle=":")
        axes.annotate(f"{limit:g} cm", (0, limit), xytext=(2, 3), textcoords="offset points", fontsize=8)
        axes.set(title=title, xlabel="step", ylabel="test error (cm)", yscale="log", ylim=(0.2, 80))
        axes.set_yticks([0.3, 1, 3, 10, 30], ["0.3", "1", "3", "10", "30"])
    legend(fetch, loc="lower left")
    legend(vector, loc="lower left")
    _draw_heads(heads, seeds[0])
    return figure


def _curve(axes: Axes, curve: Curve, colour: str, label: str, seed: int) -> None:
    steps, usual, six = zip(*curve, strict=True)
    axes.plot(steps, usual, color=colour, linewidth=1.1, alpha=0.8, label=None if seed else label)
    axes.plot(steps, six, color=colour, linewidth=0.7, alpha=0.45, linestyle="--", label=None)


def _draw_heads(axes: Axes, one: Trained, shown: int = 8) -> None:
    """Draw the weights of both heads, one row a head, scene by scene; the slots' cubes are named A and B."""
    scenes, _ = tests()
    with torch.no_grad():
        looked = one.pair.weights(scenes.part(slice(shown)))[:, [one.first, 1 - one.first]]
    matrix(axes, looked.flatten(0, 1).numpy(), 0, 1)
    for scene in range(shown):
        axes.axhline(2 * scene - 0.5, color="#9aa5b1", linewidth=0.8)
        for name, slot in (("A", scenes.a), ("B", scenes.b)):
            for head in (0, 1):
                dark = looked[scene, head, int(slot[scene])] > 0.6
                where = (int(slot[scene]), 2 * scene + head)
                axes.annotate(name, where, ha="center", va="center", fontsize=7, color="white" if dark else "black")
    axes.set(title="two heads in eight scenes", xlabel="slot", xticks=range(COLOURS))
    axes.set_yticks(range(2 * shown), ["head on A", "head on B"] * shown, fontsize=6.5)
