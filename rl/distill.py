"""`longppo indexshare distill`: teaches a model's indexers, in one process.

Dense warm-up, in which only the indexers learn, then sparse training, in which the model learns language under its
own selection and the indexers learn on (DeepSeek-V3.2's two stages with IndexCache's multi-layer loss).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from indexshare import distill as indexshare
from indexshare.pattern import EVERYTHING, adopt, adopt_anew, indexers, selecting
from indexshare.schedule import Schedule
from rl.backbone import load_causal_lm
from rl.config import ConfigError, OptimizerConfig, wrong
from rl.documents import Document, DocumentSource, Pack, packs
from rl.indexshare_config import DistillConfig, ModelConfig, RunConfig, to_yaml
from rl.logprobs import logprobs_and_entropy
from rl.schedule import lr_factor

Metrics = dict[str, float]


def load_model(c: ModelConfig, new_indexers: bool = False) -> tuple[Any, Any]:
    """The IndexShare model in float32, with the pattern and index_topk asked for, and its tokenizer.

    Indexers and routers are frozen, the rest is not. Raises ConfigError.
    """
    from transformers import AutoConfig, AutoTokenizer

    torch.set_num_threads(c.threads)
    if c.device == "cuda" and not torch.cuda.is_available():
        raise wrong("model.device", "cuda", "cpu: torch sees no GPU here")
    try:
        kind = AutoConfig.from_pretrained(c.path).model_type
        tokenizer = AutoTokenizer.from_pretrained(c.path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: {c.path!r} given: {' '.join(str(error).split())}") from error
    if kind != "glm_moe_dsa":
        raise wrong("model.path", c.path, f"a glm_moe_dsa model, which has indexers; this is {kind}")
    model = load_causal_lm(c.path, torch.float32, gradient_checkpointing=c.gradient_checkpointing).to(c.device)
    try:
        schedule = Schedule.from_config(model.config)
    except ValueError as error:
        raise ConfigError(f"model.path: {c.path!r} given: {error}") from error
    try:
        if c.pattern is not None:
            schedule = Schedule.from_pattern(c.pattern)
        (adopt_anew if new_indexers else adopt)(model, schedule)
    except ValueError as error:
        raise ConfigError(f"model.pattern: {str(error).partition(': ')[2]}") from error
    if c.index_topk is not None:
        model.config.index_topk = c.index_topk
        for indexer in indexers(model).values():
            indexer.index_topk = c.index_topk
    if c.device == "cpu":
        # The grouped matmul is made for GPUs: on one CPU thread the loop over experts takes half its time.
        model.config._experts_implementation = "eager"
    return model, tokenizer


def language_loss(model: Any, pack: Pack, hidden: Tensor) -> Tensor:
    """Sum over the counted tokens of -log p, in nats; hidden [tokens, hidden]."""
    at = pack.predicts
    head = model.get_output_embeddings().weight
    return -logprobs_and_entropy(hidden[at], head, pack.ids[at + 1], 1.0)[0].sum()


@torch.no_grad()
def held_out_loss(model: Any, held_out: Sequence[Pack]) -> float:
    """Mean of -log p over the counted tokens (nats), under the model's present selection."""
    total = sum(language_loss(model, p, _hidden(model, p)).item() for p in held_out)
    return total / sum(len(p.predicts) for p in held_out)


@torch.no_grad()
def evaluate(model: Any, held_out: Sequence[Pack]) -> Metrics:
    """Held-out loss, sparse and dense, and every layer's recall under the sparse model's own states."""
    k, total, mass = model.config.index_topk, 0.0, torch.zeros(2, model.config.num_hidden_layers, dtype=torch.float64)
    for p in held_out:
        with indexshare.recording(model) as inputs:
            total += language_loss(model, p, _hidden(model, p)).item()
        mass += indexshare.attention_mass(model, inputs, p.seq_start, k)
    with selecting(model, EVERYTHING):
        dense = held_out_loss(model, held_out)
    recall = (mass[0] / mass[1]).tolist()
    types = Schedule.from_config(model.config).types
    by_type = {kind: [r for r, t in zip(recall, types, strict=True) if t == kind] for kind in ("full", "shared")}
    return {
        "eval/lm_loss": total / sum(len(p.predicts) for p in held_out),
        "eval/lm_loss_dense": dense,
        **{f"recall/{kind}": sum(values) / len(values) for kind, values in by_type.items() if values},
        **{f"recall/layer_{i:02d}": r for i, r in enumerate(recall)},
    }


