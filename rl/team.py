"""Everybody a run needs, placed and ready: policy, reference, critic, rollout engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from critic.worker import CriticWorker
from policy.worker import PolicyWorker, ReferenceWorker
from rl.algorithms import needs_critic
from rl.cluster import Cluster, Pending, WorkerGroup, get
from rl.config import Config
from rl.learner import Stats
from rl.plan import reference_alone, reference_in_critic
from rl.trajectory import Trajectory, shard
from rollout.pool import RolloutPool


@dataclass(frozen=True)
class Team:
    """The roles of a run. `critic` and `reference` are None when the algorithm has no use for them.

    The `reference` is the critic's group where `reference_in_critic`.
    """

    policy: WorkerGroup
    critic: WorkerGroup | None
    reference: WorkerGroup | None
    rollout: RolloutPool
    counts: dict[str, dict[str, int]]
    """Parameters of each learning role: `parameters`, `trained`, and these by part where a role tells them apart."""

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
    if reference_in_critic(config):
        reference = critic
    elif reference_alone(config):
        reference = cluster.group("reference", ReferenceWorker, lambda rank: (config,))
    counts = set_up([g for g in (policy, critic) if g])
    rollout.wait_ready()
    return Team(policy, critic, reference, rollout, counts)


def set_up(groups: Sequence[WorkerGroup]) -> dict[str, dict[str, int]]:
    """Let every learner build its model and join the other ranks of its group, all groups at once.

    Returns each role's parameter counts.
    """
    starting = {g.role: g.start("setup", *_rendezvous(g)) for g in groups}
    return {role: pending.get()[0] for role, pending in starting.items()}


def _rendezvous(group: WorkerGroup) -> tuple[str, int]:
    host, port = get(group.actors[0].address.remote(), group.names[0])
    return host, port


@dataclass(frozen=True)
class PendingTrajectories:
    """A per-trajectory call under way."""

    pending: Pending
    shards: list[list[Trajectory]]
    order: Sequence[Trajectory]

    def get(self) -> list[Any]:
        """One result per trajectory, in the order they were given. Raises `WorkerFailure`."""
        found = {
            (t.prompt_index, t.sample_index): r
            for share, values in zip(self.shards, self.pending.get(), strict=True)
            for t, r in zip(share, values, strict=True)
        }
        return [found[t.prompt_index, t.sample_index] for t in self.order]


def per_trajectory(
    group: WorkerGroup, method: str, trajectories: Sequence[Trajectory], *args: Any
) -> PendingTrajectories:
    """Start a method that takes a rank's share of trajectories and answers one result for each."""
    # A rank without work would leave its peers waiting: fewer trajectories than ranks are given to all of them.
    ranks = len(group.actors)
    shards = shard(trajectories, ranks) if len(trajectories) >= ranks else [list(trajectories)] * ranks
    return PendingTrajectories(group.start(method, per_rank=[(s, *args) for s in shards]), shards, trajectories)


def merged(results: Sequence[tuple[Stats, float]]) -> tuple[Stats, float]:
    """All ranks' measurements of an optimizer step as one; the gradient's norm is the same on every rank."""
    stats = Stats()
    for s, _ in results:
        stats = stats.merge(s)
    return stats, results[0][1]
