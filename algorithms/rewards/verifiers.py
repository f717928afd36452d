"""Verifiers: what an answer is worth. A verifier that raises is an error, never a reward of 0."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, ClassVar, Protocol

from pydantic import BaseModel, ConfigDict, Field

from algorithms.data.dataset import Row, expected_answer
from backends.registry import Registry


class VerifierConfig(BaseModel):
    """Base of every verifier's `params:` block."""

    model_config = ConfigDict(extra="forbid")


class Verifier(Protocol):
    """Built from its `Config`; called with a row and what the model answered to it."""

    Config: ClassVar[type[BaseModel]]

    def __init__(self, cfg: Any) -> None: ...

    def __call__(self, row: Row, completion: str) -> float | Awaitable[float]:
        """The reward, 1.0 for a right answer and 0.0 for a wrong one unless it says otherwise."""
        ...


class ExactMatchConfig(VerifierConfig):
    """How alike is alike."""

    strip: bool = Field(True, description="Ignore white space around both.")
    ignore_case: bool = Field(False, description="Ignore upper and lower case.")
    drop_reasoning: bool = Field(
        True, description="Compare what follows the last </think> of an answer that has one."
    )


class ExactMatch:
    """1 if the answer is, to the letter, what the row's last assistant turn says."""

    Config: ClassVar[type[BaseModel]] = ExactMatchConfig

    def __init__(self, cfg: ExactMatchConfig) -> None:
        self.cfg = cfg

    def __call__(self, row: Row, completion: str) -> float:
        """1.0 if equal, else 0.0."""
        if self.cfg.drop_reasoning:
            completion = completion.rpartition("</think>")[2]
        return float(self._plain(completion) == self._plain(expected_answer(row)))

    def _plain(self, text: str) -> str:
        text = text.strip() if self.cfg.strip else text
        return text.casefold() if self.cfg.ignore_case else text


VERIFIERS: Registry[type[Verifier]] = Registry(
    "verifier",
    "flowtune.verifiers",
    {"exact_match": "algorithms.rewards.verifiers:ExactMatch"},
    config=("Config", VerifierConfig),
)
