"""Trajectories for people: as markdown tables, and as a picture of what the critic thought at every token.

TensorBoard strips colours and styles from text, so that a table's bars are characters, and the colours a picture.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from rl.advantages import place_rewards
from rl.trajectory import Trajectory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SURROGATES = re.compile("[\ud800-\udfff]")
BARS = "▁▂▃▄▅▆▇█"
ROW = 16
"""Tokens of a table's line."""
LONGEST = 64
"""Tokens of a response that are shown: half of them from its beginning, half from its end."""
PICTURED = 4
"""Responses in a picture."""

Pieces = Callable[[Sequence[int]], list[str]]
"""The text of each token by itself."""


def numbers(ids: Sequence[int]) -> list[str]:
    """Tokens by their ids, where no tokenizer is known."""
    return [str(i) for i in ids]


def table(trajectories: Sequence[Trajectory], longest: int = 600) -> str:
    """Trajectories as a markdown table; the middle of long texts is left out."""
    rows = ["| score | end | prompt | response | answer |", "|---|---|---|---|---|"]
    for t in trajectories:
        score = "" if t.score is None else f"{t.score:.3g}"
        texts = (_cell(text, longest) for text in (t.prompt_text, t.text, t.answer))
        rows.append(f"| {score} | {t.finish_reason} | {' | '.join(texts)} |")
    return "\n".join(rows)


def value_tables(trajectories: Sequence[Trajectory], pieces: Pieces) -> str:
    """A markdown table for each trajectory with values: token by token what the critic expected, as a number and as a
    bar from the lowest to the highest value shown, the advantage, and the reward. Observations are in italics."""
    low, high = _range(trajectories)
    return "\n\n".join(_value_table(t, pieces, low, high) for t in trajectories)


def _value_table(t: Trajectory, pieces: Pieces, low: float, high: float) -> str:
    assert t.values is not None
    shown = _shown(len(t.response_ids))
    texts = [_cell(_visible(text), 20) for text in pieces(t.response_ids[shown].tolist())]
    score = "none" if t.score is None else f"{t.score:.3g}"
    lines = [f"score {score}, {t.finish_reason}, after `{_cell(t.prompt_text[-40:], 40)}`"]
    columns = {
        "token": [text if action else f"*{text}*" for text, action in zip(texts, t.action_mask[shown], strict=True)],
        "": [_bar(v, low, high) for v in t.values[shown]],
        "value": [f"{v:.2f}" for v in t.values[shown]],
    }
    if t.advantages is not None:
        columns["advantage"] = [f"{a:+.2f}" for a in t.advantages[shown]]
    if t.score is not None:
        columns["reward"] = [f"{r:.3g}" if r else "" for r in _rewards(t)[shown]]
    for start in range(0, len(shown), ROW):
        rows = [[name, *cells[start : start + ROW]] for name, cells in columns.items()]
        head, *rest = ["| " + " | ".join(row) + " |" for row in rows]
        lines.append("\n".join([head, "|---" * len(rows[0]) + "|", *rest]))
    return "\n\n".join(lines)


def value_picture(trajectories: Sequence[Trajectory], pieces: Pieces) -> Figure:
    """Responses with every token on the colour of its value, red low and green high; observations are grey."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    drawn = trajectories[:PICTURED]
    low, high = _range(drawn)
    height = sum(1 + -(-len(_shown(len(t.response_ids))) // ROW) for t in drawn)
    figure = Figure(figsize=(0.62 * ROW, 0.42 * height), layout="constrained")
    axes = figure.add_subplot(xlim=(0, ROW), ylim=(height, 0))
    axes.set_axis_off()
    top = 0
    for t in drawn:
        assert t.values is not None
        shown = _shown(len(t.response_ids))
        score = "" if t.score is None else f"score {t.score:.3g}, "
        axes.text(0, top + 0.8, f"{score}{t.finish_reason}, prompt {t.prompt_index}", fontsize=8)
        for i, (place, text) in enumerate(zip(shown, pieces(t.response_ids[shown].tolist()), strict=True)):
            x, y = i % ROW, top + 1 + i // ROW
            share = (t.values[place] - low) / (high - low) if high > low else 0.5
            # Not the ends of the map, on which nothing can be read.
            color = colormaps["RdYlGn"](0.15 + 0.7 * share) if t.action_mask[place] else "0.9"
            axes.add_patch(Rectangle((x, y), 0.96, 0.94, color=color, lw=0))
            told = SURROGATES.sub("\ufffd", _visible(text))[:8].replace("$", r"\$")
            axes.text(x + 0.48, y + 0.42, told, fontsize=8, ha="center", va="center", clip_on=True)
            axes.text(x + 0.94, y + 0.88, f"{t.values[place]:.2f}", fontsize=5, ha="right", va="bottom", color="0.2")
        top += 1 + -(-len(shown) // ROW)
    return figure


def _rewards(t: Trajectory) -> np.ndarray:
    """The score where it was earned."""
    assert t.score is not None
    if t.token_rewards is not None:
        return place_rewards(0.0, t.action_mask, t.token_rewards)
    return place_rewards(t.score, t.action_mask)


def _range(trajectories: Sequence[Trajectory]) -> tuple[float, float]:
    values = np.concatenate([t.values[:-1][t.action_mask] for t in trajectories if t.values is not None])
    return float(values.min()), float(values.max())


def _shown(length: int) -> np.ndarray:
    places = np.arange(length)
    return places if length <= LONGEST else np.concatenate([places[: LONGEST // 2], places[-LONGEST // 2 :]])


def _bar(value: float, low: float, high: float) -> str:
    share = (value - low) / (high - low) if high > low else 0.5
    return BARS[int(np.clip(share * len(BARS), 0, len(BARS) - 1))]


def _visible(text: str) -> str:
    """A token that one can see."""
    return text.replace("\n", "⏎").replace(" ", "␣") if not text.strip() else text


def _cell(text: str, longest: int) -> str:
    if len(text) > longest:
        text = f"{text[: longest // 2]} ... {text[-longest // 2 :]}"
    # A summary is a protobuf string, which a lone surrogate would not enter.
    text = html.escape(SURROGATES.sub("\ufffd", text), quote=False)
    for mark in "|`*_[]\\~":  # what markdown would read as a sign
        text = text.replace(mark, f"&#{ord(mark)};")
    return text.replace("\r", "").replace("\n", "<br>")
