"""What is done to rows on the way: every kind, by hand; rows that break one; plug-ins."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from algorithms.data.dataset import DataSource, load_dataset
from algorithms.data.order import epoch_order
from algorithms.data.shapes import Row
from algorithms.data.transforms import TRANSFORMS, RowTransform
from algorithms.experiment import DataField, parse_experiment
from algorithms.registry import listings
from backends.errors import UserError
from tests.algorithms.samples import ROWS, chat, document, experiment

USER = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "a"}
SYSTEM = {"role": "system", "content": "s"}


def data(rows: list[Row], *transforms: dict[str, Any], **fields: Any) -> DataSource:
    section = {"kind": "rows", "rows": rows, "transforms": list(transforms), **fields}
    made: DataSource = TypeAdapter(DataField).validate_python(section)
    return made


def transform(kind: str, **params: Any) -> dict[str, Any]:
    return {"kind": kind, "params": params}


def through(rows: list[Row], *transforms: dict[str, Any]) -> list[Row]:
    return list(load_dataset(data(rows, *transforms)).rows)


CASES: list[tuple[dict[str, Any], Row, Row]] = [
    (
        transform("rename", columns={"question": "prompt", "answer": "completion"}),
        {"question": "q", "answer": "a", "id": 1},
        {"prompt": "q", "completion": "a", "id": 1},
    ),
    (transform("rename", columns={"a": "b", "b": "a"}), {"a": 1, "b": 2}, {"b": 1, "a": 2}),
    (transform("select", columns=["b", "a"]), {"a": 1, "b": 2, "c": 3}, {"b": 2, "a": 1}),
    (
        transform("parse_json", columns=["messages"]),
        {"messages": json.dumps([USER]), "id": "1"},
        {"messages": [USER], "id": "1"},
    ),
    (
        transform("template", prompt="{{Q}} {q}\nlevel {meta.level}: ", completion="{a}"),
        {"q": "1+1?", "a": 2, "meta": {"level": 0.5}, "messages": []},
        {"q": "1+1?", "a": 2, "meta": {"level": 0.5}, "prompt": "{Q} 1+1?\nlevel 0.5: "}
        | {"completion": "2"},
    ),
    (
        transform("template", messages=[USER | {"content": "{prompt}{{"}, ANSWER]),
        {"prompt": "{id}", "id": 7},
        {"messages": [USER | {"content": "{id}{"}, ANSWER], "id": 7},
    ),
    (
        transform("system_prompt", content="s"),
        {"messages": [USER, ANSWER]},
        {"messages": [SYSTEM, USER, ANSWER]},
    ),
    (
        transform("system_prompt", content="s"),
        {"prompt": [USER], "chosen": [ANSWER], "rejected": [ANSWER]},
        {"prompt": [SYSTEM, USER], "chosen": [ANSWER], "rejected": [ANSWER]},
    ),
    (
        transform("system_prompt", content="s"),
        {"chosen": [USER, ANSWER], "rejected": [USER]},
        {"chosen": [SYSTEM, USER, ANSWER], "rejected": [SYSTEM, USER]},
    ),
    (
        transform("system_prompt", content="t"),
        {"messages": [SYSTEM, USER]},
        {"messages": [SYSTEM, USER]},
    ),
    (
        transform("system_prompt", content="t", replace=True),
        {"messages": [SYSTEM, USER]},
        {"messages": [SYSTEM | {"content": "t"}, USER]},
    ),
    (transform("function", path="copy:copy"), {"a": 1}, {"a": 1}),
]


def a_set(row: Row) -> Row:
    """What no JSON holds."""
    return {"a": {1, 2}}


@pytest.mark.parametrize(("section", "row", "expected"), CASES)
def test_what_a_transform_makes_of_a_row(section: dict[str, Any], row: Row, expected: Row) -> None:
    before = json.dumps(row)
    assert through([row], section) == [expected]
    assert json.dumps(row) == before


@pytest.mark.parametrize(
    ("conditions", "kept"),
    [
        ({"column": "level", "equals": 2}, [2]),
        ({"column": "level", "not_equals": 2}, [1, 3]),
        ({"column": "level", "one_of": [1, 3]}, [1, 3]),
        ({"column": "level", "none_of": [1, 3]}, [2]),
        ({"column": "level", "at_least": 2}, [2, 3]),
        ({"column": "level", "at_most": 2, "at_least": 2}, [2]),
        ({"column": "text", "min_length": 2}, [2, 3]),
        ({"column": "text", "max_length": 2}, [1, 2]),
        ({"column": "text", "contains": "aa"}, [2, 3]),
        ({"column": "text", "matches": "^a{1,2}$"}, [1, 2]),
        ({"column": "meta.tags", "max_length": 1}, [1]),
    ],
)
def test_filters(conditions: dict[str, Any], kept: list[int]) -> None:
    rows: list[Row] = [
        {"level": n, "text": "a" * n, "meta": {"tags": ["x"] * n}} for n in (1, 2, 3)
    ]
    assert [row["level"] for row in through(rows, transform("filter", **conditions))] == kept


def test_orders() -> None:
    rows: list[Row] = [{"n": n} for n in range(10)]

    def numbers(*transforms: dict[str, Any]) -> list[int]:
        return [row["n"] for row in through(rows, *transforms)]

    assert numbers(transform("limit", rows=3)) == [0, 1, 2]
    assert numbers(transform("limit", rows=3, skip=8)) == [8, 9]
    assert numbers(transform("shuffle")) == epoch_order(10, 0, 0).tolist()
    mixed = epoch_order(10, 5, 0).tolist()
    assert numbers(transform("shuffle", seed=5), transform("limit", rows=2)) == mixed[:2]
    even = transform("filter", column="n", one_of=[0, 2, 4, 6, 8])
    assert numbers(transform("limit", rows=3), even) == [0, 2]
    assert numbers(even, transform("limit", rows=3)) == [0, 2, 4]


def test_places_go_with_their_rows_on_disk_too(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"n": n}) + "\n" for n in range(20)))
    transforms = [
        transform("filter", column="n", at_least=5),
        transform("shuffle", seed=1),
        transform("rename", columns={"n": "m"}),
        transform("limit", rows=4),
        transform("shuffle", seed=2),
    ]
    section = {"kind": "jsonl", "path": str(path), "transforms": transforms}
    adapter: TypeAdapter[DataSource] = TypeAdapter(DataField)
    kept = load_dataset(adapter.validate_python(section))
    streamed = load_dataset(adapter.validate_python(section | {"streaming": True}))
    assert kept.places == [f"{path}:{row['m'] + 1}" for row in kept.rows]
    assert (list(streamed.rows), list(streamed.places)) == (kept.rows, kept.places)
    assert len(kept) == 4
    assert streamed.fingerprint == kept.fingerprint


@pytest.mark.parametrize(
    ("section", "row", "what"),
    [
        (
            transform("rename", columns={"qestion": "q"}),
            {"question": 1},
            "did you mean 'question'?",
        ),
        (transform("rename", columns={"a": "b"}), {"a": 1, "b": 2}, "has a column 'b' already"),
        (transform("select", columns=["x"]), {"a": 1}, "has no column 'x'; it has 'a'"),
        (transform("parse_json", columns=["a"]), {"a": "[1"}, "column 'a' is not JSON"),
        (transform("parse_json", columns=["a"]), {"a": 1}, "column 'a' is a int, not text"),
        (transform("template", prompt="{a.b}"), {"a": 1}, "has no column 'a.b'"),
        (transform("template", prompt="{a}"), {"a": None}, "column 'a' is empty"),
        (transform("template", prompt="{a}"), {"a": [1]}, "column 'a' is a list"),
        (transform("filter", column="a", at_least=1), {"a": "x"}, "at_least cannot be asked of it"),
        (transform("system_prompt", content="s"), {"prompt": "q"}, "has no turns"),
        (transform("function", path="json:dumps"), {"a": 1}, "made a str of it"),
        (transform("function", path="json:loads"), {"a": 1}, "TypeError"),
        (transform("function", path=f"{__name__}:a_set"), {"a": 1}, "is not what JSON holds"),
    ],
)
def test_a_row_that_breaks_a_transform_is_named(
    section: dict[str, Any], row: Row, what: str
) -> None:
    with pytest.raises(UserError) as caught:
        load_dataset(data([row], section))
    (problem,) = caught.value.problems
    assert problem.where == "data.rows[0]"
    assert what in problem.what
    assert f"data.transforms[0] ({section['kind']})" in problem.what
    assert problem.remedy


@pytest.mark.parametrize(
    ("section", "where", "what"),
    [
        (transform("rename", columns={}), "data.transforms[0].params.columns", ""),
        (transform("rename", columns={"a": "c", "b": "c"}), "columns", "one name"),
        (transform("filter", column="a"), "params", "keeps every row"),
        (transform("filter", column="a", matches="("), "matches", "no regular expression"),
        (transform("template"), "params", "makes nothing"),
        (transform("template", prompt="{a!r}"), "params", "no column's plain name"),
        (transform("template", prompt="{a"), "params", "is no template"),
        (transform("template", prompt="a", messages=[USER]), "params", "one shape"),
        (transform("limit", rows=0), "params.rows", ""),
        (transform("function", path="json:nothing"), "params.path", "no 'nothing'"),
        (transform("fliter"), "data.transforms[0].kind", "no transform 'fliter'"),
    ],
)
def test_mistakes_in_the_document(section: dict[str, Any], where: str, what: str) -> None:
    with pytest.raises(UserError) as caught:
        experiment(data={"kind": "rows", "rows": ROWS, "transforms": [section]})
    (problem,) = caught.value.problems
    assert where in problem.where
    assert what in problem.what


def test_transforms_that_leave_nothing() -> None:
    with pytest.raises(UserError, match="the transforms leave no row of the experiment's rows"):
        load_dataset(data(ROWS, transform("limit", rows=1, skip=100)))


def test_a_document_with_transforms_round_trips() -> None:
    section = transform("filter", column="messages", min_length=1)
    spec = experiment(data={"kind": "rows", "rows": ROWS, "transforms": [section]})
    again = parse_experiment(spec.model_dump(mode="json"))
    assert again == spec
    assert load_dataset(again.data).rows == ROWS


# --- registering --------------------------------------------------------------------------------


@pytest.fixture
def shout() -> Iterator[None]:
    class Shout(RowTransform):
        """Say it louder."""

        def apply(self, row: Row) -> Row:
            return {name: str(value).upper() for name, value in row.items()}

    TRANSFORMS.register("shout", Shout)
    yield
    TRANSFORMS.forget("shout")


@pytest.mark.usefixtures("shout")
def test_a_transform_of_ones_own_is_chosen_from_the_document() -> None:
    rows = [{"prompt": "a", "completion": "b"}]
    spec = experiment(data={"kind": "rows", "rows": rows, "transforms": [{"kind": "shout"}]})
    assert load_dataset(spec.data).rows == [{"prompt": "A", "completion": "B"}]
    (line,) = [line for line in listings() if line.kind == "shout"]
    assert (line.group, line.summary) == ("transforms", "Say it louder.")


def test_one_that_is_forgotten_is_unknown_again() -> None:
    with pytest.raises(UserError, match="there is no transform 'shout'"):
        parse_experiment(
            document(
                data={"kind": "rows", "rows": [chat("a", "b")], "transforms": [transform("shout")]}
            )
        )


def test_every_kind_is_tried_here() -> None:
    tried = {section["kind"] for section, _, _ in CASES} | {
        "filter",
        "function",
        "limit",
        "shuffle",
    }
    assert set(TRANSFORMS.rows()) == tried
