"""Verifiers that read an answer as text: what it holds, which number it gives, its form."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import BaseModel, Field, field_validator, model_validator

from algorithms.data.shapes import Row
from algorithms.rewards.verifiers import AnswerConfig, VerifierConfig
from backends.errors import Problem, UserError

if TYPE_CHECKING:
    from typing import Self

NUMBER = (
    r"(?:(?<![\w)])[-+−])?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?"
)
"""A number as people write it; a minus sign behind a digit or a bracket is a subtraction."""


def compiled(pattern: str, flags: int = 0) -> Any:
    """A pattern of the `regex` package, whose searches end in time and let other threads run.

    Raises ValueError for a bad one.
    """
    import regex

    try:
        return regex.compile(pattern, flags)
    except regex.error as error:
        raise ValueError(f"not a regular expression: {error}") from None


# --- contains -----------------------------------------------------------------------------------


class ContainsConfig(AnswerConfig):
    """What an answer must hold."""

    text: str | list[str] | None = Field(
        None, description="One text or several; left out, the right answer of the row."
    )
    how_many: Literal["all", "any"] = Field("all", description="Whether one of several is enough.")
    ignore_case: bool = Field(False, description="Ignore upper and lower case.")

    @field_validator("text")
    @classmethod
    def _not_empty(cls, text: str | list[str] | None) -> str | list[str] | None:
        texts = [text] if isinstance(text, str) else text
        if texts is not None and not (texts and all(texts)):
            raise ValueError("an empty text is in every answer: leave it out or write one")
        return text


class Contains:
    """1 if the answer holds a text: the row's right answer, or those that are given."""

    Config: ClassVar[type[BaseModel]] = ContainsConfig

    def __init__(self, cfg: ContainsConfig) -> None:
        self.cfg = cfg

    def __call__(self, row: Row, completion: str) -> float:
        """1.0 if all (or any) of the texts are in the answer, else 0.0."""
        text = self.cfg.expected(row).strip() if self.cfg.text is None else self.cfg.text
        texts = [text] if isinstance(text, str) else text
        answer = self._plain(self.cfg.answer(completion))
        found = [self._plain(text) in answer for text in texts]
        return float(all(found) if self.cfg.how_many == "all" else any(found))

    def check_row(self, row: Row, place: str) -> Problem | None:
        """Without texts of its own, it needs a right answer that says something."""
        if self.cfg.text is not None:
            return None
        problem = self.cfg.row_problem(row, place)
        if problem is None and not self.cfg.expected(row).strip():
            return Problem(place, "the right answer is empty, so every answer holds it", "write it")
        return problem

    def _plain(self, text: str) -> str:
        return text.casefold() if self.cfg.ignore_case else text


# --- regex --------------------------------------------------------------------------------------


class RegexConfig(AnswerConfig):
    """What an answer must look like."""

    pattern: str = Field(
        description="A regular expression; found anywhere in the answer unless `full` is set.",
        examples=[r"#### (.+)"],
    )
    full: bool = Field(False, description="The pattern must match the whole answer.")
    group: int | str | None = Field(
        None,
        description="A group of the pattern that must be the right answer, in the last match.",
    )
    ignore_case: bool = Field(False, description="Ignore upper and lower case.")

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        compiled(pattern)
        return pattern

    @model_validator(mode="after")
    def _has_the_group(self) -> Self:
        pattern = compiled(self.pattern)
        groups = [*range(pattern.groups + 1), *pattern.groupindex]
        if self.group is not None and self.group not in groups:
            names = ", ".join(map(str, groups))
            raise ValueError(f"the pattern has no group {self.group!r}: its groups are {names}")
        return self


class Regex:
    """1 if the answer matches a pattern, or if what the pattern finds is the right answer."""

    Config: ClassVar[type[BaseModel]] = RegexConfig

    def __init__(self, cfg: RegexConfig) -> None:
        import regex

        self.cfg = cfg
        self.pattern = compiled(cfg.pattern, regex.IGNORECASE if cfg.ignore_case else 0)

    def __call__(self, row: Row, completion: str) -> float:
        """1.0 for a match, else 0.0. Raises TimeoutError for a pattern that backtracks for ever."""
        answer, limit = self.cfg.answer(completion).strip(), self.cfg.timeout_seconds
        if self.cfg.full:
            whole = self.pattern.fullmatch(answer, timeout=limit)
            matches = [whole] if whole else []
        else:
            matches = list(self.pattern.finditer(answer, timeout=limit))
        if self.cfg.group is None:
            return float(bool(matches))
        found = (matches[-1].group(self.cfg.group) or "").strip() if matches else None
        expected = self.cfg.expected(row).strip()
        if self.cfg.ignore_case and found is not None:
            return float(found.casefold() == expected.casefold())
        return float(found == expected)

    def check_row(self, row: Row, place: str) -> Problem | None:
        """With a group to compare, a row needs a right answer."""
        return None if self.cfg.group is None else self.cfg.row_problem(row, place)


# --- numeric ------------------------------------------------------------------------------------


