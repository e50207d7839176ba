"""All engines: generate, synchronise weights, in an order that does not depend on who finishes first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import ray
import torch

from rl.cluster import get
from rl.config import Config
from rl.environments import opener
from rl.trajectory import Prompt, Trajectory
from rollout import episodes
from rollout.engine import Engine, Request, Sample, Sampling, environment
from rollout.weights import check_fit, checksum, expected_shapes

PROBE_TOKENS = 8

Shares = list[list[tuple[Prompt, int]]]
"""For each engine the prompts and sample numbers that are its to answer."""


def split(prompts: Sequence[Prompt], engines: int) -> list[list[int]]:
    """Positions of the prompts that each engine takes; a prompt's samples stay together and share its cache."""
    shares: list[list[int]] = [[] for _ in range(engines)]
    load = [0] * engines
    for i in sorted(range(len(prompts)), key=lambda i: -len(prompts[i].ids)):
        engine = load.index(min(load))
        shares[engine].append(i)
        load[engine] += len(prompts[i].ids)
    return shares


@dataclass
class RolloutPool:
    """The engines of a run."""

    config: Config
    engines: list[Any]
    names: list[str]
    shapes: dict[str, tuple[int, ...]]
    starting: tuple[list[Any], list[Any]] = ([], [])
    """References to every engine's node and to its loading."""
    version: int = 0

    @classmethod
    def start(cls, config: Config, options: Sequence[dict[str, Any]]) -> RolloutPool:
        """Start one engine per set of actor options; they load while the caller goes on."""
        actor: Any = Engine
        engines = []
        for o in options:
            env = o.get("runtime_env", {}).get("env_vars", {}) | environment(config)
            engines.append(actor.options(**{**o, "runtime_env": {"env_vars": env}}).remote(config))
        names = [f"rollout[{i}] (role rollout)" for i in range(len(engines))]
        starting = [e.node.remote() for e in engines], [e.load.remote() for e in engines]
        return cls(config, engines, names, expected_shapes(config.policy.path), starting)

    def wait_ready(self) -> None:
        """Wait until every engine has loaded its model. Raises `WorkerFailure`."""
        nodes, loading = self.starting
        nodes = get(nodes, self.names)
        self.names = [f"rollout[{i}] (role rollout, node {n})" for i, n in enumerate(nodes)]
        get(loading, self.names)

    def generate(
        self,
        prompts: Sequence[Prompt],
        samples: int,
        *,
        step: int,
        temperature: float | None = None,
        record: int = 0,
    ) -> list[Trajectory]:
        """`samples` trajectories of every prompt, in the order (prompt, sample), whoever finishes first.

        Of the first `record` of them, what they selected is recorded.

        Where the prompts are an environment's, each is an episode played to its end. `step` enters the sampling
        seeds. Raises `WorkerFailure`, and `EnvironmentFailure`.
        """
        t = self.config.rollout.temperature if temperature is None else temperature
        # (position, sample) of every trajectory, engine by engine.
        shares = [[(i, s) for i in share for s in range(samples)] for share in split(prompts, len(self.engines))]
        finish = self._play if self.config.prompts.source == "environment" else self._answer
        asked = [[(prompts[i], s) for i, s in share] for share in shares]
        recorded = [(p.index, s) for p in prompts for s in range(samples)][:record]
        found = finish(asked, Sampling(self.config.run.seed, step, t, frozenset(recorded)))
        by_position = dict(zip(chain(*shares), found, strict=True))
        return [by_position[i, s] for i in range(len(prompts)) for s in range(samples)]

    def _answer(self, shares: Shares, sampling: Sampling) -> list[Trajectory]:
        """One response to each prompt, in the shares' order."""
        room = self.config.rollout.max_response_tokens
        samples = self._ask([[sampling.request(prompt, s, room) for prompt, s in share] for share in shares])
        return [self._trajectory(p, s, sample) for (p, s), sample in zip(chain(*shares), chain(*samples), strict=True)]

    def _play(self, shares: Shares, sampling: Sampling) -> list[Trajectory]:
        """One episode from each prompt, in the shares' order."""
        start = opener(self.config.prompts)
        playing = [[episodes.begin(start, prompt, s) for prompt, s in share] for share in shares]
        episodes.play(playing, self.config.rollout, sampling, self._ask, self._encode)
        return [e.trajectory(self.version) for e in chain(*playing)]

    def _ask(self, requests: list[list[Request]]) -> list[list[Sample]]:
        """The samples of each engine's requests, from all engines at once."""
        refs = [e.generate.remote(r) for e, r in zip(self.engines, requests, strict=True)]
        return get(refs, self.names)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    @cached_property
    def _tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.config.policy.path)

    def _trajectory(self, prompt: Prompt, index: int, sample: Sample) -> Trajectory:
        return Trajectory(
            prompt_index=prompt.index,
            sample_index=index,
            prompt_ids=prompt.ids,
            response_ids=sample.ids,
            action_mask=np.ones(len(sample.ids), bool),
            rollout_logprobs=sample.logprobs,
            finish_reason=sample.finish_reason,
            policy_version=self.version,
            prompt_text=prompt.text,
            text=sample.text,
            task=prompt.task,
            answer=prompt.answer,
            selected=sample.selected,
        )

    def sync(self, weights: dict[str, torch.Tensor], version: int) -> None:
        """Give every engine the weights (names of the checkpoint).

        Raises `WeightMismatch` before anything is loaded where they do not fit, and RuntimeError where an engine
        received other bytes than were sent.
        """
        check_fit(weights, self.shapes)
        sent, ref = checksum(weights.items()), ray.put(weights)
        received = get([e.update_weights.remote(ref, version) for e in self.engines], self.names)
        for name, value in zip(self.names, received, strict=True):
            if value != sent:
                raise RuntimeError(f"{name}: received weights with checksum {value}, sent {sent}")
        self.version = version

    def probe(self, prompt: Prompt) -> list[Trajectory]:
        """A few tokens from every engine on the same prompt, to hold its log-probabilities to the trainer's."""
        t = self.config.rollout.temperature
        record = self.config.indexshare.replay
        request = Request(prompt.ids.tolist(), 0, t, PROBE_TOKENS, full_distribution=True, record=record)
        results = self._ask([[request] for _ in self.engines])
        return [self._trajectory(prompt, i, samples[0]) for i, samples in enumerate(results)]
