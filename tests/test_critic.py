"""The critic: what trains and what does not, experts against a slow loop, equal gradients however they are computed."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    Qwen2Config,
    Qwen2Model,
)

import critic.model
from critic.experts import ExpertBlock, Experts, Routing, balance_loss, expert_counts, running_mean
from critic.model import ValueModel, build, parameter_counts
from critic.trunk import cut, upper_states
from critic.worker import check_precision, critic_loss, expert_shares, learner_settings
from rl.backbone import hidden_states
from rl.config import Config, ConfigError, CriticConfig, DeepSpeedConfig, ExpertsConfig
from rl.config_load import load
from rl.learner import disable_dropout, per_response
from rl.trajectory import Batch, Trajectory, pack


def trajectory(i: int, prompt: int, response: int, vocabulary: int = 64) -> Trajectory:
    rng = np.random.default_rng(i)
    return Trajectory(
        prompt_index=i,
        sample_index=0,
        prompt_ids=rng.integers(0, vocabulary, prompt).astype(np.int32),
        response_ids=rng.integers(0, vocabulary, response).astype(np.int32),
        action_mask=np.arange(response) % 4 != 1,
        rollout_logprobs=np.zeros(response, np.float32),
        finish_reason="stop",
        policy_version=0,
        score=float(rng.normal()),
        values=rng.normal(size=response + 1).astype(np.float32),
        value_targets=rng.normal(size=response).astype(np.float32),
        loss_weight=0.03,
    )


PACK = [trajectory(0, 5, 7), trajectory(1, 30, 1), trajectory(2, 1, 20), trajectory(3, 9, 0), trajectory(4, 3, 12)]


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Four dense layers, dropout in the config."""
    folder = tmp_path_factory.mktemp("critic") / "llama"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        attention_dropout=0.3,
        initializer_range=0.15,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(params=["llama", "indexshare"])
def folder(request: pytest.FixtureRequest) -> str:
    """A dense backbone and a sparse one with experts (layers F F S S S F)."""
    return str(request.getfixturevalue("llama" if request.param == "llama" else "tiny_policy_dir"))


def model_of(folder: str, seed: int = 0, **critic: Any) -> ValueModel:
    """A critic whose head and experts already say something."""
    torch.manual_seed(seed)
    model = build(CriticConfig(**({"freeze": "none"} | critic)), folder)
    disable_dropout(model)
    model.train()
    torch.manual_seed(seed + 1)
    with torch.no_grad():
        torch.nn.init.normal_(model.head.weight, std=0.1)
        for module in (model.experts or torch.nn.Identity()).modules():
            if isinstance(module, Experts):
                module.router.mul_(20)
                torch.nn.init.normal_(module.down, std=0.1)
    return model


ENCODER = {"freeze": "encoder"}
ATTENTION = {"freeze": "attention", "first_trainable_layer": 2}
UPCYCLED = {**ATTENTION, "experts": ExpertsConfig(upcycle=True, count=4)}
ATTENTION_EXPERTS = {**ATTENTION, "experts": ExpertsConfig(blocks=1, count=4)}
MODES: dict[str, dict[str, Any]] = {
    "none": {},
    "encoder": ENCODER,
    "attention": ATTENTION,
    "attention from 0": {"freeze": "attention"},
    "upcycled": UPCYCLED,
    "attention and experts": ATTENTION_EXPERTS,
}


