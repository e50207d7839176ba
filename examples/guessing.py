"""A guessing game for the tiny policy: find a number in a few turns, told `higher` or `lower` after each guess.

The tiny policy knows no English, so the prompt looks like one of its counting tasks, which it answers with a small
number. What `higher` and `lower` mean it must find out: nothing in its training told it.
"""

from __future__ import annotations

import random


class Guessing:
    """One game: the number lies in 1 to `top`. A right guess earns 1 and ends it, everything else earns nothing."""

    def __init__(self, number: int, top: int) -> None:
        self._number, self._top = number, top

    def reset(self) -> str:
        """`count ? in 12345>`."""
        return f"count ? in {''.join(str(n) for n in range(1, self._top + 1))}>"

    def step(self, response: str) -> tuple[str, float, bool]:
        """`higher>` or `lower>`, as the number is; `what>` to what is no number."""
        try:
            guess = int(response)
        except ValueError:
            return "what>", 0.0, False
        if guess == self._number:
            return "right", 1.0, True
        return "higher>" if self._number > guess else "lower>", 0.0, False


def make(index: int, seed: int, top: int = 5) -> Guessing:
    """Game `index` of the stream under `seed`; of each `top` games in a row every number is one's. Raises ValueError.

    Drawn freely, a few hundred games favour some numbers, and a policy that ignores the answers could profit.
    """
    if not 2 <= top <= 9:
        raise ValueError(f"top: {top} given, must be 2 to 9")
    block, place = divmod(index, top)
    return Guessing(random.Random(f"guessing/{seed}/{block}").sample(range(1, top + 1), top)[place], top)
