"""What many scores say together: means, pass rates, pass@k, pass^k, held-out likelihood.

Notation: P prompts, N answers to each.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from algorithms.experiment import EvaluationSpec

Direction = Literal["max", "min"]

DIRECTIONS: Mapping[str, Direction] = {
    "reward/mean": "max",
    "accuracy": "max",
    "nll": "min",
    "train_mean_nll": "min",
    "loss": "min",
}
"""Whether more or less of a metric is better, for those that say."""


SCORES: Mapping[str, str] = {"benchmark": "reward/mean", "nll": "nll", "preference": "accuracy"}
"""Which of its metrics is the score of each kind of evaluation."""


def direction_of(
    metric: str, mode: Direction | None, evaluations: Sequence[EvaluationSpec], where: str
) -> Direction:
    """Whether more or less is better: `mode`, or what the evaluation of that name or column says.

    Raises ValueError for a test evaluation, and for a metric that does not say; `where` is the
    section whose `metric` and `mode` these are.
    """
    evaluation = next((spec for spec in evaluations if spec.name == metric), None)
    if evaluation is not None and evaluation.role == "test":
        raise ValueError(
            f"{where}.metric {metric!r} is a test evaluation, and everything is chosen on "
            "validation: name another one, or give this one role: validation"
        )
    direction = mode or DIRECTIONS.get(metric if evaluation is None else evaluation.score_metric)
    if direction is None:
        names = ", ".join(spec.name for spec in evaluations if spec.role == "validation")
        raise ValueError(
            f"{where}.metric {metric!r} is no evaluation of this experiment (they are: "
            f"{names or 'none'}); for a column of metrics.jsonl set {where}.mode to max or min"
        )
    return direction


def scores(metrics: Mapping[str, float]) -> dict[str, tuple[float | None, float]]:
    """Each evaluation's score before and after, from a run's final metrics."""
    found = {}
    for name, value in metrics.items():
        scored = re.fullmatch(rf"val/([^/]+)/({'|'.join(SCORES.values())})", name)
        if scored and value is not None:
            found[scored[1]] = (metrics.get(f"{name}/first"), value)
    return found


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that at least one of k answers is right, from n answers of which c are.

    `1 - C(n - c, k) / C(n, k)`: the share of the subsets of k that hold a right one, which is the
    unbiased estimator of Chen et al., Evaluating Large Language Models Trained on Code (2021).
    Raises ValueError unless 1 <= k <= n and 0 <= c <= n.
    """
    _check(n, c, k)
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def pass_hat_k(n: int, c: int, k: int) -> float:
    """The chance that all of k answers are right, pass^k, from n answers of which c are.

    `C(c, k) / C(n, k)`, as in Yao et al., tau-bench (2024). Raises ValueError as `pass_at_k` does.
    """
    _check(n, c, k)
    return math.comb(c, k) / math.comb(n, k)


def _check(n: int, c: int, k: int) -> None:
    if not (1 <= k <= n and 0 <= c <= n):
        raise ValueError(f"k = {k} of n = {n} answers, c = {c} of them right")


def reward_metrics(
    rewards_P_N: Sequence[Sequence[float]], pass_threshold: float, pass_at: Sequence[int] = ()
) -> dict[str, float]:
    """Mean and standard deviation of all P * N rewards, and how often answers pass.

    An answer passes with a reward of at least `pass_threshold`; the `pass@k` and `pass^k` of each k
    in `pass_at` are means over the prompts.
    """
    rewards = [reward for rewards_N in rewards_P_N for reward in rewards_N]
    mean = math.fsum(rewards) / len(rewards)
    variance = math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards)
    counts = [
        (len(rewards_N), sum(reward >= pass_threshold for reward in rewards_N))
        for rewards_N in rewards_P_N
    ]
    metrics = {
        "reward/mean": mean,
        "reward/std": math.sqrt(variance),
        "pass_rate": sum(passed for _, passed in counts) / len(rewards),
    }
    for k in pass_at:
        metrics[f"pass@{k}"] = math.fsum(pass_at_k(n, c, k) for n, c in counts) / len(counts)
        metrics[f"pass^{k}"] = math.fsum(pass_hat_k(n, c, k) for n, c in counts) / len(counts)
    return metrics


def likelihood_metrics(nll_sum: float, tokens: int, text_bytes: int) -> dict[str, float]:
    """The NLL in nats per supervised token, its exponential, and bits per byte of the text.

    `nll_sum` is in nats over all `tokens`; the end of a turn is one of them, and has no bytes.
    """
    nll = nll_sum / tokens
    metrics = {"nll": nll, "perplexity": math.exp(nll) if nll < 700 else math.inf}
    if text_bytes:
        metrics["bits_per_byte"] = nll_sum / math.log(2) / text_bytes
    return metrics
