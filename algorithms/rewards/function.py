"""A verifier that is a Python function of the user's own."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, ClassVar

from pydantic import BaseModel, Field, JsonValue, model_validator

from algorithms.data.shapes import Row
from algorithms.imports import import_path
from algorithms.rewards.verifiers import VerifierConfig

if TYPE_CHECKING:
    from typing import Self


class FunctionConfig(VerifierConfig):
    """Which function, and what it is told besides the row and the answer."""

    path: str = Field(
        description="`module:function`, importable from the working directory; called with the "
        "row and the completion. It may be async.",
        examples=["my_rewards:is_polite"],
    )
    arguments: dict[str, JsonValue] = Field(
        default_factory=dict, description="Further keyword arguments."
    )

    @model_validator(mode="after")
    def _can_be_called(self) -> Self:
        function = import_path(self.path)
        if not inspect.isroutine(function):
            raise ValueError(f"{self.path} is no function: name one that takes (row, completion)")
        try:
            inspect.signature(function).bind({}, "", **self.arguments)
        except TypeError as error:
            raise ValueError(
                f"{self.path} cannot be called with (row, completion) and the arguments "
                f"{sorted(self.arguments)}: {error}"
            ) from None
        return self


class Function:
    """What a Python function says, given as `module:function`: `f(row, completion) -> float`."""

    Config: ClassVar[type[BaseModel]] = FunctionConfig

    def __init__(self, cfg: FunctionConfig) -> None:
        self.cfg = cfg
        self.function: Callable[..., float | Awaitable[float]] = import_path(cfg.path)

    def __call__(self, row: Row, completion: str) -> float | Awaitable[float]:
        """The function's value, whatever number it is."""
        return self.function(row, completion, **self.cfg.arguments)

    def code(self) -> list[object]:
        """The function: other code scores otherwise."""
        return [self.function]
