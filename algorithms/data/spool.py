"""Rows on disk: in memory is only where each begins, 8 bytes a row.

The file is temporary and has no name: it goes when the process does, however that ends. It lies
where Python's `tempfile` puts it (TMPDIR), and is as large as the rows written as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar, overload

from algorithms.data.shapes import Row
from backends.errors import Problem, UserError

T = TypeVar("T")


class Lazy(Sequence[T]):
    """A sequence whose items are made when they are asked for."""

    def __init__(self, length: int, item: Callable[[int], T]) -> None:
        self._length = length
        self._item = item

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[T]:
        return (self._item(number) for number in range(self._length))

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            return [self._item(number) for number in range(*index.indices(self._length))]
        return self._item(range(self._length)[index])


class Spool:
    """Rows and their places, written once and read from anywhere, by any thread.

    Raises UserError if the disk has no room for them.
    """

    def __init__(self, records: Iterable[tuple[Row, str]]) -> None:
        self._file = tempfile.TemporaryFile(prefix="flowtune-rows-")  # noqa: SIM115
        self._starts = array("q", [0])
        for row, place in records:
            record = f"{place}\n{json.dumps(row)}".encode()
            with _room_told():
                self._file.write(record)
            self._starts.append(self._starts[-1] + len(record))
        with _room_told():
            self._file.flush()

    @property
    def rows(self) -> Sequence[Row]:
        """All rows."""
        return Lazy(len(self._starts) - 1, self._row)

    @property
    def places(self) -> Sequence[str]:
        """Where each came from."""
        return Lazy(len(self._starts) - 1, self._place)

    def _row(self, index: int) -> Row:
        row: Row = json.loads(self._read(index).partition(b"\n")[2])
        return row

    def _place(self, index: int) -> str:
        return self._read(index).partition(b"\n")[0].decode()

    def _read(self, index: int) -> bytes:
        start, stop = self._starts[index], self._starts[index + 1]
        return os.pread(self._file.fileno(), stop - start, start)


@contextlib.contextmanager
def _room_told() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        what = f"the rows do not go into a temporary file there ({error})"
        remedy = "set TMPDIR to a folder with room for them"
        raise UserError(Problem(tempfile.gettempdir(), what, remedy)) from error
