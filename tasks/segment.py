"""The steps between two checkpoints: as one task run, or as one task run for each operation."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from prefect import task

from tasks.build_batch import build_batch
from tasks.evaluate import evaluate
from tasks.policies import policy
from tasks.save import save
from tasks.session import live
from tasks.train_step import forward_backward, optim_step


@dataclass(frozen=True)
class TaskOperations:
    """The operations of a run, each a Prefect task run (see `algorithms.run.Operations`)."""

    run_id: str

    def build_batch(self, step: int) -> Coroutine[Any, Any, Mapping[str, float]]:
        """Build and hold the batch of a step."""
        return build_batch(self.run_id, step)

    def forward_backward(self, step: int) -> Coroutine[Any, Any, Mapping[str, float]]:
        """Train on the batch of a step."""
        return forward_backward(self.run_id, step)

    def optim_step(self, step: int) -> Coroutine[Any, Any, Mapping[str, float]]:
        """Apply the gradients of a step."""
        return optim_step(self.run_id, step)

    def save(self, steps_done: int) -> Coroutine[Any, Any, str]:
        """Write the checkpoint after so many steps."""
        return save(self.run_id, steps_done)

    def evaluate(self, name: str, steps_done: int) -> Coroutine[Any, Any, float]:
        """Score the weights after so many steps."""
        return evaluate(self.run_id, name, steps_done)


@task(name="train_segment", task_run_name="train_segment-{start}-{stop}", **policy("train_segment"))
async def train_segment(run_id: str, start: int, stop: int) -> None:
    """Steps `start` to `stop` in one task run; the checkpoint after them is written beside."""
    run = live(run_id)
    await run.run_segment(run, start, stop)


async def train_operations(run_id: str, start: int, stop: int) -> None:
    """The same, with a task run for each operation."""
    await live(run_id).run_segment(TaskOperations(run_id), start, stop)


async def settle(run_id: str) -> None:
    """Wait until every checkpoint and evaluation is safe in the store."""
    await live(run_id).settle()
