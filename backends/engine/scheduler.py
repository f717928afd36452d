"""Who computes next: one thread, one lane of numbered jobs a model, one batch of waiting samples.

- A model's jobs run in the order of their numbers, whatever order they arrived in. A number that
  never comes holds its model up for a minute at most.
- Lanes take turns: the one that got ready first goes first, and after each job goes to the back.
- Samples that wait are one turn, however many they are, and those that come while it lasts join it.
  Between their steps jobs that got ready have their turns: each lane one, and then the samples go
  on for about as long as that took.
- Nothing polls: the compute thread sleeps on a condition, and whoever waits for a result is told
  by a callback on the event loop.

Jobs are callables; what they do is not known here.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Generic, TypeVar

log = logging.getLogger("flowtune.engine")

T = TypeVar("T")

LOST_NUMBER_SECONDS: Final = 60.0
MOST_SHARE_SECONDS: Final = 1.0
"""Samples go on for no longer than this while jobs wait."""


class Stopping(Exception):
    """Ends a turn of samples: the engine stops, and nobody waits for them any more."""


class PastTurn(ValueError):
    """The number's turn is over: it was given up, or ran so long ago that it is forgotten."""


@dataclass(slots=True, eq=False)
class Job:
    """One piece of work. `run` is called on the compute thread, the other two on the event loop.

    `prepare` is awaited when the job's turn in its lane has come, before it asks for the compute
    thread. `done` gets what `run` returned, or the exception that either raised.
    """

    run: Callable[[], Any]
    done: Callable[[Any], None]
    prepare: Callable[[], Awaitable[None]] | None = None


@dataclass(slots=True, eq=False)
class _Lane:
    """One model's jobs. Guarded by the scheduler's lock."""

    next_seq: int
    waiting: dict[int, Job] = field(default_factory=dict)
    busy: bool = False
    """Whether its next job is being prepared, is ready, or runs."""
    closed: Exception | None = None
    giving_up: asyncio.TimerHandle | None = None


@dataclass(slots=True, eq=False)
class _Ready:
    """A job whose turn has come, and its lane, if it has one."""

    job: Job
    lane: _Lane | None = None