@dataclass
class Student:
    """A model that is taught, with an optimizer for its indexers and one for the rest."""

    model: Any
    indexer: torch.optim.Optimizer
    backbone: torch.optim.Optimizer

    @classmethod
    def of(cls, model: Any, c: DistillConfig) -> Student:
        """Indexers always learn; the rest where it is not frozen, and only in the sparse stage."""
        taught = [p for indexer in indexers(model).values() for p in indexer.parameters()]
        for p in taught:
            p.requires_grad_(True)
        own = set(taught)
        rest = [p for p in model.parameters() if p.requires_grad and p not in own]
        return cls(model, _adam(taught, c.indexer), _adam(rest, c.sparse.backbone))


def _adam(parameters: list[Any], o: OptimizerConfig) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=o.lr, betas=(o.betas[0], o.betas[1]), weight_decay=o.weight_decay)


def warmup_step(student: Student, micro: Sequence[Pack], c: DistillConfig, factor: float) -> Metrics:
    """One update of the indexers alone, towards the dense model's attention."""
    weights = _weights(micro, c.answer_weight)
    metrics: Metrics = {}
    with selecting(student.model, EVERYTHING):
        for p, w in zip(micro, weights, strict=True):
            inputs = indexshare.record(student.model, p.ids, p.positions, p.seq_start)
            found = indexshare.losses(student.model, inputs, p.seq_start, weights=w, teachers=_teachers(c))
            torch.autograd.backward(list(found.values()))
            _add(metrics, _divergences(found))
    metrics["indexer/grad_norm"] = _step(student.indexer, c.indexer, factor)
    return metrics


def sparse_step(student: Student, micro: Sequence[Pack], c: DistillConfig, factors: tuple[float, float]) -> Metrics:
    """One update of everything under the model's own selection: language for the backbone, attention for the indexers.

    `factors` are those of the two learning rates, the indexers' first. Neither loss has a gradient in what the other
    one teaches.
    """
    weights, counted = _weights(micro, c.answer_weight), sum(len(p.predicts) for p in micro)
    support: indexshare.Support = "selected" if c.sparse.support == "selected" else "all"
    metrics: Metrics = {}
    for p, w in zip(micro, weights, strict=True):
        with indexshare.recording(student.model) as inputs:
            hidden = _hidden(student.model, p)
        language = language_loss(student.model, p, hidden) / counted
        found = indexshare.losses(student.model, inputs, p.seq_start, weights=w, support=support, teachers=_teachers(c))
        (language + sum(found.values())).backward()
        _add(metrics, {"lm/loss": language.item(), **_divergences(found)})
    metrics["indexer/grad_norm"] = _step(student.indexer, c.indexer, factors[0])
    metrics["backbone/grad_norm"] = _step(student.backbone, c.sparse.backbone, factors[1])
    return metrics


def _hidden(model: Any, p: Pack) -> Tensor:
    return indexshare.hidden_states(model, p.ids, p.positions, p.seq_start)


def _teachers(c: DistillConfig) -> indexshare.Teachers:
    return "own" if c.teachers == "own" else "served"


def _weights(micro: Sequence[Pack], answer: float) -> list[Tensor]:
    """What every query weighs in the step's mean: queries that predict a counted token `answer`, others 1."""
    raw = []
    for p in micro:
        w = torch.ones(len(p.ids), device=p.ids.device)
        w[p.predicts] = answer
        raw.append(w)
    total = sum(w.sum() for w in raw)
    return [w / total for w in raw]


def _divergences(found: dict[int, Tensor]) -> Metrics:
    by_layer = {f"distill/layer_{full:02d}": loss.item() for full, loss in found.items()}
    return {"distill/kl": sum(by_layer.values()) / len(by_layer), **by_layer}


def _add(into: Metrics, more: Metrics) -> None:
    for name, value in more.items():
        into[name] = into.get(name, 0.0) + value


def _step(optimizer: torch.optim.Optimizer, o: OptimizerConfig, factor: float) -> float:
    """Clip, update, forget the gradient; returns its norm before clipping."""
    for group in optimizer.param_groups:
        group["lr"] = o.lr * factor
    norm = torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], o.max_grad_norm).item()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


