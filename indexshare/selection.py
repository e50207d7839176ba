"""The one definition of "the k best keys", used by the trainer and by the rollout plugin.

Ties go to the lowest position. The indexer's ReLU makes exact ties at zero common and `torch.topk` leaves
their order open, so two sides that use it choose different keys and their log-probabilities part by whole
nats.
"""

from __future__ import annotations

import torch
from torch import Tensor

NONE = -1
"""Fills the places of keys that do not exist: a query with fewer than k legal keys selects all of them."""


def stable_topk(scores: Tensor, k: int) -> Tensor:
    """Positions of the k highest scores, best first, equal scores in order of position.

    scores [..., keys], -inf where a key is not legal -> int64 [..., min(k, keys)], `NONE` where fewer keys
    are legal.
    """
    if k < 1:
        raise ValueError(f"k: {k} given, must be at least 1")
    values, indices = torch.sort(scores, dim=-1, descending=True, stable=True)
    k = min(k, scores.shape[-1])
    return indices[..., :k].masked_fill(values[..., :k] == float("-inf"), NONE)


def stable_topk_by_position(scores: Tensor, k: int) -> Tensor:
    """The same set as `stable_topk` in order of position, `NONE` last. Several times faster: needs no full sort."""
    mask = stable_topk_mask(scores, k)
    keys = scores.shape[-1]
    positions = torch.arange(keys, dtype=torch.int32, device=scores.device)
    first = torch.where(mask, positions, keys).topk(min(k, keys), dim=-1, largest=False, sorted=True).values
    return first.masked_fill(first == keys, NONE).long()


def stable_topk_mask(scores: Tensor, k: int) -> Tensor:
    """The same set as `stable_topk`, as bool [..., keys]: true where selected. Needs no full sort."""
    if k < 1:
        raise ValueError(f"k: {k} given, must be at least 1")
    if k >= scores.shape[-1]:
        return scores != float("-inf")
    kth = scores.topk(k, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    above = scores > kth
    # Of the keys that tie with the k-th, the first ones fill what the better keys leave. -inf ties are
    # illegal keys.
    tied = (scores == kth) & (kth != float("-inf"))
    room = k - above.sum(-1, keepdim=True, dtype=torch.int32)
    return above | (tied & (tied.cumsum(-1, dtype=torch.int32) <= room))
