"""IndexShare: the schedule, the selection, and the training attention against transformers' own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaIndexer

from indexshare import distill
from indexshare.attention import install
from indexshare.indexer import prefers_gather
from indexshare.schedule import Schedule
from indexshare.selection import stable_topk, stable_topk_by_position, stable_topk_mask


# ------------------------------------------------------------------------------------------------ schedule
def test_glm_5_2_has_21_full_layers() -> None:
    schedule = Schedule.from_freq(78, freq=4, offset=3)
    assert len(schedule.full_layers) == 21
    assert schedule.pattern.startswith("FFFSSSFSSSF")
    assert schedule.served_layers()[2] == (2, 3, 4, 5)
    # Every layer is served by exactly one Full layer.
    assert sorted(i for layers in schedule.served_layers().values() for i in layers) == list(range(78))


@pytest.mark.parametrize(
    "schedule",
    [
        Schedule.from_pattern("FFSSSF"),
        Schedule.from_freq(6, 4, 2),
        Schedule.from_types(["full"] * 2 + ["shared"] * 4),
    ],
)
def test_config_round_trip_is_read_alike_by_transformers(schedule: Schedule) -> None:
    config = GlmMoeDsaConfig(num_hidden_layers=6, **schedule.config_fields())
    assert Schedule.from_config(config) == schedule
    # transformers derives the same types from the words that vLLM reads.
    silent = {k: v for k, v in schedule.config_fields().items() if k != "indexer_types"}
    assert GlmMoeDsaConfig(num_hidden_layers=6, **silent).indexer_types == list(schedule.types)


def test_write_replaces_another_spelling() -> None:
    config = GlmMoeDsaConfig(num_hidden_layers=6, **Schedule.from_freq(6, 4, 2).config_fields())
    Schedule.from_pattern("FSFSFS").write(config)
    assert Schedule.from_config(config).pattern == "FSFSFS"
    assert "index_topk_freq" not in config.to_dict()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Schedule.from_pattern("SFF"), "first layer is Shared"),
        (lambda: Schedule.from_pattern("FXF"), "'X'"),
        (lambda: Schedule.from_pattern("FSS", layers=4), "3 layers given, must be num_hidden_layers = 4"),
        (lambda: Schedule.from_types(["full", "half"]), "'half'"),
        (lambda: Schedule.from_types([]), "no layers"),
        (lambda: Schedule.from_freq(6, 0), "index_topk_freq: 0"),
        (lambda: Schedule.from_freq(6, 4, 0), "index_skip_topk_offset: 0"),
        (
            lambda: Schedule.from_config(
                {"num_hidden_layers": 2, "index_topk_freq": 1, "indexer_types": ["full", "shared"]}
            ),
            "they must agree",
        ),
        (
            lambda: Schedule.from_config({"num_hidden_layers": 2, "index_topk_pattern": "FS", "index_topk_freq": 1}),
            "they must agree",
        ),
        (
            # Without the words that vLLM reads, it takes every layer for Full.
            lambda: Schedule.from_config({"num_hidden_layers": 2, "indexer_types": ["full", "shared"]}),
            "vLLM",
        ),
    ],
)
def test_impossible_schedules_are_refused_in_one_line(make, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        make()
    assert "\n" not in str(error.value)


# ------------------------------------------------------------------------------------------------ selection
def slow_topk(scores: list[float], k: int) -> list[int]:
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:k]
    return [i if scores[i] != float("-inf") else -1 for i in order]


@pytest.mark.parametrize("k", [1, 3, 7, 50])
def test_selection_is_stable_and_both_forms_choose_the_same_keys(k: int) -> None:
    generator = torch.Generator().manual_seed(k)
    scores = torch.randint(-2, 3, (40, 7), generator=generator).relu().float()  # many ties at zero
    scores[torch.rand(40, 7, generator=generator) < 0.4] = float("-inf")
    expected = [slow_topk(row, k) for row in scores.tolist()]
    assert stable_topk(scores, k).tolist() == expected
    by_position = [sorted(set(row) - {-1}) for row in expected]
    padded = [row + [-1] * (min(k, 7) - len(row)) for row in by_position]
    assert stable_topk_by_position(scores, k).tolist() == padded
    chosen = [{i for i, on in enumerate(row) if on} for row in stable_topk_mask(scores, k).tolist()]
    assert chosen == [set(row) - {-1} for row in expected]


def test_selection_takes_leading_dimensions_and_refuses_no_keys() -> None:
    assert stable_topk(torch.zeros(2, 3, 5), 2).tolist() == [[[0, 1]] * 3] * 2
    for select in (stable_topk, stable_topk_mask):
        with pytest.raises(ValueError, match="k: 0"):
            select(torch.zeros(3), 0)


# ------------------------------------------------------------------------------------------------ attention
def tiny(dtype: torch.dtype, topk: int = 12) -> GlmMoeDsaForCausalLM:
    torch.manual_seed(0)
    config = GlmMoeDsaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=6,
        num_attention_heads=2, num_key_value_heads=2, n_routed_experts=4, num_experts_per_tok=2,
        kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=12, v_head_dim=10,
        first_k_dense_replace=1, index_topk=topk, index_head_dim=16, index_n_heads=2,
        max_position_embeddings=512, pad_token_id=0, initializer_range=0.2,
        **Schedule.from_pattern("FFSSSF").config_fields(),
    )  # fmt: skip
    model = GlmMoeDsaForCausalLM(config)
    model.config._attn_implementation = "eager"
    model.config._experts_implementation = "eager"
    return model.to(dtype).eval()


def packed(lengths: list[int], seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 50, (sum(lengths),), generator=generator)
    positions = torch.cat([torch.arange(n) for n in lengths])
    return ids, positions, torch.arange(sum(lengths)) - positions


def run(model: GlmMoeDsaForCausalLM, lengths: list[int]) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits [tokens, vocab] and gradients of a packed batch under a fixed random loss."""
    ids, positions, starts = packed(lengths)
    model.zero_grad()
    hidden = model.model(
        input_ids=ids[None],
        position_ids=positions[None],
        attention_mask={"indexed_attention": starts},
        use_cache=False,
    ).last_hidden_state[0]
    return finish(model, hidden)


