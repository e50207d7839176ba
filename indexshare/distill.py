"""Teaches every indexer where the layers that it serves look.

This is the multi-layer distillation of IndexCache (arXiv 2603.12201).

The target of a Full layer's indexer is the mean, over the heads of all layers that use its selection, of
their attention. One KL to that mean has the same gradient as the mean of KLs to each (the paper's
Proposition 1), so the indexer's scores are computed once. Everything goes chunk by chunk and head by head, and
the gradient of a chunk is taken at once: memory is linear in the tokens. The backbone gets no gradient.

    with recording(model) as inputs:
        hidden = hidden_states(model, ids, positions, seq_start)
    total = language_loss(hidden) + sum(losses(model, inputs, seq_start).values())
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import (
    GlmMoeDsaForCausalLM,
    apply_rotary_pos_emb_interleave,
)

from indexshare.attention import IndexShareAttention
from indexshare.indexer import Chunk, chunk_scores, chunked, future, project, segment_bounds
from indexshare.schedule import Schedule
from indexshare.selection import stable_topk_mask

Support = Literal["all", "selected"]
"""Over which keys target and prediction are distributions: all legal ones, or those that the indexer selects.
The latter is the sparse stage of DeepSeek-V3.2: there the model sees no others."""

Teachers = Literal["served", "own"]
"""Whose attention an indexer learns: that of all layers which it serves, or of its own layer alone (DeepSeek's
loss, which does not know Shared layers)."""


@dataclass(frozen=True)
class LayerInput:
    """What an attention was given: hidden states [1, tokens, hidden] and (cos, sin) [1, tokens, rope]."""

    hidden: Tensor
    rotary: tuple[Tensor, Tensor]


@contextmanager
def recording(model: GlmMoeDsaForCausalLM) -> Iterator[list[LayerInput]]:
    """Keeps, layer by layer, what every attention is given in the one forward pass that is made inside.

    Detached. Leave it before the backward pass, in which checkpointed layers run again.
    """
    inputs: list[LayerInput] = []

    def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs.append(LayerInput(kwargs["hidden_states"].detach(), kwargs["position_embeddings"]))

    hooks = [layer.self_attn.register_forward_pre_hook(keep, with_kwargs=True) for layer in model.model.layers]
    try:
        yield inputs
    finally:
        for hook in hooks:
            hook.remove()


def hidden_states(model: GlmMoeDsaForCausalLM, ids: Tensor, positions: Tensor, seq_start: Tensor) -> Tensor:
    """[tokens, hidden] of a packed micro-batch ([tokens] each)."""
    return model.model(
        input_ids=ids[None],
        position_ids=positions[None],
        attention_mask={"indexed_attention": seq_start},
        use_cache=False,
    ).last_hidden_state[0]


@torch.no_grad()
def record(model: GlmMoeDsaForCausalLM, ids: Tensor, positions: Tensor, seq_start: Tensor) -> list[LayerInput]:
    """Runs the backbone over a packed micro-batch ([tokens] each); keeps what every attention was given."""
    with recording(model) as inputs:
        hidden_states(model, ids, positions, seq_start)
    return inputs


@dataclass(frozen=True)
class Served:
    """Queries and keys [heads, tokens, dim] of one layer that uses a selection, and its softmax scale."""

    q: Tensor
    k: Tensor
    scale: float

    def attention(self, chunk: Chunk, excluded: Tensor) -> Tensor:
        """Mean over heads of the attention over the keys that are not `excluded`, both [queries, keys].

        Head by head: a tensor [heads, queries, keys] never exists.
        """
        total = torch.zeros((), device=self.q.device)
        for q, k in zip(self.q, self.k, strict=True):
            scores = q[chunk.begin : chunk.end] @ k[chunk.start : chunk.end].t()
            exact = scores.to(torch.promote_types(scores.dtype, torch.float32)) * self.scale
            total = total + exact.masked_fill_(excluded, float("-inf")).softmax(-1)
        return total / len(self.q)


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


def projected(attention: IndexShareAttention, given: LayerInput) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and head weights of a Full layer's indexer, as `indexer.project`; only the indexer gets a
    gradient."""
    assert attention.indexer is not None  # a Full layer's
    with torch.no_grad():
        q_latent = attention.q_a_layernorm(attention.q_a_proj(given.hidden))
    return project(attention.indexer, given.hidden, q_latent, given.rotary)


