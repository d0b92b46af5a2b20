"""Evaluation: the same rows however the work is split, honest successes, clean episodes, true videos."""

import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from robotattn import checkpoint, rollouts, video
from robotattn.agents import ConstantAgent, PolicyAgent, RandomAgent, exact_micro_batch
from robotattn.config import UsageError, to_dict
from robotattn.control.chunks import ChunkOptions
from robotattn.envs import EnvConfig, make_env
from robotattn.envs.experts import PickUpExpert
from robotattn.evaluate import EvaluateConfig, evaluate, summarise
from robotattn.latency.inputs import Batcher, random_observation
from robotattn.loop import run_episodes
from robotattn.policies import ACTConfig, build
from robotattn.seeds import stream
from robotattn.statistics import wilson
from robotattn.tokens.normaliser import Moments, Statistics
from robotattn.tokens.text import default_tokenizer

SMALL = {"width": 32, "feedforward": 32, "text_width": 16, "stem_channels": 8}
ENV = EnvConfig(time_limit=0.8, object_tokens=True)
SEEDS = stream("evaluate", 5, 20)


def random_policy(**changes):
    """An untrained ACT that moves the tool by some centimetres."""
    torch.manual_seed(3)
    config = ACTConfig(**({"objects": True} | SMALL | changes))
    policy = build(config)
    size = {"tool": 5, "joint": 8}[config.action_mode]
    policy.set_statistics(
        Statistics({"state": moments(13, 1.0), "action": moments(size, 0.05), "position": moments(4, 0.3)})
    )
    return policy.eval()


def moments(size, scale):
    return Moments(tuple(f"d{i}" for i in range(size)), (0.0,) * size, (scale,) * size, 1e-3)


def policy_agent(policy, micro_batch=1):
    batcher = Batcher(default_tokenizer().encode, list(policy.config.cameras))
    return PolicyAgent(policy.act, batcher, 0.1, policy.action_mode == "tool", micro_batch)


@pytest.fixture(scope="module")
def policy():
    return random_policy()


@pytest.fixture(scope="module")
def envs():
    made = [make_env(ENV) for _ in range(20)]
    yield made
    for env in made:
        env.close()


@pytest.fixture(scope="module")
def saved(policy, tmp_path_factory):
    """A checkpoint folder that says it was made with another MuJoCo."""
    folder = tmp_path_factory.mktemp("run") / "checkpoint"
    about = checkpoint.fingerprint() | {"env": to_dict(replace(ENV, time_limit=1.5))}
    about["versions"] = about["versions"] | {"mujoco": "3.0.0"}
    checkpoint.save(folder, policy, {"policy": {"act": to_dict(policy.config)}}, default_tokenizer(), about)
    return folder


def trace(envs, agent, seeds, chunks=None, options=None):
    """Seed → every command sent, as bytes, and the last tool pose: the sharpest comparison there is."""
    found = {}
    for episode in run_episodes(envs, agent, seeds, chunks, options, keep=lambda seed: True):
        commands = b"".join(step.command.action.tobytes() for step in episode.rows)
        found[episode.seed] = (episode.steps, commands, episode.rows[-1].observation.state.tobytes())
    return found


# ------------------------------------------------------------------------------------------------ O20, O21


@pytest.mark.parametrize("micro_batch", [1, 8])
def test_an_episode_is_the_same_to_the_last_bit_in_batches_of_1_4_7_and_20(envs, policy, micro_batch):
    agent = policy_agent(policy, micro_batch)
    alone = trace(envs[:1], agent, SEEDS)
    assert len(set(alone.values())) == len(SEEDS)  # the comparison can see a difference
    for batch in (4, 7, 20):
        assert trace(envs[:batch], agent, SEEDS) == alone
    assert trace(envs[:3], agent, SEEDS[4::-1]) == {seed: alone[seed] for seed in SEEDS[:5]}


