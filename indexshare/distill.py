"""Teaches every indexer where the layers that it serves look.

This is the multi-layer distillation of IndexCache (arXiv 2603.12201).

The target of a Full layer's indexer is the mean, over the heads of all layers that use its selection, of
their attention over all legal keys. One KL to that mean has the same gradient as the mean of KLs to each (the
paper's Proposition 1), so the indexer's scores are computed once. Everything goes chunk by chunk, each chunk
backwarded at once: memory is linear in the tokens. The backbone gets no gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import (
    GlmMoeDsaForCausalLM,
    apply_rotary_pos_emb_interleave,
)

from indexshare.attention import IndexShareAttention
from indexshare.indexer import Chunk, chunk_scores, chunked, future, project, segment_bounds
from indexshare.schedule import Schedule
from indexshare.selection import stable_topk_mask


@dataclass(frozen=True)
class LayerInput:
    """What an attention was given: hidden states [1, tokens, hidden] and (cos, sin) [1, tokens, rope]."""

    hidden: Tensor
    rotary: tuple[Tensor, Tensor]


@torch.no_grad()
def record(model: GlmMoeDsaForCausalLM, ids: Tensor, positions: Tensor, seq_start: Tensor) -> list[LayerInput]:
    """Runs the backbone over a packed micro-batch ([tokens] each); keeps what every attention was given."""
    inputs: list[LayerInput] = []

    def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs.append(LayerInput(kwargs["hidden_states"].detach(), kwargs["position_embeddings"]))

    hooks = [layer.self_attn.register_forward_pre_hook(keep, with_kwargs=True) for layer in model.model.layers]
    try:
        model.model(
            input_ids=ids[None],
            position_ids=positions[None],
            attention_mask={"indexed_attention": seq_start},
            use_cache=False,
        )
    finally:
        for hook in hooks:
            hook.remove()
    return inputs


@dataclass(frozen=True)
class Served:
    """Queries and keys [heads, tokens, dim] of one layer that uses a selection, and its softmax scale."""

    q: Tensor
    k: Tensor
    scale: float

    def attention(self, chunk: Chunk) -> Tensor:
        """Mean over heads of the attention over all legal keys, [queries, keys]."""
        scores = self.q[:, chunk.begin : chunk.end] @ self.k[:, chunk.start : chunk.end].transpose(1, 2)
        exact = scores.to(torch.promote_types(scores.dtype, torch.float32)) * self.scale
        return exact.masked_fill(future(chunk, scores.device), float("-inf")).softmax(-1).mean(0)


@torch.no_grad()
def served(attention: IndexShareAttention, given: LayerInput) -> Served:
    """The main attention's queries and keys, recomputed from what the layer was given."""
    nope, rank, tokens = attention.qk_nope_head_dim, attention.kv_lora_rank, given.hidden.shape[1]
    q = attention.q_b_proj(attention.q_a_layernorm(attention.q_a_proj(given.hidden)))
    q = q.view(1, tokens, attention.num_heads, attention.qk_head_dim)
    compressed = attention.kv_a_proj_with_mqa(given.hidden)
    q_rot, k_rot = apply_rotary_pos_emb_interleave(
        q[..., nope:], compressed[..., rank:].unsqueeze(2), *given.rotary, unsqueeze_dim=2
    )
    latent = attention.kv_a_layernorm(compressed[..., :rank])
    keys, _ = attention.expand_kv(latent.unsqueeze(1), k_rot.transpose(1, 2))
    return Served(torch.cat([q[..., :nope], q_rot], -1)[0].transpose(0, 1), keys[0], attention.scaling)


def backward(
    model: GlmMoeDsaForCausalLM,
    inputs: list[LayerInput],
    seq_start: Tensor,
    chunk_size: int = 128,
    weights: Tensor | None = None,
) -> dict[int, float]:
    """Adds the gradient of the distillation loss to the indexers' parameters.

    The loss of a Full layer is the mean over queries, weighted by `weights` [tokens] if given, of
    KL(target || softmax(scores)). Returns it by layer.
    """
    attentions = [layer.self_attn for layer in model.model.layers]
    bounds = segment_bounds(seq_start, inputs[0].hidden.shape[1])
    weight = torch.ones(bounds[-1], device=seq_start.device) if weights is None else weights
    weight = weight / weight.sum()
    losses = {}
    for full, layers in Schedule.from_config(model.config).served_layers().items():
        teachers = [served(attentions[i], inputs[i]) for i in layers]
        with torch.no_grad():
            q_latent = attentions[full].q_a_layernorm(attentions[full].q_a_proj(inputs[full].hidden))
        projected = project(attentions[full].indexer, inputs[full].hidden, q_latent, inputs[full].rotary)
        q, k, w = (t.detach().requires_grad_() for t in projected)
        losses[full] = 0.0
        for chunk in chunked(bounds, chunk_size):
            rows = weight[chunk.begin : chunk.end]
            if not rows.any():
                continue
            target = torch.stack([t.attention(chunk) for t in teachers]).mean(0)
            scores = chunk_scores(q, k, w, attentions[full].indexer.softmax_scale, chunk)
            predicted = scores.log_softmax(-1).masked_fill(future(chunk, scores.device), 0.0)
            loss = ((torch.xlogy(target, target) - target * predicted).sum(-1) * rows).sum()
            loss.backward()
            losses[full] += loss.item()
        torch.autograd.backward(projected, [q.grad, k.grad, w.grad])
    return losses


@torch.no_grad()
def recall(
    model: GlmMoeDsaForCausalLM, inputs: list[LayerInput], seq_start: Tensor, k: int, chunk_size: int = 128
) -> list[float]:
    """By layer, over queries with more than k legal keys: the attention mass on the k that its indexer
    selects, divided by the mass on the k best."""
    attentions = [layer.self_attn for layer in model.model.layers]
    bounds = segment_bounds(seq_start, inputs[0].hidden.shape[1])
    got, best = [0.0] * len(attentions), [0.0] * len(attentions)
    for full, layers in Schedule.from_config(model.config).served_layers().items():
        indexer = attentions[full].indexer
        q_latent = attentions[full].q_a_layernorm(attentions[full].q_a_proj(inputs[full].hidden))
        q, key, w = project(indexer, inputs[full].hidden, q_latent, inputs[full].rotary)
        teachers = {i: served(attentions[i], inputs[i]) for i in layers}
        for chunk in chunked(bounds, chunk_size):
            if chunk.end - chunk.start <= k:
                continue
            first = max(0, chunk.start + k - chunk.begin)
            selected = stable_topk_mask(chunk_scores(q, key, w, indexer.softmax_scale, chunk), k)[first:]
            for i, teacher in teachers.items():
                mass = teacher.attention(chunk)[first:]
                got[i] += mass.masked_fill(~selected, 0.0).sum().item()
                best[i] += mass.topk(k, -1).values.sum().item()
    return [g / b if b else float("nan") for g, b in zip(got, best, strict=True)]
