"""Published recipes whose name a run carries, and what in a configuration differs from them."""

from __future__ import annotations

from typing import Any

from rl.config import Config, get

CRITIC_LR_RATIO = 5.0
"""SAO: the critic's learning rate over the policy's."""

SAO: dict[str, Any] = {
    "step.samples_per_prompt": 1,
    "algorithm.policy_loss": "dis",
    "algorithm.lambda_policy": "adaptive",
    "algorithm.lambda_critic": 1.0,
    "critic.freeze": "attention",
    "critic.updates_per_policy_update": 2,
    "critic.warmup_steps": 10,
}
"""SAO in its synchronous form (arXiv 2607.07508): what defines it, without sizes and learning rates."""


def deviations(config: Config) -> list[str]:
    """One line for each key in which a run named `sao` is not SAO; empty for the other algorithms."""
    if config.algorithm.name != "sao":
        return []
    found = [
        f"sao: {key} is {get(config, key)!r}, the recipe has {value!r}"
        for key, value in SAO.items()
        if get(config, key) != value
    ]
    policy, critic = config.policy.optimizer.lr, config.critic.optimizer.lr
    if abs(critic - CRITIC_LR_RATIO * policy) > 1e-6 * critic:
        found.append(
            f"sao: critic.optimizer.lr is {critic:g}, the recipe has {CRITIC_LR_RATIO:g} times the policy's,"
            f" {CRITIC_LR_RATIO * policy:g}"
        )
    return found
