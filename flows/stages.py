"""The `train_stages` flow: train, and train on from there."""

from __future__ import annotations

from typing import Any

from prefect import State, flow
from prefect.runtime import flow_run

from algorithms.stages import StagedExperiment, last_weights
from flows.train import train
from tasks.report_stages import finished_stages, report_stages


@flow(name="train-stages", persist_result=False)
async def train_stages(
    experiment: StagedExperiment, run_id: str | None = None
) -> dict[str, Any] | State[Any]:
    """Train stage after stage; returns what `result.json` in the run's folder says.

    Each stage is a run of the `train` flow from the weights that the one before ended with. A run
    id that exists goes on in the stage, and at the step, that it had come to.
    """
    run_id = run_id or f"{experiment.name}-{str(flow_run.id)[:8]}"
    if (finished := await finished_stages(experiment, run_id)) is not None:
        return finished
    results: list[dict[str, Any]] = []
    for index in range(len(experiment.stages)):
        start = last_weights(results[-1]) if results else None
        name = experiment.run_id(run_id, index)
        stage = train.with_options(flow_run_name=name)
        result = await stage(experiment.experiment(index, start), run_id=name)
        if not isinstance(result, dict):  # it was cancelled
            return result
        results.append(result)
    return await report_stages(experiment, run_id, results)
