"""What one evaluation worker does: build its environments and its agent, run blocks of episodes, film some of them."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from robotattn import checkpoint, video
from robotattn.agents import ConstantAgent, PolicyAgent, RandomAgent, exact_micro_batch
from robotattn.config import from_dict
from robotattn.control.chunks import ChunkOptions
from robotattn.envs import EnvConfig, make_env
from robotattn.envs.cameras import gl_renderer
from robotattn.envs.experts import EXPERTS
from robotattn.latency.inputs import Batcher, frames
from robotattn.loop import Timing, run_episodes
from robotattn.sight import read_observation
from robotattn.timing import TimingConfig, of_row
from robotattn.types import Agent, Episode

STORY = ("time", "tries", "speed", "direction", "first_reversal", "second_reversal", "disturbed", "jump", "jumped_at")
MICRO_BATCH = 8  # rows of one call of the policy: 4 times less time a row than one at a time, on a CPU too


@dataclass(frozen=True)
class Job:
    """What to roll out; everything in it can be sent to another process."""

    seeds: tuple[int, ...]
    env: EnvConfig
    agent: str = "policy"
    checkpoint: Path | None = None
    device: str = "cpu"
    batch: int = 8
    """Environments, so many episodes at a time."""
    block: int = 8
    """Episodes given to a worker at once."""
    chunks: ChunkOptions = field(default_factory=ChunkOptions)
    timing: TimingConfig = field(default_factory=TimingConfig)
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of each reset."""
    videos: int = 0
    """Episodes with an index below this are filmed."""
    folder: Path = Path("videos")


@dataclass(frozen=True)
class Block:
    """What came of one block: a row for each episode, what was filmed, and on what machine."""

    rows: list[dict[str, Any]]
    films: list[dict[str, Any]]
    machine: dict[str, Any]


@contextmanager
def opened(job: Job) -> Iterator[Callable[[int], Block]]:
    """Give the function that runs the block starting at an episode's index; closes the environments at the end."""
    torch.set_num_threads(1)  # a core each: more threads than cores are ten times slower
    envs: list[gym.Env] = [make_env(job.env) for _ in range(min(job.batch, job.block))]
    try:
        agent, timing = make_agent(job, envs), job.timing.timing()
        yield lambda first: run_block(job, envs, agent, timing, first)
    finally:
        for env in envs:
            env.close()


def run_block(job: Job, envs: Sequence[gym.Env], agent: Agent, timing: Timing, first: int) -> Block:
    """Run the episodes from index `first` on."""
    index_of = {seed: first + place for place, seed in enumerate(job.seeds[first : first + job.block])}
    block = Block([], [], {})
    filmed = {seed for seed, index in index_of.items() if index < job.videos}
    period = round(1e9 / job.env.hz)
    options, seeds = dict(job.options), list(index_of)
    for episode in run_episodes(envs, agent, seeds, job.chunks, options, filmed.__contains__, timing):
        index = index_of[episode.seed]
        block.rows.append(row(index, episode) | {"timing": of_row(episode.timing, period)})
        if episode.seed in filmed:
            block.films.append(film(job.folder, index, episode, job.env.hz))
    block.machine.update(machine(job.device))
    return block


def make_agent(job: Job, envs: Sequence[gym.Env]) -> Agent:
    """The agent that a job names; raises UsageError for a checkpoint that cannot act here."""
    period, space = 1 / job.env.hz, envs[0].action_space
    assert isinstance(space, gym.spaces.Box)
    match job.agent:
        case "zero":
            return ConstantAgent(np.zeros(space.shape), period)
        case "random":
            return RandomAgent(space.low.astype(np.float64), space.high.astype(np.float64), period)
        case "expert":
            return EXPERTS[job.env.task](envs)
    assert job.checkpoint is not None
    loaded = checkpoint.load(job.checkpoint, job.device)
    batcher = Batcher(loaded.tokenizer.encode, list(loaded.config.cameras), job.device, *frames(loaded.config))
    trained = from_dict(EnvConfig, loaded.env, f"{job.checkpoint}: env")
    policy, anchored = loaded.policy, loaded.policy.action_mode == "tool"
    act_on = policy.act_on if job.chunks.kind == "real-time" else None
    agent = PolicyAgent(policy.act, batcher, 1 / trained.hz, anchored, act_on=act_on)
    first, _ = envs[0].reset(seed=job.seeds[0], options=dict(job.options))  # the same for every worker
    agent.micro_batch = exact_micro_batch(agent, read_observation(first), MICRO_BATCH)
    return agent


def machine(device: str) -> dict[str, Any]:
    """What a result may depend on beside the checkpoint and the configuration."""
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else "cpu"
    return {
        "versions": checkpoint.versions(),
        "renderer": gl_renderer(),
        "device": name,
        "torch_threads": torch.get_num_threads(),
        "cpu_count": os.cpu_count(),
    }


def row(index: int, episode: Episode) -> dict[str, Any]:
    """One line of the result: the seed, what came of it, and what the scene was."""
    return {
        "index": index,
        "seed": episode.seed,
        "success": episode.success,
        "reason": episode.reason,
        "terminated": episode.terminated,
        "truncated": episode.truncated,
        "failure": episode.info["failure"],
        "steps": episode.steps,
        "instruction": episode.instruction,
        "objects": episode.info["objects"],
        "colour": episode.info["colour"],
        "language": episode.info["language"],
        **{name: episode.info[name] for name in STORY if name in episode.info},
    }


def film(folder: Path, index: int, episode: Episode, hz: float) -> dict[str, Any]:
    """Write an episode's video and filmstrip; return their names and the number of frames read back."""
    observations = [step.observation for step in episode.rows]
    frames = [video.picture(observation, episode.instruction) for observation in observations]
    movie, strip = folder / f"episode_{index:04}.mp4", folder / f"episode_{index:04}.png"
    count = video.write(movie, frames, hz)
    video.write_png(strip, video.filmstrip(observations))
    return {
        "index": index,
        "instruction": episode.instruction,
        "reason": episode.reason,
        "frames": count,
        "video": f"{folder.name}/{movie.name}",
        "filmstrip": f"{folder.name}/{strip.name}",
    }
