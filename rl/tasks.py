"""Procedural tasks in plain ASCII, each a pure function of (seed, index) and its knobs.

They are small on purpose: a character-level model of a million parameters can learn them in minutes, and the
recall task makes the prompt as long as wanted without making the answer longer.
"""

from __future__ import annotations

import inspect
import random
import string
from collections.abc import Callable
from dataclasses import dataclass

# Keys and values share no character, so that a key occurs in a prompt exactly as often as it is meant to.
KEY_ALPHABET = string.ascii_uppercase + string.digits + "!#$%&()*+-/<>@[]^_{|}~"
VALUE_ALPHABET = string.ascii_lowercase


@dataclass(frozen=True)
class Example:
    """One question. The model reads `prompt` and must write `answer`, then end."""

    prompt: str
    answer: str
    task: str


def recall(rng: random.Random, pairs: int = 56, key_length: int = 1, value_length: int = 4) -> Example:
    """`A:wxyz 7:abcd ... ?7:` -> `abcd`.

    A prompt has pairs * (key_length + value_length + 2) + key_length + 2 characters: 395 with the defaults.
    """
    most = len(KEY_ALPHABET) ** key_length
    if not 1 <= pairs <= most:
        raise ValueError(f"pairs: {pairs} given, must be 1 to {most} with key_length {key_length}")
    keys = _distinct_words(rng, KEY_ALPHABET, key_length, pairs)
    values = ["".join(rng.choices(VALUE_ALPHABET, k=value_length)) for _ in keys]
    asked = rng.randrange(pairs)
    listing = "".join(f"{key}:{value} " for key, value in zip(keys, values, strict=True))
    return Example(f"{listing}?{keys[asked]}:", values[asked], "recall")


def copying(rng: random.Random, length: int = 12) -> Example:
    """`copy hello>` -> `hello`, of random lower-case letters."""
    text = "".join(rng.choices(VALUE_ALPHABET, k=length))
    return Example(f"copy {text}>", text, "copying")


def counting(rng: random.Random, length: int = 12, letters: int = 4) -> Example:
    """`count a in abcabd>` -> `2`."""
    alphabet = rng.sample(VALUE_ALPHABET, letters)
    text = "".join(rng.choices(alphabet, k=length))
    wanted = rng.choice(alphabet)
    return Example(f"count {wanted} in {text}>", str(text.count(wanted)), "counting")


def arithmetic(rng: random.Random, largest: int = 20) -> Example:
    """`7+12=` -> `19`; sums and differences, never negative."""
    a, b = rng.randint(0, largest), rng.randint(0, largest)
    if rng.random() < 0.5:
        return Example(f"{a}+{b}=", str(a + b), "arithmetic")
    a, b = max(a, b), min(a, b)
    return Example(f"{a}-{b}=", str(a - b), "arithmetic")


TASKS: dict[str, Callable[..., Example]] = {
    "recall": recall,
    "copying": copying,
    "counting": counting,
    "arithmetic": arithmetic,
}


def make(name: str, index: int, seed: int, **knobs: int) -> Example:
    """Example `index` of a task's endless stream under `seed`: the same arguments, the same example."""
    if name not in TASKS:
        raise ValueError(f"task: {name!r} given, must be one of {', '.join(TASKS)}")
    known = list(inspect.signature(TASKS[name]).parameters)[1:]
    for knob in knobs:
        if knob not in known:
            raise ValueError(f"task {name}: unknown knob {knob!r}, it has {', '.join(known)}")
    # A string seed is hashed by its content, the same in every process and Python version.
    return TASKS[name](random.Random(f"{name}/{seed}/{index}"), **knobs)


def score(text: str, answer: str) -> float:
    """1 when the response is the answer and nothing else (surrounding blanks aside), otherwise 0."""
    return float(text.strip() == answer.strip())


def _distinct_words(rng: random.Random, alphabet: str, length: int, count: int) -> list[str]:
    """`count` different words, without listing all that exist."""
    if length == 1:
        return rng.sample(alphabet, count)
    words: dict[str, None] = {}
    while len(words) < count:
        words["".join(rng.choices(alphabet, k=length))] = None
    return list(words)
