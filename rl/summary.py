"""A step's trajectories in numbers: reward, length, truncation, reference KL."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from rl.trajectory import Trajectory


def summarise(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Metrics of scored trajectories; every token metric is a mean over action tokens of the whole step."""
    scores = np.array([t.score for t in trajectories], dtype=float)
    lengths = np.array([len(t.response_ids) for t in trajectories])
    metrics = {
        "reward/mean": float(scores.mean()),
        "reward/std": float(scores.std()),
        "rollout/truncated": float(np.mean([t.finish_reason == "length" for t in trajectories])),
        "rollout/empty": float(np.sum(lengths == 0)),
        "rollout/response_tokens": float(lengths.mean()),
        "rollout/prompt_tokens": float(np.mean([len(t.prompt_ids) for t in trajectories])),
    }
    tasks = {t.task for t in trajectories}
    if len(tasks) > 1:
        for task in sorted(tasks):
            metrics[f"reward/task/{task}"] = float(
                np.mean([s for s, t in zip(scores, trajectories, strict=True) if t.task == task])
            )
    return metrics | _turns(trajectories) | _reference_kl(trajectories)


def spread(prefix: str, x: Float[np.ndarray, " n"]) -> dict[str, float]:
    """Mean, population deviation and extremes; nothing of nothing."""
    if not len(x):
        return {}
    return {f"{prefix}{f.__name__}": float(f(x)) for f in (np.mean, np.std, np.min, np.max)}


def _turns(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Of an environment's episodes: mean turns (runs of actions) and mean tokens that it wrote."""
    masks = [t.action_mask for t in trajectories if t.token_rewards is not None]
    if not masks:
        return {}
    starts = [np.diff(mask.astype(int), prepend=0) == 1 for mask in masks]
    return {
        "rollout/turns": float(np.mean([s.sum() for s in starts])),
        "rollout/observation_tokens": float(np.mean([np.sum(~mask) for mask in masks])),
    }


def _reference_kl(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Mean of log p - log q over action tokens, from plain values, p the policy that sampled."""
    gaps = [
        ((t.old_logprobs if t.old_logprobs is not None else t.rollout_logprobs) - t.reference_logprobs)[t.action_mask]
        for t in trajectories
        if t.reference_logprobs is not None
    ]
    tokens = np.concatenate(gaps) if gaps else np.array([])
    return {"kl/reference": float(tokens.mean())} if len(tokens) else {}
