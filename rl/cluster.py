"""Ray placement and worker groups: says what it asked for and what there is."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rl.config import Config, ConfigError
from rl.plan import Role, roles


class WorkerFailure(RuntimeError):
    """An actor failed. The message is one line naming the actor, its role, its node and the cause."""


class ClusterTooSmall(RuntimeError):
    """The cluster cannot place what the configuration asks for; the message says what is wanted and available."""


def _cause(error: BaseException) -> str:
    """What went wrong in one line, without Ray's wrapping."""
    inner = getattr(error, "cause", None) or error
    lines = [line.strip() for line in str(inner).strip().splitlines() if line.strip()] or ["no message"]
    # An actor that fails in its constructor is reported as dead, with its traceback in the message: the cause is last.
    return f"{type(inner).__name__}: {lines[-1] if 'creation task' in lines[0] else lines[0]}"


def get(refs: Any, who: str | Sequence[str]) -> Any:
    """`ray.get`, whose failure is a `WorkerFailure`.

    `refs` is one reference or a list; `who` names its actor, or one actor per reference.
    """
    if not isinstance(refs, list):
        name = who if isinstance(who, str) else ", ".join(who)
        try:
            return ray.get(refs)
        except ray.exceptions.RayError as error:
            raise WorkerFailure(f"{name} failed: {_cause(error)}") from error
    names = [who] * len(refs) if isinstance(who, str) else list(who)
    # Wait for whichever ends first: a dead rank must be seen while its peers still wait for it in a collective.
    pending = dict(zip(refs, names, strict=True))
    while pending:
        done, _ = ray.wait(list(pending), num_returns=1)
        get(done[0], pending.pop(done[0]))
    return ray.get(refs)


@dataclass(frozen=True)
class Pending:
    """A call under way on every rank of a group."""

    refs: list[Any]
    names: list[str]

    def get(self) -> list[Any]:
        """One result per rank. Raises `WorkerFailure`."""
        return get(self.refs, self.names)


@dataclass(frozen=True)
class WorkerGroup:
    """The actors of one role, rank by rank."""

    role: str
    actors: list[Any]
    names: list[str]

    def start(self, method: str, *args: Any, per_rank: Sequence[tuple[Any, ...]] | None = None) -> Pending:
        """Call `method` on every rank: with `args`, or with its own tuple of `per_rank`."""
        calls = per_rank if per_rank is not None else [args] * len(self.actors)
        refs = [getattr(actor, method).remote(*a) for actor, a in zip(self.actors, calls, strict=True)]
        return Pending(refs, self.names)

    def call(self, method: str, *args: Any, per_rank: Sequence[tuple[Any, ...]] | None = None) -> list[Any]:
        """`start`, then wait."""
        return self.start(method, *args, per_rank=per_rank).get()


class Cluster:
    """Ray for one run: started or joined, checked for size, with one placement group per role."""

    def __init__(self, config: Config, wanted: Sequence[Role] | None = None) -> None:
        """`wanted`: the roles to make room for, if not all of a training run's."""
        self._owned = not ray.is_initialized()
        if self._owned:
            os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
            try:
                ray.init(
                    address=config.cluster.address,
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.WARNING,
                )
            except (ConnectionError, ValueError) as error:
                if config.cluster.address is None:
                    raise
                raise ConfigError(
                    f"cluster.address: {config.cluster.address!r} given, must be the address of a running Ray cluster"
                ) from error
        self._roles = {role.name: role for role in wanted or roles(config)}
        self._groups: dict[str, PlacementGroup] = {}
        self._env = worker_environment(config)
        self._timeout = config.cluster.placement_timeout_s
        self._check_size()

    def _check_size(self) -> None:
        there = ray.cluster_resources()
        for resource, wanted in (
            ("CPU", sum(r.count * r.cpus for r in self._roles.values())),
            ("GPU", sum(r.count * r.gpus for r in self._roles.values())),
        ):
            if wanted > there.get(resource, 0) + 1e-6:
                parts = ", ".join(f"{r.count} x {r.name}" for r in self._roles.values())
                raise ClusterTooSmall(
                    f"the run wants {wanted:g} {resource} ({parts}), "
                    f"the cluster has {there.get(resource, 0):g}: "
                    "lower cluster.worker_cpus, the ranks or rollout.engines, or add nodes"
                )

    def options(self, role: str) -> list[dict[str, Any]]:
        """Options for `Actor.options(**o)`, one per actor of the role. Raises `ClusterTooSmall` on a time-out."""
        spec = self._roles[role]
        bundle = {"CPU": spec.cpus} | ({"GPU": spec.gpus} if spec.gpus else {})
        group = placement_group([bundle] * spec.count, strategy="PACK")
        if not group.wait(self._timeout):
            free = ray.available_resources()
            raise ClusterTooSmall(
                f"{role}: no place within {self._timeout:g} s for {spec.count} x {bundle}; free are "
                f"CPU {free.get('CPU', 0):g}, GPU {free.get('GPU', 0):g}"
            )
        self._groups[role] = group
        return [
            {
                "num_cpus": spec.cpus,
                "num_gpus": spec.gpus,
                "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i),
                "runtime_env": {"env_vars": self._env},
            }
            for i in range(spec.count)
        ]

    def group(self, role: str, actor: Any, args: Callable[[int], tuple[Any, ...]]) -> WorkerGroup:
        """Place one actor per bundle of `role`, constructed with `args(rank)`."""
        options = self.options(role)
        actors = [actor.options(**o).remote(*args(rank)) for rank, o in enumerate(options)]
        names = [f"{role}[{rank}]" for rank in range(len(actors))]
        nodes = get([a.node.remote() for a in actors], names)
        return WorkerGroup(
            role, actors, [f"{n} (role {role}, node {node})" for n, node in zip(names, nodes, strict=True)]
        )

    def shutdown(self) -> None:
        """Leave no actor behind."""
        from ray.util.placement_group import remove_placement_group

        for group in self._groups.values():
            remove_placement_group(group)
        if self._owned:
            ray.shutdown()


KEPT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(4 << 30)}
"""glibc keeps freed activations for the next layer. Fetched from the kernel and zeroed each time, they cost a small
model 3 to 5 percent of a pass."""


def worker_environment(config: Config) -> dict[str, str]:
    """Environment of every actor, set before it imports torch."""
    threads = str(config.cluster.threads)
    env = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}
    if config.cluster.device == "cpu":
        env |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", **KEPT_MEMORY}
    return env


__all__ = ["Cluster", "ClusterTooSmall", "Pending", "Role", "WorkerFailure", "WorkerGroup", "get"]
