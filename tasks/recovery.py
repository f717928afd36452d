"""What the flow does when the model's state is lost: back to the last checkpoint, and on.

The engine died, the server forgot the model, a request that changes it was never answered: none of
these can be tried again, since nobody knows which weights there are. So the backend is closed, a
new one opened from the last manifest, the rows behind it are dropped and the steps replayed; what
was sampled from the weights comes out of the run's store. A user's mistake never comes here.
"""

from __future__ import annotations

import asyncio

from prefect import get_run_logger, task
from prefect.events import emit_event

from algorithms.callbacks import Callback
from algorithms.experiment import Experiment
from algorithms.opening import reopen_live_run
from algorithms.run import LiveRun, RunStopped
from backends.errors import StateLostError, TransientError, first_line
from tasks import session
from tasks.open_run import RunHandle, handle_of, open_run
from tasks.policies import policy

RECOVERABLE = (StateLostError, TransientError)
"""What a task could not mend by itself, and a checkpoint can."""

WAITS_SECONDS = (0.0, 5.0, 30.0)
"""Before the first, the second and each later recovery: what is away needs time to come back."""


class Recovery(Callback):
    """Opens a run, and opens it again when it is lost: so many times between two checkpoints."""

    def __init__(self, experiment: Experiment, run_id: str) -> None:
        self._experiment = experiment
        self._run_id = run_id
        self._most = experiment.orchestration.max_recoveries
        self._since_checkpoint = 0
        self._total = 0

    def on_save(self, step: int, uri: str) -> None:
        """The run gets on: what went wrong until here is over."""
        self._since_checkpoint = 0

    async def open(self) -> RunHandle:
        """`open_run`, begun again if the engine or the store is lost on the way."""
        cause: Exception | None = None
        while True:
            try:
                handle = await open_run(self._experiment, self._run_id)
                break
            except RECOVERABLE as error:
                cause = error
                wait_seconds = self._spend(cause)
                words = first_line(cause)
                get_run_logger().warning("run %s is not open yet: %s", self._run_id, words)
                session.notify(self._run_id, f"lost: {words}; opening the run again")
                await asyncio.sleep(wait_seconds)
        if session.is_open(self._run_id):
            run = session.live(self._run_id)
            run.callbacks.append(self)
            run.recoveries = self._total
            if cause is not None:
                _emit(run, first_line(cause))
        return handle

    async def after(self, cause: Exception) -> RunHandle:
        """The run, open again from its last checkpoint.

        Raises the cause itself once `orchestration.max_recoveries` are used up.
        """
        while True:
            wait_seconds = self._spend(cause)
            try:
                return await reopen_run(self._run_id, self._total, first_line(cause), wait_seconds)
            except RECOVERABLE as error:
                cause = error

    def _spend(self, cause: Exception) -> float:
        """Count a recovery; how long to wait before it (s). Raises the cause if there is none."""
        if self._since_checkpoint >= self._most:
            if self._most:
                cause.add_note(
                    f"The run had recovered {self._most} times since it last got to a checkpoint "
                    "(orchestration.max_recoveries)"
                )
            raise cause
        self._since_checkpoint += 1
        self._total += 1
        return WAITS_SECONDS[min(self._since_checkpoint, len(WAITS_SECONDS)) - 1]


@task(name="recover", task_run_name="recover-{number}", **policy("recover"))
async def reopen_run(run_id: str, number: int, cause: str, wait_seconds: float) -> RunHandle:
    """Close what is left of a run and open it again from its last checkpoint; the n-th time."""
    lost = session.live(run_id)
    if lost.stopping:
        raise RunStopped(f"the run was stopped; no checkpoint could be written: {cause}")
    lost.recoveries = number
    get_run_logger().warning("recovery %d of run %s: %s", number, run_id, cause)
    lost.tell("on_notice", f"lost: {cause}; going back to the last checkpoint")
    await lost.cancel()
    await session.close_backend(lost)
    await asyncio.sleep(wait_seconds)
    run = await reopen_live_run(lost)
    run.recoveries = number
    session.replace(run)
    if lost.stopping:  # by now
        run.stop()
    get_run_logger().warning("run %s goes on from step %d", run_id, run.plan.first_step)
    _emit(run, cause)
    run.tell("on_start", run.plan)
    return handle_of(run)


def _emit(run: LiveRun, cause: str) -> None:
    """Tell Prefect of a recovery."""
    name = run.run_id
    emit_event(
        event="flowtune.run.recovered",
        resource={"prefect.resource.id": f"flowtune.run.{name}", "prefect.resource.name": name},
        payload={"cause": cause, "step": run.plan.first_step, "recoveries": run.recoveries},
    )
