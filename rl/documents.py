"""Documents to teach a language model with: token ids, and which of them the loss counts; packed, never padded.

Where `rl.prompts` serves questions to be answered by the policy, this serves text as it is written.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int

from rl import tasks
from rl.config import ConfigError
from rl.indexshare_config import DataConfig

Document = tuple[list[int], list[bool]]
"""Token ids and, for each, whether the loss counts its prediction."""


class Part(NamedTuple):
    """A stretch of text, whether the loss counts it, and whether the end of sequence follows."""

    text: str
    counted: bool = False
    ends: bool = False


HELD_OUT = 1_000_000_000
"""Held-out documents of an endless source are its documents from here on, where no training arrives."""


@dataclass(frozen=True)
class Pack:
    """Documents laid end to end. `seq_start` is the first index of every token's own document."""

    ids: Int[torch.Tensor, " tokens"]
    positions: Int[torch.Tensor, " tokens"]
    seq_start: Int[torch.Tensor, " tokens"]
    counted: Bool[torch.Tensor, " tokens"]

    @property
    def predicts(self) -> Int[torch.Tensor, " counted"]:
        """Indices of the tokens whose next one the loss counts. A document's first token is never counted."""
        return self.counted[1:].nonzero().squeeze(1)


def pack(documents: Sequence[Document], device: str = "cpu") -> Pack:
    """Lay documents end to end. Raises ValueError where a first token is counted: nothing of its document predicts
    it."""
    ids: list[int] = []
    positions: list[int] = []
    starts: list[int] = []
    counted: list[bool] = []
    for tokens, mask in documents:
        if mask[0]:
            raise ValueError("document: its first token is counted, but nothing before it predicts it")
        starts += [len(ids)] * len(tokens)
        positions += range(len(tokens))
        ids += tokens
        counted += mask
    return Pack(*(torch.tensor(x, device=device) for x in (ids, positions, starts, counted)))


def packs(documents: Sequence[Document], tokens: int, device: str = "cpu") -> list[Pack]:
    """Micro-batches of at most `tokens` tokens, in order; a longer document is one of its own."""
    groups: list[list[Document]] = []
    used = 0
    for document in documents:
        if not groups or used + len(document[0]) > tokens:
            groups.append([])
            used = 0
        groups[-1].append(document)
        used += len(document[0])
    return [pack(group, device) for group in groups]


def recalled(rng: random.Random, pairs: int, questions: int, styles: Sequence[float] = (1, 0, 0)) -> list[Part]:
    """A recall prompt; further questions about the same pairs follow the first. The answers are counted.

    `styles` weighs the ways in which an answer is written: as it is, marked by `=`, in capitals. No prompt tells
    which.
    """
    example = tasks.recall(rng, pairs=pairs)
    listing = example.prompt[: example.prompt.rindex("?")]
    known = {entry.split(":")[0]: entry.split(":")[1] for entry in listing.split()}
    asked = [example.prompt[-2], *rng.sample(sorted(known), min(questions, pairs))]
    parts = [Part(listing)]
    for key in asked:
        answer = known[key]
        written = rng.choices((answer, f"={answer}", answer.upper()), styles)[0]
        parts += [Part(f"?{key}:"), Part(written, counted=True, ends=True)]
    return parts


def encoded(parts: Sequence[Part], encode: Callable[[str], list[int]], bos: int | None, eos: int) -> Document:
    """A document from stretches of text, each encoded by itself, with a BOS before them where there is one."""
    ids, counted = ([], []) if bos is None else ([bos], [False])
    for part in parts:
        piece = encode(part.text) + ([eos] if part.ends else [])
        ids += piece
        counted += [part.counted] * len(piece)
    counted[0] = False
    return ids, counted


class DocumentSource:
    """Document i of training is a pure function of the configuration and i; held-out ones never occur there."""

    def __init__(self, config: DataConfig, tokenizer: Any) -> None:
        """Raises ConfigError for a file or knobs that give no documents."""
        if tokenizer.eos_token_id is None:
            raise ConfigError("model.path: its tokenizer has no end of sequence, a document must have one")
        self._config, self._tokenizer = config, tokenizer
        self._training, self._held_out = SOURCES[config.source](config)
        self.training(0)

    def training(self, index: int) -> Document:
        """Document `index` of the endless stream."""
        return self._document(self._training(index))

    def held_out(self) -> list[Document]:
        """`data.held_out` documents, the same at every call."""
        return [self._document(self._held_out(i)) for i in range(self._config.held_out)]

    def step(self, step: int) -> list[Document]:
        """The documents of training step `step`, counted from 0."""
        n = self._config.documents_per_step
        return [self.training(step * n + i) for i in range(n)]

    def _document(self, parts: Sequence[Part]) -> Document:
        t = self._tokenizer
        ids, counted = encoded(
            parts, lambda s: t(s, add_special_tokens=False).input_ids, t.bos_token_id, t.eos_token_id
        )
        longest = self._config.max_tokens
        return ids[:longest], counted[:longest]


Parts = Callable[[int], Sequence[Part]]


def _recall(config: DataConfig) -> tuple[Parts, Parts]:
    knobs: dict[str, Any] = {"pairs": 56, "questions": 12, "styles": (1, 0, 0)} | config.knobs

    def make(index: int) -> list[Part]:
        try:
            return recalled(random.Random(f"{config.seed}/{index}"), **knobs)
        except (TypeError, ValueError, IndexError) as error:
            raise ConfigError(f"data.knobs: {config.knobs} given for recall: {error}") from error

    return make, lambda index: make(HELD_OUT + index)


def _jsonl(config: DataConfig) -> tuple[Parts, Parts]:
    """Lines with `text`, counted as a whole, or with `prompt` and `answer`, of which the answer counts."""
    assert config.path is not None  # the configuration's rules
    lines = list(_read(Path(config.path)))
    if len(lines) <= config.held_out:
        raise ConfigError(f"data.held_out: {config.held_out} given, must be fewer than the {len(lines)} documents")
    training, kept = lines[: len(lines) - config.held_out], lines[len(lines) - config.held_out :]

    def shuffled(index: int) -> list[Part]:
        epoch, place = divmod(index, len(training))
        if epoch not in orders:
            orders.clear()
            orders[epoch] = random.Random(f"{config.seed}/{epoch}").sample(range(len(training)), len(training))
        return training[orders[epoch][place]]

    orders: dict[int, list[int]] = {}
    return shuffled, kept.__getitem__


def _read(path: Path) -> Iterator[list[Part]]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise ConfigError(f"data.path: {path}, line {number}: not JSON: {error}") from error
            keys = ("text",) if isinstance(record, dict) and "text" in record else ("prompt", "answer")
            texts: list[Any] = [record.get(key) for key in keys] if isinstance(record, dict) else [None]
            if not all(isinstance(text, str) and text for text in texts):
                raise ConfigError(f"data.path: {path}, line {number}: must have `text`, or `prompt` and `answer`")
            yield [*map(Part, texts[:-1]), Part(texts[-1], counted=True, ends=True)]


SOURCES: dict[str, Callable[[DataConfig], tuple[Parts, Parts]]] = {"recall": _recall, "jsonl": _jsonl}
