"""The task that writes a checkpoint."""

from __future__ import annotations

from prefect import get_run_logger, task

from tasks.policies import policy
from tasks.session import live


@task(name="save", task_run_name="save-{steps_done}", **policy("save"))
async def save(run_id: str, steps_done: int) -> str:
    """Save weights and optimizer behind a step, publish the manifest; returns its address."""
    address = await live(run_id).save(steps_done)
    get_run_logger().info("checkpoint after %d steps: %s", steps_done, address)
    return address
