"""How a run comes to life: data, backend, and the point to go on from."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

from algorithms.base import BaseAlgorithm, RunContext
from algorithms.callbacks import RunPlan
from algorithms.data.dataset import Dataset, load_dataset
from algorithms.evaluators import prepare
from algorithms.experiment import Experiment
from algorithms.run import LiveRun
from backends.base import Backend, SavedState
from backends.errors import Problem, UserError
from backends.storage.objects import open_store
from backends.storage.run_store import CheckpointManifest, RunStore

MAY_CHANGE = {"callbacks", "orchestration", "store", "tags"}
"""Fields that do not decide what is trained, so a run may be continued under other ones."""


async def open_live_run(
    experiment: Experiment, store: RunStore, flow_run_url: str | None = None
) -> LiveRun:
    """A run that is ready to train, new or from its last checkpoint.

    Nothing is written before everything a user can get wrong has been looked at. Raises UserError
    when the experiment or its data is not the one that the run was started with.
    """
    dataset = await asyncio.to_thread(load_dataset, experiment.data)
    manifest = await asyncio.to_thread(_resume_point, store, experiment, dataset)
    backend = await _open_backend(experiment, store, manifest)
    try:
        run = await _set_up(experiment, store, dataset, backend, manifest, flow_run_url)
        await asyncio.to_thread(_begin, run, experiment, dataset)
    except BaseException:
        await backend.aclose()
        raise
    return run


def check_continues(store: RunStore, experiment: Experiment) -> bool:
    """Whether the run is there already; raises UserError if it was another experiment's."""
    before = store.read_experiment()
    if before is None:
        return False
    if changed := _differences(before, experiment.model_dump(mode="json")):
        raise UserError(*(_changed(store.run_id, *difference) for difference in changed))
    return True


def _resume_point(
    store: RunStore, experiment: Experiment, dataset: Dataset
) -> CheckpointManifest | None:
    """The checkpoint to go on from; None for a run that is new or has none yet."""
    if not check_continues(store, experiment):
        return None
    if (kept := store.info().data_fingerprint) != dataset.fingerprint:
        raise UserError(
            Problem(
                "data",
                f"run {store.run_id!r} was started on other rows (sha256 {kept}, now "
                f"{dataset.fingerprint})",
                "bring the rows back, or take another --run-id",
            )
        )
    return store.latest_checkpoint()


def _differences(before: Any, now: Any, field: str = "") -> list[tuple[str, Any, Any]]:
    """Fields that decide what is trained and are not what they were: (field, before, now)."""
    if field in MAY_CHANGE or before == now:
        return []
    if isinstance(before, dict) and isinstance(now, dict):
        names = [*before, *(name for name in now if name not in before)]
        return [
            difference
            for name in names
            for difference in _differences(
                before.get(name), now.get(name), f"{field}.{name}" if field else name
            )
        ]
    return [(field, before, now)]


def _changed(run_id: str, field: str, before: Any, now: Any) -> Problem:
    return Problem(
        field,
        f"run {run_id!r} was started with {before!r}, not {now!r}",
        "set it back, or take another --run-id",
    )


def _begin(run: LiveRun, experiment: Experiment, dataset: Dataset) -> None:
    run.store.begin(
        name=experiment.name,
        backend=experiment.backend.kind,
        seed=experiment.seed,
        data_fingerprint=dataset.fingerprint,
        total_steps=run.plan.total_steps,
        flow_run_url=run.plan.flow_run_url,
    )
    run.store.write_experiment(experiment.model_dump(mode="json"))
    run.store.discard_result()
    run.store.rewind(run.plan.first_step)


async def _open_backend(
    experiment: Experiment, store: RunStore, manifest: CheckpointManifest | None
) -> Backend:
    row = experiment.backend.row()
    params, spec = experiment.backend.params, experiment.model_spec()
    with tempfile.TemporaryDirectory(prefix="flowtune-") as temporary:
        folder = Path(temporary)
        if manifest is not None:
            state = await asyncio.to_thread(_saved_state, store, manifest, folder)
        elif experiment.model.init_from is not None:
            state = await asyncio.to_thread(_first_weights, experiment.model.init_from, folder)
        else:
            state = None
        return await row.open(params, spec, state)


def _saved_state(
    store: RunStore, manifest: CheckpointManifest, temporary: Path
) -> SavedState | None:
    folder = store.checkpoint_folder(manifest)
    if folder is None:
        folder = temporary
        store.fetch_checkpoint(manifest, folder)
    return SavedState(manifest.state_uri, folder)


def _first_weights(source: str, temporary: Path) -> SavedState | None:
    """The weights of another run's checkpoint: at a server, in a folder, or in an object store."""
    if source.startswith("tinker://"):
        return SavedState(uri=source, folder=None, optimizer=False)
    if "://" not in source:
        return SavedState(uri=None, folder=Path(source).expanduser(), optimizer=False)
    parent, _, name = source.rstrip("/").rpartition("/")
    objects = open_store(parent)
    files = [key.removeprefix(f"{name}/") for key in objects.keys(name)]
    if "adapter_model.safetensors" not in files:
        raise UserError(
            Problem(
                "model.init_from",
                f"{source} holds no adapter_model.safetensors",
                "give the address of a checkpoint, as a run's checkpoints/step-… is",
            )
        )
    objects.download(files, name, temporary)
    return SavedState(uri=None, folder=temporary, optimizer=False)


async def _set_up(
    experiment: Experiment,
    store: RunStore,
    dataset: Dataset,
    backend: Backend,
    manifest: CheckpointManifest | None,
    flow_run_url: str | None,
) -> LiveRun:
    algorithm = experiment.algorithm.build()
    if not isinstance(algorithm, BaseAlgorithm):
        raise TypeError(f"{experiment.algorithm.kind!r} does not build on BaseAlgorithm")
    tokenizer = await asyncio.to_thread(backend.get_tokenizer)
    context = RunContext(store.run_id, store.uri(), experiment, dataset, backend, tokenizer)
    await algorithm.setup(context, backend)
    first_step = 0
    if manifest is not None:
        first_step = manifest.next_step
        algorithm.load_state_dict(manifest.algorithm_state)
    plan = RunPlan(
        run_id=store.run_id,
        run_uri=store.uri(),
        first_step=first_step,
        total_steps=algorithm.total_steps,
        save_steps=tuple(algorithm.save_steps()),
        flow_run_url=flow_run_url,
    )
    evaluations = {
        spec.name: await asyncio.to_thread(prepare, spec, tokenizer)
        for spec in experiment.evaluations
    }
    callbacks = [section.build() for section in experiment.callbacks]
    return LiveRun(store.run_id, store, backend, algorithm, evaluations, plan, callbacks)
