"""Preference pairs to tokens: each answer behind the prompt that both share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from algorithms.data.dataset import Dataset
from algorithms.data.rendering import Rendered, render_rows
from algorithms.data.shapes import Message, Row, preference_problem, read_preference, turn_weight
from algorithms.data.spool import Lazy
from backends.base import Tokenizer
from backends.errors import Problem


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

    def metrics(self) -> dict[str, float]:
        """Pairs and tokens of an epoch, and how many were cut, dropped, or skipped as bad."""
        return {
            "data/rows": float(len(self.pairs)),
            "data/rows_cut": float(self.cut),
            "data/rows_dropped": float(self.dropped),
            "data/rows_skipped": float(self.skipped),
            "data/tokens": float(self.tokens_total),
        }


def pair_problem(row: Row, place: str) -> Problem | None:
    """What is wrong with a row to train on as a pair. None if nothing.

    Its shape, and weights: pairs count alike, and so do the turns of an answer that count at all.
    """
    if problem := preference_problem(row, place):
        return problem
    if row.get("weight", 1) != 1:
        what = f"weight is {row['weight']!r}, and all pairs count alike"
        return Problem(place, what, "remove it; a pair that stands there twice counts twice")
    preference = read_preference(row)
    for name, answer in (("chosen", preference.chosen), ("rejected", preference.rejected)):
        if not isinstance(answer, str) and (problem := _turns_problem(name, answer, place)):
            return problem
    return None


def _turns_problem(name: str, answer: list[Message], place: str) -> Problem | None:
    said = [turn for turn in answer if turn["role"] == "assistant"]
    for turn in said:
        if (weight := turn.get("weight", 1)) not in (0, 1):
            what = f"a turn of {name} has the weight {weight!r}, and pairs are not weighted"
            return Problem(place, what, "give 0 to leave the turn out, else remove it")
    if any(map(turn_weight, said)):
        return None
    what = f"no turn of {name} counts: each has train: false or the weight 0"
    return Problem(place, what, "let one count; turns before both answers are never trained on")


def render_pairs(dataset: Dataset, tokenizer: Tokenizer, max_seq_len: int | None) -> RenderedPairs:
    """Tokens and masks of all pairs; answers are cut at `max_seq_len` tokens with their prompt.

    Bad rows are skipped as far as the dataset allows it. Raises UserError as `render_rows` does.
    """
    good = dataset.without_bad(pair_problem)
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
