"""The orchestration benchmark runs, and loses nothing of a run. No speed is judged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.orchestration import Figure, main


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_server")
def test_both_loops_run_and_nothing_is_lost_of_a_long_run(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    asked = ["--rows", "operation-250ms", "long", "--toy", "--repeats", "1", "--json", str(file)]
    assert main(asked) == 0
    rows = json.loads(file.read_text())["rows"]
    assert list(rows) == ["operation-250ms", "long"]
    [ratio] = rows["operation-250ms"]
    assert 0.9 < ratio["values"][0] < 10
    lost = {figure["what"]: figure["values"] for figure in rows["long"][2:]}
    assert lost == {
        "rows of metrics lost or doubled": [0],
        "task runs that Prefect does not show": [0],
    }


def test_a_figure_is_judged_by_its_median() -> None:
    assert Figure("x", (1.0, 1.09, 5.0), 1.1).reached
    assert not Figure("x", (1.2, 1.12, 1.0), 1.1).reached
