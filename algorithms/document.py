"""A YAML file as a document, changes to it from the command line, and errors in it for people."""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from algorithms.data.files import nearest_file
from algorithms.sections import OneOf
from backends.errors import Problem, UserError
from backends.registry import Registry

Document = dict[str, Any]


# --- reading ------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """Plain YAML that refuses a key given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.MarkedYAMLError(
                        problem=f"the key {key.value!r} stands here twice",
                        problem_mark=key.start_mark,
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_document(path: str | Path) -> Document:
    """The mapping that a YAML file holds. Raises UserError with file and line."""
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(
            Problem(str(path), "there is no such file", nearest_file(str(path)))
        ) from None
    except IsADirectoryError:
        raise UserError(Problem(str(path), "is a folder", "name a YAML file in it")) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(Problem(str(path), f"cannot be read ({error})")) from error
    try:
        document = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise UserError(_syntax_problem(error, str(path))) from error
    if not isinstance(document, dict):
        raise UserError(
            Problem(
                str(path),
                "holds no experiment" if document is None else f"holds a {_kind(document)}",
                "an experiment is a mapping: name: …, model: …, data: …, algorithm: …",
            )
        )
    return document


def _syntax_problem(error: yaml.YAMLError, path: str) -> Problem:
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return Problem(path, f"not YAML: {str(error).splitlines()[0]}")
    mark = error.problem_mark
    return Problem(
        f"{path}:{mark.line + 1}",
        f"not YAML: {error.problem} (column {mark.column + 1})",
        "mend the line, or the one before it",
    )


# --- changes from the command line --------------------------------------------------------------


def with_overrides(document: Document, overrides: Iterable[str]) -> Document:
    """The document with each `a.b=value` put in; values are YAML, list items go by their number.

    A path that leads nowhere is found when the document is checked.
    """
    changed: Document = _copy(document)
    for override in overrides:
        path, equals, text = override.partition("=")
        parts = [part for part in re.split(r"[.\[\]]+", path.strip()) if part]
        where = f"--set {override}"
        if not equals or not parts:
            raise UserError(Problem(where, "not an assignment", "write --set section.field=value"))
        try:
            value = yaml.load(text, Loader=_Loader)
        except yaml.YAMLError as error:
            raise UserError(Problem(where, f"{text!r} is not YAML", "quote the value")) from error
        _put(changed, parts, value, where)
    return changed


def _put(document: Document, parts: list[str], value: Any, where: str) -> None:
    here: Any = document
    for depth, part in enumerate(parts):
        last = depth == len(parts) - 1
        if isinstance(here, list):
            if not part.isdigit() or int(part) >= len(here):
                path = ".".join(parts[:depth])
                remedy = f"count from 0 to {len(here) - 1}" if here else f"{path} is empty"
                raise UserError(Problem(where, f"{path} has no item {part}", remedy))
            index: Any = int(part)
        elif isinstance(here, dict):
            index = part
            if not last and here.get(part) is None:
                here[part] = {}
        else:
            path = ".".join(parts[:depth])
            raise UserError(
                Problem(where, f"{path} is {_show(here)}, which has no fields", "check the path")
            )
        if last:
            here[index] = value
        else:
            here = here[index]


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value


# --- errors for people --------------------------------------------------------------------------


def explain(error: ValidationError, root: type[BaseModel]) -> list[Problem]:
    """Each mistake as field, value and remedy; fields are named as they stand in the YAML."""
    problems: dict[str, Problem] = {}
    for detail in error.errors(include_url=False):
        if detail["type"] == "default_factory_not_called":
            continue  # follows from a mistake that is reported by itself
        problem = _explain(detail, root)
        known = problems.get(problem.where)
        if known is not None:  # alternatives of one field: a string or a list
            what = f"{known.what}; or {problem.what}"
            problem = Problem(problem.where, what, known.remedy or problem.remedy)
        problems[problem.where] = problem
    return list(problems.values())


