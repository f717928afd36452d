"""Lists of names: what is built in, what plug-ins bring, what a process registered by itself.

Every kind the project knows (algorithms, backends, verifiers, data, callbacks) is a row of one
`Registry`. Built-in rows are import paths and plug-ins are entry points, so that a list exists
before any compute library does. A row that does not import is kept under `broken` with its error;
the others work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from typing import Any, Generic, TypeVar

from backends.base import BackendKind, BackendParams

T = TypeVar("T")


@dataclass(frozen=True)
class Row(Generic[T]):
    """One kind: its name, what stands behind it, and where that comes from."""

    kind: str
    item: T
    origin: str

    @property
    def summary(self) -> str:
        """The first line of the item's docstring."""
        lines = (getattr(self.item, "__doc__", None) or "").strip().splitlines()
        return lines[0] if lines else ""


class Registry(Generic[T]):
    """One list of kinds; `what` is the word for one of them in messages.

    `config` says where an item has its parameters and what these derive from; an item without is
    as broken as one that does not import.
    """

    def __init__(
        self,
        what: str,
        group: str,
        built_in: Mapping[str, str],
        config: tuple[str, type] | None = None,
    ) -> None:
        self.what = what
        self.group = group
        self.on_change: list[Callable[[], object]] = []
        self._built_in = dict(built_in)
        self._config = config
        self._loading = False
        self._registered: dict[str, Row[T]] = {}
        self._loaded: dict[str, Row[T]] | None = None
        self._broken: dict[str, str] = {}

    def rows(self) -> dict[str, Row[T]]:
        """Every kind that imports, by name."""
        if self._loaded is None:
            self._loading = True
            try:
                self._loaded, self._broken = self._load()
            finally:
                self._loading = False
        rows = dict(self._loaded)
        for kind, row in self._registered.items():
            if kind not in rows or rows[kind].item is not row.item:
                rows[kind] = row
        return rows

    def broken(self) -> dict[str, str]:
        """Every kind that does not import, with its origin and error."""
        self.rows()
        return {kind: why for kind, why in self._broken.items() if kind not in self._registered}

    def __getitem__(self, kind: str) -> T:
        """What stands behind a kind. Raises KeyError for an unknown one."""
        return self.rows()[kind].item

    def register(self, kind: str, item: T) -> None:
        """Add a kind in this process.

        Raises ValueError if the name is a built-in one's, TypeError if the item lacks its config.
        """
        if kind in self._built_in and load(self._built_in[kind]) is not item:
            raise ValueError(f"the {self.what} {kind!r} is built in: choose another name")
        self._check(item)
        module = getattr(item, "__module__", "this process")
        self._registered[kind] = Row(kind, item, f"registered by {module}")
        self._changed()

    def forget(self, kind: str) -> None:
        """Take back a registration of this process."""
        del self._registered[kind]
        self._changed()

    def reload(self) -> None:
        """Look for plug-ins again."""
        _all_entry_points.cache_clear()
        self._loaded = None
        self._changed()

    def _changed(self) -> None:
        if not self._loading:  # a plug-in that registers itself while it is imported
            for changed in self.on_change:
                changed()

    def _check(self, item: Any) -> None:
        if self._config is None:
            return
        name, base = self._config
        config = getattr(item, name, None)
        if not (isinstance(config, type) and issubclass(config, base)):
            raise TypeError(f"{self.what} {item!r} needs a {name} class derived from {base}")

    def _load(self) -> tuple[dict[str, Row[T]], dict[str, str]]:
        sources = [(kind, path, "built in") for kind, path in self._built_in.items()]
        broken: dict[str, str] = {}
        for point in _all_entry_points().select(group=self.group):
            origin = _origin(point)
            if point.name in self._built_in:
                broken[f"{point.name} ({origin})"] = f"the name {point.name!r} is built in"
            else:
                sources.append((point.name, point.value, origin))
        rows: dict[str, Row[T]] = {}
        for kind, path, origin in sources:
            try:
                item = load(path)
                self._check(item)
            except Exception as error:  # noqa: BLE001  (anyone's code; reported, not swallowed)
                broken[kind] = f"{path} ({origin}) does not import: {type(error).__name__}: {error}"
            else:
                rows[kind] = Row(kind, item, origin)
        return rows, broken


def load(path: str) -> Any:
    """The object behind `module:attribute`."""
    module, _, attribute = path.partition(":")
    return getattr(import_module(module), attribute)


@cache
def _all_entry_points() -> EntryPoints:
    points: EntryPoints = entry_points()  # type: ignore[assignment]  # typed for 3.9
    return points


def _origin(point: EntryPoint) -> str:
    return f"plug-in {point.dist.name} {point.dist.version}" if point.dist else "plug-in"


BACKENDS: Registry[type[BackendKind]] = Registry(
    "backend",
    "flowtune.backends",
    {
        "embedded": "backends.embedded:EmbeddedKind",
        "tinker": "backends.tinker:TinkerKind",
        "local": "backends.local:LocalKind",
        "mock": "backends.mock:MockKind",
    },
    config=("Params", BackendParams),
)


def backend_kinds() -> dict[str, type[BackendKind]]:
    """Every kind of backend that imports, by name."""
    return {kind: row.item for kind, row in BACKENDS.rows().items()}
