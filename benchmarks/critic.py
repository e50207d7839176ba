"""What a critic costs and how well it judges: trained whole, with frozen attention, with a frozen encoder and experts.

    python -m benchmarks.critic cost                 # a random backbone of about 92M parameters, 2,048 tokens
    python -m benchmarks.critic quality              # explained variance on the default task, the same trajectories
    python -m benchmarks.critic precision            # error of the values in bf16 and fp16
    python -m benchmarks.critic long --tokens 65536  # memory and time of one long trajectory's values

`cost` runs the critic's own worker, each way in a process of its own: `values` once, then updates. Seconds are of the
process' CPU, so that neighbours disturb them little; memory is the peak of resident memory while it works, above what
is resident when the weights are loaded. Everything is printed as one JSON line per way, then ratios to `full`.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing as mp
import pickle
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from critic.diagnostics import predictions, scalars
from critic.model import ValueModel, build
from critic.worker import CriticWorker, critic_loss
from rl.config import Config, CriticConfig, DeepSpeedConfig, ExpertsConfig, PromptsConfig
from rl.learner import free_port
from rl.trajectory import Trajectory, microbatches, pack

ROOT = Path(__file__).parents[1]
WAYS: dict[str, dict[str, Any]] = {
    "full": {"freeze": "none"},
    "full-checkpointed": {"freeze": "none", "deepspeed": DeepSpeedConfig(gradient_checkpointing=True)},
    "full-bf16-checkpointed": {
        "freeze": "none",
        "deepspeed": DeepSpeedConfig(dtype="bf16", gradient_checkpointing=True),
    },
    "attention": {"freeze": "attention"},
    "attention-upper-half": {"freeze": "attention", "first_trainable_layer": 6},
    "encoder": {"freeze": "encoder"},
    "encoder-uncached": {"freeze": "encoder", "cache_gib": 0.0},
    "encoder-bf16": {"freeze": "encoder", "trunk_dtype": "bf16", "deepspeed": DeepSpeedConfig(dtype="bf16")},
}
QUALITY: dict[str, tuple[float, dict[str, Any]]] = {
    "full": (5e-4, {"freeze": "none"}),
    "attention": (1e-3, {"freeze": "attention"}),
    "encoder": (2e-3, {"freeze": "encoder"}),
    "encoder, half of the layers": (2e-3, {"freeze": "encoder", "trunk_layers": 3}),
    "encoder, all layers": (2e-3, {"freeze": "encoder", "trunk_layers": 6}),
    "encoder, linear": (2e-3, {"freeze": "encoder", "experts": ExpertsConfig(blocks=0)}),
}
"""Learning rate and critic of every way of `quality`."""


def backbone(folder: str) -> None:
    """A random IndexShare model of about 92M parameters, of which a token uses about 40M."""
    from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

    from indexshare.schedule import Schedule

    torch.manual_seed(0)
    config = GlmMoeDsaConfig(
        vocab_size=8192, hidden_size=512, intermediate_size=1024, moe_intermediate_size=512, num_hidden_layers=12,
        num_attention_heads=8, num_key_value_heads=8, n_shared_experts=1, n_routed_experts=8, num_experts_per_tok=2,
        kv_lora_rank=128, q_lora_rank=256, qk_rope_head_dim=16, qk_nope_head_dim=48, v_head_dim=64,
        first_k_dense_replace=1, index_topk=256, index_head_dim=64, index_n_heads=4, topk_method="noaux_tc",
        scoring_func="sigmoid", indexer_rope_interleave=True, **Schedule.from_pattern("FFSSFSSSFSSS").config_fields(),
    )  # fmt: skip
    GlmMoeDsaForCausalLM(config).save_pretrained(folder)


def random_trajectory(prompt: int, response: int, vocabulary: int) -> Trajectory:
    """Random tokens and random targets: for cost, not for quality."""
    rng = np.random.default_rng(0)
    return Trajectory(
        prompt_index=0,
        sample_index=0,
        prompt_ids=rng.integers(3, vocabulary, prompt).astype(np.int32),
        response_ids=rng.integers(3, vocabulary, response).astype(np.int32),
        action_mask=np.ones(response, bool),
        rollout_logprobs=np.zeros(response, np.float32),
        finish_reason="stop",
        policy_version=0,
        score=1.0,
        value_targets=rng.normal(size=response).astype(np.float32),
        loss_weight=1.0 / response,
    )


def resident(kind: str) -> float:
    """GiB of this process from the kernel's account: VmRSS now, VmHWM at its peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(kind):
            return int(line.split()[1]) / 2**20
    raise RuntimeError(f"no {kind} in /proc/self/status")


