"""What may watch a run: the terminal's progress bar, loggers, early stopping, anyone's own.

A callback sees plain data as it happens and changes nothing of the training itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from algorithms.base import RunResult
    from algorithms.evaluators import EvaluationResult


@dataclass(frozen=True)
class RunPlan:
    """What is known when a run is opened: where it starts and where it ends."""

    run_id: str
    run_uri: str
    first_step: int
    total_steps: int
    save_steps: tuple[int, ...]
    flow_run_url: str | None = None


class Callback:
    """Base of all callbacks: override what is of interest. Steps are counted done, from 1."""

    def on_start(self, plan: RunPlan) -> None:
        """The run is open, the backend ready; also after a resume."""

    def on_step(self, row: Mapping[str, float]) -> None:
        """A step is done; `row` is its line of metrics.jsonl."""

    def on_evaluation(self, result: EvaluationResult) -> None:
        """An evaluation is done."""

    def on_save(self, step: int, uri: str) -> None:
        """The checkpoint after `step` is complete in the run's store."""

    def on_notice(self, words: str) -> None:
        """Something that a person who watches should know: a recovery, a stop, a wait."""

    def on_end(self, result: RunResult) -> None:
        """The run is over, whatever way it ended."""
