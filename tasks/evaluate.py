"""The task that scores the weights in training on held-out rows."""

from __future__ import annotations

from prefect import get_run_logger, task

from tasks.policies import policy
from tasks.session import live


@task(name="evaluate", task_run_name="evaluate-{name}-{steps_done}", **policy("evaluate"))
async def evaluate(run_id: str, name: str, steps_done: int) -> float:
    """Sample from a snapshot of the weights after so many steps; returns the mean reward."""
    score = await live(run_id).evaluate(name, steps_done)
    get_run_logger().info("%s after %d steps: %.3f", name, steps_done, score)
    return score
