"""Compare the published ACT with LeRobot's own policy: equal weights, equal inputs, one core, blocks that alternate.

LeRobot lives in a virtual environment of its own (`--prepare` makes it) and in a process of its own; its weights are
copied into ours, and no speed is shown unless the actions agree. It gets images already normalised, as it asks for
them; ours gets uint8 and normalises them within the timed step. Then training steps: the same batch, AdamW, dropout as
published (LeRobot also drops attention weights and inside the feed-forward, ours does not) and, since that costs
time, once more without any.
This file is also the workers, so up here only the standard library is used.

    python scripts/bench_peer_act.py --prepare [--venv .bench/lerobot]
    python scripts/bench_peer_act.py [--venv .bench/lerobot] [--pairs 10] [--steps 5] [--train-pairs 3] [--batch 4]
"""

import argparse
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

TORCH = "torch==2.13.0"
BARE = ("lerobot==0.4.4", "torchvision==0.28.0")  # without what they depend on: gigabytes that its ACT does not use
LIGHT = ("draccus==0.11.6", "einops==0.8.2", "huggingface_hub==2.4.0", "numpy==2.4.6", "pillow==13.0.0", "safetensors")
RESULT = Path("results/peer_act/bench_peer_act.json")
CAMERAS, SIZE, STATE, ACTION, CHUNK = ("front", "top", "wrist"), 224, 13, 8, 100
MEAN, SCALE = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's, LeRobot's default for cameras
TOLERANCE = 1e-4
CHECKED = 6  # observations whose actions are compared
STAND_INS = (
    "not imported: torchvision's compiled operators, the registration of which fails beside this torch (its ResNet-18 "
    "and frozen norms are its own code); lerobot's Hub, dataset and optimiser modules (a bare nn.Module is the base "
    "class of its policy). lerobot/policies/act/ is used as it is."
)
Answer = Callable[[dict], dict]


def observations(seed: int, count: int) -> list[dict[str, Any]]:
    """Return the same observations in both processes: uint8 ``[1, 224, 224, 3]`` a camera and a normalised state."""
    import torch

    g = torch.Generator().manual_seed(seed)
    pictures = [torch.randint(0, 256, (count, 1, SIZE, SIZE, 3), generator=g, dtype=torch.uint8) for _ in CAMERAS]
    states = torch.randn(count, 1, STATE, generator=g)
    return [
        {"state": states[i], "images": {name: p[i] for name, p in zip(CAMERAS, pictures, strict=True)}}
        for i in range(count)
    ]


def teaching(seed: int, batch: int) -> dict[str, Any]:
    """Return one batch to learn from: rows of `observations`, and normalised actions, all of them real."""
    import torch

    rows = observations(seed, batch)
    images = {name: torch.cat([row["images"][name] for row in rows]) for name in CAMERAS}
    actions = torch.randn(batch, CHUNK, ACTION, generator=torch.Generator().manual_seed(seed))
    return {"state": torch.cat([row["state"] for row in rows]), "images": images, "actions": actions}


# ------------------------------------------------------------------------------------------------ the peer's process


def import_peer() -> tuple[Any, Any, Any]:
    """Import LeRobot's ACT without the rest of LeRobot; return its config, its policy and the two feature types."""
    import torch

    register = torch.library.register_fake
    torch.library.register_fake = lambda op, *a, **k: (
        (lambda function: function) if str(op).startswith("torchvision::") else register(op, *a, **k)
    )
    found = importlib.util.find_spec("lerobot")
    assert found and found.submodule_search_locations
    root = Path(found.submodule_search_locations[0])
    for package in ("lerobot", "lerobot.policies", "lerobot.optim", "lerobot.configs"):  # skips their __init__.py
        stand_in(package, __path__=[str(root.joinpath(*package.split(".")[1:]))])

    class PreTrainedPolicy(torch.nn.Module):
        def __init__(self, config: object) -> None:
            super().__init__()

    def unused(*_: object) -> None:
        raise NotImplementedError

    stand_in("lerobot.policies.pretrained", PreTrainedPolicy=PreTrainedPolicy)
    stand_in("lerobot.datasets", __path__=[])
    stand_in("lerobot.datasets.utils", flatten_dict=unused, unflatten_dict=unused, write_json=unused)
    stand_in("lerobot.utils.io_utils", deserialize_json_into_object=unused)
    stand_in(
        "lerobot.utils.utils",
        auto_select_torch_device=unused,
        is_amp_available=lambda device: False,
        is_torch_device_available=lambda device: True,
    )
    types_ = importlib.import_module("lerobot.configs.types")
    config = importlib.import_module("lerobot.policies.act.configuration_act").ACTConfig
    return config, importlib.import_module("lerobot.policies.act.modeling_act").ACTPolicy, types_


