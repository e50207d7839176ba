"""What the benchmarks of learning share: experiments run as a user runs them, and a picture of held-out success."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]


def trained(config: str, name: str, seed: int, out: Path, overrides: Sequence[str] = ()) -> Path:
    """The finished run directory; resumed, or left as it is, where there is one. Its output goes to a log beside it."""
    directory = out / f"{name}-seed{seed}"
    if not (directory / "policy" / "config.json").exists():
        out.mkdir(parents=True, exist_ok=True)
        command = [str(Path(sys.executable).parent / "longppo"), "train", config, f"run.name={name}"]
        command += [f"run.seed={seed}", f"run.out={out}", "run.resume=true", *overrides]
        with (out / f"{directory.name}.log").open("w") as log:
            subprocess.run(command, cwd=ROOT, check=True, stdout=log, stderr=log)
    return directory


def metrics(directory: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A run's training steps, and its evaluations, each with its `step`."""
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [r for r in records if "reward/mean" in r], [r for r in records if "eval/success" in r]


def draw(
    arms: Mapping[str, Sequence[Sequence[tuple[float, float]]]],
    picture: Path,
    xlabel: str,
    level: tuple[str, float] | None = None,
) -> None:
    """(x, success) of every arm's seeds: each seed thin, their spread shaded, their mean thick; `level` is a line."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for color, (arm, seeds) in zip(plt.rcParams["axes.prop_cycle"].by_key()["color"], arms.items(), strict=False):
        runs = np.array(seeds)
        x, success = runs[..., 0].mean(0), runs[..., 1]
        for run in runs:
            axes.plot(run[:, 0], run[:, 1], color=color, alpha=0.3, lw=0.8)
        axes.fill_between(x, success.min(0), success.max(0), color=color, alpha=0.12, lw=0)
        axes.plot(x, success.mean(0), color=color, lw=2.5, label=arm)
    if level:
        axes.axhline(level[1], color="gray", ls="--", lw=1, label=level[0])
    axes.set(xlabel=xlabel, ylabel="held-out success at T=1", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(picture, dpi=120)
    plt.close(figure)
