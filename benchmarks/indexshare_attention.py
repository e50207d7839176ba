"""One layer's attention, forward and backward: ours against transformers' own class and against dense attention.

    python benchmarks/indexshare_attention.py               # 4K, 8K, 16K tokens: JSON and picture in docs/
    python benchmarks/indexshare_attention.py --long        # and ours alone at 32K and 64K
    python benchmarks/indexshare_attention.py break-even    # where gathering starts to beat masking

One process, one thread, float32, k = 256, weights and inputs random. `core` is attention over a given selection, as a
Shared layer computes it; `full` selects first. Time is the process' own CPU time, which other processes on the
machine disturb less than the clock; the clock's is in the JSON too. Memory is the peak of resident memory above what
it was before (Linux only). All cases of a run see the same weights, inputs and selection, and their outputs are
compared.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GlmMoeDsaConfig
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import (
    GlmMoeDsaAttention,
    GlmMoeDsaRotaryEmbedding,
    apply_rotary_pos_emb_interleave,
)

from indexshare import indexer
from indexshare.attention import IndexShareAttention
from indexshare.indexer import Selection
from indexshare.schedule import Schedule

ROOT = Path(__file__).parent.parent
K = 256
PACK = 2048
"""break-even: at least so many tokens in a pack, as a micro-batch has."""

STOCK_INDEXER_BYTES = 4 << 30
"""transformers' indexer keeps [heads, tokens, tokens] twice: beyond this it is left out."""


@dataclass(frozen=True)
class Measured:
    """One case at one length. Seconds of CPU and of the clock, bytes above the start."""

    case: str
    tokens: int
    cpu_s: float
    clock_s: float
    peak_bytes: int


def config(k: int = K) -> GlmMoeDsaConfig:
    """Attention of a small model: 4 heads of 64, latents of 64 + 16, an indexer of 4 heads of 32."""
    made = GlmMoeDsaConfig(
        hidden_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=64,
        q_lora_rank=128, qk_rope_head_dim=16, qk_nope_head_dim=48, v_head_dim=64, index_topk=k, index_head_dim=32,
        index_n_heads=4, max_position_embeddings=1 << 16,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        **Schedule.from_pattern("FS").config_fields(),
    )  # fmt: skip
    made._attn_implementation = "sdpa"
    return made


class DenseAttention(GlmMoeDsaAttention):
    """The same projections, then torch's causal attention over all keys."""

    def forward(self, hidden: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor]:  # type: ignore[override]
        rank, nope, tokens = self.kv_lora_rank, self.qk_nope_head_dim, hidden.shape[1]
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden))).view(1, tokens, self.num_heads, -1)
        compressed = self.kv_a_proj_with_mqa(hidden)
        q_rot, k_rot = apply_rotary_pos_emb_interleave(
            q[..., nope:], compressed[..., rank:].unsqueeze(2), *rotary, unsqueeze_dim=2
        )
        q = torch.cat([q[..., :nope], q_rot], -1).transpose(1, 2)
        k, v = self.expand_kv(self.kv_a_layernorm(compressed[..., :rank]).unsqueeze(1), k_rot.transpose(1, 2))
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scaling)
        return (self.o_proj(out.transpose(1, 2).reshape(1, tokens, -1)),)


