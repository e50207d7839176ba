"""vLLM's MLA wrapper with an indexer that needs no GPU kernel: float32 scores, the trainer's stable top-k."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper
from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache, Indexer
from vllm.platforms import current_platform

from indexshare.selection import index_scores, stable_topk_by_position
from rollout.vllm_plugin.backend import (
    IndexerBackend,
    IndexShareBackend,
    IndexShareMetadata,
    request_rows,
    write_rows,
)
from rollout.vllm_plugin.native import fits_native_kernels
from rollout.vllm_plugin.recorder import Recorder

QUERY_CHUNK = 128
"""Queries of one request scored at once: fewer and more are slower (measured at 8K and 32K keys)."""

DECODE_ELEMENTS = 1 << 20
"""Bound on the keys and scores of decoding requests handled at once: they stay in the processor's cache."""


class IndexerCache(DeepseekV32IndexerCache):
    """Index keys in the model's own dtype."""

    def get_attn_backend(self) -> type[IndexerBackend]:
        return IndexerBackend


class PlainIndexer(Indexer):
    """Parameters and weight names of vLLM's `Indexer`, computed in PyTorch."""

    topk_indices_buffer: torch.Tensor
    recorder: Recorder | None = None
    layer: int = -1

    @staticmethod
    def adopt(indexer: Any) -> None:
        """Turn a built indexer into this class: vLLM builds it where no plugin can reach."""
        indexer.__class__ = PlainIndexer
        indexer.k_cache.__class__ = IndexerCache
        indexer.k_cache.head_dim = indexer.head_dim  # vLLM packs fp8 values and scales instead
        indexer.k_cache.dtype = torch.get_default_dtype()
        indexer.topk_indices_buffer.fill_(-1)  # rows that no query wrote are read too, and thrown away

    def forward(
        self, hidden_states: torch.Tensor, qr: torch.Tensor, positions: torch.Tensor, rotary_emb: nn.Module
    ) -> torch.Tensor:
        """Fill the top-k buffer [tokens, k] with positions within each request, -1 where there are fewer keys."""
        heads, dim, rope = self.n_head, self.head_dim, self.rope_dim
        q = self.wq_b(qr)[0].view(-1, heads, dim)
        keys_and_weights = self.wk_weights_proj(hidden_states)[0]
        k = self.k_norm(keys_and_weights[:, :dim])
        weights = keys_and_weights[:, dim:].float() * heads**-0.5
        q_rot, k_rot = rotary_emb(positions, q[..., :rope].contiguous(), k[:, None, :rope].contiguous())
        q = torch.cat([q_rot.reshape(-1, heads, rope), q[..., rope:]], -1)
        k = torch.cat([k_rot.reshape(-1, rope), k[:, rope:]], -1)
        metadata = get_forward_context().attn_metadata
        if not isinstance(metadata, dict):
            return self.topk_indices_buffer  # vLLM's profiling run
        ours = metadata[self.k_cache.prefix]
        assert isinstance(ours, IndexShareMetadata)
        write_rows(self.k_cache.kv_cache, ours.slot_mapping, k[: ours.num_actual_tokens])
        self.choose(q, weights, ours)
        if self.recorder is not None:
            self.recorder.add(self.layer, self.topk_indices_buffer, ours)
        return self.topk_indices_buffer

    def choose(self, q: torch.Tensor, weights: torch.Tensor, m: IndexShareMetadata) -> None:
        """q [tokens, heads, dim] against all keys in the cache, weights [tokens, heads] -> rows of the buffer."""
        weights = weights * self.softmax_scale  # above 0, so it may stand outside the ReLU
        for r in m.many:
            self._choose_many(q, weights, m, r)
        # Decoding requests have one query each: score several at once, their keys padded to the longest's.
        longest = max((m.seq_lens[r] for r in m.single), default=1)
        step = max(1, DECODE_ELEMENTS // (longest * (self.n_head + self.head_dim)))
        for i in range(0, len(m.single), step):
            self._choose_single(q, weights, m, m.single[i : i + step])

    def _choose_many(self, q: torch.Tensor, weights: torch.Tensor, m: IndexShareMetadata, r: int) -> None:
        """Top-k of one request's queries, whose own keys are its last ones."""
        begin, end, length = m.query_start_loc[r], m.query_start_loc[r + 1], m.seq_lens[r]
        keys = request_rows(self.k_cache.kv_cache, m.block_table[r], length).float()
        for a in range(begin, end, QUERY_CHUNK):
            b = min(a + QUERY_CHUNK, end)
            scores = index_scores(q[a:b].float(), keys[: length - (end - b)], weights[a:b])
            self._store(slice(a, b), stable_topk_by_position(scores, self.topk_tokens))

    def _choose_single(
        self, q: torch.Tensor, weights: torch.Tensor, m: IndexShareMetadata, requests: list[int]
    ) -> None:
        """Top-k of requests with one query each."""
        lengths = [m.seq_lens[r] for r in requests]
        n, rows = max(lengths), torch.tensor([m.query_start_loc[r] for r in requests], device=q.device)
        places = torch.arange(n, device=q.device)
        later = places >= torch.tensor(lengths, device=q.device)[:, None]
        if n <= self.topk_tokens:
            self._store(rows, torch.where(later, -1, places))
            return
        keys = request_rows(self.k_cache.kv_cache, m.block_table[requests], n).float()
        scores = torch.bmm(q[rows].float(), keys.transpose(1, 2)).relu_()
        total = torch.bmm(weights[rows, None], scores)[:, 0]
        self._store(rows, stable_topk_by_position(total.masked_fill_(later, float("-inf")), self.topk_tokens))

    def _store(self, rows: slice | torch.Tensor, best: torch.Tensor) -> None:
        self.topk_indices_buffer[rows, : best.shape[1]] = best.to(self.topk_indices_buffer.dtype)
        self.topk_indices_buffer[rows, best.shape[1] :] = -1


class NativeRotary(nn.Module):
    """vLLM's CPU kernel rotates only head 0 of a [tokens, heads, dim] query; its PyTorch path is right."""

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self.rotary = rotary

    def forward(self, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> Any:
        return self.rotary.forward_native(positions, q.contiguous(), k.contiguous())  # type: ignore[operator]


class IndexShareWrapper(MultiHeadLatentAttentionWrapper):
    """The stock wrapper (its forward is inherited) around our indexer and backend.

    Dense MLA stays stock, and so does what vLLM's GPU kernels fit.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        scale: float,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        q_lora_rank: int | None,
        kv_lora_rank: int,
        mla_modules: Any,
        cache_config: Any = None,
        quant_config: Any = None,
        prefix: str = "",
        skip_topk: bool = False,
        **rest: Any,
    ) -> None:
        model: Any = get_current_vllm_config().model_config
        native = current_platform.is_cuda() and fits_native_kernels(model.hf_config, model.dtype)
        if native or not mla_modules.is_sparse:
            super().__init__(
                hidden_size,
                num_heads,
                scale,
                qk_nope_head_dim,
                qk_rope_head_dim,
                v_head_dim,
                q_lora_rank,
                kv_lora_rank,
                mla_modules,
                cache_config,
                quant_config,
                prefix,
                skip_topk,
                **rest,
            )
            return
        # The stock constructor would ask for a GPU backend, so its attributes are set here.
        nn.Module.__init__(self)
        self.hidden_size, self.num_heads = hidden_size, num_heads
        self.qk_nope_head_dim, self.qk_rope_head_dim = qk_nope_head_dim, qk_rope_head_dim
        self.qk_head_dim, self.v_head_dim = qk_nope_head_dim + qk_rope_head_dim, v_head_dim
        self.q_lora_rank, self.kv_lora_rank = q_lora_rank, kv_lora_rank
        self.fused_qkv_a_proj = mla_modules.fused_qkv_a_proj
        self.kv_a_proj_with_mqa = mla_modules.kv_a_proj_with_mqa
        self.q_a_layernorm = mla_modules.q_a_layernorm
        self.q_b_proj, self.q_proj = mla_modules.q_b_proj, mla_modules.q_proj
        self.kv_a_layernorm, self.kv_b_proj = mla_modules.kv_a_layernorm, mla_modules.kv_b_proj
        self.o_proj, self.g_proj = mla_modules.o_proj, mla_modules.g_proj
        self.is_sparse = mla_modules.is_sparse
        self.rotary_emb = NativeRotary(mla_modules.rotary_emb)
        index_rotary = mla_modules.indexer_rotary_emb
        self.indexer_rope_emb = index_rotary and NativeRotary(index_rotary)
        self.skip_topk, self.fuse_qkv_rmsnorm, self.dcp_q_replicate = skip_topk, False, False
        self.prefix = prefix
        self.indexer = mla_modules.indexer
        if self.indexer is not None:
            PlainIndexer.adopt(self.indexer)
        self.mla_attn = MLAAttention(
            num_heads=num_heads,
            scale=scale,
            qk_nope_head_dim=qk_nope_head_dim,
            qk_rope_head_dim=qk_rope_head_dim,
            v_head_dim=v_head_dim,
            q_lora_rank=q_lora_rank,
            kv_lora_rank=kv_lora_rank,
            kv_b_proj=mla_modules.kv_b_proj,
            cache_config=cache_config,
            quant_config=quant_config,
            prefix=f"{prefix}.attn",
            attn_backend=IndexShareBackend,
            use_sparse=True,
            indexer=self.indexer,
            topk_indices_buffer=mla_modules.topk_indices_buffer,
        )