@pytest.mark.parametrize("chunks", [ChunkOptions(execute=4), ChunkOptions(ensemble=0.1)])
def test_an_episode_broken_off_mid_chunk_leaves_nothing_behind(envs, policy, chunks):
    agent = policy_agent(policy, 8)
    fresh_env = make_env(ENV)
    isolated = trace([fresh_env], policy_agent(policy, 8), SEEDS[1:2], chunks)
    fresh_env.close()
    broken = run_episodes(envs[:1], agent, SEEDS[:1], chunks)
    envs[0].reset(seed=SEEDS[0])
    agent.plan([0], [random_observation(policy.config, np.random.default_rng(0), ["pick up the red cube"])])
    broken.close()
    assert trace(envs[:1], agent, SEEDS[1:2], chunks) == isolated
    assert {seed: trace(envs[:4], agent, SEEDS[:8], chunks)[seed] for seed in isolated} == isolated


def test_another_instruction_in_the_same_scene_leaves_nothing_behind(envs, policy):
    """O21: the plain episodes before and after are the same to the last bit, and the other ones as in a fresh agent."""
    agent, other = policy_agent(policy, 8), {"other": True}
    plain = trace(envs[:3], agent, SEEDS[:6])
    swapped = trace(envs[:3], agent, SEEDS[:6], options=other)
    assert all(swapped[seed] != plain[seed] for seed in SEEDS[:6])
    assert trace(envs[:3], agent, SEEDS[:6]) == plain
    fresh = make_env(ENV)
    assert trace([fresh], policy_agent(policy, 8), SEEDS[:6], options=other) == swapped
    fresh.close()


def test_a_policy_whose_rows_meet_is_run_one_row_at_a_time(policy):
    seen = random_observation(policy.config, np.random.default_rng(1), ["pick up the red cube"])
    agent = policy_agent(policy)
    assert exact_micro_batch(agent, seen, 8) == 8

    def mixing(batch):
        actions = policy.act(batch)
        return actions + 1e-6 * actions.mean(0, keepdim=True)

    mixed = PolicyAgent(mixing, agent.batcher, 0.1, True)
    assert exact_micro_batch(mixed, seen, 8) == 1


def test_padded_batches_agree_with_single_rows_for_images_and_mixed_text_lengths():
    policy = random_policy(objects=False, cameras={"front": (32, 32), "wrist": (32, 48)})
    texts = ["pick up the red cube", "拿起红色方块", "please " * 20 + "take the blue block", ""]
    generator = np.random.default_rng(0)
    observations = [random_observation(policy.config, generator, texts[i % 4 :][:1]) for i in range(11)]
    single = [plan.actions for plan in policy_agent(policy).plan(range(11), observations)]
    padded = [plan.actions for plan in policy_agent(policy, 4).plan(range(11), observations)]
    np.testing.assert_allclose(padded, single, atol=1e-6)
    again = [policy_agent(policy, 4).plan([0], [observation])[0].actions for observation in observations]
    np.testing.assert_array_equal(padded, again)


def test_plans_carry_the_tool_pose_of_their_observation_only_in_tool_mode(policy):
    seen = random_observation(policy.config, np.random.default_rng(0), ["pick up the red cube"])
    seen.state[8:13] = [0.4, 0.1, 0.3, np.sin(0.7), np.cos(0.7)]
    np.testing.assert_allclose(policy_agent(policy).plan([0], [seen])[0].anchor, [0.4, 0.1, 0.3, 0.7], atol=1e-6)
    assert policy_agent(random_policy(action_mode="joint")).plan([0], [seen])[0].anchor is None


def test_a_missing_camera_is_named(policy):
    seen = random_observation(policy.config, np.random.default_rng(0), ["pick up the red cube"])
    with pytest.raises(ValueError, match=r"images\.top.*has none"):
        Batcher(default_tokenizer().encode, ["top"]).batch([seen])


# ------------------------------------------------------------------------------------------ O08, baselines


def test_zero_and_random_actions_never_succeed_and_end_at_the_time_limit(envs):
    box = envs[0].action_space
    for agent in (ConstantAgent(np.zeros(5), 0.1), RandomAgent(box.low, box.high, 0.1)):
        episodes = list(run_episodes(envs[:4], agent, SEEDS[:8]))
        assert [(e.success, e.reason, e.steps) for e in episodes] == [(False, "time_limit", 8)] * 8
        assert trace(envs[:3], agent, SEEDS[:4]) == trace(envs[:1], agent, SEEDS[:4])


