"""The errors of the house.

    FlowtuneError
    ├── UserError        a mistake in a config, row, key or path: say it, never retry, exit code 2
    ├── TransientError   the other side is busy or away: waiting may help
    └── StateLostError   the model's state is gone or in doubt: go back to the last checkpoint

A `UserError` carries one `Problem` for each mistake, so that a check can report all of them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake: where it is (a field, a file and line), what is wrong, and how to mend it."""

    where: str
    what: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.what}" + (f"\n    -> {self.remedy}" if self.remedy else "")


def first_line(error: BaseException) -> str:
    """The first line of what an error says; the name of its kind if it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class FlowtuneError(Exception):
    """Base of every error this project raises on purpose."""


class UserError(FlowtuneError):
    """Something the user can mend; holds every problem that was found."""

    def __init__(self, *problems: Problem) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = problems

    def __reduce__(self) -> tuple[type[UserError], tuple[Problem, ...]]:
        return type(self), self.problems


class TransientError(FlowtuneError):
    """The same request may succeed later."""


class StateLostError(FlowtuneError):
    """The model's weights or optimizer state can no longer be trusted or found."""