def gradients(model: ValueModel, batches: list[Batch], shares: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """The gradient of the critic's loss, summed over micro-batches."""
    model.zero_grad()
    for batch in batches:
        critic_loss(Config(), model, batch, shares)[0].backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = float(gradient.abs().max()) + 1e-12
        torch.testing.assert_close(found[name] / scale, gradient / scale, atol=tolerance, rtol=0, msg=name)


# Experts


def slow(x: torch.Tensor, experts: Experts) -> torch.Tensor:
    """Token by token, expert by expert, in float64."""
    router, gate_up, down = (p.double() for p in (experts.router, experts.gate_up, experts.down))
    rows = []
    for token in x.double():
        probabilities = torch.softmax(router @ token, -1)
        best = sorted(range(len(router)), key=lambda e, p=probabilities: -p[e].item())[: experts.top_k]
        total = sum(probabilities[e] for e in best)
        row = torch.zeros_like(token)
        for e in best:
            gate, up = (gate_up[e] @ token).chunk(2)
            row = row + probabilities[e] / total * (down[e] @ (F.silu(gate) * up))
        rows.append(row)
    return torch.stack(rows)


def random_experts(seed: int, count: int, top_k: int, dtype: torch.dtype = torch.float32) -> Experts:
    torch.manual_seed(seed)
    experts = Experts(16, 8, count, top_k, dtype)
    with torch.no_grad():
        experts.router.mul_(40)
        experts.down.normal_()
    return experts


@settings(max_examples=15)
@given(st.integers(0, 99), st.integers(1, 9), st.sampled_from([(1, 1), (2, 2), (3, 2), (8, 3)]))
def test_experts_are_the_slow_loop_in_value_and_gradient(seed: int, tokens: int, sizes: tuple[int, int]) -> None:
    experts = random_experts(seed, *sizes)
    x = torch.randn(tokens, 16, requires_grad=True)
    upstream = torch.randn(tokens, 16)
    leaves = [x, *experts.parameters()]
    fast = torch.autograd.grad((experts(x)[0] * upstream).sum(), leaves, allow_unused=True)
    reference = torch.autograd.grad((slow(x, experts) * upstream).sum(), leaves, allow_unused=True)
    torch.testing.assert_close(experts(x)[0].double(), slow(x, experts), atol=1e-5, rtol=1e-5)
    for found, expected in zip(fast, reference, strict=True):
        expected = torch.zeros_like(found) if expected is None else expected
        torch.testing.assert_close(found, expected.float(), atol=1e-5, rtol=1e-4)


def test_no_token_is_dropped_where_all_want_the_same_expert() -> None:
    experts = random_experts(0, 8, 1)
    x = torch.randn(1, 16).expand(500, 16)
    y, routing = experts(x)
    assert len(routing.chosen.unique()) == 1
    torch.testing.assert_close(y, slow(x[:1], experts).float().expand(500, 16), atol=1e-5, rtol=1e-5)


def test_a_new_block_is_the_identity() -> None:
    x = torch.randn(5, 16)
    assert torch.equal(ExpertBlock(16, Experts(16, 8, 4, 2))(x)[0], x)


# Load balance


def test_the_balance_loss_of_two_tokens_by_hand() -> None:
    # Shares 3/4 and 1/4, mean probabilities .7 and .3: 2 * (.75 * .7 + .25 * .3).
    routing = Routing(torch.tensor([[[0.9, 0.1], [0.5, 0.5]]]), torch.tensor([[[0], [1]]]))
    shares = torch.tensor([[0.75, 0.25]])
    assert float(balance_loss(routing, shares).mean()) == pytest.approx(1.2)
    even = torch.full((1, 2), 0.5)
    assert balance_loss(routing, even).tolist() == pytest.approx([1.0, 1.0])


def test_shares_count_action_tokens_only() -> None:
    routing = Routing(torch.zeros(1, 3, 4), torch.tensor([[[0, 1], [2, 3], [0, 2]]]))
    counts = expert_counts(routing, torch.tensor([True, False, True]))
    assert counts.tolist() == [[2, 1, 1, 0]]
    assert expert_shares(counts).tolist() == [[0.5, 0.25, 0.25, 0]]
    assert expert_shares(torch.zeros(1, 4)).tolist() == [[0.25] * 4]


@pytest.mark.parametrize("mode", ["encoder", "upcycled", "attention and experts"])
def test_the_gradient_is_the_same_for_any_split_balance_included(llama: str, mode: str) -> None:
    model = model_of(llama, **MODES[mode])
    whole = gradients(model, [pack(PACK)])
    routing, mask = model(pack(PACK))[2], pack(PACK).action_mask
    shares = expert_shares(expert_counts(routing, mask))
    for split in ([PACK[:2], PACK[2:]], [[t] for t in PACK if t.actions]):
        assert_close(gradients(model, [pack(part) for part in split], shares), whole)
    # Shares of a part are others: the test could not tell if they did not matter.
    apart = gradients(model, [pack(part) for part in (PACK[:2], PACK[2:])])
    with pytest.raises(AssertionError):
        assert_close(apart, whole)


def test_the_balance_loss_moves_routers_towards_even_use(llama: str) -> None:
    model = model_of(llama, freeze="encoder", trunk_layers=4, experts=ExpertsConfig(blocks=1, count=4))
    config = Config()
    config.critic.experts.balance_coefficient = 100.0
    batch, loads = pack(PACK), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(60):
        loss, stats = critic_loss(config, model, batch, None)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loads.append(stats.maxima["critic/expert_load_max"])
    assert loads[0] > 1.2
    assert loads[-1] < 1.1


# What trains and what does not

TRAINS = {
    "none": lambda name: ".indexer." not in name and not name.endswith(".mlp.gate.weight"),
    "encoder": lambda name: True,
    "attention": lambda name: "head" in name or (".mlp." in name and not name.endswith(".mlp.gate.weight")),
}


@pytest.mark.parametrize("mode", ["none", "encoder", "attention"])
def test_the_gradient_reaches_what_trains_and_nothing_else(folder: str, mode: str) -> None:
    model = model_of(folder, **MODES[mode])
    reached = {n for n, g in gradients(model, [pack(PACK)]).items() if g.abs().max() > 0}
    should = {n for n, _ in model.named_parameters() if TRAINS[mode](n)}
    if mode == "attention":  # from layer 2 on, counted from where the trunk ends
        assert model.trunk is not None
        lowest = 2 - len(model.trunk.backbone.layers)
        should = {n for n in should if "layers." not in n or int(n.split("layers.")[1].split(".")[0]) >= lowest}
    # An expert that no token went to has no gradient; everything else must have one.
    if model.backbone is not None and getattr(model.backbone.config, "num_local_experts", 0):
        assert {n for n in should if "embed_tokens" not in n} == {n for n in reached if "embed_tokens" not in n}
    else:
        assert reached == should


def digest(folder: str) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in Path(folder).iterdir()}


