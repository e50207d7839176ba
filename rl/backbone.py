"""Hidden states of a packed micro-batch, from any Hugging Face causal LM: what policy and critic have in common."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import nn

from rl.trajectory import Batch


def load_causal_lm(path: str, dtype: torch.dtype, *, gradient_checkpointing: bool = False) -> Any:
    """The model of a Hugging Face folder, IndexShare's attention made trainable, its indexers and routers frozen.

    Indexers and routers choose positions and experts; in RL they stay as pretrained (GLM-5's recipe), which also keeps
    rollout and trainer choosing alike.
    """
    from transformers import AutoModelForCausalLM

    from indexshare.attention import install

    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    if model.config.model_type == "glm_moe_dsa":
        install(model)
    for name, parameter in model.named_parameters():
        if ".indexer." in name or name.endswith(".mlp.gate.weight"):
            parameter.requires_grad_(False)
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    return model


def hidden_states(backbone: nn.Module, batch: Batch) -> Float[torch.Tensor, "tokens hidden"]:
    """Last hidden states of every token of the pack; no token sees another trajectory.

    IndexShare takes the pack's boundaries as they are; other models find them where `position_ids` restart.
    """
    config: Any = backbone.config
    mask = {"indexed_attention": batch.seq_start} if config.model_type == "glm_moe_dsa" else None
    out = backbone(
        input_ids=batch.ids[None], position_ids=batch.position_ids[None], attention_mask=mask, use_cache=False
    )
    return out.last_hidden_state[0]
