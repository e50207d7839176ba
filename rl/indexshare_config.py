"""The typed schema of `longppo indexshare distill` and `search`, and its rules. Imports neither torch nor ray."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

from omegaconf import OmegaConf

from rl.config import OptimizerConfig, wrong
from rl.config_load import located, merged, parsed, read, typed


@dataclass
class RunConfig:
    """Which run this is. Its directory is `<out>/<name>-seed<seed>`."""

    name: str = "distill"
    seed: int = 0
    out: str = "runs"


@dataclass
class SearchRunConfig(RunConfig):
    """A search can go on."""

    name: str = "search"
    resume: bool = False
    """Go on with what the run directory knows; without it an existing run directory is refused."""


@dataclass
class ModelConfig:
    """The IndexShare model to start from, in one process on one device."""

    path: str = "examples/tiny"
    pattern: str | None = None
    """One letter per layer, such as FFSSSF; null: as the model has it. Full layers need an indexer, there or new."""
    index_topk: int | None = None
    """Keys that an indexer selects; null: as the model has it."""
    device: str = "cpu"
    """cpu | cuda"""
    threads: int = 1
    gradient_checkpointing: bool = False


@dataclass
class DataConfig:
    """The documents."""

    source: str = "recall"
    """recall (key-value pairs with questions, as the tiny model was pretrained on) | jsonl"""
    path: str | None = None
    """JSONL file with `text`, or `prompt` and `answer` (then only the answer counts in the language-model loss)."""
    knobs: dict[str, Any] = field(default_factory=dict)
    """recall: `pairs`, `questions`, `styles`."""
    seed: int = 0
    max_tokens: int = 4096
    """Longer documents are cut."""
    documents_per_step: int = 8
    held_out: int = 16
    """Documents that are only evaluated on: of a file the last ones."""
    tokens_per_microbatch: int = 4096


@dataclass
class WarmupConfig:
    """Dense warm-up: attention is dense and only the indexers learn."""

    steps: int = 100


@dataclass
class SparseConfig:
    """Sparse training: the model under its own selection, with the language-model loss; the indexers learn on."""

    steps: int = 0
    backbone: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-4))
    support: str = "selected"
    """all | selected: the keys over which target and prediction are distributions in this stage. During warm-up
    they are all keys."""


@dataclass
class DistillConfig:
    """`longppo indexshare distill`."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    indexer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-3))
    """The indexers' optimizer, in both stages."""
    reset_indexers: bool = False
    """Begin with new random indexers, also in layers that had none."""
    teachers: str = "served"
    """served | own: an indexer learns the attention of all layers that it serves, or of its own layer alone."""
    answer_weight: float = 1.0
    """Weight of the queries whose prediction the loss counts; others have 1. Answers are few and matter most."""
    warmup: WarmupConfig = field(default_factory=WarmupConfig)
    sparse: SparseConfig = field(default_factory=SparseConfig)
    eval_every: int = 25
    """Steps between evaluations on held-out documents; also before the first and after the last. 0: only those."""


@dataclass
class SearchConfig:
    """`longppo indexshare search`."""

    run: SearchRunConfig = field(default_factory=SearchRunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    """The loss is taken on the first `documents_per_step` documents, always the same; held-out ones judge the
    result."""
    full: int = 2
    """Full layers to keep."""
    blocks: int = 1
    """Stretches of equal length that are searched one after the other, each of which starts on a Full layer."""


CHOICES: dict[str, tuple[str, ...]] = {
    "model.device": ("cpu", "cuda"),
    "data.source": ("recall", "jsonl"),
    "indexer.schedule": ("constant", "cosine"),
    "sparse.backbone.schedule": ("constant", "cosine"),
    "sparse.support": ("all", "selected"),
    "teachers": ("served", "own"),
}

BOUNDS: dict[str, tuple[float, float]] = {
    "run.seed": (0, 2**31),
    "model.index_topk": (1, 1e8),
    "model.threads": (1, 1024),
    "data.seed": (0, 2**31),
    "data.max_tokens": (2, 1e8),
    "data.documents_per_step": (1, 1e6),
    "data.held_out": (1, 1e6),
    "data.tokens_per_microbatch": (1, 1e9),
    "indexer.lr": (0, 1),
    "indexer.weight_decay": (0, 1),
    "indexer.max_grad_norm": (1e-9, 1e9),
    "indexer.warmup_steps": (0, 1e9),
    "answer_weight": (0, 1e6),
    "warmup.steps": (0, 1e9),
    "sparse.steps": (0, 1e9),
    "sparse.backbone.lr": (0, 1),
    "sparse.backbone.weight_decay": (0, 1),
    "sparse.backbone.max_grad_norm": (1e-9, 1e9),
    "sparse.backbone.warmup_steps": (0, 1e9),
    "eval_every": (0, 1e9),
    "full": (1, 1e5),
    "blocks": (1, 1e5),
}

Schema = TypeVar("Schema", DistillConfig, SearchConfig)


def load(schema: type[Schema], path: str | Path, overrides: Sequence[str] = ()) -> Schema:
    """The configuration in `path` with `key=value` overrides, as `rl.config_load.load` reads an experiment.

    Raises ConfigError: one line that names the key, what was given and what is allowed.
    """
    tree = merged(read(Path(path)), parsed(overrides))
    config = cast(Schema, typed(schema, tree))
    config.model.path = located(config.model.path)
    if config.data.path is not None:
        config.data.path = located(config.data.path)
    check(config)
    return config


def to_yaml(config: DistillConfig | SearchConfig) -> str:
    """The resolved configuration; `load` of it gives the same."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def check(config: DistillConfig | SearchConfig) -> None:
    """Raise ConfigError for the first thing that is wrong."""
    for key, allowed in CHOICES.items():
        if (given := _get(config, key, allowed[0])) not in allowed:
            raise wrong(key, given, f"one of {', '.join(allowed)}")
    for key, (low, high) in BOUNDS.items():
        given = _get(config, key, None)
        if given is not None and not low <= given <= high:
            raise wrong(key, given, f"between {low:g} and {high:g}")
    for rule in RULES:
        rule(config)


def _get(config: Any, key: str, absent: Any) -> Any:
    """The value of a dotted key; `absent` where the schema has no such key."""
    for part in key.split("."):
        if not hasattr(config, part):
            return absent
        config = getattr(config, part)
    return config


def _name(c: DistillConfig | SearchConfig) -> None:
    if c.run.name == ".." or Path(c.run.name).name != c.run.name:
        raise wrong("run.name", c.run.name, "a plain name, which names the run's folder in run.out")


def _paths(c: DistillConfig | SearchConfig) -> None:
    if not os.path.isfile(os.path.join(c.model.path, "config.json")):
        raise wrong("model.path", c.model.path, "a folder with a config.json")
    if c.data.source == "jsonl" and (c.data.path is None or not os.path.isfile(c.data.path)):
        raise wrong("data.path", c.data.path, "a JSONL file with data.source=jsonl")


def _stages(c: DistillConfig | SearchConfig) -> None:
    if isinstance(c, SearchConfig):
        return
    if c.warmup.steps + c.sparse.steps == 0:
        raise wrong("warmup.steps, sparse.steps", 0, "together at least 1")
    for key, optimizer in (("indexer", c.indexer), ("sparse.backbone", c.sparse.backbone)):
        if len(optimizer.betas) != 2 or not all(0 <= b < 1 for b in optimizer.betas):
            raise wrong(f"{key}.betas", optimizer.betas, "two numbers in [0, 1)")


RULES: tuple[Callable[[DistillConfig | SearchConfig], None], ...] = (_name, _paths, _stages)
