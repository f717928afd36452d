"""A set of rows: read from its source, transformed, with a fingerprint, without its bad rows.

What rows may look like is in `shapes.py`, in which order a run sees them in `order.py`, where they
come from in `sources.py`, and what can be done to them on the way in `transform_kinds.py`.
"""

from __future__ import annotations

import hashlib
import json
import logging
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field

from algorithms.data.shapes import EXAMPLE_ROW, Row, row_problem
from algorithms.data.spool import Lazy, Spool
from algorithms.data.transforms import RowTransform, TransformField
from backends.errors import FlowtuneError, Problem, UserError
from backends.registry import Registry

SHOWN_PROBLEMS = 20

Record = tuple[Row, str] | Problem
"""A row and its place (`file:line`), or what is wrong with what stands there."""

RowCheck = Callable[[Row, str], Problem | None]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BadRows:
    """How many bad rows may be left out, by which field, and how many have been.

    Not all rows there are: something has to be left.
    """

    field: str = "data.max_bad_rows"
    most: int = 0
    skipped: int = 0
    of: int | None = None
    """How many rows there are, good or bad; None if that is not known."""

    def skip(self, problems: Sequence[Problem]) -> BadRows:
        """The same with these rows left out, as the log says.

        Raises UserError if they are too many.
        """
        if not problems:
            return self
        if refused := self.refused(problems):
            raise UserError(*refused)
        for problem in problems[:SHOWN_PROBLEMS]:
            logger.warning("bad row skipped: %s: %s", problem.where, problem.what)
        skipped = self.skipped + len(problems)
        logger.warning("bad rows skipped: %d; %s allows %d", skipped, self.field, self.most)
        return replace(self, skipped=skipped)

    def refused(self, problems: Sequence[Problem]) -> list[Problem]:
        """What is to be told of these rows: nothing if they may be left out."""
        bad = self.skipped + len(problems)
        if not problems or (bad <= self.most and bad != self.of):
            return []
        shown = shorten(list(problems))
        if bad == self.of and self.most:
            what = f"there is nothing but bad rows ({bad} of {bad})"
            shown.append(Problem(self.field, what, "mend some of them"))
        elif self.most:
            what = f"there are {bad} bad rows, and {self.most} may be skipped"
            shown.append(Problem(self.field, what, "mend some of them, or raise it"))
        return shown


