"""Two tasks of many turns whose only reward comes at the end, as long as wanted, and within the tiny policy's reach.

Every turn is worth the same and none is paid when it is played: which of them was good is what an algorithm must find
out, and the more turns an episode has the harder that is.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from examples.guessing import Guessing
from rl.tasks import KEY_ALPHABET, VALUE_ALPHABET


@dataclass
class Recall:
    """`A:wxyz 7:abcd ... ?7:`, then `?A:` and so on: one question a turn, the share of right answers at the end."""

    values: dict[str, str]
    asked: list[str]
    turn: int = 0
    right: int = 0

    def reset(self) -> str:
        """The listing and the first question."""
        listing = "".join(f"{key}:{value} " for key, value in self.values.items())
        return f"{listing}?{self.asked[0]}:"

    def step(self, response: str) -> tuple[str, float, bool]:
        """The next question, whatever the answer was."""
        self.right += response.strip() == self.values[self.asked[self.turn]]
        self.turn += 1
        if self.turn == len(self.asked):
            return "", self.right / len(self.asked), True
        return f" ?{self.asked[self.turn]}:", 0.0, False


@dataclass
class Games:
    """Guessing games (examples/guessing.py) one after another, each of at most `guesses`: the share won at the end."""

    games: list[Guessing]
    guesses: int
    game: int = 0
    guess: int = 0
    won: int = 0

    def reset(self) -> str:
        """The first game's prompt."""
        return self.games[0].reset()

    def step(self, response: str) -> tuple[str, float, bool]:
        """What the game says; after its last guess the next game's prompt."""
        said, reward, found = self.games[self.game].step(response)
        self.guess += 1
        if not found and self.guess < self.guesses:
            return said, 0.0, False
        self.won += int(reward)
        self.game, self.guess = self.game + 1, 0
        if self.game == len(self.games):
            return said, self.won / len(self.games), True
        return f"{said}\n{self.games[self.game].reset()}", 0.0, False


def recall(index: int, seed: int, questions: int = 8, pairs: int = 16) -> Recall:
    """Episode `index`: `questions` drawn from `pairs`, at most 10 tokens each. Raises ValueError."""
    if not 1 <= pairs <= len(KEY_ALPHABET) or questions < 1:
        raise ValueError(f"pairs, questions: {pairs}, {questions} given, must be 1 to {len(KEY_ALPHABET)}, at least 1")
    rng = random.Random(f"long recall/{seed}/{index}")
    keys = rng.sample(KEY_ALPHABET, pairs)
    values = {key: "".join(rng.choices(VALUE_ALPHABET, k=4)) for key in keys}
    return Recall(values, rng.choices(keys, k=questions))


def games(index: int, seed: int, rounds: int = 4, top: int = 5, guesses: int = 3) -> Games:
    """Episode `index`: `rounds` games with numbers from 1 to `top`. Raises ValueError."""
    if not 2 <= top <= 9 or rounds < 1 or guesses < 1:
        raise ValueError(f"top, rounds, guesses: {top}, {rounds}, {guesses} given, must be 2 to 9, at least 1, 1")
    rng = random.Random(f"games/{seed}/{index}")
    return Games([Guessing(rng.randint(1, top), top) for _ in range(rounds)], guesses)