def forget_peak() -> float:
    """Give freed memory back, start the peak anew; returns what is resident."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def cost_of(way: str, folder: str, prompt: int, response: int, updates: int) -> dict[str, float]:
    """One way in this process: a warm-up step, then a measured one."""
    config = Config()
    config.policy.path = folder
    config.step.tokens_per_microbatch = prompt + response
    config.critic = replace(CriticConfig(), **WAYS[way])
    worker = CriticWorker.__ray_metadata__.modified_class(config, 0, 1)
    counts = worker.setup("127.0.0.1", free_port())
    start = forget_peak()
    trajectory = random_trajectory(prompt, response, 8192)
    seconds: dict[str, float] = {}
    for _ in range(2):
        began = time.process_time()
        (values,) = worker.values([trajectory])
        seconds["values"] = time.process_time() - began
        trajectory = replace(trajectory, values=values)
        began = time.process_time()
        for _ in range(updates):
            worker.update([trajectory], 1.0)
        seconds["update"] = (time.process_time() - began) / updates
    return {
        "values_s": seconds["values"],
        "update_s": seconds["update"],
        "one_epoch_s": seconds["values"] + seconds["update"],
        "four_epochs_s": seconds["values"] + 4 * seconds["update"],
        "memory_gib": resident("VmHWM") - start,
        "trained_m": counts["trained"] / 1e6,
    }


def alone(function: Any, *args: Any) -> Any:
    """`function(*args)` in a fresh process."""
    with ProcessPoolExecutor(1, mp_context=mp.get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def cost(args: argparse.Namespace) -> None:
    """Seconds and memory of every way, and how many times less than the first."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        backbone(folder)
        for way in args.ways:
            found[way] = alone(cost_of, way, folder, args.prompt, args.tokens - args.prompt, args.updates)
            print(json.dumps({"way": way, **{k: round(v, 3) for k, v in found[way].items()}}), flush=True)
    first = next(iter(found))
    for way, numbers in found.items():
        ratios = {k: round(found[first][k] / numbers[k], 2) for k in ("one_epoch_s", "four_epochs_s", "memory_gib")}
        print(f"{first} / {way}: {ratios}")


def sampled(config: Config, prompts: int) -> list[Trajectory]:
    """Scored responses of the default policy to the default task, by plain forwards (no engine, no Ray)."""
    from transformers import AutoTokenizer

    from policy.model import build as build_policy
    from rl import rewards
    from rl.backbone import hidden_states
    from rl.prompts import PromptSource

    source = PromptSource.open(config)
    tokenizer = AutoTokenizer.from_pretrained(config.policy.path)
    model = build_policy(config.policy, 1.0).eval()
    generator = torch.Generator().manual_seed(0)
    stop = model.lm.config.eos_token_id
    done: list[Trajectory] = []
    for chunk in range(0, prompts, 64):
        rows = [(p, []) for p in source.next(min(64, prompts - chunk))]
        for _ in range(config.rollout.max_response_tokens):
            running = [(p, out) for p, out in rows if not out or out[-1] != stop]
            if not running:
                break
            batch = pack([_trajectory(p, out) for p, out in running])
            with torch.no_grad():
                hidden = hidden_states(model.lm.model, batch)[batch.last]
                probabilities = (hidden @ model.lm.get_output_embeddings().weight.T).softmax(-1)
            for (_, out), token in zip(
                running, torch.multinomial(probabilities, 1, generator=generator).flatten().tolist(), strict=True
            ):
                out.append(token)
        done += [_trajectory(p, out, tokenizer.decode(out, skip_special_tokens=True)) for p, out in rows]
    scores = rewards.score(rewards.resolve(config.reward.function), done)
    n = sum(t.actions for t in done)
    return [
        replace(
            t, score=s, values=np.zeros(t.actions + 1, np.float32), loss_weight=1.0 / n,
            value_targets=np.full(t.actions, s, np.float32),
        )
        for t, s in zip(done, scores, strict=True)
    ]  # fmt: skip


def _trajectory(prompt: Any, out: list[int], text: str = "") -> Trajectory:
    ids = np.array(out, np.int32)
    return Trajectory(
        prompt_index=prompt.index, sample_index=0, prompt_ids=prompt.ids, response_ids=ids,
        action_mask=np.ones(len(ids), bool), rollout_logprobs=np.zeros(len(ids), np.float32), finish_reason="stop",
        policy_version=0, prompt_text=prompt.text, task=prompt.task, answer=prompt.answer,
        text=text,
    )  # fmt: skip


def explained(model: ValueModel, trajectories: list[Trajectory], tokens: int) -> dict[str, float]:
    """Diagnostics of the model's values of trajectories, whose return is their score at every token (gamma 1)."""
    values, returns = [], []
    with torch.no_grad():
        for part in microbatches(trajectories, tokens):
            before = model(pack(part))[0]
            values += [v.numpy() for v in before.split([len(t.response_ids) for t in part])]
    returns = [np.full(len(t.response_ids), t.score) for t in trajectories]
    longest = max(len(t.response_ids) for t in trajectories)
    return scalars(predictions(values, returns, [t.action_mask for t in trajectories]), longest)


