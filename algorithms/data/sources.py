"""Where rows come from: each source gives them one by one, whatever its size.

A place is `file:line` where a file has lines, else `file:row n`; both count from 1.
"""

from __future__ import annotations

import csv
import difflib
import io
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, JsonValue, field_validator

from algorithms.data.dataset import DataSource, Record
from algorithms.data.files import matching_files, opened
from algorithms.data.shapes import EXAMPLE_ROW, Row, shown
from backends.errors import Problem, UserError, first_line

if TYPE_CHECKING:
    import datasets

ROWS_AT_ONCE = 1024
"""Rows that are taken out of an Arrow table together."""

HUB_SECONDS = 10.0
"""How long the hub may take to say what it has."""

NEEDS_EXTRA = "install it: pip install 'flowtune[data]'"


class FileSource(DataSource):
    """Rows in one or more files."""

    path: str | list[str] = Field(
        description="A file, or a list of them: paths relative to the working directory, absolute "
        "ones, s3:// addresses, or patterns such as data/*.jsonl.",
        examples=["examples/data/arithmetic/train.jsonl"],
    )

    @field_validator("path")
    @classmethod
    def _names_a_file(cls, path: str | list[str]) -> str | list[str]:
        if "" in ([path] if isinstance(path, str) else path or [""]):
            raise ValueError("names no file")
        return path

    def title(self) -> str:
        """The paths as they are given."""
        return ", ".join(self._paths())

    def records(self, where: str) -> Iterator[Record]:
        """The files in the order they are given; those of a pattern by their names."""
        for path in matching_files(self._paths(), f"{where}.path"):
            with opened(path, f"{where}.path") as file:
                yield from self.read(file, path, where)

    def read(self, file: IO[bytes], path: str, where: str) -> Iterator[Record]:
        """The rows of one file."""
        raise NotImplementedError

    def _paths(self) -> list[str]:
        return [self.path] if isinstance(self.path, str) else self.path


class StreamedSource(DataSource):
    """A source whose rows need not fit in memory."""

    streaming: bool = Field(
        False,
        description="Keep the rows in a temporary file instead of in memory; batches are the same.",
    )

    def keeps_on_disk(self) -> bool:
        """As the field says."""
        return self.streaming


# --- text ---------------------------------------------------------------------------------------


class JsonlData(StreamedSource, FileSource):
    """JSON lines: one row on each line of one or more files."""

    model_config = ConfigDict(title="jsonl")

    kind: Literal["jsonl"] = "jsonl"

    def read(self, file: IO[bytes], path: str, where: str) -> Iterator[Record]:
        """Each line that is not blank."""
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _parse_line(line.rstrip(b"\r\n"), f"{path}:{number}")


def _parse_line(line: bytes, place: str) -> Record:
    try:
        row = _parse(line)
    except UnicodeDecodeError as error:
        return Problem(place, f"not UTF-8 text ({error.reason})", "save the file as UTF-8")
    except json.JSONDecodeError as error:
        return Problem(
            place,
            f"not JSON: {error.msg} at column {error.colno}",
            "a jsonl file holds one whole JSON object on each line",
        )
    except (ValueError, RecursionError) as error:
        return Problem(place, str(error), "mend the row")
    return _object(row, place)


def _parse(content: bytes) -> Any:
    """The JSON that UTF-8 text holds.

    Raises ValueError for what Python would read all the same: a key that stands twice, of which it
    takes the last, and half a character, which no tokenizer takes.
    """
    text = content.decode("utf-8-sig")
    value = _DECODER.decode(text)
    if "\\u" in text:
        _check_text(value)
    return value


