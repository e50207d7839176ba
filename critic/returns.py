"""The scale that values live on: where it is centred, and how wide it is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from critic.model import ValueHead
from rl import advantages as adv
from rl.trajectory import Trajectory

MEMORY = 0.9
"""What a running moment keeps of itself at a step."""


def first_returns(trajectories: Sequence[Trajectory], gamma: float) -> np.ndarray:
    """Discounted returns of all action tokens, as far as they are known before the critic has spoken: from scores.

    Bootstrapped values and KL penalties in the reward are not in them. Raises ValueError for a trajectory that has not
    been scored.
    """
    found = [np.zeros(0)]
    for t in trajectories:
        if t.score is None:
            raise ValueError(f"trajectory (prompt {t.prompt_index}, sample {t.sample_index}) has no score")
        rewards = adv.place_rewards(t.score, t.action_mask)
        found.append(adv.returns(rewards, t.action_mask, gamma=gamma)[t.action_mask])
    return np.concatenate(found)


class RunningReturns:
    """Sets a head's scale from returns: once its centre (`centred`), or every time centre and spread (`normalised`).

    A running second moment, so that spread^2 = running E[G^2] - centre^2. All ranks see all ranks' returns.
    """

    def __init__(self, head: ValueHead, kind: str) -> None:
        self._head = head
        self._kind = kind

    def observe(self, returns: np.ndarray) -> None:
        """Take in one step's returns of this rank (a collective)."""
        head = self._head
        moments = torch.tensor([len(returns), returns.sum(), np.square(returns).sum()], dtype=torch.float64)
        count, first, second = summed(moments.to(head.centre.device)).tolist()
        if not count:
            return
        new = not bool(head.observed)
        keep = 0.0 if new else MEMORY
        if self._kind == "centred" and not new:
            return
        mean = keep * float(head.centre) + (1 - keep) * first / count
        old_square = float(head.spread) ** 2 + float(head.centre) ** 2
        square = keep * old_square + (1 - keep) * second / count
        head.centre.fill_(mean)
        head.observed.fill_(1.0)
        if self._kind == "normalised":
            # Returns that never vary have no unit of their own.
            variance = square - mean * mean
            head.spread.fill_(variance**0.5 if variance > 1e-8 else 1.0)


def world_size() -> int:
    """Ranks of the critic."""
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def summed(x: torch.Tensor) -> torch.Tensor:
    """The sum over all ranks, in place (a collective)."""
    if world_size() > 1:
        torch.distributed.all_reduce(x)
    return x
