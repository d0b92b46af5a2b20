"""The command line: `robotattn COMMAND ...`, one command a stage, files in and files out.

Every command ends with a table and, last on standard output, one line of JSON; progress and errors go to standard
error. Exit codes: 0 done, 1 failed, 2 the request cannot be carried out as it stands, 130 interrupted.
"""

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from robotattn import __version__
from robotattn.commands_frontier import frontier
from robotattn.commands_latency import compare, plan, sweep
from robotattn.commands_live import live
from robotattn.config import UsageError, load
from robotattn.console import Progress, finish, pick, table, warn
from robotattn.flags import find, parse, shipped_configs, with_checkpoint

# Nothing heavier is imported here: help and mistakes answer at once, and each command brings what it needs.

# ------------------------------------------------------------------------------------------- commands


def record(arguments: list[str]) -> int:
    """Record demonstrations of the scripted expert: robotattn record --out FOLDER [flags]."""
    from robotattn.data.record import RecordConfig
    from robotattn.data.record import record as run

    config = parse(RecordConfig, arguments, record, markers=[tyro.conf.OmitArgPrefixes])  # --hz, not --env.hz
    with Progress() as shown:
        result = run(config, shown)
    return finish(
        "record", result, pick(result, "folder episodes recorded frames attempts expert_rate damaged seconds")
    )


def verify(arguments: list[str]) -> int:
    """Check a folder of demonstrations, file by file: robotattn verify FOLDER."""
    from robotattn.data.verify import verify as run

    def arrange(
        folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")], no_replay: bool = False
    ) -> tuple[Path, bool]:
        """Take the folder.

        Args:
            folder: What `robotattn record` wrote.
            no_replay: Only read the files; do not send the recorded actions again.
        """
        return folder, no_replay

    folder, no_replay = parse(arrange, arguments, verify)
    with Progress() as shown:
        result = run(folder, shown, replay=not no_replay)
    warn(result["bad"])
    finish("verify", result, [*pick(result, "folder episodes frames replayed"), ("bad", len(result["bad"]))])
    return 1 if result["bad"] else 0


def train(arguments: list[str]) -> int:
    """Train a policy: robotattn train CONFIG.yaml [flags that override the file's values] [--resume]."""
    name, rest = first(arguments, train)
    from robotattn.train import TrainConfig
    from robotattn.train import train as run

    default = load(find(name, "configs", ".yaml"), TrainConfig)

    def arrange(
        config: Annotated[TrainConfig, tyro.conf.arg(name="")] = default, resume: bool = False
    ) -> tuple[TrainConfig, bool]:
        """Take the file's values and the flags.

        Args:
            resume: Go on from the last checkpoint of this run; start it if there is none.
        """
        return config, resume

    config, resume = parse(arrange, rest, train, name)
    last: dict[str, Any] = {}
    began = time.monotonic()
    with Progress() as shown:
        folder = run(config, resume=resume, progress=shown, callbacks=[last.update])
    result = {"folder": str(folder), **last, "steps": config.steps, "seconds": time.monotonic() - began}
    return finish("train", result, result.items())


def evaluate(arguments: list[str]) -> int:
    """Roll a checkpoint out and count the successes: robotattn evaluate CHECKPOINT [flags], or --agent expert."""
    from robotattn.evaluate import EvaluateConfig, result_path
    from robotattn.evaluate import evaluate as run

    config = parse(EvaluateConfig, with_checkpoint(arguments), evaluate)
    with Progress() as shown:
        result = run(config, shown)
    sooner = {name: result[name] for name in result if name.startswith("success_")}
    rates = {"all": result["success"]} | {name[8:].replace("_", " "): rate for name, rate in sooner.items()}
    rates |= {f"{key} {value}": rate for key, part in result["by"].items() for value, rate in part.items()}
    rows = [
        (name, f"{r['rate']:.1%}", f"{r['low']:.1%} to {r['high']:.1%}", r["episodes"]) for name, r in rates.items()
    ]
    warn(result["warnings"])
    late = result["timing"]
    if "safety" in late or (late["latency_ms"] is not None and late["latency_ms"]["max"] > 0):
        table("how late", how_late(late), ("", "n", "mean", "p50", "p95", "p99", "max"))
    short = {"file": str(result_path(config)), **result["success"], **sooner, "reasons": result["reasons"]}
    short["timing"] = late
    return finish("evaluate", short, rows, ("", "success", "95 % interval", "episodes"))


