"""Order, turns and waking: jobs here only write down that they ran."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from backends.engine import scheduler
from backends.engine.scheduler import Job, PastTurn, Scheduler


class Desk:
    """A scheduler, what ran on its compute thread, and a gate that holds that thread up."""

    def __init__(self, **options: Any) -> None:
        self.ran: list[Any] = []
        self.batches: list[list[Any]] = []
        self.between: list[Callable[[], None]] = []
        """What happens between the steps of the samples, one a step."""
        self.results: dict[Any, Any] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.scheduler: Scheduler[Any] = Scheduler(self._samples, **options)

    def _samples(self, arriving: Callable[[], Sequence[Any]]) -> None:
        """A sample is a number of steps, all of which are taken together; inf never ends."""
        running: list[Any] = []
        self.gate.wait(5)
        while True:
            if arrived := list(arriving()):
                self.batches.append(arrived)
                running += arrived
            if not running:
                return
            if "bad" in running:
                raise ValueError("a bad sample")
            self.ran.append("step")
            running = [steps - 1 for steps in running if steps > 1]
            if self.between:
                self.between.pop(0)()

    def job(self, name: Any, run: Callable[[], Any] | None = None, prepare: Any = None) -> Job:
        def work() -> Any:
            self.gate.wait(5)
            self.ran.append(name)
            return run() if run is not None else name

        return Job(work, partial(self.results.__setitem__, name), prepare)

    def submit(self, lane: str, seq: int | None) -> None:
        self.scheduler.submit(lane, seq, self.job((lane, seq)))

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for what the compute thread does; fails after five seconds."""
        deadline = time.monotonic() + 5
        while not condition():
            assert time.monotonic() < deadline, (self.ran, self.results, self.batches)
            await asyncio.sleep(0.001)


@pytest.fixture
async def desk() -> AsyncIterator[Desk]:
    desk = Desk(lost_number_seconds=0.2)
    desk.scheduler.open_lane("a", 1)
    desk.scheduler.open_lane("b", 1)
    yield desk
    desk.gate.set()
    desk.scheduler.stop()
    assert desk.scheduler.wait_stopped(5)


async def test_numbers_decide_not_arrival(desk: Desk) -> None:
    for seq in (2, 3, 1, 4):
        desk.submit("a", seq)
    await desk.until(lambda: len(desk.results) == 4)
    assert desk.ran == [("a", 1), ("a", 2), ("a", 3), ("a", 4)]


async def test_lanes_take_turns(desk: Desk) -> None:
    desk.gate.clear()
    for seq in (1, 2, 3):
        desk.submit("a", seq)
    for seq in (1, 2, 3):
        desk.submit("b", seq)
    desk.gate.set()
    await desk.until(lambda: len(desk.results) == 6)
    assert [lane for lane, _ in desk.ran] == ["a", "b", "a", "b", "a", "b"]


async def test_a_lost_number_holds_its_own_lane_up_for_a_while_only(desk: Desk) -> None:
    started = time.monotonic()
    desk.submit("a", 2)
    desk.submit("a", 4)
    desk.submit("b", 1)
    await desk.until(lambda: ("b", 1) in desk.results)
    assert time.monotonic() - started < 0.15
    assert ("a", 2) not in desk.results
    await desk.until(lambda: ("a", 2) in desk.results)
    assert time.monotonic() - started >= 0.2
    await desk.until(lambda: ("a", 4) in desk.results)
    with pytest.raises(PastTurn, match="number 3 comes too late: the next one is 5"):
        desk.submit("a", 3)


async def test_a_number_that_comes_in_time_is_not_given_up(desk: Desk) -> None:
    desk.submit("a", 2)
    await asyncio.sleep(0.15)
    desk.submit("a", 1)
    desk.submit("a", 4)
    await asyncio.sleep(0.15)
    desk.submit("a", 3)
    await desk.until(lambda: len(desk.results) == 4)
    assert [seq for _, seq in desk.ran] == [1, 2, 3, 4]


async def test_a_taken_number_is_refused(desk: Desk) -> None:
    desk.submit("a", 2)
    with pytest.raises(PastTurn, match="number 2 is taken"):
        desk.submit("a", 2)


async def test_without_a_number_a_job_comes_last(desk: Desk) -> None:
    desk.gate.clear()
    desk.submit("a", 1)
    desk.submit("a", 2)
    desk.submit("a", None)
    desk.gate.set()
    await desk.until(lambda: len(desk.results) == 3)
    assert [seq for _, seq in desk.ran] == [1, 2, None]


async def test_waiting_samples_go_together_and_in_turn(desk: Desk) -> None:
    desk.gate.clear()
    desk.submit("a", 1)
    await asyncio.sleep(0.02)
    for _ in range(40):
        desk.scheduler.sample(1)
    desk.submit("a", 2)
    await asyncio.sleep(0.02)
    desk.gate.set()
    await desk.until(lambda: ("a", 2) in desk.results and bool(desk.batches))
    assert desk.batches == [[1] * 40]


async def test_samples_join_those_that_run(desk: Desk) -> None:
    def join(steps: int) -> Callable[[], None]:
        return lambda: desk.scheduler.sample(steps)

    desk.between = [join(2), lambda: None, join(1)]
    desk.scheduler.sample(4)
    await desk.until(lambda: len(desk.batches) == 3)
    await desk.scheduler.call(lambda: None)
    assert desk.batches == [[4], [2], [1]]
    assert desk.ran == ["step"] * 4