def _check_text(value: Any) -> None:
    """Raise ValueError if JSON holds half a character somewhere."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start].encode("ascii", "backslashreplace").decode()
        raise ValueError(f"holds {half}, which is half a character") from None


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"an object has {twice!r} twice: {shown(made)}")
    return made


_DECODER = json.JSONDecoder(object_pairs_hook=_each_key_once)


def _object(row: Any, place: str) -> Record:
    if not isinstance(row, dict):
        kind = type(row).__name__
        return Problem(place, f"a {kind}, not an object", f"a row looks like {EXAMPLE_ROW}")
    return row, place


class JsonData(FileSource):
    """One JSON document a file: a list of rows, or an object that holds the list."""

    model_config = ConfigDict(title="json")

    kind: Literal["json"] = "json"
    field: str | None = Field(None, description="Under which key the list lies.", examples=["data"])

    def read(self, file: IO[bytes], path: str, where: str) -> Iterator[Record]:
        """The rows of the list. Raises UserError if there is none."""
        rows = self._list(_parse_document(file.read(), path), path, where)
        for number, row in enumerate(rows, start=1):
            yield _object(row, f"{path}:row {number}")

    def _list(self, document: Any, path: str, where: str) -> list[Any]:
        if self.field is not None:
            if not isinstance(document, dict) or not isinstance(document.get(self.field), list):
                what = f"{path} has no list under {self.field!r}"
                raise UserError(Problem(f"{where}.field", what, _lists_in(document)))
            document = document[self.field]
        if not isinstance(document, list):
            what = f"{path} holds a {type(document).__name__}, not a list of rows"
            raise UserError(Problem(f"{where}.field", what, _lists_in(document)))
        return document


def _parse_document(content: bytes, path: str) -> Any:
    try:
        return _parse(content)
    except UnicodeDecodeError as error:
        what, remedy = f"not UTF-8 text ({error.reason})", "save the file as UTF-8"
        raise UserError(Problem(path, what, remedy)) from None
    except json.JSONDecodeError as error:
        lines = error.msg == "Extra data"
        remedy = "for one row on each line take kind: jsonl" if lines else "mend it there"
        what = f"not JSON: {error.msg} (column {error.colno})"
        raise UserError(Problem(f"{path}:{error.lineno}", what, remedy)) from None
    except (ValueError, RecursionError) as error:
        raise UserError(Problem(path, str(error), "mend it there")) from None


def _lists_in(document: Any) -> str:
    keys = (
        [key for key, value in document.items() if isinstance(value, list)]
        if isinstance(document, dict)
        else []
    )
    return f"its lists are under: {', '.join(keys)}" if keys else "a json file holds a list of rows"


class CsvData(StreamedSource, FileSource):
    """Comma-separated values under a line of column names; every value is text."""

    model_config = ConfigDict(title="csv")

    kind: Literal["csv"] = "csv"
    delimiter: str = Field(
        ",", min_length=1, max_length=1, description='What stands between values; "\\t" for tabs.'
    )

    @field_validator("delimiter")
    @classmethod
    def _is_not_in_use(cls, delimiter: str) -> str:
        if delimiter in '"\r\n':
            raise ValueError("stands for something else in csv; take another character")
        return delimiter

    def read(self, file: IO[bytes], path: str, where: str) -> Iterator[Record]:
        """The rows under the names; a row's line is the one that it begins on."""
        csv.field_size_limit(sys.maxsize)  # texts are longer than the 128 KiB it begins with
        text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")
        reader = csv.reader(text, delimiter=self.delimiter, strict=True)
        names: list[str] = []
        while True:
            place = f"{path}:{reader.line_num + 1}"
            try:
                cells = next(reader, None)
            except csv.Error as error:
                what = f"not csv: {error} (line {reader.line_num})"
                yield Problem(place, what, "quote values as csv does")
                continue
            if cells is None:
                break
            if not names:
                names = _column_names(cells, place)
            elif cells:
                yield _csv_row(names, cells, place)
        text.detach()


def _column_names(cells: list[str], place: str) -> list[str]:
    if not _is_utf8(cells):
        raise UserError(Problem(place, "not UTF-8 text", "save the file as UTF-8"))
    if len(set(cells)) < len(cells) or not all(cells):
        what = f"the first line has to name the columns, each once: it says {', '.join(cells)}"
        raise UserError(Problem(place, what, "put the names there, such as prompt,completion"))
    return cells


