"""Makes `examples/tiny`: an IndexShare policy of 1.5M parameters that half knows how to look things up.

    python examples/pretrain_tiny.py --out examples/tiny --work runs/pretrain_tiny

Stages, each resumed where it was left: `copy` (random segments twice: in-context lookup appears here, and
nowhere else as fast), `grow` (recall with more and more pairs, copying, counting, arithmetic; attention is
dense so far), `styles` (an answer may now be written in one of several ways, which the prompt does not tell:
this is the room that reinforcement learning has to rise), `indexer` (the indexers learn where the layers they
serve look), `sparse` (all of it under the top-k selection).
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tiny_tokenizer import BOS, EOS, PAD, build
from torch import Tensor
from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaTopkRouter

from indexshare import distill
from indexshare.attention import install
from indexshare.pattern import EVERYTHING, set_topk
from indexshare.schedule import Schedule
from rl import tasks
from rl.distill import save as save_folder
from rl.documents import Document, Part, encoded, pack, recalled

STAGES = ("copy", "grow", "styles", "indexer", "sparse")
TOPK = 32
PAIRS = 56
IDS = {c: i + 4 for i, c in enumerate("\n" + "".join(chr(c) for c in range(32, 127)))}


@dataclass
class Progress:
    """Where the run is; saved with the weights."""

    stage: int = 0
    step: int = 0
    stage_step: int = 0
    pairs: int = 4
    accuracy: float = 0.0
    """Running mean of correct answer characters in the current stage."""


def encode(text: str) -> list[int]:
    """Ids of a text without BOS."""
    return [IDS[c] for c in text]


def repeated(rng: random.Random) -> Document:
    """A random segment twice, with the loss on the second copy."""
    segment = [rng.randrange(4, 100) for _ in range(rng.randint(8, 40))]
    return [BOS, *segment, *segment], [False] * (1 + len(segment)) + [True] * len(segment)


def answered(rng: random.Random, name: str) -> Document:
    """A short task with its answer."""
    example = tasks.TASKS[name](rng)
    return document(example.prompt, example.answer)


def document(prompt: str, answer: str) -> Document:
    """A prompt and its answer, which ends in EOS and is all that counts."""
    return encoded([Part(prompt), Part(answer, counted=True, ends=True)], encode, BOS, EOS)


def batch(rng: random.Random, progress: Progress, args: argparse.Namespace) -> list[Document]:
    """Documents of one step, up to the stage's number of tokens."""
    stage = STAGES[progress.stage]
    if stage == "copy":
        return [repeated(rng) for _ in range(32)]
    weights = (1.0, 0.0, 0.0) if stage == "grow" else tuple(args.styles)
    documents: list[Document] = []
    left = args.tokens
    while left > 0:
        pick = rng.random()
        if pick < 0.6 or stage == "indexer":
            low = 4 if stage == "grow" else PAIRS // 2
            pairs = progress.pairs if rng.random() < 0.6 else rng.randint(low, progress.pairs)
            documents.append(encoded(recalled(rng, pairs, args.questions, weights), encode, BOS, EOS))
        elif pick < 0.85:
            documents.append(repeated(rng))
        else:
            documents.append(answered(rng, rng.choice(("copying", "counting", "arithmetic"))))
        left -= len(documents[-1][0])
    return documents


def new_model(pattern: str) -> GlmMoeDsaForCausalLM:
    """A fresh model; the config has every key that transformers and vLLM need to read it alike."""
    config = GlmMoeDsaConfig(
        vocab_size=4 + 96, hidden_size=128, intermediate_size=192, moe_intermediate_size=64,
        num_hidden_layers=len(pattern), num_attention_heads=4, num_key_value_heads=4, n_shared_experts=1,
        n_routed_experts=8, num_experts_per_tok=2, routed_scaling_factor=1.0, norm_topk_prob=True, n_group=1,
        topk_group=1, kv_lora_rank=48, q_lora_rank=64, qk_rope_head_dim=16, qk_nope_head_dim=16,
        v_head_dim=32, max_position_embeddings=4096, first_k_dense_replace=1, index_topk=TOPK,
        index_head_dim=32, index_n_heads=4, initializer_range=0.05, rms_norm_eps=1e-6,
        indexer_rope_interleave=True, topk_method="noaux_tc", scoring_func="sigmoid", bos_token_id=BOS,
        eos_token_id=EOS, pad_token_id=PAD, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        **schedule(pattern).config_fields(),
    )  # fmt: skip
    model = GlmMoeDsaForCausalLM(config)
    # The grouped matmul is made for GPUs: on one CPU thread the loop over experts takes half its time.
    model.config._experts_implementation = "eager"
    return install(model)


