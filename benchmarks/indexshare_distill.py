"""Does an indexer that learns from all layers it serves find more for Shared layers than one that learns from its own?

    python benchmarks/indexshare_distill.py            # runs what is missing, then draws docs/indexshare_distill.png
    python benchmarks/indexshare_distill.py --draw     # draws from docs/indexshare_distill.json

The tiny pretrained model (F F S S S F) with new random indexers, dense warm-up on recall documents with either loss,
otherwise the same: indexers' initial weights, documents, steps. Held-out documents are the same for all seeds. In this
model only the indexer of layer 1 serves Shared layers (2, 3, 4), so only there do the two losses differ.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
NUMBERS, PICTURE = ROOT / "docs" / "indexshare_distill.json", ROOT / "docs" / "indexshare_distill.png"
TEACHERS = {"served": "all served layers", "own": "its own layer alone"}
HELD_OUT_SEED = 1000
SIZES = ("data.documents_per_step=3", "data.held_out=6")
"""About 1,500 tokens a step and 3,000 to judge by: a run takes half a minute of one core."""


def run(seed: int, teachers: str, steps: int) -> dict[str, Any]:
    """One warm-up from new indexers; the evaluations before and after it."""
    import torch

    from indexshare.pattern import adopt_anew
    from indexshare.schedule import Schedule
    from rl.distill import Student, cut, evaluate, load_model, warmup_step
    from rl.documents import DocumentSource
    from rl.indexshare_config import DistillConfig, load
    from rl.schedule import lr_factor

    c = load(DistillConfig, ROOT / "configs" / "indexshare_distill.yaml", [f"teachers={teachers}", *SIZES])
    began = time.process_time()
    model, tokenizer = load_model(c.model)
    held_out = cut(DocumentSource(replace(c.data, seed=HELD_OUT_SEED), tokenizer).held_out(), c)
    pretrained = evaluate(model, held_out)
    torch.manual_seed(seed)
    adopt_anew(model, Schedule.from_config(model.config))
    documents = DocumentSource(replace(c.data, seed=seed), tokenizer)
    student, before = Student.of(model, c), evaluate(model, held_out)
    for step in range(1, steps + 1):
        factor = lr_factor(step, c.indexer.warmup_steps, steps, "cosine")
        metrics = warmup_step(student, cut(documents.step(step - 1), c), c, factor)
    result = {"seed": seed, "teachers": teachers, "steps": steps, "kl": metrics["distill/kl"], "before": before}
    return result | {"after": evaluate(model, held_out), "pretrained": pretrained, "cpu_s": time.process_time() - began}


def table(results: list[dict]) -> str:
    """Recall and held-out loss of every run, then the difference on the Shared layers by seed."""
    rows = ["seed  learns from          recall Full    Shared   held-out loss (dense)"]
    for r in results:
        a = r["after"]
        rows.append(
            f"{r['seed']:4d}  {TEACHERS[r['teachers']]:19s}  {a['recall/full']:11.3f}  {a['recall/shared']:8.3f}  "
            f"{a['eval/lm_loss']:14.3f}  {a['eval/lm_loss_dense']:.3f}"
        )
    by = {(r["seed"], r["teachers"]): r["after"]["recall/shared"] for r in results}
    seeds = sorted({seed for seed, _ in by})
    gains = [by[s, "served"] - by[s, "own"] for s in seeds]
    rows.append("gain on Shared layers by seed: " + ", ".join(f"{g:+.3f}" for g in gains))
    return "\n".join(rows)


def draw(results: list[dict], picture: Path) -> None:
    """Recall by layer, a point for each seed and a line for their mean; and the held-out loss."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), width_ratios=(2.2, 1))
    letters = "FFSSSF"
    layers = np.arange(len(letters))
    for (teachers, name), color, shift in zip(TEACHERS.items(), ("tab:blue", "tab:orange"), (-0.12, 0.12), strict=True):
        mine = [r for r in results if r["teachers"] == teachers]
        recall = np.array([[r["after"][f"recall/layer_{i:02d}"] for i in layers] for r in mine])
        for row in recall:
            left.plot(layers + shift, row, "o", color=color, ms=4, alpha=0.6)
        left.hlines(recall.mean(0), layers + shift - 0.1, layers + shift + 0.1, color=color, lw=2.5, label=name)
        loss = [r["after"]["eval/lm_loss"] for r in mine]
        right.plot([teachers] * len(loss), loss, "o", color=color, alpha=0.6)
    before = np.mean([[r["before"][f"recall/layer_{i:02d}"] for i in layers] for r in results], 0)
    left.hlines(before, layers - 0.3, layers + 0.3, color="gray", ls=":", label="before")
    left.set(ylabel="recall of attention mass, top 32", ylim=(0, 1.25))
    left.set_xticks(layers, [f"{i} {'Full' if t == 'F' else 'Shared'}" for i, t in enumerate(letters)])
    left.legend(title="the indexer learns from", fontsize=8, ncol=3, loc="upper center")
    dense = np.mean([r["after"]["eval/lm_loss_dense"] for r in results])
    right.axhline(dense, color="gray", ls=":", label="dense attention")
    right.set(ylabel="held-out loss, sparse (nats)", xlim=(-0.6, 1.6))
    right.legend(fontsize=8, loc="center")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(picture, dpi=120)


def main() -> None:
    """Run, draw, tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "indexshare_distill", help="finished runs")
    parser.add_argument("--draw", action="store_true", help="only draw")
    args = parser.parse_args()
    if not args.draw:
        args.work.mkdir(parents=True, exist_ok=True)
        results = []
        for seed in range(args.seeds):
            for teachers in TEACHERS:
                path = args.work / f"{teachers}-seed{seed}-steps{args.steps}.json"
                if not path.exists():
                    path.write_text(json.dumps(run(seed, teachers, args.steps)))
                results.append(json.loads(path.read_text()))
                print(f"seed {seed}, {teachers}: {results[-1]['cpu_s']:.0f} s of CPU", flush=True)
        NUMBERS.write_text(json.dumps(results, indent=1) + "\n")
    results = json.loads(NUMBERS.read_text())
    draw(results, PICTURE)
    print(table(results))


if __name__ == "__main__":
    main()
