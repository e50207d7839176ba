"""What all tests share: one Ray, one tiny policy, one engine that holds it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# Two shared cores: a deadline per example would measure the neighbours.
settings.register_profile("longppo", deadline=None, max_examples=50)
settings.load_profile("longppo")

INDEX_TOPK = 16
"""Keys per query of the tiny policy: tests prompt it with twenty times as many tokens."""


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """Ray on this machine, for every test that needs actors. Its CPUs are counted, not pinned."""
    import ray

    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level=logging.WARNING)
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def tiny_policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random IndexShare policy (F F S S S F, experts, float32) with a character tokenizer.

    Index scores are of order 1 and spread out, so that near-ties in a selection are rare.
    """
    import torch
    from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

    from indexshare.schedule import Schedule

    folder = tmp_path_factory.mktemp("tiny_policy")
    torch.manual_seed(0)
    config = GlmMoeDsaConfig(
        vocab_size=100, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=4, n_shared_experts=1, n_routed_experts=4, num_experts_per_tok=2,
        routed_scaling_factor=1.5, kv_lora_rank=32, q_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=16,
        v_head_dim=16, first_k_dense_replace=1, index_topk=INDEX_TOPK, index_head_dim=32, index_n_heads=4,
        topk_method="noaux_tc", scoring_func="sigmoid", indexer_rope_interleave=True, rms_norm_eps=1e-6,
        max_position_embeddings=1024, initializer_range=0.15, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        **Schedule.from_pattern("FFSSSF").config_fields(),
    )  # fmt: skip
    model = GlmMoeDsaForCausalLM(config)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.1)
        for name, weight in model.named_parameters():
            if "indexer.w" in name:
                weight.mul_(3)
    model.save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return folder


def character_tokenizer():
    """100 tokens: pad, BOS, EOS, unknown, newline and the printable ASCII characters."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", "<unk>", "\n", *map(chr, range(32, 127))]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


@pytest.fixture(scope="session")
def rollout_config(tiny_policy_dir: Path):
    """Rollouts of the tiny policy in float32; prefill comes in chunks of a third of a long prompt."""
    from rl.config import Config

    config = Config()
    config.policy.path = str(tiny_policy_dir)
    config.prompts.max_prompt_tokens = 448
    config.rollout.max_response_tokens = 32
    config.rollout.max_num_seqs = 8
    config.rollout.max_num_batched_tokens = 128
    return config


@pytest.fixture(scope="session")
def engine(ray_session: None, rollout_config):
    """A pool of one engine that holds the tiny policy. Whoever changes its weights puts them back."""
    from rl.cluster import worker_environment
    from rollout.pool import RolloutPool

    options = {"num_cpus": 0.5, "runtime_env": {"env_vars": worker_environment(rollout_config)}}
    pool = RolloutPool.start(rollout_config, [options])
    pool.wait_ready()
    return pool
