"""Where rows come from: every kind gives the same rows, in memory and on disk."""

from __future__ import annotations

import bz2
import csv
import gzip
import json
import lzma
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import fsspec
import pytest
import zstandard
from pydantic import TypeAdapter

from algorithms.data.dataset import DATA_SOURCES, DataSource, load_dataset
from algorithms.data.sources import CsvData, HuggingFaceData, JsonData, JsonlData, ParquetData
from algorithms.experiment import DataField
from backends.errors import Problem, UserError

ROWS: list[dict[str, Any]] = [
    {"prompt": "1+1=", "completion": "2"},
    {"prompt": 'say "a,\nb"', "completion": "é\t"},
    {"prompt": "x" * 200_000, "completion": ""},
    {"prompt": "last", "completion": "4"},
]


def source(**section: Any) -> DataSource:
    """The section as a document gives it."""
    made: DataSource = TypeAdapter(DataField).validate_python(section)
    return made


def problems_of(data: DataSource) -> list[Problem]:
    with pytest.raises(UserError) as caught:
        load_dataset(data)
    return list(caught.value.problems)


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_json(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text(json.dumps({"version": 1, "data": rows}))


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=2)


WRITERS: dict[str, tuple[Callable[[Path, list[dict[str, Any]]], None], dict[str, Any]]] = {
    "jsonl": (write_jsonl, {}),
    "json": (write_json, {"field": "data"}),
    "csv": (write_csv, {}),
    "parquet": (write_parquet, {}),
}
PLACES = {
    "jsonl": [":1", ":2", ":3", ":4"],
    "json": [":row 1", ":row 2", ":row 3", ":row 4"],
    "csv": [":2", ":3", ":5", ":6"],  # under the names; the second row has two lines
    "parquet": [":row 1", ":row 2", ":row 3", ":row 4"],
}


@pytest.mark.parametrize("kind", WRITERS)
def test_every_file_gives_the_same_rows(kind: str, tmp_path: Path) -> None:
    write, fields = WRITERS[kind]
    path = tmp_path / f"rows.{kind}"
    write(path, ROWS)
    dataset = load_dataset(source(kind=kind, path=str(path), **fields))
    assert dataset.rows == ROWS
    assert dataset.places == [f"{path}{place}" for place in PLACES[kind]]


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_on_disk_they_are_the_same(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"rows.{kind}"
    WRITERS[kind][0](path, ROWS)
    kept = load_dataset(source(kind=kind, path=str(path)))
    streamed = load_dataset(source(kind=kind, path=str(path), streaming=True))
    assert streamed.on_disk
    assert not isinstance(streamed.rows, list)
    path.unlink()  # what the source becomes is nothing to a run that has begun
    assert list(streamed.rows) == kept.rows
    assert list(streamed.places) == kept.places
    assert streamed.fingerprint == kept.fingerprint
    assert streamed.rows[-1] == ROWS[-1]
    assert streamed.rows[1:3] == ROWS[1:3]
    assert list(streamed.head(2).rows) == ROWS[:2]
    with pytest.raises(IndexError):
        streamed.rows[4]


def test_a_streaming_json_document_is_refused() -> None:
    with pytest.raises(ValueError, match="streaming"):
        source(kind="json", path="x.json", streaming=True)


# --- files --------------------------------------------------------------------------------------


def test_a_pattern_takes_the_files_by_their_names(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        write_jsonl(tmp_path / f"{name}.jsonl", [{"name": name}])
    (tmp_path / "d.jsonl").mkdir()
    data = JsonlData(path=[f"{tmp_path}/c.jsonl", f"{tmp_path}/[ab].jsonl"])
    assert [row["name"] for row in load_dataset(data).rows] == ["c", "a", "b"]
    assert len(load_dataset(JsonlData(path=f"{tmp_path}/*.jsonl"))) == 3


def test_a_file_whose_name_looks_like_a_pattern(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "rows[1].jsonl", ROWS)
    assert len(load_dataset(JsonlData(path=f"{tmp_path}/rows[1].jsonl"))) == 4


def test_a_pattern_in_an_object_store(s3_uri: str) -> None:
    for name, number in (("two", 2), ("one", 1)):
        with fsspec.open(f"{s3_uri}/data/{name}.jsonl", "wb") as file:
            file.write(json.dumps({"n": number}).encode())
    dataset = load_dataset(JsonlData(path=f"{s3_uri}/data/*.jsonl", streaming=True))
    assert list(dataset.rows) == [{"n": 1}, {"n": 2}]
    assert dataset.places[1] == f"{s3_uri}/data/two.jsonl:1"
    (problem,) = problems_of(JsonlData(path=f"{s3_uri}/nothing/*.jsonl"))
    assert problem == Problem(
        "data.path",
        f"no file matches {s3_uri}/nothing/*.jsonl",
        "check the address and the credentials",
    )


@pytest.mark.parametrize(
    ("suffix", "compress"),
    [
        ("gz", gzip.compress),
        ("bz2", bz2.compress),
        ("xz", lzma.compress),
        ("zst", zstandard.ZstdCompressor().compress),
    ],
)
def test_compressed_files_are_read_as_they_are(
    suffix: str, compress: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    path = tmp_path / f"rows.jsonl.{suffix}"
    path.write_bytes(compress(b'{"a": 1}\n') + compress(b'{"a": 2}\n'))  # as pigz and pzstd do
    dataset = load_dataset(JsonlData(path=str(path)))
    assert dataset.rows == [{"a": 1}, {"a": 2}]
    assert dataset.places == [f"{path}:1", f"{path}:2"]
    path.write_bytes(compress(b'{"a": 1}\n' * 1000)[:-10])
    (problem,) = problems_of(JsonlData(path=str(path)))
    assert (problem.where, "cannot be read" in problem.what) == ("data.path", True)


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    (problem,) = problems_of(JsonlData(path=str(tmp_path)))
    assert problem.what == f"{tmp_path} is a folder"
    assert problem.remedy == f"name its files: {tmp_path}/*"


@pytest.mark.parametrize("path", ["", [], ["a.jsonl", ""]])
def test_a_path_names_a_file(path: Any) -> None:
    with pytest.raises(ValueError, match="names no file"):
        source(kind="jsonl", path=path)


# --- what can be wrong with a file --------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ('{"a": 1, "b": {"c": 1, "c": 2}}', """an object has 'c' twice: {"c": 2}"""),
        ('{"a": "\\ud83d"}', r"holds \ud83d, which is half a character"),
        ("[" * 100_000, "maximum recursion depth exceeded"),
        ('{"a": ' + "9" * 5000 + "}", "Exceeds the limit (4300 digits)"),
    ],
)
def test_what_python_alone_would_read_or_choke_on(row: str, what: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"a": "\\ud83d\\ude00"}}\n{row}\n')
    (problem,) = problems_of(JsonlData(path=str(path)))
    assert problem.where == f"{path}:2"
    assert what in problem.what
    assert load_dataset(JsonlData(path=str(path), max_bad_rows=1)).rows == [{"a": "😀"}]
    path.write_text(f"[{row}]")
    (problem,) = problems_of(JsonData(path=str(path)))
    assert (problem.where, what in problem.what) == (str(path), True)


