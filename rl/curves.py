"""A run's curves as its TensorBoard event files hold them, and curves of several seeds on one grid."""

from __future__ import annotations

import logging
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from jaxtyping import Float

from rl.config import Config, ConfigError, get
from rl.config_load import dotted_keys
from rl.fairness import as_text

RUN = re.compile(r"(?P<arm>.+)-seed(?P<seed>\d+)")
"""A run's folder: what a user reads as its arm, and its seed."""
EVENTS = "*tfevents*"
AXES = ("steps", "generated tokens", "seconds in steps")
GRID = 200
SCORES = "eval/scores"
"""Tag of every held-out prompt's score, which TensorBoard does not show."""


@dataclass(frozen=True)
class Curve:
    """A metric against the steps that logged it."""

    steps: Float[np.ndarray, " n"]
    values: Float[np.ndarray, " n"]

    def at(self, steps: Float[np.ndarray, " m"]) -> Float[np.ndarray, " m"]:
        """The values at these steps; NaN where none was logged."""
        known = dict(zip(self.steps, self.values, strict=True))
        return np.array([known.get(step, np.nan) for step in steps])


@dataclass(frozen=True)
class RunLog:
    """A run as its event files tell it."""

    name: str
    arm: str
    seed: int
    curves: Mapping[str, Curve]
    config: Mapping[str, str]
    """By dotted key, as text; empty where neither `config.yaml` nor hyperparameters are there."""
    cuts: tuple[str, ...] = ()
    """One line for each event file that breaks off."""
    span: tuple[float, float] = (0.0, 0.0)
    """Wall-clock time of the first and the last event."""
    prompt_scores: Float[np.ndarray, " prompts"] | None = None
    """Mean score of each held-out prompt's samples at the last evaluation; None where it was not logged."""

    @property
    def steps(self) -> int:
        """Steps that the run made."""
        return int(max((c.steps[-1] for name, c in self.curves.items() if not name.startswith("eval/")), default=0))

    def spent(self) -> dict[str, float]:
        """What the run spent by its last step, by key of `run.budget`; what was not logged is left out."""
        ends = {
            "generated_tokens": self.curves.get("rollout/tokens"),
            "trained_tokens": self.curves.get("policy/trained_tokens"),
            "seconds": _seconds(self.curves),
        }
        return {key: float(curve.values[-1]) for key, curve in ends.items() if curve}

    def against(self, metric: str, axis: str) -> tuple[np.ndarray, np.ndarray] | None:
        """x and values of a metric where both are known; None where the run has no such metric or axis.

        Before the first step nothing is generated and no second spent.
        """
        curve = self.curves.get(metric)
        if curve is None or (x := self._axis(axis)) is None:
            return None
        at = x.at(curve.steps)
        known = np.isfinite(at) & np.isfinite(curve.values)
        return (at[known], curve.values[known]) if known.any() else None

    def _axis(self, axis: str) -> Curve | None:
        if axis == "steps":
            steps = np.unique(np.concatenate([c.steps for c in self.curves.values()]))
            return Curve(steps, steps)
        curve = self.curves.get("rollout/tokens") if axis == "generated tokens" else _seconds(self.curves)
        return curve and Curve(np.append(0.0, curve.steps), np.append(0.0, curve.values))

    def missing(self) -> str:
        """What the run still had to do, by its own configuration; "" if nothing, or if that is not known."""
        if "run.steps" not in self.config:
            return ""
        limits = {key: self.config.get(f"run.budget.{key}", "null") for key in self.spent()}
        if any(text not in ("null", "-") and self.spent()[key] >= float(text) for key, text in limits.items()):
            return ""
        steps = int(float(self.config["run.steps"]))
        return f"{self.steps} of {steps} steps" if self.steps < steps else ""


def _seconds(curves: Mapping[str, Curve]) -> Curve | None:
    step = curves.get("time/step")
    return step and Curve(step.steps, np.cumsum(step.values))


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """The run folders given, and those in given folders that hold runs. Raises ConfigError where there are none."""
    found: list[Path] = []
    for path in paths:
        inside = sorted(p for p in path.glob("*-seed*") if RUN.fullmatch(p.name) and event_files(p))
        if not event_files(path) and not inside:
            raise ConfigError(f"report: {path} given, must be a run's folder or one of runs: no event file is in it")
        found += [path] if event_files(path) else inside
    return found


def event_files(run: Path) -> list[Path]:
    """A run's event files in the order they were written; in its `tensorboard/`, or beside each other in itself."""
    return sorted((run / "tensorboard").glob(EVENTS)) or sorted(run.glob(EVENTS))


