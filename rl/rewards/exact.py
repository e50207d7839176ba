"""Right or wrong: the response is the answer and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from rl.trajectory import Trajectory


def score(trajectories: Sequence[Trajectory]) -> list[float]:
    """1 where the response equals the answer, surrounding blanks aside, otherwise 0."""
    return [float(t.text.strip() == t.answer.strip()) for t in trajectories]
