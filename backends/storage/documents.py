"""What a run's objects are written in: strict JSON, in which NaN and the infinities are null."""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from backends.storage.objects import NotFound, ObjectStore


def timestamp() -> str:
    """This moment in UTC, to the millisecond, as ISO 8601 has it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def plain(value: Any) -> Any:
    """The value as strict JSON has it: NaN and infinities as None, numpy's numbers as Python's."""
    match value:
        case None | bool() | str():
            return value
        case Mapping():
            return {str(key): plain(item) for key, item in value.items()}
        case list() | tuple():
            return [plain(item) for item in value]
        case Path():
            return str(value)
        case numbers.Integral():
            return int(value)
        case numbers.Real():
            return float(value) if math.isfinite(value) else None
        case _:
            raise TypeError(f"a {type(value).__name__} cannot be kept as JSON: {value!r:.100}")


def encode_document(value: Mapping[str, Any]) -> bytes:
    """A JSON object as people read it; keys stay in the order they were given."""
    return _encoded(json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False))


def encode_row(row: Mapping[str, Any]) -> bytes:
    """A row of JSON lines; keys stay in the order they were given."""
    return _encoded(json.dumps(plain(row), ensure_ascii=False, allow_nan=False))


def _encoded(text: str) -> bytes:
    try:
        return f"{text}\n".encode()
    except UnicodeEncodeError:  # half a surrogate pair, which only JSON's escapes can hold
        return f"{json.dumps(json.loads(text))}\n".encode()


def as_mapping(sample: Any) -> Mapping[str, Any]:
    """A sample's fields, whether it is a mapping or a dataclass."""
    return asdict(sample) if is_dataclass(sample) and not isinstance(sample, type) else sample


def read_json(objects: ObjectStore, key: str) -> dict[str, Any] | None:
    """A JSON object; None if it is not there or someone broke it."""
    try:
        loaded = json.loads(objects.read(key))
    except (NotFound, ValueError):
        return None
    return loaded if isinstance(loaded, dict) else None
