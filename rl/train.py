"""The loop. `train_step` is one step of PPO, SAO or GRPO, top to bottom; the rest starts it, watches it, ends it."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from critic import diagnostics
from rl import checkpoint, evaluation, rewards
from rl.algorithms import Targets, needs_critic, needs_old_logprobs, targets
from rl.checkpoint import DriverState
from rl.cluster import Cluster, Pending
from rl.config import Config
from rl.dynamic_sampling import dynamic_sampling
from rl.learner import Stats
from rl.losses import loss_weights
from rl.plan import trained
from rl.prompts import PromptSource
from rl.report import write_report
from rl.schedule import lr_factor
from rl.summary import summarise
from rl.team import Team, assemble, merged, per_trajectory
from rl.telemetry import Telemetry
from rl.trajectory import Prompt, Trajectory, shard, with_arrays


@dataclass
class Clock:
    """Seconds by phase, as `time/<phase>`."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[f"time/{phase}"] += time.perf_counter() - start


@dataclass
class Run:
    """A run under way."""

    config: Config
    team: Team
    prompts: PromptSource
    score: rewards.Reward
    probe: Prompt
    rng: np.random.Generator
    step: int = 0
    policy_updates: int = 0
    critic_updates: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    seconds: float = 0.0


def train_step(run: Run) -> tuple[Targets, dict[str, float]]:
    """One step: generate, score, judge, learn, synchronise. Returns what was learned from, and the step's metrics."""
    config, team, clock = run.config, run.team, Clock()
    batch, sampled = collect(run, clock)
    with clock("judge"):
        batch, agreed = overlap(team, batch, config)
        batch = judge(team, batch, config)
    learned = targets(batch, config.algorithm, config.rollout.max_response_tokens)
    with clock("learn"):
        updates = learn(run, learned.trajectories)
    with clock("sync"):
        synced = sync_weights(run)
    counted = {"prompts/dropped": float(run.prompts.dropped)} | peak_memory(team)
    judged = diagnostics.scalars(predictions(learned), config.rollout.max_response_tokens)
    metrics = summarise(learned.trajectories) | sampled | agreed | learned.metrics | judged
    return learned, metrics | updates | synced | counted | clock.seconds


def predictions(learned: Targets) -> diagnostics.Predictions:
    """What the critic said of the step's tokens before it learned from them, and what came of them."""
    judged = [t for t in learned.trajectories if t.values is not None]
    values = [t.values[:-1] for t in judged if t.values is not None]
    return diagnostics.predictions(values, learned.returns, [t.action_mask for t in judged])


def collect(run: Run, clock: Clock) -> tuple[list[Trajectory], dict[str, float]]:
    """The step's scored trajectories: new prompts, and others in place of groups that teach nothing if configured."""
    step, rounds = run.config.step, run.config.algorithm.dynamic_sampling_rounds
    share = run.config.indexshare

    def draw(n: int) -> list[Trajectory]:
        with clock("rollout"):
            prompts, samples = run.prompts.next(n), step.samples_per_prompt
            record = n * samples if share.replay else share.overlap_samples
            batch = run.team.rollout.generate(prompts, samples, step=run.step, record=record)
        run.tokens += sum(t.actions for t in batch)
        with clock("reward"):
            scores = rewards.score(run.score, batch)
        return [replace(t, score=s) for t, s in zip(batch, scores, strict=True)]

    if not rounds:
        return draw(step.prompts_per_step), {}
    sampled = dynamic_sampling(draw, step.prompts_per_step, rounds)
    return sampled.trajectories, {"grpo/groups_drawn": float(sampled.groups_drawn)}


def overlap(team: Team, batch: list[Trajectory], config: Config) -> tuple[list[Trajectory], dict[str, float]]:
    """How far engine and policy select alike, on the trajectories whose selection is known; which then is dropped.

    With replay it is needed, and they agree by construction.
    """
    known = [t for t in batch if t.selected is not None]
    if config.indexshare.replay or not known:
        return batch, {}
    shares = team.policy.call("overlap", known)[0]
    metrics = {f"indexshare/overlap/layer_{layer}": x for layer, x in shares.items()}
    if shares:
        metrics["indexshare/overlap"] = float(np.mean(list(shares.values())))
    return [replace(t, selected=None) for t in batch], metrics


def judge(team: Team, batch: list[Trajectory], config: Config) -> list[Trajectory]:
    """What the algorithm needs to know of the trajectories, from all roles at once."""
    started = {}
    if needs_old_logprobs(config):
        started["old_logprobs"] = per_trajectory(team.policy, "logprobs", batch)
    if team.critic:
        started["values"] = per_trajectory(team.critic, "values", batch)
    if team.reference:  # after the values: it may be the critic, which then has them from the same forward
        started["reference_logprobs"] = per_trajectory(team.reference, "logprobs", batch)
    elif config.algorithm.kl.where != "none":  # LoRA: the policy without its adapter
        started["reference_logprobs"] = per_trajectory(team.policy, "logprobs", batch, True)
    return with_arrays(batch, **{name: pending.get() for name, pending in started.items()})


