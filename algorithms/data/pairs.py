"""Preference pairs to tokens: each answer behind the prompt that both share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from algorithms.data.dataset import Dataset
from algorithms.data.rendering import Rendered, render_rows
from algorithms.data.shapes import Row, preference_problem, read_preference
from algorithms.data.spool import Lazy
from backends.base import Tokenizer


@dataclass(frozen=True, slots=True)
class Pair:
    """A row's two answers, each as the whole text that a model reads."""

    chosen: Rendered
    rejected: Rendered


@dataclass(frozen=True, slots=True)
class RenderedPairs:
    """All pairs that are trained on, in the dataset's order, and what became of the others.

    A pair is dropped if one of its answers has no token left, and skipped if it is bad.
    """

    pairs: Sequence[Pair]
    numbers: Sequence[int]
    """Which row each is, of those that are pairs at all (from 0)."""
    cut: int
    """Answers that are cut."""
    dropped: int
    skipped: int
    tokens_total: int
    """Tokens of all pairs, the prompt of each counted twice."""


def render_pairs(dataset: Dataset, tokenizer: Tokenizer, max_seq_len: int | None) -> RenderedPairs:
    """Tokens and masks of all pairs; answers are cut at `max_seq_len` tokens with their prompt.

    Bad rows are skipped as far as the dataset allows it. Raises UserError as `render_rows` does.
    """
    good = dataset.without_bad(preference_problem)
    chosen = render_rows(_answers(good, "chosen"), tokenizer, max_seq_len=max_seq_len)
    left = good.pick(chosen.numbers)
    left = replace(left, bad_rows=replace(good.bad_rows, skipped=chosen.skipped))
    rejected = render_rows(_answers(left, "rejected"), tokenizer, max_seq_len=max_seq_len)

    def pair(index: int) -> Pair:
        return Pair(chosen.rows[rejected.numbers[index]], rejected.rows[index])

    count = len(rejected.rows)
    return RenderedPairs(
        Lazy(count, pair),
        [chosen.numbers[number] for number in rejected.numbers],
        chosen.cut + rejected.cut,
        chosen.dropped + rejected.dropped,
        rejected.skipped,
        tokens_total=sum(
            chosen.lengths[number] + length + 2
            for number, length in zip(rejected.numbers, rejected.lengths, strict=True)
        ),
    )


def _answers(dataset: Dataset, which: str) -> Dataset:
    """The same rows as prompts with one of their answers."""

    def row(index: int) -> Row:
        return _answered(dataset.rows[index], which)

    if dataset.on_disk:
        return replace(dataset, rows=Lazy(len(dataset), row))
    return replace(dataset, rows=[row(index) for index in range(len(dataset))])


def _answered(row: Row, which: str) -> Row:
    preference = read_preference(row)
    answer = preference.chosen if which == "chosen" else preference.rejected
    return {
        "prompt": preference.prompt,
        "completion": answer,
        "tools": preference.tools,
        "chat_template_kwargs": preference.template_kwargs,
    }