class Bench:
    """Weights, inputs and gradient of a pack of trajectories; every case is a call that returns the layer's output."""

    def __init__(self, length: int, k: int = K, trajectories: int = 1) -> None:
        torch.manual_seed(0)
        made, tokens = config(k), trajectories * length
        self.bounds = tuple(range(0, tokens + 1, length))
        self.seq_start = torch.arange(tokens) // length * length
        self.layers = [GlmMoeDsaAttention(made, i) for i in (0, 1)]
        for layer in self.layers:
            for weight in (p for p in layer.parameters() if p.dim() == 2):
                nn.init.normal_(weight, std=0.05)
        self.hidden = torch.randn(1, tokens, made.hidden_size, requires_grad=True)
        self.gradient = torch.randn(1, tokens, made.hidden_size)
        self.rotary = GlmMoeDsaRotaryEmbedding(made)(self.hidden, (torch.arange(tokens) - self.seq_start)[None])

    def layer(self, kind: type[GlmMoeDsaAttention], shared: bool, form: str = "gather") -> Any:
        """The Full or the Shared layer as an object of that class; weights are the same ones."""
        layer: Any = self.layers[int(shared)]
        layer.__class__ = kind
        layer.form = form
        return layer

    def select(self, form: str = "gather") -> Selection:
        """The Full layer's selection: projections, scan and top-k."""
        layer = self.layer(IndexShareAttention, shared=False, form=form)
        with torch.no_grad():
            q_latent = layer.q_a_layernorm(layer.q_a_proj(self.hidden))
            return indexer.select(layer.indexer, self.hidden, q_latent, self.rotary, self.bounds, form == "gather")

    def ours(self, selection: Selection | None, form: str = "gather") -> Tensor:
        layer = self.layer(IndexShareAttention, shared=selection is not None, form=form)
        return layer(self.hidden, self.rotary, self.seq_start, prev_topk_indices=selection)[0]

    def stock(self, mask: Tensor, indices: Tensor | None) -> Tensor:
        layer = self.layer(GlmMoeDsaAttention, shared=indices is not None)
        return layer(self.hidden, self.rotary, mask, prev_topk_indices=indices)[0]

    def dense(self) -> Tensor:
        return self.layer(DenseAttention, shared=True)(self.hidden, self.rotary)[0]

    def train(self, forward: Callable[[], Tensor]) -> Tensor:
        """Forward and backward; returns the output and leaves no gradient behind."""
        out = forward()
        out.backward(self.gradient)
        self.hidden.grad = None
        for layer in self.layers:
            layer.zero_grad()
        return out.detach()


def measure(case: str, tokens: int, call: Callable[[], Any], repeats: int) -> tuple[Measured, Any]:
    """The fastest of `repeats` calls, the largest peak of all, and what the last one returned."""
    cpu, clock, peak, result = [], [], 0, None
    for _ in range(repeats):
        result = None
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
        before = _status("VmRSS")
        wall, own = time.perf_counter(), time.process_time()
        result = call()
        cpu.append(time.process_time() - own)
        clock.append(time.perf_counter() - wall)
        peak = max(peak, _status("VmHWM") - before)
    measured = Measured(case, tokens, min(cpu), min(clock), peak)
    print(f"{tokens:6d} {case:22s} {measured.cpu_s:8.2f} s CPU {peak / 2**20:8.0f} MiB", flush=True)
    return measured, result


def _status(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name + ":"))
    return int(line.split()[1]) * 1024


def at_length(tokens: int, repeats: int, ours_only: bool) -> tuple[list[Measured], float | None]:
    """All cases of one length, and how far our output is from transformers' over the same selection."""
    bench, found = Bench(tokens), []

    def case(name: str, call: Callable[[], Any], times: int = repeats) -> Any:
        measured, result = measure(name, tokens, call, times)
        found.append(measured)
        return result

    selection = case("selecting (no gradient)", bench.select)
    ours = case("ours, core", lambda: bench.train(lambda: bench.ours(selection)))
    case("ours, full", lambda: bench.train(lambda: bench.ours(None)))
    if ours_only:
        return found, None
    case("dense causal sdpa", lambda: bench.train(bench.dense), 1)
    # Where there are fewer keys than k all of them are selected, the first one too: it may stand twice.
    indices = selection.indices.clamp(min=0)[None]
    mask = torch.ones(tokens, tokens, dtype=torch.bool).tril()[None, None]
    stock = case("transformers, core", lambda: bench.train(lambda: bench.stock(mask, indices)), 1)
    if 2 * 4 * bench.layers[0].indexer.n_heads * tokens**2 <= STOCK_INDEXER_BYTES:
        case("transformers, full", lambda: bench.train(lambda: bench.stock(mask, None)), 1)
    return found, ((ours - stock).norm() / stock.norm()).item()


def ratios(found: list[Measured]) -> dict[str, float]:
    """What the targets are about: speed and memory at every length, growth of core attention over the lengths."""
    at = {(m.case, m.tokens): m for m in found}
    said = {}
    for tokens in sorted({m.tokens for m in found}):
        core, full = at["ours, core", tokens], at["ours, full", tokens]
        if stock := at.get(("transformers, core", tokens)):
            dense = at["dense causal sdpa", tokens]
            said[f"{tokens}: core, times faster than transformers"] = stock.cpu_s / core.cpu_s
            said[f"{tokens}: core, times faster than dense"] = dense.cpu_s / core.cpu_s
            said[f"{tokens}: full, times faster than dense"] = dense.cpu_s / full.cpu_s
            said[f"{tokens}: core, share of transformers' memory"] = core.peak_bytes / stock.peak_bytes
        if stock := at.get(("transformers, full", tokens)):
            said[f"{tokens}: full, times faster than transformers"] = stock.cpu_s / full.cpu_s
            said[f"{tokens}: full, share of transformers' memory"] = full.peak_bytes / stock.peak_bytes
    first, last = at.get(("ours, core", 8192)), at.get(("ours, core", 65536))
    if first and last:
        said["core, growth of time from 8K to 64K"] = last.cpu_s / first.cpu_s
        said["core, growth of memory from 8K to 64K"] = last.peak_bytes / first.peak_bytes
    return {name: round(value, 3) for name, value in said.items()}