def finish(model: GlmMoeDsaForCausalLM, hidden: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    logits = model.lm_head(hidden)
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)).to(logits.dtype)
    (logits * weights).sum().backward()
    return logits.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_close(got: tuple[Tensor, dict[str, Tensor]], want: tuple[Tensor, dict[str, Tensor]], rtol: float) -> None:
    """Equal up to `rtol` of each tensor's norm."""
    assert got[1].keys() == want[1].keys()
    for name, a, b in [("logits", got[0], want[0]), *((n, got[1][n], want[1][n]) for n in want[1])]:
        error = (a - b).norm() / b.norm().clamp(min=1e-30)
        assert error < rtol, f"{name}: {error:.1e}"


@pytest.fixture
def stable_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' own attention, but with ties broken as we break them and nothing rounded to float32."""
    stock = Tensor.topk

    def topk(scores: Tensor, k: int, dim: int = -1, **rest: bool):
        if scores.dim() != 3:  # the router's
            return stock(scores, k, dim=dim, **rest)
        values, indices = torch.sort(scores, dim=dim, descending=True, stable=True)
        return torch.return_types.topk((values[..., :k], indices[..., :k]))

    forward = GlmMoeDsaIndexer.forward

    def patched(*args: object, **kwargs: object) -> Tensor:
        with monkeypatch.context() as inside:
            inside.setattr(Tensor, "topk", topk)
            inside.setattr(Tensor, "float", lambda self: self)
            return forward(*args, **kwargs)

    monkeypatch.setattr(GlmMoeDsaIndexer, "forward", patched)
    monkeypatch.setattr(torch.nn.functional, "softmax", lambda scores, dim, dtype=None: scores.softmax(dim))


@pytest.mark.usefixtures("stable_transformers")
@pytest.mark.parametrize("form", ["masked", "gather"])
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-6), (torch.float32, 1e-5)])
def test_forward_and_gradient_equal_transformers_eager(form: str, dtype: torch.dtype, rtol: float) -> None:
    length = 150  # two chunks of the masked form, and far more than 12 keys
    model = tiny(dtype)
    ids = packed([length])[0]
    want = finish(model, model.model(input_ids=ids[None], use_cache=False).last_hidden_state[0])
    want = (want[0], {n: g.clone() for n, g in want[1].items()})
    install(model, form)
    assert_close(run(model, [length]), want, rtol)
    # The selection matters here: dense attention is something else.
    assert (run(install(tiny(dtype, topk=1000), form), [length])[0] - want[0]).norm() / want[0].norm() > 1e-2


