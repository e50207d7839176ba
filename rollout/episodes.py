"""Episodes of an environment, turn by turn, every live one's next response generated together.

A response is the policy's tokens and the environment's in turn, and only ever grows: what the engine sampled is never
decoded and encoded again, and an observation is tokenized alone, so that a later turn reads exactly the tokens that
the trainer will.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from indexshare.replay import Recorded
from rl.config import RolloutConfig
from rl.environments import Checked
from rl.trajectory import FinishReason, Prompt, Trajectory
from rollout.engine import Request, Sample, Sampling

Ask = Callable[[list[list[Request]]], list[list[Sample]]]
"""Requests for each engine to their samples, in the same order."""


@dataclass
class Episode:
    """One episode under way; arrays over the response grow by a turn at a time."""

    prompt: Prompt
    sample_index: int
    environment: Checked
    ids: list[int] = field(default_factory=list)
    action_mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    """Responses and observations in turn."""
    selected: Recorded | None = None
    """Of the last turn, whose prompt is all that came before."""
    turns: int = 0
    finish_reason: FinishReason | None = None

    def trajectory(self, version: int) -> Trajectory:
        """The finished episode. Its text is for people: observations stand in brackets on lines of their own, also
        the last, which is not among the tokens where nothing could answer it."""
        assert self.finish_reason is not None
        responses, observations = self.said[::2], self.said[1::2]
        return Trajectory(
            prompt_index=self.prompt.index,
            sample_index=self.sample_index,
            prompt_ids=self.prompt.ids,
            response_ids=np.array(self.ids, np.int32),
            action_mask=np.array(self.action_mask, bool),
            rollout_logprobs=np.array(self.logprobs, np.float32),
            finish_reason=self.finish_reason,
            policy_version=version,
            prompt_text=self.prompt.text,
            text="\n".join(f"{r}\n[{o}]" if o else r for r, o in zip(responses, observations, strict=True)),
            task=self.prompt.task,
            answer=self.prompt.answer,
            selected=self.selected,
            token_rewards=np.array(self.rewards, np.float32),
        )


def begin(start: Callable[[int], Checked], prompt: Prompt, sample_index: int) -> Episode:
    """The episode behind a prompt. Raises `EnvironmentFailure`, also where it does not begin with that prompt."""
    environment = start(prompt.index)
    if (text := environment.reset()) != prompt.text:
        raise environment.failure(
            f"reset returned {text!r} and before {prompt.text!r}: the same index and seed must give the same episode"
        )
    return Episode(prompt, sample_index, environment)


def play(
    shares: Sequence[Sequence[Episode]],
    limits: RolloutConfig,
    sampling: Sampling,
    ask: Ask,
    encode: Callable[[str], list[int]],
) -> None:
    """Play every episode to its end. `shares` has one list per engine, where its episodes stay: the engine's prefix
    cache holds their earlier turns. `encode` is the tokenizer without special tokens. Raises `EnvironmentFailure`.
    """
    while any(live := [[e for e in share if e.finish_reason is None] for share in shares]):
        samples = ask([[next_request(e, limits, sampling) for e in share] for share in live])
        for episode, sample in zip(chain(*live), chain(*samples), strict=True):
            take_turn(episode, sample, limits, encode)


def next_request(episode: Episode, limits: RolloutConfig, sampling: Sampling) -> Request:
    """The request for the episode's next turn: its context is all that came before, token by token."""
    left = limits.max_response_tokens - len(episode.ids)
    room = left if limits.max_turn_tokens is None else min(left, limits.max_turn_tokens)
    return sampling.request(episode.prompt, episode.sample_index, room, episode.ids, episode.turns)


def take_turn(episode: Episode, sample: Sample, limits: RolloutConfig, encode: Callable[[str], list[int]]) -> None:
    """Hand a response to the environment, and append it and the observation.

    Where the episode is cut here, by its turns or tokens, the observation still ends it if it fits: the value after
    it is what `algorithm.truncation: bootstrap` wants. Where the environment is done, nothing is left to see.
    """
    observation, reward, done = episode.environment.step(sample.text)
    episode.turns, episode.selected = episode.turns + 1, sample.selected
    episode.said += [sample.text, observation]
    _append(episode, sample.ids.tolist(), True, sample.logprobs.tolist())
    episode.rewards[-1] = reward
    if done:
        episode.finish_reason = "stop"
        return
    seen, left = encode(observation), limits.max_response_tokens - len(episode.ids)
    if len(seen) <= left:
        _append(episode, seen, False, [0.0] * len(seen))
    if len(seen) >= left or episode.turns == limits.max_turns:
        episode.finish_reason = "length"


def _append(episode: Episode, ids: list[int], action: bool, logprobs: list[float]) -> None:
    episode.ids += ids
    episode.action_mask += [action] * len(ids)
    episode.logprobs += logprobs
    episode.rewards += [0.0] * len(ids)
