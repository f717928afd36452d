"""What a report is made of, as a run's store holds it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from algorithms.base import Transcript
from algorithms.evaluators import AnySample

LOSS_COLUMNS = ("reward/mean", "train_mean_nll", "loss")
"""The column that stands for the training itself; the first one present."""


@dataclass(frozen=True, slots=True)
class EvaluationPoint:
    """One evaluation after so many steps: its score, and all that was measured."""

    name: str
    step: int
    score: float
    rows: int
    samples: Sequence[AnySample] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    per_token: bool = False
    """Whether the answers of a pair are compared by their log-probability per token."""

    @property
    def is_likelihood(self) -> bool:
        """Whether the score is an NLL, of which less is better."""
        return "nll" in self.metrics

    @property
    def is_preference(self) -> bool:
        """Whether the score is the share of pairs whose chosen answer is the likelier one."""
        return "accuracy" in self.metrics

    @property
    def margin_unit(self) -> str:
        """What the margins of pairs are counted in."""
        return "nats/token" if self.per_token else "nats"


@dataclass(frozen=True, slots=True)
class CheckpointLine:
    """One checkpoint: its address, its place below the run's folder, and its size."""

    step: int
    uri: str
    path: str
    size_bytes: int
    best_by: str | None = None
    """Of the best one, the metric that says so."""


@dataclass(frozen=True)
class RunRecord:
    """A run, as far as it came; `rollouts` are those of its first and last kept step."""

    run_id: str
    name: str
    status: str
    uri: str
    experiment: Mapping[str, Any]
    data: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)
    rows: Sequence[Mapping[str, float]] = ()
    evaluations: Sequence[EvaluationPoint] = ()
    checkpoints: Sequence[CheckpointLine] = ()
    rollouts: Mapping[int, Sequence[Transcript]] = field(default_factory=dict)
    error: str | None = None
    flow_run_url: str | None = None


def column(rows: Sequence[Mapping[str, float]], name: str) -> tuple[list[int], list[float]]:
    """The steps at which a column of the metrics has a number, and the numbers."""
    known = [
        (int(row["step"]), float(row[name]))
        for row in rows
        if row.get(name) is not None and math.isfinite(row[name])
    ]
    return [step for step, _ in known], [value for _, value in known]


def by_name(points: Iterable[EvaluationPoint]) -> dict[str, list[EvaluationPoint]]:
    """The points of each evaluation, by step."""
    grouped: dict[str, list[EvaluationPoint]] = {}
    for point in sorted(points, key=lambda point: point.step):
        grouped.setdefault(point.name, []).append(point)
    return grouped
