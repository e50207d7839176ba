"""SAO's configuration is SAO, and says where it is not; schedules of roles that make unequally many updates."""

from __future__ import annotations

import pytest

from rl.cli import main
from rl.config_load import load
from rl.recipes import deviations
from rl.train import critic_lr_factor, policy_lr_factor


def test_the_shipped_configuration_is_the_recipe():
    config = load("configs/sao.yaml", [])
    assert deviations(config) == []
    assert config.algorithm.name == "sao"


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("step.samples_per_prompt=2", "step.samples_per_prompt is 2, the recipe has 1"),
        ("algorithm.policy_loss=clip", "algorithm.policy_loss is 'clip', the recipe has 'dis'"),
        ("algorithm.lambda_policy=0.95", "algorithm.lambda_policy is '0.95', the recipe has 'adaptive'"),
        ("algorithm.lambda_critic=0.95", "algorithm.lambda_critic is 0.95, the recipe has 1.0"),
        ("critic.updates_per_policy_update=1", "critic.updates_per_policy_update is 1, the recipe has 2"),
        ("critic.warmup_steps=0", "critic.warmup_steps is 0, the recipe has 10"),
        ("policy.optimizer.lr=1e-5", "critic.optimizer.lr is 0.0005, the recipe has 5 times the policy's, 5e-05"),
    ],
)
def test_a_deviation_warns_and_goes_on(override, line, capsys):
    assert main(["train", "configs/sao.yaml", override, "--dry-run"]) == 0
    warnings = [w for w in capsys.readouterr().err.splitlines() if "warning" in w]
    assert warnings == [f"longppo: warning: sao: {line}"]


def test_other_algorithms_have_no_recipe_to_leave():
    assert deviations(load("configs/sao.yaml", ["algorithm.name=ppo", "algorithm.policy_loss=clip"])) == []


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["critic.warmup_steps=0", "critic.updates_per_policy_update=1"],
        ["critic.updates_per_policy_update=3", "step.epochs=2", "step.optimizer_steps=4"],
    ],
)
def test_each_roles_schedule_ends_with_its_own_last_update(overrides):
    cosine = ["policy.optimizer.schedule=cosine", "critic.optimizer.schedule=cosine"]
    config = load("configs/sao.yaml", [*cosine, *overrides])
    per_step = config.step.epochs * config.step.optimizer_steps
    policy = (config.run.steps - config.critic.warmup_steps) * per_step
    critic = config.run.steps * per_step * config.critic.updates_per_policy_update
    for factor, updates in ((policy_lr_factor, policy), (critic_lr_factor, critic)):
        assert factor(updates - 1, config) == pytest.approx(0, abs=1e-12)
        assert factor(updates // 2 - 1, config) == pytest.approx(0.5)


def test_without_a_critic_nobody_waits_for_it():
    config = load("configs/grpo.yaml", ["critic.warmup_steps=10", "policy.optimizer.schedule=cosine"])
    assert policy_lr_factor(config.run.steps // 2 - 1, config) == pytest.approx(0.5)
