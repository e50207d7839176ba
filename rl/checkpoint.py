"""Checkpoints of a run: written beside, renamed when whole, so that what is there is complete."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rl.cluster import WorkerGroup
from rl.config import ConfigError

STATE = "driver.json"


@dataclass(frozen=True)
class DriverState:
    """What the driver must remember: everything that decides the next step and is not in a worker."""

    step: int
    """Steps finished."""
    prompts: dict[str, Any]
    """The prompt source's position."""
    policy_updates: int
    """Optimizer steps of the policy, which its learning-rate schedule counts."""
    critic_updates: int
    tokens: int
    """Tokens generated so far, observations left out."""
    trained_tokens: int
    """Action tokens that the policy was trained on so far, each as often as it was."""
    seconds: float
    """Seconds spent in steps so far."""
    rng: dict[str, Any]
    """State of the generator that shuffles a step's trajectories."""


def save(root: Path, state: DriverState, groups: list[WorkerGroup], keep: int) -> Path:
    """Write `root/step-N` from all groups' ranks and the driver's state; drop all but the newest `keep`."""
    final = root / f"step-{state.step:06d}"
    part = root / f".part-{state.step:06d}"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    for pending in [g.start("save", str(part.resolve() / g.role)) for g in groups]:
        pending.get()
    (part / STATE).write_text(json.dumps(asdict(state)))
    shutil.rmtree(final, ignore_errors=True)
    os.replace(part, final)
    for old in complete(root)[:-keep]:
        shutil.rmtree(old)
    return final


def complete(root: Path) -> list[Path]:
    """Finished checkpoints, oldest first."""
    return sorted(p.parent for p in root.glob(f"step-*/{STATE}"))


def load(path: Path, groups: list[WorkerGroup]) -> DriverState:
    """Bring all groups to the checkpoint; returns the driver's state. Raises ConfigError."""
    state = driver_state(path)
    for pending in [g.start("load", str(path.resolve() / g.role)) for g in groups]:
        pending.get()
    return state


def driver_state(path: Path) -> DriverState:
    """The driver's state in a checkpoint. Raises ConfigError for one that another version wrote."""
    found, known = json.loads((path / STATE).read_text()), {f.name for f in fields(DriverState)}
    if apart := found.keys() ^ known:
        raise ConfigError(
            f"run.resume: {path} given, must be a checkpoint of this version: its {STATE} differs in "
            f"{', '.join(sorted(apart))}"
        )
    return DriverState(**found)
