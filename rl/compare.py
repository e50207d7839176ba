"""Experiments side by side: every configuration with every seed at one budget, each a normal run; then the report."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from rl.compare_report import comparison
from rl.config import Config, ConfigError
from rl.config_load import build, load, to_yaml
from rl.config_rules import step_tokens
from rl.curves import RunLog, event_files, find_runs, read_run
from rl.document import write
from rl.fairness import differing, shared, texts
from rl.overlay import write_overlay

UNITS = {"tokens": "generated_tokens", "trained_tokens": "trained_tokens", "seconds": "seconds"}
FREE = ("cluster", "checkpoint")
"""Sections that a comparison may change when it goes on: they say where a run lives, not what it does."""


@dataclass(frozen=True)
class Arm:
    """A configuration and the file it came from."""

    source: str
    config: Config

    @property
    def name(self) -> str:
        """The arm's name: its runs are `<name>-seed<k>`."""
        return self.config.run.name


@dataclass(frozen=True)
class Job:
    """One arm and seed."""

    name: str
    directory: Path
    command: list[str]
    log: Path

    @property
    def finished(self) -> bool:
        """Whether the exported policy is there: the last thing that a run writes, its tokenizer after its weights."""
        return (self.directory / "policy" / "tokenizer_config.json").is_file()


def compare(
    sources: Sequence[str],
    overrides: Sequence[str],
    *,
    seeds: int = 3,
    budget: str | None = None,
    out: Path | None = None,
    jobs: int = 1,
    allow_different: bool = False,
) -> int:
    """Run what is missing, resume what is unfinished, write the report; 1 if a run failed.

    Raises ConfigError before anything starts: arms that differ in what must be equal, a budget below one step or out
    of reach, runs there that were made otherwise.
    """
    for flag, given in (("--seeds", seeds), ("--jobs", jobs)):
        if given < 1:
            raise ConfigError(f"{flag}: {given} given, must be at least 1")
    arms = load_arms(sources, [*overrides, *budget_override(budget)])
    check_arms(arms, allow_different)
    out = (out or Path("runs") / ("compare-" + "-".join(arm.name for arm in arms))).absolute()
    planned = [plan_job(arm, seed, out) for seed in range(seeds) for arm in arms]
    for arm in arms:
        file = config_file(out, arm)
        file.parent.mkdir(parents=True, exist_ok=True)
        # Frozen here: a comparison may take hours, in which a YAML file is edited.
        file.write_text(to_yaml(arm.config), encoding="utf-8")
    failures = run_all([job for job in planned if not job.finished], jobs, len(planned))
    logs = [read_run(job.directory) for job in planned if event_files(job.directory)]
    for name, error in failures.items():
        print(f"longppo: {name} failed: {error} (log: {out / name}.log)", file=sys.stderr)
    print("report: " + " ".join(map(str, write_report(logs, failures, out))))
    return int(bool(failures))


def report(runs: Sequence[Path], out: Path | None) -> list[Path]:
    """The same report of runs that exist, from their event files; into `out`, else into the folder that holds them."""
    found = find_runs(runs)
    names = [run.resolve().name for run in found]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"report: {', '.join(sorted(twice))} given twice, must be runs with a name and seed each")
    out = out or found[0].resolve().parent
    if event_files(out):
        raise ConfigError(f"--out: {out} given, must be another folder than a run's, which has a report of its own")
    return write_report([read_run(run) for run in found], {}, out)


def write_report(logs: Sequence[RunLog], failures: dict[str, str], out: Path) -> list[Path]:
    """`report.md`, `report.html`, and arms overlaid for TensorBoard."""
    files = write(comparison(logs, failures), out)
    write_overlay([log for log in logs if not failures.get(log.name) and not log.missing()], out / "overlay")
    return files


def budget_override(text: str | None) -> list[str]:
    """`tokens=2e6` as an override of `run.budget`."""
    if text is None:
        return []
    unit, equals, amount = text.partition("=")
    if unit not in UNITS or not equals:
        raise ConfigError(f"--budget: {text!r} given, must be one of {', '.join(f'{u}=NUMBER' for u in UNITS)}")
    return [f"run.budget.{UNITS[unit]}={amount}"]


def load_arms(sources: Sequence[str], overrides: Sequence[str]) -> list[Arm]:
    """Every configuration with the overrides of all. Raises ConfigError, naming the file."""
    for key in ("run.seed", "run.out", "run.resume"):
        if any(text.startswith(f"{key}=") for text in overrides):
            raise ConfigError(f"{key}: given as an override, must be left to compare (--seeds, --out)")
    if len(sources) < 2:
        raise ConfigError(f"compare: {len(sources)} configuration given, must be at least 2")
    arms = []
    for source in sources:
        try:
            arms.append(Arm(source, load(source, overrides)))
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from error
    return arms


