"""`longppo eval`: a policy on held-out prompts of tasks, by the engines, prompts and rewards of training."""

from __future__ import annotations

import copy
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from rl.checkpoint import STATE, complete
from rl.config import Config, ConfigError
from rl.config_load import load, resolve
from rl.config_rules import EPISODE_RETURN

if TYPE_CHECKING:
    from rollout.pool import RolloutPool

ASKED = ("cluster", "prompts", "reward", "policy", "rollout", "eval")
"""Sections of a run that decide what an evaluation asks; how it trained says nothing here."""
TASK = ("prompts", "reward", "rollout")
"""Of these, the ones that are a task's own; of the last only `LENGTHS`, since all tasks are asked of one pool."""
LENGTHS = ("max_response_tokens", "max_turns", "max_turn_tokens", "max_model_len")


@dataclass(frozen=True)
class Source:
    """Where the policy comes from."""

    policy: Path | None
    """A folder that engines load as it is."""
    checkpoint: Path | None
    """A run's checkpoint, whose weights go into engines that loaded the run's initial policy."""
    sections: Mapping[str, Any]
    """The configuration of the run it belongs to; empty where it belongs to none."""


@dataclass(frozen=True)
class Task:
    """What is asked."""

    name: str
    config: Config


def evaluate_checkpoint(
    path: Path, names: Sequence[str], overrides: Sequence[str], out: Path | None = None
) -> tuple[str, Path]:
    """Evaluate on every task; returns the table and the JSON file that was written.

    Raises ConfigError before anything starts, and what training raises: ClusterTooSmall, WorkerFailure, RewardError,
    EnvironmentFailure.
    """
    source = find(path)
    tasks = find_tasks(source, path, names, overrides)
    out = out or path / "eval.json"
    _check_writable(out)
    # Imported late: what is wrong with the words above is said in a second.
    from rl import rewards
    from rl.evaluation import evaluate
    from rl.prompts import PromptSource

    asked = [(task, PromptSource.open(task.config), rewards.resolve(task.config.reward.function)) for task in tasks]
    results = {}
    with _engines(source, tasks) as pool:
        for task, prompts, score in asked:
            settings = task.config.eval
            serving = replace(pool, config=task.config)
            found = evaluate(serving, prompts.held_out(settings.prompts), score, settings)
            # What takes minutes says what it has so far.
            print(
                f"longppo eval: {task.name}  success {found.metrics()['eval/success']:.4g}", file=sys.stderr, flush=True
            )
            results[task.name] = {
                "metrics": {name.removeprefix("eval/"): value for name, value in found.metrics().items()},
                "standard_error": standard_error(found.scores.mean(1)),
                "scores": found.scores.tolist(),
                "greedy_scores": [t.score for t in found.greedy],
                "asked": {section: asdict(getattr(task.config, section)) for section in (*TASK, "eval")},
            }
    told = {"checkpoint": str(path.resolve()), "policy": str(source.policy or source.checkpoint), "tasks": results}
    out.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    return table(results), out


def find(path: Path) -> Source:
    """The policy at `path`: an exported one, a run's (its export, else its newest checkpoint), or a checkpoint's."""
    path = path.resolve()
    if (path / "config.json").is_file():
        return Source(path, None, _sections(path.parent))
    if (path / STATE).is_file():
        return Source(None, path, _sections(path.parents[1]))
    if sections := _sections(path):
        if (path / "policy" / "tokenizer_config.json").is_file():  # the last thing that a run writes
            return Source(path / "policy", None, sections)
        if found := complete(path / "checkpoints"):
            return Source(None, found[-1], sections)
        raise ConfigError(
            f"CHECKPOINT: {path} given, must be a run with a policy or a checkpoint: this one has neither"
        )
    raise ConfigError(
        f"CHECKPOINT: {path} given, must be a folder with a policy (config.json), a run, or one of its checkpoints"
    )


def _sections(run: Path) -> dict[str, Any]:
    file = run / "config.yaml"
    return yaml.safe_load(file.read_text("utf-8")) if file.is_file() else {}


def find_tasks(source: Source, path: Path, names: Sequence[str], overrides: Sequence[str]) -> list[Task]:
    """The tasks named, each with its resolved configuration; without names the one that the run trained on."""
    if source.checkpoint and not source.sections:
        raise ConfigError(
            f"CHECKPOINT: {path} given, must lie in its run, whose config.yaml says which policy it is of"
        )
    if not names and not source.sections and not any(text.startswith("prompts.") for text in overrides):
        raise ConfigError(f"--tasks: none given, must be at least one: {path} belongs to no run that would name it")
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"--tasks: {', '.join(sorted(twice))} given twice, must be different tasks")
    policy = source.policy or Path(source.sections["policy"]["path"])
    trees = {name: _task(name, source.sections, policy) for name in names} or {"": {}}
    found = []
    for name, own in trees.items():
        tree = {section: source.sections[section] for section in ASKED if section in source.sections} | own
        tree["run"] = {"seed": source.sections.get("run", {}).get("seed", 0)}
        if source.policy:
            tree["policy"] = {"path": str(source.policy)}
        config = resolve(tree, overrides)
        config.step.prompts_per_step = 1  # nothing is trained on
        config.eval.every = 1
        found.append(Task(name or config.prompts.name, config))
    return found


