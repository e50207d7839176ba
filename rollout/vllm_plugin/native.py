"""Which IndexShare models vLLM's own GPU kernels fit."""

from __future__ import annotations

from typing import Any

import torch

GLM_5_2 = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}
"""vLLM's sparse MLA and indexer kernels are compiled for these widths, in bfloat16."""


def fits_native_kernels(config: Any, dtype: torch.dtype) -> bool:
    """Whether a GPU takes vLLM's native path for this Hugging Face config; everything else takes our backend."""
    return dtype == torch.bfloat16 and all(getattr(config, name) == width for name, width in GLM_5_2.items())