def _explain(detail: ErrorDetails, root: type[BaseModel]) -> Problem:
    where, holder, here, union = _locate(root, detail["loc"])
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    name = str(detail["loc"][-1]) if detail["loc"] else ""
    if kind == "missing":
        field = holder.model_fields.get(name) if holder else None
        return Problem(where, "is missing", f"add it: {_describe(field)}")
    if kind == "extra_forbidden":
        fields = list(holder.model_fields) if holder else []
        remedy = _suggest(name, fields, "the fields here are")
        if kinds := _kinds_with(name, holder, union):
            remedy = f"leave it out: it is a field of {', '.join(kinds)} only"
        return Problem(where, "unknown field", remedy)
    if kind in ("union_tag_invalid", "union_tag_not_found") and isinstance(here, OneOf):
        return _unknown_kind(where, kind, context, here.registry)
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return Problem(where, f"{_show(value)} is not a section", "write its fields below it")
    message = detail["msg"]
    if kind == "too_short":
        return Problem(
            where, f"{_show(value)} is too short", f"give {context['min_length']} or more"
        )
    if kind == "literal_error":
        expected = re.findall(r"'([^']*)'", str(context.get("expected", "")))
        return Problem(
            where, f"{_show(value)} is not known", _suggest(str(value), expected, "choose from")
        )
    if kind == "value_error":
        return Problem(where or "experiment", message.removeprefix("Value error, "))
    if message.startswith("Input should"):
        return Problem(where, f"{_show(value)}{message.removeprefix('Input')}")
    return Problem(where, f"{message} (it is {_show(value)})")


def _unknown_kind(
    where: str, kind: str, context: Mapping[str, Any], registry: Registry[Any]
) -> Problem:
    known = sorted(registry.rows())
    if kind == "union_tag_not_found":
        return Problem(f"{where}.kind", "is missing", f"choose from {', '.join(known)}")
    tag = str(context.get("tag"))
    if tag in registry.broken():
        return Problem(
            f"{where}.kind", f"{tag!r} cannot be used", f"mend it: {registry.broken()[tag]}"
        )
    return Problem(
        f"{where}.kind",
        f"there is no {registry.what} {tag!r}",
        _suggest(tag, known, f"the {registry.what}s are"),
    )


def _kinds_with(name: str, holder: type[BaseModel] | None, union: OneOf | None) -> list[str]:
    """The other kinds of a union whose `params` have such a field, where `holder` is of one's."""
    members = union.members() if union else {}
    params = {
        kind: _expected(section.model_fields["params"].annotation)
        for kind, section in members.items()
        if "params" in section.model_fields
    }
    if holder not in params.values():
        return []
    return sorted(kind for kind, fields in params.items() if name in fields.model_fields)


def _locate(root: type[BaseModel], loc: Sequence[int | str]) -> tuple[str, Any, Any, OneOf | None]:
    """The path as in the YAML, the model that holds its last field, and what is expected there.

    The last is the union that the path went through last, if any. Union tags in pydantic's
    location, which no YAML holds, are left out.
    """
    path, holder, union = "", None, None
    here: Any = root
    for part in loc:
        if isinstance(here, OneOf):
            union = here
            here = here.members().get(str(part))
        elif isinstance(part, int):
            path += f"[{part}]"
            here = _expected((get_args(here) or (None,))[0])
        elif isinstance(here, type) and issubclass(here, BaseModel):
            path, holder = f"{path}.{part}", here
            field = here.model_fields.get(part)
            here = _expected(field.annotation, field.metadata) if field else None
        elif get_origin(here) is dict:
            path += f".{part}"
            here = _expected(get_args(here)[1])
    return path.lstrip("."), holder, here, union


def _expected(annotation: Any, metadata: Sequence[Any] = ()) -> Any:
    """What stands at a field: a OneOf, a model, or a plain annotation without its None."""
    for mark in metadata:
        if isinstance(mark, OneOf):
            return mark
    if get_origin(annotation) is Annotated:
        return _expected(get_args(annotation)[0], get_args(annotation)[1:])
    if get_origin(annotation) in (Union, types.UnionType):
        alternatives = [arg for arg in get_args(annotation) if arg is not type(None)]
        return _expected(alternatives[0]) if len(alternatives) == 1 else annotation
    return annotation


def _describe(field: Any) -> str:
    if field is None or not field.description:
        return "the field has no default"
    example = f" For example {field.examples[0]}." if field.examples else ""
    return f"{field.description}{example}"


def _suggest(name: str, known: Sequence[str], otherwise: str) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    listed = f"{otherwise} {', '.join(known)}"
    return f"did you mean {near[0]!r}? ({listed})" if near else listed


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _kind(value: Any) -> str:
    return {"list": "list", "str": "text"}.get(type(value).__name__, type(value).__name__)