def draw(found: list[Measured], picture: Path) -> None:
    """Time and memory over the length, both axes logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(9.6, 3.8))
    styles = {"ours": "-", "tran": "--", "dens": ":", "sele": "-."}
    for case in dict.fromkeys(m.case for m in found):
        points = sorted((m.tokens, m.cpu_s, m.peak_bytes / 2**30) for m in found if m.case == case)
        tokens, seconds, memory = zip(*points, strict=True)
        for panel, values in zip(panels, (seconds, memory), strict=True):
            panel.plot(tokens, values, styles[case[:4]], marker="o", ms=3, label=case)
    lengths = sorted({m.tokens for m in found})
    for panel, label in zip(panels, ("seconds of CPU", "GiB above start"), strict=True):
        panel.set(xscale="log", yscale="log", xlabel="tokens", ylabel=label)
        panel.set_xticks(lengths, [f"{n // 1024}K" for n in lengths])
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[0].legend(fontsize=7)
    figure.suptitle(f"One layer's attention, forward and backward, k = {K}, one thread, float32", fontsize=10)
    figure.tight_layout()
    figure.savefig(picture, dpi=120)


def machine() -> dict[str, Any]:
    """What the numbers depend on."""
    return {
        "cores": os.cpu_count(),
        "processor": platform.machine(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "load_average": os.getloadavg()[0],
    }


def compare(args: argparse.Namespace) -> None:
    """Measure, draw, print the ratios; what is there is written after every length."""
    start, found, distances = machine(), [], {}
    at_length(512, 1, ours_only=False)  # to warm up
    for tokens in sorted({*args.lengths, *((32768, 65536) if args.long else ())}):
        long = tokens > 16384
        some, distance = at_length(tokens, 1 if long else args.repeats, ours_only=long)
        found += some
        if distance is not None:
            distances[str(tokens)] = distance
        result = {
            "machine": start,
            "load_average_at_the_end": os.getloadavg()[0],
            "k": K,
            "relative_distance_to_transformers": distances,
            "ratios": ratios(found),
            "measured": [asdict(m) for m in found],
        }
        args.out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
        draw(found, args.out.with_suffix(".png"))
    for name, value in ratios(found).items():
        print(f"{name}: {value}")


def break_even(args: argparse.Namespace) -> None:
    """Both forms of one Full and three Shared layers over several contexts per selected key, in packs."""
    rows = []
    for k in args.k:
        for per_key in args.per_key:
            length = 2 * per_key * k  # mean context is half the length
            trajectories = -(-PACK // length)
            tokens = trajectories * length
            bench, seconds = Bench(length, k, trajectories), {}
            for form in ("masked", "gather"):

                def layers(form: str = form, bench: Bench = bench) -> None:
                    bench.train(lambda: bench.ours(None, form))
                    selection = bench.select(form)
                    for _ in range(3):
                        bench.train(lambda: bench.ours(selection, form))

                seconds[form] = measure(f"k = {k}, {form}", tokens, layers, args.repeats)[0].cpu_s
            ratio = seconds["masked"] / seconds["gather"]
            rows.append({"k": k, "context_per_key": per_key, "masked_over_gather": round(ratio, 3)})
    for k, per_key, ratio in (row.values() for row in rows):
        print(f"k = {k}, {per_key} keys of context per selected key: masked / gather = {ratio:.2f}")
    args.out.with_name("indexshare_break_even.json").write_text(
        json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n"
    )


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("compare", "break-even"), default="compare")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16384])
    parser.add_argument("--long", action="store_true", help="also ours at 32K and 64K")
    parser.add_argument("--repeats", type=int, default=2, help="of ours; the slow others run once")
    parser.add_argument("--k", type=int, nargs="+", default=[32, 128], help="break-even: selected keys")
    parser.add_argument("--per-key", type=int, nargs="+", default=[2, 3, 4, 6, 8], help="break-even: context per key")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "indexshare_attention")
    args = parser.parse_args()
    torch.set_num_threads(1)
    {"compare": compare, "break-even": break_even}[args.what](args)


if __name__ == "__main__":
    main()
