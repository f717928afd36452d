"""Retry and cache policy of every task, in one place; docs/orchestration.md shows the table.

Prefect itself caches nothing: a task that changes the model must never be skipped, and what may be
taken from an earlier attempt is kept in the run's store, under what decides it, so that it is found
again without Prefect's database too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

from prefect.cache_policies import NO_CACHE, CachePolicy

from backends.errors import StateLostError, UserError
from backends.storage.lease import LeaseLost

if TYPE_CHECKING:
    from prefect import Task
    from prefect.client.schemas.objects import State, TaskRun

RETRY_SECONDS = (1.0, 5.0)
"""Before the first and the second retry of a task that is repeated."""


class TaskPolicy(TypedDict, total=False):
    """Keyword arguments of `prefect.task`."""

    retries: int
    retry_delay_seconds: list[float]
    retry_condition_fn: Any
    cache_policy: CachePolicy
    persist_result: bool


@dataclass(frozen=True)
class Rule:
    """What is done with one task's failures and results, and why."""

    task: str
    repeats: bool
    kept_under: str
    why: str


RULES = (
    Rule(
        "open_run",
        False,
        "",
        "a mistake does not go away; the loss of an engine is a recovery, and counted as one",
    ),
    Rule(
        "build_batch",
        True,
        "on-policy only: lineage of the weights, step, code, settings and data",
        "a function of data, seed and step, or of the weights, which it does not change",
    ),
    Rule("forward_backward", False, "", "a second call would add the gradients again"),
    Rule(
        "optim_step",
        False,
        "",
        "a second call would step again, and whether the first one did is not known",
    ),
    Rule(
        "train_segment",
        False,
        "",
        "made of the two above; its steps are replayed from the last checkpoint",
    ),
    Rule(
        "save",
        True,
        "",
        "waits for the same request again and writes the same objects under the same names",
    ),
    Rule(
        "evaluate",
        True,
        "lineage of the weights, steps done, settings, rows and the verifier's code",
        "sampling changes nothing; a retry asks the same snapshot",
    ),
    Rule(
        "recover", False, "", "bounded by orchestration.max_recoveries, which counts each attempt"
    ),
    Rule("report", True, "", "writes the same objects again"),
)


def _worth_a_retry(task: Task[Any, Any], run: TaskRun, state: State[Any]) -> bool:
    # The engine asks with a state that holds the exception itself, not yet a stored result.
    return not isinstance(state.data, UserError | StateLostError | LeaseLost)


def policy(name: str) -> TaskPolicy:
    """How Prefect is to run the task of that name. Raises KeyError for one without a rule."""
    rule = {rule.task: rule for rule in RULES}[name]
    if not rule.repeats:
        return TaskPolicy(retries=0, cache_policy=NO_CACHE, persist_result=False)
    return TaskPolicy(
        retries=len(RETRY_SECONDS),
        retry_delay_seconds=list(RETRY_SECONDS),
        retry_condition_fn=_worth_a_retry,
        cache_policy=NO_CACHE,
        persist_result=False,
    )


def table() -> str:
    """The rules as the docs have them."""
    lines = ["| task | retries | kept in the run's store under | why |", "|---|---|---|---|"]
    for rule in RULES:
        retries = f"{len(RETRY_SECONDS)}" if rule.repeats else "never"
        lines.append(f"| `{rule.task}` | {retries} | {rule.kept_under or 'no'} | {rule.why} |")
    return "\n".join(lines) + "\n"
