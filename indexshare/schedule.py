"""Which layers select keys (Full) and which reuse the selection of the last Full layer (Shared).

One type is the only place where the schedule is read, checked and written. transformers prefers
`indexer_types`, vLLM reads only `index_topk_pattern` or `index_topk_freq` with `index_skip_topk_offset`, so a
config carries both, equal.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from safetensors import safe_open

LayerType = Literal["full", "shared"]
LETTERS: dict[str, LayerType] = {"F": "full", "S": "shared"}

# What transformers and vLLM assume when a config is silent.
DEFAULT_FREQ, DEFAULT_OFFSET = 1, 2


@dataclass(frozen=True)
class Schedule:
    """The type of every layer, and how a config spells it."""

    types: tuple[LayerType, ...]
    freq: int | None = None
    offset: int | None = None
    """Set together where the schedule came as a frequency: the config is then written in the same words."""

    def __post_init__(self) -> None:
        if not self.types:
            raise ValueError("schedule: no layers given, at least one is needed")
        for i, kind in enumerate(self.types):
            if kind not in LETTERS.values():
                raise ValueError(f"schedule: layer {i} is {kind!r}, must be 'full' or 'shared'")
        if self.types[0] != "full":
            raise ValueError("schedule: the first layer is Shared, but there is no selection before it to reuse")

    @classmethod
    def from_freq(cls, layers: int, freq: int, offset: int = DEFAULT_OFFSET) -> Schedule:
        """Layer i is Full when max(i - offset + 1, 0) % freq == 0 (GLM-5.2: 78 layers, freq 4, offset 3)."""
        if freq < 1:
            raise ValueError(f"index_topk_freq: {freq} given, must be at least 1")
        if offset < 1:
            # With offset 1 layer 0 is Full; below, the count starts inside a group.
            raise ValueError(f"index_skip_topk_offset: {offset} given, must be at least 1")
        full = (max(i - offset + 1, 0) % freq == 0 for i in range(layers))
        return cls(tuple("full" if f else "shared" for f in full), freq, offset)

    @classmethod
    def from_pattern(cls, pattern: str, layers: int | None = None) -> Schedule:
        """One letter per layer, as in "FFSSSF"; `layers` is how many the model has."""
        for letter in pattern:
            if letter not in LETTERS:
                raise ValueError(f"index_topk_pattern: {pattern!r} has {letter!r}, must be of 'F' and 'S' only")
        _check_length("index_topk_pattern", len(pattern), layers)
        return cls(tuple(LETTERS[letter] for letter in pattern))

    @classmethod
    def from_types(cls, types: Sequence[str], layers: int | None = None) -> Schedule:
        """`indexer_types` of a config: "full" or "shared" per layer."""
        _check_length("indexer_types", len(types), layers)
        return cls(tuple(types))  # type: ignore[arg-type]  # __post_init__ refuses other words

    @classmethod
    def from_config(cls, config: Any) -> Schedule:
        """The schedule of a transformers config or of a config.json's mapping; contradictions are refused."""
        fields = config if isinstance(config, Mapping) else config.to_dict()
        layers = fields["num_hidden_layers"]
        pattern, types = fields.get("index_topk_pattern"), fields.get("indexer_types")
        spelled: dict[str, Schedule] = {}
        if pattern is not None:
            spelled["index_topk_pattern"] = cls.from_pattern(pattern, layers)
        if pattern is None or "index_topk_freq" in fields:
            # Where a config is silent, vLLM takes every layer for Full, whatever `indexer_types` says.
            freq = fields.get("index_topk_freq", DEFAULT_FREQ)
            offset = fields.get("index_skip_topk_offset", DEFAULT_OFFSET)
            spelled["index_topk_freq"] = cls.from_freq(layers, freq, offset)
        if types is not None:
            spelled["indexer_types"] = cls.from_types(types, layers)
        (name, schedule), *others = spelled.items()
        for other, another in others:
            if another.types != schedule.types:
                raise ValueError(
                    f"{name} says {schedule.pattern}, {other} says {another.pattern}: they must agree, "
                    "vLLM reads one and transformers the other"
                )
        return schedule

    @classmethod
    def from_weights(cls, names: Iterable[str], layers: int) -> Schedule:
        """What a checkpoint's tensors say: a layer is Full where it has the weights of an indexer."""
        found = (re.search(r"\blayers\.(\d+)\.self_attn\.indexer\.", name) for name in names)
        full = {int(match[1]) for match in found if match}
        if not full:
            raise ValueError("weights: no layer has an indexer, at least the first must; the model is not IndexShare")
        return cls(tuple("full" if i in full else "shared" for i in range(layers)))

    @property
    def pattern(self) -> str:
        """One letter per layer."""
        return "".join("F" if kind == "full" else "S" for kind in self.types)

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Indices of the layers that have an indexer."""
        return tuple(i for i, kind in enumerate(self.types) if kind == "full")

    def served_layers(self) -> dict[int, tuple[int, ...]]:
        """Of every Full layer, the layers that use its selection: itself and the Shared ones after it."""
        ends = (*self.full_layers[1:], len(self.types))
        return {full: tuple(range(full, end)) for full, end in zip(self.full_layers, ends, strict=True)}

    def check_stages(self, first_layers: Sequence[int]) -> None:
        """Refuse pipeline stages, given by their first layers, of which one would need another's selection."""
        for layer in first_layers:
            if not 0 <= layer < len(self.types):
                raise ValueError(f"pipeline stage: starts at layer {layer}, must be below {len(self.types)}")
            if self.types[layer] == "shared":
                raise ValueError(
                    f"pipeline stage: starts at layer {layer}, which is Shared; must start at one of {self.full_layers}"
                )

    def config_fields(self) -> dict[str, Any]:
        """What a config must carry for transformers and vLLM to read this schedule and no other."""
        fields: dict[str, Any] = {"indexer_types": list(self.types)}
        if self.freq is not None:
            fields |= {"index_topk_freq": self.freq, "index_skip_topk_offset": self.offset}
        else:
            fields |= {"index_topk_pattern": self.pattern}
        return fields

    def write(self, config: Any) -> None:
        """Set the fields on a transformers config, and take away the spelling that is not used."""
        fields = self.config_fields()
        for name in ("index_topk_freq", "index_skip_topk_offset", "index_topk_pattern"):
            if name not in fields and hasattr(config, name):
                delattr(config, name)
        for name, value in fields.items():
            setattr(config, name, value)


