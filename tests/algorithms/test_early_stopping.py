"""Early stopping: when patience runs out, what the run then leaves, and that a resume agrees."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from algorithms.callbacks import EarlyEnd, RunPlan
from algorithms.evaluators import EvaluationResult
from algorithms.experiment import parse_experiment
from algorithms.watchers.early_stopping import EarlyStopping, EarlyStoppingConfig
from backends.errors import UserError
from tests.algorithms import sampling_algorithm  # noqa: F401  (registers its kind)
from tests.algorithms.samples import document
from tests.algorithms.watched import HELD, checkpoints, experiment, finished, table


def stopping(**params: Any) -> dict[str, Any]:
    return {"kind": "early_stopping", "params": params}


def begun(evaluations: list[Any] | None = None, **params: Any) -> EarlyStopping:
    callback = EarlyStopping(EarlyStoppingConfig(**params))
    spec: Any = SimpleNamespace(evaluations=evaluations or [])
    callback.on_start(RunPlan("a", "/a", 0, 100, (100,), experiment=spec))
    return callback


def end_after(callback: EarlyStopping, values: list[float]) -> EarlyEnd | None:
    for step, value in enumerate(values, 1):
        callback.on_step({"step": step, callback.cfg.metric: value})
    return callback.early_end()


# --- the rule -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "step"),
    [
        ([3, 2, 1], None),
        ([3, 2, 2, 2], 5),  # twice no better than the 2 of step 2; ends one step behind
        ([1, 2, 0.5, 2, 2], 6),  # the second best counts for nothing
        ([1, 2, 0.5, 2, 0.4, 3], None),
        ([math.nan, 1, math.nan, math.inf], 5),
        ([math.nan, math.nan], 3),
    ],
)
def test_patience_runs_out(values: list[float], step: int | None) -> None:
    end = end_after(begun(metric="loss", patience=2), values)
    assert (end and end.step) == step


def test_more_is_better_where_the_mode_says_so_and_little_gains_do_not_count() -> None:
    up = begun(metric="optim/grad_norm", mode="max", patience=2, min_delta=0.5)
    end = end_after(up, [1, 1.5, 1.6, 1.7])
    assert end is None  # 1.5 is no gain of more than 0.5 over the first; 1.6 is one
    end = end_after(begun(metric="x", mode="max", patience=2, min_delta=0.5), [1, 1.5, 1.4])
    assert end == EarlyEnd(4, "x was no better than 1, of step 1, for 2 steps")


def test_an_evaluation_ends_the_run_at_its_own_step_and_counts_once() -> None:
    spec = SimpleNamespace(name="val", role="validation", score_metric="reward/mean")
    callback = begun([spec], metric="val", patience=2)
    assert callback.evaluations_awaited() == {"val"}
    for step, score in [(0, 0.5), (10, 0.7), (10, 0.7), (20, 0.7), (20, 0.7), (30, 0.6)]:
        callback.on_evaluation(EvaluationResult("other", step, 0.0, {}, []))
        callback.on_evaluation(EvaluationResult("val", step, score, {}, []))
    reason = "val was no better than 0.7, of step 10, for 2 evaluations"
    assert callback.early_end() == EarlyEnd(30, reason)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"metric": "hold"}, "'hold' is no evaluation of this experiment (they are: val, end)"),
        ({"metric": "optim/lr"}, "set early_stopping.mode to max or min"),
        ({"metric": "test"}, "everything is chosen on validation"),
        ({"metric": "end"}, "evaluated at the end only: set its every"),
    ],
)
def test_what_can_never_work_is_refused(params: dict[str, Any], words: str) -> None:
    one: dict[str, Any] = {"name": "val", "data": {"kind": "rows", "rows": HELD}, "every": 1}
    evaluations = [
        one,
        one | {"name": "test", "role": "test"},
        one | {"name": "end", "every": None},
    ]
    with pytest.raises(UserError) as caught:
        parse_experiment(document(evaluations=evaluations, callbacks=[stopping(**params)]))
    (problem,) = caught.value.problems
    assert problem.where == "callbacks"
    assert words in problem.what


# --- the run ------------------------------------------------------------------------------------


async def test_a_run_that_gets_no_better_ends_with_checkpoint_and_evaluations(
    tmp_path: Path,
) -> None:
    # The mock scores 0 before the first step and 1 after it: no better at 3, 6, 9.
    watched = experiment(tmp_path, callbacks=[stopping(metric="val", patience=2)])
    run = await finished(watched)
    assert run.plan.total_steps == 12
    assert [row["step"] for row in table(tmp_path, "a")] == list(range(1, 10))
    assert [row["step"] for row in table(tmp_path, "a", "evaluations")] == [0, 3, 6, 9]
    assert checkpoints(tmp_path, "a") == ["step-000004", "step-000008", "step-000009"]
    result = json.loads((tmp_path / "a/result.json").read_text())
    assert result["status"] == "completed"
    assert result["ended_early"] == "val was no better than 1, of step 3, for 2 evaluations"
    assert result["artifacts"]["checkpoint"].endswith("step-000009")


async def test_what_is_due_at_the_end_is_done_at_an_early_end(tmp_path: Path) -> None:
    rows = {"kind": "rows", "rows": HELD}
    evaluations = [{"name": "val", "data": rows, "every": 2}, {"name": "last", "data": rows}]
    callbacks = [stopping(metric="optim/lr", mode="max", patience=4)]
    await finished(experiment(tmp_path, evaluations=evaluations, callbacks=callbacks))
    # The learning rate is the same at each step: step 5 is the fourth after the first.
    assert [row["step"] for row in table(tmp_path, "a")] == [1, 2, 3, 4, 5, 6]
    scored = [(row["step"], row["name"]) for row in table(tmp_path, "a", "evaluations")]
    assert scored == [(0, "last"), (0, "val"), (2, "val"), (4, "val"), (6, "last"), (6, "val")]
    assert checkpoints(tmp_path, "a") == ["step-000004", "step-000006"]


@pytest.mark.parametrize("broken_at", [4, 8])
@pytest.mark.parametrize(
    "params",
    [
        {"metric": "val", "patience": 2},
        {"metric": "optim/lr", "mode": "max", "patience": 7},  # known at 8, ends at 9
        {"metric": "optim/lr", "mode": "max", "patience": 6},  # known at 7, ends at 8
    ],
)
async def test_a_resumed_run_ends_where_an_uninterrupted_one_does(
    tmp_path: Path, broken_at: int, params: dict[str, Any]
) -> None:
    spec = experiment(tmp_path, callbacks=[stopping(**params)])
    whole = await finished(spec, "whole")
    await finished(spec, "parts", until=broken_at)
    parts = await finished(spec, "parts")
    assert parts.ended_early == whole.ended_early
    assert parts.ended_early is not None
    for name in ("metrics", "evaluations"):
        assert table(tmp_path, "parts", name) == table(tmp_path, "whole", name)
    assert checkpoints(tmp_path, "parts") == checkpoints(tmp_path, "whole")
    last = checkpoints(tmp_path, "whole")[-1]
    adapters = [
        (tmp_path / run_id / "checkpoints" / last / "adapter_model.safetensors").read_bytes()
        for run_id in ("whole", "parts")
    ]
    assert adapters[0] == adapters[1]


async def test_batches_that_are_sampled_ahead_are_given_up(tmp_path: Path) -> None:
    params = {"batch_size": 2, "max_steps": 12, "save_every": 4, "staleness": 2}
    spec = experiment(
        tmp_path,
        algorithm={"kind": "sampling", "params": params},
        backend={"kind": "mock", "params": {"step_seconds": 0.005}},
        callbacks=[stopping(metric="val", patience=2)],
    )
    whole = await finished(spec, "whole")
    await finished(spec, "parts", until=4)
    await finished(spec, "parts")
    assert whole.ended_early is not None
    assert len(table(tmp_path, "whole")) == 9
    assert table(tmp_path, "parts") == table(tmp_path, "whole")
    assert checkpoints(tmp_path, "whole")[-1] == "step-000009"


async def test_a_run_that_gets_better_to_the_end_is_not_cut(tmp_path: Path) -> None:
    callbacks = [stopping(metric="progress/done_frac", mode="max", patience=1)]
    run = await finished(experiment(tmp_path, callbacks=callbacks))
    assert run.ended_early is None
    assert len(table(tmp_path, "a")) == 12
    assert json.loads((tmp_path / "a/result.json").read_text())["ended_early"] is None
