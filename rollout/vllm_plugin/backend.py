"""Paged sparse MLA in plain PyTorch: every query token gathers the latents that its indexer selected."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.attention.sparse_mla_attention import SharedTopkIndicesBuffer
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MLAAttentionImpl,
    MultipleOf,
)

GATHER_BYTES = 1 << 21
"""Bound on the gathered [tokens, k, latent] of one chunk of queries: small enough to stay in a core's cache."""


@dataclass
class IndexShareMetadata(AttentionMetadata):
    """A scheduler step's tokens: request r's queries are rows [query_start_loc[r], query_start_loc[r + 1])."""

    num_actual_tokens: int
    num_reqs: int
    query_start_loc: list[int]
    seq_lens: list[int]
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    req_id_per_token: torch.Tensor
    # vLLM's MLA layer reads these: every token takes the absorbed (decode) path.
    num_decodes: int = 0
    num_prefills: int = 0
    num_decode_tokens: int = 0
    prefill: Any = None
    decode: Any = None


class IndexShareMetadataBuilder(AttentionMetadataBuilder[IndexShareMetadata]):
    """From vLLM's common metadata; no CUDA graphs."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any, **_: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(None)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> IndexShareMetadata:
        """Lengths as host integers, for the loop over requests."""
        m = common_attn_metadata
        n, tokens = m.num_reqs, m.num_actual_tokens
        starts = m.query_start_loc_cpu[: n + 1]
        requests = torch.repeat_interleave(torch.arange(n), (starts[1:] - starts[:-1]).long())
        return IndexShareMetadata(
            num_actual_tokens=tokens,
            num_reqs=n,
            query_start_loc=starts.tolist(),
            seq_lens=m.seq_lens[:n].tolist(),
            block_table=m.block_table_tensor,
            slot_mapping=m.slot_mapping[:tokens],
            req_id_per_token=requests[:tokens].to(m.block_table_tensor.device),
            num_decodes=n,
            num_decode_tokens=tokens,
        )


class _SparseBackend(AttentionBackend):
    supported_dtypes: ClassVar = [torch.float32, torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes: ClassVar = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(1)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return []  # any

    @staticmethod
    def get_builder_cls() -> type[IndexShareMetadataBuilder]:
        return IndexShareMetadataBuilder

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        return True


class IndexShareBackend(_SparseBackend):
    """Core attention."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[IndexShareImpl]:
        return IndexShareImpl


class IndexerBackend(_SparseBackend):
    """The indexer's key cache, which has no attention of its own."""

    @staticmethod
    def get_name() -> str:
        return "LONGPPO_INDEXER"

    @staticmethod
    def get_impl_cls() -> Any:
        raise NotImplementedError("the indexer's cache is read by its layer")


def write_rows(cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Write rows [tokens, width] at their slots of a paged cache [blocks, block, width]; slots < 0 are padding."""
    slots, rows = slots[: rows.shape[0]].long(), rows[: slots.shape[0]]
    keep = slots >= 0
    slots, rows = slots[keep], rows[keep]
    block = cache.shape[1]
    cache[slots // block, slots % block] = rows.to(cache.dtype)


class IndexShareImpl(MLAAttentionImpl[IndexShareMetadata], SharedTopkIndicesBuffer):
    """Absorbed MLA over the positions in the top-k buffer, which the last Full layer wrote."""

    is_sparse = True
    supports_dense_mha_prefill = False
    can_return_lse_for_decode = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: Any,
        sliding_window: Any,
        kv_cache_dtype: str,
        logits_soft_cap: Any,
        attn_type: str,
        kv_sharing_target_layer_name: Any,
        indexer: Any = None,
        topk_indices_buffer: torch.Tensor | None = None,
        index_group_builder: Any = None,
        **mla: Any,
    ) -> None:
        if any((alibi_slopes, sliding_window, logits_soft_cap, kv_sharing_target_layer_name)):
            raise ValueError("IndexShare attention has neither ALiBi, windows, soft caps nor shared KV caches")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_lora_rank = mla["kv_lora_rank"]
        self.supports_quant_query_input = False
        self.dcp_world_size = 1
        self.init_topk_indices_buffer(indexer, topk_indices_buffer)

    def record_logical_topk_ready(self) -> None:
        """Called by vLLM's wrapper between indexer and attention; nothing here runs ahead of it."""

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: Any,
    ) -> None:
        """Append the step's latents and rotary keys."""
        if kv_cache.numel():
            write_rows(kv_cache, slot_mapping.flatten(), torch.cat([kv_c_normed, k_pe.flatten(1)], -1))

    def forward_mqa(
        self, q: Any, kv_c_and_k_pe_cache: torch.Tensor, attn_metadata: IndexShareMetadata, layer: Any
    ) -> tuple[torch.Tensor, None]:
        """q [tokens, heads, rank + rope] -> [tokens, heads, rank]; softmax in float32."""
        if isinstance(q, tuple):
            q = torch.cat(q, -1)
        assert self.topk_indices_buffer is not None
        cache, rank = kv_c_and_k_pe_cache, self.kv_lora_rank
        block, tokens = cache.shape[1], q.shape[0]
        selected = self.topk_indices_buffer[:tokens].long()  # positions within the request, -1 = none
        selected = selected[:, : max(1, min(selected.shape[1], max(attn_metadata.seq_lens)))]
        out = q.new_empty(tokens, self.num_heads, rank)
        step = max(1, GATHER_BYTES // (selected.shape[1] * cache.shape[-1] * 4))
        for begin in range(0, tokens, step):
            rows = slice(begin, begin + step)
            position = selected[rows]
            legal, position = position >= 0, position.clamp(min=0)
            blocks = attn_metadata.block_table[attn_metadata.req_id_per_token[rows, None], position // block].long()
            kv = cache[blocks, position % block].float()
            scores = torch.bmm(q[rows].float(), kv.transpose(1, 2)).mul_(self.scale)
            p = scores.masked_fill_(~legal[:, None], float("-inf")).softmax(-1)
            out[rows] = torch.bmm(p, kv[..., :rank]).to(q.dtype)
        return out, None
