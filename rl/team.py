"""Everybody a run needs, placed and ready: policy, reference, critic, rollout engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from critic.worker import CriticWorker
from policy.worker import PolicyWorker, ReferenceWorker
from rl.algorithms import needs_critic
from rl.cluster import Cluster, WorkerGroup
from rl.config import Config
from rl.learner import Stats
from rl.trajectory import Trajectory, shard
from rollout.pool import RolloutPool


@dataclass(frozen=True)
class Team:
    """The roles of a run. `critic` and `reference` are None when the algorithm has no use for them."""

    policy: WorkerGroup
    critic: WorkerGroup | None
    reference: WorkerGroup | None
    rollout: RolloutPool

    @property
    def learners(self) -> list[WorkerGroup]:
        """The groups with a state of their own."""
        return [self.policy] + ([self.critic] if self.critic else [])


def assemble(config: Config, cluster: Cluster) -> Team:
    """Place every actor and set it up; engines load while the learners do."""
    rollout = RolloutPool.start(config, cluster.options("rollout"))
    policy_ranks = config.policy.deepspeed.ranks
    policy = cluster.group("policy", PolicyWorker, lambda rank: (config, rank, policy_ranks))
    critic = reference = None
    if needs_critic(config):
        ranks = config.critic.deepspeed.ranks
        critic = cluster.group("critic", CriticWorker, lambda rank: (config, rank, ranks))
    if config.algorithm.kl.where != "none" and not config.policy.lora.rank:
        reference = cluster.group("reference", ReferenceWorker, lambda rank: (config,))
    starting = [g.start("setup", *_rendezvous(g)) for g in (policy, critic) if g]
    for pending in starting:
        pending.get()
    rollout.wait_ready()
    return Team(policy, critic, reference, rollout)


def _rendezvous(group: WorkerGroup) -> tuple[str, int]:
    from rl.cluster import get

    host, port = get(group.actors[0].address.remote(), group.names[0])
    return host, port


def per_trajectory(group: WorkerGroup, method: str, trajectories: Sequence[Trajectory], *args: Any) -> list[Any]:
    """One result per trajectory, in order, from a method that takes a rank's share.

    Empty responses take part too: the state after their prompt has a value.
    """
    shards = shard(trajectories, len(group.actors))
    results = group.call(method, per_rank=[(s, *args) for s in shards])
    found = {
        (t.prompt_index, t.sample_index): r
        for share, values in zip(shards, results, strict=True)
        for t, r in zip(share, values, strict=True)
    }
    return [found[t.prompt_index, t.sample_index] for t in trajectories]


def merged(results: Sequence[tuple[Stats, float]]) -> tuple[Stats, float]:
    """All ranks' measurements of an optimizer step as one; the gradient's norm is the same on every rank."""
    stats = Stats()
    for s, _ in results:
        stats = stats.merge(s)
    return stats, results[0][1]