def test_success_at_the_last_allowed_step_is_a_success_and_one_step_less_is_not():
    def run(time_limit):
        env = make_env(EnvConfig(time_limit=time_limit))
        episode = next(run_episodes([env], PickUpExpert([env]), SEEDS[:1]))
        env.close()
        return episode

    steps = run(6.0).steps
    last, short = run(steps / 10), run((steps - 1) / 10)
    assert (last.success, last.reason, last.steps) == (True, "success", steps)
    assert (last.terminated, last.truncated) == (True, False)
    assert (short.success, short.reason, short.steps) == (False, "time_limit", steps - 1)
    assert (short.terminated, short.truncated) == (False, True)


# ----------------------------------------------------------------------------------------------- end to end


def test_evaluation_of_a_checkpoint_end_to_end(saved):
    seen = []
    config = EvaluateConfig(checkpoint=saved, episodes=5, seed=7, batch=2, workers=2, videos=1, objects=6, execute=4)
    result = evaluate(config, lambda *step: seen.append(step))
    written = json.loads((saved.parent / "evaluation.json").read_text())
    assert written == json.loads(json.dumps(result))
    assert (result["schema"], result["kind"]) == (1, "evaluation")
    assert [row["seed"] for row in result["rows"]] == stream("evaluate", 7, 5)
    assert {row["objects"] for row in result["rows"]} == {6}
    assert all(row["reason"] == "time_limit" and row["failure"] for row in result["rows"])
    for row in result["rows"]:  # O08: what ended it can be read from the row
        assert (row["success"], row["terminated"], row["truncated"], row["steps"]) == (False, False, True, 15)
    assert result["success"]["high"] == wilson(0, 5).high
    assert result["fingerprint"]["sha256"]["model.safetensors"]
    assert any("mujoco" in warning and "3.0.0" in warning for warning in result["warnings"])
    assert seen[0] == ("evaluate", 0, 5) and seen[-1] == ("evaluate", 5, 5)
    (film,) = result["videos"]
    assert film["frames"] == result["rows"][0]["steps"] == len(video.read(saved.parent / film["video"]))
    assert (saved.parent / film["filmstrip"]).is_file()


def test_the_expert_gives_the_same_rows_for_one_and_for_two_workers(tmp_path):
    config = EvaluateConfig(agent="expert", episodes=7, batch=3, workers=2, out=tmp_path)
    two = evaluate(config)["rows"]
    assert all(row["success"] for row in two) and len({row["steps"] for row in two}) > 1
    assert evaluate(replace(config, batch=20, workers=1))["rows"] == two


def test_naming_another_cube_keeps_the_scene_and_changes_the_instruction():
    job = rollouts.Job(tuple(SEEDS[:3]), ENV, "zero", batch=3)
    with rollouts.opened(job) as run, rollouts.opened(replace(job, options={"other": True})) as other:
        first, second = run(0).rows, other(0).rows
    assert [row["objects"] for row in first] == [row["objects"] for row in second]
    assert all(a["colour"] != b["colour"] for a, b in zip(first, second, strict=True))


def in_this_process(opening, tasks, *limits):
    """In place of `run_tasks`, without the seconds that a process needs to start."""
    with opening() as work:
        yield from map(work, tasks)


def test_joint_policies_trained_on_tool_recordings_act_in_a_joint_world(tmp_path, monkeypatch):
    """One recording serves both kinds of action: the world of the evaluation takes what the policy says."""
    policy = random_policy(action_mode="joint")
    about = checkpoint.fingerprint({"env": to_dict(EnvConfig(object_tokens=True, time_limit=0.3))})
    config = {"policy": {"act": to_dict(policy.config)}}
    checkpoint.save(tmp_path / "joint", policy, config, default_tokenizer(), about)
    monkeypatch.setattr("robotattn.evaluate.run_tasks", in_this_process)
    result = evaluate(EvaluateConfig(tmp_path / "joint", episodes=2, workers=1, out=tmp_path / "joint.json"))
    assert result["env"]["action_mode"] == "joint"
    assert [row["reason"] for row in result["rows"]] == ["time_limit", "time_limit"]


