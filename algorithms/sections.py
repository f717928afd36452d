"""Sections of a document that are one of a registry's kinds: `{kind: …, params: {…}}`.

A field annotated `Annotated[Base, OneOf(registry, section)]` is a union, told apart by `kind`, over
what the registry holds when its model is built; a rebuild of the model takes in new kinds.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    create_model,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

from algorithms.imports import raised
from backends.errors import FlowtuneError, Problem, UserError
from backends.registry import Registry, Row

_built: list[Any] = []
"""The builders of `with_params`, each with its cache."""


class Section(BaseModel):
    """Base of the parts of an experiment: unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True, eq=False)
class OneOf:
    """Marks a field that holds one of a registry's kinds; `section` makes a row's model class."""

    registry: Registry[Any]
    section: Callable[[Row[Any]], type[BaseModel]]

    def members(self) -> dict[str, type[BaseModel]]:
        """The section class of each kind there is at this moment."""
        return {kind: self.section(row) for kind, row in self.registry.rows().items()}

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        choices = {kind: handler.generate_schema(m) for kind, m in self.members().items()}
        if not choices:
            return handler.generate_schema(_none_installed(self.registry.what))
        named = {"pydantic_js_updates": {"title": self.registry.what.capitalize()}}
        return core_schema.tagged_union_schema(dict(choices), discriminator="kind", metadata=named)


def with_params(
    base: type[BaseModel], config: Callable[[Any], type[BaseModel]]
) -> Callable[[Row[Any]], type[BaseModel]]:
    """A builder of section classes `{kind, params}` from rows; `config` gives an item's params.

    A row's class is built once. `params` may be left out where all of its fields have defaults.
    """

    @cache
    def build(row: Row[Any]) -> type[BaseModel]:
        params = config(row.item)
        required = any(field.is_required() for field in params.model_fields.values())
        words = "".join(word.title() for word in re.split(r"\W|_", row.kind))
        default: dict[str, Any] = {} if required else {"default_factory": params}
        fields: dict[str, Any] = {
            "kind": (Literal[row.kind], row.kind),
            "params": (params, Field(title="Params", **default)),
        }
        section: type[BaseModel] = create_model(
            f"{words}{base.__name__}",
            __base__=base,
            __doc__=row.summary,
            __cls_kwargs__={"title": row.kind},
            **fields,
        )
        return section

    _built.append(build)
    return build


def built(registry: Registry[Any], kind: str, params: BaseModel, where: str) -> Any:
    """One of a registry's kinds, made with its parameters; `where` is the section that names it.

    Raises UserError if it cannot be made; errors of ours pass as they are.
    """
    item = registry[kind]
    try:
        return item(params)
    except FlowtuneError:
        raise
    except (Exception, SystemExit) as error:
        what = f"the __init__ of {kind!r} raised {raised(error, item)}"
        raise UserError(Problem(f"{where}.kind", what, "mend what it says")) from error


def forget_sections() -> None:
    """Build every row's class anew when it is next asked for: its parameters have changed."""
    for build in _built:
        build.cache_clear()


@cache
def _none_installed(what: str) -> type[BaseModel]:
    class NoneInstalled(Section):
        """There is no kind to choose from."""

        kind: str

        @model_validator(mode="before")
        @classmethod
        def _refuse(cls, value: Any) -> Any:
            raise ValueError(f"no {what} is installed")

    return NoneInstalled
