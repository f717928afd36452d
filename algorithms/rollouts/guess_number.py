"""The model guesses a number, is told whether it is higher or lower, and guesses again."""

from __future__ import annotations

import re
from typing import ClassVar

from pydantic import Field, field_validator
from pydantic_core.core_schema import ValidationInfo

from algorithms.data.shapes import Message, Row
from algorithms.rollouts.environment import Environment, EnvironmentConfig, Step
from backends.errors import Problem, UserError

INTEGER = re.compile(r"-?\d+")


class GuessNumberConfig(EnvironmentConfig):
    """How hard it is."""

    low: int = Field(1, description="The lowest number there is.")
    high: int = Field(3, validate_default=True, description="The highest number there is.")
    guesses: int = Field(2, ge=1, description="So many guesses; each is a turn.")
    reward_for_valid: float = Field(
        0.0, ge=0, lt=1, description="What a last guess that is wrong, but in range, is worth."
    )

    @field_validator("high")
    @classmethod
    def _above_low(cls, high: int, info: ValidationInfo) -> int:
        if "low" in info.data and high <= info.data["low"]:
            raise ValueError(f"is {high}, not above low ({info.data['low']}); raise it")
        return high


class GuessNumber(Environment):
    """The model guesses the row's `number`: 1 for a hit, with a hint after each miss."""

    Config: ClassVar[type[EnvironmentConfig]] = GuessNumberConfig
    min_turns: ClassVar[int] = 2
    own_reward: ClassVar[bool] = True
    _misses = 0

    @classmethod
    def check_row(cls, row: Row, place: str) -> Problem | None:
        """A row needs the number."""
        number = row.get("number")
        if isinstance(number, int) and not isinstance(number, bool):
            return None
        what = f"number is {number!r}" if "number" in row else "has no number to guess"
        return Problem(place, what, 'a row looks like {"number": 2}')

    async def start(self) -> list[Message]:
        """The question. Raises UserError for a number that is out of range."""
        low, high, number = self.cfg.low, self.cfg.high, self.row["number"]
        if not low <= number <= high:
            raise UserError(
                Problem(
                    "algorithm.params.environment.params",
                    f"the number {number} is not from {low} to {high}",
                    "set low and high to what the rows hold",
                )
            )
        return [{"role": "user", "content": f"Guess my number from {low} to {high}."}]

    async def step(self, message: Message) -> Step:
        """1 for the number; else a hint, as long as there is a guess left."""
        found = INTEGER.findall(message["content"])
        guess = int(found[-1]) if found else None
        valid = guess is not None and self.cfg.low <= guess <= self.cfg.high
        metrics = {"guesses": 1.0, "invalid": float(not valid)}
        if guess == self.row["number"]:
            return Step(reward=1.0, done=True, metrics=metrics)
        self._misses += 1
        if self._misses == self.cfg.guesses:
            return Step(reward=self.cfg.reward_for_valid * valid, done=True, metrics=metrics)
        return Step([{"role": "user", "content": self._hint(guess)}], metrics=metrics)

    def _hint(self, guess: int | None) -> str:
        if guess is None:
            return "Say a number."
        return "Higher." if guess < self.row["number"] else "Lower."
