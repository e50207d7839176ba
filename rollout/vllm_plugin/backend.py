"""Paged sparse MLA in plain PyTorch: every query token gathers the latents that its indexer selected.

A prompt no longer than index_topk selects every earlier key, whatever its scores: it is neither scored nor gathered.
"""

from __future__ import annotations

import itertools
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

DENSE_ELEMENTS = 1 << 20
"""Bound on the scores [queries, heads, keys] of one chunk where every key is selected."""


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
    dense: list[int]
    """Requests whose queries select every earlier key and attend without a selection."""
    many: list[int]
    """Of the others, those with several queries; an indexer scores them one request at a time."""
    single: list[int]
    """Of the others, those with one query."""
    gathered: list[slice]
    """The rows of the others."""
    slots: torch.Tensor | None = None
    """Where in the cache a Full layer's selection lies, [tokens, k], -1 = none; Shared layers find it here."""
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
        model = vllm_config.model_config.hf_config
        self.k = model.index_topk
        # From here on a gather takes one query at a time and nothing is won by taking requests together.
        self.long = GATHER_BYTES // (4 * (model.kv_lora_rank + model.qk_rope_head_dim))

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> IndexShareMetadata:
        """Lengths as host integers, for the loop over requests."""
        m = common_attn_metadata
        n, tokens = m.num_reqs, m.num_actual_tokens
        starts: list[int] = m.query_start_loc_cpu[: n + 1].tolist()
        lengths: list[int] = m.seq_lens[:n].tolist()
        queries = [b - a for a, b in itertools.pairwise(starts)]
        requests = torch.repeat_interleave(torch.arange(n), torch.tensor(queries))
        dense = [r for r in range(n) if lengths[r] <= self.k and (queries[r] > 1 or lengths[r] > self.long)]
        others = sorted(set(range(n)) - set(dense))
        return IndexShareMetadata(
            num_actual_tokens=tokens,
            num_reqs=n,
            query_start_loc=starts,
            seq_lens=lengths,
            block_table=m.block_table_tensor,
            slot_mapping=m.slot_mapping[:tokens],
            req_id_per_token=requests[:tokens].to(m.block_table_tensor.device),
            dense=dense,
            many=[r for r in others if queries[r] > 1],
            single=[r for r in others if queries[r] == 1],
            gathered=merged([(starts[r], starts[r + 1]) for r in others]),
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


def merged(spans: list[tuple[int, int]]) -> list[slice]:
    """Ascending spans as slices, neighbours in one."""
    out: list[slice] = []
    for begin, end in spans:
        if out and out[-1].stop == begin:
            begin = out.pop().start
        out.append(slice(begin, end))
    return out


def request_rows(cache: torch.Tensor, blocks: torch.Tensor, length: int) -> torch.Tensor:
    """The first `length` rows of a request, [length, width]; blocks [..., n] of several: [..., length, width]."""
    blocks = blocks[..., : -(-length // cache.shape[1])]
    rows = cache.index_select(0, blocks.flatten()).view(*blocks.shape[:-1], -1, cache.shape[2])
    return rows[..., :length, :]


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
        self.selects = indexer is not None

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
        m, out = attn_metadata, q.new_empty(q.shape[0], self.num_heads, self.kv_lora_rank)
        for r in m.dense:
            rows = slice(m.query_start_loc[r], m.query_start_loc[r + 1])
            kv = request_rows(kv_c_and_k_pe_cache, m.block_table[r], m.seq_lens[r]).float()
            self._attend_all(q[rows], kv, out[rows])
        if m.many or m.single:
            if self.selects or m.slots is None:
                m.slots = self._slots(m, kv_c_and_k_pe_cache.shape[1])
            cache = kv_c_and_k_pe_cache.view(-1, kv_c_and_k_pe_cache.shape[-1])
            for rows in m.gathered:
                self._attend_selected(q[rows], cache, m.slots[rows], out[rows])
        return out, None

    def _slots(self, m: IndexShareMetadata, block: int) -> torch.Tensor:
        """The buffer's positions as rows of the cache, once for a Full layer and those that share its selection."""
        assert self.topk_indices_buffer is not None
        width = min(self.topk_indices_buffer.shape[1], max(m.seq_lens[r] for r in (*m.many, *m.single)))
        position = self.topk_indices_buffer[: m.num_actual_tokens, :width]
        blocks = m.block_table[m.req_id_per_token[:, None], position.clamp(min=0) // block]
        return torch.where(position < 0, -1, blocks * block + position % block)

    def _attend_all(self, q: torch.Tensor, kv: torch.Tensor, out: torch.Tensor) -> None:
        """The last queries q [n, heads, rank + rope] of a request attend to all of kv up to their own place."""
        n, length, rank = q.shape[0], kv.shape[0], self.kv_lora_rank
        step = max(1, DENSE_ELEMENTS // (length * self.num_heads))
        for a in range(0, n, step):
            b = min(a + step, n)
            keys = kv[: length - (n - b)]
            scores = (q[a:b].float().flatten(0, 1) @ keys.t()).mul_(self.scale).view(b - a, self.num_heads, -1)
            later = torch.ones(b - a, b - a, dtype=torch.bool, device=q.device).triu(1)
            scores[..., keys.shape[0] - (b - a) :].masked_fill_(later[:, None], float("-inf"))
            p = scores.softmax(-1).flatten(0, 1)
            out[a:b] = (p @ keys[:, :rank]).view(b - a, self.num_heads, rank).to(out.dtype)

    def _attend_selected(self, q: torch.Tensor, kv: torch.Tensor, slots: torch.Tensor, out: torch.Tensor) -> None:
        """Queries attend to their rows `slots` [tokens, k] of the cache kv [rows, rank + rope]; -1 is none."""
        tokens, k = slots.shape
        step = max(1, GATHER_BYTES // (k * kv.shape[1] * 4))
        for rows in (slice(a, min(a + step, tokens)) for a in range(0, tokens, step)):
            some = slots[rows]
            gathered = kv.index_select(0, some.clamp(min=0).flatten()).view(*some.shape, -1).float()
            scores = torch.bmm(q[rows].float(), gathered.transpose(1, 2)).mul_(self.scale)
            p = scores.masked_fill_((some < 0)[:, None], float("-inf")).softmax(-1)
            out[rows] = torch.bmm(p, gathered[..., : self.kv_lora_rank]).to(out.dtype)
