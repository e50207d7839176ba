"""Statistics of a few seeds, pure: interquartile mean, bootstrap intervals, permutation test.

The first two are what `rliable` (arXiv 2108.13264) reports, here from scipy: that package would bring nine others
(pandas, arch, statsmodels, seaborn, ...) for a trimmed mean and a percentile bootstrap, and has no test. A run gives
one number, so an arm is one stratum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float
from scipy import stats

CONFIDENCE = 0.95
RESAMPLES = 9999
SEEDS_FOR_A_CLAIM = 10
"""Seeds of each arm below which no statement of significance is made."""


def iqm(values: Float[np.ndarray, "*batch n"], axis: int = -1) -> Float[np.ndarray, "*batch"]:
    """Interquartile mean: the mean without the lowest and the highest floor(n / 4); with n < 4 the plain mean."""
    return np.asarray(stats.trim_mean(values, 0.25, axis=axis))


def iqm_interval(values: Float[np.ndarray, " n"], seed: int = 0) -> tuple[float, float] | None:
    """Percentile bootstrap interval of the interquartile mean over seeds; None with fewer than two."""
    return _bootstrap((values,), iqm, seed)


def iqm_difference(a: Float[np.ndarray, "*batch n"], b: Float[np.ndarray, "*batch m"], axis: int = -1) -> np.ndarray:
    """Interquartile mean of `a` less that of `b`."""
    return iqm(a, axis) - iqm(b, axis)


def difference_interval(
    a: Float[np.ndarray, " n"], b: Float[np.ndarray, " m"], seed: int = 0
) -> tuple[float, float] | None:
    """The same of the difference, resampled within each arm (stratified); None where an arm has fewer than two."""
    return _bootstrap((a, b), iqm_difference, seed)


def permutation_p(
    a: Float[np.ndarray, "*batch n"], b: Float[np.ndarray, "*batch m"], resamples: int = RESAMPLES, seed: int = 0
) -> np.ndarray:
    """Two-sided p of the difference of interquartile means if the arms' labels meant nothing; shape `*batch`.

    Exact where `resamples` covers every assignment, else (1 + as extreme) / (1 + resamples). Holds its level for any
    number of seeds and any distribution, which a bootstrap interval does only as seeds become many.
    """
    found = stats.permutation_test(
        (a, b),
        iqm_difference,
        vectorized=True,
        n_resamples=resamples,
        batch=100,
        axis=-1,
        rng=np.random.default_rng(seed),
    )
    return np.asarray(found.pvalue)


def paired_p(
    a: Float[np.ndarray, "*batch n"], b: Float[np.ndarray, "*batch n"], resamples: int = RESAMPLES, seed: int = 0
) -> np.ndarray:
    """Two-sided p of the mean difference of pairs if either of a pair could have been the other; shape `*batch`.

    A sign-flip test: (1 + flips with as large a mean) / (1 + resamples). It holds its level for any distribution of
    differences around 0 that is symmetric.
    """
    difference = a - b
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], (difference.shape[-1], resamples))
    observed = np.abs(difference.sum(-1))[..., None]
    return np.asarray((1 + (np.abs(difference @ signs) >= observed - 1e-9).sum(-1)) / (1 + resamples))


def holm(ps: Sequence[float]) -> list[float]:
    """p-values adjusted for being several (Holm 1979): each test may then be judged at the level of one."""
    adjusted, largest = [0.0] * len(ps), 0.0
    for rank, i in enumerate(np.argsort(ps, kind="stable")):
        largest = max(largest, min(1.0, (len(ps) - rank) * ps[i]))
        adjusted[i] = largest
    return adjusted


def first_reaching(x: Float[np.ndarray, " n"], values: Float[np.ndarray, " n"], threshold: float) -> float | None:
    """The first x at which the value is at least the threshold; None if it never is."""
    there = np.flatnonzero(values >= threshold)
    return float(x[there[0]]) if len(there) else None


def common_threshold(firsts: Sequence[float], bests: Sequence[float], share: float = 0.9) -> float | None:
    """What every arm reached: the mean start plus `share` of the weakest arm's rise; None where that did not rise.

    `firsts` are all runs' first values, `bests` each arm's mean best. A share of the value itself would lie below the
    start where the rise is small, and above the best where values are negative.
    """
    start, weakest = float(np.mean(firsts)), min(bests)
    return start + share * (weakest - start) if weakest > start else None


def _bootstrap(
    samples: tuple[np.ndarray, ...], statistic: Callable[..., np.ndarray], seed: int
) -> tuple[float, float] | None:
    if min(map(len, samples)) < 2:
        return None
    found = stats.bootstrap(
        samples,
        statistic,
        method="percentile",  # as rliable; BCa is undefined where all seeds agree
        vectorized=True,
        n_resamples=RESAMPLES,
        confidence_level=CONFIDENCE,
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return float(found.low), float(found.high)