def test_bad_csv_rows_are_named_by_the_line_they_begin_on(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(
        b'prompt,completion\r\n"a\nb",c\r\nonly one\r\nx,\xff\r\n\r\n"q"z,1\r\nd,e\r\n'
    )
    with pytest.raises(UserError) as caught:
        load_dataset(CsvData(path=str(path)))
    found = [(problem.where, problem.what) for problem in caught.value.problems]
    assert found == [
        (f"{path}:4", "has 1 values for 2 columns"),
        (f"{path}:5", "not UTF-8 text"),
        (f"{path}:7", "not csv: ',' expected after '\"' (line 7)"),
    ]
    dataset = load_dataset(CsvData(path=str(path), max_bad_rows=3))
    assert [row["prompt"] for row in dataset.rows] == ["a\nb", "d"]
    assert dataset.places[-1] == f"{path}:8"


def test_csv_needs_names_and_may_have_tabs(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes("a,b\n1,2\n".encode("utf-16"))
    (problem,) = problems_of(CsvData(path=str(path)))
    assert (problem.where, problem.what) == (f"{path}:1", "not UTF-8 text")
    with pytest.raises(ValueError, match="stands for something else in csv"):
        source(kind="csv", path=str(path), delimiter='"')
    path.write_text("a,a\n1,2\n")
    (problem,) = problems_of(CsvData(path=str(path)))
    assert problem.where == f"{path}:1"
    assert "name the columns" in problem.what
    path.write_text("a\tb\n1,2\t3\n")
    assert load_dataset(CsvData(path=str(path), delimiter="\t")).rows == [{"a": "1,2", "b": "3"}]


@pytest.mark.parametrize(
    ("text", "field", "where", "what", "remedy"),
    [
        ('{"a": 1}\n{"a": 2}', None, "{path}:2", "Extra data", "take kind: jsonl"),
        ("[1,\n2", None, "{path}:2", "not JSON", "mend"),
        ('{"rows": [], "n": 1}', None, "data.field", "holds a dict", "under: rows"),
        ('{"rows": []}', "row", "data.field", "no list under 'row'", "under: rows"),
        ("3", None, "data.field", "holds a int", "a list of rows"),
        ("[3]", None, "{path}:row 1", "a int, not an object", "a row looks like"),
    ],
)
def test_bad_json_documents(
    text: str, field: str | None, where: str, what: str, remedy: str, tmp_path: Path
) -> None:
    path = tmp_path / "rows.json"
    path.write_text(text)
    (problem,) = problems_of(JsonData(path=str(path), field=field))
    assert problem.where == where.format(path=path)
    assert what in problem.what
    assert remedy in problem.remedy


def test_columns_of_tables(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    write_parquet(path, ROWS)
    dataset = load_dataset(ParquetData(path=str(path), columns=["completion"]))
    assert dataset.rows[0] == {"completion": "2"}
    (problem,) = problems_of(ParquetData(path=str(path), columns=["complation"]))
    assert problem.where == "data.columns"
    assert problem.remedy == "did you mean 'completion'?"
    path.write_text("no parquet")
    (problem,) = problems_of(ParquetData(path=str(path)))
    assert problem.where == "data.path"


def test_columns_that_are_no_text(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "rows.parquet"
    bytes_of = pyarrow.array([b"a", "é".encode(), b"\xff"])
    pyarrow.parquet.write_table(pyarrow.table({"prompt": bytes_of, "n": [1, 2, 3]}), path)
    (problem,) = problems_of(ParquetData(path=str(path)))
    assert problem.where == f"{path}:row 3"
    assert problem.what == "prompt is bytes that are no UTF-8 text"
    rows = load_dataset(ParquetData(path=str(path), max_bad_rows=1)).rows
    assert [row["prompt"] for row in rows] == ["a", "é"]
    twice = pyarrow.Table.from_arrays([bytes_of, bytes_of], names=["prompt", "prompt"])
    pyarrow.parquet.write_table(twice, path)
    (problem,) = problems_of(ParquetData(path=str(path)))
    assert problem.what == f"{path} has two columns 'prompt'"


def test_a_table_fills_no_keys_with_nulls(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    write_parquet(
        path,
        [
            {"messages": [{"role": "user", "content": "q"}, call], "tools": None},
            {"messages": [{"role": "user", "content": "q"}], "tools": ["t"]},
        ],
    )
    rows = load_dataset(ParquetData(path=str(path))).rows
    assert rows[0] == {
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "tool_calls": [{"id": "1"}]},
        ]
    }
    assert rows[1] == {"messages": [{"role": "user", "content": "q"}], "tools": ["t"]}


# --- Hugging Face -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two splits, as `save_to_disk` writes them."""
    import datasets

    folder = tmp_path_factory.mktemp("hf") / "saved"
    splits = {
        "train": datasets.Dataset.from_list(ROWS),
        "test": datasets.Dataset.from_list(ROWS[:1]),
    }
    datasets.DatasetDict(splits).save_to_disk(folder)
    return folder


def test_a_saved_data_set(saved: Path) -> None:
    dataset = load_dataset(HuggingFaceData(name=str(saved)))
    assert dataset.rows == ROWS
    assert dataset.places[0] == f"{saved}[train]:row 1"
    streamed = load_dataset(HuggingFaceData(name=str(saved), streaming=True))
    assert (streamed.on_disk, streamed.fingerprint) == (True, dataset.fingerprint)
    test = HuggingFaceData(name=str(saved), split="test", columns=["prompt"])
    assert load_dataset(test).rows == [{"prompt": "1+1="}]
    assert load_dataset(HuggingFaceData(name=str(saved / "test"))).rows == ROWS[:1]


def test_what_can_be_wrong_with_a_data_set(saved: Path, tmp_path: Path) -> None:
    (problem,) = problems_of(HuggingFaceData(name=str(saved), split="tset"))
    assert (problem.where, problem.remedy) == ("data.split", "its splits are train, test")
    (problem,) = problems_of(HuggingFaceData(name=str(saved), revision="main"))
    assert problem.where == "data.revision"
    (problem,) = problems_of(HuggingFaceData(name=str(saved), columns=["x"]))
    assert problem.where == "data.columns"
    (problem,) = problems_of(HuggingFaceData(name=str(tmp_path / "nothing")))
    assert problem.where == "data.name"
    assert "cannot be loaded" in problem.what


def test_rows_of_the_experiment_are_json() -> None:
    with pytest.raises(ValueError, match="not a valid JSON value"):
        source(kind="rows", rows=[{"day": date(2026, 1, 1)}])  # as YAML reads 2026-01-01


def test_every_source_is_tried_here() -> None:
    assert set(DATA_SOURCES.rows()) == {*WRITERS, "hf", "rows"}
