"""What a comparison came to: the report's sections, from runs as their event files tell them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rl.curves import AXES, RunLog, arm_and_seed
from rl.document import Block, Heading, Picture, Table, Text
from rl.fairness import differing, equal, shared
from rl.figures import curves_png
from rl.statistics import (
    CONFIDENCE,
    SEEDS_FOR_A_CLAIM,
    common_threshold,
    difference_interval,
    first_reaching,
    holm,
    iqm,
    iqm_interval,
    paired_p,
    permutation_p,
)

CURVES = (
    "reward/mean",
    "eval/success",
    "rollout/response_tokens",
    "policy/entropy",
    "policy/grad_norm",
    "critic/error",
    "critic/explained_variance",
)
"""Drawn where there; so is every `kl/...`."""
SHARE = 0.9
LEVEL = 0.05
TAIL = 0.1
"""Share of the last steps whose mean is a reward's final value; an evaluation's is its last."""

Arms = Mapping[str, Sequence[RunLog]]


@dataclass(frozen=True)
class Outcome:
    """What one run came to in the metric that is compared."""

    first: float
    final: float
    best: float


def by_arm(logs: Iterable[RunLog]) -> dict[str, list[RunLog]]:
    """Runs grouped by arm, in the order in which arms come; each by seed."""
    arms: dict[str, list[RunLog]] = {}
    for log in logs:
        arms.setdefault(log.arm, []).append(log)
    return {arm: sorted(found, key=lambda log: log.seed) for arm, found in arms.items()}


def comparison(logs: Sequence[RunLog], failures: Mapping[str, str] | None = None) -> list[Block]:
    """The whole report. `failures`: run name to its last error line; such runs are named and not in the means."""
    failures = failures or {}
    status = {log.name: failures.get(log.name) or log.missing() for log in logs}
    whole: Arms = by_arm(log for log in logs if not status[log.name])
    every = by_arm(logs)
    # An arm of which nothing finished, or nothing was even logged, is a result too.
    names = list(dict.fromkeys([*every, *(arm_and_seed(name)[0] for name in failures)]))
    metric = compared(logs)
    blocks: list[Block] = [Heading("Comparison: " + ", ".join(names), 1), Text(_counts(logs, status, failures))]
    blocks += [Text(f"Not whole: {cut}.") for log in logs for cut in log.cuts]
    if whole and metric:
        blocks += [Text(_claim(whole, metric)), Heading("Result"), *_result(whole, names, metric)]
    if whole:
        costs = {arm: whole.get(arm, []) for arm in names}
        blocks += [Heading("Cost"), Text(_budget(whole)), _cost(costs)]
    blocks += [Heading("Curves"), *_pictures(every)]
    blocks += [Heading("What was equal, what differed"), *_fairness(every)]
    blocks += [Heading("Runs"), _runs(logs, status, failures, metric), Heading("Method"), *map(Text, METHOD)]
    return blocks


METHOD = (
    "Final value: the last evaluation; of the training reward, the mean of the last tenth of steps. Best value: the "
    "highest of a run, so it profits from noise. Interquartile mean: without the lowest and highest quarter of seeds, "
    "which with fewer than four seeds is the plain mean.",
    f"Intervals: {CONFIDENCE:.0%} percentile bootstrap over seeds, for a difference within each arm. p: two-sided "
    "permutation test of the difference of interquartile means, adjusted for the number of pairs (Holm).",
    "p over prompts: two-sided sign-flip test of the mean difference over held-out prompts at the last evaluation, a "
    "prompt's score averaged over samples and seeds, adjusted in the same way. It tells whether the trained policies "
    "differ, not whether the methods do: two runs of one method, with two seeds, may well end in policies that differ.",
    "Seconds are those spent in training steps; start-up, evaluations and checkpoints are left out. Generated tokens "
    "are those of training steps.",
)


def compared(logs: Sequence[RunLog]) -> str | None:
    """Held-out success if all runs have it, else the training reward; None without either."""
    return next((m for m in ("eval/success", "reward/mean") if logs and all(m in log.curves for log in logs)), None)


def outcome(log: RunLog, metric: str) -> Outcome:
    """First, final and best value of a run."""
    values = log.curves[metric].values
    values = values[np.isfinite(values)]
    tail = 1 if metric.startswith("eval/") else max(1, round(TAIL * len(values)))
    return Outcome(float(values[0]), float(values[-tail:].mean()), float(values.max()))


def finals(logs: Sequence[RunLog], metric: str) -> np.ndarray:
    """Final value of each run."""
    return np.array([outcome(log, metric).final for log in logs])


def _counts(logs: Sequence[RunLog], status: Mapping[str, str], failures: Mapping[str, str]) -> str:
    names = sorted({log.name for log in logs} | set(failures))
    out = sorted(name for name in names if failures.get(name) or status.get(name))
    text = f"{len(names)} runs, {len(names) - len(out)} of them finished."
    if out:
        text += f" Not finished, and in no mean of this report: {', '.join(out)}."
        text += " If it was the method that ended them, the means of what is left flatter it."
    return text


def _claim(arms: Arms, metric: str) -> str:
    """The one sentence that a reader takes away, and no more than the seeds allow."""
    parts = [f"{arm} {_interval_text(finals(logs, metric))}" for arm, logs in arms.items()]
    text = f"{metric} at the end, interquartile mean over seeds with its bootstrap interval: {'; '.join(parts)}. "
    fewest = min(map(len, arms.values()))
    if len(arms) < 2:
        return text + "One arm: nothing to compare it with."
    return text + _seeds_claim(arms, metric, fewest) + _prompts_claim(arms)


def _seeds_claim(arms: Arms, metric: str, fewest: int) -> str:
    if fewest < SEEDS_FOR_A_CLAIM:
        return (
            f"With {fewest} seed(s) in an arm this describes these runs; a statement of significance needs "
            f"{SEEDS_FOR_A_CLAIM} seeds of each arm and is not made."
        )
    found = [pair for pair, p in _pair_ps(arms, metric).items() if p < LEVEL]
    if not found:
        return f"No two arms differ significantly at the {LEVEL:g} level."
    return f"Significantly different at the {LEVEL:g} level: {', '.join(' and '.join(p) for p in found)}."


def _prompts_claim(arms: Arms) -> str:
    """What pairs over prompts allow to say, which is of policies and not of methods."""
    ps = _prompt_ps(arms)
    if not ps:
        return ""
    found = ", ".join(" and ".join(pair) for pair, p in ps.items() if p < LEVEL)
    return (
        f" Prompt by prompt, the policies that these very runs ended with differ at the {LEVEL:g} level: "
        f"{found or 'no two arms'}. What other seeds would have ended with this cannot know."
    )


def _prompt_ps(arms: Arms) -> dict[tuple[str, str], float]:
    """Adjusted p of every pair over held-out prompts, a prompt's score averaged over samples and seeds; empty unless
    all runs logged the scores of the same prompts."""
    logs = [log for found in arms.values() for log in found]
    scores = {arm: [s for log in found if (s := log.prompt_scores) is not None] for arm, found in arms.items()}
    sizes = {len(s) for found in scores.values() for s in found}
    asked = differing({log.name: log.config for log in logs})
    if sum(map(len, scores.values())) < len(logs) or len(sizes) > 1 or any(map(shared, asked)):
        return {}
    means = {arm: np.mean(found, axis=0) for arm, found in scores.items()}
    pairs = list(itertools.combinations(arms, 2))
    return dict(zip(pairs, holm([float(paired_p(means[a], means[b])) for a, b in pairs]), strict=True))


def _pair_ps(arms: Arms, metric: str) -> dict[tuple[str, str], float]:
    """Adjusted p of every pair; empty where an arm has too few seeds."""
    if min(map(len, arms.values())) < SEEDS_FOR_A_CLAIM:
        return {}
    pairs = list(itertools.combinations(arms, 2))
    ps = holm([float(permutation_p(finals(arms[a], metric), finals(arms[b], metric))) for a, b in pairs])
    return dict(zip(pairs, ps, strict=True))


def _result(arms: Arms, names: Sequence[str], metric: str) -> list[Block]:
    outcomes = {arm: [outcome(log, metric) for log in logs] for arm, logs in arms.items()}
    threshold = common_threshold(
        [o.first for found in outcomes.values() for o in found],
        [float(np.mean([o.best for o in found])) for found in outcomes.values()],
        SHARE,
    )
    if threshold is None:
        said = "The weakest arm never rose above its first value, so there is no threshold that all reach."
    else:
        said = (
            f"Threshold: {metric} = {threshold:.4g}, which is the runs' mean first value plus {SHARE:g} of the rise of "
            "the arm with the lowest mean best."
        )
    rows = []
    for arm, logs in arms.items():
        reached = [_reached(logs, metric, axis, threshold) for axis in AXES[1:]]
        best = np.array([o.best for o in outcomes[arm]])
        first = float(np.mean([o.first for o in outcomes[arm]]))
        values = (f"{first:.4g}", _interval_text(finals(logs, metric)), _interval_text(best), *reached)
        rows.append((arm, str(len(logs)), *values))
    rows += [(arm, "0", *["-"] * 5) for arm in names if arm not in arms]
    head = ("arm", "seeds", "first", "final", "best", "tokens to threshold", "seconds to threshold")
    blocks: list[Block] = [Text(f"{metric}. {said}"), Table(head, rows)]
    if len(arms) > 1:
        blocks.append(_pairs(arms, metric))
    return blocks


def _pairs(arms: Arms, metric: str) -> Table:
    ps, over_prompts = _pair_ps(arms, metric), _prompt_ps(arms)
    rows = []
    for a, b in itertools.combinations(arms, 2):
        x, y = finals(arms[a], metric), finals(arms[b], metric)
        p = f"{ps[a, b]:.3g}" if ps else f"not tested: fewer than {SEEDS_FOR_A_CLAIM} seeds"
        q = f"{over_prompts[a, b]:.3g}" if over_prompts else "not known"
        rows.append((f"{a} - {b}", f"{float(iqm(x) - iqm(y)):+.4g}{_bounds(difference_interval(x, y))}", p, q))
    return Table(("difference", "final", "p", "p over prompts"), rows)


def _reached(logs: Sequence[RunLog], metric: str, axis: str, threshold: float | None) -> str:
    """Mean over the seeds that reached the threshold, and how many these are."""
    curves = [curve for log in logs if (curve := log.against(metric, axis))]
    if threshold is None or not curves:
        return "-"
    there = [x for curve in curves if (x := first_reaching(*curve, threshold)) is not None]
    if not there:
        return f"never (0 of {len(curves)})"
    some = f" ({len(there)} of {len(curves)} seeds)" if len(there) < len(curves) else ""
    return f"{np.mean(there):,.0f}{some}"


def _budget(arms: Arms) -> str:
    """What the budget was and who did not spend it: at most one step more than it is spent."""
    logs = [log for found in arms.values() for log in found]
    budgets = {
        (key, text)
        for log in logs
        for key in ("generated_tokens", "trained_tokens", "seconds")
        if (text := log.config.get(f"run.budget.{key}", "null")) not in ("null", "-")
    }
    if not budgets:
        return "No budget was set: every run made its number of steps, and what it spent is below."
    said = [f"Budget of a run: {float(text):,.0f} {key.replace('_', ' ')}." for key, text in sorted(budgets)]
    for key, _ in sorted(budgets):
        limit = {log.name: log.config.get(f"run.budget.{key}", "null") for log in logs}
        short = [n.name for n in logs if limit[n.name] != "null" and n.spent().get(key, 0) < float(limit[n.name])]
        if short:
            said.append(f"Ended by run.steps before they spent it: {', '.join(short)}.")
    return " ".join(said) + " A run ends with the step in which it is spent."


def _cost(arms: Arms) -> Table:
    """What each arm spent, mean over seeds with lowest and highest."""
    roles = sorted({n for logs in arms.values() for log in logs for n in log.curves if n.startswith("memory/")})
    columns: dict[str, Callable[[RunLog], float | None]] = {
        "steps": lambda log: float(log.steps),
        "prompts drawn": _prompts,
        "generated tokens": lambda log: log.spent().get("generated_tokens"),
        "trained tokens": lambda log: log.spent().get("trained_tokens"),
        "seconds": lambda log: log.spent().get("seconds"),
        "tokens per second": _speed,
    }
    for role in roles:
        columns[f"peak {role}, GiB"] = lambda log, role=role: (  # type: ignore[misc]
            float(log.curves[role].values.max()) if role in log.curves else None
        )
    rows = [
        (name, *(_mean_text([value for log in logs if (value := read(log)) is not None]) for logs in arms.values()))
        for name, read in columns.items()
    ]
    return Table(("mean over seeds", *arms), rows)


def _prompts(log: RunLog) -> float | None:
    """Prompts drawn from the stream: a group algorithm draws fewer for as many trajectories."""
    if drawn := log.curves.get("grpo/groups_drawn"):
        return float(drawn.values.sum())
    per_step = log.config.get("step.prompts_per_step")
    return None if per_step is None else float(per_step) * log.steps


def _speed(log: RunLog) -> float | None:
    spent = log.spent()
    if "generated_tokens" not in spent or not spent.get("seconds"):
        return None
    return spent["generated_tokens"] / spent["seconds"]


def _pictures(arms: Arms) -> list[Block]:
    kls = sorted({n for logs in arms.values() for log in logs for n in log.curves if n.startswith("kl/")})
    caption = "Every run thin, the arm's mean thick, shaded from its lowest to its highest seed, against {}"
    blocks: list[Block] = []
    for axis in AXES:
        if png := curves_png(arms, [*CURVES, *kls], axis):
            blocks.append(Picture(f"curves_{axis.replace(' ', '_')}", caption.format(axis), png))
    return blocks or [Text("No curves were logged.")]


def _fairness(arms: Arms) -> list[Block]:
    logs = [log for found in arms.values() for log in found]
    blocks: list[Block] = [Text(_initial(arms)), Text(_overlap(logs))]
    unknown = [log.name for log in logs if not log.config]
    if unknown:
        blocks.append(Text(f"No configuration was found for {', '.join(unknown)}."))
    within = {arm: differing({log.name: log.config for log in found}) for arm, found in arms.items()}
    for arm, keys in within.items():
        if keys:
            blocks.append(Text(f"Runs of {arm} differ among each other in {', '.join(keys)}: they are not one arm."))
    configs = {arm: found[0].config for arm, found in arms.items()}
    apart = differing(configs)
    broken = [key for key in apart if shared(key)]
    if broken:
        blocks.append(Text(f"Not a fair comparison: the arms differ in {', '.join(broken)}."))
    if apart:
        blocks.append(Table(("differs", *configs), [(key, *row.values()) for key, row in apart.items()]))
    blocks.append(Table(("equal in all arms", "value"), list(equal(configs).items())))
    return blocks


def _initial(arms: Arms) -> str:
    """Arms begin with one policy: at equal seed their first evaluation must be one number."""
    firsts: dict[int, list[float]] = {}
    for logs in arms.values():
        for log in logs:
            found = log.curves.get("eval/success")
            if found and found.steps[0] == 0:
                firsts.setdefault(log.seed, []).append(float(found.values[0]))
    pairs = {seed: values for seed, values in firsts.items() if len(values) > 1}
    if not pairs:
        return "No seed has an evaluation before the first update in more than one arm."
    gap = max(max(values) - min(values) for values in pairs.values())
    if gap == 0:
        return "The evaluation before the first update gave the same number in every arm, for every seed."
    return f"Evaluations before the first update differ between arms at equal seed by up to {gap:.4g}."


def _overlap(logs: Sequence[RunLog]) -> str:
    spans = sorted(log.span for log in logs)
    if any(later[0] < earlier[1] for earlier, later in itertools.pairwise(spans)):
        return "Runs overlapped in time: if they shared cores or a GPU, seconds say less than tokens."
    return "No two runs overlapped in time."


def _runs(logs: Sequence[RunLog], status: Mapping[str, str], failures: Mapping[str, str], metric: str | None) -> Table:
    rows = []
    for log in logs:
        known = metric is not None and metric in log.curves
        end = f"{outcome(log, metric).final:.4g}" if known and metric else "-"
        error = failures.get(log.name)
        said = f"failed after step {log.steps}: {error}" if error else status[log.name] or "finished"
        rows.append((log.name, str(log.steps), end, said))
    silent = set(failures) - {log.name for log in logs}
    rows += [(name, "0", "-", f"failed before its first number: {failures[name]}") for name in sorted(silent)]
    return Table(("run", "steps", f"final {metric or ''}".strip(), "state"), rows)


def _bounds(interval: tuple[float, float] | None) -> str:
    return f" [{interval[0]:.4g}, {interval[1]:.4g}]" if interval else ""


def _interval_text(values: np.ndarray) -> str:
    return f"{float(iqm(values)):.4g}{_bounds(iqm_interval(values))}"


def _mean_text(values: Sequence[float]) -> str:
    if not values:
        return "-"
    low, mean, high = (f"{x:,.0f}" if x >= 100 else f"{x:.4g}" for x in (min(values), np.mean(values), max(values)))
    return mean if low == high else f"{mean} ({low} to {high})"
