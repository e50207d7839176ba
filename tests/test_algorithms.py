"""From a scored step to advantages: the arrangements that PPO and GRPO are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rl.algorithms import needs_critic, needs_old_logprobs, targets, token_rewards
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