def how_late(timing: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """The rows of a table: latencies and ages (ms), and the shares of inferences and ticks that were late."""
    rows: list[tuple[Any, ...]] = []
    counted = {"latency (ms)": timing["latency_ms"], "age of a command's observation (ms)": timing["age_ms"]}
    counted |= {f"age of what {name} saw (ms)": found for name, found in timing["sensor_age_ms"].items()}
    for title, found in counted.items():
        if found is not None:
            rows.append((title, *(found[name] for name in ("n", "mean", "p50", "p95", "p99", "max"))))
    rows.append(("inferences longer than a tick", timing["inferences"], f"{timing['miss_rate']:.1%}", *[""] * 4))
    if "safety" in timing:
        safety = timing["safety"]
        rows.append(("commands changed by the safety filter", safety["commands"], f"{safety['changed']}", *[""] * 4))
        for kind, one in safety["kinds"].items():
            rows.append((f"... {kind} ({one['unit']})", one["count"], one["mean"], *[""] * 3, one["largest"]))
    for phase, what in (("held", "ticks with no action left"), ("cold", "ticks before the first chunk")):
        rows.append((what, timing["ticks"], f"{timing[phase]:.1%}", *[""] * 4))
    return rows


def profile(arguments: list[str]) -> int:
    """Time a policy against its bounds and a control rate: robotattn profile CONFIG|CHECKPOINT [--hz 50] [flags]."""
    if "--sweep" in arguments:
        return sweep(arguments)
    began = time.perf_counter()
    from robotattn.latency import tables
    from robotattn.latency.profile import ProfileConfig, result_path
    from robotattn.latency.profile import profile as run
    from robotattn.latency.subject import resolve

    imported = time.perf_counter() - began
    if arguments and not arguments[0].startswith("-"):
        kind, path = resolve(arguments[0])
        arguments = [f"--{kind}", str(path), *arguments[1:]]
    config = parse(ProfileConfig, arguments, profile)
    with Progress() as shown:
        result = run(
            config, shown, lambda found: shown.between(lambda: print(tables.text(tables.first(found)))), imported
        )
    print(tables.text(tables.measured(result)))
    warn(result["warnings"])
    short = {name: result[name] for name in ("mode", "verdict", "clock")} | tables.short(result)
    rows = [("file", result_path(config)), ("verdict", tables.verdict(result) or "no --hz was asked for")]
    return finish("profile", {"file": str(result_path(config)), **short}, rows)


def report(arguments: list[str]) -> int:
    """Make one page of everything measured in a folder: robotattn report FOLDER."""
    from robotattn.report import ReportConfig, gather
    from robotattn.report import report as run

    config = parse(ReportConfig, arguments, report)
    page = run(config)
    rows, measured = [], []
    for found in gather(config.folders):
        rate = found.evaluations[0]["success"] if found.evaluations else None
        step = (found.profiles[0]["step"] or {}).get("p50") if found.profiles else None
        success = f"{rate['rate']:.1%} ({rate['low']:.1%} to {rate['high']:.1%})" if rate else ""
        rows.append((found.name, success, rate["episodes"] if rate else "", "" if step is None else step))
        measured.append({"name": found.name, "success": rate, "step_p50_ms": step})
    titles = ("", "success (95 % interval)", "episodes", "step p50 (ms)")
    return finish("report", {"file": str(page), "runs": measured}, rows, titles)


def experiments(arguments: list[str]) -> int:
    """Run the attention experiments against published figures: robotattn experiments [e1 ... e7] [--out FOLDER]."""
    from robotattn.experiments.suite import ExperimentsConfig
    from robotattn.experiments.suite import experiments as run

    config = parse(ExperimentsConfig, arguments, experiments)
    with Progress() as shown:
        result = run(config, shown)
    rows = []
    for one in result["experiments"]:
        columns = ("quantity", "published", "shown", "verdict")
        compared = [[row[column] for column in columns] for row in one["rows"]]
        table(f"{one['name']} {one['title']}", compared, ("quantity", "published", "measured", "verdict"))
        agreeing = sum(row["verdict"] == "agrees" for row in one["rows"])
        rows.append((one["name"], one["title"], f"{agreeing} of {len(compared)}", one["seconds"]))
    warn(f"differs from the published figure: {quantity}" for quantity in result["differs"])
    short = {"file": result["page"], **{name: result[name] for name in ("agrees", "rows", "differs", "seconds")}}
    finish("experiments", short, rows, ("", "experiment", "agree", "seconds"))
    return 0 if result["agrees"] else 1


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    command.__name__: command
    for command in (record, verify, train, evaluate, live, profile, plan, frontier, compare, report, experiments)
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    # Torch's threads must not spin while they wait: with other programs on the same cores that costs a factor of eight.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    name, *rest = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("-h", "--help"):
        print(usage())
        return 0
    if name == "--version":
        print(f"robotattn {__version__}")
        return 0
    try:
        if name not in COMMANDS:
            raise UsageError(f"{name}: no such command; allowed: {', '.join(COMMANDS)}")
        return COMMANDS[name](rest)
    except UsageError as error:
        return fail(" ".join(str(error).split()), 2)
    except OSError as error:
        return fail(f"{error.filename}: {error.strerror}" if error.filename else str(error), 1)
    except KeyboardInterrupt:
        return fail(f"{name}: interrupted", 130)
    except RuntimeError as error:
        if not type(error).__module__.startswith("robotattn"):
            raise  # a mistake in the program: its traceback is what helps
        return fail(str(error), 1)


def usage() -> str:
    """The help of `robotattn` itself: one line a command."""
    lines = [f"  {name:12}{(command.__doc__ or '').split(':')[0]}" for name, command in COMMANDS.items()]
    head = "Attention policies on a tabletop: demonstrations, training, success, latency."
    return "\n".join(
        [
            "usage: robotattn COMMAND [-h] ...",
            "",
            head,
            "",
            *lines,
            "\n  robotattn COMMAND --help says what a command takes.",
        ]
    )


def fail(message: str, code: int) -> int:
    """Say on standard error what went wrong."""
    print(f"robotattn: {message}", file=sys.stderr)
    return code


def first(arguments: list[str], command: Callable[..., int]) -> tuple[str, list[str]]:
    """Split off the first argument, a configuration; without one say which there are."""
    wanted = f"CONFIG is a YAML file, your own or one of these: {', '.join(shipped_configs())}"
    if arguments and arguments[0] in ("-h", "--help"):
        print(
            f"{command.__doc__}\n\n{wanted}\nrobotattn {command.__name__} CONFIG --help shows its values and the flags."
        )
        raise SystemExit(0)
    if not arguments or arguments[0].startswith("-"):
        raise UsageError(f"{command.__name__}: the first argument must be a configuration; {wanted}")
    return arguments[0], arguments[1:]


if __name__ == "__main__":
    sys.exit(main())
