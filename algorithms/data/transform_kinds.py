"""The transforms that are built in. Columns may lie deeper: `meta.level` is level in meta."""

from __future__ import annotations

import difflib
import json
import re
import string
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, field_validator, model_validator

from algorithms.data.order import epoch_order
from algorithms.data.shapes import Message, Row
from algorithms.data.transforms import OrderTransform, RowTransform, TransformConfig
from algorithms.imports import import_path

if TYPE_CHECKING:
    from typing import Self

_ABSENT: Any = object()


def column(row: Row, name: str) -> Any:
    """What stands in a column. Raises ValueError naming those that are there instead."""
    value = _find(row, name)
    if value is _ABSENT:
        raise ValueError(_no_column(name, row))
    return value


def _find(row: Row, name: str) -> Any:
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, dict) or part not in value:
            return _ABSENT
        value = value[part]
    return value


def _no_column(name: str, names: Iterable[str]) -> str:
    names = list(names)
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"has no column {name!r}; {hint}it has {', '.join(map(repr, names)) or 'none'}"


# --- columns ------------------------------------------------------------------------------------


class RenameConfig(TransformConfig):
    """Which columns, and what they are called then."""

    columns: dict[str, str] = Field(
        min_length=1,
        description="The old name of each column, and its new one.",
        examples=[{"question": "prompt", "answer": "completion"}],
    )

    @field_validator("columns")
    @classmethod
    def _names_differ(cls, columns: dict[str, str]) -> dict[str, str]:
        if len(set(columns.values())) < len(columns):
            raise ValueError(f"gives two columns one name: {columns}")
        return columns


class Rename(RowTransform):
    """Give columns other names."""

    Config: ClassVar[type[BaseModel]] = RenameConfig

    def apply(self, row: Row) -> Row:
        """The row under its new names, in the order it has."""
        columns: dict[str, str] = self.cfg.columns
        for old, new in columns.items():
            if old not in row:
                raise ValueError(_no_column(old, row))
            if new in row and new not in columns:
                raise ValueError(f"has a column {new!r} already, so {old!r} cannot take its name")
        return {columns.get(name, name): value for name, value in row.items()}


class SelectConfig(TransformConfig):
    """Which columns stay."""

    columns: list[str] = Field(min_length=1, description="The columns that are kept.")


class Select(RowTransform):
    """Keep some columns and no others."""

    Config: ClassVar[type[BaseModel]] = SelectConfig

    def apply(self, row: Row) -> Row:
        """The columns in the order that is asked for."""
        for name in self.cfg.columns:
            if name not in row:
                raise ValueError(_no_column(name, row))
        return {name: row[name] for name in self.cfg.columns}


class ParseJsonConfig(TransformConfig):
    """Which columns hold JSON."""

    columns: list[str] = Field(
        min_length=1,
        description="Columns that hold JSON as text, as a csv file may.",
        examples=[["messages"]],
    )


class ParseJson(RowTransform):
    """Read columns that hold JSON as text."""

    Config: ClassVar[type[BaseModel]] = ParseJsonConfig

    def apply(self, row: Row) -> Row:
        """The row with what the texts say in their place."""
        parsed: Row = {}
        for name in self.cfg.columns:
            text = column(row, name)
            if not isinstance(text, str):
                raise ValueError(f"column {name!r} is a {type(text).__name__}, not text")
            try:
                parsed[name] = json.loads(text)
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"column {name!r} is not JSON: {error.msg} at column {error.colno}"
                ) from None
        return row | parsed


# --- which rows ---------------------------------------------------------------------------------


class FilterConfig(TransformConfig):
    """A column and what is asked of it; a row stays if all of it holds."""

    column: str = Field(description="The column that is looked at.", examples=["meta.level"])
    equals: JsonValue = Field(None, description="It is this.")
    not_equals: JsonValue = Field(None, description="It is not this.")
    one_of: list[JsonValue] | None = Field(None, description="It is one of these.")
    none_of: list[JsonValue] | None = Field(None, description="It is none of these.")
    at_least: float | None = Field(None, description="The number is this or more.")
    at_most: float | None = Field(None, description="The number is this or less.")
    min_length: int | None = Field(None, ge=0, description="Characters of text, items of a list.")
    max_length: int | None = Field(None, ge=0, description="Characters of text, items of a list.")
    contains: str | None = Field(None, description="The text holds this.")
    matches: str | None = Field(None, description="A regular expression found in the text.")

    @field_validator("matches")
    @classmethod
    def _is_a_pattern(cls, matches: str | None) -> str | None:
        try:
            re.compile(matches or "")
        except re.error as error:
            raise ValueError(f"is no regular expression ({error}): {matches!r}") from None
        return matches

    @model_validator(mode="after")
    def _asks_something(self) -> Self:
        if all(getattr(self, name) is None for name in _CONDITIONS):
            known = ", ".join(_CONDITIONS)
            raise ValueError(f"keeps every row: say what is asked of the column ({known})")
        return self


