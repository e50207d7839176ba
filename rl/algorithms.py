"""PPO, SAO and GRPO as arrangements of the same pure functions: from a scored step to its learning targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rl import advantages as adv
from rl.config import AlgorithmConfig, Config
from rl.summary import spread
from rl.trajectory import Trajectory


@dataclass(frozen=True)
class Targets:
    """Trajectories with advantages (and value targets), and what was noticed while computing them."""

    trajectories: list[Trajectory]
    metrics: dict[str, float]
    returns: list[np.ndarray]
    """The realised return at every response token, by which a critic is judged; none where there is no critic."""


def needs_critic(config: Config) -> bool:
    """Whether the algorithm has a critic at all."""
    return config.algorithm.name != "grpo"


def needs_old_logprobs(config: Config) -> bool:
    """One on-policy optimizer step is its own old policy, and DIS compares with the rollout.

    A KL penalty in the reward is of the old policy too. Under truncated sampling the engine's log-probabilities are of
    another distribution, so that only the trainer's may enter a ratio or a KL.
    """
    a, s = config.algorithm, config.step
    several = s.epochs * s.optimizer_steps > 1
    return (several and a.policy_loss != "dis") or a.kl.where == "reward" or config.rollout.allow_truncated_sampling


def targets(trajectories: Sequence[Trajectory], a: AlgorithmConfig, max_response_tokens: int) -> Targets:
    """Advantages of a scored step. Empty responses pass through: they have no loss tokens."""
    if a.name == "grpo":
        return _group_targets(trajectories, a, max_response_tokens)
    return _critic_targets(trajectories, a, max_response_tokens)


def shaped_score(t: Trajectory, a: AlgorithmConfig, max_response_tokens: int) -> float:
    """The score as the algorithm sees it: lowered for coming too near the budget. Metrics show the plain one."""
    assert t.score is not None
    penalty = adv.overlong_penalty(len(t.response_ids), max_response_tokens, a.overlong_buffer)
    return t.score + a.overlong_penalty * penalty


def token_rewards(t: Trajectory, a: AlgorithmConfig, max_response_tokens: int) -> np.ndarray:
    """Rewards [response]: the score on the last action, the KL penalty on every action if configured so.

    An environment's rewards stay on their turns, and only what the shaped score holds beyond their sum lands on the
    last action.
    """
    paid = 0.0 if t.token_rewards is None else adv.total_reward(t.token_rewards)
    score = shaped_score(t, a, max_response_tokens) - paid
    rewards = adv.place_rewards(score, t.action_mask, t.token_rewards)
    if a.kl.where == "reward":
        assert t.old_logprobs is not None
        assert t.reference_logprobs is not None
        kl = adv.kl_tokens(t.old_logprobs, t.reference_logprobs, a.kl.estimator)
        rewards = rewards + adv.per_token_kl_rewards(kl, t.action_mask, a.kl.coefficient)
    return rewards


def _lambda(value: str, actions: int) -> float:
    return adv.adaptive_lambda(actions) if value == "adaptive" else float(value)


def _critic_targets(trajectories: Sequence[Trajectory], a: AlgorithmConfig, max_response_tokens: int) -> Targets:
    out, realised = [], []
    for t in trajectories:
        assert t.values is not None
        rewards = token_rewards(t, a, max_response_tokens)
        bootstrap = float(t.values[-1]) if t.finish_reason == "length" and a.truncation == "bootstrap" else 0.0

        def gae(lam: float, t: Trajectory = t, rewards: np.ndarray = rewards, last: float = bootstrap) -> np.ndarray:
            assert t.values is not None
            return adv.gae(t.values, rewards, t.action_mask, gamma=a.gamma, lam=lam, bootstrap_value=last)

        value_targets = gae(a.lambda_critic) + t.values[:-1]
        out.append(replace(t, advantages=gae(_lambda(a.lambda_policy, t.actions)), value_targets=value_targets))
        realised.append(adv.returns(rewards, t.action_mask, gamma=a.gamma, bootstrap_value=bootstrap))
    finished = _finish(out, a)
    return Targets(finished, _spread(out, finished), realised)


def _group_targets(trajectories: Sequence[Trajectory], a: AlgorithmConfig, max_response_tokens: int) -> Targets:
    def total(t: Trajectory) -> float:
        # An empty response has no token to carry its score, and is scored all the same.
        if not t.actions:
            return shaped_score(t, a, max_response_tokens)
        return adv.total_reward(token_rewards(t, a, max_response_tokens))

    scores = np.array([total(t) for t in trajectories])
    groups = np.array([t.prompt_index for t in trajectories])
    per_trajectory, flat = adv.group_advantages(scores, groups, normalize_std=a.normalize_std)
    out = [
        replace(t, advantages=np.where(t.action_mask, x, 0.0))
        for t, x in zip(trajectories, per_trajectory, strict=True)
    ]
    finished = _finish(out, a)
    return Targets(finished, {"grpo/zero_variance_groups": float(flat)} | _spread(out, finished), [])


def _finish(trajectories: list[Trajectory], a: AlgorithmConfig) -> list[Trajectory]:
    arrays = [t.advantages for t in trajectories if t.advantages is not None]
    if a.whiten:
        arrays = adv.whiten(arrays, [t.action_mask for t in trajectories])
    return [
        replace(
            t,
            advantages=x.astype(np.float32),
            value_targets=None if t.value_targets is None else t.value_targets.astype(np.float32),
        )
        for t, x in zip(trajectories, arrays, strict=True)
    ]


def _spread(raw: Sequence[Trajectory], finished: Sequence[Trajectory]) -> dict[str, float]:
    """Of the advantages as the policy sees them; and their deviation before whitening, which makes it 1."""

    def tokens(trajectories: Sequence[Trajectory]) -> np.ndarray:
        return np.concatenate([t.advantages[t.action_mask] for t in trajectories if t.advantages is not None])

    metrics = spread("advantages/", tokens(finished))
    return metrics | ({"advantages/raw_std": float(tokens(raw).std())} if metrics else {})
