"""Rollouts: log-probabilities against transformers, weight updates, seeds, order, and what a dead engine says."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import ray
import torch
from conftest import INDEX_TOPK, character_tokenizer
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaIndexer

from rl.cluster import WorkerFailure, worker_environment
from rl.summary import summarise
from rl.trajectory import Prompt, Trajectory
from rollout.engine import Request, Sample, complete, sample_of
from rollout.pool import RolloutPool, request_seed, split
from rollout.weights import WeightMismatch, check_fit, checksum, expected_shapes

NEAR_TIE = 1e-5


def prompts(lengths: list[int], shared: int = 0, seed: int = 0) -> list[Prompt]:
    """Random prompts whose first `shared` tokens are the same."""
    rng = np.random.default_rng(seed)
    head = rng.integers(4, 100, shared)
    bodies = [np.concatenate([head, rng.integers(4, 100, n - shared)]).astype(np.int32) for n in lengths]
    return [Prompt(i, ids, text="") for i, ids in enumerate(bodies)]


def changed(weights: dict[str, Tensor], seed: int = 1) -> dict[str, Tensor]:
    """Other weights of the same names and shapes; the indexers stay, so index scores keep their scale."""
    generator = torch.Generator().manual_seed(seed)
    return {
        n: w if w.dim() < 2 or "indexer" in n else w + 0.3 * w.std() * torch.randn(w.shape, generator=generator)
        for n, w in weights.items()
    }


def identical(a: list[Trajectory], b: list[Trajectory]) -> bool:
    return all(
        np.array_equal(x.response_ids, y.response_ids) and np.array_equal(x.rollout_logprobs, y.rollout_logprobs)
        for x, y in zip(a, b, strict=True)
    )


# ------------------------------------------------------------------------------------------------ reference
@contextmanager
def stable_selection() -> Iterator[list[Tensor]]:
    """transformers' own indexer with ties broken as ours; yields, per Full layer, which queries met a near-tie."""
    stock_topk, stock_forward = Tensor.topk, GlmMoeDsaIndexer.forward
    near: list[Tensor] = []

    def topk(scores: Tensor, k: int, dim: int = -1):
        values, indices = torch.sort(scores, dim=dim, descending=True, stable=True)
        if scores.shape[-1] > k:
            kth, next_ = values[0, :, k - 1], values[0, :, k]
            # ReLU's exact zeros are ties on both sides alike: the stable order decides them, nothing is excused.
            near.append((kth - next_ < NEAR_TIE) & ~((kth == 0) & (next_ == 0)) & (next_ != float("-inf")))
        return torch.return_types.topk((values[..., :k], indices[..., :k]))

    def forward(*args: object, **kwargs: object) -> Tensor:
        Tensor.topk = topk  # type: ignore[method-assign]
        try:
            return stock_forward(*args, **kwargs)
        finally:
            Tensor.topk = stock_topk  # type: ignore[method-assign]

    GlmMoeDsaIndexer.forward = forward  # type: ignore[method-assign]
    try:
        yield near
    finally:
        GlmMoeDsaIndexer.forward = stock_forward  # type: ignore[method-assign]


def reference(path: str, weights: dict[str, Tensor] | None = None, **config: int):
    """transformers' stock model, eager, float32; `config` overrides its fields."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager", **config)
    if weights is not None:
        own = model.state_dict()
        for name, value in weights.items():
            if name in own:
                own[name].copy_(value)
    return model.eval()


@torch.no_grad()
def reference_logprobs(model, t: Trajectory, temperature: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities of the response, and which of its tokens have no near-tie at or before their query."""
    ids = torch.from_numpy(np.concatenate([t.prompt_ids, t.response_ids])).long()
    queries = slice(len(t.prompt_ids) - 1, len(ids) - 1)
    with stable_selection() as near:
        logits = model(ids[None], use_cache=False).logits[0, queries].double() / temperature
    logprobs = logits.log_softmax(-1).gather(1, ids[len(t.prompt_ids) :, None])[:, 0]
    met = torch.stack(near).any(0).cumsum(0) if near else torch.zeros(len(ids))
    return logprobs.numpy(), (met == 0)[queries].numpy()


