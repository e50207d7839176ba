"""What a configuration must satisfy beyond its types: choices, bounds, and what must fit together."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rl.config import AlgorithmConfig, Config, ConfigError, DeepSpeedConfig

CHOICES: dict[str, tuple[str, ...]] = {
    "cluster.device": ("cpu", "gpu"),
    "prompts.source": ("task", "reasoning_gym", "jsonl"),
    "policy.optimizer.schedule": ("constant", "cosine"),
    "critic.optimizer.schedule": ("constant", "cosine"),
    "policy.deepspeed.dtype": ("fp32", "bf16"),
    "critic.deepspeed.dtype": ("fp32", "bf16"),
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
    "algorithm.kl.coefficient": (0, 1e6),
    "eval.prompts": (1, 1e7),
    "eval.every": (0, 1e9),
    "eval.temperature": (0, 100),
    "checkpoint.every": (0, 1e9),
    "checkpoint.keep": (1, 1e6),
    "critic.updates_per_policy_update": (1, 1e4),
    "critic.warmup_steps": (0, 1e9),
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


def get(config: Config, key: str) -> Any:
    """The value of a dotted key."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def wrong(key: str, given: Any, allowed: str) -> ConfigError:
    """The one line of every refusal."""
    return ConfigError(f"{key}: {given!r} given, must be {allowed}")


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


def _learners(c: Config) -> list[tuple[str, DeepSpeedConfig]]:
    return [("policy", c.policy.deepspeed)] + ([("critic", c.critic.deepspeed)] if c.algorithm.name != "grpo" else [])


def _optimizers(c: Config) -> None:
    for role, ds in _learners(c):
        if ds.dtype != "fp32" and ds.zero_stage == 0:
            raise wrong(f"{role}.deepspeed.zero_stage", 0, f"at least 1 with {ds.dtype}: stage 0 has another optimizer")
    for role in ("policy", "critic"):
        betas = get(c, f"{role}.optimizer.betas")
        if len(betas) != 2 or not all(0 <= b < 1 for b in betas):
            raise wrong(f"{role}.optimizer.betas", betas, "two numbers in [0, 1)")


def _sampling(c: Config) -> None:
    r = c.rollout
    if r.temperature == 0:
        raise wrong("rollout.temperature", r.temperature, "above 0: training needs sampling")
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
    if c.prompts.source == "jsonl":
        if c.prompts.path is None or not os.path.isfile(c.prompts.path):
            raise wrong("prompts.path", c.prompts.path, "a JSONL file with prompts.source=jsonl")
        if not Path(c.prompts.path).stat().st_size:
            raise wrong("prompts.path", c.prompts.path, "a file with at least one prompt, this one is empty")
    module, _, function = c.reward.function.partition(":")
    if not function.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        raise wrong("reward.function", c.reward.function, "module:function, such as rl.rewards.exact:score")


RULES: tuple[Callable[[Config], None], ...] = (_sizes, _optimizers, _sampling, _algorithm, _paths)