_CONDITIONS: dict[str, tuple[type | tuple[type, ...], Callable[[Any, Any], bool]]] = {
    "equals": (object, lambda value, wanted: value == wanted),
    "not_equals": (object, lambda value, wanted: value != wanted),
    "one_of": (object, lambda value, wanted: value in wanted),
    "none_of": (object, lambda value, wanted: value not in wanted),
    "at_least": ((int, float), lambda value, wanted: value >= wanted),
    "at_most": ((int, float), lambda value, wanted: value <= wanted),
    "min_length": ((str, list), lambda value, wanted: len(value) >= wanted),
    "max_length": ((str, list), lambda value, wanted: len(value) <= wanted),
    "contains": (str, lambda value, wanted: wanted in value),
    "matches": (str, lambda value, wanted: re.search(wanted, value) is not None),
}
"""Of each condition, the types of value it can be asked of, and whether it holds."""


class Filter(RowTransform):
    """Keep the rows of which a column is as asked."""

    Config: ClassVar[type[BaseModel]] = FilterConfig

    def apply(self, row: Row) -> Row | None:
        """The row if every condition holds. Raises ValueError for one that has no answer."""
        cfg: FilterConfig = self.cfg
        value = column(row, cfg.column)
        for name, (types, holds) in _CONDITIONS.items():
            wanted = getattr(cfg, name)
            if wanted is None:
                continue
            if not isinstance(value, types):
                kind = type(value).__name__
                raise ValueError(f"column {cfg.column!r} is a {kind}: {name} cannot be asked of it")
            if not holds(value, wanted):
                return None
        return row


class ShuffleConfig(TransformConfig):
    """What decides the order."""

    seed: int = Field(0, ge=0, description="Another seed gives another order.")


class Shuffle(OrderTransform):
    """Mix the rows: with a limit behind it, a random sample; a run mixes each epoch anyway."""

    Config: ClassVar[type[BaseModel]] = ShuffleConfig

    def order(self, n_rows: int) -> Sequence[int]:
        """The order of a run's first epoch under this seed."""
        return array("q", epoch_order(n_rows, self.cfg.seed, 0).tobytes())


class LimitConfig(TransformConfig):
    """Which rows in a row."""

    rows: int = Field(ge=1, description="So many rows at most.")
    skip: int = Field(0, ge=0, description="So many before them are left out.")


class Limit(OrderTransform):
    """Take the first rows, or so many behind those that are skipped."""

    Config: ClassVar[type[BaseModel]] = LimitConfig

    def order(self, n_rows: int) -> Sequence[int]:
        """As the rows come."""
        return range(min(self.cfg.skip, n_rows), min(self.cfg.skip + self.cfg.rows, n_rows))


# --- shapes -------------------------------------------------------------------------------------

SHAPE_COLUMNS = ("messages", "prompt", "completion", "chosen", "rejected")


