"""The study's pictures, from the event files of its runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rl.compare_report import by_arm
from rl.curves import RunLog, event_files, read_run

POSITIONS = 4
LATE = 0.5
"""Share of a run's last steps that its levels are means of: the first are of untrained critics."""

Logs = Mapping[tuple[str, int], Mapping[str, Sequence[RunLog]]]
"""Finished runs, by task and length, then by arm."""


def write_study(out: Path) -> list[Path]:
    """`study.json` and a picture of each task. Returns the files; none where nothing has run."""
    logs = read_study(out)
    if not logs:
        return []
    file = out / "study.json"
    file.write_text(json.dumps(summary(logs), indent=1) + "\n", encoding="utf-8")
    files = [file]
    for task in dict.fromkeys(task for task, _ in logs):
        files.append(out / f"{task}.png")
        draw({length: arms for (t, length), arms in logs.items() if t == task}, files[-1])
    return files


def read_study(out: Path) -> Logs:
    """What the finished runs of the comparisons `<task>-<length>` under `out` logged, short ones first. One that is cut
    off would pass for one that learned less."""
    found = {}
    for folder in sorted(out.glob("*-*"), key=lambda p: (p.name.rpartition("-")[0], int(p.name.rpartition("-")[2]))):
        task, _, length = folder.name.rpartition("-")
        runs = [read_run(run) for run in sorted(folder.glob("*-seed*")) if run.is_dir() and event_files(run)]
        if arms := by_arm(log for log in runs if log.steps and not log.missing()):
            found[task, int(length)] = arms
    return found


def summary(logs: Logs) -> list[dict[str, Any]]:
    """A record of each task, length and arm: every measure of every seed."""
    return [
        {"task": task, "length": length, "arm": arm, "seeds": len(runs)}
        | {name: [measure(log) for log in runs] for name, measure in MEASURES.items()}
        for (task, length), arms in logs.items()
        for arm, runs in arms.items()
    ]


def late(log: RunLog, metric: str) -> float | None:
    """Mean over the run's last steps; None where it was not logged."""
    curve = log.curves.get(metric)
    if curve is None:
        return None
    return float(np.mean(curve.values[-max(1, round(LATE * len(curve.values))) :]))


def advantage_spread(log: RunLog) -> float | None:
    """Deviation of the advantages in deviations of the score: GRPO's come in that unit, a critic's before whitening
    are divided by it."""
    raw, score = late(log, "advantages/raw_std"), late(log, "reward/std")
    if raw is None or not score:
        return None
    grouped = log.config.get("algorithm.name") == "grpo" and log.config.get("algorithm.normalize_std") == "true"
    return raw if grouped else raw / score


def success(place: int) -> Callable[[RunLog], float | None]:
    """The first or the last evaluation."""
    return lambda log: float(log.curves["eval/success"].values[place]) if "eval/success" in log.curves else None


MEASURES: dict[str, Callable[[RunLog], Any]] = {
    "first": success(0),
    "final": success(-1),
    "steps": lambda log: log.steps,
    "generated_tokens": lambda log: log.spent().get("generated_tokens"),
    "seconds": lambda log: log.spent().get("seconds"),
    "response_tokens": lambda log: late(log, "rollout/response_tokens"),
    "advantage_spread": advantage_spread,
    "grad_norm": lambda log: late(log, "policy/grad_norm"),
    "explained_variance": lambda log: late(log, "critic/explained_variance"),
    "explained_variance_by_position": lambda log: [
        late(log, f"critic/explained_variance/position_{i}of{POSITIONS}") for i in range(1, POSITIONS + 1)
    ],
}


def draw(lengths: Mapping[int, Mapping[str, Sequence[RunLog]]], picture: Path) -> None:
    """By length: success gained, spread of advantages, gradient norm; explained variance by place in the episode; and
    at the length with the most arms, success against tokens."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 7), layout="constrained")
    places = figure.subplots(2, 3).flat
    arms = list(dict.fromkeys(arm for found in lengths.values() for arm in found))
    colors = {arm: f"C{i}" for i, arm in enumerate(arms)}
    for axes, name, title in (
        (next(places), "final", "held-out success at the end (start dashed)"),
        (next(places), "advantage_spread", "deviation of advantages, in deviations of the score"),
        (next(places), "grad_norm", "policy gradient's norm"),
        (next(places), "explained_variance", "critic's explained variance"),
    ):
        for arm in arms:
            _by_length(axes, lengths, arm, MEASURES[name], colors[arm], arm)
        if name == "final":
            _by_length(axes, lengths, arms[0], MEASURES["first"], "0.5", None, "--")
        axes.set(title=title, xlabel="tokens of an episode", xscale="log", xticks=list(lengths))
        axes.set_xticklabels([str(n) for n in lengths])
        axes.minorticks_off()
    _by_position(next(places), lengths, colors)
    _curves(next(places), lengths, colors)
    for axes in figure.axes:
        axes.grid(alpha=0.3)
        axes.title.set_fontsize(10)
    figure.axes[0].legend(fontsize=8)
    FigureCanvasAgg(figure).print_png(str(picture))


def _by_length(
    axes: Any, lengths: Mapping[int, Any], arm: str, measure: Callable[[RunLog], Any], color: str, label: str | None,
    style: str = "o-",
) -> None:  # fmt: skip
    """The mean over seeds at each length, with a bar from the lowest to the highest."""
    rows = [(n, [x for log in found.get(arm, []) if (x := measure(log)) is not None]) for n, found in lengths.items()]
    known = [(n, values) for n, values in rows if values]
    if not known:
        return
    means = np.array([np.mean(values) for _, values in known])
    below, above = ([abs(f(values) - m) for (_, values), m in zip(known, means, strict=True)] for f in (min, max))
    axes.errorbar([n for n, _ in known], means, [below, above], fmt=style, color=color, label=label, capsize=3, ms=4)


def _by_position(axes: Any, lengths: Mapping[int, Mapping[str, Sequence[RunLog]]], colors: Mapping[str, str]) -> None:
    longest = lengths[max(lengths)]
    for arm, runs in longest.items():
        rows = np.array([MEASURES["explained_variance_by_position"](log) for log in runs], float)
        known = [column[np.isfinite(column)] for column in rows.T]
        if any(map(len, known)):
            means = [column.mean() if len(column) else np.nan for column in known]
            axes.plot(range(1, POSITIONS + 1), means, "o-", color=colors[arm], ms=4, label=arm)
    axes.set(title=f"explained variance by quarter of the episode, {max(lengths)} tokens", xlabel="quarter")
    axes.set_xticks(range(1, POSITIONS + 1))


def _curves(axes: Any, lengths: Mapping[int, Mapping[str, Sequence[RunLog]]], colors: Mapping[str, str]) -> None:
    length = max(lengths, key=lambda n: len(lengths[n]))
    for arm, runs in lengths[length].items():
        for log in runs:
            if curve := log.against("eval/success", "generated tokens"):
                axes.plot(*curve, color=colors[arm], lw=1.2, label=arm if log is runs[0] else None)
    axes.set(title=f"held-out success, {length} tokens an episode", xlabel="generated tokens")
    axes.locator_params(axis="x", nbins=5)
    axes.legend(fontsize=8)
