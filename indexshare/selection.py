"""The one definition of "the k best keys", used by the trainer and by the rollout plugin.

Ties go to the lowest position. The indexer's ReLU makes exact ties at zero common and `torch.topk` leaves
their order open, so two sides that use it choose different keys and their log-probabilities part by whole
nats. `stable_topk` says what is meant; the other two choose the same keys without sorting them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

NONE = -1
"""Fills the places of keys that do not exist: a query with fewer than k legal keys selects all of them."""

SCORE_ELEMENTS = 1 << 20
"""Bound on [queries, heads, keys] of one product of the indexer: it stays in the processor's cache (measured)."""

COLUMNS_PER_KEY = 2
"""Columns whose maxima bound the k-th score, per selected key: more cost more, fewer leave more candidates."""


def stable_topk(scores: Tensor, k: int) -> Tensor:
    """Positions of the k highest scores, best first, equal scores in order of position.

    scores [..., keys], -inf where a key is not legal -> int64 [..., min(k, keys)], `NONE` where fewer keys
    are legal.
    """
    _check(k)
    values, indices = torch.sort(scores, dim=-1, descending=True, stable=True)
    k = min(k, scores.shape[-1])
    return indices[..., :k].masked_fill(values[..., :k] == float("-inf"), NONE)


def stable_topk_by_position(scores: Tensor, k: int) -> Tensor:
    """The same set as `stable_topk` in order of position, `NONE` last."""
    _check(k)
    keys = scores.shape[-1]
    flat, width = _selected(scores.reshape(-1, keys), k), min(k, keys)
    row = flat // keys
    counts = torch.bincount(row, minlength=scores.numel() // keys)
    chosen = _padded(flat - row * keys, row, counts, width, NONE)
    return chosen.view(*scores.shape[:-1], width)


def stable_topk_mask(scores: Tensor, k: int) -> Tensor:
    """The same set as `stable_topk`, as bool [..., keys]: true where selected."""
    _check(k)
    if k >= scores.shape[-1]:
        return scores != float("-inf")
    flat = _selected(scores.reshape(-1, scores.shape[-1]), k)
    mask = torch.zeros(scores.numel(), dtype=torch.bool, device=scores.device)
    return mask.index_fill_(0, flat, True).view_as(scores)


def index_scores(q: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """sum over heads of weights * relu(q . key), -inf at keys after the query; one product per tile of keys.

    q [queries, heads, dim], keys [n, dim], of which the last ones are the queries' own; weights [queries, heads], the
    softmax scale (above 0) within them -> [queries, n]. Not differentiable; a tensor [queries, heads, n] never exists.
    """
    queries, heads, dim = q.shape
    by_head, columns = q.transpose(0, 1).reshape(heads * queries, dim), keys.t()
    weights = weights.t()[..., None]
    total = q.new_empty(queries, keys.shape[0])
    tile = max(1, SCORE_ELEMENTS // (queries * heads))
    for part, some in zip(total.split(tile, 1), columns.split(tile, 1), strict=True):
        products = F.relu(by_head @ some, inplace=True).view(heads, queries, -1)
        torch.mul(products[0], weights[0], out=part)
        for head in range(1, heads):
            part.addcmul_(products[head], weights[head])
    later = torch.ones(queries, queries, dtype=torch.bool, device=q.device).triu(1)
    total[:, keys.shape[0] - queries :].masked_fill_(later, float("-inf"))
    return total


def _check(k: int) -> None:
    if k < 1:
        raise ValueError(f"k: {k} given, must be at least 1")


def _selected(scores: Tensor, k: int) -> Tensor:
    """Flat positions of the selected ones of scores [rows, keys], ascending."""
    candidates = _candidates(scores, k)
    if candidates is None:
        return _mask(scores, k).flatten().nonzero()[:, 0]
    flat, row, counts = candidates
    few = _padded(scores.flatten()[flat], row, counts, int(counts.max()), float("-inf"))
    return flat[_mask(few, k)[row, _rank(row, counts)]]


def _candidates(scores: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor] | None:
    """Flat positions of a few legal keys of every row that hold the k best, their rows, and how many a row has.

    The keys are laid out in columns. k columns have a maximum of at least the k-th largest maximum, so k keys have a
    score of at least that, and no key below it is among the k best. None where this leaves out too little.
    """
    rows, keys = scores.shape
    columns = COLUMNS_PER_KEY * k
    depth = keys // columns
    if depth < 2 or not rows:
        return None
    # Neighbours, which often score alike, are in different columns.
    maxima = scores[:, : depth * columns].view(rows, depth, columns).amax(1)
    bound = maxima.topk(k, sorted=False).values.amin(-1, keepdim=True)
    flat = (scores >= bound.clamp(min=torch.finfo(scores.dtype).min)).flatten().nonzero()[:, 0]
    row = flat // keys
    counts = torch.bincount(row, minlength=rows)
    return None if counts.max() > keys // 2 else (flat, row, counts)


def _mask(scores: Tensor, k: int) -> Tensor:
    """Bool [rows, keys]: the k best of every row, ties to the lowest position."""
    if k >= scores.shape[-1]:
        return scores != float("-inf")
    kth = scores.topk(k, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    above = scores > kth
    # Of the keys that tie with the k-th, the first ones fill what the better keys leave. -inf ties are
    # illegal keys.
    tied = (scores == kth) & (kth != float("-inf"))
    room = k - above.sum(-1, keepdim=True, dtype=torch.int32)
    return above | (tied & (tied.cumsum(-1, dtype=torch.int32) <= room))


def _rank(row: Tensor, counts: Tensor) -> Tensor:
    """Of every entry of ascending rows, how many entries its row has before it."""
    return torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[row]


def _padded(values: Tensor, row: Tensor, counts: Tensor, width: int, filler: float) -> Tensor:
    """Entries of ascending rows as [rows, width], `filler` after a row's last."""
    if len(values) == len(counts) * width:
        return values.view(len(counts), width)
    out = values.new_full((len(counts), width), filler)
    out[row, _rank(row, counts)] = values
    return out
