"""The policy's actors: a DeepSpeed learner per rank, and the frozen reference."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import numpy as np
import ray
import torch
from torch import nn

from indexshare.indexer import positions
from indexshare.replay import overlap, selections
from policy.model import PolicyModel, build, plain_state_dict, recorded
from rl import losses
from rl.config import AlgorithmConfig, Config, DeepSpeedConfig, OptimizerConfig
from rl.learner import LearnerWorker, Stats, per_response, token_stats
from rl.trajectory import Batch, Trajectory, microbatches, pack


def policy_loss(
    a: AlgorithmConfig, batch: Batch, logprobs: torch.Tensor, entropy: torch.Tensor
) -> tuple[torch.Tensor, Stats]:
    """A micro-batch's share of the policy loss, and the step's policy metrics."""
    f, mask = batch.fields, batch.action_mask
    # One on-policy optimizer step needs no pass for the old log-probabilities: they are these.
    trainer = old = f.get("old_logprobs", logprobs.detach())
    if a.policy_loss == "dis":
        old = f["rollout_logprobs"]  # never another one, however many optimizer steps
        surrogate = losses.dis_policy_loss(
            logprobs, f["rollout_logprobs"], f["advantages"], mask, low=a.dis_low, high=a.dis_high
        )
    else:
        surrogate = losses.clip_policy_loss(
            logprobs,
            old,
            f["advantages"],
            mask,
            clip_low=a.clip_low,
            clip_high=a.clip_high,
            dual_clip=a.dual_clip,
        )
    per_token = surrogate.loss
    if a.importance_cap is not None:
        per_token = per_token * losses.importance_weights(old, f["rollout_logprobs"], mask, cap=a.importance_cap)
    if a.entropy_coefficient:
        per_token = per_token - a.entropy_coefficient * entropy
    if a.kl.where == "loss":
        kl = losses.kl_loss(logprobs, f["reference_logprobs"], mask, a.kl.estimator)
        per_token = per_token + a.kl.coefficient * kl
    # log p = the policy that sampled, log q = the policy now: the k3 estimate of KL(sampler || now).
    gap = losses.mismatch_tokens(f["rollout_logprobs"], trainer, mask)
    stats = token_stats(
        mask,
        {
            "policy/loss": per_token,
            "policy/entropy": entropy,
            "policy/clip_fraction": (surrogate.clipped_low | surrogate.clipped_high).float(),
            "policy/clip_fraction_low": surrogate.clipped_low.float(),
            "policy/clip_fraction_high": surrogate.clipped_high.float(),
            "kl/old": losses.kl_estimate(old, logprobs, "k3"),
            "mismatch/k3": gap.k3,
            "mismatch/mean_abs": gap.abs_difference,
            "mismatch/outside": gap.outside.float(),
        },
        minima={"policy/ratio_min": surrogate.ratio},
        maxima={"policy/ratio_max": surrogate.ratio, "mismatch/max_abs": gap.abs_difference},
    )
    return losses.total(per_token, mask, batch.loss_weights), stats


def indexer_loss(base: Any, inputs: list[Any], batch: Batch) -> tuple[torch.Tensor, Stats]:
    """A micro-batch's share of the indexers' distillation loss: what action tokens attend to, among the keys selected.

    `inputs` come from `indexshare.distill.recording`. Its gradient is in the indexers alone.
    """
    from indexshare import distill

    weights = torch.zeros(len(batch.ids), device=batch.ids.device)
    weights[batch.predicts] = torch.where(batch.action_mask, batch.loss_weights, 0.0)
    found = distill.losses(base, inputs, batch.seq_start, weights=weights, support="selected")
    total = torch.stack(list(found.values())).sum()
    mean = float(total.detach()) / max(float(weights.sum()), 1e-30)
    return total, Stats({"indexshare/distill_loss": mean * int(batch.action_mask.sum())})


@ray.remote
class PolicyWorker(LearnerWorker):
    """One rank of the policy."""

    def build(self) -> tuple[nn.Module, OptimizerConfig, DeepSpeedConfig]:
        """See `LearnerWorker`."""
        policy = self.config.policy
        train_indexer = self.config.indexshare.train_indexer
        self.model = build(policy, self.config.rollout.temperature, train_indexer=train_indexer).to(self.device)
        self.model.replay = self.config.indexshare.replay
        return self.model, policy.optimizer, policy.deepspeed

    def loss(self, module: nn.Module, batch: Batch) -> tuple[torch.Tensor, Stats]:
        """See `LossFunction`."""
        settings = self.config.indexshare
        if not settings.train_indexer:
            return policy_loss(self.config.algorithm, batch, *module(batch))
        from indexshare.distill import recording

        with recording(self.model.base) as inputs:
            output = module(batch)
        loss, stats = policy_loss(self.config.algorithm, batch, *output)
        distilled, more = indexer_loss(self.model.base, inputs, batch)
        return loss + settings.distill_coefficient * distilled, stats.merge(more)

    def logprobs(self, trajectories: list[Trajectory], reference: bool = False) -> list[np.ndarray]:
        """Log-probabilities of every response token; under LoRA also the reference's, with the adapter off."""
        model = self.learner.module
        assert isinstance(model, PolicyModel)
        with model.without_adapter() if reference else nullcontext():
            parts = self.learner.forward(trajectories, lambda m, b: per_response(b, m(b)[0]))
        return [a for part in parts for a in part]

    def overlap(self, trajectories: list[Trajectory]) -> dict[int, float]:
        """By Full layer, the share of the engine's selected positions that this policy selects too (a collective).

        Without layers of which no query had to leave keys out.
        """
        found: dict[int, list[float]] = {}

        def measure(module: nn.Module, batch: Batch) -> None:
            with selections(self.model.base) as own:
                module(batch)
            for layer, theirs in recorded(batch).items():
                share = overlap(positions(own[layer], theirs.shape[1]), theirs)
                if not math.isnan(share):
                    found.setdefault(layer, []).append(share)

        for t in trajectories:
            self.learner.forward([t], measure)
        return {layer: float(np.mean(shares)) for layer, shares in found.items()}

    def weights(self) -> dict[str, torch.Tensor] | None:
        """The policy under its checkpoint's own names, on CPU; on rank 0 (a collective)."""
        state = self.learner.state_dict()
        model = self.learner.module
        assert isinstance(model, PolicyModel)
        return plain_state_dict(model, state) if self.rank == 0 else None

    def export(self, directory: str) -> None:
        """A plain Hugging Face folder that transformers and vLLM load (a collective; rank 0 writes)."""
        weights = self.weights()
        if weights is None:
            return
        from transformers import AutoTokenizer

        model = self.learner.module
        assert isinstance(model, PolicyModel)
        model.base.save_pretrained(directory, state_dict=weights)
        AutoTokenizer.from_pretrained(self.config.policy.path).save_pretrained(directory)


@ray.remote
class ReferenceWorker:
    """The frozen initial policy: a plain model, no DeepSpeed."""

    def __init__(self, config: Config) -> None:
        torch.set_num_threads(config.cluster.threads)
        self.config = config
        self.device = "cuda" if config.cluster.device == "gpu" else "cpu"
        self.model: Any = build(config.policy, config.rollout.temperature, lora=False).to(self.device).eval()

    def node(self) -> str:
        """Where this actor lives."""
        return ray.util.get_node_ip_address()

    @torch.no_grad()
    def logprobs(self, trajectories: list[Trajectory]) -> list[np.ndarray]:
        """Reference log-probabilities of every response token."""
        batches = microbatches(trajectories, self.config.step.tokens_per_microbatch)
        packs = [pack(b, self.device) for b in batches]
        return [a for b in packs for a in per_response(b, self.model(b)[0])]
