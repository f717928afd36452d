"""Retry and cache policy of every task, in one place.

| task             | retries | why |
|------------------|---------|---------------------------------------------------------------|
| open_run         | never   | a mistake does not go away; a backend is started at most once |
| build_batch      | 2       | a function of the data, the seed and the step                 |
| forward_backward | never   | a second call would add the gradients again                   |
| optim_step       | never   | a second call would step again                                |
| train_segment    | never   | it is made of the two above                                   |
| save             | 2       | waits for the same request and writes the same objects        |
| evaluate         | 2       | waits for the same snapshot; sampling changes nothing         |
| report           | 2       | rewrites the same objects                                     |

Nothing is cached by Prefect: a task that changes the model must never be skipped, and what the
others make is either cheap or kept in the run's store.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

from prefect.cache_policies import NO_CACHE, CachePolicy

from backends.errors import StateLostError, UserError

if TYPE_CHECKING:
    from prefect import Task
    from prefect.client.schemas.objects import State, TaskRun


class TaskPolicy(TypedDict, total=False):
    """Keyword arguments of `prefect.task`."""

    retries: int
    retry_delay_seconds: list[float]
    retry_condition_fn: Any
    cache_policy: CachePolicy
    persist_result: bool


def _worth_a_retry(task: Task[Any, Any], run: TaskRun, state: State[Any]) -> bool:
    # The engine asks with a state that holds the exception itself, not yet a stored result.
    return not isinstance(state.data, UserError | StateLostError)


NEVER = TaskPolicy(retries=0, cache_policy=NO_CACHE, persist_result=False)
REPEATABLE = TaskPolicy(
    retries=2,
    retry_delay_seconds=[1.0, 5.0],
    retry_condition_fn=_worth_a_retry,
    cache_policy=NO_CACHE,
    persist_result=False,
)