def _task(name: str, sections: Mapping[str, Any], policy: Path) -> dict[str, Any]:
    """The sections that make a task of a name: a YAML experiment's, the run's own, or a built-in one's, which is asked
    in the chat template where there is one and the task is in English."""
    rollout = sections.get("rollout", {})
    if name.endswith((".yaml", ".yml")):
        config = load(name, [f"policy.path={policy}"])
        lengths = {key: getattr(config.rollout, key) for key in LENGTHS}
        return {"prompts": asdict(config.prompts), "reward": asdict(config.reward), "rollout": rollout | lengths}
    if sections.get("prompts", {}).get("name") == name:
        return {}
    from rl import tasks, tasks_text
    from rl.rewards import reasoning

    chat = _has_chat_template(policy)
    one_turn = rollout | {"max_turns": None, "max_turn_tokens": None}
    if name in tasks.TASKS:
        return _named("task", name, "rl.rewards.exact:score") | {"rollout": one_turn}
    if name in tasks_text.TASKS:
        return _named("task", name, "rl.rewards.instructions:score", chat) | {"rollout": one_turn}
    if ":" in name:
        return _named("environment", name, EPISODE_RETURN)
    if name in reasoning.names():
        return _named("reasoning_gym", name, "rl.rewards.reasoning:score", chat) | {"rollout": one_turn}
    known = ", ".join([*tasks.TASKS, *tasks_text.TASKS])
    raise ConfigError(
        f"--tasks: {name!r} given, must be {known}, a reasoning-gym task, an environment (module:function) "
        "or a YAML experiment"
    )


def _named(source: str, name: str, reward: str, chat: bool = False) -> dict[str, Any]:
    return {"prompts": {"source": source, "name": name, "chat": chat}, "reward": {"function": reward}}


def _has_chat_template(folder: Path) -> bool:
    file = folder / "tokenizer_config.json"
    written = file.is_file() and "chat_template" in json.loads(file.read_text("utf-8"))
    return written or (folder / "chat_template.jinja").is_file()


def _check_writable(out: Path) -> None:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out.parent):
            pass
    except OSError as error:
        raise ConfigError(f"--out: {out} given, must be a file that can be written ({error.strerror})") from error


@contextmanager
def _engines(source: Source, tasks: Sequence[Task]) -> Iterator[RolloutPool]:
    """Engines with the policy, and room for every task's longest prompt and response; a checkpoint's weights come from
    the learner that wrote them."""
    from policy.worker import PolicyWorker
    from rl.cluster import Cluster
    from rl.plan import roles
    from rl.team import set_up
    from rollout.pool import RolloutPool

    config = copy.deepcopy(tasks[0].config)
    config.rollout.max_model_len = max(map(_length, tasks))
    wanted = {"rollout", "policy"} if source.checkpoint else {"rollout"}
    cluster = Cluster(config, [role for role in roles(config) if role.name in wanted])
    try:
        pool = RolloutPool.start(config, cluster.options("rollout"))
        if source.checkpoint:
            policy = cluster.group("policy", PolicyWorker, lambda rank: (config, rank, config.policy.deepspeed.ranks))
            set_up([policy])
            policy.call("load", str(source.checkpoint / "policy"))
            weights = policy.call("weights")[0]
        pool.wait_ready()
        if source.checkpoint:
            pool.sync(weights, version=1)
        yield pool
    finally:
        cluster.shutdown()


def _length(task: Task) -> int:
    r = task.config.rollout
    return r.max_model_len or task.config.prompts.max_prompt_tokens + r.max_response_tokens


def standard_error(scores: np.ndarray) -> float | None:
    """Of the mean over prompts; None of a single one."""
    return float(scores.std(ddof=1) / np.sqrt(len(scores))) if len(scores) > 1 else None


def table(results: Mapping[str, Any]) -> str:
    """A line for each task; the last column is the standard error of `success` over prompts."""
    columns = list(dict.fromkeys(name for result in results.values() for name in result["metrics"]))
    rows = [["task", "prompts", "samples", *columns, "success +-"]]
    for name, result in results.items():
        cells = [f"{result['metrics'][c]:.4g}" if c in result["metrics"] else "-" for c in columns]
        error = result["standard_error"]
        shape = [str(len(result["scores"])), str(len(result["scores"][0]))]
        rows.append([name, *shape, *cells, "-" if error is None else f"{error:.2g}"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