@pytest.mark.parametrize("mode", ["encoder", "attention", "upcycled"])
def test_frozen_weights_and_the_policy_keep_their_bytes(folder: str, mode: str) -> None:
    files = digest(folder)
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = model_of(folder, **MODES[mode])
    frozen = {n: p for n, p in model.named_parameters() if not p.requires_grad}
    assert model.trunk is not None
    frozen |= {f"trunk.{n}": p for n, p in model.trunk.backbone.named_parameters()}
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    before = {n: p.detach().clone() for n, p in (frozen | trained).items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for _ in range(3):
        gradients(model, [pack(PACK)])
        optimizer.step()
    assert all(torch.equal(p, before[n]) for n, p in frozen.items())
    assert not any(torch.equal(p, before[n]) for n, p in trained.items() if n != "head.bias")
    assert digest(folder) == files
    again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(policy.parameters(), again.parameters(), strict=True))


def test_counts_say_what_trains_by_part(llama: str) -> None:
    plain = parameter_counts(build(CriticConfig(freeze="none"), llama))
    assert plain == {"trained/backbone": 4 * 32 * (4 * 32 + 3 * 64 + 2) + 64 * 32 + 32, "trained/head": 33}
    encoder = parameter_counts(build(CriticConfig(**ENCODER), llama))
    block = 8 * 32 + 8 * 3 * 32 * 64 + 32
    assert encoder == {
        "frozen/trunk": 2 * 32 * (4 * 32 + 3 * 64 + 2) + 64 * 32,  # a third of four layers, without the last norm
        "trained/experts": 2 * block + 32 * 32 + 32,
        "trained/head": 33,
    }
    attention = parameter_counts(build(CriticConfig(**ATTENTION), llama))
    assert attention["trained/backbone"] == 2 * 3 * 32 * 64
    assert sum(attention.values()) == sum(plain.values())


# What it computes


@pytest.mark.parametrize("mode", MODES)
def test_a_packed_trajectory_sees_no_other(folder: str, mode: str) -> None:
    model = model_of(folder, **MODES[mode])
    batch = pack(PACK)
    with torch.no_grad():
        before, after, _ = model(batch)
    for t, v, end in zip(PACK, per_response(batch, before), after, strict=True):
        if model.trunk is not None:
            model.trunk.new_step()
        with torch.no_grad():
            alone = model(pack([t]))
        np.testing.assert_allclose(v, alone[0].numpy(), atol=2e-5)
        assert float(end) == pytest.approx(float(alone[1]), abs=2e-5)


