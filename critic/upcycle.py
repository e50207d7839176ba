"""A dense MLP made into experts, each a copy of it: the same function until they learn to differ.

Sparse upcycling, arXiv 2212.05055.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from critic.experts import Experts, Routing
from rl.config import ConfigError, ExpertsConfig


class UpcycledMLP(nn.Module):
    """In a decoder layer's place of `mlp`: experts that start as copies of what was there."""

    def __init__(self, mlp: Any, config: ExpertsConfig, dtype: torch.dtype) -> None:
        super().__init__()
        gate, up, down = (getattr(mlp, name).weight for name in ("gate_proj", "up_proj", "down_proj"))
        self.experts = Experts(gate.shape[1], gate.shape[0], config.count, config.top_k, dtype).to(gate.device)
        with torch.no_grad():
            self.experts.gate_up.copy_(torch.cat([gate, up]).expand_as(self.experts.gate_up))
            self.experts.down.copy_(down.expand_as(self.experts.down))
        self.routings: list[Routing] | None = None
        """Where the running forward collects how tokens went; None outside it, also in checkpointing's second one."""

    def forward(self, x: Tensor) -> Tensor:
        """x [1, tokens, hidden] to the same."""
        y, routing = self.experts(x[0])
        if self.routings is not None:
            self.routings.append(routing)
        return y.to(x.dtype)[None]


def upcycle(layers: Iterable[Any], config: ExpertsConfig, dtype: torch.dtype) -> None:
    """Exchange the dense MLPs of the layers, in place; layers with experts keep theirs.

    Raises ConfigError where an MLP is not gate, up and down with SiLU between and no biases.
    """
    for layer in layers:
        if hasattr(layer.mlp, "experts"):
            continue
        projections = [getattr(layer.mlp, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
        activation = type(getattr(layer.mlp, "act_fn", None)).__name__
        plain = all(isinstance(p, nn.Linear) and p.bias is None for p in projections)
        if not plain or activation not in ("SiLUActivation", "SiLU"):
            raise ConfigError(
                f"critic.experts.upcycle: a {type(layer.mlp).__name__} with {activation} given, must be false: only"
                " gated SiLU MLPs without biases become experts"
            )
        layer.mlp = UpcycledMLP(layer.mlp, config, dtype)