def run_directory(run: RunConfig, resume: bool = False) -> Path:
    """The run's directory, made. Raises ConfigError where there is one already, unless it is to be resumed."""
    directory = Path(run.out) / f"{run.name}-seed{run.seed}"
    if directory.exists() and not resume:
        raise ConfigError(
            f"run.name: {run.name!r} with run.seed {run.seed} given, but {directory} is there already: must be another"
            " name or seed"
        )
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def save(model: Any, tokenizer: Any, out: Path, dtype: torch.dtype) -> None:
    """A plain Hugging Face folder. The routers' biases stay in float32, as transformers keeps them."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def distill(c: DistillConfig) -> Path:
    """Teach the model; returns the run's directory, which holds `policy/`, `tensorboard/`, `distill.json`.

    Raises ConfigError.
    """
    torch.manual_seed(c.run.seed)
    model, tokenizer = load_model(c.model, c.reset_indexers)
    documents = DocumentSource(c.data, tokenizer)
    directory = run_directory(c.run)
    (directory / "config.yaml").write_text(to_yaml(c), encoding="utf-8")
    dtype = stored_dtype(c.model.path)
    with SummaryWriter(str(directory / "tensorboard")) as writer:
        before, after = teach(Student.of(model, c), documents, c, writer)
    record = {"pattern": Schedule.from_config(model.config).pattern, "before": before, "after": after}
    (directory / "distill.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    save(model, tokenizer, directory / "policy", dtype)
    return directory


def stored_dtype(path: str) -> torch.dtype:
    """The precision of a folder's weights."""
    from transformers import AutoConfig

    found = AutoConfig.from_pretrained(path).dtype
    return found if isinstance(found, torch.dtype) else torch.float32


def teach(
    student: Student, documents: DocumentSource, c: DistillConfig, writer: SummaryWriter
) -> tuple[Metrics, Metrics]:
    """Both stages; returns the evaluations before the first step and after the last."""
    steps = c.warmup.steps + c.sparse.steps
    held_out = cut(long_enough(documents.held_out(), student.model.config.index_topk), c)
    before = after = _log(writer, 0, evaluate(student.model, held_out))
    bar = tqdm(range(1, steps + 1), desc=c.run.name, dynamic_ncols=True, disable=None)
    for step in bar:
        micro = cut(documents.step(step - 1), c)
        factor = lr_factor(step, c.indexer.warmup_steps, steps, c.indexer.schedule)
        if step <= c.warmup.steps:
            metrics = warmup_step(student, micro, c, factor)
        else:
            own = c.sparse.backbone
            second = lr_factor(step - c.warmup.steps, own.warmup_steps, c.sparse.steps, own.schedule)
            metrics = sparse_step(student, micro, c, (factor, second))
        bar.set_postfix_str(f"KL {metrics['distill/kl']:.3f}")
        if step == steps or (c.eval_every and step % c.eval_every == 0):
            after = evaluate(student.model, held_out)
            metrics |= after
            bar.write(f"step {step}/{steps}  {summary(metrics)}")
        _log(writer, step, metrics)
    return before, after


def long_enough(documents: list[Document], k: int) -> list[Document]:
    """The documents, unless in none of them a query has to choose. Raises ConfigError."""
    longest = max(len(ids) for ids, _ in documents)
    if longest <= k:
        raise ConfigError(
            f"data: held-out documents of at most {longest} tokens given, must be longer than index_topk = {k}"
        )
    return documents


def cut(documents: Sequence[Document], c: DistillConfig) -> list[Pack]:
    """Documents as micro-batches on the model's device."""
    return packs(documents, c.data.tokens_per_microbatch, c.model.device)


def _log(writer: SummaryWriter, step: int, metrics: Metrics) -> Metrics:
    for name, value in metrics.items():
        writer.add_scalar(name, value, step)
    writer.flush()
    return metrics


def summary(m: Metrics) -> str:
    """Loss and recall in a line."""
    shown = (
        ("distill/kl", "KL {:.3f}"),
        ("eval/lm_loss", "held-out loss {:.3f}"),
        ("eval/lm_loss_dense", "(dense {:.3f})"),
        ("recall/full", "recall Full {:.3f}"),
        ("recall/shared", "Shared {:.3f}"),
    )
    return "  ".join(text.format(m[name]) for name, text in shown if name in m)


def told(directory: Path) -> str:
    """What a finished distillation did: recall of every layer and held-out loss, before and after."""
    record = json.loads((directory / "distill.json").read_text(encoding="utf-8"))
    before, after, rows = record["before"], record["after"], ["layer           recall before   after"]
    for i, letter in enumerate(record["pattern"]):
        name = f"recall/layer_{i:02d}"
        rows.append(f"{i:5d}  {'Full  ' if letter == 'F' else 'Shared'}  {before[name]:14.3f}  {after[name]:6.3f}")
    for name, title in (("eval/lm_loss", "held-out loss"), ("eval/lm_loss_dense", "  under dense")):
        rows.append(f"{title}  {before[name]:14.3f}  {after[name]:6.3f}")
    return "\n".join(rows)
