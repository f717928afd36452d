"""The pipelined loop: what reaches the backend, in which order, and what happens on an error."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from algorithms.base import RunContext, TrainingBatch, Transcript
from algorithms.callbacks import Callback, EarlyEnd
from algorithms.experiment import AlgorithmSection, Experiment
from algorithms.mock_sft import MockSFT
from algorithms.opening import open_live_run
from algorithms.run import LiveRun, RunStopped
from backends.base import Backend, SamplingClient
from backends.errors import UserError
from backends.storage.checkpoints import CheckpointManifest, Retention
from backends.storage.objects import StoreError
from backends.storage.run_store import RunStore

ROWS = [{"prompt": f"{i}", "completion": f"{i}{i}"} for i in range(8)]


class Recorder:
    """The run's backend, writing down each submission and each end of a result."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.submitted: list[str] = []
        self.finished: list[str] = []

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._backend, name)
        if not name.endswith("_async") and not name.startswith(("save_", "snapshot_")):
            return method

        def call(*args: Any, **kwargs: Any) -> Awaitable[Any]:
            self.submitted.append(name)
            return self._noted(name, method(*args, **kwargs))

        return call

    async def _noted(self, name: str, result: Awaitable[Any]) -> Any:
        answer = await result
        self.finished.append(name)
        return answer


