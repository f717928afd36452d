"""The task that opens a run: data, backend, and the point to go on from."""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from prefect import task
from prefect.runtime import flow_run

from algorithms.base import BaseAlgorithm, RunContext
from algorithms.callbacks import RunPlan
from algorithms.data.dataset import Dataset, load_dataset
from algorithms.evaluators import PreparedEvaluation, prepare
from algorithms.experiment import Experiment
from algorithms.registry import algorithm_class
from algorithms.run import LiveRun
from backends.base import Backend, ModelSpec, SavedState
from backends.errors import Problem, UserError
from backends.registry import backend_kinds
from backends.storage.run_store import CheckpointManifest, RunStore
from tasks import session
from tasks.policies import NEVER

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
        return list(zip([self.first_step, *ends[:-1]], ends, strict=True))


@task(name="open_run", task_run_name="open_run-{run_id}", **NEVER)
async def open_run(experiment: Experiment, run_id: str) -> RunHandle:
    """Open or continue a run: load the data, start the backend, restore the last checkpoint.

    A run that is finished is not opened: its handle carries the result. Raises UserError when the
    experiment or its data is not the one that the run was started with.
    """
    store = await asyncio.to_thread(RunStore.open, experiment.store, run_id)
    finished = await asyncio.to_thread(store.read_result)
    if finished is not None and finished["status"] == "completed":
        return RunHandle(run_id, store.uri(), 0, 0, (), "segment", finished)
    dataset = await asyncio.to_thread(load_dataset, experiment.data)
    await asyncio.to_thread(_record_experiment, store, experiment, dataset)
    manifest = await asyncio.to_thread(store.latest_checkpoint)
    backend = await _open_backend(experiment, store, manifest)
    try:
        run = await _set_up(experiment, store, dataset, backend, manifest)
    except BaseException:
        await backend.aclose()
        raise
    session.add(run)
    run.tell("on_start", run.plan)
    plan = run.plan
    return RunHandle(
        run_id,
        store.uri(),
        plan.first_step,
        plan.total_steps,
        plan.save_steps,
        _task_runs(experiment, plan, run.evaluations),
    )


def model_spec(experiment: Experiment) -> ModelSpec:
    """The model and adapter that an experiment trains."""
    params = experiment.algorithm.params
    return ModelSpec(
        name=experiment.model.name,
        lora_rank=params.lora_rank,
        seed=experiment.seed,
        train_attn=params.train_attn,
        train_mlp=params.train_mlp,
        train_unembed=params.train_unembed,
    )


def _record_experiment(store: RunStore, experiment: Experiment, dataset: Dataset) -> None:
    """Write down what the run is, or check that it still is what was written down."""
    store.record(
        experiment=experiment.model_dump(mode="json"),
        data_fingerprint=dataset.fingerprint,
        flow_run_url=flow_run.get_ui_url() if flow_run.get_id() else None,
    )


async def _open_backend(
    experiment: Experiment, store: RunStore, manifest: CheckpointManifest | None
) -> Backend:
    kind = backend_kinds()[experiment.backend.kind]
    params, spec = experiment.backend.params, model_spec(experiment)
    with tempfile.TemporaryDirectory(prefix="flowtune-") as temporary:
        state = _initial_state(experiment)
        if manifest is not None:
            folder = await asyncio.to_thread(store.fetch_checkpoint, manifest, Path(temporary))
            state = SavedState(manifest.state_uri, folder)
        return await kind.open(params, spec, state)


def _initial_state(experiment: Experiment) -> SavedState | None:
    source = experiment.model.init_from
    if source is None:
        return None
    if source.startswith("tinker://"):
        return SavedState(uri=source, folder=None, optimizer=False)
    return SavedState(uri=None, folder=Path(source), optimizer=False)


async def _set_up(
    experiment: Experiment,
    store: RunStore,
    dataset: Dataset,
    backend: Backend,
    manifest: CheckpointManifest | None,
) -> LiveRun:
    algorithm: BaseAlgorithm = algorithm_class(experiment.algorithm.kind)(
        experiment.algorithm.params
    )
    tokenizer = await asyncio.to_thread(backend.get_tokenizer)
    context = RunContext(store.run_id, store.uri(), experiment, dataset, backend, tokenizer)
    await algorithm.setup(context, backend)
    first_step = 0
    if manifest is not None:
        first_step = manifest.next_step
        algorithm.load_state_dict(manifest.algorithm_state)
    await asyncio.to_thread(store.truncate, first_step)
    plan = RunPlan(
        run_id=store.run_id,
        run_uri=store.uri(),
        first_step=first_step,
        total_steps=algorithm.total_steps,
        save_steps=tuple(algorithm.save_steps()),
        flow_run_url=flow_run.get_ui_url() if flow_run.get_id() else None,
    )
    evaluations = {
        spec.name: await asyncio.to_thread(prepare, spec, tokenizer)
        for spec in experiment.evaluations
    }
    return LiveRun(store.run_id, store, backend, algorithm, evaluations, plan)


def _task_runs(
    experiment: Experiment, plan: RunPlan, evaluations: dict[str, PreparedEvaluation]
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
