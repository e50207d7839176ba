"""Hidden states of a pack: each trajectory as if it were alone, at the price of its own length."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from rl.backbone import PACKED, hidden_states, load_causal_lm
from rl.trajectory import Trajectory, pack

SIZES = [(5, 3), (4, 4), (1, 1), (3, 9), (6, 6), (2, 1)]
"""(prompt, response) tokens: neighbours of one length, a trajectory of two tokens, lengths that differ."""


def trajectories() -> list[Trajectory]:
    rng = np.random.default_rng(0)
    return [
        Trajectory(
            prompt_index=i,
            sample_index=0,
            prompt_ids=rng.integers(0, 64, p).astype(np.int32),
            response_ids=rng.integers(0, 64, r).astype(np.int32),
            action_mask=np.ones(r, bool),
            rollout_logprobs=np.zeros(r, np.float32),
            finish_reason="stop",
            policy_version=0,
        )
        for i, (p, r) in enumerate(SIZES)
    ]


def model(folder, windowed: bool = False):
    """A causal LM with two key heads for four query heads, with or without a sliding window."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.3,
    }
    lm = (
        MistralForCausalLM(MistralConfig(sliding_window=4, **sizes))
        if windowed
        else LlamaForCausalLM(LlamaConfig(**sizes))
    )
    lm.save_pretrained(folder)
    return load_causal_lm(str(folder), torch.float32)


@pytest.mark.parametrize("windowed", [False, True])
def test_a_packed_trajectory_has_the_states_and_gradients_of_a_lone_one(tmp_path, windowed):
    lm = model(tmp_path, windowed)
    assert (lm.config._attn_implementation == PACKED) is not windowed  # a window is told by a mask
    packed = hidden_states(lm.model, pack(trajectories()))
    packed.square().sum().backward()
    gradients = [p.grad.clone() for p in lm.model.parameters()]

    lm.zero_grad()
    lm.set_attn_implementation("eager")
    alone = [hidden_states(lm.model, pack([t])) for t in trajectories()]
    torch.cat(alone).square().sum().backward()
    torch.testing.assert_close(packed, torch.cat(alone), atol=1e-5, rtol=1e-5)
    for got, parameter in zip(gradients, lm.model.parameters(), strict=True):
        torch.testing.assert_close(got, parameter.grad, atol=1e-3, rtol=1e-4)


def test_attention_costs_a_square_of_each_trajectory_and_none_of_the_pack(tmp_path, monkeypatch):
    lm = model(tmp_path)
    scores = []
    stock = torch.nn.functional.scaled_dot_product_attention

    def counted(query, key, value, **options):
        assert options.get("attn_mask") is None
        scores.append(query.shape[0] * query.shape[-2] * key.shape[-2])
        return stock(query, key, value, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    hidden_states(lm.model, pack(trajectories()))
    assert sum(scores) == lm.config.num_hidden_layers * sum((p + r) ** 2 for p, r in SIZES)
    # Neighbours of one length share a call: (5, 3) and (4, 4), (3, 9) and (6, 6).
    assert len(scores) == lm.config.num_hidden_layers * 4


def test_a_layer_that_is_not_told_the_lengths_refuses(tmp_path):
    lm = model(tmp_path)
    with pytest.raises(ValueError, match="packed_lengths"):
        lm(input_ids=torch.zeros(1, 4, dtype=torch.long))
