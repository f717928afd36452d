"""Rows: reading, what is wrong with them, fingerprint, order."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path

import fsspec
import numpy as np
import pytest

from algorithms.data.dataset import Dataset, load_dataset
from algorithms.data.order import batch_rows, epoch_order, steps_per_epoch
from algorithms.data.shapes import (
    Row,
    expected_answer,
    prompt_problem,
    row_problem,
    supervised_problem,
)
from algorithms.data.sources import JsonlData, RowsData
from backends.errors import Problem, UserError
from tests.algorithms.samples import chat


def write(path: Path, *lines: str) -> str:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def test_jsonl_rows_know_their_line(tmp_path: Path) -> None:
    one = write(tmp_path / "a.jsonl", json.dumps(chat("1", "2")), "", json.dumps(chat("3", "4")))
    two = write(tmp_path / "b.jsonl", json.dumps(chat("5", "6")))
    dataset = load_dataset(JsonlData(path=[one, two]))
    assert dataset.rows == [chat("1", "2"), chat("3", "4"), chat("5", "6")]
    assert dataset.places == [f"{one}:1", f"{one}:3", f"{two}:1"]
    assert dataset.source == f"{one}, {two}"


def test_rows_come_through_fsspec() -> None:
    with fsspec.open("memory://bucket/rows.jsonl", "wb") as file:
        file.write(json.dumps(chat("1", "2")).encode())
    dataset = load_dataset(JsonlData(path="memory://bucket/rows.jsonl"))
    assert dataset.rows == [chat("1", "2")]
    assert dataset.places == ["memory://bucket/rows.jsonl:1"]


def test_a_missing_file_is_named_with_its_neighbour(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", "{}")
    with pytest.raises(UserError) as caught:
        load_dataset(JsonlData(path=str(tmp_path / "trian.jsonl")))
    (problem,) = caught.value.problems
    assert problem.where == "data.path"
    assert str(tmp_path / "trian.jsonl") in problem.what
    assert problem.remedy == f"did you mean {tmp_path / 'train.jsonl'}?"


def test_bad_lines_are_all_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"prompt": "a", "completion": "b"}\n{"prompt": "a",\n[1]\n\xff\xfe\n')
    with pytest.raises(UserError) as caught:
        load_dataset(JsonlData(path=str(path)))
    found = [(problem.where, problem.what) for problem in caught.value.problems]
    assert found == [
        (f"{path}:2", "not JSON: Expecting property name enclosed in double quotes at column 16"),
        (f"{path}:3", "a list, not an object"),
        (f"{path}:4", "not UTF-8 text (invalid start byte)"),
    ]
    assert all(problem.remedy for problem in caught.value.problems)


def test_many_bad_lines_are_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "bad.jsonl", *["{"] * 50)
    with pytest.raises(UserError) as caught:
        load_dataset(JsonlData(path=path))
    problems = caught.value.problems
    assert len(problems) == 21
    assert problems[19].where == f"{path}:20"
    assert problems[20].where == path
    assert problems[20].what == "30 more bad rows (50 in all)"


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "empty.jsonl", "", "  ")
    with pytest.raises(UserError, match="holds no rows"):
        load_dataset(JsonlData(path=path))


def test_rows_of_the_experiment_know_their_index() -> None:
    assert load_dataset(RowsData(rows=[chat("a", "b")])).places == ["data.rows[0]"]


def test_bad_rows_are_skipped_up_to_a_limit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = json.dumps(chat("1", "2")), json.dumps(chat("1"))
    path = write(tmp_path / "rows.jsonl", good, "{", bad, good, "[]")
    dataset = load_dataset(JsonlData(path=path, max_bad_rows=3), check=row_problem)
    assert dataset.places == [f"{path}:1", f"{path}:4"]
    assert dataset.bad_rows.skipped == 3
    assert dataset.unreadable == []
    assert f"bad row skipped: {path}:3: messages has no assistant turn" in caplog.text
    assert "bad rows skipped: 3; data.max_bad_rows allows 3" in caplog.text
    with pytest.raises(UserError) as caught:
        load_dataset(JsonlData(path=path, max_bad_rows=2), "evaluations.x.data", check=row_problem)
    *_, last = caught.value.problems
    assert last.where == "evaluations.x.data.max_bad_rows"
    assert last.what == "there are 3 bad rows, and 2 may be skipped"
    with pytest.raises(UserError) as caught:
        load_dataset(JsonlData(path=path), check=row_problem)
    assert [problem.where for problem in caught.value.problems] == [f"{path}:2", f"{path}:5"]


def test_a_check_that_fails_on_a_row_names_it(tmp_path: Path) -> None:
    def check(row: Row, place: str) -> Problem | None:
        return None if row["level"] else Problem(place, "has no level")

    path = write(tmp_path / "rows.jsonl", json.dumps(chat("1", "2")))
    with pytest.raises(UserError, match=r"rows.jsonl:1: the check of rows raised KeyError"):
        load_dataset(JsonlData(path=path)).without_bad(check)


def test_nothing_but_bad_rows_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", "{", "{")
    with pytest.raises(UserError, match="there is nothing but bad rows \\(2 of 2\\)"):
        load_dataset(JsonlData(path=path, max_bad_rows=9))


USER = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "a"}


@pytest.mark.parametrize(
    ("row", "what", "remedy"),
    [
        ({"text": "a"}, "has neither messages nor prompt and completion, but 'text'", "messages"),
        ({"conversations": [USER]}, "but 'conversations'", "write it as messages"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "is a preference", "kind: dpo"),
        ({"messages": [USER, ANSWER], "tools": "x"}, 'tools is "x"', "list of objects"),
        ({"messages": [USER, ANSWER], "tools": ["x"]}, 'tools is ["x"]', "list of objects"),
        (
            {"messages": [USER, ANSWER], "chat_template_kwargs": []},
            "chat_template_kwargs is []",
            "give an object",
        ),
        (
            {"messages": [USER, {**ANSWER, "tool_calls": "x"}]},
            'messages[1].tool_calls is "x"',
            "list of objects",
        ),
        ({"prompt": "a"}, "completion is missing", "both"),
        ({"prompt": "", "completion": "a"}, "prompt is empty", "text"),
        ({"prompt": "a", "completion": [ANSWER]}, "a str and a list", "two strings"),
        ({"messages": [USER, ANSWER], "prompt": "a"}, "messages and prompt", "keep one"),
        ({"messages": []}, "messages is []", "list of turns"),
        ({"messages": [USER, "x"]}, 'messages[1] is "x"', "role"),
        ({"messages": [{"content": "q"}, ANSWER]}, "messages[0] has no role", "roles are"),
        (
            {"messages": [USER, {"role": "asistant", "content": "a"}]},
            'messages[1].role is "asistant"',
            "did you mean 'assistant'?",
        ),
        ({"messages": [USER, {"role": "assistant"}]}, "messages[1] has no content", "string"),
        ({"messages": [{"role": "user", "content": 3}, ANSWER]}, "[0].content is 3", "string"),
        ({"messages": [USER]}, "messages has no assistant turn", "add a turn"),
        ({"prompt": [USER, ANSWER], "completion": [USER]}, "completion has no assistant", "add"),
        ({"messages": [ANSWER]}, "starts with an assistant turn", "user turn"),
    ],
)
def test_what_is_wrong_with_a_row(row: dict[str, object], what: str, remedy: str) -> None:
    problem = row_problem(row, "rows.jsonl:7")
    assert problem is not None
    assert problem.where == "rows.jsonl:7"
    assert what in problem.what
    assert remedy in problem.remedy


@pytest.mark.parametrize(
    "row",
    [
        chat("a", "b", "c", "d"),
        {"prompt": "a", "completion": ""},
        {"prompt": [USER], "completion": [ANSWER]},
        {"messages": [{"role": "system", "content": ""}, USER, ANSWER], "tools": []},
        {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [{}]}]},
        {"messages": [USER, ANSWER], "tools": '[{"type": "function"}]', "text": "a column"},
    ],
)
def test_good_rows(row: dict[str, object]) -> None:
    assert row_problem(row, "x") is None


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"text": "a"}, None),
        ({"text": ""}, 'text is ""'),
        ({"text": 3}, "text is 3"),
        ({"prompt": "a", "completion": "b", "label": True}, None),
        ({"prompt": "a", "completion": "b", "label": False}, "an unpaired preference"),
        ({"prompt": "a", "completion": "b", "label": "False"}, "an unpaired preference"),  # csv
        ({"prompt": "a", "completion": "b", "label": False, "source": "x"}, None),
        ({"prompt": "a", "completion": "b", "label": 0}, None),
        ({"messages": [USER, ANSWER], "label": False}, None),
    ],
)
def test_what_sft_takes_beside_these(row: dict[str, object], what: str | None) -> None:
    problem = supervised_problem(row, "x")
    assert (problem is None) if what is None else (problem is not None and what in problem.what)


def test_a_prompt_ends_where_an_answer_begins() -> None:
    assert prompt_problem({"prompt": [USER]}, "x") is None
    for turn in (ANSWER, {"role": "system", "content": "s"}):
        problem = prompt_problem({"prompt": [USER, turn]}, "x")
        assert problem is not None
        assert (
            problem.what == f"prompt ends with a turn of {turn['role']}, which asks for no answer"
        )


def test_expected_answers() -> None:
    assert expected_answer(chat("a", "b", "c", "d")) == "d"
    assert expected_answer({"prompt": "a", "completion": " b"}) == " b"
    assert expected_answer({"prompt": [USER], "completion": [ANSWER]}) == "a"


def test_the_fingerprint_is_of_the_rows_in_their_order() -> None:
    def print_of(*rows: dict[str, object]) -> str:
        return Dataset(list(rows), ["x"] * len(rows), "anywhere").fingerprint

    # sha256 of '{"a":"é","b":[1]}\n{}\n'
    golden = "10f476730d1ea11a19b55684fdbba5094f1e11a96cabbb0a2ac97795b914d629"
    assert print_of({"b": [1], "a": "é"}, {}) == golden
    assert print_of({"a": "é", "b": [1]}, {}) == golden
    assert print_of({}, {"a": "é", "b": [1]}) != golden


def test_the_order_is_golden() -> None:
    assert epoch_order(10, 0, 0).tolist() == [3, 2, 1, 8, 6, 0, 7, 4, 5, 9]
    assert epoch_order(10, 0, 1).tolist() == [7, 4, 5, 1, 9, 8, 6, 2, 0, 3]
    assert epoch_order(10, 1, 0).tolist() == [9, 2, 4, 7, 5, 0, 8, 6, 3, 1]


def test_an_epoch_holds_every_row_once() -> None:
    assert steps_per_epoch(10, 4) == 3
    batches = [batch_rows(10, 4, seed=3, step=step) for step in range(6)]
    assert [len(batch) for batch in batches] == [4, 4, 2, 4, 4, 2]
    first, second = list(chain(*batches[:3])), list(chain(*batches[3:]))
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert first == epoch_order(10, 3, 0).tolist()
    assert second == epoch_order(10, 3, 1).tolist()


def test_orders_are_evenly_spread() -> None:
    counts = np.zeros((4, 4))
    for seed in range(2000):
        for place, row in enumerate(epoch_order(4, seed, 0)):
            counts[place, row] += 1
    assert np.abs(counts / 2000 - 0.25).max() < 0.04
