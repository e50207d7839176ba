"""What a configuration implies: who runs where, and what one step consists of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rl.config import Config


@dataclass(frozen=True)
class Role:
    """The actors of one role and what each of them reserves."""

    name: str
    count: int
    cpus: float
    gpus: float


def reference_in_critic(config: Config) -> bool:
    """Whether the critic's frozen encoder is the KL reference's lower part, so that one forward serves both."""
    critic, policy = config.critic, config.policy
    same = critic.path in (None, policy.path)
    alike = critic.trunk_dtype == ("bf16" if policy.deepspeed.dtype == "bf16" else "fp32")
    wanted = config.algorithm.kl.where != "none" and config.algorithm.name != "grpo"
    return wanted and critic.freeze == "encoder" and same and alike


def reference_alone(config: Config) -> bool:
    """Whether the KL reference is an actor of its own. LoRA with its adapter off is one too."""
    wanted = config.algorithm.kl.where != "none" and not config.policy.lora.rank
    return wanted and not reference_in_critic(config)


def roles(config: Config) -> list[Role]:
    """Every role that the run places; GRPO has no critic."""
    cpus, gpu = config.cluster.worker_cpus, float(config.cluster.device == "gpu")
    found = [
        Role("rollout", config.rollout.engines, cpus, gpu * config.rollout.tensor_parallel_size),
        Role("policy", config.policy.deepspeed.ranks, cpus, gpu),
    ]
    if reference_alone(config):
        found.append(Role("reference", 1, cpus, gpu))
    if config.algorithm.name != "grpo":
        found.append(Role("critic", config.critic.deepspeed.ranks, cpus, gpu))
    return found


def plan(config: Config) -> str:
    """A step's sizes and the actors, as start-up prints them."""
    s, r = config.step, config.rollout
    trajectories = s.prompts_per_step * s.samples_per_prompt
    per_update = trajectories // s.optimizer_steps
    longest = config.prompts.max_prompt_tokens + r.max_response_tokens
    # No two neighbouring micro-batches fit into one, so twice the tokens is a bound; a trajectory each is another.
    micro = min(per_update, max(1, -(-2 * per_update * longest // s.tokens_per_microbatch)))
    lines = [
        f"run        {config.run.name}, seed {config.run.seed}, {config.run.steps} steps of {config.algorithm.name}",
        f"step       {s.prompts_per_step} prompts x {s.samples_per_prompt} samples = {trajectories} trajectories",
        f"learn      {s.epochs} epoch(s) x {s.optimizer_steps} optimizer step(s) of {per_update} trajectories,"
        f" each at most {micro} micro-batch(es) of {s.tokens_per_microbatch} tokens",
    ]
    for role in roles(config):
        gpus = f", {role.gpus:g} GPU" if role.gpus else ""
        lines.append(f"{role.name:<10} {role.count} actor(s), each {role.cpus:g} CPU{gpus}")
    if reference_in_critic(config):
        lines.append("reference  in the critic's forward")
    return "\n".join(lines)


def trained(role: str, counts: Mapping[str, int]) -> str:
    """What of a role's model trains and what does not, in one line, from the counts of `LearnerWorker.setup`."""
    line = f"{role}: {counts['trained']:,} of {counts['parameters']:,} parameters train"
    parts = [f"{key.replace('/', ' ')} {n:,}" for key, n in counts.items() if "/" in key and n]
    return line + (f" ({', '.join(parts)})" if parts else "")