def fit(way: str, config: Config, train: list[Trajectory], test: list[Trajectory], epochs: int, seed: int) -> float:
    """Held-out explained variance after epochs of optimizer steps of 64 trajectories each."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    lr, settings = QUALITY[way]
    model = build(replace(CriticConfig(), cache_gib=8.0, **settings), config.policy.path)
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    for _ in range(epochs):
        order = rng.permutation(len(train))
        for start in range(0, len(order), 64):
            part = [train[i] for i in order[start : start + 64]]
            n = sum(t.actions for t in part)
            optimizer.zero_grad()
            for batch in microbatches([replace(t, loss_weight=1.0 / n) for t in part], 1 << 20):
                critic_loss(config, model, pack(batch), None)[0].backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
    return explained(model, test, 8192)["critic/explained_variance"]


def quality(args: argparse.Namespace) -> None:
    """The same trajectories, several seeds of order and experts: held-out explained variance of every way.

    Trajectories and results are kept in a folder, so that an interrupted measurement goes on.
    """
    config = Config()
    config.policy.path = str(ROOT / "examples" / "tiny")
    config.prompts = PromptsConfig(max_prompt_tokens=448)
    config.rollout.max_response_tokens = 8
    args.out.mkdir(parents=True, exist_ok=True)
    samples, results = args.out / f"trajectories-{args.train + args.test}.pkl", args.out / "results.jsonl"
    if not samples.exists():
        samples.write_bytes(pickle.dumps(sampled(config, args.train + args.test)))
    trajectories = pickle.loads(samples.read_bytes())
    train, test = trajectories[: args.train], trajectories[args.train :]
    print(
        f"{len(train)} trajectories to learn from, {len(test)} held out,"
        f" mean score {np.mean([t.score for t in test]):.3f}"
    )
    done = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    for way in args.ways:
        for seed in range(args.seeds):
            what = {"way": way, "seed": seed, "train": args.train, "epochs": args.epochs}
            found = next((r for r in done if r.items() >= what.items()), None)
            if found is None:
                began = time.process_time()
                ev = fit(way, config, train, test, args.epochs, seed)
                found = what | {"explained_variance": round(ev, 4), "cpu_s": round(time.process_time() - began, 1)}
                with results.open("a") as file:
                    file.write(json.dumps(found) + "\n")
            print(json.dumps(found), flush=True)


def precision(args: argparse.Namespace) -> None:
    """Largest and mean |V - V in float32| for each dtype, on the default policy's backbone, after a few updates."""
    config = Config()
    config.policy.path = str(ROOT / "examples" / "tiny")
    t = random_trajectory(args.tokens // 2, args.tokens // 2, 100)
    t = replace(t, values=np.zeros(args.tokens // 2 + 1, np.float32))
    torch.manual_seed(0)
    exact = build(CriticConfig(freeze="encoder"), config.policy.path)
    optimizer = torch.optim.AdamW(exact.parameters(), lr=1e-3)
    for _ in range(args.updates):
        optimizer.zero_grad()
        critic_loss(config, exact, pack([t]), None)[0].backward()
        optimizer.step()
    with torch.no_grad():
        expected = exact(pack([t]))[0]
    for trunk, experts in (("bf16", "fp32"), ("fp16", "fp32"), ("fp32", "bf16"), ("fp32", "fp16"), ("bf16", "bf16")):
        critic = CriticConfig(freeze="encoder", trunk_dtype=trunk, deepspeed=DeepSpeedConfig(dtype=experts))
        model = build(critic, config.policy.path)
        model.load_state_dict(exact.state_dict())
        with torch.no_grad():
            error = (model(pack([t]))[0] - expected).abs()
        spread = float(expected.std())
        numbers = {
            "max": float(error.max()),
            "mean": float(error.mean()),
            "mean_over_std": float(error.mean()) / spread,
        }
        print(
            json.dumps({"trunk": trunk, "experts": experts, **{k: round(v, 6) for k, v in numbers.items()}}), flush=True
        )


def long(args: argparse.Namespace) -> None:
    """Values of one trajectory on the default policy's backbone, encoder frozen."""
    model = build(CriticConfig(freeze="encoder"), str(ROOT / "examples" / "tiny"))
    batch = pack([random_trajectory(args.tokens // 2, args.tokens // 2, 100)])
    start, began = forget_peak(), time.process_time()
    with torch.no_grad():
        values = model(batch)[0]
    seconds = time.process_time() - began
    assert values.isfinite().all()
    print(
        json.dumps(
            {"tokens": args.tokens, "cpu_s": round(seconds, 1), "memory_gib": round(resident("VmHWM") - start, 3)}
        )
    )


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("cost", "quality", "precision", "long"))
    parser.add_argument("--ways", help="separated by semicolons; the ratios are to the first")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--prompt", type=int, default=1024, help="how many of the tokens are the prompt's")
    parser.add_argument("--updates", type=int, default=2)
    parser.add_argument("--train", type=int, default=640)
    parser.add_argument("--test", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "critic_quality", help="of `quality`")
    args = parser.parse_args()
    ways: dict[str, Sequence[str]] = {"cost": list(WAYS), "quality": list(QUALITY)}
    args.ways = args.ways.split(";") if args.ways else ways.get(args.what, [])
    torch.set_num_threads(1)
    {"cost": cost, "quality": quality, "precision": precision, "long": long}[args.what](args)


if __name__ == "__main__":
    main()