def read_run(run: Path) -> RunLog:
    """Everything that the run's event files hold, up to where one breaks off."""
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it warns that a resumed run took steps back
    files = event_files(run)
    events = EventAccumulator(str(files[0].parent), size_guidance={SCALARS: 0})
    events.Reload()
    scalars = {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}
    times = [e.wall_time for logged in scalars.values() for e in logged]
    arm, seed = arm_and_seed(run.resolve().name)
    return RunLog(
        name=run.resolve().name,
        arm=arm,
        seed=seed,
        curves={tag: _curve({e.step: e.value for e in logged}) for tag, logged in scalars.items()},
        config=_config(run, events),
        cuts=tuple(
            f"{run.resolve().name}: {file.name} breaks off, read up to byte {whole} of {file.stat().st_size}"
            for file in files
            if (whole := whole_records(file)) < file.stat().st_size
        ),
        span=(min(times, default=0.0), max(times, default=0.0)),
        prompt_scores=_prompt_scores(events),
    )


def arm_and_seed(name: str) -> tuple[str, int]:
    """Of a run's name; one that was named otherwise is an arm of its own."""
    named = RUN.fullmatch(name)
    return (named["arm"], int(named["seed"])) if named else (name, 0)


def _prompt_scores(events: Any) -> np.ndarray | None:
    from tensorboard.util.tensor_util import make_ndarray

    if SCORES not in events.Tags()["tensors"]:
        return None
    return np.asarray(make_ndarray(events.Tensors(SCORES)[-1].tensor_proto))


def whole_records(file: Path) -> int:
    """Bytes of an event file up to the first record that is not whole; its size if all are.

    A record is its length (8 bytes) and a checksum of that, then the data and a checksum. The length's own tells a file
    that a crash filled with zeros from one that goes on.
    """
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    content, at = file.read_bytes(), 0
    while len(content) - at >= 12:
        length, checksum = struct.unpack_from("<QI", content, at)
        end = at + 12 + length + 4
        if end > len(content) or checksum != masked_crc32c(content[at : at + 8]):
            break
        at = end
    return at


def _curve(values: Mapping[int, float]) -> Curve:
    steps = sorted(values)
    return Curve(np.array(steps, float), np.array([values[s] for s in steps], float))


def _config(run: Path, events: Any) -> dict[str, str]:
    """The configuration: a resumed run's newest is in `config.yaml`; the event files hold the one it began with."""
    from tensorboard.plugins.hparams import metadata

    file, tag = run / "config.yaml", metadata.SESSION_START_INFO_TAG
    if file.is_file():
        leaves = frozenset(dotted_keys(Config))
        return {key: as_text(value) for key, value in _leaves(yaml.safe_load(file.read_text("utf-8")), "", leaves)}
    if tag not in events.summary_metadata:
        return {}
    info = metadata.parse_session_start_info_plugin_data(events.SummaryMetadata(tag).plugin_data.content)
    values = {key: getattr(value, value.WhichOneof("kind")) for key, value in info.hparams.items()}
    # torch's writer holds a truth value for the number it is in Python.
    truths = {key for key in dotted_keys(Config) if isinstance(get(Config(), key), bool)}
    return {key: as_text(bool(value) if key in truths else value) for key, value in values.items()}


def _leaves(tree: Mapping[str, Any], prefix: str, known: frozenset[str]) -> Iterator[tuple[str, Any]]:
    """Leaves by dotted key; a mapping that is one value in the schema stays whole."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and key not in known:
            yield from _leaves(value, f"{key}.", known)
        else:
            yield key, value


@dataclass(frozen=True)
class Band:
    """A metric of an arm's seeds on one grid of x."""

    x: Float[np.ndarray, " grid"]
    seeds: Float[np.ndarray, "seeds grid"]

    @property
    def mean(self) -> Float[np.ndarray, " grid"]:
        """Mean over seeds."""
        return self.seeds.mean(0)


def band(curves: Sequence[tuple[Float[np.ndarray, " n"], Float[np.ndarray, " n"]]], points: int = GRID) -> Band | None:
    """Curves (x, values) on a common grid, linear between their points; None without a common range.

    The grid spans what all have: a mean that goes on with the seeds that are left would jump where one ends.
    """
    first, last = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    if first > last:
        return None
    own = np.unique(np.concatenate([x for x, _ in curves]))
    inside = own[(own >= first) & (own <= last)]
    x = inside if len(inside) <= points else np.linspace(first, last, points)
    return Band(x, np.stack([np.interp(x, *curve) for curve in curves]))
