"""What a configuration must satisfy where policy and critic meet their models: layers, experts, folders."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from indexshare.schedule import check_checkpoint, check_config
from rl.config import Config, ConfigError, CriticConfig, wrong

CRITIC_WEIGHTS, CRITIC_SETTINGS = "critic.safetensors", "critic.json"
"""What a pretrained critic's folder holds."""
CRITIC_SHAPE = ("blocks", "count", "top_k", "intermediate_size", "upcycle")
"""Settings of experts on which weights depend."""


def critic(c: Config) -> None:
    """The critic's settings beside each other, and the folders that they name."""
    k, e = c.critic, c.critic.experts
    if c.algorithm.name == "grpo":
        return
    if e.top_k > e.count:
        raise wrong("critic.experts.top_k", e.top_k, f"at most critic.experts.count = {e.count}")
    if e.top_k == 1 < e.count:
        raise wrong(
            "critic.experts.top_k", 1, "at least 2: a single expert always weighs 1, and the router learns nothing"
        )
    if e.intermediate_size is not None and e.intermediate_size % 8:
        raise wrong("critic.experts.intermediate_size", e.intermediate_size, "a multiple of 8")
    if e.upcycle and k.freeze != "attention":
        raise wrong(
            "critic.experts.upcycle", True, f"false with critic.freeze={k.freeze}: only MLPs that train become experts"
        )
    if k.first_trainable_layer and k.freeze != "attention":
        raise wrong("critic.first_trainable_layer", k.first_trainable_layer, f"0 with critic.freeze={k.freeze}")
    if k.trunk_layers is not None and k.freeze != "encoder":
        raise wrong("critic.trunk_layers", k.trunk_layers, f"null with critic.freeze={k.freeze}")
    if k.deepspeed.dtype == "fp16" and k.freeze != "encoder":
        raise wrong("critic.deepspeed.dtype", "fp16", f"fp32 or bf16 with critic.freeze={k.freeze}")
    if k.expert_parallel_size > 1:
        _expert_parallel(k)
    if k.pretrained is not None:
        _pretrained(k, k.pretrained)
    if k.cache_dir is not None:
        try:
            with tempfile.TemporaryFile(dir=k.cache_dir):
                pass
        except OSError as error:
            raise wrong("critic.cache_dir", k.cache_dir, f"a folder that can be written ({error.strerror})") from error


def _expert_parallel(k: CriticConfig) -> None:
    size, key = k.expert_parallel_size, "critic.expert_parallel_size"
    if k.freeze != "encoder" or k.experts.blocks == 0:
        raise wrong(key, size, f"1 with critic.freeze={k.freeze} and critic.experts.blocks={k.experts.blocks}")
    for divided, by in (("critic.deepspeed.ranks", k.deepspeed.ranks), ("critic.experts.count", k.experts.count)):
        if by % size:
            raise wrong(key, size, f"a divisor of {divided} = {by}")
    if k.deepspeed.zero_stage:
        raise wrong("critic.deepspeed.zero_stage", k.deepspeed.zero_stage, f"0 with {key}={size}")


def _pretrained(k: CriticConfig, folder: str) -> None:
    """A critic's folder is of one kind of critic: the settings on which its weights depend must be the same."""
    if not os.path.isfile(os.path.join(folder, CRITIC_WEIGHTS)):
        raise wrong("critic.pretrained", folder, "a folder that `longppo critic pretrain` wrote")
    theirs = _json(folder, CRITIC_SETTINGS)
    experts = theirs.get("experts", {})
    for key, own, found in (
        ("freeze", k.freeze, theirs.get("freeze")),
        ("trunk_layers", k.trunk_layers, theirs.get("trunk_layers")),
        ("first_trainable_layer", k.first_trainable_layer, theirs.get("first_trainable_layer")),
        *((f"experts.{n}", getattr(k.experts, n), experts.get(n)) for n in CRITIC_SHAPE),
    ):
        if own != found:
            raise wrong(f"critic.{key}", own, f"{found} as in critic.pretrained = {folder}")


def critic_backbone(c: Config) -> None:
    """What the model folders say of themselves; a folder that does not say is checked when it is loaded."""
    if c.algorithm.name == "grpo":
        return
    policy, critic = _json(c.policy.path, "config.json"), _json(c.critic.path or c.policy.path, "config.json")
    first, layers = c.critic.first_trainable_layer, critic.get("num_hidden_layers")
    if layers is not None and first >= layers:
        raise wrong("critic.first_trainable_layer", first, f"below {layers}, the layers of the critic's backbone")
    if layers is not None and (c.critic.trunk_layers or 0) > layers:
        raise wrong("critic.trunk_layers", c.critic.trunk_layers, f"at most {layers}, the layers of the backbone")
    if policy.get("vocab_size") != critic.get("vocab_size"):
        raise wrong(
            "critic.path", c.critic.path, f"a model with the policy's vocabulary of {policy.get('vocab_size')} tokens,"
            f" this one has {critic.get('vocab_size')}"
        )  # fmt: skip
    policy, critic = _json(c.policy.path, "tokenizer.json"), _json(c.critic.path or c.policy.path, "tokenizer.json")
    if policy and critic and any(policy.get(k) != critic.get(k) for k in ("model", "added_tokens")):
        raise wrong("critic.path", c.critic.path, "a model with the policy's tokenizer, this one's differs")


def _json(folder: str, name: str) -> dict[str, Any]:
    path = Path(folder) / name
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def indexshare(key: str, folder: Path) -> None:
    """A model of IndexShare's class must say which layers run an indexer, once, and hold the weights of those."""
    fields = _json(str(folder), "config.json")
    if fields.get("model_type") != "glm_moe_dsa":
        return
    try:
        check_checkpoint(folder) if any(folder.glob("model*.safetensors*")) else check_config(fields)
    except ValueError as error:
        raise ConfigError(f"{key}: {folder} given, is no IndexShare model: {error}") from error


def indexers(c: Config) -> None:
    """What is asked of indexers needs a policy that has them."""
    for key, given in (("train_indexer", c.indexshare.train_indexer), ("replay", c.indexshare.replay)):
        kind = _json(c.policy.path, "config.json").get("model_type")
        if given and kind != "glm_moe_dsa":
            raise wrong(f"indexshare.{key}", True, f"false with a {kind} model, which has no indexers")
    if c.indexshare.train_indexer and c.policy.lora.rank:
        raise wrong("indexshare.train_indexer", True, "false with policy.lora, which freezes what is no adapter")
