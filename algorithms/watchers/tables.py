"""CSV: a run's metrics and evaluations as tables that anything opens."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, Field

from algorithms.callbacks import Callback, CallbackConfig, RunPlan, check_folder

if TYPE_CHECKING:
    from algorithms.evaluators import EvaluationResult


class CsvConfig(CallbackConfig):
    """Where the tables go."""

    folder: str = Field(
        "csv", min_length=1, description="Holds <run id>/metrics.csv and <run id>/evaluations.csv."
    )


class CsvTables(Callback):
    """Writes metrics and evaluations as CSV, one row a step and one an evaluation.

    When a run is continued the tables are written anew from the run's store, up to its checkpoint.
    """

    Config: ClassVar[type[BaseModel]] = CsvConfig

    def __init__(self, cfg: CsvConfig) -> None:
        """Raises UserError if the folder cannot be written."""
        check_folder("folder", cfg.folder)
        self.cfg = cfg

    def on_start(self, plan: RunPlan) -> None:
        """Begin both tables with what the store holds."""
        folder = Path(self.cfg.folder) / plan.run_id
        folder.mkdir(parents=True, exist_ok=True)
        rows = plan.history.metrics()
        self._metrics = _Table(folder / "metrics.csv", rows)
        evaluations = plan.history.evaluations()
        self._evaluations = _Table(
            folder / "evaluations.csv",
            [{"step": row["step"], "name": row["name"], **row["metrics"]} for row in evaluations],
        )

    def on_step(self, row: Mapping[str, float]) -> None:
        """One line."""
        self._metrics.add(row)

    def on_evaluation(self, result: EvaluationResult) -> None:
        """One line."""
        self._evaluations.add({"step": result.step, "name": result.name, **result.metrics})


class _Table:
    """A CSV file; written anew when a row brings a column that it has not had."""

    def __init__(self, path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
        self._path = path
        rows = list(rows)
        self._columns = list(dict.fromkeys(column for row in rows for column in row))
        self._write(rows)

    def add(self, row: Mapping[str, Any]) -> None:
        """Put a row behind the others."""
        new = [column for column in row if column not in self._columns]
        if new:
            with self._path.open(newline="", encoding="utf-8") as file:
                before: list[dict[str, Any]] = list(csv.DictReader(file))
            self._columns += new
            self._write([*before, row])
        else:
            with self._path.open("a", newline="", encoding="utf-8") as file:
                csv.DictWriter(file, self._columns).writerow(row)

    def _write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        with self._path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self._columns)
            writer.writeheader()
            writer.writerows(rows)
