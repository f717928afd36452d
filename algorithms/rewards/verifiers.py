"""Verifiers: what an answer is worth. A verifier that raises is an error, never a reward of 0."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, ClassVar, Protocol

from pydantic import BaseModel, ConfigDict, Field

from algorithms.data.shapes import Row, expected_answer, last_assistant
from backends.errors import Problem, UserError
from backends.registry import Registry


class VerifierConfig(BaseModel):
    """Base of every verifier's `params:` block."""

    model_config = ConfigDict(extra="forbid")

    PLACES: ClassVar[int] = 32
    """How many answers are scored at a time where `max_concurrent` does not say."""

    timeout_seconds: float = Field(
        60, gt=0, description="Longest time that one score may take; longer is an error."
    )
    max_concurrent: int | None = Field(
        None, ge=1, description="Answers scored at a time; left out, what suits the kind."
    )


class AnswerConfig(VerifierConfig):
    """Base of the verifiers that read the answer behind the reasoning, or compare it."""

    drop_reasoning: bool = Field(
        True, description="Read what follows the last </think> of an answer that has one."
    )
    answer_field: str | None = Field(
        None,
        description="The row's field that holds the right answer; left out, it is what the row's "
        "last assistant turn says.",
    )

    def answer(self, completion: str) -> str:
        """The part of a completion that is judged."""
        return completion.rpartition("</think>")[2] if self.drop_reasoning else completion

    def expected(self, row: Row) -> str:
        """The right answer. Raises UserError for a row that has none."""
        problem = self.row_problem(row, "row")
        if problem is not None:
            raise UserError(problem)
        return str(row[self.answer_field]) if self.answer_field else expected_answer(row)

    def row_problem(self, row: Row, place: str) -> Problem | None:
        """That the row has no right answer; None if it has one."""
        if self.answer_field is not None:
            if row.get(self.answer_field) is not None:
                return None
            remedy = "add it, or name the field that holds the right answer: answer_field"
            return Problem(place, f"has no {self.answer_field}", remedy)
        turns = row.get("messages", row.get("completion"))
        if isinstance(turns, str) or (turns and last_assistant(turns) >= 0):
            return None
        return Problem(
            place,
            "has no answer to compare with",
            "end the row with an assistant turn, or name the field that holds it: answer_field",
        )


class Verifier(Protocol):
    """Built from its `Config`; called with a row and what the model answered to it.

    A plain `__call__` runs in a thread, several at a time; an async one on the event loop. What
    else a verifier may have is in `algorithms.rewards.scoring`.
    """

    Config: ClassVar[type[BaseModel]]

    def __init__(self, cfg: Any) -> None: ...

    def __call__(self, row: Row, completion: str) -> float | Awaitable[float]:
        """The reward, 1.0 for a right answer and 0.0 for a wrong one unless it says otherwise."""
        ...


class ExactMatchConfig(AnswerConfig):
    """How alike is alike."""

    strip: bool = Field(True, description="Ignore white space around both.")
    ignore_case: bool = Field(False, description="Ignore upper and lower case.")


class ExactMatch:
    """1 if the answer is, to the letter, what the row's last assistant turn says."""

    Config: ClassVar[type[BaseModel]] = ExactMatchConfig

    def __init__(self, cfg: ExactMatchConfig) -> None:
        self.cfg = cfg

    def __call__(self, row: Row, completion: str) -> float:
        """1.0 if equal, else 0.0."""
        answer, expected = self.cfg.answer(completion), self.cfg.expected(row)
        return float(self._plain(answer) == self._plain(expected))

    def check_row(self, row: Row, place: str) -> Problem | None:
        """A row needs a right answer."""
        return self.cfg.row_problem(row, place)

    def _plain(self, text: str) -> str:
        text = text.strip() if self.cfg.strip else text
        return text.casefold() if self.cfg.ignore_case else text


VERIFIERS: Registry[type[Verifier]] = Registry(
    "verifier",
    "flowtune.verifiers",
    {
        "exact_match": "algorithms.rewards.verifiers:ExactMatch",
        "contains": "algorithms.rewards.text:Contains",
        "regex": "algorithms.rewards.text:Regex",
        "numeric": "algorithms.rewards.text:Numeric",
        "format": "algorithms.rewards.text:Format",
        "math": "algorithms.rewards.mathematics:MathEquality",
        "json_schema": "algorithms.rewards.structured:JsonSchema",
        "tool_calls": "algorithms.rewards.structured:ToolCalls",
        "code": "algorithms.rewards.code:CodeTests",
        "function": "algorithms.rewards.function:Function",
        "judge": "algorithms.rewards.judge:Judge",
        "weighted": "algorithms.rewards.weighted:Weighted",
    },
    config=("Config", VerifierConfig),
    methods=("__init__", "__call__"),
)
