"""The critic's actors: the same learner as the policy's, with a value loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import ray
import torch
from torch import Tensor, nn

from critic import pretrained
from critic.diagnostics import expert_load
from critic.experts import Routing, balance_loss, expert_counts
from critic.model import DTYPES, ValueModel, build, parameter_counts
from critic.returns import RunningReturns, first_returns, summed, world_size
from rl import losses
from rl.config import Config, ConfigError, CriticConfig, DeepSpeedConfig, OptimizerConfig
from rl.learner import Learner, LearnerWorker, Stats, per_response, token_stats
from rl.plan import reference_in_critic
from rl.trajectory import Batch, Trajectory, microbatches, pack


@ray.remote
class CriticWorker(LearnerWorker):
    """One rank of the critic."""

    _fingerprint: tuple[float, ...] = ()
    """Of the weights after the last update; empty where they may have changed since."""

    def build(self) -> tuple[nn.Module, OptimizerConfig, DeepSpeedConfig]:
        """See `LearnerWorker`."""
        critic = self.config.critic
        for dtype in (critic.deepspeed.dtype, critic.trunk_dtype):
            check_precision(dtype, self.device)
        temperature = self.config.rollout.temperature if reference_in_critic(self.config) else None
        self.model = build(critic, self.config.policy.path, self.device, reference_temperature=temperature)
        if critic.pretrained is not None:
            pretrained.read(critic.pretrained, self.model)
        if critic.expert_parallel_size > 1:
            self.model.spread(critic.expert_parallel_size)
        return self.model, critic.optimizer, learner_settings(critic)

    def setup(self, host: str, port: int) -> dict[str, int]:
        """See `LearnerWorker`; beside the sums, what trains and what does not by part, the trunk's too."""
        super().setup(host, port)
        parts = parameter_counts(self.model)
        trained = sum(n for part, n in parts.items() if part.startswith("trained/"))
        return {"parameters": sum(parts.values()), "trained": trained} | parts

    def loss(self, module: nn.Module, batch: Batch, shares: Tensor | None = None) -> tuple[torch.Tensor, Stats]:
        """See `LossFunction`."""
        return critic_loss(self.config, module, batch, shares)

    def update(self, trajectories: list[Trajectory], lr_factor: float) -> tuple[Stats, float]:
        """See `LearnerWorker`."""
        shares = step_shares(self.learner, self.model, trajectories, self.config.step.tokens_per_microbatch)
        before = self._fingerprint or fingerprint(self.model)
        stats, norm = self.learner.step(trajectories, partial(self.loss, shares=shares), lr_factor)
        self._fingerprint = fingerprint(self.model)
        stats.maxima["critic/weights_moved"] = float(self._fingerprint != before)
        return stats, norm

    def load(self, directory: str) -> None:
        """See `LearnerWorker`."""
        super().load(directory)
        self._fingerprint = ()

    def export(self, directory: str) -> None:
        """A folder for `critic.pretrained` (a collective; rank 0 writes)."""
        state = self.learner.state_dict()
        if self.rank == 0:
            pretrained.write(directory, self.config.critic, self.model, state)

    def values(self, trajectories: list[Trajectory], same_step: bool = False) -> list[np.ndarray]:
        """V before each response token and after the last: [response + 1] per trajectory.

        A new step begins unless it is the `same_step`: states of the last one are forgotten, and the scale of returns
        is set by what these trajectories scored (see `critic.returns`). Values and updates of a step share one scale.
        """
        if same_step:
            return values(self.learner, trajectories)
        if self.model.trunk is not None:
            self.model.trunk.new_step()
        if self.config.critic.returns != "plain":
            RunningReturns(self.model.head, self.config.critic.returns).observe(
                first_returns(trajectories, self.config.algorithm.gamma)
            )
        step = self.config.step
        only_update = step.epochs * step.optimizer_steps * self.config.critic.updates_per_policy_update == 1
        return values(self.learner, trajectories, then_step=only_update)

    def logprobs(self, trajectories: list[Trajectory]) -> list[np.ndarray]:
        """The reference's, of every response token; of what `values` has just judged, nothing is computed again."""
        trunk = self.model.trunk
        assert trunk is not None
        packs = [pack(b, self.device) for b in microbatches(trajectories, self.config.step.tokens_per_microbatch)]
        return [a for b in packs for a in per_response(b, trunk.reference_logprobs(b))]


