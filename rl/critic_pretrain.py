"""`longppo critic pretrain`: a critic that knows the initial policy before the first step (VC-PPO, arXiv 2503.01491).

The initial policy's scored trajectories are recorded once; the critic then learns their returns (lambda 1) over several
epochs, watched on trajectories that it never learns from.
"""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from critic import diagnostics
from critic.worker import CriticWorker
from rl import rewards
from rl.algorithms import needs_critic, targets
from rl.cluster import Cluster, WorkerGroup
from rl.config import Config, ConfigError
from rl.learner import Stats
from rl.losses import loss_weights
from rl.plan import roles, trained
from rl.prompts import PromptSource
from rl.team import merged, per_trajectory, set_up
from rl.telemetry import Telemetry, progress
from rl.trajectory import Trajectory, shard, with_arrays
from rollout.pool import RolloutPool

RECORDED, FOLDER = "recorded", "critic"


def pretrain(config: Config) -> Path:
    """Record, learn, write; returns the folder for `critic.pretrained`.

    Recording goes on where it was interrupted; learning, which is short beside it, starts anew.
    Raises ConfigError, ClusterTooSmall, WorkerFailure, RewardError, EnvironmentFailure.
    """
    if not needs_critic(config):
        raise ConfigError(f"algorithm.name: {config.algorithm.name} given, must be an algorithm with a critic")
    config = _settings(config)
    directory = pretrain_directory(config)
    score = rewards.resolve(config.reward.function)
    telemetry = Telemetry.open(directory, config)
    try:
        trajectories = record(config, score, directory / RECORDED)
        with _critic(config) as critic:
            fit(config, critic, trajectories, telemetry)
            critic.call("export", str((directory / FOLDER).resolve()))
    finally:
        telemetry.close()
    return directory / FOLDER


def pretrain_directory(config: Config) -> Path:
    """Where recording, curves and critic go."""
    return Path(config.run.out) / f"{config.run.name}-critic-seed{config.run.seed}"


def _settings(config: Config) -> Config:
    """The experiment's, made to learn returns: lambda 1, and no clip around the values of the beginning.

    Without KL too: the initial policy is its own reference.
    """
    config = copy.deepcopy(config)
    config.run.steps = config.critic.pretrain.epochs
    config.algorithm.lambda_critic, config.algorithm.value_clip, config.algorithm.whiten = 1.0, None, False
    config.algorithm.kl.where, config.critic.pretrained = "none", None
    return config


def record(config: Config, score: rewards.Reward, folder: Path) -> list[Trajectory]:
    """Scored trajectories of the initial policy, a file for each step's worth; files that are there are read."""
    size, wanted = config.step.prompts_per_step, config.critic.pretrain.prompts + config.critic.pretrain.held_out
    prompts = PromptSource.open(config)
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{first:06d}.pkl" for first in range(0, wanted, size)]
    asked = [prompts.next(min(size, wanted - i * size)) for i in range(len(files))]
    missing = [i for i, file in enumerate(files) if not file.exists()]
    if missing:
        bar = progress(len(files), f"{config.run.name} recording")
        with _engines(config) as pool:
            for i in missing:
                batch = pool.generate(asked[i], config.step.samples_per_prompt, step=i)
                scored = [replace(t, score=s) for t, s in zip(batch, rewards.score(score, batch), strict=True)]
                part = files[i].with_suffix(".part")
                part.write_bytes(pickle.dumps(scored))
                os.replace(part, files[i])
                bar.show(i + 1, {"reward/mean": float(np.mean([t.score for t in scored]))})
        bar.close()
    return [t for file in files for t in pickle.loads(file.read_bytes())]


def fit(config: Config, critic: WorkerGroup, trajectories: Sequence[Trajectory], telemetry: Telemetry) -> None:
    """Epochs over all but the last prompts' trajectories, which measure the critic after each."""
    zeros = [np.zeros(len(t.response_ids) + 1, np.float32) for t in trajectories]
    learned = targets(with_arrays(trajectories, values=zeros), config.algorithm, config.rollout.max_response_tokens)
    held_out = config.critic.pretrain.held_out * config.step.samples_per_prompt
    train, test = learned.trajectories[:-held_out], learned.trajectories[-held_out:]
    returns, masks = learned.returns[-held_out:], [t.action_mask for t in test]
    per_trajectory(critic, "values", train).get()  # what the trunk says is kept, and the scale of returns is set
    for epoch in range(1, config.critic.pretrain.epochs + 1):
        stats = Stats()
        for part in _parts(config, train, epoch):
            shares = shard(part, len(critic.actors))
            stats = stats.merge(merged(critic.call("update", per_rank=[(s, 1.0) for s in shares]))[0])
        values = per_trajectory(critic, "values", test, True).get()
        judged = diagnostics.predictions([v[:-1] for v in values], returns, masks)
        telemetry.log(epoch, [], stats.means() | diagnostics.scalars(judged, config.rollout.max_response_tokens))
        telemetry.figure(epoch, "critic/calibration", diagnostics.calibration_figure(diagnostics.calibration(judged)))


def _parts(config: Config, trajectories: Sequence[Trajectory], epoch: int) -> Iterator[list[Trajectory]]:
    """An epoch's optimizer steps, each as large as one of the experiment's."""
    step = config.step
    size = step.prompts_per_step * step.samples_per_prompt // step.optimizer_steps
    order = np.random.default_rng([config.run.seed, epoch]).permutation(len(trajectories))
    for first in range(0, len(order), size):
        part = [trajectories[i] for i in order[first : first + size] if trajectories[i].actions]
        weights = loss_weights(
            [t.actions for t in part],
            config.algorithm.aggregation,
            max_response_tokens=config.rollout.max_response_tokens,
        )
        if len(part) >= config.critic.deepspeed.ranks:
            yield [replace(t, loss_weight=w) for t, w in zip(part, weights, strict=True)]


@contextmanager
def _engines(config: Config) -> Iterator[RolloutPool]:
    cluster = Cluster(config, [role for role in roles(config) if role.name == "rollout"])
    try:
        pool = RolloutPool.start(config, cluster.options("rollout"))
        pool.wait_ready()
        yield pool
    finally:
        cluster.shutdown()


@contextmanager
def _critic(config: Config) -> Iterator[WorkerGroup]:
    cluster = Cluster(config, [role for role in roles(config) if role.name == "critic"])
    try:
        ranks = config.critic.deepspeed.ranks
        group = cluster.group("critic", CriticWorker, lambda rank: (config, rank, ranks))
        counts = set_up([group])
        print(trained("critic", counts["critic"]), flush=True)
        yield group
    finally:
        cluster.shutdown()
