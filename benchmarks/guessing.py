"""The guessing game by PPO and by GRPO: held-out success against steps, as a picture.

    python -m benchmarks.guessing              # runs what is missing, then writes docs/guessing.{json,png}
    python -m benchmarks.guessing --draw       # draws from docs/guessing.json

The dashed line is the best that a policy can do which ignores what the game answers: three different numbers of five.
A run that is there already is not run again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks.experiments import ROOT, draw, metrics, trained

ARMS = {"PPO": "guessing_ppo", "GRPO": "guessing_grpo"}
DEAF = 3 / 5


def run(arm: str, seed: int, out: Path, overrides: list[str]) -> dict[str, object]:
    """One arm and seed, resumed or skipped where it is there; its curves."""
    name = ARMS[arm]
    steps, evaluations = metrics(trained(f"configs/{name}.yaml", name, seed, out, overrides))
    return {
        "arm": arm,
        "seed": seed,
        "eval": [(r["step"], r["eval/success"]) for r in evaluations],
        "reward": [r["reward/mean"] for r in steps],
        "turns": [r["rollout/turns"] for r in steps],
        "seconds": sum(r["time/step"] for r in steps),
    }


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
    curves = {arm: [r["eval"] for r in results if r["arm"] == arm] for arm in ARMS}
    draw(curves, args.docs / "guessing.png", "steps of 128 games", ("best without listening", DEAF))
    print("| arm | seed | first | last | best | seconds of steps |\n|---|---|---|---|---|---|")
    for r in results:
        success = [e[1] for e in r["eval"]]
        cells = " | ".join(f"{x:.3f}" for x in (success[0], success[-1], max(success)))
        print(f"| {r['arm']} | {r['seed']} | {cells} | {r['seconds']:.0f} |")


if __name__ == "__main__":
    main()
