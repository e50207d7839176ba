"""Writing under constraints that a program can check, in the style of IFEval: for models that know English.

Each example asks for a sentence or two about a topic and states one or two constraints. `answer` holds the checks as
JSON; `rl.rewards.instructions` runs them.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass

from rl.tasks import Example

TOPICS = (
    "a harbour in winter", "the moon", "an old bicycle", "a busy kitchen", "the first day of school", "a lost dog",
    "mountain weather", "a quiet library", "baking bread", "a night train", "the city market", "growing tomatoes",
    "a broken clock", "learning to swim", "a small island", "the smell of rain", "a chess game", "an empty theatre",
    "the morning bus", "a desert road", "honey bees", "a paper kite", "the village school", "a stone bridge",
    "an apple orchard", "a hospital at night", "the football match", "a new pair of shoes", "a snowstorm",
    "the public park", "a cup of tea", "an ancient map", "a fishing boat", "a noisy neighbour", "the family dinner",
    "a street musician", "an airport queue", "a wooden chair", "the summer holidays", "a power cut",
)  # fmt: skip
WORDS = (
    "river", "golden", "window", "silent", "bridge", "garden", "thunder", "yellow", "patient", "journey", "mirror",
    "winter", "village", "candle", "forest", "harvest", "shadow", "island", "pocket", "ribbon", "silver", "market",
    "blanket", "whisper",
)  # fmt: skip

LEARNABLE = "at_most,no_comma,question"
"""The kinds that SmolLM2-135M meets often enough, untrained, to learn from (`benchmarks/smollm2_zero_shot.py`)."""

MIN_WORDS = 5
"""Fewer words are no answer, whatever constraint they meet; the prompt says so."""


@dataclass(frozen=True)
class Constraint:
    """One kind: what the prompt says, and the check. Both take the drawn argument."""

    draw: Callable[[random.Random], str]
    says: str
    holds: Callable[[str, str], bool]


def words(text: str) -> list[str]:
    """The words of a text, without punctuation."""
    return re.findall(r"[A-Za-z0-9'\u2019-]+", text)


def _nothing(rng: random.Random) -> str:
    return ""


def _word(rng: random.Random) -> str:
    return rng.choice(WORDS)


def _number(low: int, high: int) -> Callable[[random.Random], str]:
    return lambda rng: str(rng.randint(low, high))


def _has(text: str, word: str) -> bool:
    return word.lower() in [w.lower() for w in words(text)]


def _begins(text: str, word: str) -> bool:
    return [w.lower() for w in words(text)[:1]] == [word.lower()]


CONSTRAINTS: dict[str, Constraint] = {
    "lowercase": Constraint(
        _nothing, "Use only lowercase letters.", lambda text, _: text == text.lower() and text != text.upper()
    ),
    "uppercase": Constraint(
        _nothing, "Use only CAPITAL LETTERS.", lambda text, _: text == text.upper() and text != text.lower()
    ),
    "include": Constraint(_word, 'Include the word "{}".', _has),
    "begin": Constraint(_word, 'Begin with the word "{}".', _begins),
    "at_most": Constraint(_number(10, 16), "Use at most {} words.", lambda text, n: len(words(text)) <= int(n)),
    "no_comma": Constraint(_nothing, "Do not use any commas.", lambda text, _: "," not in text),
    "quotes": Constraint(
        _nothing,
        "Put your whole answer in double quotation marks.",
        lambda text, _: len(text) > 1 and text[0] == text[-1] == '"',
    ),
    "question": Constraint(_nothing, "Write it as a question.", lambda text, _: text.endswith("?")),
    "exclamation": Constraint(_nothing, "End with an exclamation mark.", lambda text, _: text.endswith("!")),
}


def instructions(rng: random.Random, kinds: str = LEARNABLE, constraints: int = 1) -> Example:
    """A writing task under `constraints` different kinds, drawn from the comma-separated `kinds`."""
    pool = [k.strip() for k in kinds.split(",")]
    for kind in pool:
        if kind not in CONSTRAINTS:
            raise ValueError(f"kinds: {kind!r} given, must be of {', '.join(CONSTRAINTS)}")
    if not 1 <= constraints <= len(pool):
        raise ValueError(f"constraints: {constraints} given, must be 1 to the {len(pool)} kinds")
    checks = [(kind, CONSTRAINTS[kind].draw(rng)) for kind in rng.sample(pool, constraints)]
    said = " ".join(CONSTRAINTS[kind].says.format(argument) for kind, argument in checks)
    prompt = f"Write one sentence of at least {MIN_WORDS} words about {rng.choice(TOPICS)}. {said}"
    return Example(prompt, json.dumps(checks), "+".join(sorted(kind for kind, _ in checks)))


TASKS = {"instructions": instructions}


def make(name: str, index: int, seed: int, kinds: str = LEARNABLE, constraints: int = 1) -> Example:
    """Example `index` of the stream under `seed`, the same anywhere, as `rl.tasks.make`."""
    return TASKS[name](random.Random(f"{name}/{seed}/{index}"), kinds, constraints)


def satisfied(text: str, answer: str) -> float:
    """1 if the text has at least `MIN_WORDS` words and meets every check of `answer`, otherwise 0."""
    text = text.strip()
    checks = json.loads(answer)
    return float(
        len(words(text)) >= MIN_WORDS and all(CONSTRAINTS[kind].holds(text, argument) for kind, argument in checks)
    )