def check_arms(arms: Sequence[Arm], allow_different: bool) -> None:
    """Raise ConfigError where the arms would not be a comparison."""
    names = [arm.name for arm in arms]
    for arm in arms:
        if names.count(arm.name) > 1:
            files = " and ".join(a.source for a in arms if a.name == arm.name)
            raise ConfigError(f"run.name: {arm.name!r} given by {files}, must be a name for each arm")
    unlimited = not any(vars(arm.config.run.budget)[key] for arm in arms for key in UNITS.values())
    apart = {
        key: row
        for key, row in differing({arm.name: texts(arm.config) for arm in arms}).items()
        if shared(key) or (unlimited and key == "run.steps")
    }
    if apart and not allow_different:
        said = "; ".join(f"{key} ({', '.join(f'{n} {v}' for n, v in row.items())})" for key, row in apart.items())
        raise ConfigError(f"{said}: the arms differ, must be equal or --allow-different")
    for arm in arms:
        _check_reach(arm)


def _check_reach(arm: Arm) -> None:
    """Steps that cannot spend the budget would end this arm before the others."""
    c, budget = arm.config, arm.config.run.budget.generated_tokens
    most = step_tokens(c) * (1 + c.algorithm.dynamic_sampling_rounds)
    if budget is not None and c.run.steps * most < budget:
        raise ConfigError(
            f"{arm.source}: run.steps: {c.run.steps} given, must be at least {-(-budget // most)}: a step generates at "
            f"most {most} tokens, the budget is {budget}"
        )


def config_file(out: Path, arm: Arm) -> Path:
    """Where an arm's resolved configuration is kept."""
    return out / "configs" / f"{arm.name}.yaml"


def plan_job(arm: Arm, seed: int, out: Path) -> Job:
    """The run of an arm and seed. Raises ConfigError if one is there that was configured otherwise."""
    name = f"{arm.name}-seed{seed}"
    directory = out / name
    made = directory / "config.yaml"
    if made.is_file():
        then = texts(build(yaml.safe_load(made.read_text("utf-8"))))
        apart = [key for key in differing({"then": then, "now": texts(arm.config)}) if key.split(".")[0] not in FREE]
        if apart:
            raise ConfigError(f"--out: {directory} was made with another {', '.join(apart)}, must be another folder")
    # -P: a folder `policy` where the user stands must not hide the package.
    command = [sys.executable, "-P", "-m", "rl.cli", "train", str(config_file(out, arm))]
    command += [f"run.seed={seed}", f"run.out={out}", "run.resume=true"]
    return Job(name, directory, command, out / f"{name}.log")


class Terminated(SystemExit):
    """SIGTERM came."""


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM raises `Terminated` in here, with the exit code that a shell knows it by."""

    def end(number: int, frame: object) -> None:
        raise Terminated(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run_all(jobs: Sequence[Job], at_once: int, planned: int) -> dict[str, str]:
    """Run the jobs, `at_once` of them side by side; returns the last error line of each that failed.

    Ctrl-C and SIGTERM reach the runs once, by this function: each ends as it would alone, and none is started after it.
    """
    print(f"compare: {planned} runs, {planned - len(jobs)} of them finished before", flush=True)
    running: set[subprocess.Popen[bytes]] = set()
    lock, stopped, failures = threading.Lock(), threading.Event(), {}

    def run(job: Job) -> str | None:
        with job.log.open("wb") as log:
            with lock:
                if stopped.is_set():
                    return None
                process = subprocess.Popen(job.command, stdout=log, stderr=log, start_new_session=True)
                running.add(process)
            code = process.wait()
            running.discard(process)
        return last_error(job.log, code) if code else None

    with terminable(), ThreadPoolExecutor(at_once) as pool:
        futures: dict[Future[str | None], Job] = {pool.submit(run, job): job for job in jobs}
        try:
            for future in as_completed(futures):
                job, error = futures[future], future.result()
                if error is not None:
                    failures[job.name] = error
                print(f"compare: {job.name} {'failed' if error is not None else 'done'}", flush=True)
        except (KeyboardInterrupt, Terminated) as ended:
            with lock:
                stopped.set()
                for process in running:
                    process.send_signal(signal.SIGTERM if isinstance(ended, Terminated) else signal.SIGINT)
            raise
    return {job.name: failures[job.name] for job in jobs if job.name in failures}


def last_error(log: Path, code: int) -> str:
    """What a failed run said last: our own line where there is one, else the last line that is not empty."""
    lines = [line.strip() for line in log.read_text("utf-8", errors="replace").splitlines() if line.strip()]
    own = [line for line in lines if line.startswith("longppo: ") and not line.startswith("longppo: warning")]
    how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    return (own or lines or [how])[-1].removeprefix("longppo: ") if code > 0 else how