async def test_jobs_and_samples_share_the_time(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of the samples takes a second here, and each job as many as its number says."""
    now = 100.0
    monkeypatch.setattr(scheduler, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(scheduler, "MOST_SHARE_SECONDS", 4)

    def take(seconds: float) -> None:
        nonlocal now
        now += seconds

    def job(name: str, seconds: float) -> Job:
        return desk.job((name, seconds), run=lambda: take(seconds))

    desk.gate.clear()
    desk.scheduler.sample(20)
    for seq, seconds in enumerate((2, 3, 9), start=1):
        desk.scheduler.submit("a", seq, job("a", seconds))
    desk.scheduler.submit("b", 1, job("b", 1))
    desk.between = [partial(take, 1) for _ in range(20)]
    desk.gate.set()
    await desk.until(lambda: desk.ran.count("step") == 20)
    turns = ["".join("s" if ran == "step" else f" {ran[0]}{ran[1]} " for ran in desk.ran)]
    assert turns[0].split() == ["a2", "b1", "sss", "a3", "sss", "a9", "s" * 14]


async def test_training_is_not_held_up_by_samples_without_end(desk: Desk) -> None:
    desk.scheduler.sample(math.inf)
    for seq in range(1, 20):
        desk.submit("a", seq)
    await desk.until(lambda: len(desk.results) == 19)


async def test_stopping_ends_samples(desk: Desk) -> None:
    desk.scheduler.sample(math.inf)
    await desk.until(lambda: len(desk.ran) > 10)
    desk.scheduler.stop()
    assert await asyncio.to_thread(desk.scheduler.wait_stopped, 5)


async def test_samples_that_fail_leave_the_thread_to_others(desk: Desk) -> None:
    desk.scheduler.sample("bad")
    await desk.until(lambda: bool(desk.batches))
    desk.submit("a", 1)
    desk.scheduler.sample(1)
    await desk.until(lambda: ("a", 1) in desk.results and desk.batches == [["bad"], [1]])


async def test_an_error_is_the_jobs_result_and_the_lane_goes_on(desk: Desk) -> None:
    desk.scheduler.submit("a", 1, desk.job("bad", run=lambda: 1 // 0))
    desk.submit("a", 2)
    await desk.until(lambda: len(desk.results) == 2)
    assert isinstance(desk.results["bad"], ZeroDivisionError)


async def test_preparing_keeps_the_order_and_leaves_the_thread_free(desk: Desk) -> None:
    prepared = asyncio.Event()

    async def prepare() -> None:
        desk.ran.append("prepare")
        await prepared.wait()

    desk.submit("a", 1)
    desk.scheduler.submit("a", 2, desk.job(("a", 2), prepare=prepare))
    desk.submit("a", 3)
    await desk.until(lambda: "prepare" in desk.ran)
    desk.submit("b", 1)
    await desk.until(lambda: ("b", 1) in desk.results)
    assert desk.ran == [("a", 1), "prepare", ("b", 1)]
    prepared.set()
    await desk.until(lambda: ("a", 3) in desk.results)
    assert desk.ran[-2:] == [("a", 2), ("a", 3)]


async def test_what_cannot_be_prepared_fails_alone(desk: Desk) -> None:
    async def prepare() -> None:
        raise OSError("no disk")

    desk.scheduler.submit("a", 1, desk.job("bad", prepare=prepare))
    desk.submit("a", 2)
    await desk.until(lambda: ("a", 2) in desk.results)
    assert isinstance(desk.results["bad"], OSError)
    assert desk.ran == [("a", 2)]


async def test_a_closed_lane_gives_its_waiting_jobs_the_reason(desk: Desk) -> None:
    desk.gate.clear()
    desk.submit("b", 1)
    await asyncio.sleep(0.02)
    for seq in (1, 2, 4):
        desk.submit("a", seq)
    reason = RuntimeError("gone")
    desk.scheduler.close_lane("a", reason)
    assert [desk.results[("a", seq)] for seq in (1, 2, 4)] == [reason] * 3
    desk.gate.set()
    await desk.until(lambda: ("b", 1) in desk.results)
    assert desk.ran == [("b", 1)]


async def test_calls_return_and_raise(desk: Desk) -> None:
    assert await desk.scheduler.call(threading.get_ident) != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        await desk.scheduler.call(lambda: 1 // 0)


async def test_a_result_is_known_as_soon_as_it_is_there(desk: Desk) -> None:
    """Polling, however often, would show as a delay; the median forgives a busy machine."""
    delays = []
    for _ in range(50):
        finished = await desk.scheduler.call(time.perf_counter)
        delays.append(time.perf_counter() - finished)
    assert sorted(delays)[25] < 0.002


async def test_stopping_finishes_what_runs_and_takes_up_nothing_more(desk: Desk) -> None:
    desk.gate.clear()
    desk.submit("a", 1)
    desk.submit("a", 2)
    await asyncio.sleep(0.02)
    desk.scheduler.stop()
    assert not desk.scheduler.wait_stopped(0.05)
    desk.gate.set()
    assert await asyncio.to_thread(desk.scheduler.wait_stopped, 5)
    assert desk.ran == [("a", 1)]
