"""Prefill and decode of one model in vLLM on a CPU: all layers Full, FSSS, and dense attention.

    python benchmarks/indexshare_rollout.py             # 2K, 8K, 32K tokens: JSON and picture in docs/
    python benchmarks/indexshare_rollout.py --quick     # 1K and 2K, one round, nothing written

Three engines hold the same random weights, each in a process of its own with one thread; FSSS lacks the indexers of its
Shared layers, and dense attention is `index_topk` = the longest context, where nothing is scored or gathered. In every
round each engine takes its turn with the same prompt: prefill is the prompt and one token, decode further tokens of
several samples of that prompt, whose keys lie in the prefix cache. Time is the process' own CPU time, the least of all
rounds; shares and speed-ups are ratios of one run. The bound is the ratio of multiplications, counted by `operations`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
K = 256
LAYERS = 4
VARIANTS = {"all Full": "FFFF", "FSSS": "FSSS", "dense": "FSSS"}
HIDDEN, HEADS, RANK, ROPE, NOPE, VALUE, Q_RANK = 256, 4, 64, 16, 48, 64, 128
INDEX_HEADS, INDEX_DIM = 8, 64
INTERMEDIATE, VOCABULARY = 512, 512
BATCHED_TOKENS = 2048


@dataclass(frozen=True)
class Measured:
    """One phase of one engine at one context: CPU seconds a token, and the share of them in indexers."""

    variant: str
    context: int
    phase: str
    seconds: float
    indexer_share: float


def operations(variant: str, context: int, phase: str) -> float:
    """Multiply-adds of the layers for one token: of a prompt of `context` tokens on average, or of one after it."""
    seen = context / 2 if phase == "prefill" else context
    selected = seen if variant == "dense" else min(K, seen)
    attention = HEADS * (2 * RANK + ROPE) * selected
    projections = HIDDEN * (Q_RANK + RANK + ROPE) + Q_RANK * HEADS * (NOPE + ROPE) + HEADS * VALUE * HIDDEN
    projections += HEADS * RANK * (NOPE + VALUE) + 3 * HIDDEN * INTERMEDIATE
    indexer = INDEX_HEADS * INDEX_DIM * (seen + Q_RANK) + HIDDEN * (INDEX_DIM + INDEX_HEADS)
    scans = 0 if variant == "dense" else VARIANTS[variant].count("F")
    return LAYERS * (attention + projections) + scans * indexer


# ------------------------------------------------------------------------------------------------ models
def write_models(folder: Path, longest: int) -> dict[str, str]:
    """The same weights under the three configurations; returns a folder for each."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

    from indexshare.schedule import Schedule

    paths = {}
    for variant, pattern in VARIANTS.items():
        paths[variant] = str(folder / variant.replace(" ", "_"))
        unnamed: dict[str, Any] = {
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "indexer_rope_interleave": True,
        }
        config = GlmMoeDsaConfig(
            vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, moe_intermediate_size=64,
            num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=HEADS, n_shared_experts=1,
            n_routed_experts=4, num_experts_per_tok=2, first_k_dense_replace=LAYERS, kv_lora_rank=RANK,
            q_lora_rank=Q_RANK, qk_rope_head_dim=ROPE, qk_nope_head_dim=NOPE, v_head_dim=VALUE,
            index_topk=longest if variant == "dense" else K, index_head_dim=INDEX_DIM, index_n_heads=INDEX_HEADS,
            rms_norm_eps=1e-6,
            max_position_embeddings=longest, initializer_range=0.05, bos_token_id=1, eos_token_id=2, pad_token_id=0,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
            **unnamed, **Schedule.from_pattern(pattern).config_fields(),
        )  # fmt: skip
        torch.manual_seed(0)
        model = GlmMoeDsaForCausalLM(config)
        model.save_pretrained(paths[variant])
    # FFFF was drawn with more matrices: the others take what they have of it.
    full = load_file(Path(paths["all Full"]) / "model.safetensors")
    for variant in ("FSSS", "dense"):
        file = Path(paths[variant]) / "model.safetensors"
        save_file({name: full[name] for name in load_file(file)}, file, metadata={"format": "pt"})
    return paths


# ------------------------------------------------------------------------------------------------ in a child process
_engine: Any = None
_indexer = 0.0


