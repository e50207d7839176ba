"""Tasks of reasoning-gym, by name: the question, and the task's own score of an answer.

A trajectory carries an entry's identity instead of its answer, because many tasks score by metadata that does not
survive JSON (and some have no answer at all); the entry is made again where it is scored.
"""

from __future__ import annotations

import json
import re
import sys
import types
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from rl.config import ConfigError
from rl.trajectory import Trajectory

SIZE = 10_000
"""Entries of one data set. Most tasks make them on demand, entry i from seed + i, but some make all at once."""

INSTRUCTION = "Write the final answer between <answer> and </answer>."

_TAGS = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@dataclass(frozen=True)
class Identity:
    """Which entry of which data set."""

    task: str
    seed: int
    index: int
    knobs: dict[str, Any]

    def dumps(self) -> str:
        """As a trajectory's `answer`."""
        return json.dumps(asdict(self), sort_keys=True)


def names() -> list[str]:
    """Every task there is."""
    _stand_in_for_pycosat()
    from reasoning_gym.factory import DATASETS

    return sorted(DATASETS)


def question(identity: Identity) -> str:
    """The entry's question, with how to mark the answer."""
    return f"{_find(identity)[1]['question']}\n{INSTRUCTION}"


def extract(text: str) -> str | None:
    """What stands between the last pair of answer tags; None without one."""
    found = _TAGS.findall(text)
    return found[-1].strip() if found else None


def score(trajectories: Sequence[Trajectory]) -> list[float]:
    """The task's score of the extracted answer, in [0, 1]; 0 without one.

    Not of the whole text: most tasks give an answer that contains the right one length(right) / length(given),
    which on whole responses rewards brevity. And not of a missing one: some tasks give .01 even for that.
    """
    return [_score(t.text, Identity(**json.loads(t.answer))) for t in trajectories]


def _score(text: str, identity: Identity) -> float:
    answer = extract(text)
    if answer is None:
        return 0.0
    dataset, entry = _find(identity)
    return float(dataset.score_answer(answer, entry))


def _find(identity: Identity) -> tuple[Any, dict[str, Any]]:
    """The data set and the entry. An endless stream is one data set after another: where entry i is made from
    seed + i, advancing the seed by what is behind continues the same stream."""
    place = identity.index % SIZE
    knobs = json.dumps(identity.knobs, sort_keys=True)
    dataset = _dataset(identity.task, identity.seed + identity.index - place, knobs)
    return dataset, dataset[place]


@lru_cache(maxsize=8)
def _dataset(task: str, seed: int, knobs: str) -> Any:
    _stand_in_for_pycosat()
    import reasoning_gym

    return reasoning_gym.create_dataset(task, size=SIZE, seed=seed, **json.loads(knobs))


def _stand_in_for_pycosat() -> None:
    """reasoning-gym imports pycosat for one of its tasks, and pycosat needs a compiler: only that task may miss it."""
    try:
        import pycosat  # noqa: F401
    except ImportError:
        missing = types.ModuleType("pycosat")
        missing.__getattr__ = _no_pycosat  # type: ignore[method-assign]
        sys.modules["pycosat"] = missing


def _no_pycosat(name: str) -> Any:
    if name.startswith("__"):  # import machinery asks for what a module may lack
        raise AttributeError(name)
    raise ConfigError("prompts.name: zebra_puzzles needs pycosat: `pip install pycosat` (it needs a compiler)")
