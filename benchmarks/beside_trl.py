"""LongPPO's speed beside TRL's: the same job on both sides, one after the other on the same two cores.

    python benchmarks/beside_trl.py --setup    # once: virtual environments .venv-trl-ppo and .venv-trl-grpo
    python benchmarks/beside_trl.py            # measures, writes docs/beside_trl.json and docs/beside_trl.png
    python benchmarks/beside_trl.py --draw     # the picture and the table anew from docs/beside_trl.json

Tokens are response tokens. CPU seconds are those of every process of a side (for LongPPO: driver, actors, engine, Ray's
own), from the end of step 2 to the end of the last step. Leave the machine alone meanwhile: neighbours on the same
cores slow both sides' caches, and the side that waits more for memory suffers more.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from beside import job, limit
from beside.meter import Mark, measure

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "runs" / "beside_trl"
NUMBERS, PICTURE = ROOT / "docs" / "beside_trl.json", ROOT / "docs" / "beside_trl.png"
TRL = {"ppo": "1.12.0", "grpo": "1.16.0"}
"""The last release with PPO, and the newest."""
STEADY = 2
"""Steps at the start that do not count."""
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


@dataclass(frozen=True)
class Job:
    """One line of the comparison."""

    algorithm: str
    epochs: int
    optimizer_steps: int
    steps: int
    target: float

    @property
    def name(self) -> str:
        """As the table and the picture say it."""
        return f"{self.algorithm.upper()} {self.epochs} x {self.optimizer_steps}"


JOBS = (Job("ppo", 1, 1, 12, 1.5), Job("ppo", 4, 4, 8, 1.5), Job("grpo", 1, 1, 16, 1.0))
"""Epochs x optimizer steps each."""


@dataclass(frozen=True)
class Result:
    """What one run of one side came to, after the first steps."""

    job: str
    side: str
    seed: int
    tokens: int
    cpu_s: float
    wall_s: float
    cpu_by_process: dict[str, float]
    reward: list[float]
    """Of every step, the first ones included."""


def python_of(algorithm: str) -> Path:
    """TRL's interpreter."""
    return ROOT / f".venv-trl-{algorithm}" / "bin" / "python"


def setup() -> None:
    """Make TRL's environments, with the versions of our lock file where both sides use a package."""
    lock = ROOT / "requirements" / "cpu.lock"
    found = re.search(r"^torch==.*$", lock.read_text(), re.MULTILINE)
    assert found
    for algorithm, version in TRL.items():
        python = python_of(algorithm)
        subprocess.run([sys.executable, "-m", "venv", str(python.parent.parent)], check=True)
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "-c", str(lock)]
        # The CPU build of torch is not on PyPI: its index is named only where nothing else offers it.
        if subprocess.run([*pip, found[0]]).returncode:
            subprocess.run([*pip, "--extra-index-url", CPU_INDEX, found[0]], check=True)
        subprocess.run([*pip, f"trl=={version}", "transformers", "accelerate", "datasets==5.2.0"], check=True)


def environment() -> dict[str, str]:
    """Of every process: one thread, nothing fetched."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    path = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
    return {**os.environ, **threads, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def run(side: str, what: Job, seed: int) -> Result:
    """One run from nothing. Raises RuntimeError, naming the log, if it fails."""
    if side == "longppo":
        out = FOLDER / f"beside_{what.algorithm}-seed{seed}"
        command = [sys.executable, "-m", "rl.cli", "train", f"benchmarks/beside/{what.algorithm}.yaml"]
        command += [f"run.seed={seed}", f"run.steps={what.steps}"]
        command += [f"step.epochs={what.epochs}", f"step.optimizer_steps={what.optimizer_steps}"]
    else:
        out = FOLDER / f"trl_{what.algorithm}-seed{seed}"
        command = [str(python_of(what.algorithm)), f"benchmarks/beside/trl_{what.algorithm}.py", str(FOLDER), str(out)]
        command += [str(n) for n in (what.steps, what.epochs, what.optimizer_steps, seed)]
    shutil.rmtree(out, ignore_errors=True)
    marks = measure(command, out / "metrics.jsonl", FOLDER / f"{out.name}.log", environment(), ROOT)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return result(what, side, seed, marks, [line["reward/mean"] for line in lines])


def result(what: Job, side: str, seed: int, marks: list[Mark], reward: list[float]) -> Result:
    """What lies between the mark of the second step and the last."""
    first, last = next(m for m in marks if m.lines >= STEADY), marks[-1]
    spent = {kind: seconds - first.cpu.get(kind, 0.0) for kind, seconds in last.cpu.items()}
    return Result(
        job=what.name,
        side=side,
        seed=seed,
        tokens=(last.lines - first.lines) * job.SEQUENCES * job.RESPONSE,
        cpu_s=sum(spent.values()),
        wall_s=last.wall - first.wall,
        cpu_by_process={k: round(s, 2) for k, s in sorted(spent.items(), key=lambda item: -item[1]) if s >= 0.005},
        reward=[round(r, 5) for r in reward],
    )


def machine() -> dict[str, object]:
    """What was measured on, and how busy it was."""
    model = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())
    return {
        "processor": model[1] if model else platform.processor(),
        "cores": sorted(os.sched_getaffinity(0)),
        "load_average": list(os.getloadavg()),
        "multiplication": multiplication_rates(),
    }


def multiplication_rates() -> dict[str, float]:
    """See `beside.limit`, measured in a process with one thread."""
    said = subprocess.run(
        [sys.executable, "benchmarks/beside/limit.py"],
        env=environment(),
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    return json.loads(said.stdout)


def table(measured: dict) -> list[dict]:
    """A line per job: both sides' tokens per CPU second and per second, their ratio, what multiplication takes."""
    rates = measured["machine"]["multiplication"]
    rows = []
    for what in JOBS:
        row: dict = {"job": what.name, "target": what.target}
        for side in ("longppo", "trl"):
            runs = [r for r in measured["runs"] if r["job"] == what.name and r["side"] == side]
            if not runs:
                break
            tokens, cpu, wall = (sum(r[key] for r in runs) for key in ("tokens", "cpu_s", "wall_s"))
            passes = (
                limit.needed(what.algorithm, what.epochs, what.optimizer_steps)
                if side == "longppo"
                else limit.by_trl(what.algorithm, what.epochs)
            )
            multiplying = limit.seconds(passes, rates) * tokens / (job.SEQUENCES * job.RESPONSE)
            row[side] = {
                "tokens_per_cpu_s": tokens / cpu,
                "tokens_per_s": tokens / wall,
                "multiplication_share": multiplying / cpu,
                "limit_tokens_per_cpu_s": tokens / multiplying,
            }
        else:
            row["ratio_cpu"] = row["longppo"]["tokens_per_cpu_s"] / row["trl"]["tokens_per_cpu_s"]
            row["ratio_wall"] = row["longppo"]["tokens_per_s"] / row["trl"]["tokens_per_s"]
            rows.append(row)
    return rows


