"""The sole list of backend kinds: built-in ones and those of the entry points `flowtune.backends`.

Rows are import paths, so that listing or validating a config imports no compute library.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from backends.base import BackendKind

_BUILT_IN = {
    "embedded": "backends.embedded:EmbeddedKind",
    "tinker": "backends.tinker:TinkerKind",
    "mock": "backends.mock:MockKind",
}
GROUP = "flowtune.backends"


def load(path: str) -> Any:
    """The object behind `module:attribute`."""
    module, _, attribute = path.partition(":")
    return getattr(import_module(module), attribute)


@cache
def backend_kinds() -> dict[str, type[BackendKind]]:
    """Every kind by name; a name of our own cannot be taken by a plug-in."""
    rows = {point.name: point.value for point in entry_points(group=GROUP)} | _BUILT_IN
    return {name: load(path) for name, path in rows.items()}