@pytest.mark.usefixtures("stable_transformers")
@pytest.mark.parametrize("form", ["masked", "gather"])
def test_as_many_keys_as_tokens_is_dense_attention(form: str) -> None:
    """transformers' attention with its indexer taken out of the sum: every query is given every key."""
    model, length = tiny(torch.float64, topk=60), 60
    everything = torch.arange(length, dtype=torch.int32).expand(1, length, length)
    for layer in model.model.layers:
        if layer.self_attn.indexer is not None:
            layer.self_attn.indexer.forward = lambda *_, **__: everything
    ids = packed([length])[0]
    want = finish(model, model.model(input_ids=ids[None], use_cache=False).last_hidden_state[0])
    want = (want[0], {n: g.clone() for n, g in want[1].items()})
    for topk in (60, 1000):
        assert_close(run(install(tiny(torch.float64, topk), form), [length]), want, 1e-6)


@pytest.mark.parametrize("form", ["masked", "gather"])
def test_packed_equals_separate(form: str) -> None:
    lengths = [40, 7, 133, 1, 40]
    model = install(tiny(torch.float64), form)
    together, gradients = run(model, lengths)
    ids, positions, _ = packed(lengths)
    at = 0
    for n in lengths:
        part = slice(at, at + n)
        hidden = model.model(
            input_ids=ids[None, part],
            position_ids=positions[None, part],
            attention_mask={"indexed_attention": torch.zeros(n, dtype=torch.long)},
            use_cache=False,
        ).last_hidden_state[0]
        assert torch.allclose(model.lm_head(hidden), together[part], rtol=0, atol=1e-6)  # routers compute in float32
        at += n
    assert gradients.keys() >= {"model.layers.3.self_attn.kv_b_proj.weight"}


def test_gather_equals_masked_and_the_indexer_gets_no_gradient() -> None:
    lengths = [60, 140, 3]
    masked, gather = (run(install(tiny(torch.float64), form), lengths) for form in ("masked", "gather"))
    assert_close(gather, masked, 1e-9)
    assert not any("indexer" in name for name in masked[1])


@pytest.mark.parametrize("form", ["masked", "gather"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_changes_nothing(form: str, reentrant: bool) -> None:
    lengths = [60, 140, 3]
    want = run(install(tiny(torch.float64), form).train(), lengths)
    model = install(tiny(torch.float64), form).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    assert_close(run(model, lengths), want, 1e-12)


def test_the_form_follows_the_context_per_selected_key() -> None:
    assert not prefers_gather((0, 250, 500), 32)
    assert prefers_gather((0, 260, 520), 32)
    # The micro-batch as a whole decides: one long trajectory among short ones.
    assert prefers_gather((0, 100, 200, 1200), 32)


def test_wrong_calls_say_how_to_call() -> None:
    model = install(tiny(torch.float32))
    ids = packed([20])[0]
    with pytest.raises(ValueError, match="indexed_attention"):
        model(input_ids=ids[None], use_cache=False)
    with pytest.raises(ValueError, match="GlmMoeDsa"):
        install(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="index_topk: 0 given, must be at least 1"):
        install(tiny(torch.float32, topk=0))
    contradicting = tiny(torch.float32)
    contradicting.config.index_topk_pattern = "FFFFFF"
    with pytest.raises(ValueError, match="index_topk_pattern says FFFFFF, indexer_types says FFSSSF"):
        install(contradicting)


# ------------------------------------------------------------------------------------------------
# distillation
def test_distillation_is_the_kl_to_the_mean_attention_and_teaches_the_indexers() -> None:
    model = install(tiny(torch.float64, topk=8))
    ids, positions, starts = packed([90, 40])
    inputs = distill.record(model, ids, positions, starts)
    small = distill.backward(model, inputs, starts, chunk_size=16)
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    assert all("indexer" in name for name in gradients)
    model.zero_grad()
    whole = distill.backward(model, inputs, starts, chunk_size=1000)
    for name, gradient in gradients.items():
        assert torch.allclose(model.get_parameter(name).grad, gradient, rtol=1e-9, atol=1e-14)
    assert small.keys() == whole.keys() == {0, 1, 5}

    before = distill.recall(model, inputs, starts, k=8)
    indexers = [p for n, p in model.named_parameters() if "indexer" in n]
    optimizer = torch.optim.Adam(indexers, lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        losses = distill.backward(model, inputs, starts)
        optimizer.step()
    after = distill.recall(model, inputs, starts, k=8)
    assert all(losses[full] < whole[full] for full in losses)
    assert sum(after) > sum(before) + 0.3
