"""Advantages and the KL penalty, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from algorithms.rewards.advantages import STD_EPS, group_advantages, is_constant, kl_penalties

REWARDS = [1.0, 0.0, 0.0, 3.0]


def test_mean_centred() -> None:
    assert group_advantages(REWARDS, "mean") == [0.0, -1.0, -1.0, 2.0]


def test_mean_and_standard_deviation() -> None:
    std = math.sqrt((0 + 1 + 1 + 4) / 4)  # of the population
    expected = [value / (std + STD_EPS) for value in (0.0, -1.0, -1.0, 2.0)]
    assert group_advantages(REWARDS, "mean_std") == expected
    assert sum(value**2 for value in expected) / 4 == pytest.approx(1, abs=2e-6)


def test_leave_one_out() -> None:
    # Each against the mean of the other three: 3/3, 4/3, 4/3, 1/3.
    expected = [0.0, -4 / 3, -4 / 3, 8 / 3]
    assert group_advantages(REWARDS, "leave_one_out") == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("kind", ["mean", "mean_std", "leave_one_out"])
def test_rewards_that_are_alike_give_exactly_nothing(kind: str) -> None:
    # The mean of three 0.1 is not 0.1 in floating point.
    assert group_advantages([0.1, 0.1, 0.1], kind) == [0.0, 0.0, 0.0]  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["mean", "mean_std", "leave_one_out"])
def test_advantages_do_not_depend_on_a_bonus_for_all(kind: str) -> None:
    plain = group_advantages(REWARDS, kind)  # type: ignore[arg-type]
    raised = group_advantages([reward + 16 for reward in REWARDS], kind)  # type: ignore[arg-type]
    assert raised == pytest.approx(plain, abs=1e-12)
    assert sum(plain) == pytest.approx(0, abs=1e-12)


def test_one_sample_is_no_group() -> None:
    with pytest.raises(ValueError, match="one sample has no advantages"):
        group_advantages([1.0], "mean")


def test_constant_groups() -> None:
    assert is_constant([0.5, 0.5])
    assert not is_constant([0.5, 0.25])


def test_the_kl_penalty_is_what_the_policy_likes_more_than_the_base_on_average_centred() -> None:
    sampled = np.asarray([-1.0, -2.0, -0.5])
    base = np.asarray([-1.5, -1.0, -2.0])
    # d = 0.5, -1, 1.5 with mean 1/3; the penalty is 0.3 * (1/3 - d).
    expected = [0.3 * (1 / 3 - 0.5), 0.3 * (1 / 3 + 1), 0.3 * (1 / 3 - 1.5)]
    penalties = kl_penalties(sampled, base, 0.3)
    assert penalties.tolist() == pytest.approx(expected, abs=1e-15)
    assert penalties.sum() == pytest.approx(0, abs=1e-15)
