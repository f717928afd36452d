"""What all experiment trackers have in common: one run there for one run here, resumed with it."""

from __future__ import annotations

import importlib.util
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from algorithms.callbacks import Callback, RunPlan
from backends.errors import Problem, UserError

if TYPE_CHECKING:
    from algorithms.base import RunResult
    from algorithms.evaluators import EvaluationResult
    from algorithms.experiment import Experiment

OPEN_SECONDS = 60.0
"""How long a run that is to stop if its tracker fails waits for it to open."""

LAST_WORDS_SECONDS = 60.0
"""How long the end of a run waits for its tracker."""


class Tracker(Callback, ABC):
    """Hands each row and evaluation to a tracker's own library, in a thread of its own.

    The run there is named after the run here, and goes on where that does: rows that it has are not
    sent again, and rows that it lacks come from the run's store.
    """

    kind: ClassVar[str]
    """Its kind, and the extra of flowtune that brings the library."""
    module: ClassVar[str]
    """The library."""

    def __init__(self, cfg: Any) -> None:
        """Raises UserError if the library is not installed."""
        if importlib.util.find_spec(self.module) is None:
            raise UserError(
                Problem(
                    "kind",
                    f"the library {self.module} is not installed",
                    f"pip install 'flowtune[{self.kind}]'",
                )
            )
        self.cfg = cfg
        self._sent_to = 0
        self._evaluations_sent: set[tuple[str, int]] = set()
        self._worker: ThreadPoolExecutor | None = None
        self._under_way: deque[Future[None]] = deque()
        self._opened = False

    # -- in the worker's thread ------------------------------------------------------------------

    @abstractmethod
    def open(self, plan: RunPlan) -> int:
        """Begin the run there, or go on with it; returns the last step whose row it has, or 0."""

    @abstractmethod
    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add numbers of a step; those of evaluations may come after the rows of later steps."""

    @abstractmethod
    def close(self, result: RunResult) -> None:
        """End the run there."""

    def _open(self, plan: RunPlan) -> None:
        self._sent_to = self.open(plan)
        self._opened = True
        had = self._sent_to
        before: list[Callable[[], None]] = []
        for row in plan.history.metrics():
            if row["step"] <= plan.first_step:
                before.append(partial(self._log_row, row))
        for row in plan.history.evaluations():
            if had < row["step"] <= plan.first_step or (not had and not row["step"]):
                scored = row["name"], row["step"], row["metrics"]
                before.append(partial(self._log_evaluation, *scored))
        with ExitStack() as stack:  # calls the last one first, and all of them if one raises
            for send in reversed(before):
                stack.callback(send)

    def _log_row(self, row: Mapping[str, float]) -> None:
        step = int(row["step"])
        if self._opened and step > self._sent_to:
            self._sent_to = step
            self.log(step, _numbers({name: row[name] for name in row if name != "step"}))

    def _log_evaluation(self, name: str, step: int, metrics: Mapping[str, float]) -> None:
        if self._opened and (name, step) not in self._evaluations_sent:
            self._evaluations_sent.add((name, step))
            numbers = _numbers(metrics)
            self.log(step, {f"val/{name}/{metric}": value for metric, value in numbers.items()})

    def _close(self, result: RunResult) -> None:
        if self._opened:
            self._opened = False
            self.close(result)

    # -- on the run's event loop -----------------------------------------------------------------

    def on_start(self, plan: RunPlan) -> None:
        """Begin the run there; one that has been begun by this process goes on as it is.

        A run that is to stop if this fails has to know before its first step, and nothing of it is
        under way yet: then alone this waits, event loop and all. Raises TimeoutError if it takes
        too long.
        """
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, thread_name_prefix=f"tracker-{self.kind}")
            self._under_way.append(self._worker.submit(self._open, plan))
            if self.stops_the_run:
                late = wait(self._under_way, OPEN_SECONDS).not_done
                self._raise_first_error()
                if late:
                    raise TimeoutError(f"{self.kind} did not begin its run in {OPEN_SECONDS:.0f} s")

    def on_step(self, row: Mapping[str, float]) -> None:
        """Send the row."""
        self._later(self._log_row, row)

    def on_evaluation(self, result: EvaluationResult) -> None:
        """Send what was measured."""
        self._later(self._log_evaluation, result.name, result.step, result.metrics)

    def on_end(self, result: RunResult) -> None:
        """Send the rest, and end the run there.

        Raises TimeoutError if that takes too long, with an earlier error in its words and as cause.
        """
        if self._worker is None:
            return
        worker, self._worker = self._worker, None
        self._under_way.append(worker.submit(self._close, result))
        late = wait(self._under_way, LAST_WORDS_SECONDS).not_done
        error = self._first_error()
        worker.shutdown(wait=False, cancel_futures=True)  # else the process waits for all of it
        if late:
            self._under_way.clear()
            before = f"; before that {type(error).__name__}: {error}" if error else ""
            raise TimeoutError(
                f"{self.kind} did not take the rest of the run in {LAST_WORDS_SECONDS:.0f} s; "
                f"the run's own folder has it{before}"
            ) from error
        if error is not None:
            raise error

    def _later(self, work: Callable[..., None], *args: Any) -> None:
        """Have it done in its turn. Raises the first error of what has been done since."""
        if self._worker is not None:
            self._under_way.append(self._worker.submit(work, *args))
        self._raise_first_error()

    def _raise_first_error(self) -> None:
        if (error := self._first_error()) is not None:
            raise error

    def _first_error(self) -> BaseException | None:
        """Of what is done and was not looked at; what comes behind it is for the next look."""
        while self._under_way and self._under_way[0].done():
            if (error := self._under_way.popleft().exception()) is not None:
                return error
        return None


def _numbers(values: Mapping[str, float | None]) -> dict[str, float]:
    """Those that are finite; what else there is no tracker can draw."""
    return {
        name: float(value)
        for name, value in values.items()
        if value is not None and math.isfinite(value)
    }


def settings_of(experiment: Experiment | None) -> dict[str, Any]:
    """The experiment as a flat mapping, `algorithm.params.learning_rate: 0.001`; rows left out."""
    document = {} if experiment is None else experiment.model_dump(mode="json")
    flat: dict[str, Any] = {}

    def put(value: Any, field: str) -> None:
        if isinstance(value, dict) and value:
            for name in value:
                put(value[name], f"{field}.{name}" if field else name)
        elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
            for index, item in enumerate(value):
                put(item, f"{field}.{index}")
        elif value is not None:
            flat[field] = value

    put(_without_rows(document), "")
    return flat


def _without_rows(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_rows(part) for name, part in value.items() if name != "rows"}
    return [_without_rows(part) for part in value] if isinstance(value, list) else value