def schedule(pattern: str) -> Schedule:
    """The pattern; the default one in the words of GLM-5.2, as a frequency."""
    regular = Schedule.from_freq(len(pattern), freq=4, offset=2)
    return regular if regular.pattern == pattern else Schedule.from_pattern(pattern)


class Balance:
    """Keeps experts equally busy without a loss: the router's bias rises for those that get too little."""

    def __init__(self, model: GlmMoeDsaForCausalLM, rate: float = 2e-3) -> None:
        self.rate = rate
        self.loads: dict[GlmMoeDsaTopkRouter, Tensor] = {}
        for module in model.modules():
            if isinstance(module, GlmMoeDsaTopkRouter):
                module.register_forward_hook(self._count)

    def _count(self, router: GlmMoeDsaTopkRouter, _: object, out: tuple[Tensor, Tensor, Tensor]) -> None:
        self.loads[router] = torch.bincount(out[2].flatten(), minlength=router.num_experts).float()

    def update(self) -> float:
        """Moves the biases; returns the busiest expert's load over the mean."""
        worst = 0.0
        for router, load in self.loads.items():
            router.e_score_correction_bias += self.rate * torch.sign(load.mean() - load)
            worst = max(worst, (load.max() / load.mean()).item())
        return worst


def language_step(
    model: GlmMoeDsaForCausalLM, documents: list[Document], optimizer: torch.optim.Optimizer
) -> tuple[float, float]:
    """One update; returns the loss and the share of counted tokens whose most likely prediction is right."""
    p = pack(documents)
    hidden = distill.hidden_states(model, p.ids, p.positions, p.seq_start)
    logits, targets = model.lm_head(hidden[p.predicts]), p.ids[p.predicts + 1]
    loss = F.cross_entropy(logits, targets)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item(), (logits.argmax(-1) == targets).float().mean().item()


def distill_step(model: GlmMoeDsaForCausalLM, documents: list[Document], optimizer: torch.optim.Optimizer) -> float:
    """One update of the indexers alone; returns the mean of their losses."""
    p = pack(documents)
    optimizer.zero_grad(set_to_none=True)
    # The queries that write an answer are few and matter most.
    weights = torch.ones(len(p.ids))
    weights[p.predicts] = 5.0
    inputs = distill.record(model, p.ids, p.positions, p.seq_start)
    losses = distill.backward(model, inputs, p.seq_start, weights=weights)
    optimizer.step()
    return sum(losses.values()) / len(losses)


@torch.no_grad()
def success(model: GlmMoeDsaForCausalLM, examples: list[tasks.Example], write: Callable[[str], str]) -> Tensor:
    """Of every example, the probability of writing just `write(answer)` and EOS at T=1, and whether greedy
    does: [2, examples]."""
    rows = []
    for i in range(0, len(examples), 16):
        documents = [document(example.prompt, write(example.answer)) for example in examples[i : i + 16]]
        p = pack(documents)
        hidden = distill.hidden_states(model, p.ids, p.positions, p.seq_start)
        logits, targets = model.lm_head(hidden[p.predicts]), p.ids[p.predicts + 1]
        logp = logits.log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
        lengths = [sum(mask) for _, mask in documents]
        right = (logits.argmax(-1) == targets).float()
        rows += [
            torch.stack([p.sum().exp(), r.min()])
            for p, r in zip(logp.split(lengths), right.split(lengths), strict=True)
        ]
    return torch.stack(rows, 1)


def report(model: GlmMoeDsaForCausalLM, count: int, **knobs: int) -> str:
    """Success on held-out recall prompts: exact expectation at T=1, greedy, and of all customs together."""
    examples = [tasks.make("recall", i, seed=1_000_003, **knobs) for i in range(count)]
    plain, marked, capitals = (success(model, examples, write) for write in (str, lambda a: f"={a}", str.upper))
    found = plain[0] + marked[0] + capitals[0]
    return (
        f"recall {knobs or ''} ({len(examples)} prompts of {len(encode(examples[0].prompt)) + 1} tokens): "
        f"T=1 {plain[0].mean():.3f}, greedy {plain[1].mean():.3f}, any custom {found.mean():.3f} "
        f"(plain {plain[0].mean():.3f}, marked {marked[0].mean():.3f}, capitals {capitals[0].mean():.3f})"
    )


def export(model: GlmMoeDsaForCausalLM, out: Path) -> None:
    """A Hugging Face folder in bf16; the routers' biases stay in float32, as transformers keeps them."""
    save_folder(model, build(), out, torch.bfloat16)


