"""Does a text keep to the constraints of `rl.tasks_text`."""

from __future__ import annotations

from collections.abc import Sequence

from rl.tasks_text import satisfied
from rl.trajectory import Trajectory


def score(trajectories: Sequence[Trajectory]) -> list[float]:
    """1 where every constraint is met by a response that ended by itself, otherwise 0.

    A text that the budget cut would meet "at most" and "no comma" by having no room to break them.
    """
    return [satisfied(t.text, t.answer) * (t.finish_reason == "stop") for t in trajectories]
