"""The critic's actors: the same learner as the policy's, with a value loss."""

from __future__ import annotations

import numpy as np
import ray
import torch
from torch import nn

from critic.model import build
from rl import losses
from rl.config import DeepSpeedConfig, OptimizerConfig
from rl.learner import LearnerWorker, Stats, per_response, token_stats
from rl.trajectory import Batch, Trajectory


@ray.remote
class CriticWorker(LearnerWorker):
    """One rank of the critic."""

    def build(self) -> tuple[nn.Module, OptimizerConfig, DeepSpeedConfig]:
        """See `LearnerWorker`."""
        critic = self.config.critic
        return build(critic, self.config.policy.path).to(self.device), critic.optimizer, critic.deepspeed

    def loss(self, module: nn.Module, batch: Batch) -> tuple[torch.Tensor, Stats]:
        """See `LossFunction`."""
        values, _ = module(batch)
        f, mask = batch.fields, batch.action_mask
        per_token = losses.value_loss(
            values, f["values"], f["value_targets"], mask, clip=self.config.algorithm.value_clip
        )
        stats = token_stats(mask, {"critic/loss": per_token, "critic/value_mean": values})
        return losses.total(per_token, mask, batch.loss_weights), stats

    def values(self, trajectories: list[Trajectory]) -> list[np.ndarray]:
        """V before each response token and after the last: [response + 1] per trajectory."""

        def function(module: nn.Module, batch: Batch) -> list[np.ndarray]:
            before, after = module(batch)
            return [
                np.append(v, a.float().cpu().numpy()).astype(np.float32)
                for v, a in zip(per_response(batch, before), after, strict=True)
            ]

        return [v for part in self.learner.forward(trajectories, function) for v in part]
