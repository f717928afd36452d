"""How a run comes to life: data, backend, and the point to go on from."""

from __future__ import annotations

import asyncio
import gc
import re
import tempfile
from collections.abc import Mapping
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from algorithms.base import BaseAlgorithm, OwnLoop, RunContext, RunResult
from algorithms.callbacks import Callback, RunPlan
from algorithms.data.dataset import Dataset, load_dataset
from algorithms.evaluators import PreparedEvaluation, prepare
from algorithms.experiment import Experiment, WithImports
from algorithms.kept import LINEAGE, Kept, Lineage, made_by
from algorithms.local.run import OwnLoopRun
from algorithms.registry import ALGORITHMS
from algorithms.returned import hook
from algorithms.run import LiveRun
from backends.base import Backend, SavedState
from backends.errors import FlowtuneError, Problem, UserError
from backends.storage.checkpoints import CheckpointManifest
from backends.storage.objects import open_store
from backends.storage.run_store import RunStore

MAY_CHANGE = {"callbacks", "checkpoints", "data.streaming", "orchestration", "store", "tags"}
"""Fields that do not decide what is trained, so a run may be continued under other ones."""

_OF_A_STAGE = re.compile(r"^stages\[\d+\]\.")


async def open_live_run(
    experiment: Experiment, store: RunStore, flow_run_url: str | None = None
) -> LiveRun:
    """A run that is ready to train, new or from its last checkpoint.

    Nothing is written before everything a user can get wrong has been looked at; then the run is
    this process's to write, and another one that still does is shut out. Raises UserError when the
    experiment or its data is not the one that the run was started with.
    """
    callbacks = _callbacks(experiment)
    check = ALGORITHMS[experiment.algorithm.kind].check_row
    dataset = await asyncio.to_thread(load_dataset, experiment.data, "data", check)
    while True:
        manifest = await asyncio.to_thread(_resume_point, store, experiment, dataset)
        backend = await _open_backend(experiment, store, manifest)
        try:
            context = await _context(experiment, store, dataset, backend)
            evaluations = await asyncio.to_thread(_prepared, context)
            algorithm = experiment.algorithm.build()
            run = await _set_up(
                algorithm, context, store, manifest, evaluations, callbacks, flow_run_url
            )
            if await asyncio.to_thread(_begin, run):
                _spare_the_collector()
                return run
        except BaseException:
            await backend.aclose()
            raise
        await backend.aclose()


def _spare_the_collector() -> None:
    """Leave what is there by now out of garbage collections, once in a process.

    The libraries are a million objects, and to go through them takes a third of a second, now and
    then, in which the backend waits for its next request.
    """
    if not gc.get_freeze_count():
        gc.collect()
        gc.freeze()


async def reopen_live_run(run: LiveRun) -> LiveRun:
    """The same run from its last checkpoint, on a new backend; the old one is closed already.

    Rows, evaluations and callbacks are those that were there. Raises LeaseLost if the run is
    another process's by now.
    """
    experiment, store = run.context.config, run.store
    manifest = await asyncio.to_thread(store.latest_checkpoint)
    backend = await _open_backend(experiment, store, manifest)
    try:
        context = await _context(experiment, store, run.context.dataset, backend)
        again = await _set_up(
            experiment.algorithm.build(),
            context,
            store,
            manifest,
            run.evaluations,
            run.callbacks,
            run.plan.flow_run_url,
        )
        await asyncio.to_thread(store.rewind, again.plan.first_step)
        await asyncio.to_thread(again.kept.look)
    except BaseException:
        await backend.aclose()
        raise
    return again


async def train_alone(algorithm: BaseAlgorithm, context: RunContext) -> RunResult:
    """One full run of an algorithm in a context that the caller made and closes, without Prefect.

    It goes into the same store as any run, under the context's run id, and a run that breaks off is
    continued as any run is: by `flowtune run --run-id`. Raises UserError if it is there already.
    """
    experiment = context.config
    store = RunStore(experiment.store, context.run_id)
    if await asyncio.to_thread(store.read_experiment) is not None:
        raise UserError(
            Problem(
                "run_id",
                f"there is a run {context.run_id!r} in {experiment.store}",
                f"continue it with `flowtune run --run-id {context.run_id}`, or take another id",
            )
        )
    evaluations = await asyncio.to_thread(_prepared, context)
    callbacks = _callbacks(experiment)
    run = await _set_up(algorithm, context, store, None, evaluations, callbacks, None)
    await asyncio.to_thread(_begin, run)
    run.tell("on_start", run.plan)
    try:
        for start, stop in pairwise([0, *run.segment_ends]):
            await run.run_segment(run, start, stop)
            if run.ended_early:
                break
        await run.settle()
    except BaseException as error:
        await run.cancel()
        result = await asyncio.to_thread(run.fail, error)
        if isinstance(error, FlowtuneError):
            return result
        raise
    result = await asyncio.to_thread(run.finish)
    run.tell("on_end", result)
    return result


