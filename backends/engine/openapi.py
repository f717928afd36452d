"""What the engine's OpenAPI document says of an endpoint: parameters, bodies, answers.

Handlers take raw requests, for speed and for errors in the protocol's own form, so FastAPI cannot
read these from their signatures.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from backends.engine.checkpoints import KINDS

Schema = dict[str, Any]

KEY_HEADER: Final = "X-API-Key"
JSON: Final = "application/json"
BYTES: Final[Schema] = {"type": "string", "format": "binary"}
COUNT: Final[Schema] = {"type": "integer", "minimum": 0, "maximum": 999_999_999}
SCOPE: Final[Schema] = {"type": "string", "enum": ["owned", "accessible"]}

_PATH: Final[Mapping[str, Schema]] = {"kind": {"type": "string", "enum": list(KINDS)}}
"""Path parameters that are not any text."""

_REFUSALS: Final[Mapping[int, str]] = {
    400: "A mistake in the request; `detail` says what, where, and what to do.",
    401: "No key, or not the engine's.",
    403: "The address was not signed by this engine, or its time is over.",
    404: "An id that is not known here.",
    408: "There is no answer yet: ask again.",
    410: "It was here, and has ended.",
    503: "The model is still loading, or the engine stops: try again.",
}


@dataclass(frozen=True)
class Endpoint:
    """One endpoint as clients see it. `body` is a JSON model, or the media type of raw bytes."""

    method: str
    path: str
    body: type[BaseModel] | str | None = None
    query: Mapping[str, Schema] | None = None
    required: Sequence[str] = ()
    """Query parameters that have to be there."""
    headers: Mapping[str, Schema] | None = None
    status: int = 200
    answers: Sequence[str] = (JSON,)
    """Media types of the answer that the status goes with."""
    refusals: Sequence[int] = ()
    keyless: bool = False

    def operation(self) -> Schema:
        """What FastAPI merges into its own description."""
        operation: Schema = {"parameters": [*self._parameters()]}
        if isinstance(self.body, str):
            operation["requestBody"] = {"content": {self.body: {"schema": BYTES}}, "required": True}
        elif self.body is not None:
            schema = {"$ref": f"#/components/schemas/{self.body.__name__}"}
            operation["requestBody"] = {"content": {JSON: {"schema": schema}}, "required": True}
        if self.keyless:
            operation["security"] = []
        return operation

    def responses(self) -> dict[int | str, Schema]:
        """Every status that it answers with."""
        told = [*self.refusals, *(() if self.keyless else (401,)), 503]
        content = {JSON: {"schema": {"$ref": "#/components/schemas/Refusal"}}}
        refused = {
            status: {"description": _REFUSALS[status], "content": content} for status in told
        }
        answer: Schema = {"description": "Done."}
        if self.status != 204:
            answer["content"] = {
                kind: {"schema": {"type": "object"} if kind == JSON else BYTES}
                for kind in self.answers
            }
        return {self.status: answer, **refused}

    def _parameters(self) -> Iterable[Schema]:
        for name in re.findall(r"{(\w+)}", self.path):
            schema = _PATH.get(name, {"type": "string", "minLength": 1})
            yield {"name": name, "in": "path", "required": True, "schema": schema}
        for name, schema in (self.query or {}).items():
            needed = name in self.required
            yield {"name": name, "in": "query", "required": needed, "schema": schema}
        for name, schema in (self.headers or {}).items():
            yield {"name": name, "in": "header", "required": False, "schema": schema}


def describe(app: FastAPI, endpoints: Iterable[Endpoint]) -> None:
    """Have the application's document hold the bodies' schemas and the key."""
    bodies = {e.body for e in endpoints if isinstance(e.body, type)}
    template = "#/components/schemas/{model}"
    kinds = sorted(bodies, key=lambda kind: kind.__name__)
    _, schemas = models_json_schema([(kind, "validation") for kind in kinds], ref_template=template)

    def document() -> Schema:
        if app.openapi_schema is None:
            found = get_openapi(title=app.title, version=app.version, routes=app.routes)
            refusal = {
                "type": "object",
                "properties": {"detail": {"type": "string"}},
            }
            found["components"] = {
                "schemas": {**schemas["$defs"], "Refusal": refusal},
                "securitySchemes": {"key": {"type": "apiKey", "in": "header", "name": KEY_HEADER}},
            }
            found["security"] = [{"key": []}]
            app.openapi_schema = found
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]
