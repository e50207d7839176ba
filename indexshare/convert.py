"""Makes an IndexShare checkpoint (`glm_moe_dsa`) of a multi-head-latent-attention one, shard by shard.

Weights are carried as they are. Where the source pairs rotary dimensions in halves and `glm_moe_dsa` pairs neighbours,
rows change places, which changes no product of a query and a key. What `glm_moe_dsa` cannot compute is refused.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, GlmMoeDsaConfig

from indexshare.schedule import Schedule

WITHOUT, WITH = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite"), ("deepseek_v32", "glm_moe_dsa")
"""Sources without and with indexers of their own."""

CARRIED = (
    "vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "n_shared_experts", "n_routed_experts", "routed_scaling_factor",
    "kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "v_head_dim", "qk_nope_head_dim", "n_group", "topk_group",
    "num_experts_per_tok", "norm_topk_prob", "hidden_act", "max_position_embeddings", "initializer_range",
    "rms_norm_eps", "pad_token_id", "bos_token_id", "eos_token_id", "tie_word_embeddings", "rope_parameters",
    "attention_bias", "attention_dropout", "dtype",
)  # fmt: skip
"""Fields of a config that mean the same on both sides."""

INDEX = "model.safetensors.index.json"
OTHER_FILES = ("*.json", "*.txt", "*.model", "*.jinja")
"""Of tokenizer and generation; the config and the index of weights are written anew."""


@dataclass(frozen=True)
class Indexers:
    """What the target's indexers are like. None: as the source's are, or as GLM-5.2's where it has none."""

    topk: int | None = None
    heads: int | None = None
    head_dim: int | None = None
    seed: int = 0


@dataclass
class Report:
    """Names of the tensors, by what became of them."""

    carried: list[str] = field(default_factory=list)
    reordered: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        kinds = (
            ("carried as they are", self.carried),
            ("reordered for the rotary layout", self.reordered),
            ("new, of random indexers", self.new),
            ("dropped", self.dropped),
        )
        return "\n".join(f"{len(names):6d} tensors {what}" for what, names in kinds if names)


