"""The guessing game by PPO and by GRPO: held-out success against steps, as a picture.

    python benchmarks/guessing.py              # runs what is missing, then writes docs/guessing.{json,png}
    python benchmarks/guessing.py --draw       # draws from docs/guessing.json

The dashed line is the best that a policy can do which ignores what the game answers: three different numbers of five.
A run that is there already is not run again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
ARMS = {"PPO": "guessing_ppo", "GRPO": "guessing_grpo"}
DEAF = 3 / 5


def run(arm: str, seed: int, out: Path, overrides: list[str]) -> dict[str, object]:
    """One arm and seed, resumed or skipped where it is there; its curves."""
    name = ARMS[arm]
    directory = out / f"{name}-seed{seed}"
    if not (directory / "policy" / "config.json").exists():
        out.mkdir(parents=True, exist_ok=True)
        command = [str(Path(sys.executable).parent / "longppo"), "train", f"configs/{name}.yaml", "run.resume=true"]
        command += [f"run.seed={seed}", f"run.out={out}", *overrides]
        with (out / f"{name}-seed{seed}.log").open("w") as log:
            subprocess.run(command, cwd=ROOT, check=True, stdout=log, stderr=log)
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    steps = [r for r in records if "reward/mean" in r]
    return {
        "arm": arm,
        "seed": seed,
        "eval": [(r["step"], r["eval/success"]) for r in records if "eval/success" in r],
        "reward": [r["reward/mean"] for r in steps],
        "turns": [r["rollout/turns"] for r in steps],
        "seconds": sum(r["time/step"] for r in steps),
    }


def draw(results: list[dict], picture: Path) -> None:
    """Every seed thin, the mean of an arm thick."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    figure, axes = plt.subplots(figsize=(6.4, 3.6))
    for arm, color in zip(ARMS, ("tab:blue", "tab:orange"), strict=True):
        runs = np.array([r["eval"] for r in results if r["arm"] == arm])
        for r in runs:
            axes.plot(r[:, 0], r[:, 1], color=color, alpha=0.4, lw=1)
        axes.plot(runs[0, :, 0], runs[:, :, 1].mean(0), color=color, lw=2.5, label=arm)
    axes.axhline(DEAF, color="gray", ls="--", lw=1, label="best without listening")
    axes.set(xlabel="steps of 128 games", ylabel="held-out success at T=1", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(picture, dpi=120)


def main() -> None:
    """Run what is missing, write numbers and picture, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "runs")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="where guessing.json and guessing.png go")
    parser.add_argument("--draw", action="store_true", help="only draw from guessing.json")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    numbers = args.docs / "guessing.json"
    if not args.draw:
        wanted = [(arm, seed) for seed in range(args.seeds) for arm in ARMS]
        results = [run(arm, seed, args.out.resolve(), args.overrides) for arm, seed in wanted]
        numbers.write_text(json.dumps(results) + "\n")
    results = json.loads(numbers.read_text())
    draw(results, args.docs / "guessing.png")
    print("| arm | seed | first | last | best | seconds of steps |\n|---|---|---|---|---|---|")
    for r in results:
        success = [e[1] for e in r["eval"]]
        cells = " | ".join(f"{x:.3f}" for x in (success[0], success[-1], max(success)))
        print(f"| {r['arm']} | {r['seed']} | {cells} | {r['seconds']:.0f} |")


if __name__ == "__main__":
    main()
