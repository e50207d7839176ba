"""The policy's log-probabilities: packing, temperature, LoRA and its reference, the names that go to the engine."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from critic.model import build as build_critic
from indexshare.schedule import Schedule
from policy.model import PolicyModel, build, plain_state_dict
from policy.worker import PolicyWorker, policy_loss
from rl.config import (
    AlgorithmConfig,
    Config,
    ConfigError,
    CriticConfig,
    IndexShareConfig,
    LoraConfig,
    PolicyConfig,
)
from rl.config_rules import check
from rl.learner import Stats, disable_dropout, per_response
from rl.trajectory import Trajectory, pack


def trajectory(i: int, prompt: int, response: int, vocabulary: int = 64) -> Trajectory:
    rng = np.random.default_rng(i)
    return Trajectory(
        prompt_index=i,
        sample_index=0,
        prompt_ids=rng.integers(0, vocabulary, prompt).astype(np.int32),
        response_ids=rng.integers(0, vocabulary, response).astype(np.int32),
        action_mask=np.ones(response, bool),
        rollout_logprobs=rng.normal(size=response).astype(np.float32) - 2,
        finish_reason="stop",
        policy_version=0,
        advantages=rng.normal(size=response).astype(np.float32),
        loss_weight=0.1,
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A tiny Llama and a tiny IndexShare model, both with dropout in their configs."""
    root = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    llama = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=True,
        attention_dropout=0.3,
    )
    LlamaForCausalLM(llama).save_pretrained(root / "llama")
    glm = GlmMoeDsaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_shared_experts=1,
        n_routed_experts=4,
        num_experts_per_tok=2,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        qk_nope_head_dim=16,
        first_k_dense_replace=1,
        index_topk=8,
        index_head_dim=16,
        index_n_heads=2,
        attention_dropout=0.3,
        **Schedule.from_pattern("FFSS").config_fields(),
    )
    GlmMoeDsaForCausalLM(glm).save_pretrained(root / "glm")
    return {"llama": str(root / "llama"), "glm": str(root / "glm")}


PACK = [trajectory(0, 5, 7), trajectory(1, 30, 1), trajectory(2, 1, 20), trajectory(3, 9, 0)]


@pytest.mark.parametrize("kind", ["llama", "glm"])
def test_a_packed_trajectory_sees_no_other(folders, kind):
    model = build(PolicyConfig(path=folders[kind]), 0.7)
    disable_dropout(model)
    critic = build_critic(CriticConfig(freeze="none"), folders[kind])
    disable_dropout(critic)
    torch.nn.init.normal_(critic.head.weight)
    batch = pack(PACK)
    together, values = per_response(batch, model(batch)[0].detach()), critic(batch)
    before = per_response(batch, values[0].detach())
    for t, logprobs, v, after in zip(PACK, together, before, values[1], strict=True):
        alone = pack([t])
        np.testing.assert_allclose(logprobs, model(alone)[0].detach().numpy(), atol=1e-5)
        np.testing.assert_allclose(v, critic(alone)[0].detach().numpy(), atol=1e-5)
        assert float(after.detach()) == pytest.approx(float(critic(alone)[1].detach()), abs=1e-5)
        assert len(logprobs) == len(t.response_ids)


def test_logprobs_are_transformers_own(folders):
    stock = AutoModelForCausalLM.from_pretrained(folders["llama"], dtype=torch.float32).eval()
    t = PACK[0]
    ids = torch.from_numpy(np.concatenate([t.prompt_ids, t.response_ids]).astype(np.int64))[None]
    logits = stock(ids).logits[0, len(t.prompt_ids) - 1 : -1] / 0.7
    expected = logits.log_softmax(-1).gather(1, torch.from_numpy(t.response_ids.astype(np.int64))[:, None])[:, 0]
    model = build(PolicyConfig(path=folders["llama"]), 0.7)
    disable_dropout(model)
    torch.testing.assert_close(model(pack([t]))[0], expected, atol=1e-5, rtol=0)


