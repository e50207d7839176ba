"""Hidden states of a packed micro-batch, from any Hugging Face causal LM: what policy and critic have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rl.trajectory import Batch

PACKED = "longppo_packed"
"""The name under which transformers finds `packed_attention`."""


def load_causal_lm(
    path: str, dtype: torch.dtype, *, gradient_checkpointing: bool = False, train_indexer: bool = False
) -> Any:
    """The model of a Hugging Face folder, its attention made for packs, its routers and (unless told) indexers frozen.

    Indexers and routers choose positions and experts; in RL they stay as pretrained (GLM-5's recipe), which also keeps
    rollout and trainer choosing alike.
    """
    from transformers import AutoModelForCausalLM

    from indexshare.attention import install

    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    if model.config.model_type == "glm_moe_dsa":
        install(model)
    elif _plain_causal(model):
        _register()
        model.set_attn_implementation(PACKED)
    for name, parameter in model.named_parameters():
        if (".indexer." in name and not train_indexer) or name.endswith(".mlp.gate.weight"):
            parameter.requires_grad_(False)
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    return model


def hidden_states(
    backbone: nn.Module, batch: Batch, replayed: Mapping[int, Tensor] | None = None
) -> Float[torch.Tensor, "tokens hidden"]:
    """Last hidden states of every token of the pack; no token sees another trajectory.

    `replayed` is for IndexShare alone: what its Full layers are to select (see `IndexShareAttention`).

    IndexShare takes the pack's boundaries as they are, plain causal attention the trajectories' lengths; other models
    find them where `position_ids` restart, and mask a square of the whole pack.
    """
    config: Any = backbone.config
    more: dict[str, Any] = {"attention_mask": None}
    if config.model_type == "glm_moe_dsa":
        more["attention_mask"] = {"indexed_attention": batch.seq_start}
        if replayed is not None:
            more["replayed"] = replayed
    elif getattr(config, "_attn_implementation", None) == PACKED:  # a backbone of another make has none
        more["packed_lengths"] = batch.lengths
    out = backbone(input_ids=batch.ids[None], position_ids=batch.position_ids[None], use_cache=False, **more)
    return out.last_hidden_state[0]


def packed_attention(
    module: nn.Module,
    query: Float[Tensor, "1 heads tokens dim"],
    key: Float[Tensor, "1 kv_heads tokens dim"],
    value: Float[Tensor, "1 kv_heads tokens dim"],
    attention_mask: None,
    *,
    packed_lengths: Sequence[int] | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **more: Any,
) -> tuple[Float[Tensor, "1 tokens heads dim"], None]:
    """Causal attention within each trajectory of a pack: a square per trajectory, none of the pack and no mask.

    In the form of transformers' attention interface. Neighbours of one length are one batched call, so a pack of
    responses that all ran to their budget costs as little as a rectangle would, and unequal ones pad nothing. Raises
    ValueError where a model does not hand the lengths down to its layers.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if packed_lengths is None:
        raise ValueError(f"{type(module).__name__} got no `packed_lengths`: it would mix the trajectories of a pack")
    parts, start = [], 0
    for length, neighbours in groupby(packed_lengths):
        count = len(list(neighbours))
        q, k, v = (
            x[0, :, start : start + count * length].unflatten(1, (count, length)).transpose(0, 1)
            for x in (query, key, value)
        )
        part = sdpa_attention_forward(module, q, k, v, None, dropout=dropout, scaling=scaling, is_causal=True)[0]
        parts.append(part.flatten(0, 1))
        start += count * length
    return torch.cat(parts)[None], None


def _plain_causal(model: Any) -> bool:
    """Whether every layer attends to all that came before, through transformers' attention interface.

    Sliding windows and chunks are told to a layer by its mask, which a pack's lengths do not replace.
    """
    config = model.config
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    windowed = getattr(config, "sliding_window", None) is not None
    return model._supports_attention_backend and kinds == {"full_attention"} and not windowed


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(PACKED, packed_attention)
    AttentionMaskInterface.register(PACKED, lambda *_, **__: None)
