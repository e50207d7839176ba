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

from indexshare.selection import stable_topk_by_position
from rollout.vllm_plugin.backend import IndexerBackend, IndexShareBackend, IndexShareMetadata, write_rows
from rollout.vllm_plugin.native import fits_native_kernels
from rollout.vllm_plugin.recorder import Recorder

SCORE_ELEMENTS = 1 << 24
"""Bound on [queries, heads, keys] of one score matrix."""


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
        self._select(q, k, weights, ours)
        if self.recorder is not None:
            self.recorder.add(self.layer, self.topk_indices_buffer, ours.query_start_loc, ours.seq_lens)
        return self.topk_indices_buffer

    def _select(self, q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor, m: IndexShareMetadata) -> None:
        write_rows(self.k_cache.kv_cache, m.slot_mapping, k[: m.num_actual_tokens])
        self.topk_indices_buffer[: m.num_actual_tokens] = -1
        starts, lengths = m.query_start_loc, m.seq_lens
        queries = [starts[r + 1] - starts[r] for r in range(m.num_reqs)]
        # Decoding requests have one query each: score many at once, their keys padded to the longest's.
        single = [r for r, n in enumerate(queries) if n == 1]
        longest = max((lengths[r] for r in single), default=1)
        step = max(1, SCORE_ELEMENTS // (longest * (self.n_head + self.head_dim)))
        for i in range(0, len(single), step):
            requests = single[i : i + step]
            rows = torch.tensor([[starts[r]] for r in requests], device=q.device)
            positions = torch.tensor([[lengths[r] - 1] for r in requests], device=q.device)
            self._choose(q, weights, m, requests, rows, positions)
        for r in (r for r, n in enumerate(queries) if n > 1):
            first = lengths[r] - queries[r]  # position of the request's first query of this step
            step = max(1, SCORE_ELEMENTS // (lengths[r] * self.n_head))
            for a in range(0, queries[r], step):
                chunk = torch.arange(a, min(a + step, queries[r]), device=q.device)[None]
                self._choose(q, weights, m, [r], starts[r] + chunk, first + chunk)

    def _choose(
        self,
        q: torch.Tensor,
        weights: torch.Tensor,
        m: IndexShareMetadata,
        requests: list[int],
        rows: torch.Tensor,
        positions: torch.Tensor,
    ) -> None:
        """Top-k of queries at `rows` of the step, at `positions` in their requests; both [requests, queries]."""
        cache, n = self.k_cache.kv_cache, max(m.seq_lens[r] for r in requests)
        blocks = m.block_table[requests, : -(-n // cache.shape[1])].long()
        keys = cache[blocks].flatten(1, 2)[:, :n].float().transpose(1, 2)
        scores = (q[rows].float().flatten(1, 2) @ keys).mul_(self.softmax_scale).relu_()
        total = torch.einsum("rth,rthn->rtn", weights[rows], scores.unflatten(1, (-1, self.n_head)))
        later = torch.arange(n, device=total.device) > positions[..., None]
        best = stable_topk_by_position(total.masked_fill_(later, float("-inf")), self.topk_tokens)
        self.topk_indices_buffer[rows.flatten(), : best.shape[-1]] = best.flatten(0, 1).to(
            self.topk_indices_buffer.dtype
        )


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
