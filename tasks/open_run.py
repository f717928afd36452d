"""The task that opens a run: data, backend, and the point to go on from."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from prefect import task
from prefect.runtime import flow_run
from prefect.utilities.urls import url_for

from algorithms.callbacks import RunPlan
from algorithms.evaluators import PreparedEvaluation
from algorithms.experiment import Experiment
from algorithms.local.run import OwnLoopRun
from algorithms.opening import open_live_run
from algorithms.run import LiveRun
from backends.storage.run_store import RunStore
from tasks import session
from tasks.policies import policy

MOST_TASK_RUNS = 1_500
"""Above this Prefect's recorder falls behind and drops task runs; then segments are the unit."""


@dataclass(frozen=True)
class RunHandle:
    """What the flow knows of an open run: plain data only."""

    run_id: str
    run_uri: str
    first_step: int
    total_steps: int
    save_steps: tuple[int, ...]
    task_runs: Literal["operation", "segment"]
    result: dict[str, Any] | None = None

    def segments(self) -> list[tuple[int, int]]:
        """The stretches of steps still to be trained, each ending at a checkpoint."""
        ends = [step for step in self.save_steps if step > self.first_step]
        return list(pairwise([self.first_step, *ends]))


@task(name="open_run", task_run_name="open_run-{run_id}", **policy("open_run"))
async def open_run(experiment: Experiment, run_id: str) -> RunHandle:
    """Open or continue a run: load the data, start the backend, restore the last checkpoint.

    A run that is finished is not opened: its handle carries the result. Raises UserError as
    `algorithms.opening.open_live_run` does.
    """
    store = RunStore(experiment.store, run_id)
    finished = await asyncio.to_thread(store.read_result)
    if finished is not None and finished["status"] == "completed":
        return RunHandle(run_id, store.uri(), 0, 0, (), "segment", finished)
    url = url_for("flow-run", flow_run.id) if flow_run.id else None
    run = await open_live_run(experiment, store, url)
    session.add(run)
    run.tell("on_start", run.plan)
    return handle_of(run)


def handle_of(run: LiveRun) -> RunHandle:
    """What the flow has to know of a live run."""
    plan = run.plan
    mode = _task_runs(run.context.config, plan, run.evaluations)
    if isinstance(run, OwnLoopRun):
        mode = "segment"
    return RunHandle(
        plan.run_id, plan.run_uri, plan.first_step, plan.total_steps, run.segment_ends, mode
    )


def _task_runs(
    experiment: Experiment, plan: RunPlan, evaluations: Mapping[str, PreparedEvaluation]
) -> Literal["operation", "segment"]:
    asked = experiment.orchestration.task_runs
    if asked != "auto":
        return asked
    steps = range(plan.first_step, plan.total_steps + 1)
    scored = sum(
        prepared.is_due(step, plan.total_steps)
        for step in steps
        for prepared in evaluations.values()
    )
    planned = 3 * (plan.total_steps - plan.first_step) + len(plan.save_steps) + scored
    return "operation" if planned <= MOST_TASK_RUNS else "segment"
