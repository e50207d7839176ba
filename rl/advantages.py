"""Advantages and value targets of a step: pure numpy, float64 inside, one response at a time.

Everything runs over *actions*, the tokens that the policy sampled. Observation tokens, written by an
environment or a tool, are taken out before any recurrence and get 0 back: neither gamma nor lambda decays
across them, and whatever stands in their place is never read.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy.signal import lfilter

Array = np.ndarray


def gae(
    values: Float[Array, " response+1"],
    rewards: Float[Array, " response"],
    action_mask: Bool[Array, " response"],
    *,
    gamma: float,
    lam: float,
    bootstrap_value: float,
) -> Float[Array, " response"]:
    """Generalized advantage estimation over actions (arXiv 1506.02438, eq. 16), 0 on observations.

    The successor of an action is the next action; of the last one it is a state worth `bootstrap_value` (0
    where the episode ended). `values[-1]`, the value after the last token, is read only if the caller passes
    it as that.
    """
    if len(values) != len(action_mask) + 1:
        raise ValueError(f"values: {len(values)} given, must be one more than the {len(action_mask)} response tokens")
    v = np.asarray(values[:-1], np.float64)[action_mask]
    successors = np.append(v, bootstrap_value)[1:]
    td_errors = _rewards_of_actions(rewards, action_mask) + gamma * successors - v
    return _on_tokens(_discounted_sums(td_errors, gamma * lam), action_mask)


def returns(
    rewards: Float[Array, " response"],
    action_mask: Bool[Array, " response"],
    *,
    gamma: float,
    bootstrap_value: float = 0.0,
) -> Float[Array, " response"]:
    """Realised discounted return from each action on, 0 on observations."""
    r = _rewards_of_actions(rewards, action_mask)
    if len(r):
        r[-1] += gamma * bootstrap_value
    return _on_tokens(_discounted_sums(r, gamma), action_mask)


def adaptive_lambda(actions: int, alpha: float = 0.05) -> float:
    """1 - 1/(alpha * actions), at least 0: reaches further in longer responses (VAPO, arXiv 2504.05118)."""
    return max(0.0, 1.0 - 1.0 / (alpha * actions)) if actions else 0.0


def place_rewards(
    score: float,
    action_mask: Bool[Array, " response"],
    token_rewards: Float[Array, " response"] | None = None,
) -> Float[Array, " response"]:
    """Rewards per token: the score on the last action, `token_rewards` (an environment's) on their actions.

    What falls on an observation is carried back to the action before it. What comes before the first action
    is no action's doing and is left out, as is everything of a response without actions.
    """
    given = np.zeros(len(action_mask)) if token_rewards is None else token_rewards
    r = _rewards_of_actions(given, action_mask)
    if len(r):
        r[-1] += score
    return _on_tokens(r, action_mask)


def overlong_penalty(tokens: int, max_response_tokens: int, buffer: int) -> float:
    """Soft overlong punishment (DAPO, arXiv 2503.14476, eq. 13), in [-1, 0].

    0 up to `buffer` tokens before the budget, then falling linearly to -1 at the budget. `buffer` 0 never punishes.
    """
    over = tokens - (max_response_tokens - buffer)
    return -min(over / buffer, 1.0) if buffer and over > 0 else 0.0


def kl_tokens(
    log_p: Float[Array, " response"], log_q: Float[Array, " response"], kind: str
) -> Float[Array, " response"]:
    """KL(p || q) per token from samples of p, d = log p - log q: k1 = d, k2 = d^2/2, k3 = e^-d - 1 + d.

    http://joschu.net/blog/kl-approx.html. Tokens outside the action mask are computed too: the caller masks.
    """
    d = np.asarray(log_p, np.float64) - np.asarray(log_q, np.float64)
    if kind == "k1":
        return d
    if kind == "k2":
        return d * d / 2
    if kind == "k3":
        return np.expm1(-d) + d
    raise ValueError(f"kl estimator: {kind!r} given, allowed: k1, k2, k3")


def per_token_kl_rewards(
    kl: Float[Array, " response"], action_mask: Bool[Array, " response"], coefficient: float
) -> Float[Array, " response"]:
    """The KL penalty as a reward on every action, 0 on observations."""
    return np.where(action_mask, -coefficient * np.asarray(kl, np.float64), 0.0)


def total_reward(rewards: Float[Array, " response"]) -> float:
    """Undiscounted sum of a response's rewards."""
    return float(np.sum(rewards, dtype=np.float64))


def whiten(arrays: Sequence[Float[Array, " _"]], masks: Sequence[Bool[Array, " _"]]) -> list[Float[Array, " _"]]:
    """Mean 0 and population deviation 1 over all action tokens of the step; 0 outside the masks.

    The arrays are the whole step: whitening a rank's or a micro-batch's share is another quantity.
    """
    kept = [np.asarray(a, np.float64)[m] for a, m in zip(arrays, masks, strict=True)]
    tokens = np.concatenate(kept) if kept else np.zeros(0)
    if not len(tokens):
        return [np.zeros(len(m)) for m in masks]
    # The epsilon keeps rounding noise of equal advantages, about 1e-17, from being blown up to 1.
    mean, scale = tokens.mean(), tokens.std() + 1e-8
    return [_on_tokens((k - mean) / scale, m) for k, m in zip(kept, masks, strict=True)]


def group_advantages(
    scores: Float[Array, " n"], groups: Int[Array, " n"], *, normalize_std: bool
) -> tuple[Float[Array, " n"], int]:
    """Group-relative advantage of every trajectory, and how many groups had no variance (exactly 0 there).

    (r - mean) / (unbiased deviation + 1e-6), GRPO, arXiv 2402.03300; without the division Dr. GRPO, arXiv
    2503.20783. Raises ValueError for a group of one: it has nothing to be relative to.
    """
    scores = np.asarray(scores, np.float64)
    out, flat = np.zeros(len(scores)), 0
    for group in np.unique(groups):
        members = np.asarray(groups) == group
        r = scores[members]
        if len(r) < 2:
            raise ValueError(f"group {group}: 1 sample given, a group-relative advantage needs at least 2")
        if r.min() == r.max():
            flat += 1
            continue
        centred = r - r.mean()
        out[members] = centred / (r.std(ddof=1) + 1e-6) if normalize_std else centred
    return out, flat


def explained_variance(values: Float[Array, " n"], realised: Float[Array, " n"]) -> float:
    """1 - Var(G - V) / Var(G) over action tokens: 1 is perfect, a constant reaches 0.

    0, too, where the returns G do not vary: there is nothing to explain.
    """
    g = np.asarray(realised, np.float64)
    if not len(g) or g.min() == g.max():
        return 0.0
    return float(1.0 - np.var(g - np.asarray(values, np.float64)) / np.var(g))


def _rewards_of_actions(
    rewards: Float[Array, " response"], action_mask: Bool[Array, " response"]
) -> Float[Array, " actions"]:
    """Each action's reward, with that of the observations up to the next action."""
    action_of = np.cumsum(action_mask) - 1
    known = action_of >= 0
    given = np.asarray(rewards, np.float64)
    return np.bincount(action_of[known], given[known], minlength=int(np.sum(action_mask))).astype(np.float64)


def _discounted_sums(x: Float[Array, " actions"], factor: float) -> Float[Array, " actions"]:
    """y[t] = x[t] + factor * y[t+1]: a first-order filter run backwards."""
    return lfilter([1.0], [1.0, -factor], x[::-1])[::-1]


def _on_tokens(x: Float[Array, " actions"], action_mask: Bool[Array, " response"]) -> Float[Array, " response"]:
    out = np.zeros(len(action_mask))
    out[action_mask] = x
    return out
