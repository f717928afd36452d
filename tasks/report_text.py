"""Small pieces of markdown: tables, cells, numbers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

MOST_CELL_CHARACTERS = 160

HEAD_CHARACTERS, TAIL_CHARACTERS = 800, 400
"""What is shown of the two ends of a text that is too long for the page."""


def table(head: Sequence[str], lines: Iterable[Iterable[object]]) -> str:
    """A markdown table; cells are shown as they are (see `cell`)."""
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(str(value) for value in row) + " |" for row in rows)


def cell(text: str) -> str:
    """Text as a table cell shows it: one line, nothing that markdown takes for its own, cut."""
    one_line = " ⏎ ".join(text.strip().splitlines())
    if len(one_line) > MOST_CELL_CHARACTERS:
        one_line = one_line[: MOST_CELL_CHARACTERS - 1] + "…"
    for special in "\\`*_[]<>|#":
        one_line = one_line.replace(special, "\\" + special)
    return one_line


def number(value: float | None) -> str:
    """A number as short as it can be told: whole ones whole, others with four digits."""
    if value is None:
        return ""
    if float(value).is_integer() and abs(value) < 1e9:
        return f"{int(value):,}" if abs(value) >= 10_000 else str(int(value))
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def fenced(text: str) -> str:
    """A text as it is, in a fence that nothing in it can end; a long one without its middle."""
    left_out = len(text) - HEAD_CHARACTERS - TAIL_CHARACTERS
    if left_out > 0:
        gap = f"\n… ({left_out:,} characters are left out) …\n"
        text = f"{text[:HEAD_CHARACTERS]}{gap}{text[-TAIL_CHARACTERS:]}"
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"
