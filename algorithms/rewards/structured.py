"""Verifiers for answers that are JSON: one that a schema describes, and calls of tools."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import BaseModel, Field, field_validator, model_validator

from algorithms.data.shapes import Row, last_assistant
from algorithms.rewards.verifiers import AnswerConfig, VerifierConfig
from backends.errors import Problem, UserError

if TYPE_CHECKING:
    from typing import Self

FENCED = re.compile(r"\s*```(?:json)?[ \t]*\n(.*)\n[ \t]*```\s*", re.DOTALL)
TOOL_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


def parse_json(text: str) -> Any:
    """A JSON value, bare or alone in a code block. Raises ValueError for anything else."""
    fenced = FENCED.fullmatch(text)
    try:
        return json.loads(fenced.group(1) if fenced else text, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _no_number(name: str) -> Any:
    raise ValueError(f"JSON knows no {name}")


def same_json(a: Any, b: Any) -> bool:
    """Equality of JSON values: 1 and 1.0 are one number, but true is none."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same_json(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same_json, a, b))
    return bool(a == b)


# --- json_schema --------------------------------------------------------------------------------


class JsonSchemaConfig(AnswerConfig):
    """Where the schema comes from: one of `json_schema` and `schema_field`."""

    json_schema: dict[str, Any] | None = Field(
        None,
        description="The JSON Schema of every answer.",
        examples=[{"type": "object", "required": ["name"]}],
    )
    schema_field: str | None = Field(
        None, description="The row's field that holds the schema of its answer."
    )

    @field_validator("json_schema")
    @classmethod
    def _is_a_schema(cls, schema: dict[str, Any] | None) -> dict[str, Any] | None:
        if schema is not None and (wrong := schema_error(schema)) is not None:
            raise ValueError(wrong)
        return schema

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.json_schema is None) == (self.schema_field is None):
            raise ValueError("give json_schema or schema_field, one of the two")
        return self


def schema_error(schema: Any) -> str | None:
    """Why something is no JSON Schema; None if it is one."""
    from jsonschema.exceptions import SchemaError

    try:
        _validator(schema)
    except SchemaError as error:
        place = ".".join(map(str, error.absolute_path)) or "the schema"
        return f"no JSON Schema: {place}: {error.message}"
    return None


def _validator(schema: Any) -> Any:
    """Checks values by a schema. References to other addresses are not followed."""
    from jsonschema.validators import Draft202012Validator, validator_for
    from referencing import Registry

    cls = validator_for(schema, default=Draft202012Validator)
    cls.check_schema(schema)
    return cls(schema, registry=Registry())


class JsonSchema:
    """1 if the answer is JSON that a schema allows; the schema is the row's, or one for all."""

    Config: ClassVar[type[BaseModel]] = JsonSchemaConfig

    def __init__(self, cfg: JsonSchemaConfig) -> None:
        self.cfg = cfg
        self.validator = None if cfg.json_schema is None else _validator(cfg.json_schema)

    def __call__(self, row: Row, completion: str) -> float:
        """1.0 if valid, else 0.0; JSON may stand bare or alone in a code block."""
        validator = self.validator or _validator(row[self.cfg.schema_field or ""])
        try:
            value = parse_json(self.cfg.answer(completion))
        except ValueError:
            return 0.0
        return float(validator.is_valid(value))

    def check_row(self, row: Row, place: str) -> Problem | None:
        """A row brings a schema of its own where the parameters have none."""
        field = self.cfg.schema_field
        if field is None:
            return None
        if field not in row:
            return Problem(place, f"has no {field}", "add the JSON Schema of its answer")
        wrong = schema_error(row[field])
        return None if wrong is None else Problem(place, f"{field} is {wrong}", "mend the schema")


