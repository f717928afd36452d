"""The benchmark runs: every row is there, and both sides did the same work. No figure is judged.

That the work is equal the benchmark checks by itself: it ends with an error where the first losses
of a training row, or the lengths of samples, are not the same on both sides.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.engine import main, verdict
from benchmarks.measuring import Goal, Measured
from benchmarks.rows import ROWS, Row

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a run at toy size writes."""
    file = tmp_path_factory.mktemp("benchmark") / "figures.json"
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        assert main(["--toy", "--threads", "1", "--repeats", "1", "--json", str(file)]) == 0
    torch.set_num_threads(threads)
    written: dict[str, Any] = json.loads(file.read_text())
    return written


@pytest.mark.slow
def test_every_row_is_measured(document: dict[str, Any]) -> None:
    assert list(document["rows"]) == [row.name for row in ROWS]
    for name, row in document["rows"].items():
        compared = row["goal"]["unit"] == "x"
        assert len(row["raw"]) == (1 if compared else 0), name
        assert len(row["engine"]) == 1, name
        if compared:
            assert row["figures"] == [row["engine"][0] / row["raw"][0]]


@pytest.mark.slow
def test_it_says_what_it_ran_on(document: dict[str, Any]) -> None:
    assert {"cpu", "cores", "torch", "python"} <= document["machine"].keys()
    assert document["options"]["threads"] == 1


async def _unmeasured(bench: object) -> Measured:
    raise AssertionError


@pytest.mark.parametrize(
    ("goal", "measured", "expected"),
    [
        (Goal("x", 1.0, 1.5), Measured(engine=(3.0, 2.0, 9.0), raw=(2.0, 2.0, 2.0)), "aim"),
        (Goal("x", 1.0, 1.5), Measured(engine=(2.0, 2.0, 9.0), raw=(2.0, 2.0, 2.0)), "yes"),
        (Goal("x", 1.0, 1.5), Measured(engine=(1.0, 1.0, 9.0), raw=(2.0, 2.0, 2.0)), "NO"),
        (Goal("GB", 1.5, 0.5), Measured(engine=(0.4,)), "aim"),
        (Goal("s", 10, 5), Measured(engine=(7.0, 1.0, 11.0)), "yes"),
        (Goal("s", 10, 5), Measured(engine=(10.1,)), "NO"),
    ],
)
def test_a_row_is_judged_by_the_median_of_its_figures(
    goal: Goal, measured: Measured, expected: str
) -> None:
    assert verdict(Row("name", "what", "against", goal, _unmeasured), measured) == expected