def finished(progress: Progress, args: argparse.Namespace) -> bool:
    """Whether the stage has taught what it is there for, or has had its steps."""
    stage, n = STAGES[progress.stage], progress.stage_step
    if stage == "copy":
        return n >= args.copy_steps or (n > 200 and progress.accuracy > 0.9)
    if stage == "grow":
        return n >= args.grow_steps or (progress.pairs >= PAIRS and progress.accuracy > args.good)
    return n >= {"styles": args.styles_steps, "indexer": args.indexer_steps, "sparse": args.sparse_steps}[stage]


def save(path: Path, model: GlmMoeDsaForCausalLM, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
    """Written beside and renamed, so that an interruption never leaves half a file."""
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "progress": asdict(progress)}
    torch.save(state, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def train(model: GlmMoeDsaForCausalLM, args: argparse.Namespace) -> None:
    """Runs the stages that are left."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.01)
    progress, path = Progress(), args.work / "checkpoint.pt"
    if path.exists():
        state = torch.load(path, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        progress = Progress(**state["progress"])
    balance = Balance(model)
    began = time.time()
    while progress.stage < len(STAGES):
        stage = STAGES[progress.stage]
        set_topk(model, TOPK if stage == "sparse" else EVERYTHING)
        rng = random.Random(f"{args.seed}/{progress.step}")
        documents = batch(rng, progress, args)
        lr = learning_rate(progress, args)
        for group in optimizer.param_groups:
            group["lr"] = lr
        if stage == "indexer" or (stage == "sparse" and progress.stage_step % 4 == 3):
            loss, accuracy = distill_step(model, documents, optimizer), progress.accuracy
            note = "KL"
        else:
            loss, accuracy = language_step(model, documents, optimizer)
            note = "loss"
        busiest = balance.update()
        progress.step += 1
        progress.stage_step += 1
        progress.accuracy += 0.05 * (accuracy - progress.accuracy)
        if stage == "grow" and progress.accuracy > args.good and progress.pairs < PAIRS:
            progress.pairs = min(PAIRS, progress.pairs + max(1, progress.pairs // 4))
            progress.accuracy = args.good - 0.1
        if progress.step % 20 == 0:
            print(
                f"{time.time() - began:6.0f}s {stage:7s} step {progress.step:5d} {note} {loss:.3f} accuracy "
                f"{progress.accuracy:.3f} pairs {progress.pairs} lr {lr:.1e} busiest expert {busiest:.2f}",
                flush=True,
            )
        if finished(progress, args):
            progress.stage, progress.stage_step = progress.stage + 1, 0
            save(path, model, optimizer, progress)
            torch.save(model.state_dict(), args.work / f"after_{stage}.pt")
        elif progress.step % 100 == 0:
            save(path, model, optimizer, progress)


def learning_rate(progress: Progress, args: argparse.Namespace) -> float:
    """Short warm-up, constant, and linear to a tenth over the sparse stage."""
    rate = args.lr * min(1.0, (progress.step + 1) / 50)
    if STAGES[progress.stage] == "sparse":
        rate *= 1 - 0.9 * progress.stage_step / args.sparse_steps
    return rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("examples/tiny"))
    parser.add_argument("--work", type=Path, default=Path("runs/pretrain_tiny"))
    parser.add_argument("--pattern", default="FFSSSF", help="one letter per layer, F selects and S reuses")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--tokens", type=int, default=4000, help="tokens per step after the copy stage")
    parser.add_argument("--questions", type=int, default=12, help="further questions per recall document")
    parser.add_argument("--good", type=float, default=0.9, help="accuracy at which recall gets more pairs")
    parser.add_argument("--styles", type=float, nargs=3, default=(1, 1, 1), help="plain, marked, capitals")
    parser.add_argument("--copy-steps", type=int, default=3000)
    parser.add_argument("--grow-steps", type=int, default=3000)
    parser.add_argument("--styles-steps", type=int, default=200)
    parser.add_argument("--indexer-steps", type=int, default=100)
    parser.add_argument("--sparse-steps", type=int, default=250)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    args.work.mkdir(parents=True, exist_ok=True)
    model = new_model(args.pattern)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    train(model, args)
    export(model, args.out)
    # What reinforcement learning starts from: the rounded weights, computed with in float32.
    loaded = install(GlmMoeDsaForCausalLM.from_pretrained(args.out, dtype=torch.float32))
    loaded.config._experts_implementation = "eager"
    print(report(loaded, 256), flush=True)


if __name__ == "__main__":
    main()
