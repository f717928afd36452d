"""Learning rates and save marks, against values worked out by hand."""

from __future__ import annotations

import math

import pytest

from algorithms.schedules import LearningRateSchedule, learning_rate_at, save_marks


def rates(total: int, **schedule: object) -> list[float]:
    shape = LearningRateSchedule.model_validate(schedule)
    return [learning_rate_at(step, total, 2.0, shape) for step in range(total)]


def test_constant_stays() -> None:
    assert rates(4) == [2.0, 2.0, 2.0, 2.0]


def test_warm_up_reaches_the_peak_at_its_last_step() -> None:
    assert rates(6, warmup_steps=4) == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]


def test_linear_falls_by_equal_steps_towards_zero() -> None:
    assert rates(4, kind="linear") == [2.0, 1.5, 1.0, 0.5]


def test_linear_falls_to_the_minimum_ratio() -> None:
    # 0.5 + 0.5 * (1 - d), d = 0, 1/4, 1/2, 3/4
    assert rates(4, kind="linear", min_ratio=0.5) == [2.0, 1.75, 1.5, 1.25]


def test_decay_begins_after_the_warm_up() -> None:
    assert rates(6, kind="linear", warmup_steps=2) == [1.0, 2.0, 2.0, 1.5, 1.0, 0.5]


def test_cosine_is_half_way_down_at_half_time() -> None:
    got = rates(4, kind="cosine")
    want = [2.0, 1.0 + math.sqrt(0.5), 1.0, 1.0 - math.sqrt(0.5)]
    assert got == pytest.approx(want, abs=1e-15)


def test_a_run_shorter_than_its_warm_up_never_reaches_the_peak() -> None:
    assert rates(2, kind="cosine", warmup_steps=4) == [0.5, 1.0]


@pytest.mark.parametrize(
    ("total", "every", "fractions", "marks"),
    [
        (37, None, [0.5, 1.0], [19, 37]),
        (100, None, [0.07], [7, 100]),
        (10, 5, None, [5, 10]),
        (11, 5, None, [5, 10, 11]),
        (3, 5, None, [3]),
        (1, None, [0.001, 0.5, 1.0], [1]),
        (200, None, None, [200]),
    ],
)
def test_save_marks(
    total: int, every: int | None, fractions: list[float] | None, marks: list[int]
) -> None:
    assert save_marks(total, every, fractions) == marks