def say(rows: list[dict]) -> None:
    """The table, printed."""
    print(f"{'':<10} {'tokens per CPU second':>34} {'tokens per second':>30} {'multiplication':>18}")
    print(
        f"{'':<10}" + f"{'LongPPO':>11}{'TRL':>9}{'ratio':>8}{'aim':>7}" + f"{'LongPPO':>12}{'TRL':>9}{'ratio':>8}",
        end="",
    )
    print(f"{'LongPPO':>12}{'TRL':>7}")
    for row in rows:
        ours, theirs = row["longppo"], row["trl"]
        print(
            f"{row['job']:<10}{ours['tokens_per_cpu_s']:>11.0f}{theirs['tokens_per_cpu_s']:>9.0f}{row['ratio_cpu']:>8.2f}"
            f"{row['target']:>7.1f}{ours['tokens_per_s']:>12.0f}{theirs['tokens_per_s']:>9.0f}{row['ratio_wall']:>8.2f}"
            f"{ours['multiplication_share']:>12.0%}{theirs['multiplication_share']:>7.0%}"
        )


def draw(measured: dict) -> None:
    """Reward of both sides by step for every job, and their speeds beside what multiplication alone would allow."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    colours = {"longppo": "tab:blue", "trl": "tab:orange"}
    names = {"longppo": "LongPPO", "trl": "TRL"}
    figure, grid = plt.subplots(2, 2, figsize=(9, 6))
    *curves, bars = grid.flat
    for axes, what in zip(curves, JOBS, strict=True):
        for r in measured["runs"]:
            if r["job"] == what.name:
                label = names[r["side"]] if r["seed"] == 0 else None
                axes.plot(range(1, len(r["reward"]) + 1), r["reward"], color=colours[r["side"]], alpha=0.8, label=label)
        axes.set(title=what.name, xlabel="step", ylabel="reward")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        axes.legend()
    rows = table(measured)
    for offset, side in ((-0.2, "longppo"), (0.2, "trl")):
        places = [i + offset for i in range(len(rows))]
        bars.bar(places, [r[side]["tokens_per_cpu_s"] for r in rows], 0.38, color=colours[side], label=names[side])
        limits = [r[side]["limit_tokens_per_cpu_s"] for r in rows]
        bars.hlines(limits, [p - 0.19 for p in places], [p + 0.19 for p in places], color="black", lw=1)
    bars.plot([], [], color="black", lw=1, label="multiplication alone")
    bars.set_xticks(range(len(rows)), [r["job"] for r in rows])
    bars.set(ylabel="tokens per CPU second", ylim=(0, 1.5 * bars.get_ylim()[1]))  # room for the legend
    bars.legend()
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=110)


def main() -> None:
    """Set up, measure, say, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setup", action="store_true", help="only make TRL's environments")
    parser.add_argument("--draw", action="store_true", help="only from docs/beside_trl.json")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each side and job (default: %(default)s)")
    parser.add_argument("--jobs", default=",".join(w.name for w in JOBS), help="default: %(default)s")
    args = parser.parse_args()
    if args.setup:
        setup()
        return
    if not args.draw:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
        FOLDER.mkdir(parents=True, exist_ok=True)
        job.write(FOLDER)
        chosen = [w for w in JOBS if w.name in args.jobs.split(",")]
        measured: dict = {"machine": machine(), "trl": TRL, "runs": []}
        for seed in range(args.rounds):
            for what in chosen:
                for side in ("longppo", "trl"):
                    measured["runs"].append(asdict(run(side, what, seed)))
                    r = measured["runs"][-1]
                    print(
                        f"{what.name} {side} seed {seed}: {r['tokens'] / r['cpu_s']:.0f} tokens per CPU second",
                        flush=True,
                    )
        measured["table"] = table(measured)
        NUMBERS.write_text(json.dumps(measured, indent=1) + "\n")
    measured = json.loads(NUMBERS.read_text())
    say(table(measured))
    draw(measured)


if __name__ == "__main__":
    main()
