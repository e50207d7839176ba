"""Training attention of an IndexShare model: the stock transformers class, with its attention exchanged.

Two forms compute the same thing over the same selected keys. `masked` scores a chunk of queries against all
earlier keys of its trajectory and masks what is not selected: best for short trajectories. `gather` fetches
each query's selected latents: its cost does not grow with the context. Both recompute in backward what they
do not keep, so memory is linear in the tokens.

    install(model)
    model.model(input_ids=ids[None], position_ids=positions[None],
                attention_mask={"indexed_attention": seq_start}, use_cache=False)
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import (
    GlmMoeDsaAttention,
    GlmMoeDsaPreTrainedModel,
    apply_rotary_pos_emb_interleave,
)

from indexshare.indexer import Selection, prefers_gather, segment_bounds, select

Form = Literal["auto", "masked", "gather"]

GATHER_CHUNK = 32
"""Queries whose selected latents are gathered at once (measured; larger ones fall out of the cache)."""


class MaskedAttention(torch.autograd.Function):
    """softmax(q k' * scale + bias) v, chunk by chunk, keeping no probabilities."""

    @staticmethod
    def _probabilities(q: Tensor, k: Tensor, bias: Tensor, scale: float) -> Tensor:
        if q.dtype == bias.dtype:
            scores = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=scale)
        else:
            scores = torch.bmm(q, k.transpose(1, 2)).to(bias.dtype).mul_(scale).add_(bias)
        return scores.softmax(-1)

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, selection: Selection, scale: float) -> Tensor:
        """q, k [heads, tokens, dim], v [heads, tokens, v_dim] -> [heads, tokens, v_dim]."""
        assert selection.biases is not None
        out = torch.empty_like(v)
        for chunk, bias in zip(selection.chunks, selection.biases, strict=True):
            rows, keys = slice(chunk.begin, chunk.end), slice(chunk.start, chunk.end)
            p = MaskedAttention._probabilities(q[:, rows], k[:, keys], bias, scale)
            out[:, rows] = torch.bmm(p.to(v.dtype), v[:, keys])
        ctx.save_for_backward(q, k, v)
        ctx.selection, ctx.scale = selection, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        scale = ctx.scale
        exact = torch.promote_types(q.dtype, torch.float32)
        dq = torch.empty_like(q)
        # A key is met by several chunks: its gradient is summed in float32.
        dk, dv = torch.zeros_like(k, dtype=exact), torch.zeros_like(v, dtype=exact)
        for chunk, bias in zip(ctx.selection.chunks, ctx.selection.biases, strict=True):
            rows, keys = slice(chunk.begin, chunk.end), slice(chunk.start, chunk.end)
            g, qc, kc = grad[:, rows], q[:, rows], k[:, keys]
            p = MaskedAttention._probabilities(qc, kc, bias, scale)
            dp = torch.bmm(g, v[:, keys].transpose(1, 2)).to(p.dtype)
            ds = (torch._softmax_backward_data(dp, p, -1, p.dtype) * scale).to(q.dtype)
            dq[:, rows] = torch.bmm(ds, kc)
            dk[:, keys] += torch.bmm(ds.transpose(1, 2), qc)
            dv[:, keys] += torch.bmm(p.to(g.dtype).transpose(1, 2), g)
        return dq, dk.to(k.dtype), dv.to(v.dtype), None, None