def start(path: str, longest: int, samples: int) -> None:
    """Load the engine and put a stopwatch around its indexers."""
    os.environ |= {
        "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    global _engine
    from vllm import LLM

    from rollout.vllm_plugin.layer import PlainIndexer

    _engine = LLM(
        path, dtype="float32", seed=0, max_model_len=longest, max_num_seqs=samples, skip_tokenizer_init=True,
        max_num_batched_tokens=BATCHED_TOKENS, enable_chunked_prefill=True, enable_prefix_caching=True,
        enforce_eager=True, disable_log_stats=True,
    )  # fmt: skip
    generate([3] * min(2 * K, longest // 2), samples, 4)  # the first calls allocate
    stock = PlainIndexer.forward

    def timed(*args: Any) -> Any:
        global _indexer
        begin = time.process_time()
        result = stock(*args)
        _indexer += time.process_time() - begin
        return result

    setattr(PlainIndexer, "forward", timed)  # noqa: B010 (mypy)


def generate(prompt: list[int], samples: int, tokens: int) -> tuple[float, float]:
    """CPU seconds of `tokens` new tokens for each of `samples` requests, and of those the indexers'."""
    from vllm import SamplingParams

    global _indexer
    _indexer = 0.0
    parameters = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    begin = time.process_time()
    _engine.generate([{"prompt_token_ids": prompt}] * samples, parameters, use_tqdm=False)
    return time.process_time() - begin, _indexer


# ------------------------------------------------------------------------------------------------ the comparison
def turn(engine: ProcessPoolExecutor, variant: str, prompt: list[int], samples: int, tokens: int) -> list[Measured]:
    """Prefill and decode of one engine with a prompt that it has not seen."""
    context, found = len(prompt) - 1, []

    def ask(samples: int, tokens: int) -> tuple[float, float]:
        return engine.submit(generate, prompt, samples, tokens).result()

    total, indexer = ask(1, 1)
    found.append(Measured(variant, context, "prefill", total / context, indexer / total))
    # The first token ends the cached prompt; what the others cost is a difference.
    before, longer = ask(samples, 1), ask(samples, 1 + tokens)
    total, indexer = (b - a for a, b in zip(before, longer, strict=True))
    found.append(Measured(variant, context, "decode", total / (samples * tokens), indexer / total))
    for m in found:
        print(
            f"{context:6d} {variant:9s} {m.phase:8s} {1e6 * m.seconds:9.1f} us a token, {m.indexer_share:.2f} indexer"
        )
    return found


def best(found: list[Measured]) -> list[Measured]:
    """Of every case the round that took the least."""
    chosen: dict[tuple[str, int, str], Measured] = {}
    for m in sorted(found, key=lambda m: -m.seconds):
        chosen[m.variant, m.context, m.phase] = m
    return sorted(chosen.values(), key=lambda m: (m.phase, m.context, m.variant))


def speed_ups(found: list[Measured]) -> list[dict[str, Any]]:
    """FSSS against the others: measured, allowed by the bound, and the share of the bound that is reached."""
    at = {(m.variant, m.context, m.phase): m.seconds for m in found}
    rows = []
    for context, phase in sorted({(m.context, m.phase) for m in found}, key=lambda x: (x[1], x[0])):
        for other in ("all Full", "dense"):
            measured = at[other, context, phase] / at["FSSS", context, phase]
            bound = operations(other, context, phase) / operations("FSSS", context, phase)
            row = {"phase": phase, "context": context, "FSSS against": other, "speed_up": round(measured, 3)}
            rows.append(row | {"bound": round(bound, 3), "share_of_bound": round(measured / bound, 3)})
    return rows


def draw(found: list[Measured], picture: Path) -> None:
    """Microseconds a token over the context, both axes logarithmic, one panel a phase."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(9.6, 3.6))
    for panel, phase in zip(panels, ("prefill", "decode"), strict=True):
        for variant in VARIANTS:
            points = [m for m in found if (m.variant, m.phase) == (variant, phase)]
            contexts, micros = [m.context for m in points], [1e6 * m.seconds for m in points]
            (line,) = panel.plot(contexts, micros, marker="o", ms=3, label=variant)
            indexer = [1e6 * m.seconds * m.indexer_share for m in points]
            if variant != "dense":
                panel.plot(contexts, indexer, ":", color=line.get_color(), label=f"{variant}, indexers alone")
        panel.set(xscale="log", yscale="log", xlabel="tokens of context", title=phase)
        panel.set_xticks(contexts, [f"{c // 1024}K" for c in contexts])
        panel.set_xticks([], minor=True)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("CPU microseconds a token")
    panels[0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(picture, dpi=110)


def main() -> None:
    """Parse, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048, 8192, 32768])
    parser.add_argument("--rounds", type=int, default=3, help="of contexts up to 8K; longer ones take one")
    parser.add_argument("--samples", type=int, default=8, help="decode: samples of the prompt")
    parser.add_argument("--tokens", type=int, default=16, help="decode: tokens of a sample")
    parser.add_argument("--quick", action="store_true", help="1K and 2K, one round, nothing written")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "indexshare_rollout")
    args = parser.parse_args()
    contexts, rounds = ([1024, 2048], 1) if args.quick else (args.contexts, args.rounds)
    import numpy as np

    rng, longest = np.random.default_rng(0), max(contexts) + 64
    folder, load, found = Path(tempfile.mkdtemp()), os.getloadavg()[0], []
    engines = {
        variant: ProcessPoolExecutor(1, get_context("spawn"), start, (path, longest, args.samples))
        for variant, path in write_models(folder, longest).items()
    }
    try:
        for context in (c for c in contexts for _ in range(rounds if c <= 8192 else 1)):
            # One token more than whole cache blocks: what a sample prefills again is that one.
            prompt = rng.integers(3, VOCABULARY, context + 1).tolist()
            for variant, engine in engines.items():
                found += turn(engine, variant, prompt, args.samples, args.tokens)
    finally:
        for engine in engines.values():
            engine.shutdown()
        shutil.rmtree(folder)
    found = best(found)
    rows = speed_ups(found)
    for row in rows:
        print(row)
    if args.quick:
        return
    machine = {"processor": platform.machine(), "cores": os.cpu_count(), "load_average_at_the_start": load}
    result = {
        "machine": machine, "k": K, "samples": args.samples, "tokens": args.tokens, "speed_ups": rows,
        "measured": [asdict(m) for m in found],
    }  # fmt: skip
    args.out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    draw(found, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
