"""Dynamic sampling (DAPO, arXiv 2503.14476): groups that teach nothing make room for new ones, within a bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from rl.trajectory import Trajectory


@dataclass(frozen=True)
class Sampled:
    """A step's trajectories, groups whole and together, and how many groups were generated for them."""

    trajectories: list[Trajectory]
    groups_drawn: int


def dynamic_sampling(draw: Callable[[int], Sequence[Trajectory]], wanted: int, rounds: int) -> Sampled:
    """`wanted` groups whose scores differ, drawing those that are missing anew at most `rounds` times.

    `draw(n)` gives the scored trajectories of n new prompts, a prompt's samples side by side. Where the bound is
    reached, the first flat groups fill up: a step always has its size, and what stays flat is counted as ever.
    """
    varied: list[list[Trajectory]] = []
    flat: list[list[Trajectory]] = []
    for _ in range(1 + rounds):
        for _, members in groupby(draw(wanted - len(varied)), key=lambda t: t.prompt_index):
            group = list(members)
            (varied if len({t.score for t in group}) > 1 else flat).append(group)
        if len(varied) == wanted:
            break
    chosen = (varied + flat)[:wanted]
    return Sampled([t for group in chosen for t in group], len(varied) + len(flat))
