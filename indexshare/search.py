"""Finds which layers keep their indexer: the greedy search of IndexCache (arXiv 2603.12201).

Start with every indexer there is. In each round try to do without each one that is left, and drop the one whose
loss is lowest without it. No weight changes, so a loss is a function of the pattern alone: a search that was
interrupted goes on by asking again for what it already knows.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from indexshare.schedule import Schedule

Evaluate = Callable[[str], float]
"""From a pattern, one letter per layer, to the loss of the model that has it."""


@dataclass(frozen=True)
class Trial:
    """A pattern, one letter per layer, and the loss of the model that has it."""

    pattern: str
    loss: float


def greedy(start: str, full: int, evaluate: Evaluate, blocks: int = 1) -> list[Trial]:
    """The best pattern after every round, from `start` down to `full` Full layers, each one fewer.

    With `blocks` > 1 the layers are cut into that many stretches of equal length, each of which keeps its first
    layer Full (a pipeline stage must start there). They are searched one after the other, the earlier ones as
    found and the later ones as in `start`, and each keeps its share of `full`; that takes about `blocks` times
    fewer evaluations. Of equal losses the lowest layer's is taken. Raises ValueError for what cannot be.
    """
    check(start, full, blocks)
    pattern, path = start, []
    for block, share in zip(_stretches(len(start), blocks), _shares(full, blocks), strict=True):
        while pattern[block.start : block.stop].count("F") > share:
            trials = [Trial(without, evaluate(without)) for without in _rounds(pattern, block)]
            best = min(trials, key=lambda trial: trial.loss)
            pattern = best.pattern
            path.append(best)
    return path


def evaluations(start: str, full: int, blocks: int = 1) -> int:
    """How many patterns `greedy` asks for."""
    check(start, full, blocks)
    total = 0
    for block, share in zip(_stretches(len(start), blocks), _shares(full, blocks), strict=True):
        total += sum(range(share, start[block.start : block.stop].count("F")))
    return total


def uniform(layers: int, full: int) -> str:
    """The pattern of every (layers / full)-th layer; `full` must divide `layers`."""
    if full < 1 or layers % full:
        raise ValueError(f"full: {full} given, must be a divisor of {layers} layers")
    return Schedule.from_freq(layers, layers // full, offset=1).pattern


def at_random(layers: int, full: int, rng: random.Random) -> str:
    """A pattern with `full` Full layers: the first, and others drawn without preference."""
    chosen = {0, *rng.sample(range(1, layers), full - 1)}
    return "".join("F" if i in chosen else "S" for i in range(layers))


def check(start: str, full: int, blocks: int = 1) -> None:
    """Raises ValueError, in one line, where `greedy` could not go from `start` to `full`."""
    layers = len(Schedule.from_pattern(start).types)
    if blocks < 1 or layers % blocks:
        raise ValueError(f"blocks: {blocks} given, must be a divisor of the model's {layers} layers")
    if not blocks <= full <= start.count("F"):
        raise ValueError(
            f"full: {full} given, must be between {blocks}, one for each block, and {start.count('F')}, "
            f"the Full layers of {start}"
        )
    for block, share in zip(_stretches(layers, blocks), _shares(full, blocks), strict=True):
        part = start[block.start : block.stop]
        if part[0] != "F":
            raise ValueError(f"blocks: {blocks} given, but layer {block.start} of {start} would start one on Shared")
        if part.count("F") < share:
            raise ValueError(f"full: {full} given, but layers {block.start} to {block.stop - 1} have no {share} Full")


def _stretches(layers: int, blocks: int) -> list[range]:
    size = layers // blocks
    return [range(begin, begin + size) for begin in range(0, layers, size)]


def _shares(full: int, blocks: int) -> list[int]:
    """Full layers of each block, as equal as can be, the first ones getting more."""
    return [full // blocks + (i < full % blocks) for i in range(blocks)]


def _rounds(pattern: str, block: range) -> list[str]:
    """The pattern without each Full layer of the block but the first."""
    return [pattern[:i] + "S" + pattern[i + 1 :] for i in block[1:] if pattern[i] == "F"]
