"""What a rollout engine selected, for the trainer to attend to the same positions (index replay).

An engine and a trainer that round differently may break a tie, or a near-tie, in different ways; one other key can move
a log-probability by a nat. Replayed, the selection is the rollout's and only arithmetic is left to differ.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from indexshare.selection import NONE

if TYPE_CHECKING:
    from indexshare.indexer import Selection


@dataclass(frozen=True)
class Recorded:
    """The positions that the Full layers of a trajectory selected, for its first queries; compact.

    Ascending positions as differences, of which most fit a byte, deflated. A difference of 0 is a place without a key.
    """

    layers: tuple[int, ...]
    shape: tuple[int, int, int]
    dtype: str
    data: bytes

    @classmethod
    def of(cls, positions: Mapping[int, Int[np.ndarray, "queries k"]]) -> Recorded:
        """By layer; positions within the trajectory in ascending order, `NONE` last, all of a query that is unknown."""
        layers = tuple(sorted(positions))
        stacked = np.stack([positions[i] for i in layers]).astype(np.int64)
        differences = np.where(stacked == NONE, 0, np.diff(stacked, prepend=-1, axis=-1))
        dtype = np.min_scalar_type(int(differences.max(initial=0)))
        layers_, queries, k = stacked.shape
        return cls(layers, (layers_, queries, k), dtype.str, zlib.compress(differences.astype(dtype).tobytes(), 1))

    def positions(self) -> dict[int, Int[np.ndarray, "queries k"]]:
        """What `of` was given."""
        differences = np.frombuffer(zlib.decompress(self.data), self.dtype).reshape(self.shape).astype(np.int64)
        positions = np.where(differences == 0, NONE, differences.cumsum(-1) - 1)
        return dict(zip(self.layers, positions, strict=True))


@contextmanager
def selections(model: Any) -> Iterator[dict[int, Selection]]:
    """By Full layer, what the forward pass inside selects. `model` is a causal LM with our attention installed."""
    found: dict[int, Selection] = {}
    hooks = [
        layer.self_attn.register_forward_hook(lambda _, __, out, i=i: found.__setitem__(i, out[2]))
        for i, layer in enumerate(model.model.layers)
        if layer.self_attn.indexer is not None
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def packed(
    recorded: Sequence[Recorded], tokens: Sequence[int], device: str = "cpu"
) -> dict[int, Int[Tensor, "tokens k"]]:
    """Flat positions in a pack of trajectories of so many `tokens`, by Full layer; `NONE` where there are fewer keys.

    A trajectory's last tokens were never queries of the engine: they attend to themselves, and no response token is
    predicted from them. Of a query that came out of the engine's prefix cache nothing is known: `NONE` throughout.
    """
    width = max(r.shape[2] for r in recorded)
    parts: dict[int, list[np.ndarray]] = {}
    offset = 0
    for r, n in zip(recorded, tokens, strict=True):
        for layer, found in r.positions().items():
            found = found[:n]
            rows = np.full((n, width), NONE, np.int64)
            rows[len(found) :, 0] = np.arange(len(found), n)
            rows[: len(found), : found.shape[1]] = found
            parts.setdefault(layer, []).append(np.where(rows == NONE, NONE, rows + offset))
        offset += n
    return {layer: torch.from_numpy(np.concatenate(rows)).to(device) for layer, rows in parts.items()}


def complete(selected: dict[int, Int[Tensor, "tokens k"]]) -> dict[int, Int[Tensor, "tokens k"]]:
    """The same. Raises ValueError where some query's selection is unknown: there is nothing to replay."""
    for layer, positions in selected.items():
        if (unknown := (positions == NONE).all(-1)).any():
            raise ValueError(f"layer {layer}: the engine did not say what {int(unknown.sum())} queries selected")
    return selected


def overlap(own: Int[Tensor, "tokens k"], recorded: Int[Tensor, "tokens k"]) -> float:
    """The share of a trajectory's recorded positions that `own` has too; both ascending, `NONE` last.

    Of queries that had to leave keys out: where all are selected there is nothing to agree on. NaN where no query did.
    """
    asked = (recorded != NONE).all(-1) & (torch.arange(len(recorded), device=own.device) >= recorded.shape[-1])
    mine, theirs = own[asked], recorded[asked].contiguous()
    beyond = torch.iinfo(mine.dtype).max
    mine = torch.where(mine == NONE, beyond, mine).contiguous()
    place = torch.searchsorted(mine, theirs).clamp(max=mine.shape[-1] - 1)
    return float((mine.gather(1, place) == theirs).float().mean())
