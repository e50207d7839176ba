"""What a configuration must satisfy beyond its types: choices, bounds, and what must fit together."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from rl import model_rules
from rl.config import AlgorithmConfig, Config, ConfigError, DeepSpeedConfig, get, wrong

EPISODE_RETURN = "rl.environments:episode_return"
"""The one reward function of an environment's episodes: the sum of what it paid."""

CHOICES: dict[str, tuple[str, ...]] = {
    "cluster.device": ("cpu", "gpu"),
    "prompts.source": ("task", "reasoning_gym", "jsonl", "environment"),
    "policy.optimizer.schedule": ("constant", "cosine"),
    "critic.optimizer.schedule": ("constant", "cosine"),
    "policy.deepspeed.dtype": ("fp32", "bf16"),
    "critic.deepspeed.dtype": ("fp32", "bf16", "fp16"),
    "critic.freeze": ("none", "encoder", "attention"),
    "critic.trunk_dtype": ("fp32", "bf16", "fp16"),
    "critic.returns": ("plain", "centred", "normalised"),
    "rollout.dtype": ("float32", "bfloat16"),
    "algorithm.name": ("ppo", "grpo", "sao"),
    "algorithm.truncation": ("terminal", "bootstrap"),
    "algorithm.policy_loss": ("clip", "dis"),
    "algorithm.aggregation": ("token_mean", "sequence_mean", "constant"),
    "algorithm.kl.where": ("none", "reward", "loss"),
    "algorithm.kl.estimator": ("k1", "k2", "k3"),
}

BOUNDS: dict[str, tuple[float, float]] = {
    "run.seed": (0, 2**31),
    "run.steps": (1, 1e9),
    "run.budget.generated_tokens": (1, 1e18),
    "run.budget.trained_tokens": (1, 1e18),
    "run.budget.seconds": (1e-9, 1e12),
    "cluster.worker_cpus": (0.01, 1e4),
    "cluster.threads": (1, 1024),
    "cluster.placement_timeout_s": (1, 3600),
    "step.prompts_per_step": (1, 1e7),
    "step.samples_per_prompt": (1, 1e5),
    "step.optimizer_steps": (1, 1e5),
    "step.epochs": (1, 1e4),
    "step.tokens_per_microbatch": (1, 1e9),
    "prompts.seed": (0, 2**31),
    "prompts.max_prompt_tokens": (1, 1e8),
    "rollout.engines": (1, 1e4),
    "rollout.temperature": (0, 100),
    "rollout.top_p": (1e-9, 1),
    "rollout.top_k": (0, 1e7),
    "rollout.max_response_tokens": (1, 1e8),
    "rollout.max_turns": (1, 1e6),
    "rollout.max_turn_tokens": (1, 1e8),
    "rollout.max_model_len": (2, 1e8),
    "rollout.max_num_seqs": (1, 1e5),
    "rollout.max_num_batched_tokens": (1, 1e8),
    "rollout.kv_cache_gib": (1, 1e5),
    "rollout.gpu_memory_utilization": (0.01, 1),
    "rollout.tensor_parallel_size": (1, 1024),
    "rollout.probe_tolerance": (0, 1e3),
    "algorithm.gamma": (0, 1),
    "algorithm.lambda_critic": (0, 1),
    "algorithm.clip_low": (0, 1),
    "algorithm.clip_high": (0, 1e3),
    "algorithm.dual_clip": (1.0000001, 1e6),
    "algorithm.dis_low": (0, 1),
    "algorithm.dis_high": (0, 1e6),
    "algorithm.importance_cap": (1, 1e6),
    "algorithm.value_clip": (1e-9, 1e9),
    "algorithm.entropy_coefficient": (-1e3, 1e3),
    "algorithm.target_kl": (1e-12, 1e6),
    "algorithm.dynamic_sampling_rounds": (0, 1e3),
    "algorithm.overlong_buffer": (0, 1e8),
    "algorithm.overlong_penalty": (0, 1e6),
    "algorithm.kl.coefficient": (0, 1e6),
    "eval.prompts": (1, 1e7),
    "eval.every": (0, 1e9),
    "eval.samples": (1, 1e5),
    "eval.temperature": (0, 100),
    "checkpoint.every": (0, 1e9),
    "checkpoint.keep": (1, 1e6),
    "indexshare.distill_coefficient": (0, 1e6),
    "critic.updates_per_policy_update": (1, 1e4),
    "critic.warmup_steps": (0, 1e9),
    "critic.trunk_layers": (1, 1e5),
    "critic.first_trainable_layer": (0, 1e5),
    "critic.experts.blocks": (0, 1e3),
    "critic.experts.count": (1, 1e5),
    "critic.experts.top_k": (1, 1e5),
    "critic.experts.intermediate_size": (8, 1e6),
    "critic.experts.balance_coefficient": (0, 1e3),
    "critic.cache_gib": (0, 1e6),
    "indexshare.overlap_samples": (0, 1e6),
    "critic.expert_parallel_size": (1, 1e5),
    "critic.pretrain.prompts": (1, 1e9),
    "critic.pretrain.held_out": (1, 1e9),
    "critic.pretrain.epochs": (1, 1e6),
    "policy.lora.rank": (0, 1e5),
    "policy.lora.alpha": (1, 1e6),
} | {
    f"{role}.{key}": bounds
    for role in ("policy", "critic")
    for key, bounds in {
        "optimizer.lr": (0, 10),
        "optimizer.weight_decay": (0, 10),
        "optimizer.max_grad_norm": (1e-9, 1e9),
        "optimizer.warmup_steps": (0, 1e9),
        "deepspeed.zero_stage": (0, 3),
        "deepspeed.ranks": (1, 1e5),
    }.items()
}


