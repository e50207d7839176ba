"""Hidden states of the frozen trunk, kept while a step lasts: in memory, and past a budget in a file."""

from __future__ import annotations

import logging
import os
import tempfile
from dataclasses import dataclass
from typing import IO

import numpy as np
import torch
from torch import Tensor

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Filed:
    """Where in the file an entry lies."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class StateCache:
    """Tensors by key, on the CPU. What fits neither budget nor file is not kept, and `refused` counts it.

    `directory` holds one nameless file, which vanishes with the process; None keeps nothing past the budget.
    """

    def __init__(self, budget_bytes: int, directory: str | None = None) -> None:
        self._budget = budget_bytes
        self._directory = directory
        self._memory: dict[bytes, Tensor] = {}
        self._filed: dict[bytes, _Filed] = {}
        self._file: IO[bytes] | None = None
        self._end = 0
        self._broken = False
        self.bytes_in_memory = 0
        self.refused = 0

    @property
    def bytes_in_file(self) -> int:
        """What the file holds now."""
        return self._end

    def get(self, key: bytes) -> Tensor | None:
        """What was put under the key, or None."""
        if key in self._memory:
            return self._memory[key]
        if key not in self._filed or self._file is None:
            return None
        entry = self._filed[key]
        count = int(np.prod(entry.shape)) * entry.dtype.itemsize
        if not count:
            return torch.empty(entry.shape, dtype=entry.dtype)
        # Copy-on-write: torch wants to be allowed to write.
        mapped = np.memmap(self._file, np.uint8, mode="c", offset=entry.offset, shape=(count,))
        return torch.from_numpy(mapped).view(entry.dtype).view(entry.shape)

    def put(self, key: bytes, states: Tensor) -> None:
        """Keep a copy, if there is room."""
        size = states.numel() * states.element_size()
        if self.bytes_in_memory + size <= self._budget:
            self._memory[key] = states.detach().to("cpu", copy=True)
            self.bytes_in_memory += size
        elif self._directory is None or self._broken or not self._write(key, states, size):
            self.refused += 1

    def clear(self) -> None:
        """Forget everything and give the room back."""
        self._memory.clear()
        self._filed.clear()
        self.bytes_in_memory = self.refused = self._end = 0
        self._broken = False
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, key: bytes, states: Tensor, size: int) -> bool:
        """Append to the file. A full disk is said once; the states are then computed again when they are needed."""
        # Written, never allocated by touching mapped pages: a full disk is then an error, not a dead process.
        data = states.detach().cpu().contiguous().view(torch.uint8).numpy().data
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self._directory, buffering=0)  # noqa: SIM115
            done = 0
            while done < size:
                done += os.pwrite(self._file.fileno(), data.cast("B")[done:], self._end + done)
        except OSError as error:
            self._broken = True
            logger.warning(
                "critic.cache_dir: %s is full or cannot be written (%s); the trunk computes again what does not fit",
                self._directory,
                error.strerror,
            )
            return False
        self._filed[key] = _Filed(self._end, tuple(states.shape), states.dtype)
        self._end += size
        return True
