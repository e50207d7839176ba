"""The loop with all real parts, on a random tiny IndexShare policy: what a run leaves, resumes and refuses."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import rl.train
from rl import checkpoint
from rl.cluster import Cluster, ClusterTooSmall, WorkerFailure
from rl.config import Config, ConfigError, EvalConfig, KLConfig
from rl.eval_checkpoint import evaluate_checkpoint
from rl.train import train

pytestmark = pytest.mark.usefixtures("ray_session")


@pytest.fixture(scope="module")
def base(tiny_policy_dir) -> Config:
    """Two small steps of PPO on recall, with several optimizer steps and epochs."""
    config = Config()
    config.policy.path = str(tiny_policy_dir)
    config.prompts.knobs = {"pairs": 10}
    config.prompts.max_prompt_tokens = 128
    config.rollout.max_response_tokens = 6
    config.step.prompts_per_step, config.step.samples_per_prompt = 4, 2
    config.step.optimizer_steps, config.step.epochs = 2, 2
    config.eval = EvalConfig(prompts=4, every=2, samples=2)
    config.checkpoint.every = 1
    config.run.steps = 2
    config.reward.function = "tests.test_end_to_end:letters"
    return config


def letters(trajectories):
    """Something that a random policy is sometimes paid for."""
    return [float(np.mean(t.response_ids % 2)) for t in trajectories]


def configured(base: Config, out, **fields) -> Config:
    config = copy.deepcopy(base)
    config.run.out = str(out)
    for dotted, value in fields.items():
        *parents, last = dotted.split("__")
        target = config
        for name in parents:
            target = getattr(target, name)
        assert hasattr(target, last)
        setattr(target, last, value)
    return config


def events(run):
    found = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    found.Reload()
    return found


def scalars(run, tag):
    return {e.step: e.value for e in events(run).Scalars(tag)}


@pytest.fixture(scope="module")
def finished(base, tmp_path_factory):
    config = configured(
        base,
        tmp_path_factory.mktemp("runs"),
        algorithm__kl=KLConfig(where="loss", estimator="k2", coefficient=0.01),
    )
    return config, train(config)


def test_a_run_leaves_everything_it_promises(finished):
    _, run = finished
    for tag in (
        "reward/mean",
        "eval/success",
        "kl/old",
        "kl/reference",
        "policy/entropy",
        "critic/explained_variance",
        "critic/expert_load_entropy",
        "mismatch/k3",
        "rollout/truncated",
        "policy/clip_fraction",
        "indexshare/overlap",
        "indexshare/overlap/layer_5",
        "memory/policy",
        "time/step",
    ):
        assert scalars(run, tag), tag
    for tag in ("success", "greedy", "pass@2"):
        assert set(scalars(run, f"eval/{tag}")) == {0, 2}
    assert set(scalars(run, "reward/mean")) == {1, 2}
    assert scalars(run, "mismatch/k3")[1] < 1e-6
    assert scalars(run, "kl/reference")[1] == pytest.approx(0, abs=1e-5)  # nothing has moved yet
    assert scalars(run, "kl/reference")[2] != pytest.approx(0, abs=1e-7)
    assert scalars(run, "policy/updates")[2] == 4
    assert [p.name for p in checkpoint.complete(run / "checkpoints")] == ["step-000001", "step-000002"]
    assert "Held-out success" in (run / "report.md").read_text()
    assert (run / "config.yaml").is_file()
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert {s["kind"] for s in samples} == {"train", "eval"}
    assert [e.step for e in events(run).Images("critic/calibration")] == [2]


def test_the_exported_policy_is_a_plain_folder_with_new_weights(finished):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config, run = finished
    trained = AutoModelForCausalLM.from_pretrained(run / "policy", dtype=torch.float32).state_dict()
    initial = AutoModelForCausalLM.from_pretrained(config.policy.path, dtype=torch.float32).state_dict()
    assert trained.keys() == initial.keys()
    moved = {k for k in trained if not torch.equal(trained[k], initial[k])}
    assert any("q_b_proj" in k for k in moved)
    assert not any(".indexer." in k or k.endswith("mlp.gate.weight") for k in moved)
    assert AutoTokenizer.from_pretrained(run / "policy")("ab")["input_ids"]


@pytest.mark.slow
def test_evaluating_a_runs_last_checkpoint_gives_its_last_evaluation(finished, tmp_path):
    """The same prompts, seeds, weights and reward."""
    _, run = finished
    out = tmp_path / "eval.json"
    table, _ = evaluate_checkpoint(run / "checkpoints/step-000002", [], [], out)
    (told,) = json.loads(out.read_text())["tasks"].values()
    for name, value in told["metrics"].items():
        assert value == pytest.approx(scalars(run, f"eval/{name}")[2], abs=1e-6), name
    assert {"success", "greedy", "pass@2"} <= set(told["metrics"])
    assert len(told["scores"]) == 4
    assert "recall" in table


def test_an_existing_run_is_refused(finished):
    with pytest.raises(ConfigError, match="holds a run"):
        train(finished[0])


def test_resume_is_the_run_that_was_not_interrupted(base, finished, tmp_path, capsys):
    """One step, then another process's worth of state from the checkpoint: the same second step."""
    config, whole = finished
    config = replace(config, run=replace(config.run, out=str(tmp_path), steps=1))
    train(config)
    assert re.search(
        r"critic: .* train \(frozen trunk \d.*, trained experts \d.*, trained head", capsys.readouterr().err
    )
    run = train(replace(config, run=replace(config.run, steps=2, resume=True)))
    for tag in ("reward/mean", "policy/loss", "critic/loss", "kl/old", "policy/grad_norm", "rollout/tokens"):
        assert scalars(run, tag)[2] == pytest.approx(scalars(whole, tag)[2], rel=1e-4, abs=1e-7), tag


