"""Converting MLA checkpoints: the same logits, indexers kept or new, and what cannot be expressed is refused."""

from __future__ import annotations

import json
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from conftest import character_tokenizer
from safetensors.torch import load_file, save_file
from test_rollout import gaps, prompts, reference, start
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from indexshare.convert import Indexers, convert
from indexshare.schedule import Schedule, check_checkpoint
from rl.cli import main

LENGTH, TOPK = 40, 8
SMALL = {
    "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 4, "n_shared_experts": 1, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "kv_lora_rank": 32, "q_lora_rank": 48,
    "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "first_k_dense_replace": 1,
    "max_position_embeddings": 1024, "initializer_range": 0.15, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
INDEXED = {"index_topk": TOPK, "index_head_dim": 32, "index_n_heads": 4}
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256,
    "mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 32, "beta_slow": 1,
}  # fmt: skip
SOURCES: dict[str, tuple[str, dict[str, Any]]] = {
    "v2, dense": ("deepseek_v2", {"first_k_dense_replace": 4}),
    "v3": ("deepseek_v3", {"n_group": 2, "norm_topk_prob": False}),
    "v3, rotary in halves": ("deepseek_v3", {"rope_interleave": False, "attention_bias": True}),
    "v3, yarn": ("deepseek_v3", {"rope_parameters": YARN}),
    "v3, tied": ("deepseek_v3", {"tie_word_embeddings": True}),
    "glm4 lite": ("glm4_moe_lite", {"mlp_layer_types": ["dense", "sparse", "dense", "sparse"]}),
    "v32": ("deepseek_v32", INDEXED),
    "glm dsa": ("glm_moe_dsa", INDEXED),
}
WITH = ["v32", "glm dsa"]


def made(kind: str, fields: dict[str, Any], folder: Path) -> Path:
    """A random model of that type, with a tokenizer; biases and router corrections are not 0."""
    config = AutoConfig.for_model(kind, **(SMALL | fields))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, x in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith(("bias", "k_norm.weight")):
                x.normal_(0, 0.3)
            elif ".indexer.w" in name:
                x.mul_(3)
    model.save_pretrained(folder, max_shard_size="100KB")
    character_tokenizer().save_pretrained(folder)
    return folder


