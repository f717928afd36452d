"""The `train` flow: open the run, train from checkpoint to checkpoint, report."""

from __future__ import annotations

from typing import Any

from prefect import State, flow, get_run_logger
from prefect.runtime import flow_run

from algorithms.experiment import Experiment
from tasks import session
from tasks.interruption import interruptible
from tasks.open_run import RunHandle
from tasks.recovery import RECOVERABLE, Recovery
from tasks.report import progress_artifact, report
from tasks.segment import settle, train_operations, train_segment


@flow(name="train", persist_result=False)
async def train(experiment: Experiment, run_id: str | None = None) -> dict[str, Any] | State[Any]:
    """Train a model as the experiment says; returns what `result.json` in the run's folder says.

    A run id that exists is continued from its last checkpoint, or its result returned if it is
    finished. Without one the run is named after the flow run, so a retried flow run continues its
    own run. When the engine or the model's state is lost, the run goes back to its last checkpoint
    by itself; when it is cancelled, it saves and ends.
    """
    run_id = run_id or f"{experiment.name}-{str(flow_run.id)[:8]}"
    waits, closing = session.telling_of_waits(run_id), session.closing(run_id)
    async with interruptible(run_id) as interruption, waits, closing:
        recovery = Recovery(experiment, run_id)
        run = await recovery.open()
        if run.result is not None:
            return run.result
        async with progress_artifact(run_id):
            while True:
                try:
                    await train_all(run)
                    break
                except RECOVERABLE as lost:
                    run = await recovery.after(lost)
        return await report(run_id)
    return await interruption.state()


async def train_all(run: RunHandle) -> None:
    """Every step that is left, until the last checkpoint and evaluation are safe."""
    get_run_logger().info(
        "run %s: steps %d to %d, in %s", run.run_id, run.first_step, run.total_steps, run.run_uri
    )
    for start, stop in run.segments():
        if run.task_runs == "operation":
            await train_operations(run.run_id, start, stop)
        else:
            await train_segment(run.run_id, start, stop)
        if session.live(run.run_id).ended_early:
            break
    await settle(run.run_id)
