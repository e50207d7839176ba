"""Arms overlaid in TensorBoard: each arm's mean over seeds, with lowest and highest, and a layout that shows them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rl.compare_report import CURVES, by_arm
from rl.curves import EVENTS, RunLog, band


def write_overlay(logs: Sequence[RunLog], folder: Path) -> None:
    """Write `<folder>/<arm>` for each arm and the custom scalars layout; what was there from before goes.

    Steps that not every seed of the arm logged are left out. The margin charts overlay whichever arms are ticked.
    """
    from torch.utils.tensorboard import SummaryWriter

    for old in folder.glob(f"**/{EVENTS}"):
        old.unlink()
    tags: set[str] = set()
    for arm, runs in by_arm(logs).items():
        writer = SummaryWriter(str(folder / arm))
        for metric in _metrics(runs):
            curves = [curve for log in runs if (curve := log.against(metric, "steps"))]
            seeds = band(curves) if len(curves) == len(runs) else None
            if seeds is None:
                continue
            tags.add(metric)
            logged = set.intersection(*(set(x) for x, _ in curves))
            for x, values in zip(seeds.x, seeds.seeds.T, strict=True):
                if x in logged:
                    for name, value in zip(_tags(metric), (values.mean(), values.min(), values.max()), strict=True):
                        writer.add_scalar(name, value, int(x))
        writer.close()
    writer = SummaryWriter(str(folder))
    writer.add_custom_scalars({"arms": {metric: ["Margin", _tags(metric)] for metric in sorted(tags)}})
    writer.close()


def _metrics(runs: Sequence[RunLog]) -> list[str]:
    return [*CURVES, *sorted({n for log in runs for n in log.curves if n.startswith("kl/")})]


def _tags(metric: str) -> list[str]:
    return [f"{metric}_{part}" for part in ("mean", "low", "high")]
