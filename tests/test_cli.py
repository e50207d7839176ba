"""What the command line says and with which exit code, before and after anything heavy is started."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file

from rl import cli
from rl.config import Config, ConfigError
from rl.config_load import build, load

HEAVY = ("torch", "vllm", "ray", "deepspeed", "transformers")


@pytest.fixture
def experiment(tmp_path):
    """A right one, with a folder that passes for a model until it is loaded."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    path = tmp_path / "experiment.yaml"
    path.write_text(f"run: {{out: {tmp_path}/runs}}\npolicy: {{path: {tmp_path}/model}}\n")
    return path


@pytest.fixture
def training(monkeypatch, tmp_path):
    """A loop that does, instead of training, what it is told to."""
    pytest.importorskip("ray")
    stub = ModuleType("rl.train")
    stub.run_directory = lambda config: tmp_path
    monkeypatch.setitem(sys.modules, "rl.train", stub)

    def do(action):
        stub.train = action

    return do


def raises(error):
    def train(config):
        raise error

    return train


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run.sed=1"], "run.sed: unknown key, did you mean run.seed?"),
        (["run.steps=ten"], "run.steps: 'ten' given, must be a whole number"),
        (["policy.path=nowhere"], "policy.path: 'nowhere' given, must be a folder with a config.json"),
        (["nonsense"], "override: 'nonsense' given, must be key=value"),
        (["step.optimizer_steps=3"], "step.optimizer_steps: 3 given, must be a divisor of"),
    ],
)
@pytest.mark.parametrize("command", ["train", "plan"])
def test_the_users_mistake_is_one_line_and_exit_2(experiment, capsys, command, words, said):
    assert cli.main([command, str(experiment), *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"longppo: {said}")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("fields", "weights", "said"),
    [
        ({"index_topk": 0}, "", "index_topk: 0 given, must be at least 1"),
        ({"index_topk": -2}, "", "index_topk: -2 given, must be at least 1"),
        ({"index_topk": None}, "", "index_topk: absent"),
        ({"index_topk_freq": 0}, "", "index_topk_freq: 0 given, must be at least 1"),
        ({"index_topk_pattern": "SFSS"}, "", "the first layer is Shared"),
        ({"index_topk_pattern": "FFS"}, "", "index_topk_pattern: 3 layers given, must be num_hidden_layers = 4"),
        ({"index_topk_pattern": "FFSSS"}, "", "index_topk_pattern: 5 layers given"),
        ({"index_topk_pattern": "FFSX"}, "", "index_topk_pattern: 'FFSX' has 'X'"),
        ({"indexer_types": ["full"] * 4, "index_topk_pattern": "FFSS"}, "", "index_topk_pattern says FFSS"),
        ({"index_topk_pattern": "FFSS"}, "FSSF", "its config says FFSS, its weights are of FSSF"),
        ({"index_topk_pattern": "FFSS"}, "SSSS", "weights: no layer has an indexer"),
    ],
)
def test_a_model_that_is_no_indexshare_model_is_refused_in_one_line(experiment, capsys, fields, weights, said):
    model = experiment.parent / "model"
    plain = {"model_type": "glm_moe_dsa", "num_hidden_layers": 4, "index_topk": 8}
    (model / "config.json").write_text(json.dumps(plain | fields))
    if weights:
        names = [f"model.layers.{i}.self_attn.indexer.wk.weight" for i, kind in enumerate(weights) if kind == "F"]
        save_file({name: np.zeros(1) for name in [*names, "model.norm.weight"]}, model / "model.safetensors")
    assert cli.main(["train", str(experiment)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"longppo: policy.path: {model} given, is no IndexShare model: ")
    assert said in err
    assert err.count("\n") == 1


def test_a_mistake_is_refused_before_anything_heavy_is_imported(experiment):
    code = (
        "import sys; from rl.cli import main;"
        f"code = main(['train', {str(experiment)!r}, 'run.steps=nan']);"
        f"print(code, [m for m in {HEAVY} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "2 []", done.stderr
    assert done.stderr == "longppo: run.steps: 'nan' given, must be a whole number\n"


def test_a_dry_run_imports_nothing_heavy_either(experiment):
    code = (
        "import sys; from rl.cli import main;"
        f"main(['train', {str(experiment)!r}, '--dry-run']);"
        f"print([m for m in {HEAVY} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_a_dry_run_prints_the_resolved_experiment_and_the_plan(experiment, training, capsys, at):
    training(raises(AssertionError("a dry run starts nothing")))
    words = [str(experiment), "run.seed=7", "policy.optimizer.lr=1e-6"]
    assert cli.main(["train", *words[:at], "--dry-run", *words[at:]]) == 0
    resolved, _, planned = capsys.readouterr().out.partition("\nrun        ")
    assert build(yaml.safe_load(resolved)) == load(experiment, words[1:])
    for part in ("seed 7", "32 prompts x 4 samples = 128 trajectories", "2 optimizer step(s) of 64 trajectories"):
        assert part in planned
    assert [line.split()[0] for line in planned.splitlines()[-3:]] == ["rollout", "policy", "critic"]


def test_training_prints_the_plan_first_and_the_curves_command_last(experiment, training, tmp_path, capsys):
    seen: list[Config] = []
    training(lambda config: seen.append(config) or tmp_path / "there")
    assert cli.main(["train", str(experiment), "run.seed=7"]) == 0
    assert seen[0].run.seed == 7
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("run ")
    assert lines[-1] == f"curves: {Path(sys.executable).parent}/tensorboard --logdir {tmp_path}/there"


def test_a_dead_worker_is_one_line_and_exit_1_and_its_traceback_is_kept(experiment, training, tmp_path, capsys):
    from rl.cluster import WorkerFailure

    training(raises(WorkerFailure("policy[0] (role policy, node n) failed: ValueError: no")))
    assert cli.main(["train", str(experiment)]) == 1
    err = capsys.readouterr().err
    assert err.startswith("longppo: policy[0] (role policy, node n) failed: ValueError: no")
    assert err.count("\n") == 1
    assert "WorkerFailure" in (tmp_path / "error.log").read_text()


def test_what_only_the_start_can_tell_is_the_users_mistake_too(experiment, training, capsys):
    from rl.cluster import ClusterTooSmall
    from rl.environments import EnvironmentFailure
    from rl.rewards import RewardError

    for error in (
        ClusterTooSmall("the run wants 9 CPU"),
        RewardError("reward f raised"),
        EnvironmentFailure("environment games:make, episode 4: step 2 raised ValueError: no"),
        ConfigError("prompts.path: no"),
    ):
        training(raises(error))
        assert cli.main(["train", str(experiment)]) == 2
        assert capsys.readouterr().err == f"longppo: {error}\n"


def test_ctrl_c_is_exit_130_without_a_traceback(experiment, training, capsys):
    training(raises(KeyboardInterrupt()))
    assert cli.main(["train", str(experiment)]) == 130
    assert capsys.readouterr().err == "longppo: interrupted\n"


def test_our_own_bug_keeps_its_traceback(experiment, training):
    training(raises(ZeroDivisionError("ours")))
    with pytest.raises(ZeroDivisionError, match="ours"):
        cli.main(["train", str(experiment)])


@pytest.mark.parametrize("words", [[], ["bogus"], ["train"], ["train", "x.yaml", "--bogus"]])
def test_a_command_that_does_not_exist_is_exit_2(words, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 2
    assert "usage: longppo" in capsys.readouterr().err


def test_evaluating_prints_a_table_and_says_where_the_rest_is(monkeypatch, tmp_path, capsys):
    from rl import eval_checkpoint
    from rl.cluster import WorkerFailure

    asked: list[tuple] = []

    def evaluate(*words):
        asked.append(words)
        return "task  success", tmp_path / "eval.json"

    monkeypatch.setattr(eval_checkpoint, "evaluate_checkpoint", evaluate)
    words = ["eval", str(tmp_path), "eval.prompts=8", "--tasks", "recall", "copying", "eval.samples=2"]
    assert cli.main(words) == 0
    assert asked == [(tmp_path, ["recall", "copying"], ["eval.samples=2", "eval.prompts=8"], None)]
    assert capsys.readouterr().out == f"task  success\nwritten: {tmp_path}/eval.json\n"
    failing = raises(WorkerFailure("rollout[0] died"))
    monkeypatch.setattr(eval_checkpoint, "evaluate_checkpoint", lambda *words: failing(words))
    assert cli.main(words) == 1
    assert capsys.readouterr().err == f"longppo: rollout[0] died (traceback: {tmp_path}/error.log)\n"
    assert "WorkerFailure" in (tmp_path / "error.log").read_text()


def test_fetching_says_where_the_model_lies(monkeypatch, tmp_path, capsys):
    fetched: list[Path] = []
    stub = ModuleType("policy.smollm2")
    stub.fetch = lambda out: fetched.append(out) or out
    monkeypatch.setitem(sys.modules, "policy.smollm2", stub)
    assert cli.main(["fetch-smollm2", "--out", str(tmp_path / "m")]) == 0
    assert fetched == [tmp_path / "m"]
    assert capsys.readouterr().out == f"{tmp_path}/m\n"
