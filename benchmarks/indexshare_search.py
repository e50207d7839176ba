"""Searched, uniform and random patterns of Full and Shared layers, and how much of the layers' selections is common.

    python benchmarks/indexshare_search.py                  # docs/indexshare_search.json and .png
    python benchmarks/indexshare_search.py --draw           # only draws
    python benchmarks/indexshare_search.py --model FOLDER   # another model, Full in every layer, that does recall

The default model is the tiny pretrained one with an indexer in every layer: those that were there, and new ones; all
learn by dense warm-up (`longppo indexshare distill`'s first stage). With its six layers, a half and a third of them can
be Full; a model of 8 or 16 layers (`examples/pretrain_tiny.py --pattern FFFFFFFFFFFFFFFF`) is judged at 1/2, 1/4, 1/8.
The search sees other documents than those that judge. No weight is changed after the warm-up.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
NUMBERS, PICTURE = ROOT / "docs" / "indexshare_search.json", ROOT / "docs" / "indexshare_search.png"
HELD_OUT_SEED = 1000
SIZES = ("data.documents_per_step=3", "data.held_out=4")
"""About 1,500 tokens a step and for the search, 2,000 to judge by: all of it takes half a minute of one core."""
MOST_RANDOM = 20
"""Patterns of a level that are judged besides searched and uniform; all of them where there are no more."""


def make_model(out: Path, steps: int) -> None:
    """The tiny model, Full in every layer, its indexers warmed up."""
    import torch

    from indexshare.pattern import adopt_anew, indexers
    from indexshare.schedule import Schedule
    from rl.distill import Student, cut, load_model, save, warmup_step
    from rl.documents import DocumentSource
    from rl.indexshare_config import DistillConfig, load
    from rl.schedule import lr_factor

    c = load(DistillConfig, ROOT / "configs" / "indexshare_distill.yaml", SIZES)
    model, tokenizer = load_model(c.model)
    torch.manual_seed(0)
    learned = indexers(model)
    adopt_anew(model, Schedule.from_pattern("F" * model.config.num_hidden_layers))
    for i, indexer in learned.items():
        indexers(model)[i].load_state_dict(indexer.state_dict())
    documents, student = DocumentSource(c.data, tokenizer), Student.of(model, c)
    for step in range(1, steps + 1):
        factor = lr_factor(step, c.indexer.warmup_steps, steps, "cosine")
        metrics = warmup_step(student, cut(documents.step(step - 1), c), c, factor)
        if step % 10 == 0:
            print(f"warm-up {step}/{steps}  KL {metrics['distill/kl']:.3f}", flush=True)
    save(model, tokenizer, out, torch.float32)


def levels(layers: int) -> list[int]:
    """Numbers of Full layers to judge: a half, a quarter and an eighth, a third where a quarter cannot be."""
    parts = [2, 3, 4, 8] if layers % 4 else [2, 4, 8]
    return [layers // part for part in parts if layers % part == 0]


def rivals(layers: int, full: int) -> list[str]:
    """All patterns of a level, or as many as we judge, drawn without preference."""
    from indexshare.search import at_random

    places = list(itertools.islice(itertools.combinations(range(1, layers), full - 1), MOST_RANDOM + 1))
    if len(places) <= MOST_RANDOM:
        return ["F" + "".join("F" if i in chosen else "S" for i in range(1, layers)) for chosen in places]
    rng, drawn = random.Random(f"{layers}/{full}"), dict[str, None]()
    while len(drawn) < MOST_RANDOM:
        drawn[at_random(layers, full, rng)] = None
    return list(drawn)


def judge(model: Any, pattern: str, documents: list[Any]) -> dict[str, Any]:
    """Held-out loss under a pattern, the share of answer characters whose likeliest prediction is right, and the recall
    of attention mass, a mean over layers."""
    import torch

    from indexshare import distill
    from indexshare.pattern import trying
    from indexshare.schedule import Schedule

    loss = right = count = 0.0
    mass = torch.zeros(2, len(pattern), dtype=torch.float64)
    with torch.no_grad(), trying(model, Schedule.from_pattern(pattern)):
        for p in documents:
            with distill.recording(model) as inputs:
                hidden = distill.hidden_states(model, p.ids, p.positions, p.seq_start)
            logits, targets = model.lm_head(hidden[p.predicts]), p.ids[p.predicts + 1]
            loss += torch.nn.functional.cross_entropy(logits, targets, reduction="sum").item()
            right += (logits.argmax(-1) == targets).sum().item()
            count += len(targets)
            mass += distill.attention_mass(model, inputs, p.seq_start, model.config.index_topk)
    recall = (mass[0] / mass[1]).mean().item()
    return {"pattern": pattern, "loss": loss / count, "accuracy": right / count, "recall": recall}


def measure(folder: Path) -> dict[str, Any]:
    """Search, then judge."""
    import torch

    from indexshare import distill
    from indexshare.pattern import EVERYTHING, overlap, selecting
    from indexshare.search import greedy, uniform
    from rl.distill import cut, load_model
    from rl.documents import DocumentSource
    from rl.indexshare_config import DistillConfig, load
    from rl.pattern_search import loss_of

    c = load(DistillConfig, ROOT / "configs" / "indexshare_distill.yaml", [*SIZES, f"model.path={folder}"])
    began = time.process_time()
    model, tokenizer = load_model(c.model)
    layers, k = model.config.num_hidden_layers, model.config.index_topk
    calibration = cut(DocumentSource(replace(c.data, seed=HELD_OUT_SEED + 1), tokenizer).step(0), c)
    held_out = cut(DocumentSource(replace(c.data, seed=HELD_OUT_SEED), tokenizer).held_out(), c)

    path = greedy("F" * layers, min(levels(layers)), lambda pattern: loss_of(model, pattern, calibration))
    result: dict[str, Any] = {"layers": layers, "index_topk": k, "tokens": [len(p.ids) for p in held_out]}
    result["path"] = [{"pattern": t.pattern, "loss": t.loss} for t in path]
    result["all_full"] = judge(model, "F" * layers, held_out)
    with selecting(model, EVERYTHING):
        result["dense"] = judge(model, "F" * layers, held_out)
    result["levels"] = [
        {
            "full": full,
            "searched": judge(model, next(t.pattern for t in path if t.pattern.count("F") == full), held_out),
            "uniform": judge(model, uniform(layers, full), held_out),
            "random": [judge(model, pattern, held_out) for pattern in rivals(layers, full)],
        }
        for full in levels(layers)
    ]
    p = held_out[0]
    with torch.no_grad():
        inputs = distill.record(model, p.ids, p.positions, p.seq_start)
    result["overlap"] = overlap(model, inputs, p.seq_start, k).tolist()
    return result | {"cpu_s": time.process_time() - began}


def draw(result: dict[str, Any], picture: Path) -> None:
    """Loss and accuracy by number of Full layers; the overlap of the layers' selections."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    figure, (*panels, heat) = plt.subplots(1, 3, figsize=(12, 3.8))
    names = [f"{level['full']} of {result['layers']}" for level in result["levels"]]
    for axes, key, title in zip(
        panels, ("loss", "accuracy"), ("held-out loss (nats)", "answer characters right"), strict=True
    ):
        for i, level in enumerate(result["levels"]):
            others = [r[key] for r in level["random"]]
            axes.plot([i] * len(others), others, "o", color="gray", alpha=0.4, label=None if i else "random patterns")
            axes.plot(i - 0.12, level["uniform"][key], "D", color="tab:orange", label=None if i else "uniform")
            axes.plot(i + 0.12, level["searched"][key], "*", ms=12, color="tab:blue", label=None if i else "searched")
        axes.axhline(result["all_full"][key], color="tab:green", ls="--", label="all Full")
        axes.axhline(result["dense"][key], color="gray", ls=":", label="dense attention")
        axes.set(ylabel=title, xlabel="Full layers", xlim=(-0.5, len(names) - 0.5))
        axes.set_xticks(range(len(names)), names)
        axes.grid(alpha=0.3)
    panels[0].legend(fontsize=8)
    shares = np.array(result["overlap"])
    image = heat.imshow(shares, vmin=0, vmax=1, cmap="viridis")
    heat.set(xlabel="layer", ylabel="layer", title=f"common keys of {result['index_topk']}")
    if len(shares) <= 8:
        for i, j in np.ndindex(*shares.shape):
            heat.text(j, i, f"{shares[i, j]:.2f}", ha="center", va="center", color="white", fontsize=8)
    figure.colorbar(image, ax=heat)
    figure.tight_layout()
    figure.savefig(picture, dpi=120)


