"""Rollouts: log-probabilities against transformers, weight updates, seeds, order, and what a dead engine says."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import ray
import torch
from conftest import INDEX_TOPK, character_tokenizer
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GlmMoeDsaConfig, LlamaConfig, LlamaForCausalLM
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaIndexer

from rl.cluster import WorkerFailure, worker_environment
from rl.config import Config
from rl.summary import summarise
from rl.trajectory import Prompt, Trajectory
from rollout.engine import Request, Sample, complete, request_seed, sample_of
from rollout.pool import RolloutPool, split
from rollout.vllm_plugin.native import fits_native_kernels
from rollout.weights import WeightMismatch, checksum, expected_shapes

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
            legal = next_ > torch.finfo(scores.dtype).min / 2  # transformers' mask is finite
            near.append((kth - next_ < NEAR_TIE) & ~((kth == 0) & (next_ == 0)) & legal)
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


def reference(path: str, **config: int):
    """transformers' stock model, eager, float32; `config` overrides its fields."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager", **config).eval()


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
    request = Request(again, seed=0, temperature=1.0, max_tokens=1)
    first, second = (ray.get(actor.generate.remote([request]))[0].cached_tokens for _ in range(2))
    assert first == 0
    assert second >= 384


def test_logprobs_are_those_under_the_temperature(engine: RolloutPool) -> None:
    batch = engine.generate(prompts([60, 120], seed=2), 2, step=0, temperature=0.5)
    gap, excused = gaps(reference(engine.config.policy.path), batch, temperature=0.5)
    assert excused < 0.05
    assert gap.max() < 1e-4


def test_which_models_take_vllms_gpu_kernels(tiny_policy_dir: Path) -> None:
    """GLM-5.2's sizes in bfloat16, and nothing else."""
    assert fits_native_kernels(GlmMoeDsaConfig(), torch.bfloat16)
    assert not fits_native_kernels(GlmMoeDsaConfig(), torch.float32)
    assert not fits_native_kernels(GlmMoeDsaConfig.from_pretrained(tiny_policy_dir), torch.bfloat16)


# ------------------------------------------------------------------------------------------------ weights
def assert_weights_round_trip(pool: RolloutPool, folder: Path) -> None:
    """A -> B -> A: B's outputs are B's own, and A's come back to the bit.

    All three answer the same prompts, so that a prompt cached under other weights would show.
    """
    weights = load_file(Path(pool.config.policy.path) / "model.safetensors")
    other = changed(weights)
    shutil.copytree(pool.config.policy.path, folder)
    save_file(other, folder / "model.safetensors", metadata={"format": "pt"})
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
    for path, batch in ((pool.config.policy.path, a), (str(folder), b)):
        gap, excused = gaps(reference(path), batch)
        assert excused < 0.05
        assert gap.max() < 1e-4


def test_weight_updates_of_experts(engine: RolloutPool, tmp_path: Path) -> None:
    assert any(".experts." in name for name in engine.shapes)
    assert_weights_round_trip(engine, tmp_path / "other")


def test_weight_updates_of_a_tied_head(tied: RolloutPool, tmp_path: Path) -> None:
    assert "lm_head.weight" not in tied.shapes
    assert_weights_round_trip(tied, tmp_path / "other")


