"""Trainer -> engine: the tensors, their fingerprint, and the check that they fit before anything is loaded."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch


class WeightMismatch(ValueError):
    """Weights that the engine's model does not have in this form; nothing was loaded."""


def checksum(named: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Fingerprint of names, dtypes, shapes and bytes, whatever their order."""
    digest = hashlib.sha256()  # in hardware on current processors: twice as fast there as blake2b
    for name, tensor in sorted(named, key=lambda item: item[0]):
        t = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {t.dtype} {tuple(t.shape)};".encode())
        digest.update(t.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:32]


def expected_shapes(path: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a Hugging Face model's safetensors, from their headers.

    `path` is a folder, or a model's name on the Hub. Layers beyond `num_hidden_layers` (a speculative head's) are left
    out: neither transformers nor the engine loads them.
    """
    import json

    from huggingface_hub import snapshot_download
    from safetensors import safe_open

    folder = (
        Path(path) if Path(path).is_dir() else Path(snapshot_download(path, allow_patterns=["*.json", "*.safetensors"]))
    )
    index = folder / "model.safetensors.index.json"
    files = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"}
    layers = json.loads((folder / "config.json").read_text()).get("num_hidden_layers")
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(files):
        with safe_open(str(folder / file), "pt") as f:
            shapes |= {name: tuple(f.get_slice(name).get_shape()) for name in f.keys()}  # noqa: SIM118
    return {name: shape for name, shape in shapes.items() if layers is None or _layer(name) < layers}


def _layer(name: str) -> int:
    """The layer a weight belongs to; -1 for none."""
    found = re.match(r"model\.layers\.(\d+)\.", name)
    return int(found[1]) if found else -1


def check_fit(weights: Mapping[str, torch.Tensor], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raise `WeightMismatch` unless names and shapes are the checkpoint's: an exception inside vLLM's reload would
    leave an engine with half of each."""
    missing, unknown = sorted(expected.keys() - weights.keys()), sorted(weights.keys() - expected.keys())
    if missing or unknown:
        raise WeightMismatch(f"weights: missing {missing[:3] or 'none'}, unknown {unknown[:3] or 'none'}")
    for name, shape in expected.items():
        if tuple(weights[name].shape) != shape:
            raise WeightMismatch(f"weights: {name} is {tuple(weights[name].shape)}, the engine has {shape}")