def _csv_row(names: list[str], cells: list[str], place: str) -> Record:
    if len(cells) != len(names):
        what = f"has {len(cells)} values for {len(names)} columns"
        return Problem(place, what, "quote values that hold the delimiter or a line break")
    if not _is_utf8(cells):
        return Problem(place, "not UTF-8 text", "save the file as UTF-8")
    return dict(zip(names, cells, strict=True)), place


def _is_utf8(cells: list[str]) -> bool:
    """Whether none holds a byte that was no text."""
    try:
        "".join(cells).encode()
    except UnicodeEncodeError:
        return False
    return True


# --- tables -------------------------------------------------------------------------------------

COLUMNS = "The columns that are read; all if left out."


class ParquetData(StreamedSource, FileSource):
    """Parquet files."""

    model_config = ConfigDict(title="parquet")

    kind: Literal["parquet"] = "parquet"
    columns: list[str] | None = Field(None, min_length=1, description=COLUMNS)

    def read(self, file: IO[bytes], path: str, where: str) -> Iterator[Record]:
        """The rows, a row group in memory at a time."""
        try:
            import pyarrow.parquet as parquet
        except ImportError:
            what = "parquet needs the pyarrow package"
            raise UserError(Problem(f"{where}.kind", what, NEEDS_EXTRA)) from None
        table = parquet.ParquetFile(file)
        names = table.schema_arrow.names
        _check_columns(self.columns, names, f"{where}.columns", path)
        if twice := sorted({name for name in names if names.count(name) > 1}):
            what = f"{path} has two columns {twice[0]!r}"
            raise UserError(Problem(f"{where}.path", what, "give each its own name"))
        batches = table.iter_batches(ROWS_AT_ONCE, columns=self.columns)
        rows = (row for batch in batches for row in batch.to_pylist())
        for number, row in enumerate(rows, start=1):
            yield _plain_row(row, f"{path}:row {number}")


