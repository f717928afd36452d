"""The task that builds a batch."""

from __future__ import annotations

from collections.abc import Mapping

from prefect import task

from tasks.policies import policy
from tasks.session import live


@task(name="build_batch", task_run_name="build_batch-{step}", **policy("build_batch"))
async def build_batch(run_id: str, step: int) -> Mapping[str, float]:
    """Build the batch of a step (from 0) ahead of its turn."""
    return await live(run_id).build_batch(step)