def fingerprint(model: nn.Module) -> tuple[float, ...]:
    """A sum of every trained parameter, or of this rank's part of it: a critic that is frozen by mistake keeps it."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return tuple(float(getattr(p, "ds_tensor", p).detach().sum(dtype=torch.float64)) for p in trained)


def values(learner: Learner, trajectories: Sequence[Trajectory], *, then_step: bool = False) -> list[np.ndarray]:
    """V before each response token and after the last, of a rank's trajectories; `then_step`: see `Learner.forward`."""

    def function(module: nn.Module, batch: Batch) -> list[np.ndarray]:
        before, after, _ = module(batch)
        return [
            np.append(v, a.float().cpu().numpy()).astype(np.float32)
            for v, a in zip(per_response(batch, before), after, strict=True)
        ]

    return [v for part in learner.forward(trajectories, function, then_step=then_step) for v in part]


def critic_loss(config: Config, module: nn.Module, batch: Batch, shares: Tensor | None) -> tuple[torch.Tensor, Stats]:
    """A micro-batch's share of value and balance loss, in the unit of the head's scale, and the critic's metrics.

    `shares` [layers, experts] are those of the whole optimizer step; None: this micro-batch is the whole.
    """
    predicted, _, routing = module(batch)
    f, mask = batch.fields, batch.action_mask
    head: Any = module.head
    value = losses.value_loss(predicted, f["values"], f["value_targets"], mask, clip=config.algorithm.value_clip)
    value = value / head.spread.square()
    stats = token_stats(mask, {"critic/loss": value, "critic/value_mean": predicted})
    per_token = value
    if routing is not None:
        shares = expert_shares(expert_counts(routing, mask)) if shares is None else shares
        balance = balance_loss(routing, shares)
        per_token = value + config.critic.experts.balance_coefficient * balance
        stats = stats.merge(_routing_stats(routing, shares, balance, mask))
    return losses.total(per_token, mask, batch.loss_weights), stats


def step_shares(learner: Learner, model: ValueModel, trajectories: Sequence[Trajectory], tokens: int) -> Tensor | None:
    """Every expert's share of an optimizer step's action tokens, over all ranks: [layers, experts].

    The balance loss wants them before its first backward, so they cost a pass of the experts (not of a cached trunk).
    None where nobody routes, or where one micro-batch is the whole step and can count for itself.
    """
    routed = model.routed
    alone = world_size() == 1 and len(microbatches(trajectories, tokens)) == 1
    if not routed or alone:
        return None
    counts = sum(learner.forward(trajectories, lambda m, b: expert_counts(m(b)[2], b.action_mask)))
    assert isinstance(counts, Tensor)
    return expert_shares(summed(counts))


def expert_shares(counts: Tensor) -> Tensor:
    """Counts [layers, experts] as shares of a layer's sum; even where nothing was counted."""
    sums = counts.sum(-1, keepdim=True)
    return torch.where(sums > 0, counts / sums.clamp(min=1), 1.0 / counts.shape[-1])


def _routing_stats(routing: Routing, shares: Tensor, balance: Tensor, mask: Tensor) -> Stats:
    p = routing.probabilities.detach()
    entropy = -(p * p.clamp(min=1e-30).log()).sum(-1).mean(0)
    stats = token_stats(mask, {"critic/expert_balance": balance, "critic/router_entropy": entropy})
    del stats.sums["tokens"]  # counted already
    if mask.any():
        load = expert_load(shares.cpu().numpy())
        stats.maxima = {"critic/expert_load_max": load.pop("critic/expert_load_max")}
        stats.minima = load
    return stats


def learner_settings(critic: CriticConfig) -> DeepSpeedConfig:
    """How DeepSpeed runs what trains.

    Experts on a frozen trunk keep float32 weights and multiply in 16 bits (`critic.experts`): they are their own
    master copy, so router, norms and head are float32 throughout.
    """
    return replace(critic.deepspeed, dtype="fp32") if critic.freeze == "encoder" else critic.deepspeed


def check_precision(dtype: str, device: str) -> None:
    """Raise ConfigError where the device cannot multiply in a precision."""
    x = torch.ones(8, 8, dtype=DTYPES[dtype], device=device)
    try:
        (x @ x).sum().item()
    except RuntimeError as error:
        raise ConfigError(
            f"critic.deepspeed.dtype, critic.trunk_dtype: {dtype} given, {device} cannot multiply in it"
        ) from error
