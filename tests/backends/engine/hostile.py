"""Bodies that nobody should send: hypothesis strategies, and how many of them are tried.

`FLOWTUNE_FUZZ=N` tries N times as many, different ones at each run (`make fuzz`).
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any, Final

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

TIMES: Final = int(os.environ.get("FLOWTUNE_FUZZ", "1"))


def tries(bodies: int) -> settings:
    """Settings that try so many bodies."""
    return settings(
        max_examples=bodies * TIMES,
        derandomize=TIMES == 1,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


WHOLE: Final = (
    *(0, 1, -1, 2, 3, 300, 2**31 - 1, 2**31, -(2**31) - 1, 2**53, 2**61, 2**62, 2**63 - 1, 2**63),
    *(-(2**63) - 1, 2**64, 2**80, 10**400),
)
BROKEN: Final = (
    *(0.0, -0.0, 0.5, 1.0, 2.0, 1e-320, 1e-45, 1e-12, 1e20, 1e38, 3.5e38, 1e308, -0.5, -1e308),
    *(1.0 - 1e-9, float("nan"), float("inf"), -float("inf"), 10**400, 0, 1, -1),
)
TEXTS: Final = (
    *("", " ", "x", "0", "1e5", "../x", "a/b", "a\\b", ".", "..", "\x00", "a\x00b", "\ud800", "ü"),
    *("é" * 300, "x" * 300, "x" * 6000, "%2e%2e", "*", "[a", ".tmp-x", "manifest.json", "\u202e"),
    *("tinker://", "tinker://m/weights/x", "tinker://a/b/c/d", "tinker://../weights/x", "\ufeff"),
    *("adamw", "snapshot", "encoded_text", "image", "cross_entropy", "file:///etc/passwd", "\n"),
)

texts = st.one_of(st.sampled_from(TEXTS), st.text(st.characters(exclude_categories=()), max_size=8))
scalars: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from((*WHOLE, *BROKEN, True, False, None)), texts
)
values: st.SearchStrategy[Any] = st.one_of(
    scalars,
    st.lists(scalars, max_size=3),
    st.dictionaries(st.sampled_from(("type", "rank", "tokens", "chunks", "\x00", "")), scalars),
)
alike: Mapping[type, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: st.one_of(st.sampled_from(WHOLE), st.integers(-5, 5)),
    float: st.one_of(st.sampled_from(BROKEN), st.floats()),
    str: texts,
    list: st.lists(st.one_of(st.sampled_from(WHOLE), texts), max_size=5),
}
"""Values of the type that is expected: these get furthest."""


@st.composite
def spoilt(draw: st.DrawFn, good: Mapping[str, Any]) -> Any:
    """The body with some of its values, at any depth, replaced, left out or added to."""
    body: Any = good
    for _ in range(draw(st.sampled_from((0, 1, 1, 1, 2, 3)))):
        whole, *parts = _spots(body)
        at = draw(st.sampled_from(parts * 4 + [whole]))
        value = _value(body, at)
        way = draw(st.sampled_from(("alike", "alike", "alike", "alike", "other", "gone", "more")))
        if way == "gone" and at:
            instead = _GONE
        elif way == "more" and isinstance(value, dict):
            instead = {**value, draw(texts): draw(values)}
        else:
            instead = draw(alike.get(type(value), values) if way == "alike" else values)
        body = _replaced(body, at, instead)
    return body


_GONE: Final = object()


def _spots(body: Any) -> Iterator[tuple[Any, ...]]:
    """The path of every value in a body, its own first."""
    yield ()
    keys = body if isinstance(body, dict) else range(len(body)) if isinstance(body, list) else ()
    for key in keys:
        for rest in _spots(body[key]):
            yield key, *rest


def _value(body: Any, at: tuple[Any, ...]) -> Any:
    return _value(body[at[0]], at[1:]) if at else body


def _replaced(body: Any, at: tuple[Any, ...], value: Any) -> Any:
    if not at:
        return value
    copy = body.copy()
    copy[at[0]] = _replaced(body[at[0]], at[1:], value)
    if copy[at[0]] is _GONE:
        del copy[at[0]]
    return copy


@st.composite
def encoded(draw: st.DrawFn, given: Any) -> tuple[bytes, dict[str, str]]:
    """A body's bytes and headers: mostly as they should be, else damaged on the way.

    Whole means as JSON bar what JSON does not have: NaN, and halves of surrogate pairs.
    """
    text = json.dumps(given, ensure_ascii=draw(st.booleans()))
    body = text.encode("utf-8", "surrogatepass")
    headers = {}
    ways = ("cut", "junk", "utf-16", "gzip", "bom", "twice", "deep")
    way = draw(st.sampled_from(("whole",) * 40 + ways))
    if way == "cut":
        body = body[: draw(st.integers(0, len(body)))]
    elif way == "junk":
        at = draw(st.integers(0, len(body)))
        body = body[:at] + draw(st.binary(min_size=1, max_size=6)) + body[at + 1 :]
    elif way == "utf-16":
        body = text.encode("utf-16", "surrogatepass")
    elif way == "gzip":
        body, headers = gzip.compress(body, mtime=0), {"Content-Encoding": "gzip"}
    elif way == "bom":
        body = b"\xef\xbb\xbf" + body
    elif way == "twice" and text.startswith("{") and text != "{}":
        body = body[:-1] + b"," + body[1:]
    elif way == "deep":
        depth = draw(st.integers(1, 3000))
        body = body.replace(b":", b":" + b"[" * depth + b"]" * depth + b',"x":', 1)
    if draw(st.integers(0, 5)) == 0:
        kinds = ("text/plain", "application/x-protobuf", "application/json; charset=utf-16", "x")
        headers["Content-Type"] = draw(st.sampled_from(kinds))
    return body, headers