def check_continues(store: RunStore, experiment: WithImports) -> bool:
    """Whether the run is there already; raises UserError if it was another experiment's."""
    before = store.read_experiment()
    if before is None:
        return False
    if changed := _differences(
        _as_read_now(before, type(experiment)), experiment.model_dump(mode="json")
    ):
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


def _as_read_now(before: dict[str, Any], kind: type[WithImports]) -> dict[str, Any]:
    """An experiment of an earlier version, with the fields that are new since at their defaults."""
    try:
        return kind.model_validate(before).model_dump(mode="json")
    except ValidationError:  # it has something that this version does not know: that is told
        return before


def _deciding(document: Mapping[str, Any], field: str = "") -> dict[str, Any]:
    """The fields of a document that decide what is trained."""
    paths = {name: f"{field}.{name}" if field else name for name in document}
    return {
        name: _deciding(value, paths[name]) if isinstance(value, dict) else value
        for name, value in document.items()
        if paths[name] not in MAY_CHANGE
    }


def _differences(before: Any, now: Any, field: str = "") -> list[tuple[str, Any, Any]]:
    """Fields that decide what is trained and are not what they were: (field, before, now)."""
    if _OF_A_STAGE.sub("", field) in MAY_CHANGE or before == now:
        return []
    if field == "stages" and before and now and len(before) == len(now):
        stages = enumerate(zip(before, now, strict=True))
        return list(chain.from_iterable(_differences(*s, f"stages[{n}]") for n, s in stages))
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


def _begin(run: LiveRun) -> bool:
    """Take the run over; False if its last writer went on while this process was getting ready."""
    experiment, store = run.context.config, run.store
    store.begin(
        name=experiment.name,
        backend=experiment.backend.kind,
        seed=experiment.seed,
        data_fingerprint=run.context.dataset.fingerprint,
        total_steps=run.plan.total_steps,
        flow_run_url=run.plan.flow_run_url,
    )
    store.take_lease(run.plan.flow_run_url)
    last = store.latest_checkpoint()
    if last is not None and last.next_step != run.plan.first_step:
        return False
    store.write_experiment(experiment.model_dump(mode="json"))
    store.discard_result()
    store.collect_orphans()
    store.rewind(run.plan.first_step)
    run.kept.look()
    return True


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


def _callbacks(experiment: Experiment) -> list[Callback]:
    sections = enumerate(experiment.callbacks)
    return [section.build(f"callbacks[{index}]") for index, section in sections]


async def _context(
    experiment: Experiment, store: RunStore, dataset: Dataset, backend: Backend
) -> RunContext:
    tokenizer = await asyncio.to_thread(backend.get_tokenizer)
    return RunContext(store.run_id, store.uri(), experiment, dataset, backend, tokenizer)


def _prepared(context: RunContext) -> dict[str, PreparedEvaluation]:
    experiment = context.config
    return {
        spec.name: prepare(spec, context.tokenizer, experiment.seed)
        for spec in experiment.evaluations
    }


async def _set_up(
    algorithm: BaseAlgorithm,
    context: RunContext,
    store: RunStore,
    manifest: CheckpointManifest | None,
    evaluations: Mapping[str, PreparedEvaluation],
    callbacks: list[Callback],
    flow_run_url: str | None,
) -> LiveRun:
    with hook(algorithm, "setup"):
        await algorithm.setup(context, context.backend)
    for prepared in evaluations.values():
        await prepared.bind(context.backend)
    first_step = 0
    state: dict[str, Any] = {}
    if manifest is not None:
        first_step, state = manifest.next_step, dict(manifest.algorithm_state)
    lineage = _lineage(context, algorithm, first_step, state.pop(LINEAGE, None))
    if manifest is not None:
        algorithm.load_state_dict(state)
    plan = RunPlan(
        run_id=store.run_id,
        run_uri=store.uri(),
        first_step=first_step,
        total_steps=algorithm.total_steps,
        save_steps=tuple(algorithm.save_steps()),
        flow_run_url=flow_run_url,
        experiment=context.config,
        history=store,
    )
    kept = Kept(store, lineage)
    retention = context.config.checkpoints
    kind = OwnLoopRun if isinstance(algorithm, OwnLoop) else LiveRun
    return kind(context, store, algorithm, evaluations, plan, kept, retention, callbacks)


def _lineage(context: RunContext, algorithm: BaseAlgorithm, first_step: int, saved: Any) -> Lineage:
    """Which weights the run trains: those it has always trained, while its code is the same."""
    document = _deciding(context.config.model_dump(mode="json"))
    now = made_by(document, context.dataset.fingerprint, algorithm)
    if saved is None:
        return Lineage.begin(now)
    return Lineage(**saved).go_on(now, first_step)