class Unpunctual:
    """The run's operations, each starting when it likes, as task runs do."""

    def __init__(self, run: LiveRun, seed: int) -> None:
        self._run = run
        self._random = random.Random(seed)

    async def _late(self, operation: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        await asyncio.sleep(self._random.random() * 0.01)
        return await operation(*args)

    def build_batch(self, step: int) -> Any:
        return self._late(self._run.build_batch, step)

    def forward_backward(self, step: int) -> Any:
        return self._late(self._run.forward_backward, step)

    def optim_step(self, step: int) -> Any:
        return self._late(self._run.optim_step, step)

    def save(self, steps_done: int) -> Any:
        return self._late(self._run.save, steps_done)

    def evaluate(self, name: str, steps_done: int) -> Any:
        return self._late(self._run.evaluate, name, steps_done)


async def opened(tmp_path: Path, **params: Any) -> LiveRun:
    experiment = Experiment.model_validate(
        {
            "name": "order",
            "store": str(tmp_path),
            "model": {"name": "any/model"},
            "data": {"kind": "rows", "rows": ROWS},
            "algorithm": {"kind": "mock_sft", "params": {"batch_size": 2, "max_steps": 6}},
            "backend": {"kind": "mock", "params": params},
            "evaluations": [{"name": "val", "data": {"kind": "rows", "rows": ROWS}, "every": 2}],
        }
    )
    run = await open_live_run(experiment, RunStore(tmp_path, "a"))
    run.backend = Recorder(run.backend)  # type: ignore[assignment]
    return run


async def whole(run: LiveRun, operations: Unpunctual) -> None:
    """All steps, until everything is safe."""
    await run.run_segment(operations, 0, 6)
    await run.settle()


STEP = ["forward_backward_async", "optim_step_async"]
RECIPE = [
    "snapshot_sampling_client",
    *STEP,
    *STEP,
    "snapshot_sampling_client",
    *STEP,
    *STEP,
    "snapshot_sampling_client",
    *STEP,
    *STEP,
    "save_full_state",
    "snapshot_sampling_client",
]


@pytest.mark.parametrize("seed", range(5))
async def test_requests_reach_the_backend_in_the_order_of_the_recipe(
    tmp_path: Path, seed: int
) -> None:
    run = await opened(tmp_path)
    await whole(run, Unpunctual(run, seed))
    assert run.backend.submitted == RECIPE  # type: ignore[attr-defined]


async def test_one_step_waits_behind_the_one_that_runs(tmp_path: Path) -> None:
    run = await opened(tmp_path, step_seconds=0.02)
    backend: Any = run.backend
    ahead = []
    real = run.build_batch

    async def build_batch(step: int) -> Mapping[str, float]:
        submitted = backend.submitted.count("forward_backward_async")
        ahead.append(submitted - backend.finished.count("forward_backward_async"))
        return await real(step)

    run.build_batch = build_batch  # type: ignore[method-assign]
    await run.run_segment(run, 0, 6)
    assert max(ahead) == 2
    assert ahead[2:] == [2, 2, 2, 2]


class OnPolicy(MockSFT):
    """SFT that asks for weights to sample from before it builds a batch; `sampled` has the batches.

    Batches come in groups of `sub_steps`, each sampled `staleness` groups behind.
    """

    on_policy: ClassVar[bool] = True
    staleness: ClassVar[int] = 0
    sub_steps: ClassVar[int] = 1
    empty: ClassVar[frozenset[int]] = frozenset()
    sampled: ClassVar[dict[int, Any]] = {}
    hold_back: ClassVar[dict[int, asyncio.Event]] = {}

    async def setup(self, ctx: RunContext, backend: Backend) -> None:
        self.policy = ctx.policy
        await super().setup(ctx, backend)

    def sampled_after(self, step_idx: int) -> int:
        group = step_idx // self.sub_steps
        return max(0, group - self.staleness) * self.sub_steps

    async def build_batch(self, step_idx: int) -> TrainingBatch:
        self.sampled[step_idx] = await self.policy.sampler(step_idx)
        if step_idx in self.hold_back:
            await self.hold_back[step_idx].wait()
        batch = await super().build_batch(step_idx)
        if step_idx in self.empty:
            batch.data = []
        batch.transcripts = [Transcript(0, [], float(step_idx), None, "stop")]
        return batch


@pytest.fixture
def on_policy(monkeypatch: pytest.MonkeyPatch) -> type[OnPolicy]:
    """The algorithm in the place of `mock_sft`."""
    for name in ("staleness", "sub_steps", "empty", "sampled", "hold_back"):
        monkeypatch.setattr(OnPolicy, name, type(getattr(OnPolicy, name))(getattr(OnPolicy, name)))
    monkeypatch.setattr(AlgorithmSection, "build", lambda section: OnPolicy(section.params))
    return OnPolicy


async def weights_sampled(run: LiveRun) -> dict[int, int]:
    """For each batch of the run, the steps that the weights had which it was sampled from."""
    backend: Any = run.backend
    taken: dict[int, int] = {}

    real = run.backend.snapshot_sampling_client

    def snapshot(name: str | None = None) -> Awaitable[SamplingClient]:
        steps = backend.submitted.count("optim_step_async")

        async def client() -> SamplingClient:
            taken[id(made := await submitted)] = steps
            return made

        submitted = real(name)
        return client()

    run.backend.snapshot_sampling_client = snapshot  # type: ignore[method-assign]
    await run.run_segment(Unpunctual(run, 0), 0, 3)
    await run.run_segment(Unpunctual(run, 0), 3, 6)
    await run.settle()
    return {step: taken[id(client)] for step, client in sorted(OnPolicy.sampled.items())}


@pytest.mark.parametrize(
    ("staleness", "sub_steps", "weights"),
    [
        (0, 1, [0, 1, 2, 3, 4, 5]),
        (1, 1, [0, 0, 1, 2, 3, 4]),
        (2, 1, [0, 0, 0, 1, 2, 3]),
        (0, 2, [0, 0, 2, 2, 4, 4]),
        (1, 2, [0, 0, 0, 0, 2, 2]),
    ],
)
async def test_a_batch_is_sampled_from_exactly_the_weights_that_it_asks_for(
    tmp_path: Path, on_policy: type[OnPolicy], staleness: int, sub_steps: int, weights: list[int]
) -> None:
    on_policy.staleness, on_policy.sub_steps = staleness, sub_steps
    run = await opened(tmp_path)
    assert list((await weights_sampled(run)).values()) == weights
    assert run.store.rollout_steps() == [1, 2, 3, 4, 5, 6]
    assert run.store.rollouts(3)[0]["reward"] == 2.0


async def test_a_snapshot_to_sample_from_follows_its_step_before_that_has_a_result(
    tmp_path: Path, on_policy: type[OnPolicy]
) -> None:
    run = await opened(tmp_path)
    backend: Any = run.backend
    await run.run_segment(run, 0, 2)
    # The first one is the evaluation's.
    snapshot = "snapshot_sampling_client"
    assert backend.submitted[:6] == [snapshot, snapshot, *STEP, snapshot, STEP[0]]
    await run.cancel()


async def test_stale_rollouts_overlap_the_steps_before_them(
    tmp_path: Path, on_policy: type[OnPolicy]
) -> None:
    on_policy.staleness = 1
    on_policy.hold_back = {2: asyncio.Event()}
    run = await opened(tmp_path)
    training = asyncio.create_task(run.run_segment(run, 0, 6))
    async with asyncio.timeout(10):
        while len(run.store.metrics()) < 2 or 3 not in on_policy.sampled:
            await asyncio.sleep(0.01)
    assert sorted(on_policy.sampled) == [0, 1, 2, 3]
    on_policy.hold_back[2].set()
    await training
    await run.cancel()


async def test_a_checkpoint_waits_for_batches_that_are_sampled_from_weights_before_it(
    tmp_path: Path, on_policy: type[OnPolicy]
) -> None:
    on_policy.staleness = 1
    on_policy.hold_back = {3: asyncio.Event()}
    run = await opened(tmp_path)
    await run.run_segment(run, 0, 3)
    await asyncio.sleep(0.2)
    assert run.store.checkpoint_steps() == []
    on_policy.hold_back[3].set()
    await run.settle()
    assert run.store.checkpoint_steps() == [3]
    kept = await asyncio.to_thread(run.kept.read_batch, 3)
    assert kept is not None
    await run.cancel()


async def test_a_run_that_goes_on_finds_the_batches_it_cannot_sample_again(
    tmp_path: Path, on_policy: type[OnPolicy]
) -> None:
    on_policy.staleness = 1
    whole_run = await opened(tmp_path / "whole")
    await segments(whole_run, 3, 6)
    run = await opened(tmp_path / "killed")
    await run.run_segment(run, 0, 3)
    await run.settle()
    await run.cancel()
    on_policy.sampled.clear()
    again = await opened(tmp_path / "killed")
    assert again.plan.first_step == 3
    await again.run_segment(again, 3, 6)
    await again.settle()
    assert 3 not in on_policy.sampled
    assert 5 in on_policy.sampled
    rows = [{k: v for k, v in row.items() if "time/" not in k} for row in again.store.metrics()]
    assert rows == [
        {k: v for k, v in row.items() if "time/" not in k} for row in whole_run.store.metrics()
    ]


async def test_an_empty_batch_is_a_step_that_trains_nothing(
    tmp_path: Path, on_policy: type[OnPolicy]
) -> None:
    on_policy.empty = frozenset({1, 4})
    run = await opened(tmp_path)
    await segments(run, 3, 6)
    assert run.backend.submitted.count("optim_step_async") == 4  # type: ignore[attr-defined]
    assert [row["step"] for row in run.store.metrics()] == [1, 2, 3, 4, 5, 6]
    assert "train_mean_nll" not in run.store.metrics()[1]


async def test_a_run_of_empty_batches_has_failed(tmp_path: Path, on_policy: type[OnPolicy]) -> None:
    on_policy.empty = frozenset(range(6))
    run = await opened(tmp_path)
    with pytest.raises(UserError, match="none of the 6 batches held anything to train on"):
        await segments(run, 3, 6)
    await run.cancel()


class Enough(Callback):
    """Wants the run to end after three steps."""

    def early_end(self) -> EarlyEnd | None:
        return EarlyEnd(3, "enough")


async def test_a_run_that_ends_early_keeps_the_checkpoint_it_ends_with(
    tmp_path: Path, on_policy: type[OnPolicy]
) -> None:
    on_policy.staleness = 1
    on_policy.hold_back = {3: asyncio.Event()}
    run = await opened(tmp_path)
    run.callbacks.append(Enough())
    await run.run_segment(run, 0, 3)
    assert run.ended_early == "enough"
    on_policy.hold_back[3].set()
    async with asyncio.timeout(10):
        await run.settle()
    assert run.store.checkpoint_steps() == [3]
    await run.cancel()


async def test_a_stop_waits_for_rollouts_that_the_checkpoint_needs_and_ends_the_others(
    tmp_path: Path, on_policy: type[OnPolicy]
) -> None:
    on_policy.staleness = 1
    on_policy.hold_back = {2: asyncio.Event(), 3: asyncio.Event()}
    run = await opened(tmp_path)
    training = asyncio.create_task(run.run_segment(run, 0, 6))
    while len(run.store.metrics()) < 2:
        await asyncio.sleep(0.01)
    run.stop()
    await asyncio.sleep(0.1)
    assert not training.done()
    on_policy.hold_back[2].set()
    with pytest.raises(RunStopped):
        await training
    assert run.store.checkpoint_steps() == [2]


@pytest.mark.parametrize("operation", ["build_batch", "forward_backward", "optim_step", "save"])
async def test_the_first_error_ends_the_segment_and_nothing_later_is_submitted(
    tmp_path: Path, operation: str
) -> None:
    run = await opened(tmp_path)
    real = getattr(run, operation)
    failing_at = 6 if operation == "save" else 3

    async def fail(step: int) -> Any:
        if step == failing_at:
            raise ZeroDivisionError(f"{operation} {step}")
        return await real(step)

    setattr(run, operation, fail)
    async with asyncio.timeout(10):
        with pytest.raises(ZeroDivisionError, match=f"{operation} {failing_at}"):
            await whole(run, Unpunctual(run, 1))
    submitted = run.backend.submitted  # type: ignore[attr-defined]
    if operation != "save":
        assert submitted.count("optim_step_async") <= 4
    assert run.store.checkpoint_steps() == []


async def test_a_step_that_was_not_submitted_lets_none_after_it_through(tmp_path: Path) -> None:
    run = await opened(tmp_path)
    backend: Any = run.backend

    async def fail(step: int) -> Any:
        raise ZeroDivisionError

    run.forward_backward = fail  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        await run.run_segment(run, 0, 6)
    assert "optim_step_async" not in backend.submitted


async def segments(run: LiveRun, *ends: int) -> None:
    """The run from one checkpoint to the next, and until all is safe."""
    for start, stop in zip([0, *ends[:-1]], ends, strict=True):
        await run.run_segment(run, start, stop)
    await run.settle()


async def test_later_steps_train_while_a_checkpoint_is_on_its_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await opened(tmp_path)
    arrived = threading.Event()
    real = RunStore.save_checkpoint

    def slow(self: RunStore, **fields: Any) -> Any:
        assert fields["step"] > 2 or arrived.wait(10)
        return real(self, **fields)

    monkeypatch.setattr(RunStore, "save_checkpoint", slow)
    await run.run_segment(run, 0, 2)
    await run.run_segment(run, 2, 4)
    await asyncio.sleep(0.2)
    # The second checkpoint is in nobody's way, but a run that went on from it could not make up
    # for the first: manifests come in order.
    assert run.store.checkpoint_steps() == []
    assert len(run.store.metrics()) == 4
    arrived.set()
    await run.settle()
    assert run.store.checkpoint_steps() == [2, 4]


async def test_the_training_waits_when_too_much_is_on_its_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await opened(tmp_path)
    arrived = threading.Event()
    real = RunStore.save_checkpoint

    def slow(self: RunStore, **fields: Any) -> Any:
        assert arrived.wait(10)
        return real(self, **fields)

    monkeypatch.setattr(RunStore, "save_checkpoint", slow)
    training = asyncio.create_task(segments(run, 1, 2, 3, 4, 5, 6))
    await asyncio.sleep(0.3)
    assert len(run.store.metrics()) == 3
    arrived.set()
    await training
    assert run.store.checkpoint_steps() == [1, 2, 3, 4, 5, 6]


async def test_an_upload_that_fails_ends_the_steps_that_train_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await opened(tmp_path, step_seconds=0.05)

    def full(self: RunStore, **fields: Any) -> Any:
        raise StoreError("the disk is full")

    monkeypatch.setattr(RunStore, "save_checkpoint", full)
    await run.run_segment(run, 0, 2)
    with pytest.raises(StoreError, match="the disk is full"):
        await run.run_segment(run, 2, 6)
    assert len(run.store.metrics()) < 6


async def test_an_error_waits_for_an_upload_that_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of a checkpoint helps nobody, and its files must not go away below the upload."""
    run = await opened(tmp_path)
    begun = asyncio.Event()
    real = RunStore.save_checkpoint
    loop = asyncio.get_running_loop()

    def slow(self: RunStore, **fields: Any) -> Any:
        loop.call_soon_threadsafe(begun.set)
        time.sleep(0.2)
        return real(self, **fields)

    monkeypatch.setattr(RunStore, "save_checkpoint", slow)
    await run.run_segment(run, 0, 2)
    await begun.wait()
    await run.beside.cancel()
    assert run.store.checkpoint_steps() == [2]


async def test_old_checkpoints_expire(tmp_path: Path) -> None:
    run = await opened(tmp_path)
    run.retention = Retention(keep_last=2)
    await segments(run, 1, 2, 3, 4, 5, 6)
    assert run.store.checkpoint_steps() == [5, 6]


async def test_a_checkpoint_published_while_a_run_is_opened_is_gone_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last writer may go on until its lease is gone; what it did by then counts."""
    first = await opened(tmp_path)
    await whole(first, Unpunctual(first, 0))
    await first.backend.aclose()
    latest, seen = RunStore.latest_checkpoint, 0

    def late(store: RunStore) -> CheckpointManifest | None:
        nonlocal seen
        seen += 1
        return None if seen == 1 else latest(store)

    monkeypatch.setattr(RunStore, "latest_checkpoint", late)
    again = await opened(tmp_path)
    assert (again.plan.first_step, len(again.store.metrics())) == (6, 6)
    await again.backend.aclose()
