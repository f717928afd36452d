"""One live run: its operations, and the pipelined loop that drives them.

The loop keeps the backend's queue full: the next batch is built, and for off-policy algorithms the
next step submitted, while a step runs; saves and evaluations go on beside later steps. Requests
reach the backend in the order of the recipe (forward_backward, optim_step, then the save and the
snapshots that belong to that step), whatever order the coroutines that carry them start in. Knows
nothing of Prefect; `tasks` wraps each operation in a task.

Steps are indexed from 0; a checkpoint, a metrics row and an evaluation carry the number of steps
*done*, so step index i gives row i + 1.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
import time
from collections import deque
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from algorithms.base import BaseAlgorithm, RunContext, RunResult, TrainingBatch
from algorithms.beside import Beside, first_error, to_the_end
from algorithms.callbacks import Callback, CallbackFailed, EarlyEnd, RunPlan
from algorithms.evaluators import EvaluationResult, PreparedEvaluation, evaluate
from algorithms.kept import LINEAGE, Kept
from algorithms.returned import checked_batch, checked_loss, checked_metrics, hook
from algorithms.turns import Place, Turns
from backends.base import Backend, SamplingClient
from backends.errors import FlowtuneError, Problem, UserError
from backends.storage.checkpoints import CheckpointManifest, Retention
from backends.storage.lease import LeaseLost
from backends.storage.run_store import RunStore

if TYPE_CHECKING:
    from backends.base import ForwardBackwardResult

STEPS_IN_FLIGHT = 2
"""Steps submitted and not yet awaited: one runs, one waits behind it."""

METRICS_FLUSH_SECONDS = 5.0

EMPTY_BATCHES_TOLD = 10
"""So many batches in a row without data are worth a word."""

logger = logging.getLogger(__name__)


def _look_at(task: asyncio.Task[Any]) -> None:
    """Its error is raised where it is awaited; one that nobody comes to await is no news."""
    if not task.cancelled():
        task.exception()


class RunStopped(FlowtuneError):
    """The run was asked to stop, and has come to a step that it can go on from."""


@dataclass(frozen=True)
class BuiltBatch:
    """A batch, held from its building until its step is recorded."""

    batch: TrainingBatch
    build_seconds: float


class Operations(Protocol):
    """The units that the loop is made of; `LiveRun` has them plain, `tasks` as Prefect tasks."""

    def build_batch(self, step: int) -> Coroutine[Any, Any, Mapping[str, float]]:
        """Build and hold the batch of a step."""
        ...

    def forward_backward(self, step: int) -> Coroutine[Any, Any, Mapping[str, float]]:
        """Train on the batch of a step."""
        ...

    def optim_step(self, step: int) -> Coroutine[Any, Any, Mapping[str, float]]:
        """Apply the gradients of a step."""
        ...

    def save(self, steps_done: int) -> Coroutine[Any, Any, str]:
        """Write the checkpoint after so many steps."""
        ...

    def evaluate(self, name: str, steps_done: int) -> Coroutine[Any, Any, float]:
        """Score the weights after so many steps."""
        ...


@dataclass(frozen=True)
class PendingSave:
    """A save from its start until its manifest: the algorithm's state then, and the step's row."""

    algorithm_state: Mapping[str, Any]
    sampled_before: Sequence[asyncio.Task[Any]]
    """The batches of later steps that are sampled from earlier weights: they cannot be again."""
    recorded: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class LiveRun:
    """The live objects of a run and the plain operations on them."""

    context: RunContext
    store: RunStore
    algorithm: BaseAlgorithm
    evaluations: Mapping[str, PreparedEvaluation]
    plan: RunPlan
    kept: Kept
    retention: Retention = field(default_factory=Retention)
    callbacks: list[Callback] = field(default_factory=list)
    recoveries: int = 0
    ended_early: str | None = None
    """Why there are fewer steps than planned, once all of those there are have been trained."""
    beside: Beside = field(default_factory=Beside)
    backend: Backend = field(init=False)
    _next_build: int = field(init=False)
    _builds: dict[int, asyncio.Task[Any]] = field(default_factory=dict)
    _batches: dict[int, BuiltBatch] = field(default_factory=dict)
    _empty_batches: int = 0
    _turns: Turns = field(default_factory=Turns)
    _saves: dict[int, PendingSave] = field(default_factory=dict)
    _unwritten: dict[Place, asyncio.Event] = field(default_factory=dict)
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)
    _sampler_uri: str | None = None
    _flushed: float = field(default_factory=time.monotonic)
    _step_ended: float = field(default_factory=time.monotonic)
    _failed: set[tuple[int, str, type[Exception]]] = field(default_factory=set)
    _stopped_by: CallbackFailed | None = None

    def __post_init__(self) -> None:
        self.backend = self.context.backend
        self._next_build = self.plan.first_step

    @property
    def run_id(self) -> str:
        """The name of the run, and of its folder."""
        return self.context.run_id

    @property
    def segment_ends(self) -> tuple[int, ...]:
        """The steps (counted done) that the run's segments end at: its checkpoints."""
        return self.plan.save_steps

    # -- operations ----------------------------------------------------------------------------

    async def build_batch(self, step: int) -> Mapping[str, float]:
        """Build the batch of a step and hold it until the step is recorded.

        One that is sampled from the weights is kept before anything is trained on it, and a replay
        takes the kept one.
        """
        started = time.monotonic()
        if self.algorithm.on_policy:
            batch = await self._kept_batch(step)
        else:
            batch = await self._built_batch(step)
        self._batches[step] = BuiltBatch(batch, time.monotonic() - started)
        self.context.policy.release(step)
        return {"datums": float(len(batch.data)), **batch.metrics}

    async def _kept_batch(self, step: int) -> TrainingBatch:
        batch = None
        if self.kept.has_batch(step):
            batch = await asyncio.to_thread(self.kept.read_batch, step)
        if batch is None:
            batch = await self._built_batch(step)
            await asyncio.to_thread(self.kept.keep_batch, step, batch)
        return batch

    async def _built_batch(self, step: int) -> TrainingBatch:
        with hook(self.algorithm, "build_batch"):
            return checked_batch(await self.algorithm.build_batch(step))

    async def forward_backward(self, step: int) -> Mapping[str, float]:
        """Submit the batch in its turn and wait for the result; an empty one is not submitted."""
        current = self._batches[step]
        if not current.batch.data:
            await self._turns.skip(("forward_backward", step))
            return {}
        result = await self._turns.submit(
            ("forward_backward", step), lambda: self._submit_batch(current.batch)
        )
        answer = await result
        with hook(self.algorithm, "step_metrics"):
            metrics = self.algorithm.step_metrics(step, current.batch, answer)
            return checked_metrics(metrics, "step_metrics")

    def _submit_batch(self, batch: TrainingBatch) -> Awaitable[ForwardBackwardResult]:
        if callable(batch.loss_fn):
            return self.backend.forward_backward_custom_async(
                batch.data, checked_loss(batch.loss_fn)
            )
        return self.backend.forward_backward_async(
            batch.data, loss_fn=batch.loss_fn, loss_fn_config=batch.loss_fn_config
        )

    async def optim_step(self, step: int) -> Mapping[str, float]:
        """Submit the optimizer step right behind its gradients and wait for the result.

        Without gradients there is none: Adam would move the weights on by its momentum alone.
        """
        if not self._batches[step].batch.data:
            await self._turns.skip(("optim_step", step))
            return {}
        adam = self.algorithm.adam_params(step)
        result = await self._turns.submit(
            ("optim_step", step), lambda: self.backend.optim_step_async(adam)
        )
        return (await result).metrics or {}

    async def save(self, steps_done: int) -> str:
        """Save right behind the step's optimizer step, then publish files and manifest.

        The manifest waits for the step's row, for every evaluation up to it, for the checkpoints
        before it, and for later batches that are sampled from weights before it: a run that goes on
        from here could not catch up on them.
        """
        name = f"step-{steps_done:06d}"
        saved = await self._turns.submit(
            ("save", steps_done), lambda: self.backend.save_full_state(name)
        )
        uri = await saved
        with tempfile.TemporaryDirectory(prefix="flowtune-") as temporary:
            folder = Path(temporary)
            exported = await self.backend.export_state(uri, folder)
            if not exported and steps_done == self.plan.total_steps and not self._sampler_uri:
                # Nothing follows the last step, so these are its weights; a server that keeps its
                # files to itself samples only from weights that were saved for that.
                self._sampler_uri = await self.backend.save_for_sampler(name)
            await self._saves[steps_done].recorded.wait()
            for written in self._written_before(steps_done):
                await written.wait()
            await asyncio.gather(*map(asyncio.shield, self._saves[steps_done].sampled_before))
            publishing = asyncio.to_thread(self._publish, steps_done, uri, folder)
            manifest = await to_the_end(publishing)
        del self._saves[steps_done]
        self._written("save", steps_done)
        address = self.store.checkpoint_uri(manifest)
        self.tell("on_save", steps_done, address)
        return address

    async def evaluate(self, name: str, steps_done: int) -> float:
        """Score the weights as they are behind everything submitted so far; the mean reward.

        An evaluation of the same weights with the same settings is taken from the store.
        """
        prepared, place = self.evaluations[name], (f"evaluate/{name}", steps_done)
        result = None
        if self.kept.has_evaluation(prepared, steps_done):
            result = await asyncio.to_thread(self.kept.read_evaluation, prepared, steps_done)
        if result is None:
            result = await self._score(prepared, place)
        else:
            await self._turns.skip(place)
        await asyncio.to_thread(self.store.write_evaluation, result)
        self._written(*place)
        self.tell("on_evaluation", result)
        return result.score

    async def _score(self, prepared: PreparedEvaluation, place: Place) -> EvaluationResult:
        snapshot = await self._turns.submit(place, self.backend.snapshot_sampling_client)
        result = await evaluate(prepared, await snapshot, place[1])
        await asyncio.to_thread(self.kept.keep_evaluation, prepared, result)
        return result

    # -- the loop ------------------------------------------------------------------------------

    async def run_segment(self, operations: Operations, start: int, stop: int) -> None:
        """Steps `start` to `stop`; their evaluations and the save after them go on beside.

        Ends when the last step is recorded. The first error, of a step or of what is beside, ends
        the segment: its steps under way are cancelled, and that error is raised. A run that is to
        stop saves after the step it has come to, and RunStopped is raised once that is safe. One
        that a callback wants to end saves and evaluates there, and has `ended_early` from then on.
        """
        self._raise_failed_callback()
        self._step_ended = time.monotonic()
        try:
            async with asyncio.TaskGroup() as group:
                watching = group.create_task(self.beside.failure())
                if start == 0:
                    self._start_evaluations(operations, 0)
                done = await self._run_steps(group, operations, start, stop)
                if (end := self._early_end(done)) is not None:
                    await self._end_early(operations, (start, stop), done, end)
                elif self._stopping.is_set() and done < stop:
                    await self._stop(operations, start, done)
                watching.cancel()
        except BaseExceptionGroup as errors:
            await self._cancel_builds()
            first = first_error(errors)
            raise first from first.__cause__
        except BaseException:
            await self._cancel_builds()
            raise

    async def settle(self) -> None:
        """Wait until all that goes on beside the steps is done and safe; raises its first error."""
        await self.beside.settle()
        self._raise_failed_callback()

    async def cancel(self) -> None:
        """End all that goes on beside the steps, and wait until it has."""
        await self._cancel_builds()
        await self.beside.cancel()

    def stop(self) -> None:
        """Ask the run to stop after the steps under way."""
        self._stopping.set()

    @property
    def stopping(self) -> bool:
        """Whether the run was asked to stop."""
        return self._stopping.is_set()

    async def _run_steps(
        self, group: asyncio.TaskGroup, operations: Operations, start: int, stop: int
    ) -> int:
        """Train from `start` until `stop`, or the run is to stop or end; returns the steps done."""
        in_flight: deque[asyncio.Task[None]] = deque()
        done = start
        await self._evaluated(start)
        if self._early_end(start) is None:
            self._start_builds(operations, start)
        for step in range(start, stop):
            if self._early_end(step) is not None:
                break
            await self.beside.room()
            if not await self._unless_stopping(self._builds[step]):
                break
            del self._builds[step]
            done = step + 1
            tasks = self._submit_step(group, operations, step)
            before = in_flight[-1] if in_flight else None
            in_flight.append(group.create_task(self._finish_step(step, tasks, before)))
            self._start_builds(operations, done)
            if done == stop:
                self._start_save(operations, done)
            self._start_evaluations(operations, done)
            while len(in_flight) >= STEPS_IN_FLIGHT:
                await in_flight.popleft()
            await self._evaluated(done)
        while in_flight:
            await in_flight.popleft()
        await asyncio.to_thread(self.store.flush_metrics)
        return done

    def _start_builds(self, operations: Operations, submitted: int) -> None:
        """Begin every batch that can be built now that so many steps are submitted.

        Others need one step's lead; one that is sampled from the weights needs those weights, and
        its snapshot is taken here, right behind the step that they come from.
        """
        snapshot: asyncio.Task[SamplingClient] | None = None
        while self._next_build < self.plan.total_steps:
            step = self._next_build
            if self._built_after(step) > submitted:
                break
            self._next_build += 1
            if self.algorithm.on_policy and not self.kept.has_batch(step):
                snapshot = snapshot or self._start_snapshot(submitted)
                self.context.policy.hold(step, snapshot)
            building = asyncio.get_running_loop().create_task(operations.build_batch(step))
            building.add_done_callback(_look_at)
            self._builds[step] = building

    def _built_after(self, step: int) -> int:
        """The steps that are submitted before a batch is built."""
        return self.algorithm.sampled_after(step) if self.algorithm.on_policy else step

    def _start_snapshot(self, steps_done: int) -> asyncio.Task[SamplingClient]:
        place = ("snapshot", steps_done)
        self._turns.reserve(place)

        async def snapshot() -> SamplingClient:
            submitted = await self._turns.submit(place, self.backend.snapshot_sampling_client)
            return await submitted

        task = asyncio.get_running_loop().create_task(snapshot())
        task.add_done_callback(_look_at)
        self._give_up_its_place_in_the_end(task, place)
        return task

    async def _cancel_builds(self) -> None:
        builds = list(self._builds.values())
        self._builds.clear()
        for task in builds:
            task.cancel()
        if builds:
            await asyncio.wait(builds)

    def _drop_builds(self, steps_done: int) -> None:
        """End the batches that come of no weights before these; a save may wait for the others."""
        for step, building in self._builds.items():
            if self._built_after(step) >= steps_done:
                building.cancel()

    async def _unless_stopping(self, building: asyncio.Task[Any]) -> bool:
        """Wait for a batch; False if the run is to stop instead."""
        asked = asyncio.ensure_future(self._stopping.wait())
        await asyncio.wait({building, asked}, return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        if self.stopping:
            return False
        building.result()
        return True

    async def _stop(self, operations: Operations, start: int, done: int) -> None:
        self._drop_builds(done)
        if done > start:
            self._start_save(operations, done)
            self._saves[done].recorded.set()  # its row was there before the save was thought of
        await self.beside.settle()
        raise RunStopped(f"the run was stopped after {done} of {self.plan.total_steps} steps")

    async def _evaluated(self, steps_done: int) -> None:
        """Wait for those evaluations up to here that a callback needs, to say if the run ends."""
        names = (self._call(callback, "evaluations_awaited") or () for callback in self.callbacks)
        awaited = {f"evaluate/{name}" for name in chain.from_iterable(names)}
        for (what, step), written in list(self._unwritten.items()):
            if what in awaited and step <= steps_done:
                await written.wait()

    def _early_end(self, steps_done: int) -> EarlyEnd | None:
        """The end before the last step that a callback asked for, if the run has come to it."""
        asked = (self._call(callback, "early_end") for callback in self.callbacks)
        end: EarlyEnd | None = min(filter(None, asked), default=None)
        come = end is not None and end.step <= steps_done < self.plan.total_steps
        return end if come else None

    async def _end_early(
        self, operations: Operations, segment: tuple[int, int], done: int, end: EarlyEnd
    ) -> None:
        """Make `done` the last step: what is due after that one is evaluated, and a checkpoint."""
        self._drop_builds(done)
        for name, prepared in self.evaluations.items():
            if not prepared.is_due(done, self.plan.total_steps) and prepared.is_due(done, done):
                self._start_evaluation(operations, name, done)
        if segment[0] < done < segment[1]:  # else there is one already
            self._start_save(operations, done)
            self._saves[done].recorded.set()  # its row was there before the save was thought of
        self.ended_early = end.reason
        self.tell("on_notice", f"ending after step {done}: {end.reason}")

    def _submit_step(
        self, group: asyncio.TaskGroup, operations: Operations, step: int
    ) -> list[asyncio.Task[Any]]:
        tasks = []
        works = {
            "forward_backward": operations.forward_backward(step),
            "optim_step": operations.optim_step(step),
        }
        for operation, work in works.items():
            place = (operation, step)
            self._turns.reserve(place)
            tasks.append(group.create_task(work))
            self._give_up_its_place_in_the_end(tasks[-1], place)
        return tasks

    def _start_save(self, operations: Operations, steps_done: int) -> None:
        state = self.algorithm.state_dict(steps_done)
        state |= {LINEAGE: asdict(self.kept.lineage)}
        sampled_before = [
            building
            for step, building in self._builds.items()
            if self.algorithm.on_policy and self._built_after(step) < steps_done
        ]
        self._saves[steps_done] = PendingSave(state, sampled_before)
        self._start_beside(("save", steps_done), operations.save(steps_done))

    def _start_evaluations(self, operations: Operations, steps_done: int) -> None:
        for name, prepared in self.evaluations.items():
            if prepared.is_due(steps_done, self.plan.total_steps):
                self._start_evaluation(operations, name, steps_done)

    def _start_evaluation(self, operations: Operations, name: str, steps_done: int) -> None:
        place = (f"evaluate/{name}", steps_done)
        self._start_beside(place, operations.evaluate(name, steps_done))

    def _start_beside(self, place: Place, work: Coroutine[Any, Any, Any]) -> None:
        self._unwritten[place] = asyncio.Event()
        self._turns.reserve(place)
        task = self.beside.start(place[1], work)
        self._give_up_its_place_in_the_end(task, place)

    def _give_up_its_place_in_the_end(self, task: asyncio.Task[Any], place: Place) -> None:
        task.add_done_callback(lambda _: self._turns.over(place))

    def _written_before(self, steps_done: int) -> list[asyncio.Event]:
        """What is not in the store yet and comes before the manifest of so many steps."""
        return [
            written
            for (what, step), written in self._unwritten.items()
            if step < steps_done or (step == steps_done and what != "save")
        ]

    def _written(self, what: str, steps_done: int) -> None:
        self._unwritten.pop((what, steps_done)).set()

    async def _finish_step(
        self, step: int, tasks: list[asyncio.Task[Any]], before: asyncio.Task[None] | None
    ) -> None:
        """Record a step as soon as it has its results and the step before is recorded."""
        metrics, optim_metrics = await asyncio.gather(*tasks)
        if before is not None:
            await before
        current = self._batches.pop(step)
        row = self._row(step, current, metrics, optim_metrics)
        if current.batch.transcripts:
            transcripts = current.batch.transcripts
            await asyncio.to_thread(self.store.write_rollouts, step + 1, transcripts)
        self.store.append_metrics(row)
        self._look_for_data(step + 1, current.batch)
        if (save := self._saves.get(step + 1)) is not None:
            save.recorded.set()
        self.tell("on_step", row)
        self._raise_failed_callback()
        if time.monotonic() - self._flushed > METRICS_FLUSH_SECONDS:
            self._flushed = time.monotonic()
            await asyncio.to_thread(self.store.flush_metrics)

    def _look_for_data(self, steps_done: int, batch: TrainingBatch) -> None:
        """Tell of steps that train nothing; a run that has only these has failed.

        Raises UserError at the end of such a run.
        """
        self._empty_batches = 0 if batch.data else self._empty_batches + 1
        if self._empty_batches and self._empty_batches % EMPTY_BATCHES_TOLD == 0:
            self.tell("on_notice", f"the last {self._empty_batches} batches held nothing to train")
        if self._empty_batches == self.plan.total_steps:
            raise UserError(
                Problem(
                    "algorithm.params",
                    f"none of the {steps_done} batches held anything to train on",
                    "look at the rollouts in the run's folder: are all rewards of a group alike?",
                )
            )

    def _row(
        self,
        step: int,
        current: BuiltBatch,
        metrics: Mapping[str, float],
        optim: Mapping[str, float],
    ) -> dict[str, float]:
        """One line of metrics.jsonl; all but the `time/` columns are the same in every replay."""
        now = time.monotonic()
        seconds, self._step_ended = now - self._step_ended, now
        row = {
            "step": step + 1,
            "progress/done_frac": (step + 1) / self.plan.total_steps,
            "progress/epoch": self.algorithm.cursor(step)[0],
            "optim/lr": self.algorithm.adam_params(step).learning_rate,
            **{f"optim/{name.partition(':')[0]}": value for name, value in optim.items()},
            **current.batch.metrics,
            **metrics,
            "time/build": current.build_seconds,
            "time/step": seconds,
        }
        if "tokens/total" in row:
            row["time/tokens_per_second"] = row["tokens/total"] / max(seconds, 1e-9)
        return row

    # -- the store -----------------------------------------------------------------------------

    def _publish(self, steps_done: int, uri: str, folder: Path) -> CheckpointManifest:
        self.store.flush_metrics()
        state = self._saves[steps_done].algorithm_state
        manifest = self.store.save_checkpoint(
            step=steps_done, state_uri=uri, algorithm_state=state, folder=folder
        )
        for expired in self.store.expire(self.retention):
            if expired.state_uri is not None:
                self.backend.discard_state(expired.state_uri)
        self.kept.expire()
        return manifest

    def finish(self) -> RunResult:
        """Write `result.json`, the last object of a run."""
        artifacts = {"run": self.store.uri(), "report": self.store.uri("report.md")}
        if (last := self.store.latest_checkpoint()) is not None:
            artifacts["checkpoint"] = self.store.checkpoint_uri(last)
            if last.files:
                artifacts["adapter"] = self.store.checkpoint_uri(last)
            elif last.state_uri is not None:
                artifacts["state"] = last.state_uri
        if self._sampler_uri is not None:
            artifacts["sampler"] = self._sampler_uri
        how = self.retention.keep_best
        if how is not None and (best := self.store.best_checkpoint(how)) is not None:
            artifacts["best"] = self.store.checkpoint_uri(best)
        result = RunResult(
            self.run_id,
            "completed",
            self._final_metrics(),
            artifacts,
            recoveries=self.recoveries,
            ended_early=self.ended_early,
        )
        self.store.write_result(asdict(result))
        return result

    def fail(self, error: BaseException) -> RunResult:
        """Write down that the run stopped short, and why; it can still be continued."""
        # What is no Exception is a signal, or a cancellation of the task that the run is in.
        stopped = isinstance(error, RunStopped) or not isinstance(error, Exception)
        status: Literal["cancelled", "failed"] = "cancelled" if stopped else "failed"
        why = str(error) or type(error).__name__
        artifacts = {"run": self.store.uri()}
        result = RunResult(self.run_id, status, {}, artifacts, why, self.recoveries)
        self.tell("on_end", result)
        if not isinstance(error, LeaseLost):  # then all of this is the other process's
            self.store.flush_metrics()
            self.store.write_result(asdict(result))
        return result

    def _final_metrics(self) -> dict[str, float]:
        """Scores before and after, what set-up did to the data, and the last row's numbers."""
        metrics = self.algorithm.setup_metrics()
        for row in self.store.metrics()[-1:]:
            metrics |= {
                name: value
                for name, value in row.items()
                if value is not None and not name.startswith("time/")
            }
        for row in self.store.evaluations():
            for metric, value in row["metrics"].items():
                if value is not None:  # as it is where the number is not finite
                    name = f"val/{row['name']}/{metric}"
                    metrics.setdefault(f"{name}/first", value)
                    metrics[name] = value
        return metrics

    def tell(self, event: str, *args: Any) -> None:
        """Call every callback; one that fails is shown in the log.

        It does not end the run unless it is set to: then the next step, or the end, raises.
        """
        for callback in self.callbacks:
            self._call(callback, event, *args)

    def _call(self, callback: Callback, event: str, *args: Any) -> Any:
        """What it returns; None if it fails, which is told as `tell` says."""
        try:
            return getattr(callback, event)(*args)
        except Exception as error:
            words = f"callback {type(callback).__name__} failed in {event}"
            # The same again at each step is for the log file only.
            failure = (id(callback), event, type(error))
            again = failure in self._failed
            self._failed.add(failure)
            logger.log(logging.WARNING if again else logging.ERROR, words, exc_info=error)
            if callback.stops_the_run and self._stopped_by is None:
                self._stopped_by = CallbackFailed(f"{words}: {type(error).__name__}: {error}")
                self._stopped_by.__cause__ = error
            return None

    def _raise_failed_callback(self) -> None:
        if self._stopped_by is not None:
            raise self._stopped_by