class HuggingFaceData(StreamedSource):
    """A data set of the Hugging Face hub, or one that `save_to_disk` has written."""

    model_config = ConfigDict(title="hf")

    kind: Literal["hf"] = "hf"
    name: str = Field(
        min_length=1,
        description="The hub's name, or the folder of save_to_disk.",
        examples=["trl-lib/Capybara"],
    )
    config: str | None = Field(None, description="Which of the data set's configurations.")
    split: str = Field("train", description="Which of its splits; slices as in train[:1000] too.")
    revision: str | None = Field(
        None, description="The hub's branch, tag or commit; a commit never changes."
    )
    columns: list[str] | None = Field(None, min_length=1, description=COLUMNS)

    says_where: ClassVar[str] = "name"

    def title(self) -> str:
        """The name and the split."""
        return f"{self.name}[{self.split}]"

    def records(self, where: str) -> Iterator[Record]:
        """The rows, out of the library's own files on disk."""
        try:
            import datasets
        except ImportError:
            what = "hf needs the datasets package"
            raise UserError(Problem(f"{where}.kind", what, NEEDS_EXTRA)) from None
        folder = Path(self.name).expanduser()
        try:
            table = self._saved(folder, where) if _is_saved(folder) else self._of_hub(where)
        except UserError:
            raise
        except Exception as error:
            raise UserError(self._not_loaded(error, where)) from error
        assert isinstance(table, datasets.Dataset)
        _check_columns(self.columns, table.column_names, f"{where}.columns", self.title())
        if self.columns is not None:
            table = table.select_columns(self.columns)
        for number, row in enumerate(table, start=1):
            yield _plain_row(row, f"{self.title()}:row {number}")

    def _of_hub(self, where: str) -> datasets.Dataset:
        import datasets

        if not Path(self.name).expanduser().is_dir():
            self._ask_hub(where)
        return datasets.load_dataset(
            str(Path(self.name).expanduser()) if self.name.startswith("~") else self.name,
            self.config,
            split=self.split,
            revision=self.revision,
        )

    def _ask_hub(self, where: str) -> None:
        """Ask for the data set once: the library asks a hub that is not there for minutes.

        Raises UserError for one that the hub does not have, or that can be had neither from the
        hub nor out of the cache. What else goes wrong is for the library to meet.
        """
        from datasets.load import CachedDatasetModuleFactory
        from huggingface_hub import HfApi, errors

        try:
            HfApi().dataset_info(self.name, revision=self.revision, timeout=HUB_SECONDS)
        except errors.RevisionNotFoundError:
            what = f"{self.name} has no revision {self.revision!r}"
            remedy = "give a branch, tag or commit of it"
            raise UserError(Problem(f"{where}.revision", what, remedy)) from None
        except errors.RepositoryNotFoundError:
            what = f"the hub shows no data set {self.name!r}"
            remedy = "check the name, and set HF_TOKEN for one that is not public"
            raise UserError(Problem(f"{where}.name", what, remedy)) from None
        except (errors.HfHubHTTPError, errors.HFValidationError):
            return
        except Exception as error:  # noqa: BLE001  (of any HTTP library that the client is built on)
            try:
                CachedDatasetModuleFactory(self.name).get_module()
            except FileNotFoundError:
                what = f"{self.name} is not in the cache, and the hub cannot be reached"
                remedy = "see to the network, HF_ENDPOINT and HF_HUB_OFFLINE"
                problem = Problem(f"{where}.name", f"{what} ({first_line(error)})", remedy)
                raise UserError(problem) from error

    def _not_loaded(self, error: Exception, where: str) -> Problem:
        words = first_line(error.__cause__ or error)
        if words.startswith(("Unknown split", "Unrecognized instruction format")):
            return Problem(f"{where}.split", words, "take one of its splits, such as train[:1000]")
        if words.startswith("BuilderConfig"):
            return Problem(f"{where}.config", words, "take one that there is")
        what = f"{self.title()} cannot be loaded: {words}"
        remedy = "check name, config, split and revision, and HF_TOKEN for what is not public"
        return Problem(f"{where}.name", what, remedy)

    def _saved(self, folder: Path, where: str) -> datasets.Dataset:
        import datasets

        for name in ("config", "revision"):
            if getattr(self, name) is not None:
                what = f"says nothing to {self.name}, which save_to_disk has written"
                raise UserError(Problem(f"{where}.{name}", what, "leave it out"))
        saved = datasets.load_from_disk(folder)
        if isinstance(saved, datasets.Dataset):
            return saved
        if self.split not in saved:
            what = f"{self.name} has no split {self.split!r}"
            remedy = f"its splits are {', '.join(saved)}"
            raise UserError(Problem(f"{where}.split", what, remedy))
        return saved[self.split]


def _is_saved(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))


def _check_columns(
    wanted: Sequence[str] | None, known: Sequence[str], where: str, source: str
) -> None:
    for name in wanted or ():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            remedy = f"did you mean {near[0]!r}?" if near else f"they are {', '.join(known)}"
            raise UserError(Problem(where, f"{source} has no column {name!r}", remedy))


def _plain_row(row: Row, place: str) -> Record:
    plain: Row = {}
    for name, value in row.items():
        try:
            if value is not None:
                plain[name] = _plain(value)
        except UnicodeDecodeError:
            what = f"{name} is bytes that are no UTF-8 text"
            return Problem(place, what, "name the columns that are wanted under columns")
    return plain, place


def _plain(value: Any) -> Any:
    """The value as JSON has it; keys that a table fills with nulls for lack of a value are gone."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, bytes):
        return value.decode()
    return value if isinstance(value, str | int | float | None) else str(value)


# --- the experiment itself ----------------------------------------------------------------------


class RowsData(DataSource):
    """Rows written into the experiment itself."""

    model_config = ConfigDict(title="rows")

    kind: Literal["rows"] = "rows"
    rows: list[dict[str, JsonValue]] = Field(
        description="The rows, shaped like the lines of a jsonl file."
    )

    says_where: ClassVar[str] = "rows"

    def title(self) -> str:
        """Where they stand."""
        return "the experiment's rows"

    def records(self, where: str) -> Iterator[Record]:
        """The rows as they are."""
        for index, row in enumerate(self.rows):
            place = f"{where}.rows[{index}]"
            try:
                _check_text(row)
            except ValueError as error:
                yield Problem(place, str(error), "mend the row")
            else:
                yield row, place
