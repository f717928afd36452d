"""A verifier made of others."""

from __future__ import annotations

import asyncio
import math
import operator
from typing import TYPE_CHECKING, ClassVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from algorithms.data.shapes import Row
from algorithms.rewards import scoring
from algorithms.rewards.section import VerifierSection
from algorithms.rewards.verifiers import VERIFIERS, VerifierConfig
from backends.base import Backend, Tokenizer
from backends.errors import Problem

if TYPE_CHECKING:
    from typing import Self


class Part(BaseModel):
    """One verifier, and how much it counts."""

    model_config = ConfigDict(extra="forbid")

    kind: str = Field(description="The verifier's kind.")
    params: dict[str, JsonValue] = Field(default_factory=dict, description="Its parameters.")
    weight: float = Field(1.0, gt=0, description="How much it counts, next to the others.")

    @model_validator(mode="after")
    def _is_valid(self) -> Self:
        known = sorted(VERIFIERS.rows())
        if self.kind not in known:
            raise ValueError(f"there is no verifier {self.kind!r}: choose from {', '.join(known)}")
        if self.kind == "weighted":
            raise ValueError("weighted holds no weighted: put its verifiers into this list")
        try:
            self.section()
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            field = ".".join(["params", *map(str, first["loc"])])
            raise ValueError(f"{field}: {first['msg'].removeprefix('Value error, ')}") from None
        return self

    def section(self) -> VerifierSection:
        """The part as a section of a document."""
        params = VERIFIERS[self.kind].Config.model_validate(self.params)
        return VerifierSection.model_validate({"kind": self.kind, "params": params})


class WeightedConfig(VerifierConfig):
    """Which verifiers. Each keeps its own time limit."""

    timeout_seconds: float = Field(
        3600, gt=0, description="Longest time that one score may take; longer is an error."
    )
    verifiers: list[Part] = Field(min_length=1, description="The verifiers and their weights.")


class Weighted:
    """The weighted mean of several verifiers' rewards."""

    Config: ClassVar[type[BaseModel]] = WeightedConfig

    def __init__(self, cfg: WeightedConfig) -> None:
        self.weights = [part.weight for part in cfg.verifiers]
        self.sections = [part.section() for part in cfg.verifiers]
        self.verifiers = [section.build() for section in self.sections]

    async def __call__(self, row: Row, completion: str) -> float:
        """sum of weight * reward, over the sum of the weights."""
        rewards = await asyncio.gather(
            *(
                scoring.measure(section, verifier, row, completion)
                for section, verifier in zip(self.sections, self.verifiers, strict=True)
            )
        )
        total = math.fsum(map(operator.mul, self.weights, rewards))
        return total / math.fsum(self.weights)

    async def bind(self, backend: Backend, tokenizer: Tokenizer) -> None:
        """Bind those that ask a model."""
        for verifier in self.verifiers:
            await scoring.bind(verifier, backend, tokenizer)

    def check_row(self, row: Row, place: str) -> Problem | None:
        """The first thing that any of them has against a row."""
        problems = (scoring.check_row(verifier, row, place) for verifier in self.verifiers)
        return next((problem for problem in problems if problem is not None), None)

    def code(self) -> list[object]:
        """All of them."""
        return [item for verifier in self.verifiers for item in scoring.code_behind(verifier)]