# --- tool_calls ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool's name and the arguments it is called with."""

    name: str
    arguments: dict[str, Any]

    @classmethod
    def read(cls, value: Any) -> ToolCall:
        """A call as templates write it, or as the OpenAI API does. Raises ValueError."""
        if isinstance(value, dict) and isinstance(value.get("function"), dict):
            value = value["function"]
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            raise ValueError("a call has a name")
        arguments = value.get("arguments") or {}
        if isinstance(arguments, str):
            arguments = parse_json(arguments)
        if not isinstance(arguments, dict):
            raise ValueError(f"the arguments of {value['name']} are no object")
        return cls(value["name"], arguments)


def calls_in(answer: str) -> list[ToolCall]:
    """The calls of an answer, [] if it makes none. Raises ValueError for one that is no call.

    They stand in `<tool_call>` tags (Hermes, Qwen), or the whole answer is a JSON list of calls, a
    call, or an object with `tool_calls`, as the OpenAI API writes them.
    """
    if "<tool_call>" in answer:
        return [ToolCall.read(parse_json(call)) for call in TOOL_CALL.findall(answer)]
    try:
        value = parse_json(answer)
    except ValueError:
        return []  # prose
    if isinstance(value, dict):
        value = value.get("tool_calls", [value])
    return [ToolCall.read(call) for call in value] if isinstance(value, list) else []


class ToolCallsConfig(VerifierConfig):
    """What of a call is compared."""

    ordered: bool = Field(True, description="The calls must come in the order of the row's.")
    arguments: Literal["equal", "ignored"] = Field(
        "equal", description="Compare the arguments as JSON values, or the names of tools only."
    )
    drop_reasoning: bool = Field(
        True, description="Read what follows the last </think> of an answer that has one."
    )


class ToolCalls:
    """1 if the answer makes just the calls of the row's last assistant turn; both may be none."""

    Config: ClassVar[type[BaseModel]] = ToolCallsConfig

    def __init__(self, cfg: ToolCallsConfig) -> None:
        self.cfg = cfg

    def __call__(self, row: Row, completion: str) -> float:
        """1.0 if the calls are the same, else 0.0; a malformed call is a wrong one."""
        expected = self._expected(row)
        if self.cfg.drop_reasoning:
            completion = completion.rpartition("</think>")[2]
        try:
            calls = calls_in(completion)
        except ValueError:
            return 0.0
        if len(calls) != len(expected):
            return 0.0
        if self.cfg.ordered:
            return float(all(map(self._same, calls, expected)))
        for call in expected:  # being the same is an equivalence, so any match is a good one
            match = next((i for i, made in enumerate(calls) if self._same(made, call)), None)
            if match is None:
                return 0.0
            calls.pop(match)
        return 1.0

    def check_row(self, row: Row, place: str) -> Problem | None:
        """The row's last assistant turn, and each of its calls, must be readable."""
        try:
            self._expected(row)
        except UserError as error:
            (problem,) = error.problems
            return Problem(place, problem.what, problem.remedy)
        return None

    def _same(self, a: ToolCall, b: ToolCall) -> bool:
        if self.cfg.arguments == "ignored":
            return a.name == b.name
        return a.name == b.name and same_json(a.arguments, b.arguments)

    def _expected(self, row: Row) -> list[ToolCall]:
        turns = row.get("messages", row.get("completion"))
        if isinstance(turns, str):
            turns = [{"role": "assistant", "content": turns}]
        if not turns or last_assistant(turns) < 0:
            remedy = "end the row with the assistant turn that makes the right calls"
            raise UserError(Problem("row", "has no assistant turn to compare with", remedy))
        turn = turns[last_assistant(turns)]
        try:
            if turn.get("tool_calls"):
                return [ToolCall.read(call) for call in turn["tool_calls"]]
            return calls_in(str(turn.get("content") or ""))
        except ValueError as error:
            remedy = 'a call is {"name": …, "arguments": {…}}'
            raise UserError(Problem("row", f"holds a bad tool call: {error}", remedy)) from error
