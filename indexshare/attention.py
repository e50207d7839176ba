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

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import (
    GlmMoeDsaAttention,
    GlmMoeDsaPreTrainedModel,
    apply_rotary_pos_emb_interleave,
)

from indexshare.indexer import Selection, given, prefers_gather, segment_bounds, select
from indexshare.schedule import check_config

Form = Literal["auto", "masked", "gather"]

GATHER_ELEMENTS = 1 << 19
"""Bound on the gathered [queries, k, rank + rope] of a chunk: larger ones fall out of a core's cache (measured)."""

ABSORB_BLOCK = 512
"""Queries taken into latent space at once: what that needs, [512, heads, rank + rope], does not grow."""


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
    """MLA in its absorbed form over the selected latents: queries go into latent space, keys never expand.

    Two loops: blocks of queries, absorbed by one large product, and within them chunks, whose selected latents are
    gathered into a workspace that fits a cache and is used again (fresh memory for each costs more than the sums).
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, latents: Tensor, up: Tensor, indices: Tensor, nope: int, scale: float) -> Tensor:
        """q [tokens, heads, nope + rope], latents [tokens, rank + rope], up [heads, nope + v_dim, rank],
        indices [tokens, k] -> [tokens, heads, v_dim]."""
        rank, heads = up.shape[-1], q.shape[1]
        work = _Workspace(indices, latents, heads)
        out = q.new_empty(*q.shape[:2], up.shape[1] - nope)
        for block in _blocks(q.shape[0]):
            q_latent = _absorbed(q[block], up[:, :nope])
            attended = torch.empty_like(q_latent)
            for chunk in work.chunks(block):
                rows = slice(chunk.start - block.start, chunk.stop - block.start)
                kv = work.gather(chunk)
                p = work.probabilities(work.products(q_latent[rows], kv, scale), chunk)
                torch.bmm(p.to(kv.dtype), kv, out=attended[rows])
            out[block] = _per_head(attended[..., :rank], up[:, nope:].transpose(1, 2))
        ctx.save_for_backward(q, latents, up, indices)
        ctx.nope, ctx.scale = nope, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, latents, up, indices = ctx.saved_tensors
        nope, heads, rank = ctx.nope, q.shape[1], up.shape[-1]
        work = _Workspace(indices, latents, 2 * heads)
        dq = torch.empty_like(q)
        # A latent is met by many queries: its gradient is summed in float32.
        d_latents, d_up = torch.zeros_like(latents, dtype=work.exact), torch.zeros_like(up, dtype=work.exact)
        for block in _blocks(q.shape[0]):
            # Absorbed queries and absorbed gradients share every product: they meet the same latents.
            pair = q.new_zeros(block.stop - block.start, 2 * heads, latents.shape[1])
            pair[:, :heads] = _absorbed(q[block], up[:, :nope])
            pair[:, heads:, :rank] = _per_head(grad[block], up[:, nope:])
            back = torch.empty_like(pair)
            for chunk in work.chunks(block):
                rows = slice(chunk.start - block.start, chunk.stop - block.start)
                kv = work.gather(chunk)
                products = work.products(pair[rows], kv, ctx.scale)
                p = work.probabilities(products[:, :heads], chunk)
                d_scores = torch._softmax_backward_data(products[:, heads:].to(p.dtype), p, -1, p.dtype)
                both = torch.cat([d_scores, p], 1).to(kv.dtype)
                torch.bmm(both, kv, out=back[rows])
                work.scatter(d_latents, chunk, torch.bmm(both.transpose(1, 2), pair[rows], out=kv))
            d_query, attended = back[:, :heads], back[:, heads:, :rank]
            dq[block, :, :nope] = _per_head(d_query[..., :rank], up[:, :nope].transpose(1, 2))
            dq[block, :, nope:] = d_query[..., rank:]
            d_up[:, :nope] += torch.bmm(q[block, :, :nope].permute(1, 2, 0), d_query[..., :rank].transpose(0, 1))
            d_up[:, nope:] += torch.bmm(grad[block].permute(1, 2, 0), attended.transpose(0, 1))
        return dq, d_latents.to(latents.dtype), d_up.to(up.dtype), None, None, None


def _blocks(tokens: int) -> Iterator[slice]:
    for begin in range(0, tokens, ABSORB_BLOCK):
        yield slice(begin, min(begin + ABSORB_BLOCK, tokens))


def _per_head(x: Tensor, weight: Tensor) -> Tensor:
    """x [tokens, heads, a], weight [heads, a, b] -> [tokens, heads, b]."""
    return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)


def _absorbed(q: Tensor, up_k: Tensor) -> Tensor:
    """Queries [tokens, heads, nope + rope] against latents: [tokens, heads, rank + rope]."""
    nope = up_k.shape[1]
    return torch.cat([_per_head(q[..., :nope], up_k), q[..., nope:]], -1)


class _Workspace:
    """What a chunk of queries needs, allocated once: gathered latents and their products with `rows` vectors each."""

    def __init__(self, indices: Tensor, latents: Tensor, rows: int) -> None:
        k, self.width = indices.shape[1], latents.shape[1]
        self.indices, self.latents = indices, latents
        self.exact = torch.promote_types(latents.dtype, torch.float32)
        self.size = max(1, GATHER_ELEMENTS // (k * self.width))
        self.kv = latents.new_empty(self.size * k, self.width)
        self.score = latents.new_empty(self.size, rows, k)
        self.target = indices.new_empty(self.size * k, 1, dtype=torch.int64)
        # One look at the values for the whole layer: most chunks have no place without a key.
        self.complete = (indices >= 0).all(-1).tolist()

    def chunks(self, block: slice) -> Iterator[slice]:
        for begin in range(block.start, block.stop, self.size):
            yield slice(begin, min(begin + self.size, block.stop))

    def _keys(self, chunk: slice) -> Tensor:
        """Flat key positions of a chunk. A place without a key points at the query itself, with probability 0."""
        keys = self.indices[chunk]
        if not all(self.complete[chunk]):
            own = torch.arange(chunk.start, chunk.stop, dtype=keys.dtype, device=keys.device)[:, None]
            keys = torch.where(keys < 0, own, keys)
        return keys.flatten()

    def gather(self, chunk: slice) -> Tensor:
        """Selected latents [queries, k, rank + rope], valid until the next call."""
        k, queries = self.indices.shape[1], chunk.stop - chunk.start
        kv = torch.index_select(self.latents, 0, self._keys(chunk), out=self.kv[: queries * k])
        return kv.view(queries, k, self.width)

    def products(self, vectors: Tensor, kv: Tensor, scale: float) -> Tensor:
        """vectors [queries, rows, rank + rope] -> [queries, rows, k], valid until the next call."""
        return self.score[: len(kv)].baddbmm_(vectors, kv.transpose(1, 2), beta=0, alpha=scale)

    def probabilities(self, scores: Tensor, chunk: slice) -> Tensor:
        """scores [queries, heads, k] -> softmax over the keys that exist, in float32 or better."""
        if not all(self.complete[chunk]):
            scores.masked_fill_((self.indices[chunk] < 0)[:, None], float("-inf"))
        return scores.to(self.exact).softmax(-1)

    def scatter(self, total: Tensor, chunk: slice, rows: Tensor) -> None:
        """Adds rows [queries, k, rank + rope] to the latents they belong to."""
        # `scatter_add_` is the fast one of torch's three on a CPU (measured against index_add_ and index_put_).
        target = self.target[: rows.shape[0] * rows.shape[1]]
        target.copy_(self._keys(chunk)[:, None])
        total.scatter_add_(0, target.expand(-1, self.width), rows.view(-1, self.width).to(total.dtype))


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
        replayed: Mapping[int, Tensor] | None = None,
        **_: object,
    ) -> tuple[Tensor, None, Selection]:
        """hidden_states [1, tokens, hidden]; attention_mask is `seq_start` [tokens], or None for one.

        `replayed` has the flat positions [tokens, k] that every Full layer is to select, instead of its indexer's.
        """
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
        theirs = None if replayed is None or self.indexer is None else replayed[self.layer_idx]
        selection = self._select(
            hidden_states, q_latent, position_embeddings, attention_mask, prev_topk_indices, theirs
        )
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
        replayed: Tensor | None,
    ) -> Selection:
        if self.indexer is None:
            if previous is None:
                raise ValueError(f"layer {self.layer_idx} is Shared and no Full layer came before it")
            return previous
        # The bounds need a look at seq_start's values (a wait for the device): once, by the first layer.
        bounds = previous.bounds if previous is not None else segment_bounds(seq_start, hidden.shape[1])
        gather = prefers_gather(bounds, self.indexer.index_topk) if self.form == "auto" else self.form == "gather"
        if replayed is not None:
            return given(replayed, bounds, gather, torch.promote_types(hidden.dtype, torch.float32))
        return select(self.indexer, hidden.detach(), q_latent.detach(), rotary, bounds, gather)


def install(model: nn.Module, form: Form = "auto") -> nn.Module:
    """Exchange the attention of every layer of a GlmMoeDsa model, in place; weights and their names stay.

    `form` is for tests and benchmarks; "auto" takes the faster one for each micro-batch. A config whose schedule or
    `index_topk` cannot be is a ValueError.
    """
    found = [m for m in model.modules() if isinstance(m, GlmMoeDsaAttention)]
    if not found:
        raise ValueError(f"model: {type(model).__name__} given, must be a {GlmMoeDsaPreTrainedModel.__name__}")
    check_config(found[0].config)
    for attention in found:
        attention.__class__ = IndexShareAttention
        attention.form = form  # type: ignore[assignment]
    return model
