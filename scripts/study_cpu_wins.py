"""What makes a policy faster on a CPU, each thing measured against the other, A B A B, in one run:

1. the start-up probe (threads, attention kernel) against PyTorch's defaults;
2. int8 weights against float32, with the success of both on the same episodes;
3. decoding with kept keys and values against computing the prefix again for every token or denoising step.

    python scripts/study_decoders.py               # trains the policies that act here
    python scripts/study_cpu_wins.py --core 1      # about 5 minutes

The second and third are timed on one core. The worked policies of 605 prefix tokens have random weights: time and
action errors are theirs, success is not. A figure is the median over rounds, its interval a bootstrap of 95 %; where
one thread does the work its processor time is compared (the wall's is beside it), where threads matter the wall's.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import tyro
from bench_decoders import denoise_anew
from cpu_wins_table import TITLES, WAYS, Spent, alternate, cells, clock, compared, verdict
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from robotattn import checkpoint
from robotattn.agents import PolicyAgent, exact_micro_batch
from robotattn.attention import fuse
from robotattn.attention.kernels import Kernel
from robotattn.config import from_dict
from robotattn.data.workers import run_tasks
from robotattn.envs import EnvConfig, make_env
from robotattn.evaluate import success_rate, write_json
from robotattn.latency.environment import environment, load
from robotattn.latency.modes import in_int8, parity, prepare, probe, use_kernel, using
from robotattn.latency.subject import of_checkpoint, of_policy
from robotattn.loop import read_observation, run_episodes
from robotattn.policies import ACTConfig, AutoregressiveConfig, BlockwiseConfig, Policy, PolicyConfig
from robotattn.policies.autoregressive import Autoregressive
from robotattn.policies.blocks import recall
from robotattn.policies.blockwise import Blockwise
from robotattn.seeds import stream
from robotattn.statistics import paired_difference
from robotattn.tokens.sequence import Tokens
from robotattn.types import Episode

PIXELS = ("act_pixels", "autoregressive_pixels", "blockwise_pixels")
STATE = ("autoregressive_state",)
SIDE_BY_SIDE = 8  # environments of a worker
SEEN = 3  # episodes whose observations are used for timing and action errors
DEADLINE = 900.0  # for the episodes of one policy (s)
_SIZE: dict[str, Any] = {
    "cameras": dict.fromkeys(("front", "wrist", "left"), (224, 224)), "stem": "patch", "patch": 16,
    "width": 512, "heads": 8, "feedforward": 2048,
}  # fmt: skip
WORKED: dict[str, PolicyConfig] = {
    "act_605": ACTConfig(
        encoder_layers=6, decoder_layers=6, chunk=100, grounding=False, attention_labels=False, **_SIZE
    ),
    "autoregressive_605": AutoregressiveConfig(layers=6, chunk=4, **_SIZE),
    "blockwise_605": BlockwiseConfig(layers=6, chunk=50, steps=10, **_SIZE),
}
"""As in profile_target.sh."""


@dataclass(frozen=True)
class Study:
    """What to measure."""

    runs: Path = Path("runs/decoders")
    """Folder of the trained policies, as study_decoders.py leaves it."""
    out: Path = Path("results/cpu")
    """Folder of wins.json and wins.md."""
    trained: tuple[str, ...] = PIXELS + STATE
    """Trained policies."""
    worked: tuple[str, ...] = tuple(WORKED)
    """Policies of 605 prefix tokens, with random weights."""
    episodes: int = 100
    """Episodes of each policy in float32 and in int8, the same for all."""
    seed: int = 4000
    """Base seed of the episodes."""
    rounds: int = 41
    """Rounds of A B A B, at most."""
    seconds: float = 5.0
    """After these, a measurement ends (five rounds are run in any case)."""
    workers: int = 2
    """Processes that run episodes."""
    core: int | None = None
    """Core that single-core measurements stay on (Linux); the least busy one is best."""


@dataclass(frozen=True)
class Case:
    """A policy and what it sees. weights: trained or random; observations of its own episodes, or random ones."""

    name: str
    weights: str
    policy: Policy
    batches: Sequence[dict[str, object]]

    @property
    def label(self) -> tuple[str, str]:
        """Name and weights."""
        return self.name, self.weights


Outcomes = dict[tuple[str, str], list[bool]]
"""Policy and way → success of each episode."""


def main(study: Study) -> None:
    missing = [name for name in study.trained if not (study.runs / name / "checkpoint").exists()]
    if missing:
        sys.exit(f"runs: no checkpoints of {', '.join(missing)} there; python scripts/study_decoders.py trains them")
    default = torch.get_num_threads()
    torch.set_num_threads(1)
    with Progress(console=Console(stderr=True)) as bars:
        outcomes = episodes(study, bars)
        before = environment(torch.device("cpu"), study.seed)
        rows = measure(study, cases(study), default, bars)
    for row in rows:
        if row["win"] == "int8":
            row["success"] = success(row["policy"], outcomes)
        row["verdict"] = verdict(row)
    result = {
        "script": "study_cpu_wins",
        "schema": 1,
        "kind": "cpu_wins",
        "default_threads": default,
        "seed": study.seed,
        "rows": rows,
        "environment": before,
        "load_after": load(),
    }
    write_json(study.out / "wins.json", result)
    lines = [TITLES, ("---",) * len(TITLES), *map(cells, rows)]
    (study.out / "wins.md").write_text("".join(f"| {' | '.join(one)} |\n" for one in lines), encoding="utf-8")
    table = Table(*TITLES)
    for one in lines[2:]:
        table.add_row(*one)
    Console().print(table)
    print(json.dumps(result, ensure_ascii=False))


# ------------------------------------------------------------------------------------------ episodes


def episodes(study: Study, bars: Progress) -> Outcomes:
    """Run every trained policy in float32 and in int8 on the same seeds; episodes that are in the file are not run."""
    file, tasks = study.out / "wins_episodes.json", [(name, way) for name in study.trained for way in WAYS]
    bar, found = bars.add_task("episodes", total=len(tasks)), Outcomes()
    data: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    for name, way in tasks:
        if data.get(f"{name} {way}", {}).get("of") == origin(study, name):
            found[name, way] = data[f"{name} {way}"]["successes"]
    left = [task for task in tasks if task not in found]
    bars.update(bar, completed=len(found))
    for (name, way), successes in run_tasks(partial(opened, study, left), range(len(left)), study.workers, DEADLINE):
        found[name, way] = successes
        write_json(file, data := data | {f"{name} {way}": {"of": origin(study, name), "successes": successes}})
        bars.advance(bar)
    return found


def origin(study: Study, name: str) -> dict[str, Any]:
    """What episodes depend on: their seeds and the weights."""
    weights = (study.runs / name / "checkpoint" / "model.safetensors").read_bytes()
    return {"seed": study.seed, "episodes": study.episodes, "weights": sha256(weights).hexdigest()}


@contextmanager
def opened(study: Study, tasks: Sequence[tuple[str, str]]) -> Iterator[Callable[[int], Any]]:
    """Give a worker the function that runs all episodes of one task."""
    torch.set_num_threads(1)
    yield lambda index: (tasks[index], [one.success for one in roll_out(study, *tasks[index], study.episodes)])


def roll_out(study: Study, name: str, way: str, count: int, keep: bool = False) -> list[Episode]:
    """Run one policy in one way on so many of the study's seeds; keep what it saw if asked to."""
    folder = study.runs / name / "checkpoint"
    subject, loaded = of_checkpoint(folder, "cpu", None), checkpoint.load(folder)
    trained = from_dict(EnvConfig, loaded.env, f"{name}: env")
    envs = [make_env(trained) for _ in range(min(SIDE_BY_SIDE, count))]
    seeds = stream("evaluate", study.seed, count)
    first = read_observation(envs[0].reset(seed=seeds[0])[0])
    act = prepare(subject.policy, "int8" if way == "int8" else "eager", subject.batcher.batch([first], subject.length))
    agent = PolicyAgent(act, subject.batcher, 1 / trained.hz, subject.policy.action_mode == "tool")
    agent.micro_batch = exact_micro_batch(agent, first, SIDE_BY_SIDE)
    found = sorted(run_episodes(envs, agent, seeds, keep=lambda seed: keep), key=lambda one: seeds.index(one.seed))
    for env in envs:
        env.close()
    return found


