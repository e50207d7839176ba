"""Keeps what our indexers select, for the requests that ask for it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from indexshare.replay import Recorded
from indexshare.selection import NONE

if TYPE_CHECKING:
    from rollout.vllm_plugin.backend import IndexShareMetadata

RECORD = "longppo_record"
"""In a request's `extra_args`: record it, under this number."""

Rows = list[tuple[int, np.ndarray]]
"""(position of the first, positions selected [queries, k]) of consecutive queries."""


class Recorder:
    """The selections of a vLLM worker. A request that is preempted and computed again is recorded again."""

    def __init__(self, runner: Any) -> None:
        from rollout.vllm_plugin.layer import PlainIndexer

        self._runner = runner
        self._found: dict[int, dict[int, Rows]] = {}
        for name, module in runner.model.named_modules():
            if isinstance(module, PlainIndexer):
                layer = re.search(r"layers\.(\d+)\.", name)
                assert layer is not None
                module.recorder, module.layer = self, int(layer[1])

    def add(self, layer: int, selected: torch.Tensor, m: IndexShareMetadata) -> None:
        """A scheduler step's rows of the top-k buffer, request by request in the order of the runner's batch."""
        for r, request in enumerate(self._runner.input_batch.req_ids[: m.num_reqs]):
            number = (self._runner.requests[request].sampling_params.extra_args or {}).get(RECORD)
            if number is None:
                continue
            begin, end, length = m.query_start_loc[r], m.query_start_loc[r + 1], m.seq_lens[r]
            first = length - (end - begin)
            if r in m.dense:  # which the indexer was not asked
                keys = np.arange(length)
                rows = np.where(keys <= np.arange(first, length)[:, None], keys, NONE)
            else:
                rows = selected[begin:end, :length].cpu().numpy().copy()
            self._found.setdefault(number, {}).setdefault(layer, []).append((first, rows))

    def take(self) -> dict[int, Recorded]:
        """What there is, by number; forgotten here."""
        found, self._found = self._found, {}
        return {
            number: Recorded.of({layer: _joined(rows) for layer, rows in layers.items()})
            for number, layers in found.items()
        }


def _joined(parts: Rows) -> np.ndarray:
    """[queries, k] from position 0 on, `NONE` where nothing was recorded."""
    out = np.full((max(a + len(rows) for a, rows in parts), max(rows.shape[1] for _, rows in parts)), NONE, np.int64)
    for first, rows in parts:
        out[first : first + len(rows)] = NONE
        out[first : first + len(rows), : rows.shape[1]] = rows
    return out
