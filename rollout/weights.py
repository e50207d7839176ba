"""Trainer -> engine: the tensors, their fingerprint, and the check that they fit before anything is loaded."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch


class WeightMismatch(ValueError):
    """Weights that the engine's model does not have in this form; nothing was loaded."""


def checksum(named: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Fingerprint of names, dtypes, shapes and bytes, whatever their order."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(named, key=lambda item: item[0]):
        t = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {t.dtype} {tuple(t.shape)};".encode())
        digest.update(t.flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def expected_shapes(path: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a Hugging Face folder's safetensors, from their headers."""
    from pathlib import Path

    from safetensors import safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(Path(path).glob("*.safetensors")):
        with safe_open(str(file), "pt") as f:
            shapes |= {name: tuple(f.get_slice(name).get_shape()) for name in f.keys()}  # noqa: SIM118
    return shapes


def check_fit(weights: Mapping[str, torch.Tensor], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raise `WeightMismatch` unless names and shapes are the checkpoint's: an exception inside vLLM's reload would
    leave an engine with half of each."""
    missing, unknown = sorted(expected.keys() - weights.keys()), sorted(weights.keys() - expected.keys())
    if missing or unknown:
        raise WeightMismatch(f"weights: missing {missing[:3] or 'none'}, unknown {unknown[:3] or 'none'}")
    for name, shape in expected.items():
        if tuple(weights[name].shape) != shape:
            raise WeightMismatch(f"weights: {name} is {tuple(weights[name].shape)}, the engine has {shape}")
