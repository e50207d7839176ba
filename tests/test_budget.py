"""A run ends after the step that spends its budget, evaluates and saves there, and remembers what it spent."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest

import rl.train
from rl.algorithms import Targets
from rl.config import BudgetConfig, Config, ConfigError
from rl.config_load import build
from rl.config_rules import check
from rl.train import Run, expected_steps, finished, loop

TOKENS, TRAINED, SECONDS = 10, 7, 2.0
"""What a step costs."""


@pytest.fixture
def stage(monkeypatch):
    """The loop without actors: every step costs the same, by a clock that only steps move."""
    now = [0.0]
    monkeypatch.setattr(rl.train, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def step(run):
        run.tokens, run.trained_tokens, now[0] = run.tokens + TOKENS, run.trained_tokens + TRAINED, now[0] + SECONDS
        return Targets([], {}, []), {}

    def evaluation(run, telemetry):
        now[0] += 100.0  # an evaluation costs none of the budget
        telemetry.log(run.step, [], {"eval/success": 0.5})

    monkeypatch.setattr(rl.train, "train_step", step)
    monkeypatch.setattr(rl.train, "sync_weights", lambda run: {})
    monkeypatch.setattr(rl.train, "evaluate", evaluation)


def run_of(config: Config) -> Run:
    prompts = SimpleNamespace(state=dict, load_state=lambda state: None)
    return Run(config, SimpleNamespace(learners=[]), prompts, None, None, np.random.default_rng(0))


def go(tmp_path, budget: BudgetConfig, steps: int = 50, resume: bool = False):
    """The run after its loop, and what it logged: (step, metrics)."""
    config = Config()
    config.run.steps, config.run.budget, config.run.resume = steps, budget, resume
    config.eval.every = config.checkpoint.every = 1000
    run, logged = run_of(config), []
    telemetry = SimpleNamespace(
        history=[],
        alert=lambda step, found: None,
        expect=lambda steps: None,
        log=lambda step, batch, metrics: logged.append((step, metrics)),
    )
    loop(run, telemetry, tmp_path)
    return run, logged


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (BudgetConfig(), 50),
        (BudgetConfig(generated_tokens=100), 10),
        (BudgetConfig(generated_tokens=101), 11),
        (BudgetConfig(generated_tokens=100, trained_tokens=35), 5),
        (BudgetConfig(seconds=7.0), 4),
        (BudgetConfig(generated_tokens=5), 2),
        (BudgetConfig(generated_tokens=10**6), 50),
    ],
)
def test_the_end_is_expected_where_the_pace_spends_the_first_budget(budget, expected):
    run = run_of(Config())
    run.config.run.steps, run.config.run.budget = 50, budget
    assert expected_steps(run) == 50  # nothing is spent yet
    run.step, run.tokens, run.trained_tokens, run.seconds = 2, 2 * TOKENS, 2 * TRAINED, 2 * SECONDS
    assert expected_steps(run) == expected


@pytest.mark.parametrize(
    ("budget", "steps"),
    [
        (BudgetConfig(), 50),
        (BudgetConfig(generated_tokens=30), 3),
        (BudgetConfig(generated_tokens=31), 4),
        (BudgetConfig(trained_tokens=30), 5),
        (BudgetConfig(seconds=3.9), 2),
        (BudgetConfig(seconds=4.0), 2),
        (BudgetConfig(generated_tokens=1000, seconds=2.1), 2),
        (BudgetConfig(generated_tokens=10**6), 50),
    ],
)
@pytest.mark.usefixtures("stage")
def test_a_run_ends_with_the_step_that_spends_a_budget_evaluated_and_saved(tmp_path, budget, steps):
    run, logged = go(tmp_path, budget)
    assert run.step == steps
    assert [step for step, m in logged if "eval/success" in m] == [0, steps]
    assert (tmp_path / "checkpoints" / f"step-{steps:06d}" / "driver.json").is_file()


@pytest.mark.usefixtures("stage")
@pytest.mark.parametrize("budget", range(20, 45, 3))
def test_arms_with_steps_of_other_sizes_spend_the_same_to_within_one_step(tmp_path, budget, monkeypatch):
    for cost in (3, 7, 10):
        monkeypatch.setitem(globals(), "TOKENS", cost)
        run, _ = go(tmp_path / str(cost), BudgetConfig(generated_tokens=budget))
        assert budget <= run.tokens < budget + cost


@pytest.mark.usefixtures("stage")
def test_a_resumed_run_has_spent_what_its_predecessor_spent(tmp_path):
    go(tmp_path, BudgetConfig(seconds=10.0), steps=3)
    run, logged = go(tmp_path, BudgetConfig(seconds=10.0), resume=True)
    assert (run.step, run.seconds) == (5, 10.0)
    run, logged = go(tmp_path, BudgetConfig(seconds=10.0), resume=True)
    assert (run.step, logged) == (5, []), "a finished run makes no step"


@pytest.mark.usefixtures("stage")
def test_a_checkpoint_of_another_version_is_one_line(tmp_path):
    go(tmp_path, BudgetConfig(), steps=1)
    file = tmp_path / "checkpoints" / "step-000001" / "driver.json"
    state = json.loads(file.read_text())
    del state["seconds"]
    file.write_text(json.dumps(state))
    with pytest.raises(ConfigError, match=r"^run\.resume: .*step-000001 given, must be .* differs in seconds$"):
        go(tmp_path, BudgetConfig(), resume=True)


def test_without_a_budget_the_number_of_steps_decides():
    run = run_of(Config())
    run.tokens = run.trained_tokens = 10**9
    assert not finished(run)
    run.step = run.config.run.steps
    assert finished(run)


@pytest.mark.parametrize(
    ("key", "given", "allowed"),
    [
        ("generated_tokens", 511, "at least 512, the most tokens of one step"),
        ("trained_tokens", 1023, "at least 1024, the most tokens of one step"),
        ("seconds", 0.0, "between 1e-09"),
        ("generated_tokens", 0, "between 1"),
    ],
)
def test_a_budget_below_one_step_is_refused(tmp_path, key, given, allowed):
    step = {"prompts_per_step": 32, "samples_per_prompt": 2, "optimizer_steps": 1, "epochs": 2}
    (tmp_path / "config.json").write_text("{}")
    rest = {"step": step, "rollout": {"max_response_tokens": 8}, "policy": {"path": str(tmp_path)}}
    with pytest.raises(ConfigError, match=rf"^run\.budget\.{key}: {given} given, must be {allowed}"):
        check(build({"run": {"budget": {key: given}}, **rest}))
    check(build({"run": {"budget": {"generated_tokens": 512, "trained_tokens": "1024"}}, **rest}))
