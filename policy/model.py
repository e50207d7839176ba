"""Load, LoRA, reference; log-probabilities without [tokens, vocab] in memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from indexshare.replay import complete, packed
from rl.backbone import hidden_states, load_causal_lm
from rl.config import PolicyConfig
from rl.logprobs import logprobs_and_entropy
from rl.trajectory import Batch


class PolicyModel(nn.Module):
    """A causal LM that answers with the log-probabilities of a pack's response tokens."""

    def __init__(self, lm: Any, temperature: float) -> None:
        super().__init__()
        self.lm = lm
        self.temperature = temperature
        self.replay = False
        """Attend to what the engine selected (index replay) instead of what its own indexers would."""

    @property
    def base(self) -> Any:
        """The causal LM without LoRA's wrapper (its layers carry the adapters)."""
        return self.lm.get_base_model() if hasattr(self.lm, "peft_config") else self.lm

    def forward(self, batch: Batch) -> tuple[Float[torch.Tensor, " responses"], Float[torch.Tensor, " responses"]]:
        """Log-probability under the sampling temperature, and entropy, of every response token; float32."""
        base = self.base
        replayed = complete(recorded(batch)) if self.replay else None
        hidden = hidden_states(getattr(base, base.base_model_prefix), batch, replayed)[batch.predicts]
        head = base.get_output_embeddings().weight
        return logprobs_and_entropy(hidden, head, batch.targets, self.temperature)

    @contextmanager
    def without_adapter(self) -> Iterator[None]:
        """Inside, a LoRA policy is its own reference; left intact, also by an exception."""
        with self.lm.disable_adapter():
            yield


def recorded(batch: Batch) -> dict[int, Int[Tensor, "tokens k"]]:
    """What the engine's Full layers selected, as flat positions by layer. Raises ValueError where it did not say."""
    if not batch.selected:
        raise ValueError("indexshare.replay: true given, but the engine's kernels do not say what they select")
    return packed(batch.selected, batch.lengths, str(batch.ids.device))


def build(config: PolicyConfig, temperature: float, *, lora: bool = True, train_indexer: bool = False) -> PolicyModel:
    """The policy as configured; `lora=False` gives the plain initial model, which is the reference."""
    dtype = torch.bfloat16 if config.deepspeed.dtype == "bf16" else torch.float32
    checkpointing = config.deepspeed.gradient_checkpointing
    lm = load_causal_lm(config.path, dtype, gradient_checkpointing=checkpointing, train_indexer=train_indexer)
    if lora and config.lora.rank:
        from peft import LoraConfig, get_peft_model

        lm = get_peft_model(
            lm,
            LoraConfig(
                r=config.lora.rank,
                lora_alpha=config.lora.alpha,
                target_modules=config.lora.target_modules or _lora_targets(lm),
                task_type="CAUSAL_LM",
            ),
            autocast_adapter_dtype=False,
        )
    return PolicyModel(lm, temperature)


def _lora_targets(lm: Any) -> str | list[str]:
    """Where adapters go by default. IndexShare's attention reads `kv_b_proj` as a matrix, past any adapter on it."""
    if lm.config.model_type == "glm_moe_dsa":
        return ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]
    return "all-linear"


def plain_state_dict(model: PolicyModel, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A policy's gathered state under the checkpoint's own names, adapters folded into their weights.

    `state` is `Learner.state_dict()` of the policy. Tied weights are given once and fused experts one by one, as
    checkpoints have them.
    """
    from transformers.core_model_loading import revert_weight_conversion

    base = model.base
    if base is model.lm:
        plain = {k.removeprefix("lm."): v for k, v in state.items()}
    else:
        plain = {}
        for k, v in state.items():
            name = k.removeprefix("lm.base_model.model.")
            if ".lora_" in name:
                continue
            stem = name.removesuffix(".base_layer.weight")
            if stem != name:
                a = state[f"lm.base_model.model.{stem}.lora_A.default.weight"]
                b = state[f"lm.base_model.model.{stem}.lora_B.default.weight"]
                layer = base.get_submodule(stem)
                v = (v.float() + layer.scaling["default"] * (b.float() @ a.float())).to(v.dtype)
            plain[name.replace(".base_layer.", ".")] = v
    if base.config.tie_word_embeddings:
        plain.pop("lm_head.weight", None)
    return revert_weight_conversion(base, plain)