def success(name: str, outcomes: Outcomes) -> dict[str, Any] | None:
    """Success of a trained policy in both ways, with intervals, and the paired difference int8 - float32."""
    if (name, "int8") not in outcomes:
        return None
    pair = {way: outcomes[name, way] for way in WAYS}
    rates = {way: success_rate([{"success": one} for one in found]) for way, found in pair.items()}
    return {**rates, "difference": asdict(paired_difference(pair["float32"], pair["int8"]))}


# ------------------------------------------------------------------------------------------ time


def cases(study: Study) -> list[Case]:
    """The trained policies with observations of their own episodes, and the worked ones with random ones."""
    found = []
    for name in study.trained:
        subject = of_checkpoint(study.runs / name / "checkpoint", "cpu", None)
        seen = [step.observation for one in roll_out(study, name, "float32", SEEN, keep=True) for step in one.rows]
        found.append(Case(name, "trained", subject.policy, [subject.batcher.batch([one]) for one in seen]))
    for name in study.worked:
        subject = of_policy(name, WORKED[name], "cpu", seed=study.seed)
        fresh = subject.inputs(1, study.seed)
        batches = [subject.batcher.batch(fresh(), subject.length) for _ in range(4)]
        found.append(Case(name, "random", subject.policy, batches))
    return found


def measure(study: Study, found: Sequence[Case], default: int, bars: Progress) -> list[dict[str, Any]]:
    """Measure the three wins on every policy that they concern."""
    bar, rows = bars.add_task("", total=3 * len(found)), []
    parts: dict[str, Callable[[Case], list[dict[str, Any]]]] = {
        "start-up probe": partial(probed, study, default=default),
        "int8 weights": partial(rounded, study),
        "kept keys and values": partial(kept, study),
    }
    for what, work in parts.items():
        for case in found:
            bars.update(bar, description=f"{what}: {case.name}")
            with torch.no_grad():
                rows += work(case)
            bars.advance(bar)
        torch.set_num_threads(1)  # behind the probe, everything has one core
        if study.core is not None:
            os.sched_setaffinity(0, {study.core})
    return rows


