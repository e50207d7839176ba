"""The plugin's attention and selection on a paged cache, against a loop over queries."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from indexshare.selection import stable_topk
from rollout.vllm_plugin import layer
from rollout.vllm_plugin.backend import IndexShareImpl, IndexShareMetadata, IndexShareMetadataBuilder, merged

HEADS, RANK, ROPE, DIM, BLOCK = 2, 6, 2, 4, 4


def metadata(queries: list[int], lengths: list[int], k: int, long: int) -> IndexShareMetadata:
    """As vLLM builds it for requests whose blocks lie anywhere in the cache."""
    table = torch.randperm(len(lengths) * 16).view(len(lengths), 16).int()
    common = SimpleNamespace(
        num_reqs=len(queries), num_actual_tokens=sum(queries), seq_lens=torch.tensor(lengths),
        query_start_loc_cpu=torch.tensor([0, *queries]).cumsum(0), block_table_tensor=table,
        slot_mapping=torch.zeros(sum(queries), dtype=torch.int64),
    )  # fmt: skip
    builder = IndexShareMetadataBuilder.__new__(IndexShareMetadataBuilder)
    builder.k, builder.long = k, long
    return builder.build(0, common)  # type: ignore[arg-type]


def rows_of(cache: Tensor, m: IndexShareMetadata, r: int) -> Tensor:
    return cache[m.block_table[r].long()].flatten(0, 1)[: m.seq_lens[r]]


requests = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 40)), min_size=1, max_size=5)


@settings(max_examples=100)
@given(requests, st.integers(1, 12), st.sampled_from([0, 1000]), st.integers(0, 10_000))
def test_a_step_of_any_requests_equals_a_loop_over_its_queries(
    asked: list[tuple[int, int]], k: int, long: int, seed: int
) -> None:
    """Prompts and decoding requests, longer and shorter than k; few distinct scores, so that ties are everywhere."""
    torch.manual_seed(seed)
    queries, lengths = [n for n, _ in asked], [n + before for n, before in asked]
    m, tokens = metadata(queries, lengths, k, long), sum(queries)
    cache = torch.randn(len(asked) * 16, BLOCK, RANK + ROPE)
    index_cache = torch.randint(-1, 2, (len(asked) * 16, BLOCK, DIM)).float()
    q, index_q = torch.randn(tokens, HEADS, RANK + ROPE), torch.randint(-1, 2, (tokens, HEADS, DIM)).float()
    weights = torch.randint(-1, 3, (tokens, HEADS)).float()
    buffer = torch.full((tokens, k), -1, dtype=torch.int32)
    indexer = SimpleNamespace(
        k_cache=SimpleNamespace(kv_cache=index_cache), softmax_scale=0.5, n_head=HEADS, head_dim=DIM, topk_tokens=k,
        topk_indices_buffer=buffer,
    )  # fmt: skip
    for name in ("_choose_many", "_choose_single", "_store", "choose"):
        setattr(indexer, name, getattr(layer.PlainIndexer, name).__get__(indexer))
    indexer.choose(index_q, weights, m)
    impl = IndexShareImpl(
        HEADS, RANK + ROPE, 0.3, 1, None, None, "auto", None, "decoder", None, indexer=indexer, kv_lora_rank=RANK
    )
    out, _ = impl.forward_mqa(q, cache, m, None)
    for r, (begin, n) in enumerate(zip(m.query_start_loc, queries, strict=False)):
        keys, index_keys = rows_of(cache, m, r), rows_of(index_cache, m, r)
        for i in range(n):
            seen = lengths[r] - n + i + 1
            scores = ((index_keys[:seen] @ index_q[begin + i].t()).relu() * weights[begin + i]).sum(-1)
            chosen = sorted(stable_topk(scores, k).tolist())
            if r not in m.dense:
                assert [x for x in buffer[begin + i].tolist() if x >= 0] == chosen
            p = (0.3 * q[begin + i] @ keys[chosen].t()).softmax(-1)
            torch.testing.assert_close(out[begin + i], p @ keys[chosen, :RANK])


@pytest.mark.parametrize(
    ("spans", "slices"), [([], []), ([(0, 2), (2, 3), (5, 9)], [(0, 3), (5, 9)]), ([(1, 2), (3, 4)], [(1, 2), (3, 4)])]
)
def test_neighbouring_rows_are_taken_together(spans: list[tuple[int, int]], slices: list[tuple[int, int]]) -> None:
    assert [(s.start, s.stop) for s in merged(spans)] == slices


def test_prompts_no_longer_than_k_attend_densely() -> None:
    """So does a decoding request whose gather would be as long as its keys' copy."""
    m = metadata([5, 1, 1], [8, 8, 9], k=8, long=1000)
    assert (m.dense, m.many, m.single) == ([0], [], [1, 2])
    assert metadata([1], [2000], k=4000, long=1000).dense == [0]
