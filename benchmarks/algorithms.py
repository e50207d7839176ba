"""PPO, SAO and GRPO on the default task, and PPO with other critics: three seeds each, the same number of steps and
trajectories, as a picture.

    python -m benchmarks.algorithms            # runs what is missing, then writes docs/algorithms.{json,png}
    python -m benchmarks.algorithms --arms SAO # runs one arm anew, the others stay as docs/algorithms.json has them
    python -m benchmarks.algorithms --draw     # draws from docs/algorithms.json

The x axis is generated tokens, SAO's warm-up included. A run that is there already is not run again.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.experiments import ROOT, draw, metrics, trained

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
    return {"arm": arm, "seed": seed} | curves(trained(config, name, seed, out, [*own, *overrides]))


def curves(directory: Path) -> dict[str, list]:
    """`eval`: (step, generated tokens, held-out success); every metric: its value at each step."""
    steps, found = metrics(directory)
    tokens = {0: 0} | {r["step"]: r["rollout/tokens"] for r in steps}
    evaluations = [(r["step"], tokens[r["step"]], r["eval/success"]) for r in found]
    return {"eval": evaluations} | {m: [r.get(m) for r in steps] for m in METRICS}


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
        wanted = [(arm, seed) for seed in range(args.seeds) for arm in args.arms]
        with ThreadPoolExecutor(args.jobs) as pool:
            results = list(pool.map(lambda w: run(*w, out, args.overrides), wanted))
        others = [] if set(args.arms) == set(ARMS) else json.loads(numbers.read_text())
        results += [r for r in others if r["arm"] not in args.arms]
        results.sort(key=lambda r: (list(ARMS).index(r["arm"]), r["seed"]))
        numbers.write_text(json.dumps(results) + "\n")
    results = json.loads(numbers.read_text())
    arms = {arm: [[(t, y) for _, t, y in r["eval"]] for r in results if r["arm"] == arm] for arm in ARMS}
    draw({arm: runs for arm, runs in arms.items() if runs}, numbers.with_suffix(".png"), "generated tokens")
    print("| arm | seed | first | last | best | tokens |\n|---|---|---|---|---|---|")
    for r in results:
        success = [e[2] for e in r["eval"]]
        cells = (f"{x:.3f}" for x in (success[0], success[-1], max(success)))
        print(f"| {r['arm']} | {r['seed']} | {' | '.join(cells)} | {r['eval'][-1][1]:.0f} |")


if __name__ == "__main__":
    main()