def probed(study: Study, case: Case, default: int) -> list[dict[str, Any]]:
    """Let the probe choose, then time its choice against the defaults in rounds of their own."""
    policy, batches = case.policy, case.batches
    if case.name in STATE:
        return []  # too little work for two threads
    torch.set_num_threads(default)
    found = probe(policy, batches, sorted({1, default}), seconds=study.seconds)
    pair: tuple[tuple[int, Kernel], ...] = ((default, "sdpa"), (found["threads"], found["kernel"]))
    before, after = (f"{threads} thread{'s' * (threads > 1)}, {kernel}" for threads, kernel in pair)

    def timed(way: tuple[int, Kernel], batch: dict[str, object]) -> dict[str, Spent]:
        with using(policy, *way):
            policy.act(batch)  # a pool of threads of another size starts first
            return {"step": clock(lambda: policy.act(batch))[1]}

    def chosen(batch: dict[str, object]) -> Tensor:
        with using(policy, *pair[1]):
            return policy.act(batch)

    use_kernel(policy, "sdpa")  # a program would leave the choice set; here others are measured after it
    ways = {before: partial(timed, pair[0]), after: partial(timed, pair[1])}
    times = alternate(study.rounds, study.seconds, ways, batches)
    same = parity(policy, chosen, spread(batches, 8), exact=True)
    row = compared("probe", case.label, (before, after), "step", times, same, alone=False)
    return [row | {"candidates": found["candidates"]}]


def rounded(study: Study, case: Case) -> list[dict[str, Any]]:
    """Time a chunk's decoding, and the whole step: float32 as trained, its layers rearranged, and int8."""
    policy = case.policy
    ways = {"float32": policy, "float32, fused": fuse(policy), "int8, fused": in_int8(policy, case.batches[0])}

    def timed(one: Policy, batch: dict[str, object]) -> dict[str, Spent]:
        memory, first = clock(lambda: one.prefill(one.tokenize(batch)))
        _, second = clock(lambda: one.decode(memory))
        return {"decode": second, "step": first + second}

    times = alternate(
        study.rounds, study.seconds, {name: partial(timed, one) for name, one in ways.items()}, case.batches
    )
    same = parity(policy, ways["int8, fused"].act, spread(case.batches, 32), exact=False)
    pairs = (("float32", "decode"), ("float32", "step"), ("float32, fused", "decode"))
    return [compared("int8", case.label, (one, "int8, fused"), what, times, same) for one, what in pairs]


def kept(study: Study, case: Case) -> list[dict[str, Any]]:
    """Time decoding from an observation's tokens with kept keys and values, and without."""
    policy = case.policy
    if not isinstance(policy, Autoregressive | Blockwise):
        return []  # one pass decodes all actions: nothing is read twice

    def timed(work: Callable[[Tokens], Tensor], batch: dict[str, object]) -> dict[str, Spent]:
        tokens = policy.tokenize(batch)
        return {"prefix, decode": clock(lambda: work(tokens))[1]}

    ways = {"uncached": partial(uncached, policy), "cached": lambda tokens: policy.decode(policy.prefill(tokens))}
    times = alternate(
        study.rounds, study.seconds, {name: partial(timed, work) for name, work in ways.items()}, case.batches
    )
    same = parity(policy, lambda batch: uncached(policy, policy.tokenize(batch)), spread(case.batches, 4), exact=True)
    return [compared("cache", case.label, ("uncached", "cached"), "prefix, decode", times, same)]


def uncached(policy: Autoregressive | Blockwise, tokens: Tokens) -> Tensor:
    """Decode as the policy does, the prefix and all earlier actions computed anew for every token or step."""
    memory = policy.prefill(tokens)
    if isinstance(policy, Blockwise):
        first = iter([memory])
        steps = denoise_anew(policy, memory, lambda: recall(next(first, None) or policy.prefill(tokens)))
        offsets = policy.units.restore(steps)
        return policy.units.actions(offsets, memory.state)
    ids = torch.zeros(len(memory.state), *policy.units.shape, dtype=torch.long)
    for place in range(policy.chunk_tokens):
        memory = memory if place == 0 else policy.prefill(tokens)
        x = policy.action_tokens(memory, ids)[:, : place + 1]
        out = policy.decoder(x, policy.mask(memory.mask.shape[1]), cache=recall(memory))[:, -1]
        ids.flatten(1)[:, place] = policy.head.score(out, place % policy.bins.size).argmax(dim=-1)
    return policy.units.actions(policy.bins.decode(ids), memory.state)


def spread(batches: Sequence[dict[str, object]], count: int) -> Sequence[dict[str, object]]:
    """Return at most so many of the batches, over all of them."""
    return batches[:: -(-len(batches) // count)]


if __name__ == "__main__":
    main(tyro.cli(Study, description=__doc__))
