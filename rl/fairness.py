"""What arms of a comparison must have in common, and in which keys they differ. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl.config import Config, get
from rl.config_load import dotted_keys

Texts = Mapping[str, str]
"""A configuration as text by dotted key: the same whether it came from YAML or from TensorBoard's hyperparameters."""

SHARED = (
    "run.budget",
    "prompts",
    "reward",
    "eval",
    "policy.path",
    "policy.lora",
    "rollout.temperature",
    "rollout.top_p",
    "rollout.top_k",
    "rollout.allow_truncated_sampling",
    "rollout.max_response_tokens",
    "rollout.max_model_len",
)
"""Keys and sections that decide on data, initial policy, evaluation and budget."""
OWN = ("run.name", "run.seed", "run.out", "run.resume")
"""Keys that name a run and say nothing of what it does."""


def as_text(value: Any) -> str:
    """`value` as it is compared: 20, 20.0 and `20.0` of another source are one number."""
    if value is None or value == "None":
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.12g}" if isinstance(value, int | float) else str(value)


def texts(config: Config) -> dict[str, str]:
    """The configuration's leaves."""
    return {key: as_text(get(config, key)) for key in dotted_keys(Config)}


def shared(key: str) -> bool:
    """Whether arms must agree in it."""
    return any(key == part or key.startswith(f"{part}.") for part in SHARED)


def differing(configs: Mapping[str, Texts]) -> dict[str, dict[str, str]]:
    """Keys in which the named configurations differ, with each one's value; `-` where it has no such key."""
    keys = sorted({key for config in configs.values() for key in config} - set(OWN))
    rows = {key: {name: config.get(key, "-") for name, config in configs.items()} for key in keys}
    return {key: row for key, row in rows.items() if len(set(row.values())) > 1}


def equal(configs: Mapping[str, Texts]) -> dict[str, str]:
    """Of the keys in which arms must agree, those in which all do, with the value."""
    first, apart = next(iter(configs.values()), {}), differing(configs)
    return {key: value for key, value in first.items() if shared(key) and key not in apart}