def convert(source: Path, out: Path, schedule: Schedule, indexers: Indexers = Indexers()) -> Report:
    """Write the IndexShare checkpoint of `source` to the new folder `out`, with the tokenizer.

    Indexers that the source has are kept in Full layers, others are drawn as transformers draws them.
    Raises ValueError, in one line, for a source that cannot be expressed.
    """
    theirs = source_config(source)
    config = converted_config(theirs, schedule, indexers)
    shards = _shards(source)
    if theirs["model_type"] in WITH:
        _check_kept(theirs, schedule, indexers, shards)
    if out.exists():
        raise ValueError(f"out: {out} given, must be a folder that does not exist yet")
    part = out.with_name(f".{out.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    report = _Writer(source, theirs, config, part).write(shards, indexers.seed)
    config.save_pretrained(part)
    for pattern in OTHER_FILES:
        for file in source.glob(pattern):
            if file.name not in ("config.json", INDEX):
                shutil.copy(file, part)
    part.replace(out)
    return report


def converted_config(theirs: Mapping[str, Any], schedule: Schedule, indexers: Indexers) -> GlmMoeDsaConfig:
    """The config of the target, which transformers and vLLM read alike. `theirs` is the source's, complete.

    Raises ValueError where the source computes what the target cannot, or the schedule is of other layers.
    """
    layers = theirs["num_hidden_layers"]
    Schedule.from_types(schedule.types, layers)
    kinds = theirs.get("mlp_layer_types")
    if kinds is None:
        dense = min(theirs.get("first_k_dense_replace") or 0, layers)
        kinds = ["dense"] * dense + ["sparse"] * (layers - dense)
    _check_source(theirs, kinds)
    fields = {name: theirs[name] for name in CARRIED if theirs.get(name) is not None}
    given = {"index_topk": indexers.topk, "index_n_heads": indexers.heads, "index_head_dim": indexers.head_dim}
    for name, value in given.items():
        if value is not None and value < 1:
            raise ValueError(f"{name}: {value} given, must be at least 1")
        if (value := theirs.get(name) if value is None else value) is not None:
            fields[name] = value
    fields |= {"mlp_layer_types": list(kinds), "architectures": ["GlmMoeDsaForCausalLM"]}
    fields["first_k_dense_replace"] = list(kinds).index("sparse") if "sparse" in kinds else layers
    # For vLLM, which reads what transformers' class takes for granted.
    fields |= {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "indexer_rope_interleave": True}
    config = GlmMoeDsaConfig(**fields, **schedule.config_fields())
    if config.index_head_dim < config.qk_rope_head_dim:
        raise ValueError(
            f"index_head_dim: {config.index_head_dim} given, must be at least qk_rope_head_dim = "
            f"{config.qk_rope_head_dim}"
        )
    return config


def source_config(source: Path) -> dict[str, Any]:
    """A source's config with all its defaults. Raises ValueError for a model that has no latent attention."""
    if not (source / "config.json").is_file():
        raise ValueError(f"model: {source} given, must be a folder with a config.json")
    raw = json.loads((source / "config.json").read_text(encoding="utf-8"))
    kind = raw.get("model_type")
    if kind not in (*WITHOUT, *WITH):
        raise ValueError(
            f"model: {source} is a {kind}, must have multi-head latent attention: one of {', '.join(WITHOUT + WITH)}"
        )
    return AutoConfig.from_pretrained(source).to_dict() | {"quantization_config": raw.get("quantization_config")}


def _check_source(theirs: Mapping[str, Any], kinds: list[str]) -> None:
    kind = theirs["model_type"]
    refused = (
        (theirs.get("q_lora_rank") is None, "q_lora_rank: null", "the indexers read the query's latent"),
        (bool(theirs.get("mlp_bias")), "mlp_bias: true", "the MLPs of glm_moe_dsa have none"),
        (bool(theirs.get("quantization_config")), "quantization_config", "weights must be in bf16, fp16 or fp32"),
        (
            kind == "deepseek_v2" and "sparse" in kinds,
            "model_type: deepseek_v2 with routed experts",
            "it routes by softmax and glm_moe_dsa by sigmoid, only dense MLPs can be carried",
        ),
    )
    for wrong, what, why in refused:
        if wrong:
            raise ValueError(f"{what}: cannot be converted, {why}")


def _check_kept(
    theirs: Mapping[str, Any], schedule: Schedule, indexers: Indexers, shards: Mapping[str, list[str]]
) -> None:
    there = Schedule.from_weights((n for names in shards.values() for n in names), theirs["num_hidden_layers"])
    missing = sorted(set(schedule.full_layers) - set(there.full_layers))
    if missing:
        raise ValueError(
            f"pattern: {schedule.pattern} given, but layer {missing[0]} has no indexer, the model is {there.pattern}"
        )
    for name, given in (("index_n_heads", indexers.heads), ("index_head_dim", indexers.head_dim)):
        if given not in (None, theirs[name]):
            raise ValueError(f"{name}: {given} given, must be {theirs[name]} as the indexers that are kept have it")


def _shards(source: Path) -> dict[str, list[str]]:
    """The names of the tensors in every file of weights."""
    files = sorted(source.glob("*.safetensors"))
    if not files:
        raise ValueError(f"model: {source} given, must be a folder with its weights in *.safetensors")
    found = {}
    for file in files:
        with safe_open(file, "pt") as tensors:
            found[file.name] = list(tensors.keys())
    return found


class _Writer:
    """Weights from one folder to another, a shard in memory at a time."""

    def __init__(self, source: Path, theirs: Mapping[str, Any], config: GlmMoeDsaConfig, out: Path) -> None:
        self.source, self.theirs, self.config, self.out = source, theirs, config, out
        self.full = Schedule.from_config(config).full_layers
        self.report = Report()
        self.where: dict[str, str] = {}
        self.bytes = 0
        self.dtype = torch.float32
        # Rotary dimensions in halves: (heads, first of them in a head) of every tensor whose rows have to move.
        self.halves: dict[str, tuple[int, int]] = {}
        if theirs.get("rope_interleave") is False:
            latent = (1, config.kv_lora_rank)
            self.halves |= {
                "self_attn.q_b_proj.weight": (config.num_attention_heads, config.qk_nope_head_dim),
                "self_attn.kv_a_proj_with_mqa.weight": latent,
                "self_attn.kv_a_proj_with_mqa.bias": latent,
            }
        if theirs["model_type"] == "deepseek_v32":
            self.halves |= {
                "self_attn.indexer.wq_b.weight": (config.index_n_heads, 0),
                "self_attn.indexer.wk.weight": (1, 0),
                "self_attn.indexer.k_norm.weight": (1, 0),
                "self_attn.indexer.k_norm.bias": (1, 0),
            }

    def write(self, shards: Mapping[str, list[str]], seed: int) -> Report:
        """All files, their index and what was done."""
        for file, names in shards.items():
            with safe_open(self.source / file, "pt") as tensors:
                kept = {name: self._carry(name, tensors.get_tensor(name)) for name in names if self._wanted(name)}
            self._save(kept, file)
        if self.theirs["model_type"] in WITHOUT:
            fresh = dict(self._indexers(seed))
            self.report.new += fresh
            self._save(fresh, "indexers.safetensors")
        index = {"metadata": {"total_size": self.bytes}, "weight_map": self.where}
        (self.out / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
        return self.report

    def _wanted(self, name: str) -> bool:
        layer = re.search(r"\blayers\.(\d+)\.", name)
        i = int(layer[1]) if layer else 0
        beyond = i >= self.config.num_hidden_layers  # layers that predict several tokens
        shared = ".indexer." in name and i not in self.full
        if beyond or shared or name.endswith("rotary_emb.inv_freq"):
            self.report.dropped.append(name)
            return False
        return True

    def _carry(self, name: str, tensor: Tensor) -> Tensor:
        if name.endswith("embed_tokens.weight"):
            self.dtype = tensor.dtype
        place = self.halves.get(name.partition(".layers.")[2].partition(".")[2])
        if place is None:
            self.report.carried.append(name)
            return tensor
        self.report.reordered.append(name)
        return _neighbours(tensor, *place, self.config.qk_rope_head_dim)

    def _save(self, tensors: dict[str, Tensor], file: str) -> None:
        if not tensors:
            return
        save_file(tensors, self.out / file, {"format": "pt"})
        self.where |= dict.fromkeys(tensors, file)
        self.bytes += sum(t.nbytes for t in tensors.values())

    def _indexers(self, seed: int) -> Iterator[tuple[str, Tensor]]:
        c, generator = self.config, torch.Generator().manual_seed(seed)
        heads, dim = c.index_n_heads, c.index_head_dim
        shapes = {
            "wq_b": (heads * dim, c.q_lora_rank),
            "wk": (dim, c.hidden_size),
            "weights_proj": (heads, c.hidden_size),
        }
        for i in self.full:
            prefix = f"model.layers.{i}.self_attn.indexer"
            for name, shape in shapes.items():
                weight = torch.randn(shape, generator=generator) * c.initializer_range
                yield f"{prefix}.{name}.weight", weight.to(self.dtype)
            yield f"{prefix}.k_norm.weight", torch.ones(dim, dtype=self.dtype)
            yield f"{prefix}.k_norm.bias", torch.zeros(dim, dtype=self.dtype)


def _neighbours(rows: Tensor, heads: int, begin: int, rope: int) -> Tensor:
    """Rows whose rotary dimensions are pairs (i, i + rope / 2), as pairs (2i, 2i + 1)."""
    order = torch.arange(rope).view(2, -1).t().flatten()
    split = rows.unflatten(0, (heads, -1)).clone()
    split[:, begin : begin + rope] = split[:, begin + order]
    return split.flatten(0, 1).contiguous()
