"""One question, one answer, scored by the verifier."""

from __future__ import annotations

from typing import Any

from algorithms.data.shapes import Message, Row, prompt_problem, read_prompt, read_tools
from algorithms.rollouts.environment import Environment, Step
from backends.errors import Problem


class SingleTurn(Environment):
    """One question, one answer, scored by the verifier."""

    @classmethod
    def check_row(cls, row: Row, place: str) -> Problem | None:
        """A row needs messages or a prompt; its answer may be left out."""
        return prompt_problem(row, place)

    @property
    def tools(self) -> list[Any] | None:
        """The row's."""
        return read_tools(self.row)

    async def start(self) -> list[Message] | str:
        """The row's turns up to the answer."""
        return read_prompt(self.row)

    async def step(self, message: Message) -> Step:
        """The verifier's score of the answer."""
        return Step(reward=await self.score(message["content"]), done=True)