class TurnTemplate(BaseModel):
    """One turn of the conversation."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: str


class TemplateConfig(TransformConfig):
    """Texts in which {column} stands for what a column says; {{ and }} are braces."""

    messages: list[TurnTemplate] | None = Field(
        None,
        min_length=1,
        description="The turns of a conversation.",
        examples=[
            [
                {"role": "user", "content": "{question}"},
                {"role": "assistant", "content": "{answer}"},
            ]
        ],
    )
    prompt: str | None = Field(None, description="A prompt as plain text.")
    completion: str | None = Field(None, description="What follows the prompt.")
    chosen: str | None = Field(None, description="The better answer of a preference.")
    rejected: str | None = Field(None, description="The worse one.")

    @model_validator(mode="after")
    def _makes_a_shape(self) -> Self:
        texts = [name for name in SHAPE_COLUMNS[1:] if getattr(self, name) is not None]
        if self.messages is not None and texts:
            raise ValueError(f"makes messages and {texts[0]}: a row has one shape, keep one")
        if self.messages is None and not texts:
            raise ValueError("makes nothing: give messages, or prompt and completion")
        for text in self.texts():
            compile_template(text)
        return self

    def texts(self) -> list[str]:
        """All texts there are."""
        turns = [turn.content for turn in self.messages or []]
        return turns + [text for name in SHAPE_COLUMNS[1:] if (text := getattr(self, name))]


def compile_template(text: str) -> list[tuple[str, str | None]]:
    """Each piece of literal text, and the column behind it. Raises ValueError."""
    try:
        pieces = list(string.Formatter().parse(text))
    except ValueError as error:
        raise ValueError(f"{text!r} is no template ({error}); write {{{{ for a brace") from None
    for _, name, spec, conversion in pieces:
        if name is not None and (
            spec or conversion or not re.fullmatch(r"[\w -]+(\.[\w -]+)*", name)
        ):
            raise ValueError(f"{text!r}: {{{name}}} is no column's plain name")
    return [(literal, name) for literal, name, _, _ in pieces]


class Template(RowTransform):
    """Write messages, or prompt and completion, from what other columns say."""

    Config: ClassVar[type[BaseModel]] = TemplateConfig

    def __init__(self, cfg: TemplateConfig) -> None:
        super().__init__(cfg)
        self._compiled = {text: compile_template(text) for text in cfg.texts()}

    def apply(self, row: Row) -> Row:
        """The row with the new shape in the place of any that it had; other columns stay."""
        cfg: TemplateConfig = self.cfg
        made: Row = {}
        if cfg.messages is not None:
            made["messages"] = [
                {"role": turn.role, "content": self._fill(turn.content, row)}
                for turn in cfg.messages
            ]
        for name in SHAPE_COLUMNS[1:]:
            if (text := getattr(cfg, name)) is not None:
                made[name] = self._fill(text, row)
        return {name: value for name, value in row.items() if name not in SHAPE_COLUMNS} | made

    def _fill(self, text: str, row: Row) -> str:
        parts: list[str] = []
        for literal, name in self._compiled.get(text, []):
            parts.append(literal)
            if name is not None:
                value = column(row, name)
                if not isinstance(value, str | int | float):
                    kind = "empty" if value is None else f"a {type(value).__name__}"
                    raise ValueError(f"column {name!r} is {kind}, which a text cannot hold")
                parts.append(str(value))
        return "".join(parts)


class SystemPromptConfig(TransformConfig):
    """What it says."""

    content: str = Field(min_length=1, description="The system turn's text.")
    replace: bool = Field(False, description="Also where a row has a system turn of its own.")


class SystemPrompt(RowTransform):
    """Put a system turn before conversations that have none."""

    Config: ClassVar[type[BaseModel]] = SystemPromptConfig

    def apply(self, row: Row) -> Row:
        """The turn goes before messages, a prompt of turns, or the turns of both answers."""
        names = [name for name in ("messages", "prompt") if isinstance(row.get(name), list)]
        if not names:
            names = [name for name in ("chosen", "rejected") if isinstance(row.get(name), list)]
        if not names:
            raise ValueError("has no turns that a system turn could stand before")
        return row | {name: self._put(row[name]) for name in names}

    def _put(self, turns: list[Message]) -> list[Message]:
        own = bool(turns) and isinstance(turns[0], dict) and turns[0].get("role") == "system"
        if own and not self.cfg.replace:
            return turns
        return [{"role": "system", "content": self.cfg.content}, *turns[1 if own else 0 :]]


# --- code of one's own --------------------------------------------------------------------------


class FunctionConfig(TransformConfig):
    """Which function."""

    path: str = Field(
        description="`module:function`, importable from the working directory; called with a row, "
        "it returns the row as it is to be, or None to leave it out.",
        examples=["my_data:clean"],
    )

    @field_validator("path")
    @classmethod
    def _can_be_called(cls, path: str) -> str:
        if not callable(import_path(path)):
            raise ValueError(f"{path} is no function: name one that takes a row")
        return path


class Function(RowTransform):
    """What a Python function makes of each row, given as `module:function`."""

    Config: ClassVar[type[BaseModel]] = FunctionConfig

    def __init__(self, cfg: FunctionConfig) -> None:
        super().__init__(cfg)
        self.function: Callable[[Row], Row | None] = import_path(cfg.path)

    def apply(self, row: Row) -> Row | None:
        """What the function returns."""
        return self.function(dict(row))
