"""`longppo indexshare search`: which layers keep their indexer, by language-model loss; nothing is trained."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from indexshare import search as patterns
from indexshare.pattern import adopt, trying
from indexshare.schedule import Schedule
from rl.config import ConfigError
from rl.distill import held_out_loss, load_model, long_enough, run_directory, save, stored_dtype
from rl.documents import Document, DocumentSource, Pack, packs
from rl.indexshare_config import DistillConfig, RunConfig, SearchConfig, load, to_yaml
from rl.telemetry import Bar, Lines, progress, read_jsonl

TRIALS = "trials.jsonl"


def search(c: SearchConfig) -> Path:
    """Search; returns the run's directory, which holds `search.json`, the model with the pattern found (`policy/`)
    and a configuration to teach its indexers (`distill.yaml`). Raises ConfigError."""
    model, tokenizer = load_model(c.model)
    start = Schedule.from_config(model.config).pattern
    try:
        expected = patterns.evaluations(start, c.full, c.blocks)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    documents = DocumentSource(c.data, tokenizer)
    held_out = _cut(long_enough(documents.held_out(), model.config.index_topk), c)
    directory = run_directory(c.run, c.run.resume)
    _ask(directory, c)
    calibration = _cut(documents.step(0), c)
    known = {record["pattern"]: record["loss"] for record in read_jsonl(directory / TRIALS)}
    shown = progress(expected, c.run.name)
    evaluate = remembered(lambda p: loss_of(model, p, calibration), directory / TRIALS, known, shown)
    try:
        path = patterns.greedy(start, c.full, evaluate, c.blocks)
    finally:
        shown.close()
    pattern = path[-1].pattern if path else start

    judged = {name: loss_of(model, p, held_out) for name, p in compared(start, pattern).items()}
    record = {
        "start": start,
        "pattern": pattern,
        "path": [{"pattern": t.pattern, "loss": t.loss} for t in path],
        "held_out": [{"what": w, "pattern": p, "loss": judged[w]} for w, p in compared(start, pattern).items()],
    }
    (directory / "search.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    dtype = stored_dtype(c.model.path)
    adopt(model, Schedule.from_pattern(pattern))
    save(model, tokenizer, directory / "policy", dtype)
    (directory / "distill.yaml").write_text(to_yaml(_lesson(c, directory)), encoding="utf-8")
    return directory


def loss_of(model: Any, pattern: str, documents: list[Pack]) -> float:
    """Loss (nats per counted token) of the model under another pattern."""
    with trying(model, Schedule.from_pattern(pattern)):
        return held_out_loss(model, documents)


def remembered(
    evaluate: Callable[[str], float], path: Path, known: dict[str, float], shown: Bar | Lines
) -> patterns.Evaluate:
    """The same function, which asks for no pattern twice: what it learns is appended to the file at `path` at once."""
    steps = itertools.count(1)
    # A kill may have cut the last line.
    path.write_text("".join(json.dumps({"pattern": p, "loss": v}) + "\n" for p, v in known.items()), encoding="utf-8")

    def asked(pattern: str) -> float:
        if pattern not in known:
            known[pattern] = evaluate(pattern)
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"pattern": pattern, "loss": known[pattern]}) + "\n")
        shown.show(next(steps), {})
        return known[pattern]

    return asked


def compared(start: str, found: str) -> dict[str, str]:
    """What the result is held against: the model as it was, and the uniform pattern of as many Full layers."""
    rivals = {"start": start, "found": found}
    layers, full = len(found), found.count("F")
    if layers % full == 0:
        uniform = patterns.uniform(layers, full)
        if all(start[i] == "F" for i, letter in enumerate(uniform) if letter == "F"):
            rivals["uniform"] = uniform
    return rivals


def told(directory: Path) -> str:
    """What a finished search found."""
    record = json.loads((directory / "search.json").read_text(encoding="utf-8"))
    rows = ["Full  loss     pattern"]
    rows += [f"{t['pattern'].count('F'):4d}  {t['loss']:7.4f}  {t['pattern']}" for t in record["path"]]
    rows += ["held-out loss"]
    rows += [f"{h['what']:8s}  {h['loss']:7.4f}  {h['pattern']}" for h in record["held_out"]]
    rows += [f"teach it: longppo indexshare distill {directory}/distill.yaml"]
    return "\n".join(rows)


def _cut(documents: list[Document], c: SearchConfig) -> list[Pack]:
    return packs(documents, c.data.tokens_per_microbatch, c.model.device)


def _ask(directory: Path, c: SearchConfig) -> None:
    """Notes the question. Raises ConfigError where what is known answers another: losses are those of one model on one
    set of documents."""
    path = directory / "config.yaml"
    if path.exists():
        before = load(SearchConfig, path)
        for section, was, now in (("model", before.model, c.model), ("data", before.data, c.data)):
            for key, old in vars(was).items():
                if old != vars(now)[key]:
                    raise ConfigError(
                        f"run.resume: true given, but {directory} was begun with {section}.{key}={old},"
                        f" not {vars(now)[key]}"
                    )
    path.write_text(to_yaml(c), encoding="utf-8")


def _lesson(c: SearchConfig, directory: Path) -> DistillConfig:
    """The configuration that teaches the indexers of the pattern found."""
    model = replace(c.model, path=str((directory / "policy").absolute()), pattern=None)
    return DistillConfig(run=RunConfig(f"{c.run.name}_distill", c.run.seed, c.run.out), model=model, data=c.data)
