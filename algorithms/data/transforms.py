"""What is done to rows between their source and the run: the contract, and the list of kinds.

A transform looks at one row at a time (`RowTransform`), or says which rows come, and in which order
(`OrderTransform`). It is a class with a `Config` of its parameters; a package brings its own with
an entry point in the group `flowtune.transforms`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict

from algorithms.data.shapes import Row
from algorithms.sections import OneOf, Section, built, with_params
from backends.registry import Registry


class TransformConfig(BaseModel):
    """Base of a transform's parameters."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class RowTransform(ABC):
    """Changes each row by itself, or leaves it out."""

    Config: ClassVar[type[BaseModel]] = TransformConfig

    def __init__(self, cfg: Any) -> None:
        self.cfg = cfg

    @abstractmethod
    def apply(self, row: Row) -> Row | None:
        """The row as it is to be; None leaves it out. The one that is given stays as it is.

        Raises ValueError, saying what is wrong, for a row that it cannot take.
        """


class OrderTransform(ABC):
    """Says which of the rows there are come, and in which order, whatever they hold."""

    Config: ClassVar[type[BaseModel]] = TransformConfig

    def __init__(self, cfg: Any) -> None:
        self.cfg = cfg

    @abstractmethod
    def order(self, n_rows: int) -> Sequence[int]:
        """The numbers (from 0) of the rows that come, in their order."""


Transform = RowTransform | OrderTransform

TRANSFORMS: Registry[Callable[[Any], Transform]] = Registry(
    "transform",
    "flowtune.transforms",
    {
        "filter": "algorithms.data.transform_kinds:Filter",
        "function": "algorithms.data.transform_kinds:Function",
        "limit": "algorithms.data.transform_kinds:Limit",
        "parse_json": "algorithms.data.transform_kinds:ParseJson",
        "rename": "algorithms.data.transform_kinds:Rename",
        "select": "algorithms.data.transform_kinds:Select",
        "shuffle": "algorithms.data.transform_kinds:Shuffle",
        "system_prompt": "algorithms.data.transform_kinds:SystemPrompt",
        "template": "algorithms.data.transform_kinds:Template",
    },
    config=("Config", BaseModel),
    bases=(RowTransform, OrderTransform),
)


class TransformSection(Section):
    """What is done to the rows."""

    kind: str
    params: BaseModel

    def build(self, where: str = "transform") -> Transform:
        """The transform, ready for rows. Raises UserError, naming `where`, if that fails."""
        transform: Transform = built(TRANSFORMS, self.kind, self.params, where)
        return transform


def _config(item: Any) -> type[BaseModel]:
    config: type[BaseModel] = item.Config
    return config


TransformField = Annotated[
    TransformSection, OneOf(TRANSFORMS, with_params(TransformSection, _config))
]