class _Divergence(torch.autograd.Function):
    """sum over queries of weight * KL(mean attention of the teachers || softmax of the scores).

    The gradient is taken chunk by chunk in the forward pass, so that no scores are kept for a backward pass.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, w: Tensor, scale: float, teachers: list[Served], work: _Work) -> Tensor:
        """Shapes as in `indexer.project`; a scalar."""
        wanted = any(ctx.needs_input_grad)
        q, k, w = (t.detach().requires_grad_(wanted) for t in (q, k, w))
        total = torch.zeros((), dtype=q.dtype, device=q.device)
        for chunk in work.chunks:
            rows = work.weights[chunk.begin : chunk.end]
            if not rows.any():
                continue
            with torch.set_grad_enabled(wanted):
                scores = chunk_scores(q, k, w, scale, chunk)
                excluded = future(chunk, scores.device)
                if work.topk is not None:
                    excluded = ~stable_topk_mask(scores.detach(), work.topk)
                target = torch.stack([t.attention(chunk, excluded) for t in teachers]).mean(0)
                predicted = scores.masked_fill(excluded, float("-inf")).log_softmax(-1).masked_fill(excluded, 0.0)
                loss = ((torch.xlogy(target, target) - target * predicted).sum(-1) * rows).sum()
            if wanted:
                loss.backward()
            total += loss.detach()
        if wanted:
            # Without a single weighted query there is a loss of 0 and a gradient of 0.
            ctx.save_for_backward(*(torch.zeros_like(t) if t.grad is None else t.grad for t in (q, k, w)))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dq, dk, dw = (grad * t for t in ctx.saved_tensors)
        return dq, dk, dw, None, None, None


@dataclass(frozen=True)
class _Work:
    """Which queries of a micro-batch count how much, in which chunks; `topk` keys where only those count."""

    chunks: tuple[Chunk, ...]
    weights: Tensor
    topk: int | None


def losses(
    model: GlmMoeDsaForCausalLM,
    inputs: list[LayerInput],
    seq_start: Tensor,
    *,
    weights: Tensor | None = None,
    support: Support = "all",
    teachers: Teachers = "served",
    chunk_size: int = 128,
) -> dict[int, Tensor]:
    """The distillation loss of every Full layer, a scalar with a gradient in its indexer's parameters.

    It is the sum over queries of weight * KL(target || softmax(scores)). `weights` [tokens] is 1 / tokens if not
    given; micro-batches of one step add up where their weights have the step's denominator. `inputs` come from
    `recording`, seq_start [tokens] is the first index of every token's trajectory.
    """
    attentions = [layer.self_attn for layer in model.model.layers]
    bounds = segment_bounds(seq_start, inputs[0].hidden.shape[1])
    if weights is None:
        weights = torch.full((bounds[-1],), 1 / bounds[-1], device=seq_start.device)
    found = {}
    for full, layers in Schedule.from_config(model.config).served_layers().items():
        indexer = attentions[full].indexer
        work = _Work(chunked(bounds, chunk_size), weights, indexer.index_topk if support == "selected" else None)
        looking = [served(attentions[i], inputs[i]) for i in (layers if teachers == "served" else (full,))]
        found[full] = _Divergence.apply(
            *projected(attentions[full], inputs[full]), indexer.softmax_scale, looking, work
        )
    return found


def backward(
    model: GlmMoeDsaForCausalLM,
    inputs: list[LayerInput],
    seq_start: Tensor,
    chunk_size: int = 128,
    weights: Tensor | None = None,
) -> dict[int, float]:
    """Adds the gradient of the distillation loss to the indexers' parameters; returns the loss by Full layer.

    As `losses`, but a mean over queries, weighted by `weights` if given.
    """
    mean = None if weights is None else weights / weights.sum()
    found = losses(model, inputs, seq_start, weights=mean, chunk_size=chunk_size)
    torch.autograd.backward(list(found.values()))
    return {full: loss.item() for full, loss in found.items()}


@torch.no_grad()
def attention_mass(
    model: GlmMoeDsaForCausalLM, inputs: list[LayerInput], seq_start: Tensor, k: int, chunk_size: int = 128
) -> Tensor:
    """[2, layers], float64: the attention mass on the k keys that a layer's indexer selects, and on the k best.

    Summed over the queries with more than k legal keys, so that micro-batches add up.
    """
    attentions = [layer.self_attn for layer in model.model.layers]
    bounds = segment_bounds(seq_start, inputs[0].hidden.shape[1])
    mass = torch.zeros(2, len(attentions), dtype=torch.float64)
    for full, layers in Schedule.from_config(model.config).served_layers().items():
        q, key, w = projected(attentions[full], inputs[full])
        looking = {i: served(attentions[i], inputs[i]) for i in layers}
        for chunk in chunked(bounds, chunk_size):
            if chunk.end - chunk.start <= k:
                continue
            first = max(0, chunk.start + k - chunk.begin)
            scores = chunk_scores(q, key, w, attentions[full].indexer.softmax_scale, chunk)
            selected = stable_topk_mask(scores, k)[first:]
            for i, teacher in looking.items():
                attention = teacher.attention(chunk, future(chunk, scores.device))[first:]
                mass[0, i] += attention.masked_fill(~selected, 0.0).sum().item()
                mass[1, i] += attention.topk(k, -1).values.sum().item()
    return mass


def recall(
    model: GlmMoeDsaForCausalLM, inputs: list[LayerInput], seq_start: Tensor, k: int, chunk_size: int = 128
) -> list[float]:
    """By layer, over queries with more than k legal keys: the attention mass on the k that its indexer
    selects, divided by the mass on the k best. NaN where no query has more."""
    got, best = attention_mass(model, inputs, seq_start, k, chunk_size)
    return (got / best).tolist()