def learn(run: Run, batch: Sequence[Trajectory]) -> dict[str, float]:
    """Epochs of optimizer steps: critic and policy side by side, each on its own actors."""
    config, team, a = run.config, run.team, run.config.algorithm
    critic: list[Pending] = []
    policy_stats, critic_stats = Stats(), Stats()
    norms: list[float] = []
    critic_norms: list[float] = []
    policy_moves = run.step >= config.critic.warmup_steps or team.critic is None
    for _ in range(config.step.epochs):
        for part in optimizer_steps(run, batch):
            if team.critic:
                for _ in range(config.critic.updates_per_policy_update):
                    factor = critic_lr_factor(run.critic_updates, config)
                    shares = shard(part, len(team.critic.actors))
                    critic.append(team.critic.start("update", per_rank=[(s, factor) for s in shares]))
                    run.critic_updates += 1
            if policy_moves:
                factor = policy_lr_factor(run.policy_updates, config)
                shares = shard(part, len(team.policy.actors))
                stats, norm = merged(team.policy.call("update", per_rank=[(s, factor) for s in shares]))
                run.policy_updates += 1
                policy_stats, norms = policy_stats.merge(stats), [*norms, norm]
                if a.target_kl is not None and stats.means().get("kl/old", 0.0) > a.target_kl:
                    policy_moves = False  # the critic still finishes its epochs
    for pending in critic:
        stats, norm = merged(pending.get())
        critic_stats, critic_norms = critic_stats.merge(stats), [*critic_norms, norm]
    run.trained_tokens += int(policy_stats.sums.get("tokens", 0))
    metrics = policy_stats.means() | critic_stats.means() | {"policy/updates": float(len(norms))}
    metrics["policy/trained_tokens"] = float(run.trained_tokens)
    if norms:
        last = policy_lr_factor(run.policy_updates - 1, config)
        metrics |= {"policy/grad_norm": float(np.mean(norms)), "policy/lr": config.policy.optimizer.lr * last}
    if critic_norms:
        last = critic_lr_factor(run.critic_updates - 1, config)
        metrics |= {"critic/grad_norm": float(np.mean(critic_norms)), "critic/lr": config.critic.optimizer.lr * last}
    return metrics


def optimizer_steps(run: Run, batch: Sequence[Trajectory]) -> Iterator[list[Trajectory]]:
    """One epoch, shuffled: the trajectories of each optimizer step, weighted by that step's one denominator."""
    a, size = run.config.algorithm, len(batch) // run.config.step.optimizer_steps
    order = run.rng.permutation(len(batch))
    for start in range(0, size * run.config.step.optimizer_steps, size):
        part = [batch[i] for i in order[start : start + size]]
        weights = loss_weights(
            [t.actions for t in part],
            a.aggregation,
            max_response_tokens=run.config.rollout.max_response_tokens,
        )
        weighted = [replace(t, loss_weight=w) for t, w in zip(part, weights, strict=True) if t.actions]
        if weighted:
            yield weighted


def policy_lr_factor(update: int, config: Config) -> float:
    """Learning-rate factor of the policy's optimizer step after `update` finished ones."""
    warmup = config.critic.warmup_steps if needs_critic(config) else 0
    steps = max(config.run.steps - warmup, 0) * config.step.epochs * config.step.optimizer_steps
    optimizer = config.policy.optimizer
    return lr_factor(update + 1, optimizer.warmup_steps, steps, optimizer.schedule)


def critic_lr_factor(update: int, config: Config) -> float:
    """The same of the critic's, which makes several updates for each of the policy's, and starts before it."""
    steps = config.run.steps * config.step.epochs * config.step.optimizer_steps
    total = steps * config.critic.updates_per_policy_update
    optimizer = config.critic.optimizer
    return lr_factor(update + 1, optimizer.warmup_steps, total, optimizer.schedule)


def peak_memory(team: Team) -> dict[str, float]:
    """Largest resident memory so far of any rank of each learning role, in GiB."""
    return {f"memory/{group.role}": max(group.call("peak_memory")) for group in team.learners}


def sync_weights(run: Run) -> dict[str, float]:
    """Give every engine the policy's weights, and prove on a probe that it now answers like the trainer.

    The probe prompt is short: a sparse model then attends all of it, and no near-tie in a selection excuses a gap.
    """
    run.team.rollout.sync(run.team.policy.call("weights")[0], version=run.step + 1)
    answers = run.team.rollout.probe(run.probe)
    trainer = per_trajectory(run.team.policy, "logprobs", answers).get()
    gap = max(float(np.abs(t.rollout_logprobs - q).max()) for t, q in zip(answers, trainer, strict=True))
    if not gap <= run.config.rollout.probe_tolerance:
        raise RuntimeError(
            f"after the weight sync an engine's log-probabilities are {gap:.4f} nats from the trainer's, "
            f"rollout.probe_tolerance is {run.config.rollout.probe_tolerance}"
        )
    return {"sync/probe_gap": gap}