class Scheduler(Generic[T]):
    """Samples are of type T; `run_samples` computes them on the compute thread.

    It is given a function that it calls between its steps: those that have come since, if any. The
    function raises Stopping when the rest is not wanted.
    """

    def __init__(
        self,
        run_samples: Callable[[Callable[[], Sequence[T]]], None],
        *,
        lost_number_seconds: float = LOST_NUMBER_SECONDS,
    ) -> None:
        self._run_samples = run_samples
        self._lost_number_seconds = lost_number_seconds
        self._loop = asyncio.get_running_loop()
        self._lanes: dict[str, _Lane] = {}
        self._changed = threading.Condition()
        self._ready: deque[_Ready] = deque()
        self._samples: list[T] = []
        self._sampling = False
        """Whether samples are in line for their turn, or have it."""
        self._share_until = 0.0
        self._sample_turn = _Ready(Job(run=lambda: None, done=lambda _: None))
        self._stopping = False
        self._preparing: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._compute, name="compute", daemon=True)
        self._thread.start()

    # -- called on the event loop --

    def open_lane(self, name: str, first_seq: int) -> None:
        """Start a lane whose first job has this number."""
        self._lanes[name] = _Lane(first_seq)

    def submit(self, name: str, seq: int | None, job: Job) -> None:
        """Queue a job in a lane; without a number it comes behind all that are there.

        Raises PastTurn for a number whose turn is over, or that is taken.
        """
        lane = self._lanes[name]
        with self._changed:
            if seq is None:
                seq = max([lane.next_seq, *(number + 1 for number in lane.waiting)])
            if seq < lane.next_seq:
                raise PastTurn(f"number {seq} comes too late: the next one is {lane.next_seq}")
            if seq in lane.waiting:
                raise PastTurn(f"number {seq} is taken by another request")
            lane.waiting[seq] = job
        self._advance(lane)

    def close_lane(self, name: str, reason: Exception) -> None:
        """Drop a lane; jobs that wait in it are done with `reason`, one that runs is finished."""
        lane = self._lanes.pop(name, None)
        if lane is None:
            return
        with self._changed:
            lane.closed = reason
            dropped = list(lane.waiting.values())
            lane.waiting.clear()
            dropped += [ready.job for ready in self._ready if ready.lane is lane]
            self._ready = deque(ready for ready in self._ready if ready.lane is not lane)
            self._stop_giving_up(lane)
        for job in dropped:
            job.done(reason)

    def run_soon(self, job: Job) -> None:
        """Queue a job that belongs to no lane."""
        self._hand_over(_Ready(job))

    async def call(self, function: Callable[[], Any]) -> Any:
        """Run a function on the compute thread and await what it returns or raises."""
        result: asyncio.Future[Any] = self._loop.create_future()

        def done(value: Any) -> None:
            if result.done():
                return
            if isinstance(value, BaseException):
                result.set_exception(value)
            else:
                result.set_result(value)

        self.run_soon(Job(function, done))
        return await result

    def sample(self, item: T) -> None:
        """Queue a sample; it joins those that run."""
        with self._changed:
            self._samples.append(item)
            self._line_up_samples()
            self._changed.notify()

    def stop(self) -> None:
        """Take up nothing more. The job that runs is finished; see `wait_stopped`."""
        with self._changed:
            self._stopping = True
            for lane in self._lanes.values():
                self._stop_giving_up(lane)
            self._changed.notify()

    def wait_stopped(self, timeout_seconds: float) -> bool:
        """Wait for the compute thread to end; whether it did."""
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _advance(self, lane: _Lane) -> None:
        """Take up the lane's next job if it is there and the lane is free. On the event loop."""
        with self._changed:
            if lane.busy or lane.closed is not None:
                return
            job = lane.waiting.pop(lane.next_seq, None)
            if job is None:
                self._watch_gap(lane)
                return
            self._stop_giving_up(lane)
            lane.busy = True
            lane.next_seq += 1
        if job.prepare is None:
            self._hand_over(_Ready(job, lane))
            return
        task = self._loop.create_task(self._prepare(job, lane))
        self._preparing.add(task)
        task.add_done_callback(self._preparing.discard)

    async def _prepare(self, job: Job, lane: _Lane) -> None:
        assert job.prepare is not None
        failed: Exception | None = None
        try:
            await job.prepare()
        except Exception as error:  # noqa: BLE001  (handed to whoever waits for the job)
            failed = error
        failed = failed or lane.closed
        if failed is None:
            self._hand_over(_Ready(job, lane))
            return
        job.done(failed)
        with self._changed:
            lane.busy = False
        self._advance(lane)

    def _hand_over(self, ready: _Ready) -> None:
        with self._changed:
            self._ready.append(ready)
            self._changed.notify()

    def _watch_gap(self, lane: _Lane) -> None:
        if lane.waiting and lane.giving_up is None:
            lane.giving_up = self._loop.call_later(
                self._lost_number_seconds, self._give_up, lane, lane.next_seq
            )

    def _give_up(self, lane: _Lane, seq: int) -> None:
        """Go on without a number that has not come for too long."""
        lane.giving_up = None
        with self._changed:
            if lane.next_seq == seq and lane.waiting and not lane.busy:
                lane.next_seq = min(lane.waiting)
        self._advance(lane)

    def _stop_giving_up(self, lane: _Lane) -> None:
        if lane.giving_up is not None:
            lane.giving_up.cancel()
            lane.giving_up = None

    # -- the compute thread --

    def _compute(self) -> None:
        while (ready := self._take()) is not None:
            if ready is self._sample_turn:
                self._run_sample_turn()
            else:
                self._run_job(ready)

    def _run_job(self, ready: _Ready) -> None:
        try:
            result = ready.job.run()
        except BaseException as error:  # noqa: BLE001  (handed to whoever waits for the job)
            result = error
        following = self._next_of(ready.lane) if ready.lane is not None else None
        self._tell(partial(ready.job.done, result))
        if following is not None:
            self._tell(following)

    def _run_sample_turn(self) -> None:
        try:
            self._run_samples(self._arrived)
        except Stopping:
            return
        except Exception:  # the thread has others to serve
            log.exception("a turn of samples failed")
        with self._changed:
            self._sampling = False
            self._line_up_samples()

    def _line_up_samples(self) -> None:
        if self._samples and not self._sampling:
            self._sampling = True
            self._ready.append(self._sample_turn)

    def _arrived(self) -> Sequence[T]:
        """Between two steps of the samples: the jobs whose time has come, then new samples."""
        if self._stopping:
            raise Stopping
        if self._ready and time.monotonic() >= self._share_until:
            self._run_ready_jobs()
        if not self._samples:
            return ()
        with self._changed:
            arrived, self._samples = self._samples, []
        return arrived

    def _run_ready_jobs(self) -> None:
        started = time.monotonic()
        for _ in range(len(self._ready)):
            ready = self._take(wait=False)
            if ready is None:
                break
            self._run_job(ready)
        now = time.monotonic()
        self._share_until = now + min(now - started, MOST_SHARE_SECONDS)

    def _take(self, *, wait: bool = True) -> _Ready | None:
        """The next turn; None when stopping, or if there is none and `wait` is off."""
        with self._changed:
            while wait and not self._ready and not self._stopping:
                self._changed.wait()
            return self._ready.popleft() if self._ready and not self._stopping else None

    def _next_of(self, lane: _Lane) -> Callable[[], None] | None:
        """Free a lane after its job. Its next one gets in line at once if it needs no preparing.

        This saves pipelined steps a detour over the event loop. Returns what is left to do there.
        """
        with self._changed:
            job = lane.waiting.get(lane.next_seq) if lane.closed is None else None
            if job is not None and job.prepare is None:
                del lane.waiting[lane.next_seq]
                lane.next_seq += 1
                self._ready.append(_Ready(job, lane))
                return None
            lane.busy = False
        return partial(self._advance, lane)

    def _tell(self, callback: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop is closed: the process ends, nobody waits
            self._loop.call_soon_threadsafe(callback)
