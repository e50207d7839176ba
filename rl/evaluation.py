"""How good a policy is on held-out prompts: greedy, sampled, and the best of k samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float
from scipy.special import betaln

from rl import rewards
from rl.config import EvalConfig
from rl.trajectory import Prompt, Trajectory
from rollout.pool import RolloutPool

STEP = -1
"""In place of a step in the sampling seeds: every evaluation of a run asks with the same ones."""


@dataclass(frozen=True)
class Evaluation:
    """Scored responses to held-out prompts."""

    sampled: list[Trajectory]
    """`samples` of each prompt, prompt by prompt."""
    greedy: list[Trajectory]
    """One of each prompt, or none at all."""
    samples: int

    @property
    def scores(self) -> Float[np.ndarray, "prompts samples"]:
        """Scores of the sampled responses."""
        return np.array([_score(t) for t in self.sampled], float).reshape(-1, self.samples)

    def metrics(self) -> dict[str, float]:
        """`eval/...`: means over prompts; lengths are those of the sampled responses."""
        scores = self.scores
        found = {
            "eval/success": float(scores.mean()),
            "eval/response_tokens": float(np.mean([len(t.response_ids) for t in self.sampled])),
            "eval/truncated": float(np.mean([t.finish_reason == "length" for t in self.sampled])),
        }
        if self.greedy:
            found["eval/greedy"] = float(np.mean([_score(t) for t in self.greedy]))
        return found | {f"eval/pass@{k}": float(best_of_k(scores, k).mean()) for k in ks(self.samples)}


def evaluate(pool: RolloutPool, prompts: Sequence[Prompt], score: rewards.Reward, settings: EvalConfig) -> Evaluation:
    """Generate and score. Raises what `RolloutPool.generate` and `rewards.score` raise."""
    sampled = pool.generate(prompts, settings.samples, step=STEP, temperature=settings.temperature)
    greedy = pool.generate(prompts, 1, step=STEP, temperature=0.0) if settings.greedy else []
    scores = rewards.score(score, [*sampled, *greedy])
    scored = [replace(t, score=s) for t, s in zip([*sampled, *greedy], scores, strict=True)]
    return Evaluation(scored[: len(sampled)], scored[len(sampled) :], settings.samples)


def ks(samples: int) -> list[int]:
    """Powers of two from 2 to `samples`; pass@1 is the mean itself."""
    return [2**i for i in range(1, samples.bit_length())]


def best_of_k(scores: Float[np.ndarray, "*batch n"], k: int) -> Float[np.ndarray, "*batch"]:
    """Unbiased estimate of the expected best score of k samples, from n >= k of them.

    The mean, over all subsets of k of the n samples, of the subset's best: the i-th smallest of the n is the best of
    C(i-1, k-1) subsets. Of scores 0 and 1 that is pass@k as Chen et al. (arXiv 2107.03374) estimate it,
    1 - C(n-c, k) / C(n, k) with c successes. Raises ValueError unless 1 <= k <= n.
    """
    n = scores.shape[-1]
    if not 1 <= k <= n:
        raise ValueError(f"k: {k} given, must be 1 to the {n} samples")
    rank = np.arange(1, n + 1)
    weights = np.zeros(n)
    weights[k - 1 :] = np.exp(_log_binomial(rank[k - 1 :] - 1, k - 1) - _log_binomial(np.array(n), k))
    return np.sort(scores, axis=-1) @ weights


def _log_binomial(n: np.ndarray, k: int) -> np.ndarray:
    """log C(n, k); the binomials themselves leave float64 from about n = 1,000 on."""
    return -betaln(n - k + 1, k + 1) - np.log(n + 1)


def _score(t: Trajectory) -> float:
    assert t.score is not None
    return t.score
