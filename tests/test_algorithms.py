"""From a scored step to advantages: the arrangements that PPO and GRPO are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rl import algorithms
from rl.algorithms import needs_critic, needs_old_logprobs
from rl.config import AlgorithmConfig, Config, KLConfig
from rl.trajectory import Trajectory


def trajectory(index: int = 0, sample: int = 0, n: int = 3, **fields) -> Trajectory:
    base = Trajectory(
        prompt_index=index,
        sample_index=sample,
        prompt_ids=np.zeros(2, np.int32),
        response_ids=np.zeros(n, np.int32),
        action_mask=np.ones(n, bool),
        rollout_logprobs=np.zeros(n, np.float32),
        finish_reason="stop",
        policy_version=0,
        score=0.0,
        values=np.zeros(n + 1, np.float32),
    )
    return replace(base, **fields)


BUDGET = 8


def targets(batch, a):
    return algorithms.targets(batch, a, BUDGET)


def token_rewards(t, a):
    return algorithms.token_rewards(t, a, BUDGET)


CUT = trajectory(finish_reason="length", values=np.array([0.5, 0.4, 0.3, 0.3], np.float32))


@pytest.mark.parametrize(
    ("truncation", "expected"),
    [("terminal", [-0.4658, -0.3850, -0.3000]), ("bootstrap", [-0.1950, -0.1000, 0.0])],
)
def test_worked_values_1_and_2_truncation(truncation, expected):
    a = AlgorithmConfig(lambda_policy="0.95", lambda_critic=0.95, truncation=truncation, whiten=False)
    (t,) = targets([CUT], a).trajectories
    np.testing.assert_allclose(t.advantages, expected, atol=5e-5)
    np.testing.assert_allclose(t.value_targets, t.advantages + CUT.values[:-1], atol=1e-6)


def test_a_stop_never_bootstraps():
    a = AlgorithmConfig(lambda_policy="0.95", truncation="bootstrap", whiten=False)
    (t,) = targets([replace(CUT, finish_reason="stop")], a).trajectories
    np.testing.assert_allclose(t.advantages, [-0.4658, -0.3850, -0.3000], atol=5e-5)


def test_worked_value_9_kl_in_the_reward():
    t = trajectory(
        score=1.0,
        old_logprobs=np.array([-1.0, -1.0, -1.0], np.float32),
        reference_logprobs=np.array([-1.1, -1.2, -1.3], np.float32),
    )
    a = AlgorithmConfig(kl=KLConfig(where="reward", estimator="k1", coefficient=0.05))
    np.testing.assert_allclose(token_rewards(t, a), [-0.005, -0.01, 0.985], atol=1e-6)


def test_worked_value_11_grpo_group():
    a = AlgorithmConfig(name="grpo", whiten=False)
    batch = [trajectory(0, i, score=s) for i, s in enumerate([1.0, 0.0, 0.0, 1.0])]
    batch += [trajectory(1, i, score=1.0) for i in range(4)]
    result = targets(batch, a)
    np.testing.assert_allclose(
        [t.advantages[0] for t in result.trajectories[:4]], [0.866, -0.866, -0.866, 0.866], atol=1e-4
    )
    assert all((t.advantages == 0).all() for t in result.trajectories[4:])
    assert result.metrics["grpo/zero_variance_groups"] == 1


def test_an_empty_response_keeps_its_score_in_its_group():
    batch = [trajectory(0, i, n, score=1.0) for i, n in enumerate([3, 0, 2])]
    result = targets(batch, AlgorithmConfig(name="grpo", whiten=False))
    assert all((t.advantages == 0).all() for t in result.trajectories)
    assert result.metrics["grpo/zero_variance_groups"] == 1


def test_whitening_is_over_the_step_and_policy_and_critic_have_their_own_lambda():
    batch = [
        trajectory(0, 0, 4, score=1.0, values=np.array([0.2, 0.1, 0.5, 0.3, 9.0], np.float32)),
        trajectory(1, 0, 2, score=0.0, values=np.array([0.4, 0.1, 9.0], np.float32)),
    ]
    result = targets(batch, AlgorithmConfig(lambda_policy="0.0", lambda_critic=1.0)).trajectories
    tokens = np.concatenate([t.advantages for t in result])
    assert tokens.mean() == pytest.approx(0, abs=1e-6)
    assert tokens.std() == pytest.approx(1, abs=1e-6)
    np.testing.assert_allclose(result[0].value_targets, 1.0, atol=1e-6)  # lambda 1: the return itself


@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_a_response_near_the_budget_is_paid_less_and_its_score_is_not_touched(name):
    a = AlgorithmConfig(name=name, whiten=False, normalize_std=False, overlong_buffer=4, overlong_penalty=0.5)
    batch = [trajectory(0, i, n, score=1.0) for i, n in enumerate([4, 6, 8])]
    assert [token_rewards(t, a)[-1] for t in batch] == pytest.approx([1, 0.75, 0.5])
    learned = targets(batch, a).trajectories
    assert [t.score for t in learned] == [1, 1, 1]
    expected = [1, 0.75, 0.5] if name == "ppo" else [0.25, 0, -0.25]
    assert [t.advantages[-1] for t in learned] == pytest.approx(expected)


def test_an_empty_response_is_shaped_like_any_other():
    a = AlgorithmConfig(name="grpo", whiten=False, normalize_std=False, overlong_buffer=BUDGET)
    learned = targets([trajectory(0, 0, 0, score=1.0), trajectory(0, 1, 4, score=1.0)], a).trajectories
    assert learned[1].advantages[0] == pytest.approx(-0.25)


def test_the_spread_is_of_the_advantages_that_the_policy_sees():
    batch = [trajectory(i, 0, n, score=s) for i, (n, s) in enumerate([(3, 1.0), (5, 0.0), (2, 4.0)])]
    metrics = targets(batch, AlgorithmConfig()).metrics
    assert metrics["advantages/mean"] == pytest.approx(0, abs=1e-6)
    assert metrics["advantages/std"] == pytest.approx(1, abs=1e-6)
    # Values are 0 and lambda 1: every token's advantage is its trajectory's score.
    assert metrics["advantages/raw_std"] == pytest.approx(np.std([1.0] * 3 + [0.0] * 5 + [4.0] * 2))


def test_empty_responses_and_observations_are_left_alone():
    mask = np.array([True, False, True])
    batch = [
        trajectory(0, 0, 0, score=1.0),
        trajectory(1, 0, 3, score=1.0, action_mask=mask),
        trajectory(2, 0, 1, score=0.0),
    ]
    result = targets(batch, AlgorithmConfig()).trajectories
    assert result[0].advantages.shape == (0,)
    assert result[1].advantages[1] == 0


def test_passes_that_the_algorithm_does_not_need():
    config = Config()
    config.step.optimizer_steps = config.step.epochs = 1
    assert needs_critic(config)
    assert not needs_old_logprobs(config)
    config.rollout.allow_truncated_sampling = True
    assert needs_old_logprobs(config)  # the engine's log-probabilities are of another distribution
    config.rollout.allow_truncated_sampling = False
    config.step.epochs = 2
    assert needs_old_logprobs(config)
    config.algorithm.policy_loss = "dis"
    assert not needs_old_logprobs(config)
    config.algorithm.name = "grpo"
    assert not needs_critic(config)