class Successor(torch.nn.Module):
    """Puts .9 on (t + 1) mod 8 and spreads the rest; a stand-in for a causal LM whose answer is known by hand."""

    base_model_prefix = "body"

    def __init__(self) -> None:
        super().__init__()
        self.body = self
        self.config = type("Config", (), {"model_type": "successor"})()

    def forward(self, input_ids, position_ids, attention_mask, use_cache):
        p = torch.full((8, 8), 0.1 / 7).fill_diagonal_(0.9).roll(1, dims=1)
        return type("Output", (), {"last_hidden_state": p.log()[input_ids]})()

    def get_output_embeddings(self):
        return type("Head", (), {"weight": torch.eye(8)})()


def test_worked_value_4_logprobs_are_of_the_response_and_not_shifted():
    t = replace(trajectory(0, 2, 2, 8), prompt_ids=np.array([3, 4], np.int32), response_ids=np.array([5, 6], np.int32))
    model = PolicyModel(Successor(), 1.0)
    assert [round(float(x), 4) for x in model(pack([t]))[0].detach()] == [-0.1054, -0.1054]


def test_indexers_and_routers_are_frozen(folders):
    model = build(PolicyConfig(path=folders["glm"]), 1.0)
    frozen = {n for n, p in model.named_parameters() if not p.requires_grad}
    assert any(".indexer." in n for n in frozen)
    assert any(n.endswith("mlp.gate.weight") for n in frozen)
    assert all(".indexer." in n or n.endswith("mlp.gate.weight") for n in frozen)


@pytest.mark.parametrize("kind", ["llama", "glm"])
def test_worked_value_14_lora_is_its_own_reference(folders, kind, tmp_path):
    config = PolicyConfig(path=folders[kind], lora=LoraConfig(rank=4))
    model = build(config, 1.0)
    disable_dropout(model)
    reference = build(config, 1.0, lora=False)
    disable_dropout(reference)
    batch = pack(PACK)
    with torch.no_grad():
        expected = reference(batch)[0]
        assert torch.equal(model(batch)[0], expected)  # a fresh adapter changes nothing
        for n, p in model.named_parameters():
            if "lora_B" in n:
                torch.nn.init.normal_(p, std=0.5)
        changed = model(batch)[0]
        assert (changed - expected).abs().max() > 1e-3
        with model.without_adapter():
            assert torch.equal(model(batch)[0], expected)
        with pytest.raises(RuntimeError, match="inside"), model.without_adapter():
            raise RuntimeError("inside")
        assert torch.equal(model(batch)[0], changed)
        # What goes to the engine is the adapted model under the checkpoint's names.
        weights = plain_state_dict(model, dict(model.state_dict()))
        save_file({k: v.contiguous() for k, v in weights.items()}, tmp_path / "model.safetensors", {"format": "pt"})
        shutil.copy(f"{folders[kind]}/config.json", tmp_path)
        merged = build(PolicyConfig(path=str(tmp_path)), 1.0)
        disable_dropout(merged)
        torch.testing.assert_close(merged(batch)[0], changed, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["llama", "glm"])
def test_weights_have_the_names_of_the_checkpoint(folders, kind):
    model = build(PolicyConfig(path=folders[kind]), 1.0)
    weights = plain_state_dict(model, dict(model.state_dict()))
    with safe_open(f"{folders[kind]}/model.safetensors", "pt") as f:
        assert set(f.keys()) == set(weights)
        assert all(torch.equal(f.get_tensor(k), w) for k, w in weights.items())


