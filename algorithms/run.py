"""One live run: its operations, and the pipelined loop that drives them.

The loop keeps the backend's queue full: the next batch is built, and for off-policy algorithms the
next step submitted, while a step runs. Requests reach the backend in the order of the recipe
(forward_backward, optim_step, then the save and the snapshots that belong to that step), whatever
order the coroutines that carry them start in. Knows nothing of Prefect; `tasks` wraps each
operation in a task.

Steps are indexed from 0; a checkpoint, a metrics row and an evaluation carry the number of steps
*done*, so step index i gives row i + 1.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from algorithms.base import BaseAlgorithm, RunResult, TrainingBatch
from algorithms.callbacks import Callback, RunPlan
from algorithms.evaluators import PreparedEvaluation, evaluate
from backends.base import Backend
from backends.errors import StateLostError
from backends.storage.run_store import CheckpointManifest, RunStore

if TYPE_CHECKING:
    from backends.base import ForwardBackwardResult

STEPS_IN_FLIGHT = 2
"""Steps submitted and not yet awaited: one runs, one waits behind it."""

METRICS_FLUSH_SECONDS = 5.0

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Turn:
    """A place in the order of submissions. Entered, it waits until every earlier one has left."""

    def __init__(self, before: asyncio.Future[None]) -> None:
        self._before = before
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> None:
        await asyncio.shield(self._before)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if error is None:
            self.release()
        else:
            self.refuse()

    def release(self) -> None:
        """Let the next one in."""
        if not self.done.done():
            self.done.set_result(None)

    def refuse(self) -> None:
        """Keep the later ones out: what they were to follow never reached the backend."""
        if not self.done.done():
            self.done.set_exception(StateLostError("an earlier operation was never submitted"))
            self.done.exception()  # seen: nobody has to come after it


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


@dataclass
class LiveRun:
    """The live objects of a run and the plain operations on them."""

    run_id: str
    store: RunStore
    backend: Backend
    algorithm: BaseAlgorithm
    evaluations: Mapping[str, PreparedEvaluation]
    plan: RunPlan
    callbacks: list[Callback] = field(default_factory=list)
    _batches: dict[int, BuiltBatch] = field(default_factory=dict)
    _turns: dict[tuple[str, int], Turn] = field(default_factory=dict)
    _submitted: dict[tuple[str, int], Awaitable[Any]] = field(default_factory=dict)
    _recorded: dict[int, asyncio.Event] = field(default_factory=lambda: defaultdict(asyncio.Event))
    _unwritten: dict[tuple[str, int], asyncio.Event] = field(default_factory=dict)
    _sampler_uri: str | None = None
    _last_turn: asyncio.Future[None] | None = None
    _flushed: float = field(default_factory=time.monotonic)
    _step_ended: float = field(default_factory=time.monotonic)

    # -- order ---------------------------------------------------------------------------------

    def reserve(self, operation: str, step: int) -> Turn:
        """The next place in the backend's queue, to be taken up by that operation."""
        if self._last_turn is None:
            self._last_turn = asyncio.get_running_loop().create_future()
            self._last_turn.set_result(None)
        turn = Turn(self._last_turn)
        self._last_turn = turn.done
        self._turns[operation, step] = turn
        return turn

    async def _in_turn(
        self, operation: str, step: int, submit: Callable[[], Awaitable[T]]
    ) -> Awaitable[T]:
        """Submit in the operation's turn, and once: a retried task waits for the same request."""
        key = (operation, step)
        if key not in self._submitted:
            async with self._turns.pop(key):
                self._submitted[key] = submit()
        return self._submitted[key]

    # -- operations ----------------------------------------------------------------------------

    async def build_batch(self, step: int) -> Mapping[str, float]:
        """Build the batch of a step and hold it until the step is recorded."""
        started = time.monotonic()
        batch = await self.algorithm.build_batch(step)
        self._batches[step] = BuiltBatch(batch, time.monotonic() - started)
        return {"datums": float(len(batch.data)), **batch.metrics}

    async def forward_backward(self, step: int) -> Mapping[str, float]:
        """Submit the batch in its turn and wait for the result."""
        current = self._batches[step]
        result = await self._in_turn(
            "forward_backward", step, lambda: self._submit_batch(current.batch)
        )
        return self.algorithm.step_metrics(step, current.batch, await result)

    def _submit_batch(self, batch: TrainingBatch) -> Awaitable[ForwardBackwardResult]:
        if callable(batch.loss_fn):
            return self.backend.forward_backward_custom_async(batch.data, batch.loss_fn)
        return self.backend.forward_backward_async(
            batch.data, loss_fn=batch.loss_fn, loss_fn_config=batch.loss_fn_config
        )

    async def optim_step(self, step: int) -> Mapping[str, float]:
        """Submit the optimizer step right behind its gradients and wait for the result."""
        adam = self.algorithm.adam_params(step)
        result = await self._in_turn(
            "optim_step", step, lambda: self.backend.optim_step_async(adam)
        )
        return (await result).metrics or {}

    async def save(self, steps_done: int) -> str:
        """Save right behind the step's optimizer step, then publish files and manifest.

        The manifest waits for the step's row and for every evaluation up to it: a run that goes on
        from here could not catch up on them.
        """
        name = f"step-{steps_done:06d}"
        saved = await self._in_turn("save", steps_done, lambda: self.backend.save_full_state(name))
        uri = await saved
        with tempfile.TemporaryDirectory(prefix="flowtune-") as temporary:
            folder = Path(temporary)
            exported = await self.backend.export_state(uri, folder)
            if not exported and steps_done == self.plan.total_steps and not self._sampler_uri:
                # Nothing follows the last step, so these are its weights; a server that keeps its
                # files to itself samples only from weights that were saved for that.
                self._sampler_uri = await self.backend.save_for_sampler(name)
            await self._recorded[steps_done].wait()
            for written in list(self._unwritten.values()):
                await written.wait()
            manifest = await asyncio.to_thread(self._publish, steps_done, uri, folder)
        address = self.store.checkpoint_uri(manifest)
        self.tell("on_save", steps_done, address)
        return address

    async def evaluate(self, name: str, steps_done: int) -> float:
        """Score the weights as they are behind everything submitted so far; the mean reward."""
        snapshot = await self._in_turn(
            f"evaluate/{name}", steps_done, self.backend.snapshot_sampling_client
        )
        result = await evaluate(self.evaluations[name], await snapshot, steps_done)
        await asyncio.to_thread(self.store.write_evaluation, result)
        self._unwritten.pop((name, steps_done)).set()
        self.tell("on_evaluation", result)
        return result.score

    # -- the loop ------------------------------------------------------------------------------

    async def run_segment(self, operations: Operations, start: int, stop: int) -> None:
        """Steps `start` to `stop`, the checkpoint after them, and the evaluations on the way.

        The first error ends the segment: what is under way is cancelled, and that error raised.
        """
        self._step_ended = time.monotonic()
        try:
            async with asyncio.TaskGroup() as group:
                if start == 0:
                    self._submit_evaluations(group, operations, 0)
                await self._run_steps(group, operations, start, stop)
        except BaseExceptionGroup as errors:
            first = errors.exceptions[0]
            raise first from first.__cause__

    async def _run_steps(
        self, group: asyncio.TaskGroup, operations: Operations, start: int, stop: int
    ) -> None:
        most = 1 if self.algorithm.on_policy else STEPS_IN_FLIGHT
        in_flight: deque[tuple[int, list[asyncio.Task[Any]]]] = deque()
        building = group.create_task(operations.build_batch(start))
        for step in range(start, stop):
            await building
            in_flight.append((step, self._submit_step(group, operations, step, stop)))
            if step + 1 < stop and not self.algorithm.on_policy:
                building = group.create_task(operations.build_batch(step + 1))
            while len(in_flight) >= most:
                await self._finish_step(*in_flight.popleft())
            if step + 1 < stop and self.algorithm.on_policy:
                building = group.create_task(operations.build_batch(step + 1))
        while in_flight:
            await self._finish_step(*in_flight.popleft())
        await asyncio.to_thread(self.store.flush_metrics)

    def _submit_step(
        self, group: asyncio.TaskGroup, operations: Operations, step: int, stop: int
    ) -> list[asyncio.Task[Any]]:
        done = step + 1
        tasks = [
            self._submit(group, "forward_backward", step, operations.forward_backward(step)),
            self._submit(group, "optim_step", step, operations.optim_step(step)),
        ]
        if done == stop:
            self._submit(group, "save", done, operations.save(done))
        self._submit_evaluations(group, operations, done)
        return tasks

    def _submit_evaluations(
        self, group: asyncio.TaskGroup, operations: Operations, steps_done: int
    ) -> None:
        for name, prepared in self.evaluations.items():
            if prepared.is_due(steps_done, self.plan.total_steps):
                self._unwritten[name, steps_done] = asyncio.Event()
                work = operations.evaluate(name, steps_done)
                self._submit(group, f"evaluate/{name}", steps_done, work)

    def _submit(
        self, group: asyncio.TaskGroup, operation: str, step: int, work: Coroutine[Any, Any, Any]
    ) -> asyncio.Task[Any]:
        turn = self.reserve(operation, step)
        task = group.create_task(work)

        def ended(_: asyncio.Task[Any]) -> None:
            # One that ended before its turn must not keep the others waiting for ever.
            turn.refuse()
            self._submitted.pop((operation, step), None)

        task.add_done_callback(ended)
        return task

    async def _finish_step(self, step: int, tasks: list[asyncio.Task[Any]]) -> None:
        metrics, optim_metrics = await asyncio.gather(*tasks)
        row = self._row(step, self._batches.pop(step), metrics, optim_metrics)
        self.store.append_metrics(row)
        self._recorded[step + 1].set()
        self.tell("on_step", row)
        if time.monotonic() - self._flushed > METRICS_FLUSH_SECONDS:
            self._flushed = time.monotonic()
            await asyncio.to_thread(self.store.flush_metrics)

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
            "progress/epoch": step // max(self.algorithm.steps_per_epoch, 1),
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
        return self.store.save_checkpoint(
            step=steps_done,
            state_uri=uri,
            algorithm_state=self.algorithm.state_dict(steps_done),
            folder=folder,
        )

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
        result = RunResult(self.run_id, "completed", self._final_metrics(), artifacts)
        self.store.write_result(asdict(result))
        return result

    def fail(self, error: BaseException) -> RunResult:
        """Write down that the run stopped short, and why; it can still be continued."""
        stopped = not isinstance(error, Exception)  # asked to stop, by whatever signal
        status: Literal["cancelled", "failed"] = "cancelled" if stopped else "failed"
        why = str(error) or type(error).__name__
        result = RunResult(self.run_id, status, {}, {"run": self.store.uri()}, why)
        self.tell("on_end", result)
        self.store.flush_metrics()
        self.store.write_result(asdict(result))
        return result

    def _final_metrics(self) -> dict[str, float]:
        """Scores before and after, what set-up did to the data, and the last row's numbers."""
        metrics = self.algorithm.setup_metrics()
        for row in self.store.metrics()[-1:]:
            metrics |= {name: value for name, value in row.items() if not name.startswith("time/")}
        for row in self.store.evaluations():
            name = f"val/{row['name']}/reward/mean"
            metrics.setdefault(f"{name}/first", row["score"])
            metrics[name] = row["score"]
        return metrics

    def tell(self, event: str, *args: Any) -> None:
        """Call every callback; one that fails is shown in the log and does not end the run."""
        for callback in self.callbacks:
            try:
                getattr(callback, event)(*args)
            except Exception:
                logger.exception("callback %s failed in %s", type(callback).__name__, event)
