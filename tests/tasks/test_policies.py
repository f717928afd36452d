"""The rules of retries and caches: every task follows its own, and the docs show them."""

from __future__ import annotations

from pathlib import Path

import pytest
from prefect import Task
from prefect.cache_policies import NO_CACHE

from tasks import build_batch, evaluate, open_run, recovery, report, save, segment, train_step
from tasks.policies import RETRY_SECONDS, RULES, Rule, table

MODULES = (build_batch, evaluate, open_run, recovery, report, save, segment, train_step)
TASKS = {
    item.name: item
    for module in MODULES
    for item in vars(module).values()
    if isinstance(item, Task)
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.task)
def test_a_task_follows_its_rule(rule: Rule) -> None:
    task = TASKS[rule.task]
    assert task.retries == (len(RETRY_SECONDS) if rule.repeats else 0)
    assert task.cache_policy == NO_CACHE
    assert not task.persist_result


def test_every_task_has_a_rule_and_what_changes_the_model_neither_repeats_nor_is_kept() -> None:
    assert set(TASKS) == {rule.task for rule in RULES}
    changing = {"forward_backward", "optim_step", "train_segment"}
    for rule in RULES:
        if rule.task in changing:
            assert not rule.repeats
            assert not rule.kept_under


def test_the_docs_show_the_rules() -> None:
    docs = Path(__file__).parents[2] / "docs/orchestration.md"
    assert table() in docs.read_text(encoding="utf-8")