def gaps(model, trajectories: list[Trajectory], temperature: float = 1.0) -> tuple[np.ndarray, float]:
    """|d log p| of the tokens without a near-tie upstream, and the share of tokens that were excused."""
    found, excused = [], []
    for t in trajectories:
        logprobs, clean = reference_logprobs(model, t, temperature)
        found.append(np.abs(t.rollout_logprobs - logprobs)[clean])
        excused.append(~clean)
    return np.concatenate(found), float(np.concatenate(excused).mean())


# ------------------------------------------------------------------------------------------------ parity
LENGTHS = [5, INDEX_TOPK, INDEX_TOPK + 1, 100, 200, 300, 400, 440]


def test_logprobs_equal_transformers_on_prompts_far_longer_than_index_topk(engine: RolloutPool) -> None:
    # Twice: the second time every prompt's blocks come out of the prefix cache.
    batch = engine.generate(prompts(LENGTHS), 2, step=0)
    shared = engine.generate(prompts([300, 350, 400, 440], shared=200, seed=1), 2, step=1)
    cached = engine.generate(prompts(LENGTHS), 2, step=2)
    assert {len(t.response_ids) for t in batch + shared + cached} & {32}
    path = engine.config.policy.path
    for some in (batch, shared, cached):
        gap, excused = gaps(reference(path), some)
        assert excused < 0.05
        assert gap.max() < 1e-4
        assert np.median(gap) < 1e-5
    # The selection is what is compared: dense attention says something else.
    dense = [np.abs(t.rollout_logprobs - reference_logprobs(reference(path, index_topk=10_000), t)[0]) for t in batch]
    assert np.median(np.concatenate(dense[-4:])) > 1e-2


def test_prefix_cache_is_used(engine: RolloutPool) -> None:
    """Without it the parity above would not have tested it."""
    (actor,) = engine.engines
    again = prompts([440], seed=7)[0].ids.tolist()
    request = Request(again, seed=0, temperature=1.0)
    first, second = (ray.get(actor.generate.remote([request], 1))[0].cached_tokens for _ in range(2))
    assert first == 0
    assert second >= 384


def test_logprobs_are_those_under_the_temperature(engine: RolloutPool) -> None:
    batch = engine.generate(prompts([60, 120], seed=2), 2, step=0, temperature=0.5)
    gap, excused = gaps(reference(engine.config.policy.path), batch, temperature=0.5)
    assert excused < 0.05
    assert gap.max() < 1e-4


# ------------------------------------------------------------------------------------------------ weights
def assert_round_trip(pool: RolloutPool, check_b: Callable[[list[Trajectory], dict[str, Tensor]], None]) -> None:
    """A -> B -> A gives A's outputs again, B's are B's own, and prompts are the same, so a stale cache would show."""
    weights = load_file(os.path.join(pool.config.policy.path, "model.safetensors"))
    other = changed(weights)
    asked = prompts([40, 200, 300], seed=3)
    try:
        pool.sync(weights, 1)
        a = pool.generate(asked, 2, step=0)
        pool.sync(other, 2)
        b = pool.generate(asked, 2, step=0)
    finally:
        pool.sync(weights, 3)
    again = pool.generate(asked, 2, step=0)
    assert identical(a, again)
    assert [t.policy_version for t in (a[0], b[0], again[0])] == [1, 2, 3]
    assert ray.get(pool.engines[0].version.remote()) == 3
    assert not identical(a, b)
    check_b(b, other)


def test_weights_a_b_a_with_experts(engine: RolloutPool) -> None:
    names = expected_shapes(engine.config.policy.path)
    assert any(".experts." in n for n in names)

    def check(b: list[Trajectory], other: dict[str, Tensor]) -> None:
        gap, excused = gaps(loaded(engine.config.policy.path, other), b)
        assert excused < 0.05
        assert gap.max() < 1e-4

    assert_round_trip(engine, check)


def loaded(path: str, weights: dict[str, Tensor]):
    """transformers' model of a folder with other weights in it."""
    return AutoModelForCausalLM.from_pretrained(
        None,
        config=reference(path).config,
        state_dict=dict(weights),
        dtype=torch.float32,
        attn_implementation="eager",
    ).eval()
