"""How well the critic judged a step: values before the update against what came of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from rl.advantages import explained_variance

QUARTERS = 4


def value_metrics(
    values: Sequence[Float[np.ndarray, " _"]], returns: Sequence[Float[np.ndarray, " _"]], max_response_tokens: int
) -> dict[str, float]:
    """`critic/...` of a step from every trajectory's values and realised returns, both at its actions.

    Explained variance also by an action's place in its response (quarters of that response) and by the response's
    number of actions (quarters of the budget). A quarter whose returns do not vary has none and is left out.
    """
    v, g = np.concatenate(values), np.concatenate(returns)
    if not len(g):
        return {}
    place = np.concatenate([np.arange(len(x)) * QUARTERS // max(len(x), 1) for x in returns])
    length = np.concatenate(
        [np.full(len(x), min((len(x) - 1) * QUARTERS // max_response_tokens, QUARTERS - 1)) for x in returns]
    )
    metrics = {
        "critic/explained_variance": explained_variance(v, g),
        "critic/error": float(np.abs(v - g).mean()),
    } | spread("critic/return_", g)
    for name, bucket in (("position", place), ("length", length)):
        for quarter in range(QUARTERS):
            inside = bucket == quarter
            if inside.any() and g[inside].min() < g[inside].max():
                key = f"critic/explained_variance/{name}_{quarter + 1}of{QUARTERS}"
                metrics[key] = explained_variance(v[inside], g[inside])
    return metrics


def spread(prefix: str, x: Float[np.ndarray, " n"]) -> dict[str, float]:
    """Mean, population deviation and extremes; nothing of nothing."""
    if not len(x):
        return {}
    return {f"{prefix}{f.__name__}": float(f(x)) for f in (np.mean, np.std, np.min, np.max)}