def check(config: Config) -> None:
    """Raise ConfigError for the first thing that is wrong."""
    for key, allowed in CHOICES.items():
        if (given := get(config, key)) not in allowed:
            raise wrong(key, given, f"one of {', '.join(allowed)}")
    for key, (low, high) in BOUNDS.items():
        given = get(config, key)
        if given is not None and not low <= given <= high:
            raise wrong(key, given, f"between {low:g} and {high:g}")
    for rule in RULES:
        rule(config)


def _sizes(c: Config) -> None:
    s = c.step
    trajectories = s.prompts_per_step * s.samples_per_prompt
    if trajectories % s.optimizer_steps:
        raise wrong(
            "step.optimizer_steps",
            s.optimizer_steps,
            f"a divisor of prompts_per_step x samples_per_prompt = {trajectories}",
        )
    for role, ds in _learners(c):
        if trajectories // s.optimizer_steps < ds.ranks:
            raise wrong(
                f"{role}.deepspeed.ranks", ds.ranks, f"at most {trajectories // s.optimizer_steps}, the trajectories"
                " of one optimizer step"
            )  # fmt: skip


def step_tokens(c: Config) -> int:
    """The most tokens that one step generates, groups drawn anew by dynamic sampling left out."""
    return c.step.prompts_per_step * c.step.samples_per_prompt * c.rollout.max_response_tokens


def _budget(c: Config) -> None:
    budget = c.run.budget
    for key, given, step in (
        ("generated_tokens", budget.generated_tokens, step_tokens(c)),
        ("trained_tokens", budget.trained_tokens, step_tokens(c) * c.step.epochs),
    ):
        if given is not None and given < step:
            raise wrong(f"run.budget.{key}", given, f"at least {step}, the most tokens of one step")


def _learners(c: Config) -> list[tuple[str, DeepSpeedConfig]]:
    return [("policy", c.policy.deepspeed)] + ([("critic", c.critic.deepspeed)] if c.algorithm.name != "grpo" else [])


def _optimizers(c: Config) -> None:
    for role, ds in _learners(c):
        # On a frozen encoder DeepSpeed sees float32 throughout: only the experts' products are lower.
        lowered = ds.dtype != "fp32" and not (role == "critic" and c.critic.freeze == "encoder")
        if lowered and ds.zero_stage == 0:
            raise wrong(f"{role}.deepspeed.zero_stage", 0, f"at least 1 with {ds.dtype}: stage 0 has another optimizer")
    for role in ("policy", "critic"):
        betas = get(c, f"{role}.optimizer.betas")
        if len(betas) != 2 or not all(0 <= b < 1 for b in betas):
            raise wrong(f"{role}.optimizer.betas", betas, "two numbers in [0, 1)")


def _sampling(c: Config) -> None:
    r = c.rollout
    if r.temperature == 0:
        raise wrong("rollout.temperature", r.temperature, "above 0: training needs sampling")
    if c.eval.temperature == 0 and c.eval.samples > 1:
        raise wrong(
            "eval.samples", c.eval.samples, "1 with eval.temperature=0: the likeliest tokens are always the same"
        )
    if (r.top_p < 1 or r.top_k > 0) and not r.allow_truncated_sampling:
        raise ConfigError(
            f"rollout.top_p, rollout.top_k: {r.top_p}, {r.top_k} given, must be 1 and 0 (the engine would sample from "
            "another distribution than the trainer's), or rollout.allow_truncated_sampling=true"
        )
    if r.allow_truncated_sampling and c.algorithm.policy_loss == "dis":
        raise wrong(
            "algorithm.policy_loss", "dis", "clip with rollout.allow_truncated_sampling: DIS uses its log-probs"
        )
    if r.allow_truncated_sampling and c.algorithm.importance_cap is not None:
        raise wrong(
            "algorithm.importance_cap",
            c.algorithm.importance_cap,
            "null with rollout.allow_truncated_sampling: the correction uses the engine's log-probs",
        )
    if r.max_model_len is not None and r.max_model_len <= r.max_response_tokens:
        raise wrong(
            "rollout.max_model_len", r.max_model_len, f"more than max_response_tokens = {r.max_response_tokens}"
        )
    if r.max_num_batched_tokens < r.max_num_seqs:  # vLLM refuses it, minutes later
        raise wrong(
            "rollout.max_num_batched_tokens", r.max_num_batched_tokens, f"at least max_num_seqs = {r.max_num_seqs}"
        )


