"""A live run whose steps another library takes: one segment, from the first step to the last.

The library's loop blocks, so it has a thread of its own. After each step it hands the row to the
event loop, which records it while the next step is taken. Where something is to be done with the
weights, or the run ends, it waits there: evaluations and saves are the operations that any run has.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from algorithms.base import OwnLoop, Transcript
from algorithms.run import METRICS_FLUSH_SECONDS, LiveRun, Operations, RunStopped

T = TypeVar("T")

STEP_SECONDS = 10.0
"""How long a run that is to end waits for the step under way."""


@dataclass
class OwnLoopRun(LiveRun):
    """The live objects of such a run."""

    _given_up: bool = False
    _thread: threading.Thread | None = None

    @property
    def segment_ends(self) -> tuple[int, ...]:
        """One segment: the library starts once."""
        return (self.plan.total_steps,)

    async def run_segment(self, operations: Operations, start: int, stop: int) -> None:
        """All steps that are left; each is evaluated and saved, where due, before the next begins.

        Raises what the library raises, and RunStopped if the run was asked to stop. One that a
        callback wants to end has `ended_early` from then on.
        """
        assert isinstance(self.algorithm, OwnLoop)
        self._raise_failed_callback()
        if start == 0:
            self._start_evaluations(operations, 0)
            await self.settle()
        if (end := self._early_end(start)) is not None:
            await self._end_early(operations, (start, stop), start, end)
            await self.settle()
            return
        steps = _Steps(self, operations, asyncio.get_running_loop())
        try:
            await self._in_thread(self.algorithm, steps)
        except BaseException:
            self._given_up = True  # the thread ends at its next step, if it is still at one
            raise
        await asyncio.to_thread(self.store.flush_metrics)
        if steps.done < stop and self.ended_early is None:
            raise RunStopped(f"the run was stopped after {steps.done} of {stop} steps")

    async def cancel(self) -> None:
        """End what goes on beside the steps, and these behind the one that is under way.

        One that takes very long is left to itself: nothing of it reaches the run any more.
        """
        self._given_up = True
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, STEP_SECONDS)
        await super().cancel()

    async def _in_thread(self, algorithm: OwnLoop, steps: _Steps) -> None:
        """Run the library's loop in a thread that does not keep the process from ending."""
        over: Future[None] = Future()
        over.set_running_or_notify_cancel()

        def work() -> None:
            try:
                algorithm.run_loop(steps)
                over.set_result(None)
            except BaseException as error:  # noqa: BLE001  (raised where the loop is awaited)
                over.set_exception(error)

        self._thread = threading.Thread(target=work, name="own-loop", daemon=True)
        self._thread.start()
        await asyncio.wrap_future(over)

    def begins(self) -> None:
        """Let the clock of the first step start."""
        self._step_ended = time.monotonic()

    async def record(
        self,
        done: int,
        metrics: Mapping[str, float],
        transcripts: Sequence[Transcript],
    ) -> None:
        """A step is done: keep its row, and tell of it."""
        if self._given_up:
            raise RunStopped(f"the run ended before step {done}")
        if transcripts:
            await asyncio.to_thread(self.store.write_rollouts, done, transcripts)
        row = self._own_row(done, metrics)
        self.store.append_metrics(row)
        self.tell("on_step", row)
        if time.monotonic() - self._flushed > METRICS_FLUSH_SECONDS:
            self._flushed = time.monotonic()
            await asyncio.to_thread(self.store.flush_metrics)

    def pauses_after(self, done: int) -> bool:
        """Whether the weights are to stay as they are for a while, or for good."""
        evaluates = any(
            prepared.is_due(done, self.plan.total_steps) for prepared in self.evaluations.values()
        )
        ends = self.stopping or self._early_end(done) is not None
        return ends or evaluates or done in self.plan.save_steps

    async def pause(self, operations: Operations, done: int) -> bool:
        """Save and evaluate what is due after a step; whether to go on."""
        saves = done in self.plan.save_steps or self.stopping
        if saves:
            self._start_save(operations, done)
            self._saves[done].recorded.set()
        self._start_evaluations(operations, done)
        await self.settle()
        if (end := self._early_end(done)) is not None:
            segment = (done, done) if saves else (self.plan.first_step, self.plan.total_steps)
            await self._end_early(operations, segment, done, end)
            await self.settle()
            return False
        return not self.stopping

    def _own_row(self, done: int, metrics: Mapping[str, float]) -> dict[str, float]:
        now = time.monotonic()
        seconds, self._step_ended = now - self._step_ended, now
        row = {
            "step": done,
            "progress/done_frac": done / self.plan.total_steps,
            "progress/epoch": self.algorithm.cursor(done - 1)[0],
            **metrics,
            "time/step": seconds,
        }
        if "tokens/total" in row:
            row["time/tokens_per_second"] = row["tokens/total"] / max(seconds, 1e-9)
        return row


class _Steps:
    """The run as the library's thread sees it."""

    def __init__(
        self, run: OwnLoopRun, operations: Operations, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.first_step = run.plan.first_step
        self.total_steps = run.plan.total_steps
        self.done = self.first_step
        self._run = run
        self._operations = operations
        self._loop = loop
        self._recording: Future[None] | None = None

    def begins(self) -> None:
        """See `StepLoop`."""
        self._run.begins()

    def step_done(self, row: Mapping[str, float], transcripts: Sequence[Transcript] = ()) -> bool:
        """See `StepLoop`."""
        self._recorded()  # callbacks have seen all rows but this one: it is theirs for a step
        done = self.done + 1
        pauses = self._run.pauses_after(done)
        recording = self._run.record(done, row, transcripts)
        self._recording = asyncio.run_coroutine_threadsafe(recording, self._loop)
        self.done = done
        if not pauses:
            return True
        self._recorded()
        return self.wait(self._run.pause(self._operations, done)) and done < self.total_steps

    def _recorded(self) -> None:
        """Wait until the last step is recorded. Raises what recording it raises."""
        if self._recording is not None:
            self._recording.result()

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """See `StepLoop`."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()
