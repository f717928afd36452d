"""The `train` flow: open the run, train from checkpoint to checkpoint, report."""

from __future__ import annotations

from typing import Any

from prefect import flow, get_run_logger
from prefect.runtime import flow_run

from algorithms.experiment import Experiment
from tasks import session
from tasks.open_run import open_run
from tasks.report import progress_artifact, report
from tasks.segment import train_operations, train_segment


@flow(name="train", persist_result=False)
async def train(experiment: Experiment, run_id: str | None = None) -> dict[str, Any]:
    """Train a model as the experiment says; returns what `result.json` in the run's folder says.

    A run id that exists is continued from its last checkpoint, or its result returned if it is
    finished. Without one the run is named after the flow run, so a retried flow run continues its
    own run.
    """
    run_id = run_id or f"{experiment.name}-{str(flow_run.id)[:8]}"
    async with session.closing(run_id):
        run = await open_run(experiment, run_id)
        if run.result is not None:
            return run.result
        get_run_logger().info(
            "run %s: steps %d to %d, in %s", run_id, run.first_step, run.total_steps, run.run_uri
        )
        async with progress_artifact(run_id):
            for start, stop in run.segments():
                if run.task_runs == "operation":
                    await train_operations(run_id, start, stop)
                else:
                    await train_segment(run_id, start, stop)
        return await report(run_id)
