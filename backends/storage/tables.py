"""A run's tables: rows of JSON lines, one object each."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from typing import Any

from backends.storage.documents import encode_row
from backends.storage.objects import Look, NotFound, ObjectStore, StoreError

Identity = tuple[int, str]
"""A step, and what else tells a row from the others of that step."""


class Table:
    """A JSON-lines object kept in memory: read when first needed, written whole, sorted.

    Rows are held as encoded lines, so that a flush of many thousands only joins them.
    """

    def __init__(
        self,
        objects: ObjectStore,
        key: str,
        identify: Callable[[Mapping[str, Any]], Identity],
    ) -> None:
        self._objects = objects
        self._key = key
        self._identify = identify
        self._lines: dict[Identity, bytes] | None = None
        self._changed = False
        self._memory = threading.RLock()
        self._writing = threading.Lock()
        self.last: int | None = None
        """The step of the newest row; the next one that `add_next` takes is one more."""

    def put(self, row: Mapping[str, Any]) -> None:
        """Add a row, or put it in the place of the one it repeats."""
        with self._memory:
            self._loaded()[self._identify(row)] = encode_row(row)
            self._changed = True

    def add_next(self, row: Mapping[str, Any]) -> None:
        """Add the row of the step after the last. Raises StoreError for any other."""
        with self._memory:
            if self.last is None:
                self.last = max((step for step, _ in self._loaded()), default=0)
            if row["step"] != self.last + 1:
                raise StoreError(
                    f"{self._objects.uri(self._key)}: a row of step {row['step']} cannot follow "
                    f"that of step {self.last}"
                )
            self.put(row)
            self.last += 1

    def get(self, identity: Identity) -> dict[str, Any] | None:
        """The row of that identity, or None."""
        with self._memory:
            line = self._loaded().get(identity)
        return json.loads(line) if line is not None else None

    def rows(self) -> list[dict[str, Any]]:
        """All rows, sorted."""
        with self._memory:
            lines = self._loaded()
            return [json.loads(lines[identity]) for identity in sorted(lines)]

    def keep(self, wanted: Callable[[Identity], bool]) -> None:
        """Drop the rows that are not wanted."""
        with self._memory:
            lines = self._loaded()
            self._lines = {identity: line for identity, line in lines.items() if wanted(identity)}
            self._changed |= len(self._lines) < len(lines)

    def forget(self) -> None:
        """Drop everything in memory: what the store holds is read again when it is needed."""
        with self._memory:
            self._lines, self.last, self._changed = None, None, False

    def flush(self, look: Look) -> None:
        """Write the object if anything changed. A failed write is tried again at the next flush.

        `look` as in `ObjectStore.write`.
        """
        with self._writing:
            with self._memory:
                if not self._changed:
                    return
                lines = self._loaded()
                data = b"".join(lines[identity] for identity in sorted(lines))
                self._changed = False
            try:
                self._objects.write(self._key, data, look)
            except BaseException:
                with self._memory:
                    self._changed = True
                raise

    def _loaded(self) -> dict[Identity, bytes]:
        if self._lines is None:
            self._lines = {}
            try:
                data = self._objects.read(self._key)
            except NotFound:
                data = b""
            for number, line in enumerate(data.splitlines(keepends=True), 1):
                try:
                    self._lines[self._identify(json.loads(line))] = line
                except (ValueError, KeyError, TypeError) as error:
                    self._lines = None
                    address = self._objects.uri(self._key)
                    raise StoreError(f"{address}, line {number}: not a row ({error})") from error
        return self._lines