def check_config(config: Any) -> Schedule:
    """The schedule of a config that IndexShare can compute; ValueError in one line for any other."""
    fields = config if isinstance(config, Mapping) else config.to_dict()
    k = fields.get("index_topk")
    if k is None:
        raise ValueError(f"index_topk: absent from the {fields.get('model_type')} config: the model has no indexers")
    if k < 1:
        raise ValueError(f"index_topk: {k} given, must be at least 1")
    return Schedule.from_config(fields)


def check_checkpoint(folder: Path) -> Schedule:
    """The schedule of a Hugging Face folder whose weights have the indexers that its config names.

    transformers fills in the indexers that are missing with random weights and leaves out those too many, with a
    warning at most: here it is a ValueError that prints both schedules.
    """
    schedule = check_config(json.loads((folder / "config.json").read_text()))
    held = Schedule.from_weights(_tensor_names(folder), len(schedule.types))
    if held.types != schedule.types:
        raise ValueError(
            f"{folder}: its config says {schedule.pattern}, its weights are of {held.pattern}: "
            "a checkpoint keeps the schedule it was trained with"
        )
    return schedule


def _tensor_names(folder: Path) -> list[str]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return list(json.loads(index.read_text())["weight_map"])
    with safe_open(folder / "model.safetensors", "np") as tensors:
        return list(tensors.keys())


def _check_length(name: str, given: int, layers: int | None) -> None:
    if layers is not None and given != layers:
        raise ValueError(f"{name}: {given} layers given, must be num_hidden_layers = {layers}")
