"""Keeps what our indexers select, for the requests that ask for it."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch

from indexshare.replay import Recorded
from indexshare.selection import NONE

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

    def add(self, layer: int, selected: torch.Tensor, query_start_loc: list[int], seq_lens: list[int]) -> None:
        """A scheduler step's rows of the top-k buffer, request by request in the order of the runner's batch."""
        for r, request in enumerate(self._runner.input_batch.req_ids[: len(seq_lens)]):
            number = (self._runner.requests[request].sampling_params.extra_args or {}).get(RECORD)
            if number is None:
                continue
            begin, end = query_start_loc[r], query_start_loc[r + 1]
            rows = selected[begin:end, : seq_lens[r]].cpu().numpy().copy()
            layers = self._found.setdefault(number, {})
            layers.setdefault(layer, []).append((seq_lens[r] - (end - begin), rows))

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