@pytest.fixture(scope="module")
def grpo(base, tmp_path_factory):
    """One step at learning rate 0, dropout in the model's config; the roles that were placed, and the metrics.

    Truncated sampling on the way: the probe after a sync must not be truncated, or no run could start.
    """
    root, placed = tmp_path_factory.mktemp("grpo"), []
    config = configured(base, root, algorithm__name="grpo", algorithm__whiten=False, run__steps=1)
    config.policy.path = str(shutil.copytree(base.policy.path, root / "model"))
    model = json.loads((root / "model" / "config.json").read_text())
    (root / "model" / "config.json").write_text(json.dumps(model | {"attention_dropout": 0.5}))
    config.policy.optimizer.lr = 0.0
    config.rollout.top_p, config.rollout.allow_truncated_sampling = 0.5, True
    config.algorithm.dynamic_sampling_rounds = 1
    original = Cluster.options
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Cluster, "options", lambda self, role: placed.append(role) or original(self, role))
        run = train(config)
    return placed, steps_of(run)[0]


def steps_of(run):
    """Metrics of every training step."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [r for r in records if "reward/mean" in r]


def test_grpo_places_no_critic(grpo):
    placed, metrics = grpo
    assert placed == ["rollout", "policy"]
    assert not [name for name in metrics if "critic" in name]


def test_groups_are_drawn_anew_and_counted(grpo):
    _, metrics = grpo
    assert 4 <= metrics["grpo/groups_drawn"] <= 8
    if metrics["grpo/zero_variance_groups"]:
        assert metrics["grpo/groups_drawn"] > 4
    # What was drawn in vain was generated all the same.
    assert metrics["rollout/tokens"] >= metrics["grpo/groups_drawn"] * 2


def test_at_learning_rate_0_the_ratio_stays_1_over_epochs(grpo):
    _, metrics = grpo
    assert metrics["policy/updates"] == 4
    assert metrics["policy/ratio_min"] == pytest.approx(1, abs=1e-5)
    assert metrics["policy/ratio_max"] == pytest.approx(1, abs=1e-5)
    assert metrics["policy/clip_fraction"] == 0


def test_sao_warms_the_critic_up_while_the_policy_stands_still(base, tmp_path, monkeypatch):
    """One step of warm-up, then one in which a tight target KL ends the policy's epochs but not the critic's.

    The policy attends to what the engine selected.
    """
    config = configured(base, tmp_path, algorithm__name="sao", algorithm__policy_loss="dis", critic__freeze="none")
    config.algorithm.lambda_policy, config.algorithm.target_kl = "adaptive", 1e-7
    config.critic.updates_per_policy_update, config.critic.warmup_steps = 2, 1
    config.step.prompts_per_step, config.step.samples_per_prompt = 8, 1
    config.indexshare.replay = True
    states, original = [], rl.train.train_step

    def observed(run):
        before = run.team.policy.call("weights")[0]
        result = original(run)
        after = run.team.policy.call("weights")[0]
        states.append((all(torch.equal(before[k], after[k]) for k in before), run.critic_updates, run.policy_updates))
        return result

    monkeypatch.setattr(rl.train, "train_step", observed)
    first, second = steps_of(train(config))
    assert states[0] == (True, 8, 0)
    assert (first["policy/updates"], "policy/loss" in first, first["critic/loss"] > 0) == (0, False, True)
    still, critic_updates, policy_updates = states[1]
    assert not still
    assert critic_updates == 16
    assert policy_updates == second["policy/updates"] == 2  # at the first, the policy is the rollout's own
    assert second["policy/trained_tokens"] < second["rollout/response_tokens"] * 8 * 2
    assert second["sync/probe_gap"] < 1e-4
    assert "indexshare/overlap" not in second


def test_a_dead_actor_ends_the_run_with_its_name_and_loses_nothing(base, tmp_path, monkeypatch):
    """The policy's process is killed in the second step."""
    original = rl.train.train_step

    def killer(run):
        if run.step == 1:
            import ray

            os.kill(ray.get(run.team.policy.actors[0].pid.remote()), signal.SIGKILL)
        return original(run)

    monkeypatch.setattr(rl.train, "train_step", killer)
    config = configured(base, tmp_path)
    with pytest.raises(WorkerFailure, match=r"policy\[0\] \(role policy, node .*\) failed: .*(died|dead)"):
        train(config)
    run = rl.train.run_directory(config)
    assert [p.name for p in checkpoint.complete(run / "checkpoints")] == ["step-000001"]
    assert set(scalars(run, "reward/mean")) == {1}
    assert (run / "report.md").is_file()


@pytest.mark.parametrize(("field", "value", "resource"), [("worker_cpus", 100.0, "CPU"), ("device", "gpu", "GPU")])
def test_too_small_a_cluster_says_wanted_and_available(base, tmp_path, field, value, resource):
    config = configured(base, tmp_path, **{f"cluster__{field}": value})
    with pytest.raises(ClusterTooSmall, match=rf"wants [\d.]+ {resource}.*the cluster has"):
        Cluster(config)
