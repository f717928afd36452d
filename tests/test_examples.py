"""Every experiment that is shipped is in order."""

from __future__ import annotations

from pathlib import Path

import pytest

from algorithms.check import check_experiment
from algorithms.stages import check_stages, has_stages
from examples.learn import LESSONS, Lesson

ROOT = Path(__file__).parents[1]
FILES = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("examples/**/*.yaml"))


@pytest.mark.parametrize("file", FILES)
def test_it_is_in_order(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    problems = check_stages(file)[1] if has_stages(file) else check_experiment(file)[1]
    # Weights that another run has to leave first may be missing.
    assert [problem for problem in problems if " runs/" not in problem.what] == []


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda one: f"{one.name}-{one.evaluation}")
def test_a_lesson_has_its_files(lesson: Lesson) -> None:
    for name in filter(None, (lesson.start, lesson.name)):
        assert f"examples/{name}.yaml" in FILES
