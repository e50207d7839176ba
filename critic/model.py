"""The value model: a backbone of its own and a float32 value head."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import nn

from rl.backbone import hidden_states, load_causal_lm
from rl.config import CriticConfig
from rl.trajectory import Batch


class ValueModel(nn.Module):
    """V(state before each response token) and V(state after the last), of a packed micro-batch."""

    def __init__(self, backbone: nn.Module, hidden_size: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(hidden_size, 1)
        # Zero: the first advantages are then the returns themselves, not noise.
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, batch: Batch) -> tuple[Float[torch.Tensor, " responses"], Float[torch.Tensor, " trajectories"]]:
        """Values before every response token, and after each trajectory's last token; float32, never scaled."""
        hidden = hidden_states(self.backbone, batch)
        states = hidden[torch.cat([batch.predicts, batch.last])].float()
        values = torch.nn.functional.linear(states, self.head.weight.float(), self.head.bias.float()).squeeze(-1)
        return values[: len(batch.predicts)], values[len(batch.predicts) :]


def build(config: CriticConfig, policy_path: str) -> ValueModel:
    """The critic as configured."""
    dtype = torch.bfloat16 if config.deepspeed.dtype == "bf16" else torch.float32
    lm = load_causal_lm(
        config.path or policy_path, dtype, gradient_checkpointing=config.deepspeed.gradient_checkpointing
    )
    return ValueModel(getattr(lm, lm.base_model_prefix), lm.config.hidden_size)
