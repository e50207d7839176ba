"""Whether the critic can be trusted: pure functions of a step's predictions, and the pictures of them.

Everything is over action tokens of the whole step. G is the realised discounted return, never the lambda target.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Bool, Float, Int

from rl.advantages import explained_variance
from rl.summary import spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Array = np.ndarray

QUARTERS = 4

PATIENCE = 5
"""Steps in a row that something must look wrong before it is an alert."""

COLLAPSED = 0.01
"""A critic whose values spread by less than this share of the returns' spread says the same of every state."""

HARMFUL = -0.1
"""Explained variance below which a critic does harm; nearer to 0 a step's few responses decide the sign."""


@dataclass(frozen=True)
class Predictions:
    """A step's action tokens: predicted and realised, which action of its response, and of how many."""

    values: Float[Array, " actions"]
    returns: Float[Array, " actions"]
    position: Int[Array, " actions"]
    """0 for a response's first action."""
    length: Int[Array, " actions"]
    """Actions of the token's response."""


@dataclass(frozen=True)
class Calibration:
    """Tokens in bins of equal count, by predicted value: mean prediction, mean return, and its standard error."""

    predicted: Float[Array, " bins"]
    realised: Float[Array, " bins"]
    error: Float[Array, " bins"]
    count: Int[Array, " bins"]


def predictions(
    values: Sequence[Float[Array, " response"]],
    returns: Sequence[Float[Array, " response"]],
    masks: Sequence[Bool[Array, " response"]],
) -> Predictions:
    """From per-response arrays (without the value after the last token); what the masks leave out is never read."""
    counts = [int(m.sum()) for m in masks]
    return Predictions(
        np.concatenate([np.zeros(0), *(v[m] for v, m in zip(values, masks, strict=True))]),
        np.concatenate([np.zeros(0), *(g[m] for g, m in zip(returns, masks, strict=True))]),
        np.concatenate([np.zeros(0, int), *(np.arange(n) for n in counts)]),
        np.repeat(np.array(counts, int), counts),
    )


def by_position(p: Predictions) -> dict[str, float]:
    """Explained variance by an action's place, in quarters of its response."""
    return _by_quarter("position", p, (p.position * QUARTERS) // np.maximum(p.length, 1))


def by_length(p: Predictions, max_response_tokens: int) -> dict[str, float]:
    """Explained variance by the response's number of actions, in quarters of the budget.

    Of the budget and not of what there is, so that a quarter means the same in every step.
    """
    return _by_quarter("length", p, np.minimum((p.length - 1) * QUARTERS // max_response_tokens, QUARTERS - 1))


def scalars(p: Predictions, max_response_tokens: int) -> dict[str, float]:
    """What a step's predictions come to, by metric name; nothing of nothing."""
    if not len(p.values):
        return {}
    error = np.abs(p.values - p.returns)
    return (
        {
            "critic/explained_variance": explained_variance(p.values, p.returns),
            "critic/error": float(error.mean()),
            "critic/error_first": float(error[p.position == 0].mean()),
            "critic/error_last": float(error[p.position == p.length - 1].mean()),
            "critic/value_std": float(p.values.std()),
        }
        | spread("critic/return_", p.returns)
        | by_position(p)
        | by_length(p, max_response_tokens)
    )


def calibration(p: Predictions, bins: int = 10) -> Calibration:
    """Predicted against realised; a critic that means what it says lies on the diagonal.

    At most `bins`, each with near as many tokens; fewer where there are fewer tokens.
    """
    parts = [part for part in np.array_split(np.argsort(p.values, kind="stable"), bins) if len(part)]
    means = [(p.values[i].mean(), p.returns[i].mean(), p.returns[i].std() / len(i) ** 0.5, len(i)) for i in parts]
    predicted, realised, error, count = np.array(means).reshape(-1, 4).T
    return Calibration(predicted, realised, error, count.astype(int))


def expert_load(shares: Float[Array, "layers experts"]) -> dict[str, float]:
    """The busiest and the idlest expert, 1 being an even share, and the load's entropy, 1 where it is even."""
    shares = np.asarray(shares, np.float64)
    experts = shares.shape[-1]
    entropy = -(shares * np.log(np.where(shares > 0, shares, 1.0))).sum(-1)
    return {
        "critic/expert_load_max": float(shares.max() * experts),
        "critic/expert_load_min": float(shares.min() * experts),
        "critic/expert_load_entropy": float(entropy.mean() / np.log(experts)) if experts > 1 else 1.0,
    }


def alerts(history: Sequence[Mapping[str, float]]) -> dict[str, str]:
    """What is wrong with a critic: kind to a line that says it, from the metrics of its last steps (oldest first).

    Frozen: its weights did not move in any update. Collapsed: it gives every state nearly the same value although
    returns differ. Harmful: it explains clearly less than a constant would. Each for `PATIENCE` steps in a row.
    """
    recent = [m for m in history if "critic/explained_variance" in m][-PATIENCE:]
    if len(recent) < PATIENCE:
        return {}
    found = {}
    if all(m.get("critic/weights_moved", 1.0) == 0.0 for m in recent):
        found["frozen"] = (
            f"the critic is frozen: its weights did not move in {PATIENCE} steps; look at critic.optimizer.lr and at"
            " what trains"
        )
    if all(_collapsed(m) for m in recent):
        found["collapsed"] = (
            f"the critic has collapsed: its values spread by {recent[-1]['critic/value_std']:.2g}, the returns by"
            f" {recent[-1]['critic/return_std']:.2g}"
        )
    if all(m["critic/explained_variance"] < HARMFUL for m in recent):
        found["harmful"] = (
            f"the critic does harm: explained variance below {HARMFUL} for {PATIENCE} steps, now"
            f" {recent[-1]['critic/explained_variance']:.2g}"
        )
    return found


def calibration_figure(c: Calibration) -> Figure:
    """Mean return against mean prediction, bin by bin, beside the diagonal."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.8, 3.6), layout="constrained")
    axes = figure.add_subplot()
    axes.grid(alpha=0.3)
    if len(c.predicted):
        ends = [min(c.predicted.min(), c.realised.min()), max(c.predicted.max(), c.realised.max())]
        axes.plot(ends, ends, color="grey", lw=1, ls="--", label="calibrated")
        axes.errorbar(c.predicted, c.realised, yerr=c.error, marker="o", ms=4, lw=1.5, capsize=2, label="critic")
        axes.legend(frameon=False)
    axes.set(xlabel="predicted value", ylabel="realised return")
    return figure


def _collapsed(m: Mapping[str, float]) -> bool:
    spread = m.get("critic/return_std", 0.0)
    return spread > 0 and m.get("critic/value_std", spread) < COLLAPSED * spread


def _by_quarter(name: str, p: Predictions, quarter: Int[Array, " actions"]) -> dict[str, float]:
    """A quarter whose returns do not vary has no explained variance and is left out."""
    found = {}
    for q in range(QUARTERS):
        values, returns = p.values[quarter == q], p.returns[quarter == q]
        if len(returns) and returns.min() < returns.max():
            found[f"critic/explained_variance/{name}_{q + 1}of{QUARTERS}"] = explained_variance(values, returns)
    return found
