"""docs/data.md says what is there: its tables are the registries', its examples work."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter

from algorithms.data.dataset import DATA_SOURCES, DataSource
from algorithms.data.shapes import preference_problem, supervised_problem
from algorithms.data.transforms import TRANSFORMS, RowTransform
from algorithms.experiment import DataField

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def table(title: str) -> list[list[str]]:
    """The cells of the first table below a heading."""
    section = PAGE.partition(f"## {title}\n")[2]
    lines = re.search(r"(?:^\|.*\n)+", section, re.MULTILINE)
    assert lines is not None
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines[0].splitlines()[2:]
    ]


def names(cell: str) -> set[str]:
    return set(re.findall(r"`(\w+)`", cell))


def test_every_source_and_its_fields() -> None:
    shown = {
        cells[0].strip("`"): (names(cells[2]), cells[4]) for cells in table("Where rows come from")
    }
    shared = {*DataSource.model_fields, "streaming"}
    assert shown == {
        kind: (
            set(row.item.model_fields) - shared,
            "yes" if "streaming" in row.item.model_fields else "no",
        )
        for kind, row in DATA_SOURCES.rows().items()
    }


def test_every_transform_and_its_parameters() -> None:
    shown = {cells[0].strip("`"): names(cells[2]) for cells in table("Transforms")}
    configs: dict[str, Any] = {kind: row.item for kind, row in TRANSFORMS.rows().items()}
    assert shown == {kind: set(item.Config.model_fields) for kind, item in configs.items()}


@pytest.mark.parametrize("text", blocks("yaml"))
def test_each_section_is_valid(text: str) -> None:
    section = yaml.safe_load(text)["data"]
    data: DataSource = TypeAdapter(DataField).validate_python(section)
    for transform in data.transforms:
        transform.build()


def test_each_row_is_good() -> None:
    (text,) = blocks("json")
    for line in text.splitlines():
        row = json.loads(line)
        check = preference_problem if "chosen" in row else supervised_problem
        assert check(row, line) is None


def test_the_transform_of_ones_own() -> None:
    (text,) = blocks("python")
    code: dict[str, Any] = {}
    exec(text, code)
    strip = code["Strip"](code["StripConfig"](column="a"))
    assert isinstance(strip, RowTransform)
    assert strip.apply({"a": " b ", "c": 1}) == {"a": "b", "c": 1}
