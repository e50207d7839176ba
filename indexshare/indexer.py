"""What a Full layer's indexer selects, over trajectories laid end to end, in memory linear in the tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import (
    GlmMoeDsaIndexer,
    apply_rotary_pos_emb_interleave,
)

from indexshare.selection import index_scores, stable_topk_by_position, stable_topk_mask

QUERY_CHUNK = 128
"""Queries handled at once in the masked form; a chunk attends up to its own end, which skips most of what
causality forbids, and its scores stay in the processor's cache (measured best of 64, 128, 225 and 450 at 450
tokens)."""

BREAK_EVEN = 4
"""Mean keys of context per selected key from which gathering those is faster than masking the others.

Measured by `benchmarks/indexshare_attention.py break-even`: equal at 3 for k = 32 and k = 128."""


@dataclass(frozen=True)
class Chunk:
    """Queries [begin, end) of the trajectory that starts at `start`: they see keys [start, end) only."""

    start: int
    begin: int
    end: int


@dataclass(frozen=True)
class Selection:
    """What the last Full layer selected for a micro-batch; the Shared layers after it reuse this object.

    Exactly one form is kept. `biases[i]` [queries, keys] belongs to `chunks[i]`: 0 where selected and -inf
    elsewhere. `indices` [tokens, k] holds flat key positions, -1 where there are fewer than k legal keys.
    """

    bounds: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    biases: tuple[Tensor, ...] | None
    indices: Tensor | None


def given(indices: Tensor, bounds: tuple[int, ...], gather: bool, dtype: torch.dtype) -> Selection:
    """A selection that somebody else made: indices [tokens, k] of flat key positions, -1 where there are fewer."""
    chunks = chunked(bounds, QUERY_CHUNK)
    if gather:
        return Selection(bounds, chunks, None, indices.int())
    biases = []
    for chunk in chunks:
        rows = indices[chunk.begin : chunk.end]
        masked = torch.ones(len(rows), chunk.end - chunk.start + 1, dtype=torch.bool, device=indices.device)
        # Places without a key write into a column of their own, which is cut off.
        masked.scatter_(1, torch.where(rows < 0, masked.shape[1] - 1, rows - chunk.start), False)
        biases.append(_bias(masked[:, :-1], dtype))
    return Selection(bounds, chunks, tuple(biases), None)


def positions(selection: Selection, k: int) -> Tensor:
    """What a selection of at most k keys a query holds, in either form: flat ascending [tokens, k], -1 last."""
    if selection.indices is not None:
        return selection.indices.long()
    assert selection.biases is not None
    parts = []
    for chunk, bias in zip(selection.chunks, selection.biases, strict=True):
        selected = bias == 0
        row, column = selected.nonzero(as_tuple=True)
        out = torch.full((len(bias), k), -1, dtype=torch.int64, device=bias.device)
        out[row, selected.cumsum(1)[row, column] - 1] = column + chunk.start
        parts.append(out)
    return torch.cat(parts)


def segment_bounds(seq_start: Tensor | None, tokens: int) -> tuple[int, ...]:
    """First index of every trajectory, then the number of tokens. seq_start [tokens]; None is one."""
    if seq_start is None:
        return (0, tokens)
    return (*torch.unique_consecutive(seq_start).tolist(), tokens)


def chunked(bounds: tuple[int, ...], size: int) -> tuple[Chunk, ...]:
    """Trajectories cut into chunks of at most `size` queries."""
    return tuple(
        Chunk(start, begin, min(begin + size, stop))
        for start, stop in itertools.pairwise(bounds)
        for begin in range(start, stop, size)
    )


def prefers_gather(bounds: tuple[int, ...], k: int) -> bool:
    """Whether gathering k keys per query is faster than masking, for the micro-batch as a whole."""
    work = sum((b - a) ** 2 / 2 for a, b in itertools.pairwise(bounds))
    return work > BREAK_EVEN * k * bounds[-1]


def project(
    indexer: GlmMoeDsaIndexer, hidden: Tensor, q_latent: Tensor, rotary: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """The indexer's queries [tokens, heads, dim], keys [tokens, dim] and head weights [tokens, heads].

    hidden [1, tokens, hidden], q_latent [1, tokens, q_lora_rank]. Float32 or better, as vLLM scores them.
    """
    rope, tokens = indexer.qk_rope_head_dim, hidden.shape[1]
    q = indexer.wq_b(q_latent).view(1, tokens, indexer.n_heads, indexer.head_dim)
    k = indexer.k_norm(indexer.wk(hidden)).unsqueeze(2)
    q_rot, k_rot = apply_rotary_pos_emb_interleave(q[..., :rope], k[..., :rope], *rotary, unsqueeze_dim=2)
    q = torch.cat([q_rot, q[..., rope:]], -1)[0]
    k = torch.cat([k_rot, k[..., rope:]], -1)[0, :, 0]
    weights = indexer.weights_proj(hidden.to(indexer.weights_proj.weight.dtype))[0]
    exact = torch.promote_types(q.dtype, torch.float32)
    return q.to(exact), k.to(exact), weights.to(exact) * indexer.n_heads**-0.5


def chunk_scores(q: Tensor, k: Tensor, weights: Tensor, scale: float, chunk: Chunk) -> Tensor:
    """Scores [queries, keys] of a chunk, -inf at keys after the query: differentiable, for teaching.

    Head by head: a tensor [queries, heads, keys] never exists. `scan` computes the same, faster.
    """
    rows, keys = slice(chunk.begin, chunk.end), k[chunk.start : chunk.end].t()
    total = q.new_zeros(chunk.end - chunk.begin, chunk.end - chunk.start)
    for head in range(q.shape[1]):
        total = total + F.relu((q[rows, head] @ keys) * scale) * weights[rows, head, None]
    return total.masked_fill(future(chunk, q.device), float("-inf"))


@torch.no_grad()
def scan(q: Tensor, k: Tensor, weights: Tensor, scale: float, chunk: Chunk) -> Tensor:
    """`chunk_scores` as selecting needs them: without gradient, one product per tile of keys."""
    rows = slice(chunk.begin, chunk.end)
    return index_scores(q[rows], k[chunk.start : chunk.end], weights[rows] * scale)


def future(chunk: Chunk, device: torch.device) -> Tensor:
    """Bool [queries, keys] of a chunk: true where the key comes after the query."""
    queries, keys = chunk.end - chunk.begin, chunk.end - chunk.start
    return torch.ones(queries, keys, dtype=torch.bool, device=device).triu(1 + chunk.begin - chunk.start)


@torch.no_grad()
def select(
    indexer: GlmMoeDsaIndexer,
    hidden: Tensor,
    q_latent: Tensor,
    rotary: tuple[Tensor, Tensor],
    bounds: tuple[int, ...],
    gather: bool,
) -> Selection:
    """The indexer's top-k keys of every query, within its own trajectory. Shapes as in `project`."""
    k_best = indexer.index_topk
    chunks = chunked(bounds, QUERY_CHUNK)
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    longest = max(b - a for a, b in itertools.pairwise(bounds))
    if k_best >= longest and not gather:
        # Every legal key is selected, whatever the scores.
        hidden_keys = (future(chunk, hidden.device) for chunk in chunks)
        return Selection(bounds, chunks, tuple(_bias(h, dtype) for h in hidden_keys), None)
    q, k, weights = project(indexer, hidden, q_latent, rotary)

    def scores() -> Iterator[tuple[Chunk, Tensor]]:
        for chunk in chunks:
            yield chunk, scan(q, k, weights, indexer.softmax_scale, chunk)

    if not gather:
        return Selection(bounds, chunks, tuple(_bias(~stable_topk_mask(s, k_best), dtype) for _, s in scores()), None)
    indices = torch.full((hidden.shape[1], min(k_best, longest)), -1, dtype=torch.int32, device=hidden.device)
    for chunk, s in scores():
        best = stable_topk_by_position(s, k_best)
        indices[chunk.begin : chunk.end, : best.shape[1]] = torch.where(best < 0, best, best + chunk.start).int()
    return Selection(bounds, chunks, None, indices)


def _bias(masked: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(masked.shape, dtype=dtype, device=masked.device).masked_fill_(masked, float("-inf"))