def test_evaluations_of_neighbouring_base_seeds_share_no_episode(tmp_path, monkeypatch):
    """O09: seeds as written to the results of three evaluations with eight environments each, and their scenes."""
    monkeypatch.setattr("robotattn.evaluate.run_tasks", in_this_process)
    seeds, scenes, env = [], set(), make_env(EnvConfig(min_objects=2, max_objects=2))
    for base in (0, 1, 2):
        evaluate(EvaluateConfig(agent="zero", episodes=8, batch=8, seed=base, hz=1, out=tmp_path / str(base)))
        written = json.loads((tmp_path / str(base) / "evaluation.json").read_text())
        seeds += [row["seed"] for row in written["rows"]]
    for seed in seeds:
        env.reset(seed=seed)
        scenes.add(env.layout.position.tobytes())
    env.close()
    assert len(seeds) == len(set(seeds)) == len(scenes) == 24


@pytest.mark.parametrize(("flags", "chunks"), [({}, ChunkOptions()), ({"ensemble": 0.1}, ChunkOptions(ensemble=0.1))])
def test_the_options_of_the_chunks_reach_the_workers(monkeypatch, tmp_path, flags, chunks):
    """O15: an ensemble that is asked for is not left out on the way."""
    jobs = []

    def seen(opening, *arguments):
        jobs.append(opening.args[0])
        raise KeyboardInterrupt

    monkeypatch.setattr("robotattn.evaluate.run_tasks", seen)
    with pytest.raises(KeyboardInterrupt):
        evaluate(EvaluateConfig(agent="zero", out=tmp_path, **flags))
    assert jobs[0].chunks == chunks


def test_the_summary_counts_by_hand():
    def row(success, steps, objects, colour, language):
        reason, failure = ("success", "") if success else ("time_limit", "dropped")
        scene = {"objects": objects, "colour": colour, "language": language}
        return {"success": success, "reason": reason, "failure": failure, "steps": steps, **scene}

    rows = [row(True, 10, 2, "red", "en"), row(True, 20, 3, "red", "en"), row(False, 60, 3, "blue", "zh")]
    found = summarise(rows, hz=10)
    assert found["success"] == {
        "successes": 2, "episodes": 3, "rate": 2 / 3, "low": wilson(2, 3).low, "high": wilson(2, 3).high,
    }  # fmt: skip
    assert found["reasons"] == {"success": 2, "time_limit": 1} and found["failures"] == {"dropped": 1}
    assert found["steps_to_success"] == {"mean": 15, "median": 15, "mean_seconds": 1.5}
    assert {key: value["rate"] for key, value in found["by"]["objects"].items()} == {"2": 1.0, "3": 0.5}
    assert found["by"]["colour"]["blue"]["successes"] == 0 and list(found["by"]["language"]) == ["en", "zh"]
    assert summarise(rows[2:], hz=10)["steps_to_success"] is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"agent": "policy"}, "checkpoint: missing"),
        ({"agent": "zero", "episodes": 0}, "episodes: 0"),
        ({"agent": "zero", "objects": 7}, "objects: 7, allowed is 1 to 6"),
        ({"agent": "zero", "objects": 1, "other": True}, "objects: 1, allowed is 2 to 6"),
        ({"agent": "zero", "execute": 2, "ensemble": 0.1}, "ensemble"),
    ],
)
def test_configurations_that_cannot_be_run_are_refused(flags, message):
    with pytest.raises(ValueError, match=message):
        EvaluateConfig(**flags)


def test_what_the_environment_or_the_policy_cannot_do_is_refused_before_any_worker_starts(saved, tmp_path):
    with pytest.raises(UsageError, match="hz: 7"):
        evaluate(EvaluateConfig(agent="zero", hz=7, out=tmp_path))
    with pytest.raises(UsageError, match="execute: 9 actions, the policy's chunk has 8"):
        evaluate(EvaluateConfig(checkpoint=saved, execute=9))
    with pytest.raises(UsageError, match="no checkpoint here"):
        evaluate(EvaluateConfig(checkpoint=tmp_path))
    assert not list(tmp_path.iterdir())


def test_a_job_can_be_sent_to_another_process(saved):
    import pickle

    job = rollouts.Job(tuple(SEEDS), ENV, checkpoint=saved)
    assert pickle.loads(pickle.dumps(partial(rollouts.opened, job))).args == (job,)
