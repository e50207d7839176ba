"""The default experiment, three seeds: held-out success against the time since the process started, as a picture.

    python -m benchmarks.quickstart            # runs all seeds anew, then writes docs/quickstart.{json,png}
    python -m benchmarks.quickstart --draw     # draws from docs/quickstart.json

The seeds run one after the other, each as a user would start it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.experiments import ROOT, draw

WINDOW_S = 600
"""The rise is what the last evaluation within ten minutes of the process' start shows."""


def curve(run: Path, started: float) -> list[tuple[int, float, float]]:
    """(step, seconds since the process started, held-out success) of every evaluation of a run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return [(e.step, e.wall_time - started, e.value) for e in events.Scalars("eval/success")]


def run_seed(config: str, seed: int, out: Path, overrides: list[str]) -> dict[str, object]:
    """Run one seed from nothing; returns its curve."""
    shutil.rmtree(out / f"quickstart-seed{seed}", ignore_errors=True)
    command = [
        str(Path(sys.executable).parent / "longppo"),
        "train",
        config,
        f"run.seed={seed}",
        "run.name=quickstart",
        f"run.out={out}",
        *overrides,
    ]
    started = time.time()
    subprocess.run(command, cwd=ROOT, check=True)
    points = curve(out / f"quickstart-seed{seed}", started)
    return {"seed": seed, "seconds": time.time() - started, "points": points}


def main() -> None:
    """Run, draw, and print the rise of every seed and of the mean."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/ppo.yaml")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "runs")
    parser.add_argument("--draw", action="store_true", help="only draw from docs/quickstart.json")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    numbers = ROOT / "docs" / "quickstart.json"
    if not args.draw:
        results = [run_seed(args.config, s, args.out.resolve(), args.overrides) for s in range(args.seeds)]
        numbers.write_text(json.dumps(results, indent=1) + "\n")
    results = json.loads(numbers.read_text())
    curves = [[(seconds / 60, success) for _, seconds, success in r["points"]] for r in results]
    draw({"PPO": curves}, numbers.with_suffix(".png"), "minutes since the process started")
    rises = []
    for r in results:
        first, last = r["points"][0], [p for p in r["points"] if p[1] <= WINDOW_S][-1]
        rises.append(last[2] - first[2])
        print(
            f"seed {r['seed']}: success {first[2]:.3f} -> {last[2]:.3f} ({rises[-1]:+.3f}) "
            f"in {last[1]:.0f} s since the process started"
        )
    print(f"mean rise {sum(rises) / len(rises):+.3f}, smallest {min(rises):+.3f}")


if __name__ == "__main__":
    main()
