"""Losses of an optimizer step: pure torch, per response token, summed with weights that are fixed beforehand.

A step's loss is sum(weight * loss) over its action tokens, and the weights (`loss_weights`) know the whole
step. So a micro-batch's or a rank's share is just its part of that sum, and the gradient is the same for any
split.

What stands outside a mask is replaced before arithmetic as well as after it: a NaN that is only masked
afterwards still reaches the gradient as 0 * NaN. "Tokens" below are response tokens of a pack; all tensors
are [tokens].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

Tokens = Float[Tensor, " tokens"]
Mask = Bool[Tensor, " tokens"]


@dataclass(frozen=True)
class PolicyLoss:
    """Surrogate loss per token and what it did; outside the mask loss 0, ratio 1, nothing clipped.

    `clipped_low` and `clipped_high` are the tokens whose gradient was cut for too small or too large a ratio.
    """

    loss: Tokens
    ratio: Tokens
    clipped_low: Mask
    clipped_high: Mask


@dataclass(frozen=True)
class Mismatch:
    """Per token, rollout (p) against trainer (q): k3 of d = log p - log q, |d|, and q/p outside [.5, 2]."""

    k3: Tokens
    abs_difference: Tokens
    outside: Mask


def loss_weights(action_counts: Sequence[int], aggregation: str, *, max_response_tokens: int) -> list[float]:
    """What one action token of each trajectory weighs in its optimizer step, over all ranks.

    token_mean: every token the same. sequence_mean: every non-empty trajectory the same. constant: one over
    trajectories times `max_response_tokens`, whatever their lengths (Dr. GRPO, arXiv 2503.20783).
    """
    tokens, nonempty = sum(action_counts), sum(1 for n in action_counts if n)
    if aggregation == "token_mean":
        return [1.0 / tokens if n else 0.0 for n in action_counts]
    if aggregation == "sequence_mean":
        return [1.0 / (nonempty * n) if n else 0.0 for n in action_counts]
    if aggregation == "constant":
        return [1.0 / (len(action_counts) * max_response_tokens) for _ in action_counts]
    raise ValueError(f"aggregation: {aggregation!r} given, allowed: token_mean, sequence_mean, constant")


def total(per_token: Tokens, mask: Mask, weights: Tokens) -> Float[Tensor, ""]:
    """This share of the step's loss."""
    per_token, weights = _inside(mask, per_token, weights)
    return (per_token * weights).sum()


def clip_policy_loss(
    logprobs: Tokens,
    old_logprobs: Tokens,
    advantages: Tokens,
    mask: Mask,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> PolicyLoss:
    """PPO's -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = pi / pi_old (arXiv 1707.06347).

    Two bounds: clip-higher, arXiv 2503.14476. With `dual_clip` c > 1 the loss of a negative advantage is at
    most c |A| (arXiv 1912.09729).
    """
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"dual_clip: {dual_clip} given, must be above 1")
    logprobs, old_logprobs, advantages = _inside(mask, logprobs, old_logprobs, advantages)
    log_ratio = logprobs - old_logprobs
    ratio = log_ratio.detach().exp()
    # The minimum picks the clipped term exactly here; its ratio is then a constant.
    low = (advantages < 0) & (ratio < 1 - clip_low)
    high = (advantages > 0) & (ratio > 1 + clip_high)
    bound = torch.where(low, 1 - clip_low, torch.full_like(ratio, 1 + clip_high))
    if dual_clip is not None:
        dual = (advantages < 0) & (ratio > dual_clip)
        bound, high = torch.where(dual, dual_clip, bound), high | dual
    counted = torch.where(low | high, bound, _exp_where(~(low | high), log_ratio))
    return PolicyLoss(-counted * advantages, ratio, low, high)