class NumericConfig(AnswerConfig):
    """Which number is read, and how near is near enough."""

    pattern: str | None = Field(
        None,
        description="Where the number stands: the first group of the last match; left out, the "
        "last number of the answer is taken.",
        examples=[r"\\boxed\{(.+?)\}"],
    )
    abs_tolerance: float = Field(0.0, ge=0, description="Allowed distance from the right number.")
    rel_tolerance: float = Field(
        1e-6,
        ge=0,
        description="Allowed distance as a share of the right number; the larger counts.",
    )

    @field_validator("pattern")
    @classmethod
    def _one_group(cls, pattern: str | None) -> str | None:
        if pattern is not None and compiled(pattern).groups < 1:
            raise ValueError("the pattern has no group: put brackets around the number")
        return pattern


class Numeric:
    """1 if the answer's number is the row's, within a tolerance."""

    Config: ClassVar[type[BaseModel]] = NumericConfig

    def __init__(self, cfg: NumericConfig) -> None:
        self.cfg = cfg
        self.number = compiled(NUMBER)
        self.pattern = None if cfg.pattern is None else compiled(cfg.pattern)

    def __call__(self, row: Row, completion: str) -> float:
        """1.0 if |answer - right| <= max(abs_tolerance, rel_tolerance * |right|), else 0.0."""
        right = self._right(row)
        answer: str | None = self.cfg.answer(completion)
        if self.pattern is not None:
            found = list(self.pattern.finditer(answer, timeout=self.cfg.timeout_seconds))
            answer = found[-1].group(1) if found else None
        number = self._last(answer or "")
        if number is None or not math.isfinite(number):
            return 0.0
        allowed = max(self.cfg.abs_tolerance, self.cfg.rel_tolerance * abs(right))
        return float(abs(number - right) <= allowed)

    def check_row(self, row: Row, place: str) -> Problem | None:
        """The row's right answer needs a number."""
        try:
            self._right(row)
        except UserError as error:
            (problem,) = error.problems
            return Problem(place, problem.what, problem.remedy)
        return None

    def _right(self, row: Row) -> float:
        expected = self.cfg.expected(row)
        number = self._last(expected)
        if number is None or not math.isfinite(number):
            what = f"the right answer {expected[:60]!r} holds no number"
            raise UserError(Problem("row", what, "write one, or choose another verifier"))
        return number

    def _last(self, text: str) -> float | None:
        found = self.number.findall(text)
        return float(found[-1].replace(",", "").replace("−", "-")) if found else None


# --- format -------------------------------------------------------------------------------------


class FormatConfig(VerifierConfig):
    """Which form an answer must have: one of `tags`, `sections` and `pattern`."""

    tags: list[str] | None = Field(
        None,
        description="Tags that the answer opens and closes once each, in this order, with only "
        "white space between them.",
        examples=[["think", "answer"]],
    )
    opened: bool = Field(False, description="The prompt has opened the first tag already.")
    text_after: bool = Field(
        False, description="There must be text behind the last tag; else there may be none."
    )
    sections: list[str] | None = Field(
        None,
        description="Lines that must stand in the answer in this order, as headings do.",
        examples=[["## Reasoning", "## Answer"]],
    )
    pattern: str | None = Field(
        None, description="A regular expression for the whole answer; a dot matches line breaks."
    )

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str | None) -> str | None:
        if pattern is not None:
            compiled(pattern)
        return pattern

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        forms = {"tags": self.tags, "sections": self.sections, "pattern": self.pattern}
        given = [name for name, form in forms.items() if form]
        if len(given) != 1:
            raise ValueError(f"give one of tags, sections and pattern, not {len(given)} of them")
        if (self.opened or self.text_after) and not self.tags:
            raise ValueError("opened and text_after go with tags: leave them out")
        return self


class Format:
    """1 if the answer has the form that is asked for, whatever it says."""

    Config: ClassVar[type[BaseModel]] = FormatConfig

    def __init__(self, cfg: FormatConfig) -> None:
        import regex

        self.cfg = cfg
        self.pattern = None if cfg.pattern is None else compiled(cfg.pattern, regex.DOTALL)

    def __call__(self, row: Row, completion: str) -> float:
        """1.0 if the form is right, else 0.0."""
        if self.pattern is not None:
            match = self.pattern.fullmatch(completion.strip(), timeout=self.cfg.timeout_seconds)
            return float(match is not None)
        if self.cfg.sections:
            lines = iter([line.strip() for line in completion.splitlines()])
            return float(all(section.strip() in lines for section in self.cfg.sections))
        return float(self._tagged(completion, self.cfg.tags or []))

    def _tagged(self, completion: str, tags: list[str]) -> bool:
        marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
        rest = marks[0] + completion if self.cfg.opened else completion
        if any(rest.count(mark) != 1 for mark in marks):
            return False
        for opening, closing in zip(marks[::2], marks[1::2], strict=True):
            before, _, rest = rest.partition(opening)
            inside, closed, rest = rest.partition(closing)
            if before.strip() or not inside.strip() or not closed:
                return False
        return bool(rest.strip()) == self.cfg.text_after