def stand_in(name: str, **attributes: object) -> None:
    """Put a module of these attributes where an import will find it."""
    sys.modules[name] = module = types.ModuleType(name)
    module.__dict__.update(attributes)


def peer(folder: Path) -> tuple[Answer, dict]:
    """Build LeRobot's policy at its defaults with random weights and norms; write weights and actions."""
    import torch

    config_class, policy_class, features = import_peer()
    visual = {f"observation.images.{name}": ("VISUAL", (3, SIZE, SIZE)) for name in CAMERAS}
    inputs, outputs = visual | {"observation.state": ("STATE", (STATE,))}, {"action": ("ACTION", (ACTION,))}
    typed = [
        {name: features.PolicyFeature(features.FeatureType(kind), shape) for name, (kind, shape) in group.items()}
        for group in (inputs, outputs)
    ]
    config = config_class(
        input_features=typed[0], output_features=typed[1], pretrained_backbone_weights=None, device="cpu"
    )
    torch.manual_seed(0)
    policy = policy_class(config)
    for name, value in policy.named_buffers():  # norms that do something
        if name.startswith("model.backbone") and not name.endswith("num_batches_tracked"):
            spread = torch.rand_like(value)
            value.copy_(0.5 + spread if name.endswith(("weight", "running_var")) else 0.4 * (spread - 0.5))
    torch.save(policy.state_dict(), folder / "weights.pt")
    mean, scale = (torch.tensor(x)[:, None, None] for x in (MEAN, SCALE))

    def prepare(batch: dict) -> dict:
        pictures = {k: (v.permute(0, 3, 1, 2).contiguous() / 255.0 - mean) / scale for k, v in batch["images"].items()}
        named = {f"observation.images.{k}": v for k, v in pictures.items()} | {"observation.state": batch["state"]}
        pad = torch.zeros(len(batch["state"]), CHUNK, dtype=torch.bool)
        return named | ({"action": batch["actions"], "action_is_pad": pad} if "actions" in batch else {})

    trainer = Trainer(policy, policy.get_optim_params())
    ready = [prepare(observation) for observation in observations(1, CHECKED)]
    torch.save([policy.predict_action_chunk(observation) for observation in ready], folder / "peer.pt")

    def answer(request: dict) -> dict:
        if "steps" in request:
            return {"ms": clock(policy.predict_action_chunk, ready, request["steps"])}
        batch = prepare(teaching(2, request["batch"]))
        return {"ms": trainer.run(lambda: policy(batch)[0], request["dropout"])}

    import torchvision

    count = sum(p.numel() for p in policy.parameters())
    return answer, {"versions": {"lerobot": BARE[0].split("==")[1], "torchvision": torchvision.__version__}} | {
        "parameters": count
    }


# --------------------------------------------------------------------------------------------------- our own process


def ours(folder: Path) -> tuple[Answer, dict]:
    """Build the published ACT with the peer's weights in every mode; write the actions of each."""
    import torch

    import robotattn
    from robotattn.policies import ACTResNetConfig, build
    from robotattn.policies.lerobot import load_lerobot
    from robotattn.tokens.normaliser import Moments, Statistics

    cameras = dict.fromkeys(CAMERAS, (SIZE, SIZE))
    config = ACTResNetConfig(action_mode="joint", cameras=cameras, instruction=False, colour_jitter=0.0)
    policy: Any = build(config)
    sizes = {"state": STATE, "action": ACTION, "position": 4}  # inputs are normalised already
    unit = {key: Moments(("x",) * n, (0.0,) * n, (1.0,) * n, 1.0) for key, n in sizes.items()}
    policy.set_statistics(Statistics(unit))
    load_lerobot(policy, torch.load(folder / "weights.pt"))
    modes = {"fp32": policy.optimised(), "bf16": policy.optimised(torch.bfloat16)}
    trainer = Trainer(policy, [{"params": list(policy.parameters())}], fused=True)
    ready = observations(1, CHECKED)
    for name, fast in modes.items():
        with torch.inference_mode():
            chunks = [fast.predict(fast.prefill(fast.tokenize(o))) for o in ready]
        torch.save(chunks, folder / f"{name}.pt")

    def answer(request: dict) -> dict:
        if "steps" in request:
            return {"ms": clock(modes[request["mode"]].act, ready, request["steps"])}
        batch = teaching(2, request["batch"]) | {"labels": {}}
        batch["actions_mask"] = torch.ones(request["batch"], CHUNK, dtype=torch.bool)
        bf16 = request["train"] == "bf16"

        def loss() -> Any:
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                return policy.loss(batch)["loss"]

        return {"ms": trainer.run(loss, request["dropout"])}

    return answer, {
        "versions": {"robotattn": robotattn.__version__, "torch": torch.__version__},
        "parameters": sum(p.numel() for p in policy.parameters()),
        "modes": list(modes),
    }


