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

from algorithms.opening import reopen_live_run
from algorithms.run import RunStopped
from backends.errors import StateLostError, TransientError
from tasks import session
from tasks.open_run import RunHandle, handle_of
from tasks.policies import policy

RECOVERABLE = (StateLostError, TransientError)
"""What a task could not mend by itself, and a checkpoint can."""

WAITS_SECONDS = (0.0, 5.0, 30.0)
"""Before the first, the second and each later recovery: what is away needs time to come back."""


async def recover(run: RunHandle, cause: Exception) -> RunHandle:
    """The run, open again from its last checkpoint.

    Raises the cause itself once `orchestration.max_recoveries` are used up.
    """
    while True:
        live = session.live(run.run_id)
        most = live.context.config.orchestration.max_recoveries
        if live.recoveries >= most:
            if most:
                cause.add_note(f"The run had recovered {most} times (orchestration.max_recoveries)")
            raise cause
        try:
            return await reopen_run(run.run_id, live.recoveries + 1, words_of(cause))
        except RECOVERABLE as error:
            cause = error


@task(name="recover", task_run_name="recover-{number}", **policy("recover"))
async def reopen_run(run_id: str, number: int, cause: str) -> RunHandle:
    """Close what is left of a run and open it again from its last checkpoint; the n-th time."""
    lost = session.live(run_id)
    if lost.stopping:
        raise RunStopped(f"the run was stopped; no checkpoint could be written: {cause}")
    lost.recoveries = number
    get_run_logger().warning("recovery %d of run %s: %s", number, run_id, cause)
    lost.tell("on_notice", f"lost: {cause}; going back to the last checkpoint")
    await lost.beside.cancel()
    await session.close_backend(lost)
    await asyncio.sleep(WAITS_SECONDS[min(number, len(WAITS_SECONDS)) - 1])
    run = await reopen_live_run(lost)
    run.recoveries = number
    session.replace(run)
    if lost.stopping:  # by now
        run.stop()
    step = run.plan.first_step
    get_run_logger().warning("run %s goes on from step %d", run_id, step)
    emit_event(
        event="flowtune.run.recovered",
        resource={"prefect.resource.id": f"flowtune.run.{run_id}", "prefect.resource.name": run_id},
        payload={"cause": cause, "step": step, "recoveries": number},
    )
    run.tell("on_start", run.plan)
    return handle_of(run)


def words_of(cause: Exception) -> str:
    """The first line of what went wrong, with its kind where that says more."""
    words = str(cause).strip().splitlines()
    return words[0] if words else type(cause).__name__