def _algorithm(c: Config) -> None:
    a = c.algorithm
    _lambda(a)
    if a.name == "grpo" and c.step.samples_per_prompt < 2:
        raise wrong(
            "step.samples_per_prompt", c.step.samples_per_prompt, "at least 2 for grpo: a group of one has no peers"
        )
    if a.name != "grpo" and a.dynamic_sampling_rounds:
        raise wrong(
            "algorithm.dynamic_sampling_rounds", a.dynamic_sampling_rounds, f"0 for {a.name}: only groups can be flat"
        )
    if a.policy_loss == "dis" and a.importance_cap is not None:
        raise wrong("algorithm.importance_cap", a.importance_cap, "null with dis: it corrects already")
    if a.overlong_buffer > c.rollout.max_response_tokens:
        raise wrong(
            "algorithm.overlong_buffer",
            a.overlong_buffer,
            f"at most rollout.max_response_tokens = {c.rollout.max_response_tokens}",
        )
    if a.kl.where == "loss" and a.kl.estimator == "k1":
        raise wrong("algorithm.kl.estimator", "k1", "k2 or k3 in the loss: k1's expected on-policy gradient is zero")
    if a.kl.where != "none" and a.kl.coefficient == 0:
        raise wrong("algorithm.kl.coefficient", a.kl.coefficient, f"above 0 with algorithm.kl.where={a.kl.where}")


def _lambda(a: AlgorithmConfig) -> None:
    if a.lambda_policy == "adaptive":
        return
    try:
        fine = 0 <= float(a.lambda_policy) <= 1
    except ValueError:
        fine = False
    if not fine:
        raise wrong("algorithm.lambda_policy", a.lambda_policy, "a number in [0, 1] or adaptive")


def _paths(c: Config) -> None:
    if c.run.name == ".." or Path(c.run.name).name != c.run.name:
        raise wrong("run.name", c.run.name, "a plain name, which names the run's folder in run.out")
    for key, path in (("policy.path", c.policy.path), ("critic.path", c.critic.path)):
        if path is not None and not os.path.isfile(os.path.join(path, "config.json")):
            hint = " (longppo fetch-smollm2 makes it)" if "smollm2" in path.lower() else ""
            raise wrong(key, path, f"a folder with a config.json{hint}")
        if path is not None:
            model_rules.indexshare(key, Path(path))
    if c.prompts.source == "jsonl":
        if c.prompts.path is None or not os.path.isfile(c.prompts.path):
            raise wrong("prompts.path", c.prompts.path, "a JSONL file with prompts.source=jsonl")
        if not Path(c.prompts.path).stat().st_size:
            raise wrong("prompts.path", c.prompts.path, "a file with at least one prompt, this one is empty")
    _function("reward.function", c.reward.function, "rl.rewards.exact:score")


def _function(key: str, given: str, example: str) -> None:
    module, _, function = given.partition(":")
    if not function.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        raise wrong(key, given, f"module:function, such as {example}")


def _environment(c: Config) -> None:
    r, source, reward = c.rollout, c.prompts.source, c.reward.function
    if source != "environment":
        if reward == EPISODE_RETURN:
            raise wrong("reward.function", reward, f"another with prompts.source={source}: only environments pay turns")
        for key in ("rollout.max_turns", "rollout.max_turn_tokens"):
            if (given := get(c, key)) is not None:
                raise wrong(key, given, f"null with prompts.source={source}: only an environment has turns")
        return
    _function("prompts.name", c.prompts.name, "examples.guessing:make, with prompts.source=environment")
    if reward != EPISODE_RETURN:
        raise wrong("reward.function", reward, f"{EPISODE_RETURN} with prompts.source=environment, which pays itself")
    if r.max_turn_tokens is not None and r.max_turn_tokens > r.max_response_tokens:
        raise wrong(
            "rollout.max_turn_tokens", r.max_turn_tokens, f"at most max_response_tokens = {r.max_response_tokens}"
        )


RULES: tuple[Callable[[Config], None], ...] = (
    _sizes,
    _budget,
    _optimizers,
    _sampling,
    _algorithm,
    _paths,
    _environment,
    model_rules.indexers,
    model_rules.critic,
    model_rules.critic_backbone,
)
