"""PPO, SAO and GRPO on the default task, and PPO with other critics: three seeds each, the same number of steps and
trajectories, as a picture.

    python benchmarks/algorithms.py            # runs what is missing, then writes docs/algorithms.{json,png}
    python benchmarks/algorithms.py --arms SAO # runs one arm anew, the others stay as docs/algorithms.json has them
    python benchmarks/algorithms.py --draw     # draws from docs/algorithms.json

The x axis is generated tokens, SAO's warm-up included. A run that is there already is not run again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parent.parent
ARMS = {
    "PPO": ["configs/ppo.yaml"],
    "PPO, critic's attention frozen": ["configs/ppo.yaml", "critic.freeze=attention", "critic.optimizer.lr=1e-3"],
    "PPO, whole critic": ["configs/ppo.yaml", "critic.freeze=none", "critic.optimizer.lr=5e-4"],
    "SAO": ["configs/sao.yaml"],
    "GRPO": ["configs/grpo.yaml"],
}
METRICS = ("reward/mean", "policy/entropy", "critic/explained_variance", "policy/grad_norm")


def run(arm: str, seed: int, out: Path, overrides: list[str]) -> dict[str, object]:
    """One arm and seed, resumed or skipped where it is there; its curves against generated tokens."""
    config, *own = ARMS[arm]
    name = "algorithms-" + arm.lower().replace(",", "").replace("'", "").replace(" ", "-")
    directory = out / f"{name}-seed{seed}"
    if not (directory / "policy" / "config.json").exists():
        command = [
            str(Path(sys.executable).parent / "longppo"),
            "train",
            config,
            f"run.seed={seed}",
            f"run.name={name}",
        ]
        command += [f"run.out={out}", "run.resume=true", *own, *overrides]
        with (out / f"{name}-seed{seed}.log").open("w") as log:
            subprocess.run(command, cwd=ROOT, check=True, stdout=log, stderr=log)
    return {"arm": arm, "seed": seed} | curves(directory)


def curves(directory: Path) -> dict[str, list]:
    """`eval`: (step, generated tokens, held-out success); every metric: its value at each step."""
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    steps = [r for r in records if "reward/mean" in r]
    tokens = {0: 0} | {r["step"]: r["rollout/tokens"] for r in steps}
    evaluations = [(r["step"], tokens[r["step"]], r["eval/success"]) for r in records if "eval/success" in r]
    return {"eval": evaluations} | {m: [r.get(m) for r in steps] for m in METRICS}


def draw(results: list[dict], picture: Path) -> None:
    """Held-out success against tokens: every seed thin, the mean thick, the seeds' spread shaded."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    figure, axes = plt.subplots(figsize=(7, 4))
    for color, arm in zip(plt.rcParams["axes.prop_cycle"].by_key()["color"], ARMS, strict=False):
        runs = [np.array(r["eval"]) for r in results if r["arm"] == arm]
        if not runs:
            continue
        tokens, success = np.mean([r[:, 1] for r in runs], axis=0), np.array([r[:, 2] for r in runs])
        for r in runs:
            axes.plot(r[:, 1], r[:, 2], color=color, alpha=0.3, lw=0.8)
        axes.fill_between(tokens, success.min(0), success.max(0), color=color, alpha=0.12, lw=0)
        axes.plot(tokens, success.mean(0), color=color, lw=2.5, label=arm)
    axes.set(xlabel="generated tokens", ylabel="held-out success at T=1", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(picture, dpi=120)


def main() -> None:
    """Run what is missing, write numbers and picture, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--arms", nargs="*", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--jobs", type=int, default=1, help="runs at once: curves do not mind, seconds would")
    parser.add_argument("--out", type=Path, default=ROOT / "runs")
    parser.add_argument("--draw", action="store_true", help="only draw from docs/algorithms.json")
    parser.add_argument("--overrides", nargs="*", default=[])
    args = parser.parse_args()
    numbers = ROOT / "docs" / "algorithms.json"
    if not args.draw:
        out = args.out.resolve()
        out.mkdir(parents=True, exist_ok=True)
        wanted = [(arm, seed) for seed in range(args.seeds) for arm in args.arms]
        with ThreadPoolExecutor(args.jobs) as pool:
            results = list(pool.map(lambda w: run(*w, out, args.overrides), wanted))
        others = [] if set(args.arms) == set(ARMS) else json.loads(numbers.read_text())
        results += [r for r in others if r["arm"] not in args.arms]
        results.sort(key=lambda r: (list(ARMS).index(r["arm"]), r["seed"]))
        numbers.write_text(json.dumps(results) + "\n")
    results = json.loads(numbers.read_text())
    draw(results, ROOT / "docs" / "algorithms.png")
    print("| arm | seed | first | last | best | tokens |\n|---|---|---|---|---|---|")
    for r in results:
        success = [e[2] for e in r["eval"]]
        cells = (f"{x:.3f}" for x in (success[0], success[-1], max(success)))
        print(f"| {r['arm']} | {r['seed']} | {' | '.join(cells)} | {r['eval'][-1][1]:.0f} |")


if __name__ == "__main__":
    main()