@pytest.mark.parametrize("first", [0, 1, 2, 3])
def test_where_the_trunk_ends_does_not_change_the_value(folder: str, first: int) -> None:
    plain = model_of(folder)
    model = model_of(folder, freeze="attention", first_trainable_layer=first)
    for found, expected in zip(model(pack(PACK))[:2], plain(pack(PACK))[:2], strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert (model.trunk is None) == (first == 0)


def test_an_encoder_without_blocks_is_a_linear_probe(folder: str) -> None:
    layers = len(model_of(folder).backbone.layers)
    probe = model_of(folder, freeze="encoder", trunk_layers=layers, experts=ExpertsConfig(blocks=0))
    torch.testing.assert_close(probe(pack(PACK))[0], model_of(folder)(pack(PACK))[0], atol=1e-5, rtol=1e-5)
    assert probe(pack(PACK))[2] is None


def test_a_trunk_cut_at_a_shared_layer_ends_before_the_full_one(tiny_policy_dir: Path) -> None:
    model = model_of(str(tiny_policy_dir), freeze="attention", first_trainable_layer=4)
    assert model.trunk is not None
    assert len(model.trunk.backbone.layers) == 1  # F | F S S S F
    trained = {n.split(".")[2] for n, p in model.named_parameters() if p.requires_grad and "layers" in n}
    assert trained == {"3", "4"}  # counted from the cut


def test_an_upcycled_mlp_is_the_dense_one_until_it_learns(llama: str) -> None:
    dense = model_of(llama, **ATTENTION)
    experts = model_of(llama, **UPCYCLED)
    torch.testing.assert_close(experts(pack(PACK))[0], dense(pack(PACK))[0], atol=1e-5, rtol=1e-5)
    assert experts(pack(PACK))[2].probabilities.shape == (2, 40, 4)
    down = experts.backbone.layers[0].mlp.experts.down
    before = down.detach().clone()
    gradients(experts, [pack(PACK)])
    torch.optim.SGD([down], lr=1.0).step()
    assert not any(torch.equal(a - b, (down - before)[0]) for a, b in zip(down[1:], before[1:], strict=True))


def test_a_reward_models_folder_serves_as_trunk(llama: str, tmp_path: Path) -> None:
    torch.manual_seed(5)
    config = LlamaConfig.from_pretrained(llama, num_labels=1)
    reward = LlamaForSequenceClassification(config)
    reward.save_pretrained(tmp_path)
    model = build(CriticConfig(path=str(tmp_path), trunk_layers=4, **ENCODER), llama)
    expected = hidden_states(reward.model.eval(), pack(PACK[:1]))[4:]
    torch.testing.assert_close(model.trunk.states(pack(PACK[:1])), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_the_trunk_is_the_backbones_lower_layers(folder: str, layers: int) -> None:
    """Their output, Shared layers' selection included, and a third of them if nothing is said."""
    model = model_of(folder, freeze="encoder", trunk_layers=layers)
    whole = model_of(folder).backbone
    passed: list[Any] = []
    whole.layers[layers - 1].register_forward_hook(lambda _, __, out: passed.append(out))
    hidden_states(whole, pack(PACK[:1]))
    expected = passed[0] if isinstance(passed[0], torch.Tensor) else passed[0][0]
    torch.testing.assert_close(model.trunk.states(pack(PACK[:1])), expected[0, 4:], atol=1e-5, rtol=1e-5)
    third = model_of(folder, freeze="encoder")
    assert len(third.trunk.backbone.layers) == -(-len(whole.layers) // 3)


def test_the_past_is_the_mean_of_a_trajectorys_own_rows() -> None:
    rows = torch.randn(9, 3, dtype=torch.float64)
    ends = torch.tensor([4, 5, 9])
    expected = [rows[start : i + 1].mean(0) for start, end in ((0, 4), (4, 5), (5, 9)) for i in range(start, end)]
    torch.testing.assert_close(running_mean(rows, ends), torch.stack(expected))


def test_what_came_before_reaches_the_value(llama: str) -> None:
    """Of two responses that end alike, behind a trunk that sees one token at a time."""
    model = model_of(llama, freeze="encoder")
    torch.nn.init.normal_(model.experts.past.weight)
    states = torch.randn(3, 32)
    model.trunk.states = lambda batch: torch.cat([states, torch.randn(1, 32), states[1:]])
    two = [trajectory(i, 3, 2) for i in (0, 1)]
    before, after, _ = model(pack(two))
    assert not torch.isclose(before[1], before[3])
    assert not torch.isclose(after[0], after[1])


def test_values_come_out_the_same_in_segments(llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(llama, **ENCODER)
    with torch.no_grad():
        whole = model(pack(PACK))
        monkeypatch.setattr(critic.model, "SEGMENT", 7)
        parts = model(pack(PACK))
    torch.testing.assert_close(parts[:2], whole[:2])
    assert torch.equal(parts[2].chosen, whole[2].chosen)


class Largest(TorchDispatchMode):
    """The largest tensor that anything computes."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return out


def test_values_of_a_long_trajectory_take_memory_linear_in_its_tokens(
    tiny_policy_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(critic.model, "SEGMENT", 64)
    model = model_of(str(tiny_policy_dir), **ENCODER)
    largest = []
    for tokens in (1024, 2048):
        with Largest() as seen, torch.no_grad():
            values = model(pack([trajectory(0, 24, tokens - 24)]))[0]
        assert values.isfinite().all()
        largest.append(seen.elements)
    # The widest is a block of queries beside all keys: [tokens, tokens] anywhere would be four times as large.
    assert largest[1] <= 2 * largest[0]


# Gradient checkpointing


def kept_bytes(model: ValueModel, batch: Batch) -> int:
    """Bytes of distinct tensors that the graph keeps for the backward, weights and inputs left out."""
    known = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def note(t: torch.Tensor) -> torch.Tensor:
        if t.untyped_storage().data_ptr() not in known:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        loss, _ = critic_loss(Config(), model, batch, None)
    del loss
    return sum(kept.values())


LONG = [trajectory(i, 4, 120) for i in range(4)]


@pytest.mark.parametrize("mode", ["encoder", "attention", "upcycled", "attention and experts"])
def test_checkpointing_keeps_less_for_equal_gradients(llama: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(critic.model, "SEGMENT", 50)
    settings = DeepSpeedConfig(gradient_checkpointing=True)
    plain, recomputing = model_of(llama, **MODES[mode]), model_of(llama, deepspeed=settings, **MODES[mode])
    batch = pack(LONG)
    assert_close(gradients(recomputing, [batch]), gradients(plain, [batch]))
    assert kept_bytes(recomputing, batch) < kept_bytes(plain, batch) / 3


# Precision


@pytest.mark.parametrize(("dtype", "tolerance"), [("bf16", 3e-2), ("fp16", 4e-3)])
def test_experts_in_16_bits_are_near_float32_and_head_and_router_stay(llama: str, dtype: str, tolerance: float) -> None:
    exact = model_of(llama, **ENCODER)
    rounded = model_of(llama, deepspeed=DeepSpeedConfig(dtype=dtype), **ENCODER)
    rounded.load_state_dict(exact.state_dict())
    assert {p.dtype for p in rounded.parameters()} == {torch.float32}
    values = rounded(pack(PACK))[0]
    assert values.dtype == torch.float32
    off = (values - exact(pack(PACK))[0]).abs().max()
    assert 0 < off < tolerance
    assert_close(gradients(rounded, [pack(PACK)]), gradients(exact, [pack(PACK)]), 10 * tolerance)
    assert learner_settings(CriticConfig(deepspeed=DeepSpeedConfig(dtype=dtype), **ENCODER)).dtype == "fp32"


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_the_trunk_has_a_dtype_of_its_own(folder: str, dtype: str) -> None:
    for freeze in (ENCODER, {"freeze": "attention", "first_trainable_layer": 1}):
        model = model_of(folder, trunk_dtype=dtype, **freeze)
        wanted = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
        assert model.trunk.backbone.layers[0].self_attn.o_proj.weight.dtype == wanted
        assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
        assert model(pack(PACK))[0].isfinite().all()


@pytest.mark.parametrize("size", [1e-12, 1e6])
def test_float16_scales_gradients_that_would_vanish_or_overflow(size: float) -> None:
    """Float16 ends at 6e-8 and 65504."""
    half, full = random_experts(1, 4, 2, torch.float16), random_experts(1, 4, 2)
    x, upstream = torch.randn(64, 16), size * torch.randn(64, 16)
    found, expected = (torch.autograd.grad((e(x)[0] * upstream).sum(), list(e.parameters())) for e in (half, full))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a / size, b / size, atol=2e-2 * float(b.abs().max()) / size, rtol=0)


def test_a_gradient_that_overflows_float16_all_the_same_is_an_error() -> None:
    experts = random_experts(1, 2, 2, torch.float16)
    with torch.no_grad():
        experts.gate_up.mul_(30)
    y = experts(torch.ones(1 << 14, 16))[0]  # a weight's gradient sums over so many tokens of activations near 900
    assert y.isfinite().all()
    with pytest.raises(FloatingPointError, match="overflows float16"):
        y.sum().backward()


def test_a_precision_that_the_device_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype in ("fp32", "bf16", "fp16"):
        check_precision(dtype, "cpu")

    def refuse(*_: Any) -> torch.Tensor:
        raise RuntimeError("\"addmm_impl_cpu_\" not implemented for 'Half'")

    monkeypatch.setattr(torch.Tensor, "__matmul__", refuse)
    with pytest.raises(ConfigError, match=r"^critic.deepspeed.dtype, critic.trunk_dtype: fp16 given, cpu cannot"):
        check_precision("fp16", "cpu")


# Bad input


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["critic.freeze=all"], "critic.freeze: 'all' given, must be one of none, encoder, attention"),
        (["critic.experts.top_k=9"], "critic.experts.top_k: 9 given, must be at most critic.experts.count = 8"),
        (["critic.experts.top_k=1"], "critic.experts.top_k: 1 given, must be at least 2"),
        (["critic.experts.intermediate_size=20"], "critic.experts.intermediate_size: 20 given, must be a multiple of"),
        (
            ["critic.experts.upcycle=true"],
            "critic.experts.upcycle: True given, must be false with critic.freeze=encoder",
        ),
        (["critic.first_trainable_layer=1"], "critic.first_trainable_layer: 1 given, must be 0 with"),
        (
            ["critic.freeze=attention", "critic.first_trainable_layer=6"],
            "critic.first_trainable_layer: 6 given, must be below 6",
        ),
        (
            ["critic.freeze=none", "critic.deepspeed.dtype=fp16"],
            "critic.deepspeed.dtype: 'fp16' given, must be fp32 or bf16 with",
        ),
        (
            ["critic.expert_parallel_size=2", "critic.deepspeed.ranks=3"],
            "critic.expert_parallel_size: 2 given, must be a divisor of critic.deepspeed.ranks = 3",
        ),
        (
            ["critic.expert_parallel_size=2", "critic.deepspeed.ranks=2", "critic.experts.count=3"],
            "critic.expert_parallel_size: 2 given, must be a divisor of critic.experts.count = 3",
        ),
        (
            ["critic.expert_parallel_size=2", "critic.deepspeed.ranks=2"],
            "critic.deepspeed.zero_stage: 1 given, must be 0 with critic.expert_parallel_size=2",
        ),
        (
            ["critic.expert_parallel_size=2", "critic.freeze=none"],
            "critic.expert_parallel_size: 2 given, must be 1 with critic.freeze=none",
        ),
        (["critic.cache_dir=/proc"], "critic.cache_dir: '/proc' given, must be a folder that can be written"),
        (["critic.cache_dir=nowhere"], "critic.cache_dir: 'nowhere' given, must be a folder that can be written"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(tmp_path: Path, overrides: list[str], line: str) -> None:
    (tmp_path / "x.yaml").write_text("run: {name: x}")
    with pytest.raises(ConfigError) as caught:
        load(tmp_path / "x.yaml", overrides)
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)
    load(tmp_path / "x.yaml", [*overrides, "algorithm.name=grpo"] if "freeze=all" not in overrides[0] else [])


def test_ranks_that_share_experts_ask_them_once_a_pack(llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packs of other lengths have other numbers of segments, and a rank that asked once more would wait for ever."""
    monkeypatch.setattr(critic.model, "SEGMENT", 7)
    calls: list[int] = []
    model = model_of(llama, **ENCODER)
    original = model._segment
    monkeypatch.setattr(model, "_segment", lambda rows, past: calls.append(len(rows)) or original(rows, past))
    with torch.no_grad():
        whole = model(pack(PACK))[0]
        assert len(calls) > 1
        calls.clear()
        assert model.experts is not None
        for p in model.experts.parameters():
            p.group_name = "the mark of a parameter that is spread"  # type: ignore[attr-defined]
        torch.testing.assert_close(model(pack(PACK))[0], whole)
    assert len(calls) == 1


def test_experts_on_a_frozen_encoder_may_be_low_at_stage_0(tmp_path: Path) -> None:
    """DeepSpeed does not see their precision, and experts spread over ranks need that stage."""
    (tmp_path / "x.yaml").write_text("run: {name: x}")
    critic = ["dtype=bf16", "zero_stage=0", "ranks=2"]
    load(tmp_path / "x.yaml", [f"critic.deepspeed.{c}" for c in critic] + ["critic.expert_parallel_size=2"])


def test_a_backbone_of_another_vocabulary_or_tokenizer_is_refused(
    tmp_path: Path, llama: str, tiny_policy_dir: Path
) -> None:
    (tmp_path / "x.yaml").write_text(f"policy: {{path: {tiny_policy_dir}}}")
    with pytest.raises(ConfigError, match=r"^critic.path: .* the policy's vocabulary of 100 tokens, this one has 64$"):
        load(tmp_path / "x.yaml", [f"critic.path={llama}"])
    other = tmp_path / "other"
    other.mkdir()
    for file in tiny_policy_dir.glob("*.json"):
        (other / file.name).write_text(file.read_text())
    load(tmp_path / "x.yaml", [f"critic.path={other}"])
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace('"a":', '"A_":'))
    with pytest.raises(ConfigError, match=r"^critic.path: .* the policy's tokenizer, this one's differs$"):
        load(tmp_path / "x.yaml", [f"critic.path={other}"])


def test_a_layer_out_of_range_is_refused_where_the_folder_did_not_say(llama: str) -> None:
    with pytest.raises(ConfigError, match="first_trainable_layer: 4 given, must be below 4"):
        build(CriticConfig(freeze="attention", first_trainable_layer=4), llama)


def test_a_backbone_that_is_more_than_its_layers_is_not_cut() -> None:
    torch.manual_seed(0)
    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=32)).transformer
    with pytest.raises(ConfigError, match="a GPT2Model cannot be cut between layers, must be 0"):
        cut(gpt2, 1, "critic.first_trainable_layer")

    class Scaled(type(LlamaForCausalLM(tiny := LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
    )).model)):  # fmt: skip
        def forward(self, *args: Any, input_ids: torch.Tensor, **kwargs: Any) -> Any:
            return super().forward(*args, inputs_embeds=3 * self.embed_tokens(input_ids), **kwargs)

    with pytest.raises(ConfigError, match="a Scaled cannot be cut"):
        cut(Scaled(tiny), 1, "critic.first_trainable_layer")


