"""What a run tells: TensorBoard, a line of progress, metrics and samples as files; all usable after Ctrl-C."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np
import torch
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams
from tqdm import tqdm

from rl.config import Config, ConfigError
from rl.config_load import to_yaml
from rl.sample_tables import SURROGATES, Pieces, numbers, table, value_picture, value_tables
from rl.trajectory import Trajectory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"
SAMPLES_PER_STEP = 16
"""Trajectories of a step that go to the sample log."""
TABLE_ROWS = 8
"""Of those, the ones that TensorBoard shows."""

History = list[tuple[int, dict[str, float]]]
"""Metrics by step, in the order they were logged; a step with an evaluation appears twice."""


class Telemetry:
    """A run directory and what is written there. The caller says which step it is."""

    def __init__(self, directory: Path, config: Config, pieces: Pieces):
        self.directory = directory
        self._pieces = pieces
        self.history: History = []
        self._config = config
        self._writer: SummaryWriter | None = None
        self._bar = progress(config.run.steps, config.run.name)
        self._alerted: set[str] = set()

    @classmethod
    def open(cls, directory: Path, config: Config, pieces: Pieces = numbers) -> Telemetry:
        """Make the run directory with its `config.yaml`. `pieces` tells the text of each token.

        Raises ConfigError where a run is already, unless `run.resume` says to go on with it.
        """
        # A run that ended before its first number, for want of CPUs say, may be started again.
        if (directory / METRICS).exists() and not config.run.resume:
            raise ConfigError(
                f"run.name: {config.run.name!r} with run.seed {config.run.seed} given, but {directory} holds a run:"
                " must be another name or seed, or run.resume=true"
            )
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
        telemetry = cls(directory, config, pieces)
        telemetry.history = [(record.pop("step"), record) for record in read_jsonl(directory / METRICS)]
        return telemetry

    def log(
        self,
        step: int,
        trajectories: Sequence[Trajectory],
        metrics: dict[str, float],
        arrays: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Write a step's metrics and some of its trajectories, and flush: what was logged survives a kill.

        `arrays` are numbers for later readers of the event files, which TensorBoard does not show.
        """
        writer = self._writer or self._start(step)
        self.history.append((step, metrics))
        _append(self.directory / METRICS, [{"step": step, **metrics}])
        for name, array in (arrays or {}).items():
            writer.add_tensor(name, torch.from_numpy(array), step)
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        if trajectories:
            evaluation = any(name.startswith("eval/") for name in metrics)
            self._samples(writer, step, trajectories, "eval" if evaluation else "train")
        writer.flush()
        self._bar.show(step, metrics)

    def expect(self, steps: int) -> None:
        """How many steps the run will have, as far as is known now."""
        self._bar.expect(steps)

    def say(self, line: str) -> None:
        """A line for whoever watches, above the progress bar."""
        self._bar.say(line)

    def figure(self, step: int, name: str, figure: Figure) -> None:
        """A picture of a step, after its metrics."""
        if self._writer:
            self._writer.add_figure(name, figure, step)

    def alert(self, step: int, lines: Mapping[str, str]) -> None:
        """What is wrong, kind by kind: said once when it begins, and again if it comes back."""
        for kind in lines.keys() - self._alerted:
            self.say(f"longppo: warning: step {step}: {lines[kind]}")
            if self._writer:
                self._writer.add_text(f"alerts/{kind}", lines[kind], step)
        self._alerted = set(lines)

    def close(self) -> None:
        """Finish the files. Safe after an interruption, and twice."""
        self._bar.close()
        if self._writer:
            self._writer.close()
            self._writer = None

    def _start(self, step: int) -> SummaryWriter:
        """Open the writer at the first step logged.

        A resumed run may repeat steps that its predecessor logged after the checkpoint: those are taken back, here and
        (by `purge_step`) in TensorBoard, so that every step has one value.
        """
        metrics, samples = self.directory / METRICS, self.directory / SAMPLES
        resumed = metrics.exists()
        if resumed:
            self.history = [(s, m) for s, m in self.history if s < step]
            # Written anew even if nothing goes: a kill may have cut the last line.
            _rewrite(metrics, [{"step": s, **m} for s, m in self.history])
            _rewrite(samples, [r for r in read_jsonl(samples) if r["step"] < step])
        self._writer = SummaryWriter(str(self.directory / "tensorboard"), purge_step=step if resumed else None)
        if not resumed:
            self._hyperparameters(self._writer)
        return self._writer

    def _hyperparameters(self, writer: SummaryWriter) -> None:
        # Not `add_hparams`, which opens a second run beside this one.
        values = {k: v if isinstance(v, bool | int | float | str) else str(v) for k, v in flat(self._config)}
        for summary in hparams(values, {"reward/mean": None, "eval/success": None}):
            writer._get_file_writer().add_summary(summary)

    def _samples(self, writer: SummaryWriter, step: int, trajectories: Sequence[Trajectory], kind: str) -> None:
        chosen = spread(trajectories, SAMPLES_PER_STEP)
        _append(self.directory / SAMPLES, [sample(t, step, kind) for t in chosen])
        shown = spread(chosen, TABLE_ROWS)
        writer.add_text(f"samples/{kind}", table(shown), step)
        if judged := [t for t in shown if t.values is not None and t.actions]:
            writer.add_text("samples/values", value_tables(judged, self._pieces), step)
            picture = value_picture(judged, self._pieces)
            writer.add_figure("samples/values", picture, step, close=False)
        scores = [t.score for t in trajectories if t.score is not None]
        if scores:
            writer.add_histogram(f"histogram/{kind}/reward", np.array(scores), step)
        writer.add_histogram(
            f"histogram/{kind}/response_tokens", np.array([len(t.response_ids) for t in trajectories]), step
        )
        for name in ("advantages", "value_targets"):
            arrays = [x[t.action_mask] for t in trajectories if (x := getattr(t, name)) is not None]
            if sum(map(len, arrays)):
                writer.add_histogram(f"histogram/{kind}/{name}", np.concatenate(arrays), step)