def table(result: dict[str, Any]) -> str:
    """Each level's patterns in a line."""
    rows = ["Full                        pattern                loss  accuracy    recall of attention mass"]

    def line(name: str, r: dict[str, Any]) -> str:
        return f"{name:28s}{r['pattern']:18s}{r['loss']:9.4f}{r['accuracy']:10.3f}{r['recall']:10.3f}"

    rows += [line("dense", result["dense"]), line("all Full", result["all_full"])]
    for level in result["levels"]:
        n, others = level["full"], sorted(level["random"], key=lambda r: r["loss"])
        rows += [line(f"{n:4d}  searched", level["searched"]), line(f"{n:4d}  uniform", level["uniform"])]
        named = (("best", others[0]), ("median", others[len(others) // 2]), ("worst", others[-1]))
        rows += [line(f"{n:4d}  {what} of {len(others)} others", r) for what, r in named]
    return "\n".join(rows)


def main() -> None:
    """Make the model, search, judge, draw, tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a folder, every layer Full")
    parser.add_argument("--steps", type=int, default=30, help="warm-up steps of the default model")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "indexshare_search", help="the default model")
    parser.add_argument("--draw", action="store_true", help="only draw")
    args = parser.parse_args()
    if not args.draw:
        folder = args.model or args.work / f"model-steps{args.steps}"
        if not (folder / "config.json").exists():
            make_model(folder, args.steps)
        NUMBERS.write_text(json.dumps(measure(folder), indent=1) + "\n")
    result = json.loads(NUMBERS.read_text())
    draw(result, PICTURE)
    print(table(result))


if __name__ == "__main__":
    main()
