"""The two tasks that change the model. Neither may ever run twice for one step."""

from __future__ import annotations

from collections.abc import Mapping

from prefect import task

from tasks.policies import policy
from tasks.session import live


@task(
    name="forward_backward", task_run_name="forward_backward-{step}", **policy("forward_backward")
)
async def forward_backward(run_id: str, step: int) -> Mapping[str, float]:
    """Add the gradients of a step's batch; returns the step's loss metrics."""
    return await live(run_id).forward_backward(step)


@task(name="optim_step", task_run_name="optim_step-{step}", **policy("optim_step"))
async def optim_step(run_id: str, step: int) -> Mapping[str, float]:
    """Apply them; submitted behind forward_backward before that has its result."""
    return await live(run_id).optim_step(step)
