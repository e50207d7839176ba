"""`report.md`: what a run came to, on one page."""

from __future__ import annotations

import math
from pathlib import Path

from rl.telemetry import History, duration

MAIN = (
    "reward/mean",
    "rollout/response_tokens",
    "rollout/truncated",
    "kl/reference",
    "kl/old",
    "policy/entropy",
    "policy/clip_fraction",
    "policy/grad_norm",
    "critic/explained_variance",
    "mismatch/k3",
    "time/step",
    "time/tokens_per_second",
)


def write_report(directory: Path, history: History) -> Path:
    """Write `report.md` into the run directory from what was logged, finished or not."""
    path = directory / "report.md"
    path.write_text("\n".join(report(directory.name, history)) + "\n", encoding="utf-8")
    return path


def report(name: str, history: History) -> list[str]:
    """The report's lines: the evaluations, then first, last and mean of the main metrics, then where time went."""
    steps = max((step for step, metrics in history if "reward/mean" in metrics), default=0)
    seconds = sum(value for _, value in series(history, "time/step"))
    lines = [f"# {name}", "", f"{steps} steps, {duration(seconds)} spent in them.", ""]
    evaluations = [(step, m) for step, m in history if "eval/success" in m]
    if evaluations:
        (start, before), (end, after) = evaluations[0], evaluations[-1]
        change = after["eval/success"] - before["eval/success"]
        lines += [
            f"Held-out success: {before['eval/success']:.3f} at step {start}, {after['eval/success']:.3f} at step {end}"
            f" ({change:+.3f}).",
            "",
            "| step | " + " | ".join(sorted(before)) + " |",
            "|---|" + "---|" * len(before),
        ]
        lines += [
            f"| {step} | " + " | ".join(f"{m.get(k, math.nan):.4g}" for k in sorted(before)) + " |"
            for step, m in evaluations
        ]
        lines.append("")
    rows = [(metric, [v for _, v in series(history, metric)]) for metric in MAIN]
    lines += ["| metric | first step | last step | mean |", "|---|---|---|---|"]
    lines += [
        f"| {metric} | {values[0]:.4g} | {values[-1]:.4g} | {sum(values) / len(values):.4g} |"
        for metric, values in rows
        if values
    ]
    timed = {name for _, m in history for name in m if name.startswith("time/")}
    phases = sorted(timed - {"time/step", "time/tokens_per_second"})
    if phases and seconds:
        lines += ["", "| phase | share of the time in steps |", "|---|---|"]
        lines += [f"| {p} | {sum(v for _, v in series(history, p)) / seconds:.1%} |" for p in phases]
    return lines


def series(history: History, metric: str) -> list[tuple[int, float]]:
    """A metric's values by step, where it was logged."""
    return [(step, metrics[metric]) for step, metrics in history if metric in metrics]
