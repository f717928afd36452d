"""Lists of names: what is built in, what plug-ins bring, what a process registered by itself.

Every kind the project knows (algorithms, backends, verifiers, data, callbacks) is a row of one
`Registry`. Built-in rows are import paths and plug-ins are entry points, so that a list exists
before any compute library does. A row that does not import is kept under `broken` with its error;
the others work.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from pathlib import Path
from typing import Any, Generic, TypeVar

from backends.base import BackendKind, BackendParams

T = TypeVar("T")

_HERE = Path(__file__)


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

    `config` says where an item has its parameters and what these derive from, `bases` what it
    derives from itself (one of them, if any are given), `methods` what it has to define. An item
    without is as broken as one that does not import.
    """

    def __init__(
        self,
        what: str,
        group: str,
        built_in: Mapping[str, str],
        config: tuple[str, type] | None = None,
        bases: tuple[type, ...] = (),
        methods: tuple[str, ...] = (),
    ) -> None:
        self.what = what
        self.group = group
        self.on_change: list[Callable[[], object]] = []
        self._built_in = dict(built_in)
        self._config = config
        self._bases = bases
        self._methods = methods
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

        Raises ValueError if the name is a built-in one's, TypeError if the item lacks a part.
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
        """Raises TypeError, with what is missing, for an item that no run could use."""
        if lacking := self._lacking(item):
            raise TypeError(f"{_name(item)} is no {self.what}: {lacking}")

    def _lacking(self, item: Any) -> str | None:
        if (self._config or self._bases or self._methods) and not isinstance(item, type):
            return "it is not a class"
        if self._bases and not issubclass(item, self._bases):
            return f"it does not derive from {' or '.join(map(_name, self._bases))}"
        if self._config is not None:
            name, base = self._config
            config = getattr(item, name, None)
            if not (isinstance(config, type) and issubclass(config, base)):
                return f"it needs a {name} class derived from {_name(base)}"
        defined = {name for cls in getattr(item, "__mro__", ())[:-1] for name in vars(cls)}
        abstract = set(getattr(item, "__abstractmethods__", ()))
        missing = sorted(abstract | (set(self._methods) - defined))
        return f"it does not define {', '.join(missing)}" if missing else None

    def _load(self) -> tuple[dict[str, Row[T]], dict[str, str]]:
        sources = [(kind, path, "built in") for kind, path in self._built_in.items()]
        broken: dict[str, str] = {}
        brought: dict[str, str] = {}
        for point in sorted(_all_entry_points().select(group=self.group), key=_origin):
            origin = _origin(point)
            if point.name in self._built_in:
                broken[f"{point.name} ({origin})"] = f"the name {point.name!r} is built in"
            elif (first := brought.setdefault(point.name, origin)) != origin:
                broken[f"{point.name} ({origin})"] = f"{first} brings {point.name!r} already"
            else:
                sources.append((point.name, point.value, origin))
        rows: dict[str, Row[T]] = {}
        for kind, path, origin in sources:
            try:
                item = load(path)
            except (Exception, SystemExit) as error:  # noqa: BLE001  (anyone's code; reported)
                broken[kind] = f"{path} ({origin}) does not import: {import_error(error)}"
                continue
            if lacking := self._lacking(item):
                broken[kind] = f"{path} ({origin}) is no {self.what}: {lacking}"
            else:
                rows[kind] = Row(kind, item, origin)
        return rows, broken


def misplaced(groups: Iterable[str]) -> dict[str, str]:
    """Plug-ins in a group of ours that does not exist, with their origin and what is wrong."""
    points, known = _all_entry_points(), sorted(groups)
    return {
        point.name: f"{_origin(point)} names it in {group}, and there is no such group: "
        f"choose from {', '.join(known)}"
        for group in sorted(points.groups)
        if group.startswith("flowtune.") and group not in known
        for point in points.select(group=group)
    }


def load(path: str) -> Any:
    """The object behind `module:attribute`. Raises ValueError for a path that is not that."""
    module, _, attribute = path.partition(":")
    if not attribute:
        raise ValueError("an entry point names a class, as in my_package.losses:FocalLoss")
    return getattr(import_module(module), attribute)


def import_error(error: BaseException) -> str:
    """What went wrong in a module, and the line of it that Python had come to."""
    words = f"{type(error).__name__}: {error}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) != _HERE]
    theirs = [frame for frame in frames if "importlib" not in frame.filename]
    if isinstance(error, SyntaxError) or not theirs:  # says its line itself; failed before any
        return words
    return f"{words} ({theirs[-1].filename}, line {theirs[-1].lineno})"


def _name(item: Any) -> str:
    is_named = hasattr(item, "__qualname__")
    return f"{item.__module__}.{item.__qualname__}" if is_named else repr(item)


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
    methods=("check", "open"),
)


def backend_kinds() -> dict[str, type[BackendKind]]:
    """Every kind of backend that imports, by name."""
    return {kind: row.item for kind, row in BACKENDS.rows().items()}
