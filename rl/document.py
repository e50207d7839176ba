"""A report as a few kinds of blocks, written as markdown and as one HTML file that needs nothing else."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: 1rem 0; font-size: 0.9em; }
th, td { border-bottom: 1px solid #ddd; padding: 0.25rem 0.75rem; text-align: left; vertical-align: top; }
th { border-bottom: 2px solid #888; }
img { max-width: 100%; }
"""


@dataclass(frozen=True)
class Heading:
    """A section's title; level 1 is the document's."""

    text: str
    level: int = 2


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class Table:
    """Rows under a head; every cell is text."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Picture:
    """A PNG, with what it shows."""

    name: str
    caption: str
    png: bytes


Block = Heading | Text | Table | Picture


def write(blocks: Sequence[Block], out: Path) -> list[Path]:
    """`report.md` with its pictures beside it, and `report.html` that holds them; returns these two."""
    out.mkdir(parents=True, exist_ok=True)
    for block in blocks:
        if isinstance(block, Picture):
            (out / f"{block.name}.png").write_bytes(block.png)
    files = [out / "report.md", out / "report.html"]
    for file, text in zip(files, (markdown(blocks), webpage(blocks)), strict=True):
        file.write_text(text, encoding="utf-8")
    return files


def markdown(blocks: Sequence[Block]) -> str:
    """The document in GitHub's markdown."""
    return "\n\n".join(_markdown(block) for block in blocks) + "\n"


def webpage(blocks: Sequence[Block]) -> str:
    """The document as HTML, pictures inside, without scripts."""
    title = next((html.escape(b.text) for b in blocks if isinstance(b, Heading)), "")
    body = "\n".join(_html(block) for block in blocks)
    return (
        f'<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{STYLE}</style></head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _markdown(block: Block) -> str:
    if isinstance(block, Heading):
        return f"{'#' * block.level} {block.text}"
    if isinstance(block, Text):
        return block.text
    if isinstance(block, Picture):
        return f"![{block.caption}]({block.name}.png)"
    rows = [block.head, ["---"] * len(block.head), *block.rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |" for row in rows
    )


def _html(block: Block) -> str:
    if isinstance(block, Heading):
        return f"<h{block.level}>{html.escape(block.text)}</h{block.level}>"
    if isinstance(block, Text):
        return f"<p>{html.escape(block.text)}</p>"
    if isinstance(block, Picture):
        data = base64.b64encode(block.png).decode()
        return f'<p><img alt="{html.escape(block.caption)}" src="data:image/png;base64,{data}"></p>'
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in block.head)
    rows = "\n".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>" for row in block.rows)
    return f"<table>\n<tr>{head}</tr>\n{rows}\n</table>"