# ------------------------------------------------------------------------------------------------------ both of them


def clock(act: Callable[[dict], object], inputs: list[dict], steps: int) -> list[float]:
    """Return the milliseconds of each step; the inputs take turns."""
    import torch

    times = []
    with torch.inference_mode():
        for step in range(steps):
            start = time.perf_counter_ns()
            act(inputs[step % len(inputs)])
            times.append(1e-6 * (time.perf_counter_ns() - start))
    return times


class Trainer:
    """A training step: loss, gradient, clipping, AdamW (fused: as our trainer has it; LeRobot's preset has not)."""

    def __init__(self, policy: Any, groups: list[dict], fused: bool | None = None) -> None:
        import torch

        self.policy = policy
        self.optimiser = torch.optim.AdamW(groups, lr=1e-5, weight_decay=1e-4, fused=fused)

    def run(self, loss: Callable[[], Any], dropout: float) -> list[float]:
        """Return the milliseconds of one step."""
        import torch

        for module in self.policy.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = dropout
            elif isinstance(module, torch.nn.MultiheadAttention):
                module.dropout = dropout
        self.policy.train()
        start = time.perf_counter_ns()
        self.optimiser.zero_grad()
        loss().backward()
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), 10.0)
        self.optimiser.step()
        elapsed = 1e-6 * (time.perf_counter_ns() - start)
        self.policy.eval()
        return [elapsed]


def work(make: Callable[[Path], tuple[Answer, dict]], folder: Path) -> None:
    """Answer each line of JSON until the pipe closes."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not mix with the answers
    import torch

    torch.set_num_threads(1)
    answer, about = make(folder)
    print(json.dumps(about), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers, flush=True)


class Worker:
    """A worker process and the pipes to it."""

    def __init__(self, name: str, python: Path | str, folder: Path) -> None:
        self.name, self.log = name, folder / f"{name}.log"
        with self.log.open("w") as errors:
            self._process = subprocess.Popen(
                [str(python), __file__, "--worker", name, "--folder", str(folder)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        self.about = self._answer()

    def ask(self, **request: object) -> list[float]:
        """Return the milliseconds of each step of a block."""
        assert self._process.stdin
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()["ms"]

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()

    def _answer(self) -> dict:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"worker {self.name} ended; it said:\n{self.log.read_text()[-2000:]}")
        return json.loads(line)


# -------------------------------------------------------------------------------------------------------- the report


def prepare(venv: Path) -> None:
    """Make the peer's environment: this torch, LeRobot and torchvision alone, and the few packages its ACT imports."""
    python = venv / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], check=True)
    pip = [str(python), "-m", "pip", "install", "--quiet"]
    for packages in ((TORCH,), ("--no-deps", *BARE), (TORCH, *LIGHT)):
        print("pip install", *packages)
        subprocess.run([*pip, *packages], check=True)


def differences(folder: Path, mode: str) -> dict[str, float]:
    """Return how far a mode's actions are from the peer's, in normalised units, and how far those vary."""
    import torch

    mine, theirs = (torch.cat(torch.load(folder / f"{name}.pt")) for name in (mode, "peer"))
    gap = (mine - theirs).abs()
    return {"max": float(gap.max()), "mean": float(gap.mean()), "actions_std": float(theirs.std())}


def compare(workers: tuple[Worker, Worker], pairs: int, steps: int) -> dict[str, Any]:
    """Run blocks ours, theirs, ours, theirs, one mode after the other within a pair; return p50s (ms) and ratios."""
    mine, theirs = workers
    modes = mine.about["modes"]
    times: dict[str, list[list[float]]] = {name: [] for name in (*modes, "peer")}
    for name in modes:
        mine.ask(steps=3, mode=name)
    theirs.ask(steps=3)
    for _ in range(pairs):
        for name in modes:
            times[name].append(mine.ask(steps=steps, mode=name))
        times["peer"].append(theirs.ask(steps=steps))
    p50 = {name: statistics.median(ms for block in blocks for ms in block) for name, blocks in times.items()}
    medians = {name: [statistics.median(block) for block in blocks] for name, blocks in times.items()}
    paired = {name: [a / b for a, b in zip(medians[name], medians["peer"], strict=True)] for name in modes}
    ratios = {name: {"p50": p50[name] / p50["peer"], **_spread(paired[name])} for name in modes}
    return {"p50_ms": p50, "ratio": ratios, "steps": pairs * steps}


