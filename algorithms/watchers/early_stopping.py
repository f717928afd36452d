"""Ends a run that does not get better any more."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from pydantic import BaseModel, Field

from algorithms.callbacks import Callback, CallbackConfig, EarlyEnd, RunPlan
from algorithms.rewards.metrics import Direction, direction_of

if TYPE_CHECKING:
    from algorithms.evaluators import EvaluationResult
    from algorithms.experiment import EvaluationSpec


class EarlyStoppingConfig(CallbackConfig):
    """What has to get better, and how long it may take."""

    metric: str = Field(
        min_length=1, description="A validation evaluation, or a column of metrics.jsonl."
    )
    mode: Direction | None = Field(
        None, description="Whether more or less is better; as the metric says if left out."
    )
    patience: int = Field(
        3, ge=1, description="The run ends with the n-th value in a row that is no better."
    )
    min_delta: float = Field(
        0.0, ge=0, description="A value is better if it beats the best one by more than this."
    )


class EarlyStopping(Callback):
    """Ends the run when an evaluation or a metric has not got better for some time.

    All it knows follows from the rows and evaluations in the run's store, so a resumed run ends
    where an uninterrupted one does. The step after an evaluation that it looks at waits for that
    evaluation; a column of the metrics is looked at one step behind, and nothing waits.
    """

    Config: ClassVar[type[BaseModel]] = EarlyStoppingConfig

    def __init__(self, cfg: EarlyStoppingConfig) -> None:
        self.cfg = cfg
        self._sign = 1.0
        self._is_evaluation = False
        self._begin()

    def _begin(self) -> None:
        self._last_step = -1
        self._best: tuple[float, int] | None = None
        self._no_better = 0
        self._end: EarlyEnd | None = None

    @classmethod
    def check(cls, cfg: EarlyStoppingConfig, evaluations: list[EvaluationSpec]) -> None:
        """The metric says what is better, and comes more often than at the end."""
        direction_of(cfg.metric, cfg.mode, evaluations, "early_stopping")
        for spec in evaluations:
            if spec.name == cfg.metric and spec.every is None:
                raise ValueError(
                    f"early_stopping looks at {spec.name}, which is evaluated at the end only: "
                    "set its every"
                )

    def evaluations_awaited(self) -> frozenset[str]:
        """The one that it looks at."""
        return frozenset({self.cfg.metric} if self._is_evaluation else ())

    def early_end(self) -> EarlyEnd | None:
        """Where the patience ran out."""
        return self._end

    def on_start(self, plan: RunPlan) -> None:
        """Take in what the store holds of the steps that the run goes on from."""
        assert plan.experiment is not None
        evaluations = plan.experiment.evaluations
        direction = direction_of(self.cfg.metric, self.cfg.mode, evaluations, "early_stopping")
        self._sign = 1.0 if direction == "max" else -1.0
        self._is_evaluation = any(spec.name == self.cfg.metric for spec in evaluations)
        self._begin()
        if self._is_evaluation:
            for row in plan.history.evaluations():
                if row["name"] == self.cfg.metric and row["step"] <= plan.first_step:
                    self._take(row["step"], row["score"])
        else:
            for row in plan.history.metrics():
                self.on_step(row)

    def on_step(self, row: Mapping[str, float]) -> None:
        """Take in the row, if it has the column."""
        if not self._is_evaluation and self.cfg.metric in row:
            self._take(int(row["step"]), row[self.cfg.metric])

    def on_evaluation(self, result: EvaluationResult) -> None:
        """Take in the score, if it is the one."""
        if self._is_evaluation and result.name == self.cfg.metric:
            self._take(result.step, result.score)

    def _take(self, step: int, value: float | None) -> None:
        """One more value; None, as JSON has it, and what is not finite are no better than any."""
        if self._end is not None or step <= self._last_step:
            return
        self._last_step = step
        number = math.nan if value is None else value
        if math.isfinite(number) and self._is_better(number):
            self._best, self._no_better = (number, step), 0
            return
        self._no_better += 1
        if self._no_better == self.cfg.patience:
            self._end = EarlyEnd(step if self._is_evaluation else step + 1, self._reason())

    def _is_better(self, number: float) -> bool:
        if self._best is None:
            return True
        return self._sign * (number - self._best[0]) > self.cfg.min_delta

    def _reason(self) -> str:
        times = f"{self.cfg.patience} {'evaluations' if self._is_evaluation else 'steps'}"
        if self._best is None:
            return f"{self.cfg.metric} was no finite number for {times}"
        best, at = self._best
        return f"{self.cfg.metric} was no better than {best:.4g}, of step {at}, for {times}"
