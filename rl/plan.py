"""What a configuration implies: who runs where, and what one step consists of."""

from __future__ import annotations

from dataclasses import dataclass

from rl.config import Config


@dataclass(frozen=True)
class Role:
    """The actors of one role and what each of them reserves."""

    name: str
    count: int
    cpus: float
    gpus: float


def roles(config: Config) -> list[Role]:
    """Every role that the run places; GRPO has no critic, LoRA is its own reference."""
    cpus, gpu = config.cluster.worker_cpus, float(config.cluster.device == "gpu")
    found = [
        Role("rollout", config.rollout.engines, cpus, gpu * config.rollout.tensor_parallel_size),
        Role("policy", config.policy.deepspeed.ranks, cpus, gpu),
    ]
    if config.algorithm.kl.where != "none" and not config.policy.lora.rank:
        found.append(Role("reference", 1, cpus, gpu))
    if config.algorithm.name != "grpo":
        found.append(Role("critic", config.critic.deepspeed.ranks, cpus, gpu))
    return found