def test_dis_compares_with_the_rollout_and_mismatch_with_the_trainer(folders):
    """However far the policy has moved, DIS has no old policy; the engine is held to the trainer's own numbers."""
    model = build(PolicyConfig(path=folders["glm"]), 1.0)
    batch = pack(PACK)
    logprobs, entropy = model(batch)
    _, stats = policy_loss(AlgorithmConfig(policy_loss="dis", dis_low=1, dis_high=1e6), batch, logprobs, entropy)
    gap = (logprobs - batch.fields["rollout_logprobs"]).detach()[batch.action_mask].double()
    means = stats.means()
    assert means["policy/ratio_max"] == pytest.approx(float(gap.exp().max()), rel=1e-5)
    assert means["kl/old"] == pytest.approx(float((gap.exp() - 1 - gap).mean()), rel=1e-4)
    assert means["mismatch/max_abs"] == pytest.approx(float(gap.abs().max()), rel=1e-5)
    old = [t.rollout_logprobs for t in PACK]
    _, stats = policy_loss(
        AlgorithmConfig(policy_loss="dis"),
        pack([replace(t, old_logprobs=o) for t, o in zip(PACK, old, strict=True)]),
        logprobs,
        entropy,
    )
    assert stats.means()["mismatch/max_abs"] == 0


def test_the_first_update_has_ratio_one_with_dropout_in_the_config(folders):
    model = build(PolicyConfig(path=folders["glm"]), 1.0).train()
    disable_dropout(model)
    batch = pack(PACK)
    with torch.no_grad():
        old = per_response(batch, model(batch)[0])
    batch = pack([replace(t, old_logprobs=o) for t, o in zip(PACK, old, strict=True)])
    loss, stats = policy_loss(AlgorithmConfig(), batch, *model(batch))
    means = stats.means()
    assert means["policy/ratio_min"] == pytest.approx(1, abs=1e-5)
    assert means["policy/ratio_max"] == pytest.approx(1, abs=1e-5)
    assert means["policy/clip_fraction_low"] == means["policy/clip_fraction_high"] == 0
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def gradients_of(folder: str, train_indexer: bool, coefficient: float, batches: list) -> tuple[dict, dict]:
    """Of every parameter after these micro-batches' losses, as the worker computes them; and what was measured."""
    config = Config()
    config.policy.path = folder
    config.indexshare = IndexShareConfig(train_indexer=train_indexer, distill_coefficient=coefficient)
    worker = PolicyWorker.__ray_metadata__.modified_class(config, 0, 1)
    model, _, _ = worker.build()
    stats = Stats()
    for batch in batches:
        loss, measured = worker.loss(model, batch)
        loss.backward()
        stats = stats.merge(measured)
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, stats.means()


def test_indexers_learn_from_their_own_loss_alone(tiny_policy_dir):
    """And nothing else notices; split into micro-batches it is the same loss."""
    folder = str(tiny_policy_dir)
    trajectories = [trajectory(i, 60 + 10 * i, 9) for i in range(2)]
    whole, parts = [pack(trajectories)], [pack([t]) for t in trajectories]
    frozen, plain = gradients_of(folder, False, 1.0, whole)
    off, _ = gradients_of(folder, True, 0.0, whole)
    taught, means = gradients_of(folder, True, 1.0, whole)
    twice, split = gradients_of(folder, True, 2.0, parts)
    indexers = {n for n in taught if ".indexer." in n}
    assert indexers
    assert not {n for n in frozen if ".indexer." in n}
    for n in indexers:
        assert off[n].abs().max() == 0
        torch.testing.assert_close(twice[n], 2 * taught[n], atol=1e-6, rtol=1e-4)
    assert any(taught[n].abs().max() > 1e-6 for n in indexers)
    for n in frozen:
        torch.testing.assert_close(taught[n], frozen[n], atol=0, rtol=0)
    assert means["indexshare/distill_loss"] > 0
    assert split["indexshare/distill_loss"] == pytest.approx(means["indexshare/distill_loss"], rel=1e-5)
    assert means["policy/loss"] == plain["policy/loss"]


@pytest.mark.parametrize(("kind", "rank", "says"), [("llama", 0, "no indexers"), ("glm_moe_dsa", 4, "policy.lora")])
def test_indexers_that_cannot_learn_are_refused(tmp_path, kind, rank, says):
    config = Config()
    config.policy.path, config.policy.lora.rank = str(tmp_path), rank
    config.indexshare.train_indexer = True
    fields = {"model_type": kind, "num_hidden_layers": 2, "index_topk": 4, "index_topk_pattern": "FS"}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ConfigError, match=rf"indexshare\.train_indexer: True given, must be false .*{says}"):
        check(config)
