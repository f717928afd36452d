"""Estimators over several scores, against hand-computed values and every subset there is."""

from __future__ import annotations

import math
from itertools import combinations

import pytest

from algorithms.rewards.metrics import (
    likelihood_metrics,
    pass_at_k,
    pass_hat_k,
    reward_metrics,
)


def test_pass_at_k_by_hand() -> None:
    # 5 answers, 2 right: 1 - C(3,k)/C(5,k) = 1 - 3/5, 1 - 3/10, 1 - 1/10, 1.
    assert [pass_at_k(5, 2, k) for k in range(1, 6)] == pytest.approx([0.4, 0.7, 0.9, 1.0, 1.0])
    # C(2,k)/C(5,k) = 2/5, 1/10, 0.
    assert [pass_hat_k(5, 2, k) for k in range(1, 4)] == pytest.approx([0.4, 0.1, 0.0])


def test_they_are_shares_of_all_subsets() -> None:
    for n in range(1, 8):
        for c in range(n + 1):
            right = [True] * c + [False] * (n - c)
            for k in range(1, n + 1):
                subsets = list(combinations(right, k))
                any_right = sum(map(any, subsets)) / len(subsets)
                all_right = sum(map(all, subsets)) / len(subsets)
                assert pass_at_k(n, c, k) == pytest.approx(any_right, abs=1e-12)
                assert pass_hat_k(n, c, k) == pytest.approx(all_right, abs=1e-12)


def test_many_answers_neither_overflow_nor_lose_digits() -> None:
    # 1 - C(9999,1000)/C(10000,1000) = 1 - 9000/10000
    assert pass_at_k(10_000, 1, 1000) == pytest.approx(0.1, abs=1e-12)
    assert pass_hat_k(10_000, 9_999, 1000) == pytest.approx(0.9, abs=1e-12)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 2, 0), (4, 2, 5), (4, 5, 1), (4, -1, 1)])
def test_what_cannot_be_is_refused(n: int, c: int, k: int) -> None:
    for estimator in (pass_at_k, pass_hat_k):
        with pytest.raises(ValueError, match=f"k = {k} of n = {n}"):
            estimator(n, c, k)


def test_reward_metrics_by_hand() -> None:
    rewards = [[1.0, 0.0, 0.5, 1.0], [0.0, 0.0, 0.5, 0.0]]
    metrics = reward_metrics(rewards, pass_threshold=0.5, pass_at=[1, 2, 4])
    # Of four answers 3 and 1 pass: pass@2 is 1 - 0/6 and 1 - 3/6, pass^2 is 3/6 and 0/6.
    assert metrics == pytest.approx(
        {
            "reward/mean": 3 / 8,
            "reward/std": math.sqrt(2.5 / 8 - (3 / 8) ** 2),
            "pass_rate": 4 / 8,
            "pass@1": 4 / 8,
            "pass^1": 4 / 8,
            "pass@2": 0.75,
            "pass^2": 0.25,
            "pass@4": 1.0,
            "pass^4": 0.0,
        }
    )
    assert reward_metrics(rewards, 1.0)["pass_rate"] == 2 / 8


def test_likelihood_metrics_by_hand() -> None:
    metrics = likelihood_metrics(nll_sum=6 * math.log(2), tokens=3, text_bytes=12)
    expected = {"nll": 2 * math.log(2), "perplexity": 4.0, "bits_per_byte": 0.5}
    assert metrics == pytest.approx(expected)
    assert likelihood_metrics(math.inf, 3, 12)["perplexity"] == math.inf
    assert set(likelihood_metrics(1.0, 1, 0)) == {"nll", "perplexity"}