def teach(workers: tuple[Worker, Worker], pairs: int, batch: int, dropout: float) -> dict[str, Any]:
    """Run training steps ours, theirs, ours, theirs; return samples/s and, within pairs, how many times theirs."""
    columns: dict[str, list[float]] = {"fp32": [], "bf16": [], "peer": []}
    for row in range(pairs + 1):
        for name, column in columns.items():
            times = workers[name == "peer"].ask(train=name, batch=batch, dropout=dropout)
            column += times if row else []  # the first ones are the warm-up
    rates = {name: 1e3 * batch / statistics.median(column) for name, column in columns.items()}
    paired = {m: [b / a for a, b in zip(columns[m], columns["peer"], strict=True)] for m in ("fp32", "bf16")}
    ratios = {mode: {"p50": rates[mode] / rates["peer"], **_spread(paired[mode])} for mode in paired}
    return {"samples_per_s": rates, "ratio": ratios, "batch": batch, "dropout": dropout, "pairs": pairs}


def _spread(ratios: list[float]) -> dict[str, float]:
    return {"median_of_pairs": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}


def show(result: dict[str, Any]) -> None:
    """Print the table, then one line of JSON."""
    print(f"{'one control step':>22} {'p50 ms':>8} {'of LeRobot':>11} {'pairs':>13} {'largest error':>14} {'mean':>9}")
    for peer_ms in filter(None, [result["p50_ms"].get("peer")]):
        print(f"{'LeRobot fp32':>22} {peer_ms:>8.1f} {'1.00':>11}")
    for mode, ratio in result["ratio"].items():
        error, pairs = result["error"][mode], f"{ratio['min']:.2f}..{ratio['max']:.2f}"
        print(
            f"{'robotattn ' + mode:>22} {result['p50_ms'][mode]:>8.1f} {ratio['p50']:>11.2f} {pairs:>13} "
            f"{error['max']:>14.2e} {error['mean']:>9.1e}"
        )
    for row in result["training"]:
        rate = ", ".join(f"{name} {value:.2f}" for name, value in row["samples_per_s"].items())
        ratios = ", ".join(f"{name} {value['p50']:.2f}x" for name, value in row["ratio"].items())
        print(f"training, batch {row['batch']}, dropout {row['dropout']}: samples/s {rate}: {ratios} the peer's")
    print(json.dumps(result))


def processor() -> str:
    """Return the processor's name where the system tells it."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def measure(python: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Start both workers, check that they compute the same, and let them take turns."""
    workers: list[Worker] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        try:
            workers.append(Worker("lerobot", python, folder))  # first: it writes the weights
            workers.insert(0, Worker("robotattn", sys.executable, folder))
            pair = (workers[0], workers[1])
            error = {mode: differences(folder, mode) for mode in pair[0].about["modes"]}
            if not error["fp32"]["max"] <= TOLERANCE:
                raise SystemExit(f"no speed is shown: the actions differ by {error['fp32']['max']:.1e} > {TOLERANCE}")
            timed = compare(pair, options.pairs, options.steps) if options.pairs else {"p50_ms": {}, "ratio": {}}
            rates = [teach(pair, options.train_pairs, options.batch, p) for p in (0.1, 0.0) if options.train_pairs]
            about = {name: w.about for name, w in zip(("robotattn", "lerobot"), pair, strict=True)}
        finally:
            for worker in workers:
                worker.close()
    return {
        "schema": 1,
        "kind": "bench_peer_act",
        "what": "LeRobot's ACT defaults, 3 cameras at 224 x 224, chunk 100, batch 1, one core, weights copied",
        "error": error,
        **timed,
        "training": rates,
        "parameters": {name: value["parameters"] for name, value in about.items()},
        "versions": about["robotattn"]["versions"] | about["lerobot"]["versions"],
        "stand_ins": STAND_INS,
        "processor": processor(),
        "load": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prepare", action="store_true", help="make the peer's environment, and end")
    parser.add_argument("--venv", type=Path, default=Path(".bench/lerobot"), help="folder of the peer's environment")
    parser.add_argument("--pairs", type=int, default=10, help="pairs of blocks")
    parser.add_argument("--steps", type=int, default=5, help="control steps a block")
    parser.add_argument("--train-pairs", type=int, default=3, help="pairs of training steps, for each dropout")
    parser.add_argument("--batch", type=int, default=4, help="samples of a training step")
    parser.add_argument("--out", type=Path, default=RESULT, help="result file")
    parser.add_argument("--worker", choices=("robotattn", "lerobot"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return work(ours if options.worker == "robotattn" else peer, options.folder)
    if options.prepare:
        return prepare(options.venv.absolute())
    python = options.venv.absolute() / "bin" / "python"
    if not python.exists():
        raise SystemExit(
            f"{options.venv}: no Python there; make the peer's environment with --prepare (or name --venv)"
        )
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # one core for both; children inherit it
    result = measure(python, options)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    show(result)


if __name__ == "__main__":
    main()