def test_layers_of_several_kinds_keep_theirs_above_a_cut() -> None:
    torch.manual_seed(0)
    kinds = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
    config = Qwen2Config(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=2, use_sliding_window=True, sliding_window=3, layer_types=kinds, initializer_range=0.5,
    )  # fmt: skip
    whole = Qwen2Model(config)
    lower, upper = cut(whole, 1, "critic.first_trainable_layer")
    batch = pack([trajectory(0, 12, 8, 32)])
    states = upper_states(upper, hidden_states(lower, batch), batch)
    torch.testing.assert_close(states, hidden_states(whole, batch), atol=1e-5, rtol=1e-5)
    assert whole.config.layer_types == kinds


def test_an_mlp_that_is_not_gated_silu_is_not_upcycled(llama: str, tmp_path: Path) -> None:
    config = LlamaConfig.from_pretrained(llama, hidden_act="gelu")
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"^critic.experts.upcycle: a LlamaMLP with GELUActivation given, must be"):
        build(CriticConfig(**UPCYCLED), str(tmp_path))


def test_the_default_is_a_frozen_encoder_with_experts(llama: str) -> None:
    model = build(CriticConfig(), llama)
    assert model.backbone is None
    assert {name.split(".")[0] for name, _ in model.named_parameters()} == {"experts", "head"}
