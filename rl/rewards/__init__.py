"""Scores of trajectories. A reward is any function `(trajectories) -> scores`, named as `module:function`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rl import naming
from rl.trajectory import Trajectory

Reward = Callable[[Sequence[Trajectory]], Sequence[float]]


class RewardError(RuntimeError):
    """A reward function raised, or returned what cannot be a score."""


def resolve(name: str) -> Reward:
    """The function that `module:function` names. Raises ConfigError."""
    return naming.function("reward.function", name)


def score(function: Reward, trajectories: Sequence[Trajectory]) -> list[float]:
    """One finite score per trajectory, in order. Raises RewardError naming the function and what it did."""
    name = f"{function.__module__}:{getattr(function, '__qualname__', type(function).__name__)}"
    try:
        scores = list(function(trajectories))
    except Exception as error:
        raise RewardError(f"reward {name} raised {type(error).__name__}: {error}") from error
    if len(scores) != len(trajectories):
        raise RewardError(f"reward {name} returned {len(scores)} scores for {len(trajectories)} trajectories")
    return [_finite(s, t, name) for s, t in zip(scores, trajectories, strict=True)]


def _finite(value: float, t: Trajectory, name: str) -> float:
    where = f"for trajectory (prompt {t.prompt_index}, sample {t.sample_index})"
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise RewardError(f"reward {name} returned {value!r} {where}, must be a number") from error
    if not math.isfinite(number):
        raise RewardError(f"reward {name} returned {number} {where}, must be finite")
    return number