@torch.no_grad()
def logits(folder: Path, **config: Any) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", **config).eval()
    ids = torch.randint(4, 100, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    return model(ids, use_cache=False).logits


@pytest.mark.parametrize("source", SOURCES)
def test_dense_attention_says_what_the_source_says(tmp_path: Path, source: str) -> None:
    kind, fields = SOURCES[source]
    made(kind, fields, tmp_path / "source")
    new = None if source in WITH else 4
    report = convert(
        tmp_path / "source", tmp_path / "out", Schedule.from_pattern("FSSF"), Indexers(TOPK, new, new and 32)
    )
    assert check_checkpoint(tmp_path / "out").pattern == "FSSF"
    dense = {"index_topk": LENGTH}
    expected = logits(tmp_path / "source", **(dense if source in WITH else {}))
    torch.testing.assert_close(logits(tmp_path / "out", **dense), expected, atol=2e-5, rtol=1e-5)
    assert (logits(tmp_path / "out") - expected).abs().max() > 1e-2  # 8 of 40 keys are selected
    assert bool(report.new) == (source not in WITH)
    assert bool(report.reordered) == (source in ("v3, rotary in halves", "v32"))
    assert bool(report.dropped) == (source in WITH)
    tokenizer = json.loads((tmp_path / "out" / "tokenizer.json").read_text())
    assert tokenizer == json.loads((tmp_path / "source" / "tokenizer.json").read_text())


@pytest.mark.parametrize("source", WITH)
def test_indexers_that_are_kept_select_as_they_did(tmp_path: Path, source: str) -> None:
    made(*SOURCES[source], tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "out", Schedule.from_pattern("FFFF"))
    torch.testing.assert_close(logits(tmp_path / "out"), logits(tmp_path / "source"), atol=2e-5, rtol=1e-5)


def test_every_weight_that_is_carried_has_the_same_bytes(tmp_path: Path) -> None:
    made(*SOURCES["v3"], tmp_path / "source")
    report = convert(tmp_path / "source", tmp_path / "out", Schedule.from_pattern("FSFS"), Indexers(TOPK, 2, 16, 7))
    before, after = (
        {k: v for file in (tmp_path / where).glob("*.safetensors") for k, v in load_file(file).items()}
        for where in ("source", "out")
    )
    assert sorted(report.carried) == sorted(before)
    for name, weight in before.items():
        assert torch.equal(after[name], weight), name
    assert {name for name in after if name not in before} == set(report.new)
    again = convert(tmp_path / "source", tmp_path / "again", Schedule.from_pattern("FSFS"), Indexers(TOPK, 2, 16, 7))
    assert str(again) == str(report)
    name = "model.layers.0.self_attn.indexer.wk.weight"
    assert torch.equal(load_file(tmp_path / "again" / "indexers.safetensors")[name], after[name])


def test_layers_that_predict_further_tokens_are_left_out_and_the_precision_stays(tmp_path: Path) -> None:
    made(*SOURCES["v3"], tmp_path / "source")
    for file in (tmp_path / "source").glob("*.safetensors"):
        further = {"model.layers.4.eh_proj.weight": torch.ones(2)} if file.name.startswith("model-00001") else {}
        save_file({k: v.bfloat16() for k, v in load_file(file).items()} | further, file, {"format": "pt"})
    report = convert(tmp_path / "source", tmp_path / "out", Schedule.from_pattern("FSSF"), Indexers(TOPK, 2, 16))
    assert report.dropped == ["model.layers.4.eh_proj.weight"]
    written = [load_file(file) for file in (tmp_path / "out").glob("*.safetensors")]
    assert {x.dtype for tensors in written for x in tensors.values()} == {torch.bfloat16}
    assert not any("layers.4" in name for tensors in written for name in tensors)


def test_vllm_generates_with_what_was_converted(ray_session: None, rollout_config: Any, tmp_path: Path) -> None:
    made(*SOURCES["v32"], tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "out", Schedule.from_pattern("FSSF"))
    config = deepcopy(rollout_config)
    config.policy.path = str(tmp_path / "out")
    pool = start(config)
    gap, excused = gaps(reference(config.policy.path), pool.generate(prompts([20, 100]), 2, step=0))
    for actor in pool.engines:
        ray.kill(actor)
    assert excused < 0.05
    assert gap.max() < 1e-4


def test_the_command_says_what_became_of_the_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(*SOURCES["v3"], tmp_path / "source")
    words = ["indexshare", "convert", str(tmp_path / "source"), str(tmp_path / "out")]
    assert main([*words, "--freq", "2", "--offset", "1", "--topk", "8", "--heads", "2", "--head-dim", "16"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].endswith("tensors carried as they are")
    assert out[1:] == ["    10 tensors new, of random indexers", f"done: {tmp_path / 'out'} (FSFS)"]
    assert main([*words, "--freq", "0"]) == 2
    assert capsys.readouterr().err == "longppo: index_topk_freq: 0 given, must be at least 1\n"
    assert main(["indexshare", "convert", str(tmp_path / "none"), str(tmp_path / "out"), "--pattern", "FS"]) == 2
    assert capsys.readouterr().err.startswith("longppo: model: ")


@pytest.mark.parametrize(
    ("source", "fields", "pattern", "indexers", "line"),
    [
        ("deepseek_v2", {}, "FSSF", Indexers(), "model_type: deepseek_v2 with routed experts: cannot be converted"),
        ("deepseek_v3", {"q_lora_rank": None}, "FSSF", Indexers(), "q_lora_rank: null: cannot be converted"),
        ("deepseek_v3", {}, "FSS", Indexers(), "indexer_types: 3 layers given, must be num_hidden_layers = 4"),
        ("deepseek_v3", {}, "FSSF", Indexers(head_dim=8), "index_head_dim: 8 given, must be at least qk_rope_head_dim"),
        ("deepseek_v3", {}, "FSSF", Indexers(topk=0), "index_topk: 0 given, must be at least 1"),
        ("deepseek_v32", INDEXED, "FSSF", Indexers(heads=2), "index_n_heads: 2 given, must be 4 as the indexers"),
        (
            "glm_moe_dsa",
            INDEXED | {"indexer_types": ["full", "shared", "full", "shared"]},
            "FFSS",
            Indexers(),
            "pattern: FFSS given, but layer 1 has no indexer, the model is FSFS",
        ),
    ],
)
def test_what_cannot_be_converted_is_one_line(tmp_path, source, fields, pattern, indexers, line) -> None:
    made(source, fields, tmp_path / "source")
    with pytest.raises(ValueError, match="^" + re.escape(line)) as refused:
        convert(tmp_path / "source", tmp_path / "out", Schedule.from_pattern(pattern), indexers)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_a_model_without_latent_attention_is_refused(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=100, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"^model: .* is a llama, must have multi-head latent attention: one of deep"):
        convert(tmp_path, tmp_path / "out", Schedule.from_pattern("FS"))


def test_an_existing_folder_is_not_written_over(tmp_path: Path) -> None:
    made(*SOURCES["v3"], tmp_path / "source")
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match=r"^out: .* given, must be a folder that does not exist yet$"):
        convert(tmp_path / "source", tmp_path / "out", Schedule.from_pattern("FSSF"))