@pytest.fixture(scope="module")
def tied(ray_session: None, tmp_path_factory: pytest.TempPathFactory, rollout_config: Config) -> Iterator[RolloutPool]:
    """An engine with a random dense model whose head is its embedding."""
    folder = tmp_path_factory.mktemp("tied") / "model"
    torch.manual_seed(0)
    model = LlamaConfig(
        vocab_size=100, hidden_size=128, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True, initializer_range=0.15, max_position_embeddings=1024,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(model).save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    config = deepcopy(rollout_config)
    config.policy.path = str(folder)
    pool = start(config)
    yield pool
    for actor in pool.engines:
        ray.kill(actor)


def start(config: Config) -> RolloutPool:
    """A pool of one engine."""
    options = {"num_cpus": 0.5, "runtime_env": {"env_vars": worker_environment(config)}}
    pool = RolloutPool.start(config, [options])
    pool.wait_ready()
    return pool


def test_weights_that_do_not_fit_are_refused_and_the_engine_lives(engine: RolloutPool) -> None:
    weights = load_file(Path(engine.config.policy.path) / "model.safetensors")
    name = "model.layers.1.mlp.experts.0.up_proj.weight"
    version, asked = engine.version, prompts([30], seed=4)
    before = engine.generate(asked, 1, step=0)
    wrong = {
        "missing": {n: w for n, w in weights.items() if n != name},
        "unknown": weights | {"model.layers.9.mlp.gate.weight": weights[name]},
        "engine has": weights | {name: weights[name].T.contiguous()},
    }
    for message, case in wrong.items():
        with pytest.raises(WeightMismatch, match=message):
            engine.sync(case, version + 1)
    assert engine.version == version
    assert identical(before, engine.generate(asked, 1, step=0))


def test_expected_names_come_from_all_shards_without_the_speculative_layer(tmp_path: Path) -> None:
    first, second = (
        {"model.layers.0.w": torch.ones(2, 3)},
        {"model.layers.1.w": torch.ones(3), "lm_head.weight": torch.ones(4)},
    )
    for file, tensors in {"a.safetensors": first, "b.safetensors": second, "original.safetensors": first}.items():
        save_file(tensors, tmp_path / file)
    places = dict.fromkeys(first, "a.safetensors") | dict.fromkeys(second, "b.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 1}')
    assert expected_shapes(str(tmp_path)) == {"model.layers.0.w": (2, 3), "lm_head.weight": (4,)}


def test_an_engine_that_received_other_bytes_is_found_out(engine: RolloutPool, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = load_file(Path(engine.config.policy.path) / "model.safetensors")
    monkeypatch.setattr("rollout.pool.checksum", lambda named: "0" * 32)
    with pytest.raises(RuntimeError, match=r"rollout\[0\].*received weights with checksum [0-9a-f]{32}, sent 0000"):
        engine.sync(weights, 9)


def test_checksum_sees_every_difference_but_order() -> None:
    a = {"x": torch.arange(6.0).view(2, 3), "y": torch.ones(2, dtype=torch.bfloat16)}
    strided = torch.arange(6.0).view(2, 3).T.contiguous().T
    assert not strided.is_contiguous()
    assert checksum(a.items()) == checksum(reversed(a.items())) == checksum({"x": strided, "y": a["y"]}.items())
    others = [
        {"z": a["x"], "y": a["y"]},
        {"x": a["x"].view(3, 2), "y": a["y"]},
        {"x": a["x"].view(torch.int32), "y": a["y"]},
        {"x": a["x"] + torch.tensor([0, 0, 1e-6]), "y": a["y"]},
        {"x": a["x"]},
    ]
    assert len({checksum(o.items()) for o in [a, *others]}) == 6


# ------------------------------------------------------------------------------------------------ pool
def test_order_seeds_and_number_of_engines(engine: RolloutPool, pair: RolloutPool) -> None:
    asked = prompts([30, 200, 90, 30, 300], seed=5)
    asked[3] = replace(asked[3], ids=asked[0].ids)  # the same text twice is two groups
    one = engine.generate(asked, 3, step=4)
    assert [(t.prompt_index, t.sample_index) for t in one] == [(p, s) for p in range(5) for s in range(3)]
    assert all(np.array_equal(t.prompt_ids, asked[t.prompt_index].ids) for t in one)
    two = pair.generate(asked, 3, step=4)
    for x, y in zip(one, two, strict=True):
        assert np.array_equal(x.response_ids, y.response_ids)
        assert np.abs(x.rollout_logprobs - y.rollout_logprobs).max() < 1e-4
    tokenizer = AutoTokenizer.from_pretrained(engine.config.policy.path)
    assert [t.text for t in one] == [tokenizer.decode(t.response_ids, skip_special_tokens=True) for t in one]
    texts = {t.text for t in one}
    assert len(texts) == len(one)
    assert not texts & {t.text for t in engine.generate(asked, 3, step=5)}


def test_a_sample_does_not_depend_on_how_its_prompt_was_cut(engine: RolloutPool) -> None:
    """Alone, a prompt of 300 tokens comes in three chunks; cached, in one; vLLM draws a token after each."""
    asked = prompts([300], seed=8)
    cut = engine.generate(asked, 1, step=0)
    cached = engine.generate(asked, 1, step=0)
    assert np.array_equal(cut[0].response_ids, cached[0].response_ids)


@pytest.fixture(scope="module")
def pair(engine: RolloutPool) -> Iterator[RolloutPool]:
    """The shared engine and a second one."""
    second = start(engine.config)
    names = [*engine.names, second.names[0].replace("[0]", "[1]")]
    yield RolloutPool(engine.config, engine.engines + second.engines, names, engine.shapes)
    for actor in second.engines:
        ray.kill(actor)


def test_request_seeds_differ_in_everything_that_is_asked() -> None:
    asked = [(r, s, p, n) for r in (0, 1) for s in (-1, 0, 11) for p in (0, 1, 11) for n in (0, 1)]
    seeds = {request_seed(*a) for a in asked}
    assert len(seeds) == len(asked)
    assert all(0 <= s < 2**63 for s in seeds)


def test_prompts_are_shared_out_by_tokens() -> None:
    shares = split(prompts([400, 100, 100, 100, 100, 20]), 2)
    assert sorted(i for share in shares for i in share) == list(range(6))
    assert {tuple(sorted(share)) for share in shares} == {(0, 5), (1, 2, 3, 4)}
    assert split(prompts([9]), 2) == [[0], []]


def test_fewer_prompts_than_engines(pair: RolloutPool) -> None:
    assert len(pair.generate(prompts([20]), 2, step=0)) == 2


def test_responses_cut_by_the_budget_are_truncated_not_ended(engine: RolloutPool) -> None:
    """Worked value 13."""
    batch = engine.generate(prompts([24] * 40, seed=6), 1, step=0)
    stopped = [t for t in batch if t.finish_reason == "stop"]
    cut = [t for t in batch if t.finish_reason == "length"]
    assert len(stopped) >= 2
    assert len(cut) >= 2
    # The stop token is sampled and part of the response; none is forged where the budget ended it.
    assert all(t.response_ids[-1] == 2 and 2 not in t.response_ids[:-1] for t in stopped)
    assert all(2 not in t.response_ids and len(t.response_ids) == 32 for t in cut)
    four = [replace(t, score=1.0) for t in (*stopped[:2], *cut[:2])]
    assert summarise(four)["rollout/truncated"] == 0.5


def output(reason: str, tokens: list[int], logprobs: list[dict[int, float]]) -> SimpleNamespace:
    """A request's output as vLLM returns it."""
    entries = [{t: SimpleNamespace(logprob=v) for t, v in entry.items()} for entry in logprobs]
    completion = SimpleNamespace(finish_reason=reason, token_ids=tokens, logprobs=entries, text="")
    return SimpleNamespace(outputs=[completion], num_cached_tokens=None)


def test_the_sampled_tokens_logprob_is_stored() -> None:
    """Worked value 6."""
    sample = sample_of(output("stop", [880], [{512: -0.11, 880: -2.30}]))
    assert sample is not None
    assert sample.logprobs.dtype == np.float32
    assert sample.logprobs.tolist() == pytest.approx([-2.30])


def test_aborted_requests_are_generated_again_and_keep_their_place() -> None:
    asked: list[list[int]] = []

    def generate(requests: list[Request]) -> list[Sample | None]:
        """Aborts the request with seed 1 at first, the one with seed 9 always."""
        asked.append([q.seed for q in requests])
        aborted = {9} | ({1} if len(asked) == 1 else set())
        reasons = ["abort" if q.seed in aborted else "stop" for q in requests]
        return [sample_of(output(r, [q.seed], [{q.seed: -1.0}])) for r, q in zip(reasons, requests, strict=True)]

    def requests(*seeds: int) -> list[Request]:
        return [Request([3], seed, 1.0, 1) for seed in seeds]

    assert [s.ids.tolist() for s in complete(generate, requests(0, 1, 2))] == [[0], [1], [2]]
    assert asked == [[0, 1, 2], [1]]
    with pytest.raises(RuntimeError, match="1 of 2 requests were aborted 3 times"):
        complete(generate, requests(0, 9))


# ------------------------------------------------------------------------------------------------ faults
def test_a_dead_engine_is_one_error_with_actor_role_node_and_cause(pair: RolloutPool) -> None:
    """Last of those that use `pair`: it takes the second engine."""
    os.kill(ray.get(pair.engines[1].pid.remote()), signal.SIGKILL)
    with pytest.raises(WorkerFailure) as error:
        pair.generate(prompts([20, 20]), 1, step=0)
    message = str(error.value)
    assert "\n" not in message
    for part in ("rollout[1]", "role rollout", f"node {ray.util.get_node_ip_address()}", "died"):
        assert part in message


def test_an_engine_that_cannot_start_says_why(ray_session: None, rollout_config: Config, tmp_path: Path) -> None:
    config = deepcopy(rollout_config)
    shutil.copytree(config.policy.path, tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "no_such_model"}')
    config.policy.path = str(tmp_path / "model")
    with pytest.raises(WorkerFailure, match=r"rollout\[0\] .*role rollout, node .*no_such_model") as error:
        start(config)
    assert "\n" not in str(error.value)
