"""What may watch a run: the terminal's progress bar, trackers, early stopping, anyone's own.

A callback sees plain data as it happens, and changes nothing of the training itself; all it can do
is ask for the run to end before its last step. The built-in ones are in `algorithms.watchers`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from pydantic import BaseModel, ConfigDict

from backends.errors import FlowtuneError, Problem, UserError

if TYPE_CHECKING:
    from algorithms.base import RunResult
    from algorithms.evaluators import EvaluationResult
    from algorithms.experiment import EvaluationSpec, Experiment


class CallbackFailed(FlowtuneError):
    """A callback that ends the run when it fails has failed; the cause is its own error."""


class CallbackConfig(BaseModel):
    """Base of every callback's `params:` block."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def check_folder(where: str, folder: str | Path) -> None:
    """Raises UserError if nothing can be written in the folder; makes none, as it may be a check.

    `where` is the field that names it.
    """
    path = Path(folder).absolute()
    there = next(each for each in (path, *path.parents) if each.exists())
    if not there.is_dir():
        what = f"{there} is a file, and no folder"
    elif not os.access(there, os.W_OK | os.X_OK):
        what = f"{there} cannot be written"
    else:
        return
    raise UserError(Problem(where, what, "name another folder, or let this user write there"))


class History(Protocol):
    """What a run has left in its store: the rows of all steps it goes on from."""

    def metrics(self) -> list[dict[str, Any]]:
        """One row a step, as in metrics.jsonl; None stands for a number that is not finite."""
        ...

    def evaluations(self) -> list[dict[str, Any]]:
        """One row an evaluation: step, name, score, metrics."""
        ...


class NoHistory:
    """That of a run that begins."""

    def metrics(self) -> list[dict[str, Any]]:
        """None yet."""
        return []

    def evaluations(self) -> list[dict[str, Any]]:
        """None yet."""
        return []


@dataclass(frozen=True)
class RunPlan:
    """What is known when a run is opened: where it starts, where it ends, and what was before."""

    run_id: str
    run_uri: str
    first_step: int
    total_steps: int
    save_steps: tuple[int, ...]
    flow_run_url: str | None = None
    experiment: Experiment | None = None
    history: History = field(default_factory=NoHistory)


@dataclass(frozen=True, order=True)
class EarlyEnd:
    """That a run is to end when `step` steps are done, and why."""

    step: int
    reason: str


class Callback:
    """Base of all callbacks: override what is of interest. Steps are counted done, from 1.

    One that an experiment names is built from its `Config` before anything costly starts; then it
    raises UserError if it cannot work on this machine, with a field of its `Config`, or `kind`, as
    the place: where the experiment has it is put before that. Methods run on the run's event loop,
    so what takes long belongs in a thread. One that raises is told of in the log, and the run goes
    on unless the experiment says `on_error: stop`.
    """

    Config: ClassVar[type[BaseModel]] = CallbackConfig
    stops_the_run: bool = False
    """Whether the run ends when it fails; set by the experiment."""

    @classmethod
    def check(cls, cfg: Any, evaluations: list[EvaluationSpec]) -> None:
        """Raises ValueError for parameters that do not fit the experiment's evaluations."""

    def evaluations_awaited(self) -> frozenset[str]:
        """Names of evaluations that the next step has to wait for: `early_end` depends on them."""
        return frozenset()

    def early_end(self) -> EarlyEnd | None:
        """Whether the run is to end before its last step, by what it has been told so far.

        So that a resumed run ends where an uninterrupted one does, it may follow from the rows and
        the awaited evaluations alone: `step` is one more than that of the row it follows from
        (which the next step does not wait for), or just that of the evaluation.
        """
        return None

    def on_start(self, plan: RunPlan) -> None:
        """The run is open, the backend ready; also after a resume, with all before it forgotten."""

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
