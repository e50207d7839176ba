"""All engines: generate, synchronise weights, in an order that does not depend on who finishes first."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import torch

from rl.cluster import get
from rl.config import Config
from rl.trajectory import Prompt, Trajectory
from rollout.engine import Engine, Request, Sample, environment
from rollout.weights import check_fit, checksum, expected_shapes

PROBE_TOKENS = 8


def request_seed(run_seed: int, step: int, prompt_index: int, sample_index: int) -> int:
    """Sampling seed of one request: what it is asked for decides, not which engine answers."""
    text = f"{run_seed}/{step}/{prompt_index}/{sample_index}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


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
        self, prompts: Sequence[Prompt], samples: int, *, step: int, temperature: float | None = None
    ) -> list[Trajectory]:
        """`samples` trajectories of every prompt, in the order (prompt, sample), whoever finishes first.

        `step` enters the sampling seeds. Raises `WorkerFailure`.
        """
        config, shares = self.config, split(prompts, len(self.engines))
        t = config.rollout.temperature if temperature is None else temperature

        def request(prompt: Prompt, sample: int) -> Request:
            return Request(prompt.ids.tolist(), request_seed(config.run.seed, step, prompt.index, sample), t)

        refs = [
            e.generate.remote([request(prompts[i], s) for i in share for s in range(samples)])
            for e, share in zip(self.engines, shares, strict=True)
        ]
        found: dict[tuple[int, int], Sample] = {}
        for share, results in zip(shares, get(refs, self.names), strict=True):
            found |= dict(zip([(i, s) for i in share for s in range(samples)], results, strict=True))
        return [self._trajectory(p, s, found[i, s]) for i, p in enumerate(prompts) for s in range(samples)]

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
        request = Request(prompt.ids.tolist(), 0, self.config.rollout.temperature, full_distribution=True)
        results = get([e.generate.remote([request], PROBE_TOKENS) for e in self.engines], self.names)
        return [self._trajectory(prompt, i, samples[0]) for i, samples in enumerate(results)]