def dis_policy_loss(
    logprobs: Tokens, rollout_logprobs: Tokens, advantages: Tokens, mask: Mask, *, low: float, high: float
) -> PolicyLoss:
    """SAO's double-sided importance sampling: -r A inside [1 - low, 1 + high], r = pi / rollout.

    Outside, a token contributes 0 and still counts in the denominator, which `loss_weights` fixed (arXiv
    2607.07508).
    """
    logprobs, rollout_logprobs, advantages = _inside(mask, logprobs, rollout_logprobs, advantages)
    log_ratio = logprobs - rollout_logprobs
    ratio = log_ratio.detach().exp()
    below, above = ratio < 1 - low, ratio > 1 + high
    kept = ~(below | above)
    counted = torch.where(kept, _exp_where(kept, log_ratio), 0.0)
    return PolicyLoss(-counted * advantages, ratio, below, above)


def importance_weights(trainer_logprobs: Tokens, rollout_logprobs: Tokens, mask: Mask, *, cap: float) -> Tokens:
    """Truncated importance weights min(trainer / rollout, cap), without gradient; 1 outside the mask."""
    trainer, rollout = _inside(mask, trainer_logprobs.detach(), rollout_logprobs.detach())
    return torch.where(mask, (trainer - rollout).exp().clamp(max=cap), 1.0)


def value_loss(values: Tokens, old_values: Tokens, targets: Tokens, mask: Mask, *, clip: float | None) -> Tokens:
    """Half squared error per token; with `clip`, the larger of it and that of V kept near V_old."""
    values, old_values, targets = _inside(mask, values, old_values, targets)
    loss = (values - targets).square() / 2
    if clip is not None:
        clipped = old_values + (values - old_values).clamp(-clip, clip)
        loss = torch.maximum(loss, (clipped - targets).square() / 2)
    return loss


def kl_estimate(log_p: Tokens, log_q: Tokens, kind: str) -> Tokens:
    """KL(p || q) from samples of p, d = log p - log q: k1 = d, k2 = d^2/2, k3 = e^-d - 1 + d.

    http://joschu.net/blog/kl-approx.html
    """
    d = log_p - log_q
    if kind == "k1":
        return d
    if kind == "k2":
        return d.square() / 2
    if kind == "k3":
        # expm1: e^-d - 1 of a small d would lose the digits that k3 consists of.
        return torch.expm1(-d) + d
    raise ValueError(f"kl estimator: {kind!r} given, allowed: k1, k2, k3")


def kl_loss(logprobs: Tokens, reference_logprobs: Tokens, mask: Mask, kind: str) -> Tokens:
    """KL penalty to the reference per token, with gradient; 0 outside the mask.

    k1 is refused: its gradient is that of log p, whose expectation under the policy is 0. k2's on-policy
    gradient is that of the reverse KL.
    """
    if kind == "k1":
        raise ValueError("kl estimator: 'k1' given, in the loss its expected gradient is zero; allowed there: k2, k3")
    log_p, log_q = _inside(mask, logprobs, reference_logprobs)
    return kl_estimate(log_p, log_q, kind)


def mismatch_tokens(rollout_logprobs: Tokens, trainer_logprobs: Tokens, mask: Mask) -> Mismatch:
    """How far the trainer is from the engine that sampled, without gradient; 0 outside the mask."""
    rollout, trainer = _inside(mask, rollout_logprobs.detach(), trainer_logprobs.detach())
    ratio = (trainer - rollout).exp()
    return Mismatch(kl_estimate(rollout, trainer, "k3"), (rollout - trainer).abs(), (ratio < 0.5) | (ratio > 2.0))


def _inside(mask: Mask, *tensors: Tokens) -> tuple[Tokens, ...]:
    """The tensors with 0 outside the mask: what stood there reaches neither value nor gradient."""
    return tuple(torch.where(mask, t, 0.0) for t in tensors)


def _exp_where(where: Mask, x: Tokens) -> Tokens:
    """exp(x) where it is used, 1 elsewhere: an exp that overflowed would turn a gradient of 0 into NaN."""
    return torch.where(where, x, 0.0).exp()
