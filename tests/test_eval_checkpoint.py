"""`longppo eval`: which policy and which tasks are meant, and what is refused before anything starts."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from rl import cli
from rl.config_load import load, to_yaml
from rl.eval_checkpoint import find, find_tasks, standard_error, table

TINY = Path(__file__).parents[1] / "examples" / "tiny"


@pytest.fixture
def run(tmp_path):
    """A run of the guessing game with seed 3, before its first checkpoint."""
    config = load(
        "configs/guessing_ppo.yaml", ["run.seed=3", "prompts.knobs.top=4", "run.budget.generated_tokens=9000"]
    )
    folder = tmp_path / "guess-seed3"
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(config))
    return folder


def fill(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text("{}")
    return folder


def test_the_policy_of_a_run_is_its_export_or_else_its_newest_checkpoint(run):
    for step in (2, 10):
        fill(run / "checkpoints" / f"step-{step:06d}", "driver.json")
    assert find(run).checkpoint == run / "checkpoints" / "step-000010"
    assert find(run / "checkpoints" / "step-000002").checkpoint == run / "checkpoints" / "step-000002"
    fill(run / "policy", "config.json")
    assert find(run).policy is None, "an export without its tokenizer was cut off"
    fill(run / "policy", "tokenizer_config.json")
    assert (find(run).policy, find(run).checkpoint) == (run / "policy", None)
    assert find(run / "policy") == find(run)
    assert find(TINY).sections == {}


def test_a_run_is_asked_what_it_trained_on_whatever_its_budget(run):
    fill(run / "policy", "config.json", "tokenizer_config.json")
    (task,) = find_tasks(find(run), run, [], ["eval.samples=8", "rollout.max_response_tokens=2000"])
    trained = load("configs/guessing_ppo.yaml", ["prompts.knobs.top=4"])
    assert task.name == "examples.guessing:make"
    assert (task.config.prompts, task.config.reward) == (trained.prompts, trained.reward)
    assert (task.config.rollout.max_turns, task.config.run.seed, task.config.eval.samples) == (3, 3, 8)
    assert task.config.policy.path == str(run / "policy")


def test_other_tasks_of_a_run_bring_their_own_lengths_and_leave_the_engines_alone(run):
    """A game's turns are not a question's; one engine has one precision and one nucleus."""
    fill(run / "policy", "config.json", "tokenizer_config.json")
    (run / "other.yaml").write_text(
        "rollout: {max_response_tokens: 99, top_k: 5, allow_truncated_sampling: true, dtype: bfloat16}\n"
        "policy: {path: models/not-fetched}\nprompts: {name: copying, knobs: {length: 3}}\n"
    )
    first, second = find_tasks(find(run), run, ["recall", str(run / "other.yaml")], [])
    assert (first.config.rollout.max_turns, first.config.rollout.max_response_tokens) == (None, 40)
    assert (first.config.prompts.name, first.config.prompts.knobs) == ("recall", {})
    assert (second.config.rollout.max_response_tokens, second.config.prompts.knobs) == (99, {"length": 3})
    assert (second.config.rollout.top_k, second.config.rollout.dtype) == (0, "float32")


def test_tasks_by_name():
    names = ["recall", "instructions", "word_sorting", "examples.guessing:make", "configs/guessing_grpo.yaml"]
    tasks = find_tasks(find(TINY), TINY, names, ["eval.prompts=9"])
    assert [task.name for task in tasks] == names
    assert [(t.config.prompts.source, t.config.reward.function) for t in tasks] == [
        ("task", "rl.rewards.exact:score"),
        ("task", "rl.rewards.instructions:score"),
        ("reasoning_gym", "rl.rewards.reasoning:score"),
        ("environment", "rl.environments:episode_return"),
        ("environment", "rl.environments:episode_return"),
    ]
    assert tasks[4].config.rollout.max_turns == 3
    assert {t.config.eval.prompts for t in tasks} == {9}
    assert {t.config.policy.path for t in tasks} == {str(TINY)}


def test_english_tasks_are_asked_in_the_chat_template_where_there_is_one(tmp_path):
    policy = fill(tmp_path / "model", "config.json", "tokenizer_config.json")
    assert not find_tasks(find(policy), policy, ["instructions"], [])[0].config.prompts.chat
    (policy / "chat_template.jinja").write_text("x")
    found = find_tasks(find(policy), policy, ["instructions", "word_sorting", "recall"], [])
    assert [t.config.prompts.chat for t in found] == [True, True, False]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere"], r"CHECKPOINT: .*nowhere given, must be a folder with a policy \(config\.json\), a run, or one"),
        (
            ["{run}"],
            r"CHECKPOINT: .*guess-seed3 given, must be a run with a policy or a checkpoint: this one has neith",
        ),
        (["{tiny}"], r"--tasks: none given, must be at least one: .* belongs to no run"),
        (
            ["{tiny}", "--tasks", "recal"],
            r"--tasks: 'recal' given, must be recall, copying, counting, arithmetic, inst",
        ),
        (["{tiny}", "--tasks", "recall", "recall"], r"--tasks: recall given twice"),
        (["{tiny}", "--tasks", "no.yaml"], r"config file: no\.yaml given, there is no such file"),
        (["{tiny}", "--tasks", "recall", "eval.sample=2"], r"eval\.sample: unknown key, did you mean eval\.samples\?"),
        (["{tiny}", "--tasks", "recall", "eval.temperature=0", "eval.samples=2"], r"eval\.samples: 2 given, must be 1"),
        (["{tiny}", "recall"], r"override: 'recall' given, must be key=value"),
        (
            ["{tiny}", "--tasks", "recall", "--out", "{tiny}/config.json/x.json"],
            r"--out: .*x\.json given, must be a fil",
        ),
        (["{tiny}", "--tasks", "recall", "prompts.knobs.x=1"], r"prompts\.name or prompts\.knobs: .*unknown knob 'x'"),
    ],
)
def test_what_cannot_be_evaluated_is_one_line_and_exit_2(run, capsys, words, said):
    assert cli.main(["eval", *(word.format(run=run, tiny=TINY) for word in words)]) == 2
    assert re.fullmatch(f"longppo: {said}.*\n", capsys.readouterr().err)


def test_the_table():
    results = {
        "a": {"metrics": {"success": 0.5, "pass@2": 0.75}, "standard_error": 0.125, "scores": [[0, 1], [0, 1]]},
        "bcd": {"metrics": {"success": 0.25}, "standard_error": standard_error(np.array([0.25])), "scores": [[0.25]]},
    }
    assert table(results).splitlines() == [
        "task  prompts  samples  success  pass@2  success +-",
        "a     2        2        0.5      0.75    0.12",
        "bcd   1        1        0.25     -       -",
    ]