def evaluate(run: Run, telemetry: Telemetry) -> None:
    """Log how good the policy is on the held-out prompts; the same prompts and seeds every time."""
    settings = run.config.eval
    found = evaluation.evaluate(run.team.rollout, run.prompts.held_out(settings.prompts), run.score, settings)
    telemetry.log(run.step, found.sampled, found.metrics(), {"eval/scores": found.scores.mean(1)})


def save(run: Run, root: Path) -> None:
    """A checkpoint from which the next step is the one that would have come."""
    state = DriverState(
        step=run.step,
        prompts=run.prompts.state(),
        policy_updates=run.policy_updates,
        critic_updates=run.critic_updates,
        tokens=run.tokens,
        trained_tokens=run.trained_tokens,
        seconds=run.seconds,
        rng=dict(run.rng.bit_generator.state),
    )
    checkpoint.save(root, state, run.team.learners, run.config.checkpoint.keep)


def restore(run: Run, path: Path) -> None:
    """Bring a fresh run to a checkpoint."""
    state = checkpoint.load(path, run.team.learners)
    run.prompts.load_state(state.prompts)
    run.rng.bit_generator.state = state.rng
    run.step, run.seconds = state.step, state.seconds
    run.tokens, run.trained_tokens = state.tokens, state.trained_tokens
    run.policy_updates, run.critic_updates = state.policy_updates, state.critic_updates


def run_directory(config: Config) -> Path:
    """Where a run leaves everything."""
    return Path(config.run.out) / f"{config.run.name}-seed{config.run.seed}"


def train(config: Config) -> Path:
    """Run the experiment; returns its directory. Raises ConfigError, ClusterTooSmall, WorkerFailure, RewardError."""
    directory = run_directory(config)
    if config.run.resume and (found := checkpoint.complete(directory / "checkpoints")):
        checkpoint.driver_state(found[-1])  # before anything starts: what cannot be read is the user's to mend
    prompts = PromptSource.open(config)
    score = rewards.resolve(config.reward.function)
    telemetry = Telemetry.open(directory, config, prompts.pieces)
    cluster = Cluster(config)
    try:
        probe = prompts.probe()
        rng = np.random.default_rng(config.run.seed)
        run = Run(config, assemble(config, cluster), prompts, score, probe, rng)
        for role, counts in run.team.counts.items():
            telemetry.say(trained(role, counts))
        loop(run, telemetry, directory)
        run.team.policy.call("export", str((directory / "policy").resolve()))
    finally:
        write_report(directory, telemetry.history)
        telemetry.close()
        cluster.shutdown()
    return directory


def finished(run: Run) -> bool:
    """Whether no step is left: the configured number is done, or a budget is spent."""
    return run.step >= run.config.run.steps or any(used >= limit for limit, used in _spent(run))


def expected_steps(run: Run) -> int:
    """How many steps the run will have if they go on spending its budgets as they did."""
    paces = [math.ceil(run.step * limit / used) for limit, used in _spent(run) if used]
    return max(run.step, min([run.config.run.steps, *paces]))


def _spent(run: Run) -> list[tuple[float, float]]:
    """Each budget that there is, and how much of it is gone."""
    budget = run.config.run.budget
    pairs = (
        (budget.generated_tokens, run.tokens),
        (budget.trained_tokens, run.trained_tokens),
        (budget.seconds, run.seconds),
    )
    return [(limit, used) for limit, used in pairs if limit is not None]


def loop(run: Run, telemetry: Telemetry, directory: Path) -> None:
    """Steps until the run is finished, with evaluation, checkpoints and telemetry around them."""
    config, checkpoints = run.config, directory / "checkpoints"
    if config.run.resume and (found := checkpoint.complete(checkpoints)):
        restore(run, found[-1])
    sync_weights(run)
    if config.eval.every and run.step == 0:
        evaluate(run, telemetry)
    while not finished(run):
        start, before = time.perf_counter(), run.tokens
        learned, metrics = train_step(run)
        run.step += 1
        elapsed = time.perf_counter() - start
        run.seconds += elapsed
        last = finished(run)
        telemetry.expect(expected_steps(run))
        telemetry.log(
            run.step,
            learned.trajectories,
            metrics
            | {
                "time/step": elapsed,
                "time/tokens_per_second": (run.tokens - before) / elapsed,
                "rollout/tokens": run.tokens,
            },
        )
        telemetry.alert(run.step, diagnostics.alerts([m for _, m in telemetry.history]))
        if config.eval.every and (last or run.step % config.eval.every == 0):
            evaluate(run, telemetry)
            if learned.returns:
                calibration = diagnostics.calibration(predictions(learned))
                telemetry.figure(run.step, "critic/calibration", diagnostics.calibration_figure(calibration))
        if last or (config.checkpoint.every and run.step % config.checkpoint.every == 0):
            save(run, checkpoints)