class Bar:
    """Progress on a terminal."""

    def __init__(self, steps: int, name: str):
        self._tqdm = tqdm(total=steps, desc=name, dynamic_ncols=True)

    def show(self, step: int, metrics: dict[str, float]) -> None:
        """Bring the bar to `step`; the first one only marks where a resumed run goes on."""
        if not self._tqdm.n and step > 1:
            self._tqdm.initial = step - 1  # time left is judged by this run's steps alone
        self._tqdm.n = step
        if _training(metrics):
            self._tqdm.set_postfix_str(headline(metrics))
        elif metrics:
            self.say(f"step {step}  {headline(metrics)}")

    def expect(self, steps: int) -> None:
        """Where the bar ends."""
        self._tqdm.total = steps

    def say(self, line: str) -> None:
        """A line above the bar."""
        self._tqdm.write(line, file=sys.stderr)

    def close(self) -> None:
        """Leave the bar as it stands."""
        self._tqdm.close()


class Lines:
    """Progress where stderr is a file: one line for each step."""

    def __init__(self, steps: int, name: str, out: TextIO | None = None):
        self._steps, self._name, self._out = steps, name, out
        self._first: tuple[int, float] | None = None

    def show(self, step: int, metrics: dict[str, float]) -> None:
        """Print the step, its main metrics, and the time left by the mean of the steps since the first."""
        now = time.monotonic()
        first, since = self._first = self._first or (step, now)
        left = ""
        if step > first:
            left = "  left " + duration((now - since) / (step - first) * (self._steps - step))
        line = f"{self._name}  step {step}/{self._steps}  {headline(metrics)}{left}"
        self.say(line)

    def expect(self, steps: int) -> None:
        """The step that will be the last."""
        self._steps = steps

    def say(self, line: str) -> None:
        """Print a line."""
        print(line, file=self._out or sys.stderr, flush=True)

    def close(self) -> None:
        """Nothing is open."""


def progress(steps: int, name: str) -> Bar | Lines:
    """A bar on a terminal, plain lines elsewhere."""
    return Bar(steps, name) if sys.stderr.isatty() else Lines(steps, name)


def headline(metrics: dict[str, float]) -> str:
    """Reward, KL and speed, those that there are."""
    shown = (
        ("reward/mean", "reward {:.3f}"),
        ("eval/success", "eval {:.3f}"),
        ("kl/reference", "kl {:.4f}"),
        ("kl/old", "kl/old {:.4f}"),
        ("critic/explained_variance", "ev {:.2f}"),
        ("time/tokens_per_second", "{:.0f} tok/s"),
    )
    return "  ".join(text.format(metrics[name]) for name, text in shown if name in metrics)


def duration(seconds: float) -> str:
    """`1:02:03` or `02:03`."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m:02d}:{s:02d}"


def spread(trajectories: Sequence[Trajectory], n: int) -> list[Trajectory]:
    """At most `n` of them, evenly spaced, so that not all come from one prompt."""
    if len(trajectories) <= n:
        return list(trajectories)
    return [trajectories[i * len(trajectories) // n] for i in range(n)]


def sample(t: Trajectory, step: int, kind: str) -> dict[str, Any]:
    """A trajectory as a line of the sample log."""
    return {
        "step": step,
        "kind": kind,
        "prompt_index": t.prompt_index,
        "sample_index": t.sample_index,
        "task": t.task,
        "score": t.score,
        "finish_reason": t.finish_reason,
        "response_tokens": len(t.response_ids),
        "prompt": t.prompt_text,
        "response": t.text,
        "answer": t.answer,
    }


def flat(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """A configuration's leaves by dotted key."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from flat(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", value


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a JSONL file that may not exist, or whose last line was cut by a kill."""
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8").split("\n"):
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            return  # nothing follows a line that a kill cut off


def _training(metrics: dict[str, float]) -> bool:
    return not all(name.startswith("eval/") for name in metrics)


def _line(record: dict[str, Any]) -> str:
    """One line of JSON in which every text stays legible and reads back equal: a lone surrogate, which UTF-8
    cannot hold, is escaped, and nothing else."""
    return SURROGATES.sub(lambda m: f"\\u{ord(m[0]):04x}", json.dumps(record, ensure_ascii=False)) + "\n"


def _append(path: Path, records: Iterable[dict[str, Any]]) -> None:
    with path.open("a", encoding="utf-8", newline="\n") as file:
        file.writelines(map(_line, records))


def _rewrite(path: Path, records: Iterable[dict[str, Any]]) -> None:
    part = path.with_name(f".{path.name}")
    part.write_text("".join(map(_line, records)), encoding="utf-8", newline="\n")
    part.replace(path)