class GatherAttention(torch.autograd.Function):
    """MLA in its absorbed form over the selected latents: queries go into latent space, keys never expand."""

    @staticmethod
    def _chunk(
        q: Tensor, latents: Tensor, up_k: Tensor, indices: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Absorbed query [c, heads, rank + rope], latents [c, k, rank + rope], probabilities [c, heads, k]
        and the attended latent [c, heads, rank]."""
        nope, rank = up_k.shape[1:]
        q_latent = torch.cat([torch.einsum("chd,hdr->chr", q[..., :nope], up_k), q[..., nope:]], -1)
        rows = latents.index_select(0, indices.clamp(min=0).flatten()).view(*indices.shape, -1)
        exact = torch.promote_types(q.dtype, torch.float32)
        scores = torch.bmm(q_latent, rows.transpose(1, 2)).to(exact) * scale
        p = scores.masked_fill_((indices < 0)[:, None], float("-inf")).softmax(-1)
        return q_latent, rows, p, torch.bmm(p.to(q.dtype), rows[..., :rank])

    @staticmethod
    def forward(ctx: Any, q: Tensor, latents: Tensor, up: Tensor, indices: Tensor, nope: int, scale: float) -> Tensor:
        """q [tokens, heads, nope + rope], latents [tokens, rank + rope], up [heads, nope + v_dim, rank],
        indices [tokens, k] -> [tokens, heads, v_dim]."""
        up_k, up_v = up[:, :nope], up[:, nope:]
        out = q.new_empty(*q.shape[:2], up_v.shape[1])
        for begin in range(0, q.shape[0], GATHER_CHUNK):
            rows = slice(begin, begin + GATHER_CHUNK)
            attended = GatherAttention._chunk(q[rows], latents, up_k, indices[rows].long(), scale)[3]
            out[rows] = torch.einsum("chr,hvr->chv", attended, up_v)
        ctx.save_for_backward(q, latents, up, indices)
        ctx.nope, ctx.scale = nope, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, latents, up, indices = ctx.saved_tensors
        nope, scale, rank = ctx.nope, ctx.scale, up.shape[-1]
        up_k, up_v = up[:, :nope], up[:, nope:]
        exact = torch.promote_types(q.dtype, torch.float32)
        dq = torch.empty_like(q)
        d_latents, d_up = torch.zeros_like(latents, dtype=exact), torch.zeros_like(up, dtype=exact)
        for begin in range(0, q.shape[0], GATHER_CHUNK):
            rows = slice(begin, begin + GATHER_CHUNK)
            g, chosen = grad[rows], indices[rows].long()
            q_latent, kv, p, attended = GatherAttention._chunk(q[rows], latents, up_k, chosen, scale)
            p = p.to(q.dtype)
            d_attended = torch.einsum("chv,hvr->chr", g, up_v)
            d_up[:, nope:] += torch.einsum("chv,chr->hvr", g, attended)
            d_p = torch.bmm(d_attended, kv[..., :rank].transpose(1, 2))
            d_scores = p * (d_p - (d_attended * attended).sum(-1, keepdim=True)) * scale
            d_query = torch.bmm(d_scores, kv)
            d_kv = torch.bmm(d_scores.transpose(1, 2), q_latent).to(exact)
            d_kv[..., :rank] += torch.bmm(p.transpose(1, 2), d_attended)
            dq[rows, :, :nope] = torch.einsum("chr,hdr->chd", d_query[..., :rank], up_k)
            dq[rows, :, nope:] = d_query[..., rank:]
            d_up[:, :nope] += torch.einsum("chd,chr->hdr", q[rows, :, :nope], d_query[..., :rank])
            # Filler places add zeros to row 0. `scatter_add_` is the fast one of torch's three on a CPU.
            target = chosen.clamp(min=0).flatten()[:, None].expand(-1, latents.shape[1])
            d_latents.scatter_add_(0, target, d_kv.view(-1, latents.shape[1]))
        return dq, d_latents.to(latents.dtype), d_up.to(up.dtype), None, None, None


class IndexShareAttention(GlmMoeDsaAttention):
    """Drop-in attention for packed trajectories. `install` exchanges the class; parameters stay as they are.

    The third result of a layer, which transformers hands to the next one, is a `Selection` instead of raw
    indices.
    """

    form: Form

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: object | None = None,
        position_ids: Tensor | None = None,
        prev_topk_indices: Selection | None = None,
        **_: object,
    ) -> tuple[Tensor, None, Selection]:
        """hidden_states [1, tokens, hidden]; attention_mask is `seq_start` [tokens], or None for one."""
        if (
            past_key_values is not None
            or hidden_states.shape[0] != 1
            or (attention_mask is not None and attention_mask.dim() != 1)
        ):
            raise ValueError(
                "IndexShareAttention trains on one packed row: pass input_ids [1, tokens], use_cache=False"
                ' and attention_mask={"indexed_attention": seq_start}'
            )
        rank, nope = self.kv_lora_rank, self.qk_nope_head_dim
        tokens = hidden_states.shape[1]
        q_latent = self.q_a_layernorm(self.q_a_proj(hidden_states))
        q = self.q_b_proj(q_latent).view(1, tokens, self.num_heads, self.qk_head_dim)
        compressed = self.kv_a_proj_with_mqa(hidden_states)
        kv = self.kv_a_layernorm(compressed[..., :rank])
        q_rot, k_rot = apply_rotary_pos_emb_interleave(
            q[..., nope:], compressed[..., rank:].unsqueeze(2), *position_embeddings, unsqueeze_dim=2
        )
        q = torch.cat([q[..., :nope], q_rot], -1)
        selection = self._select(hidden_states, q_latent, position_embeddings, attention_mask, prev_topk_indices)
        if selection.indices is not None:
            latents = torch.cat([kv, k_rot.squeeze(2)], -1)[0]
            up = self.kv_b_proj.weight.view(self.num_heads, -1, rank)
            out = GatherAttention.apply(q[0], latents, up, selection.indices, nope, self.scaling)
        else:
            keys, values = self.expand_kv(kv.unsqueeze(1), k_rot.transpose(1, 2))
            out = MaskedAttention.apply(q[0].transpose(0, 1), keys[0], values[0], selection, self.scaling)
            out = out.transpose(0, 1)
        return self.o_proj(out.reshape(1, tokens, -1)), None, selection

    def _select(
        self,
        hidden: Tensor,
        q_latent: Tensor,
        rotary: tuple[Tensor, Tensor],
        seq_start: Tensor | None,
        previous: Selection | None,
    ) -> Selection:
        if self.indexer is None:
            if previous is None:
                raise ValueError(f"layer {self.layer_idx} is Shared and no Full layer came before it")
            return previous
        # The bounds need a look at seq_start's values (a wait for the device): once, by the first layer.
        bounds = previous.bounds if previous is not None else segment_bounds(seq_start, hidden.shape[1])
        gather = prefers_gather(bounds, self.indexer.index_topk) if self.form == "auto" else self.form == "gather"
        return select(self.indexer, hidden.detach(), q_latent.detach(), rotary, bounds, gather)


def install(model: nn.Module, form: Form = "auto") -> nn.Module:
    """Exchange the attention of every layer of a GlmMoeDsa model, in place; weights and their names stay.

    `form` is for tests and benchmarks; "auto" takes the faster one for each micro-batch.
    """
    found = [m for m in model.modules() if isinstance(m, GlmMoeDsaAttention)]
    if not found:
        raise ValueError(f"model: {type(model).__name__} given, must be a {GlmMoeDsaPreTrainedModel.__name__}")
    for attention in found:
        attention.__class__ = IndexShareAttention
        attention.form = form  # type: ignore[assignment]
    return model