@dataclass(frozen=True)
class Dataset:
    """Rows in their order, a fingerprint of them, and where each came from (`file:line`).

    `rows` and `places` are lists, or read from disk when they are asked for (`on_disk`).
    """

    rows: Sequence[Row]
    places: Sequence[str] = field(repr=False)
    source: str
    unreadable: list[Problem] = field(default_factory=list, repr=False)
    """Lines that are no rows, and rows that a transform could not take; `load_dataset` gives out
    no set that has any."""
    bad_rows: BadRows = field(default_factory=BadRows)
    on_disk: bool = False

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of the rows as canonical JSON, one a line: the same rows in the same order."""
        digest = hashlib.sha256()
        for row in self.rows:
            text = json.dumps(row, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
            digest.update(text.encode("utf-8", "surrogatepass") + b"\n")
        return digest.hexdigest()

    def head(self, limit: int | None) -> Dataset:
        """The first `limit` rows; all of them for None."""
        return self.pick(range(len(self))[:limit])

    def pick(self, numbers: Sequence[int]) -> Dataset:
        """The rows of these numbers (from 0), in their order."""
        rows, places = self.rows, self.places
        if self.on_disk:
            return replace(
                self,
                rows=Lazy(len(numbers), lambda index: rows[numbers[index]]),
                places=Lazy(len(numbers), lambda index: places[numbers[index]]),
            )
        return replace(self, rows=[rows[n] for n in numbers], places=[places[n] for n in numbers])

    def without_unreadable(self) -> Dataset:
        """The same, what is unreadable left out. Raises UserError if that is too much."""
        return replace(self, bad_rows=self.bad_rows.skip(self.unreadable), unreadable=[])

    def without_bad(self, check: RowCheck) -> Dataset:
        """The same without rows that `check` is against. Raises UserError if they are too many."""
        good = array("q")
        problems: list[Problem] = []
        for number, (row, place) in enumerate(zip(self.rows, self.places, strict=True)):
            if problem := _problem(check, row, place):
                problems.append(problem)
            else:
                good.append(number)
        return replace(self.pick(good), bad_rows=self.bad_rows.skip(problems)) if problems else self


# --- where rows come from -----------------------------------------------------------------------


class DataSource(BaseModel):
    """A `data:` section: a kind, its fields, and how its rows are read."""

    # Built when it is first needed: by then a plug-in's transforms can import all of this package.
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    kind: str
    transforms: list[TransformField] = Field(
        default_factory=list, description="What is done to the rows, one after the other."
    )
    max_bad_rows: int = Field(
        0, ge=0, description="So many bad rows are left out, and told of; one more is an error."
    )

    says_where: ClassVar[str] = "path"
    """The field that says where the rows are."""

    def records(self, where: str) -> Iterator[Record]:
        """The rows one by one, each with its place, or what is wrong there.

        Raises UserError if the source itself cannot be read; `where` names this section.
        """
        raise NotImplementedError

    def title(self) -> str:
        """What the source is called in messages."""
        raise NotImplementedError

    def keeps_on_disk(self) -> bool:
        """Whether the rows stay out of memory."""
        return False

    def load(self, where: str = "data") -> Dataset:
        """Read and transform all rows; those that will not do are noted in `unreadable`.

        Raises UserError if the source itself cannot be read; `where` names this section.
        """
        reading = _Reading(self.title(), self.keeps_on_disk())
        dataset = None
        records: Iterable[Record] = self.records(where)
        waiting: list[tuple[str, RowTransform]] = []
        for index, section in enumerate(self.transforms):
            transform = section.build(f"{where}.transforms[{index}]")
            if isinstance(transform, RowTransform):
                waiting.append((f"{where}.transforms[{index}] ({section.kind})", transform))
                continue
            if dataset is None or waiting:
                dataset = reading.keep(records, waiting)
                waiting = []
            dataset = dataset.pick(transform.order(len(dataset)))
            records = zip(dataset.rows, dataset.places, strict=True)
        if dataset is None or waiting:
            dataset = reading.keep(records, waiting)
        count = len(dataset) + len(reading.problems)
        bad_rows = BadRows(f"{where}.max_bad_rows", self.max_bad_rows, of=count)
        dataset = replace(dataset, unreadable=reading.problems, bad_rows=bad_rows)
        return _not_empty(dataset, f"{where}.{self.says_where}", reading.seen)


class _Reading:
    """Keeps what comes out of a source or of transforms, in memory or on disk."""

    def __init__(self, title: str, on_disk: bool) -> None:
        self.title = title
        self.on_disk = on_disk
        self.seen = 0
        self.problems: list[Problem] = []

    def keep(
        self, records: Iterable[Record], transforms: Sequence[tuple[str, RowTransform]]
    ) -> Dataset:
        """The rows that these transforms leave; problems are put down."""
        done = self._through(records, transforms)
        if self.on_disk:
            spool = Spool(done)
            return Dataset(spool.rows, spool.places, self.title, on_disk=True)
        rows: list[Row] = []
        places: list[str] = []
        for row, place in done:
            rows.append(row)
            places.append(place)
        return Dataset(rows, places, self.title)

    def _through(
        self, records: Iterable[Record], transforms: Sequence[tuple[str, RowTransform]]
    ) -> Iterator[tuple[Row, str]]:
        for record in records:
            self.seen += 1
            if isinstance(record, Problem):
                self.problems.append(record)
                continue
            row, place = record
            result = _transformed(row, place, transforms)
            if isinstance(result, Problem):
                self.problems.append(result)
            elif result is not None:
                yield result, place


def _transformed(
    row: Row, place: str, transforms: Sequence[tuple[str, RowTransform]]
) -> Row | Problem | None:
    for name, transform in transforms:
        try:
            changed = transform.apply(row)
        except Exception as error:  # noqa: BLE001  (anyone's code; reported with the row)
            words = (
                str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            )
            return Problem(place, f"{words} (in {name})", "mend the row, or the transform")
        if changed is None:
            return None
        if not isinstance(changed, dict):
            what = f"{name} made a {type(changed).__name__} of it"
            return Problem(place, what, "a transform returns a row, or None to leave it out")
        row = changed
    return row if not transforms else _as_json(row, place, transforms)


def _as_json(row: Row, place: str, transforms: Sequence[tuple[str, RowTransform]]) -> Row | Problem:
    """The row, if it is what JSON holds: so it is fingerprinted, and kept on disk."""
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        names = ", ".join(name for name, _ in transforms)
        what = f"is not what JSON holds behind {names}: {error}"
        return Problem(place, what, "return text, numbers, lists and objects")
    return row


DATA_SOURCES: Registry[type[DataSource]] = Registry(
    "data source",
    "flowtune.data",
    {
        "csv": "algorithms.data.sources:CsvData",
        "hf": "algorithms.data.sources:HuggingFaceData",
        "json": "algorithms.data.sources:JsonData",
        "jsonl": "algorithms.data.sources:JsonlData",
        "parquet": "algorithms.data.sources:ParquetData",
        "rows": "algorithms.data.sources:RowsData",
    },
    bases=(DataSource,),
)


def load_dataset(source: DataSource, where: str = "data", check: RowCheck | None = None) -> Dataset:
    """The rows of a `data:` section, without the bad ones that may be skipped.

    Bad is what cannot be read, and what `check` is against. Raises UserError naming each bad row if
    they are too many, or if none is left; `where` names the section in it.
    """
    dataset = source.load(where).without_unreadable()
    return dataset if check is None else dataset.without_bad(check)


def shorten(problems: list[Problem]) -> list[Problem]:
    """The first problems and, if there are more, one that counts the rest."""
    if len(problems) <= SHOWN_PROBLEMS:
        return problems
    rest = len(problems) - SHOWN_PROBLEMS
    file = problems[SHOWN_PROBLEMS].where.rpartition(":")[0] or problems[0].where
    return [
        *problems[:SHOWN_PROBLEMS],
        Problem(file, f"{rest} more bad rows ({len(problems)} in all)", "mend those above first"),
    ]


def dataset_problems(dataset: Dataset, check: RowCheck = row_problem) -> list[Problem]:
    """What is wrong: lines that are no rows, then each row that will not do."""
    rows = zip(dataset.rows, dataset.places, strict=True)
    checked = (_problem(check, row, place) for row, place in rows)
    return [*dataset.unreadable, *(problem for problem in checked if problem is not None)]


def _problem(check: RowCheck, row: Row, place: str) -> Problem | None:
    """What is wrong with a row; a check of anyone's own may itself fail on it."""
    try:
        return check(row, place)
    except FlowtuneError:
        raise
    except Exception as error:  # noqa: BLE001  (the row is named with it)
        return Problem(place, f"the check of rows raised {type(error).__name__}: {error}")


def _not_empty(dataset: Dataset, where: str, seen: int) -> Dataset:
    if dataset.rows or dataset.unreadable:
        return dataset
    if seen:
        what = f"the transforms leave no row of {dataset.source}"
        raise UserError(Problem(where, what, "look at filter and limit"))
    raise UserError(
        Problem(where, f"{dataset.source} holds no rows", f"one row a line, as {EXAMPLE_ROW}")
    )
