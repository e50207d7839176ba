"""Tasks of several turns: what an environment is, how a configuration names one, what an episode is worth."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from rl import naming
from rl.advantages import total_reward
from rl.config import PromptsConfig
from rl.trajectory import Trajectory


class Environment(Protocol):
    """One episode: a prompt, then a reply to every response until it is done."""

    def reset(self) -> str:
        """The prompt."""

    def step(self, response: str) -> tuple[str, float, bool]:
        """What the policy sees next, what the response earned, whether the episode is over.

        `response` is a turn's text without special tokens; one that a token limit cut is given as far as it got.
        """


class EnvironmentFailure(RuntimeError):
    """An environment raised, or answered what the protocol does not know. One line: which, which episode, what."""


class Checked:
    """An `Environment` around another one, whose answers are what the protocol says, or `EnvironmentFailure`."""

    def __init__(self, make: Callable[[], Environment], name: str) -> None:
        self._name, self._turn = name, 0
        self._inner: Environment = self._call("the factory", make)

    def reset(self) -> str:
        """See `Environment`; not empty, since a first response token must follow something."""
        prompt = self._text("reset", self._call("reset", lambda: self._inner.reset()))
        if not prompt:
            raise self.failure("reset returned '', must be a prompt")
        return prompt

    def step(self, response: str) -> tuple[str, float, bool]:
        """See `Environment`; the reward is finite."""
        self._turn += 1
        where = f"step {self._turn}"
        answer = self._call(where, lambda: self._inner.step(response))
        if not isinstance(answer, tuple) or len(answer) != 3:
            raise self.failure(f"{where} returned {answer!r}, must be (observation, reward, done)")
        observation, reward, done = answer
        if not isinstance(done, bool | np.bool_):
            raise self.failure(f"{where} returned done={done!r}, must be true or false")
        return self._text(where, observation), self._reward(where, reward), bool(done)

    def failure(self, what: str) -> EnvironmentFailure:
        """The one line of every failure of this episode."""
        return EnvironmentFailure(" ".join(f"environment {self._name}: {what}".split()))

    def _call(self, what: str, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except Exception as error:
            raise self.failure(f"{what} raised {type(error).__name__}: {error}") from error

    def _text(self, where: str, value: Any) -> str:
        if not isinstance(value, str):
            raise self.failure(f"{where} returned {value!r}, must be a string")
        try:
            value.encode()
        except UnicodeEncodeError as error:  # no tokenizer takes a lone surrogate
            raise self.failure(f"{where} returned {value!r}, must be text: {error}") from error
        return value

    def _reward(self, where: str, value: Any) -> float:
        try:
            reward = float(value)
        except (TypeError, ValueError) as error:
            raise self.failure(f"{where} returned reward {value!r}, must be a number") from error
        if not math.isfinite(reward):
            raise self.failure(f"{where} returned reward {reward}, must be finite")
        return reward


def opener(config: PromptsConfig) -> Callable[[int], Checked]:
    """The function from an episode's index to the episode, fresh each time: `factory(index, seed, **knobs)`.

    Raises ConfigError where `prompts.name` names no function; what it returns raises `EnvironmentFailure`.
    """
    make = naming.function("prompts.name", config.name)

    def start(index: int) -> Checked:
        return Checked(lambda: make(index, config.seed, **config.knobs), f"{config.name}, episode {index}")

    return start


def episode_return(trajectories: Sequence[Trajectory]) -> list[float]:
    """The sum of what the environment paid. Raises ValueError for a trajectory that no environment played."""
    missing = next((t for t in trajectories if t.token_rewards is None), None)
    if missing is not None:
        raise ValueError(f"trajectory (prompt {missing.prompt_index}, sample {missing.sample_index}) has no rewards")
    return [total_reward(t.token_rewards) for t in trajectories if t.token_rewards is not None]
