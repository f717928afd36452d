"""Results that are never computed twice: what decides their names, and that nothing is lost."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from tinker import types as tinker_types

from algorithms import kept
from algorithms.base import TrainingBatch
from algorithms.evaluators import EvaluationResult, Sample, prepare
from algorithms.experiment import EvaluationSpec
from algorithms.kept import Kept, Lineage, decode_batch, encode_batch
from algorithms.opening import open_live_run
from backends.mock import MockTokenizer
from backends.storage.lease import LeaseLost
from backends.storage.run_store import RunStore
from tests.algorithms.samples import ROWS, experiment
from tests.algorithms.sampling_algorithm import Sampling


def store(tmp_path: Path, run_id: str = "a") -> RunStore:
    opened = RunStore(tmp_path, run_id)
    opened.begin(name="kept", backend="mock", seed=0)
    opened.take_lease()
    return opened


def datum(chunks: list[list[int]], **inputs: Any) -> tinker.Datum:
    parts = [tinker_types.EncodedTextChunk(tokens=tokens) for tokens in chunks]
    return tinker.Datum(
        model_input=tinker_types.ModelInput(chunks=list(parts)), loss_fn_inputs=inputs
    )


def sparse() -> tinker.TensorData:
    return tinker.TensorData(
        data=[0.5, 1 / 3],
        dtype="float32",
        shape=[2, 4],
        sparse_crow_indices=[0, 1, 2],
        sparse_col_indices=[3, 0],
    )


BATCH = TrainingBatch(
    [
        datum([[1, 2], [3]], target_tokens=np.arange(3), weights=np.float32([0, 1 / 3, 1])),
        datum([[7, 8]], target_tokens=np.arange(4).reshape(2, 2), weights=sparse()),
    ],
    "ppo",
    {"clip_low_threshold": 0.7},
    {"reward/mean": 1 / 3, "n": 2.0},
)


def test_a_batch_comes_back_to_the_last_bit() -> None:
    again = decode_batch(encode_batch(BATCH))
    assert (again.loss_fn, again.loss_fn_config) == (BATCH.loss_fn, BATCH.loss_fn_config)
    assert again.metrics == BATCH.metrics
    for old, new in zip(BATCH.data, again.data, strict=True):
        assert new.model_input == old.model_input
        assert list(new.loss_fn_inputs) == list(old.loss_fn_inputs)
        for name, tensor in old.loss_fn_inputs.items():
            other = new.loss_fn_inputs[name]
            assert other.dtype == tensor.dtype
            assert other.shape == tensor.shape
            assert other.data == tensor.data
            assert other.sparse_crow_indices == tensor.sparse_crow_indices
            assert other.sparse_col_indices == tensor.sparse_col_indices


def test_a_metric_that_is_no_number_comes_back_from_strict_json() -> None:
    kept_batch = encode_batch(TrainingBatch([], "ppo", metrics={"a": float("nan"), "b": 1.0}))
    assert b"NaN" not in kept_batch
    assert str(decode_batch(kept_batch).metrics) == "{'a': nan, 'b': 1.0}"


def test_a_batch_is_found_again_under_its_lineage_and_step_only(tmp_path: Path) -> None:
    results = Kept(store(tmp_path), Lineage.begin("this code"))
    assert results.read_batch(3) is None
    results.keep_batch(3, BATCH)
    found = Kept(RunStore(tmp_path, "a"), Lineage.begin("this code")).read_batch(3)
    assert found is not None
    assert encode_batch(found) == encode_batch(BATCH)
    assert results.read_batch(4) is None
    assert Kept(RunStore(tmp_path, "a"), Lineage.begin("other code")).read_batch(3) is None


def test_a_batch_under_a_callable_is_not_kept(tmp_path: Path) -> None:
    results = Kept(store(tmp_path), Lineage.begin("this code"))
    results.keep_batch(0, TrainingBatch(BATCH.data, lambda output, data: output.logprobs.sum()))
    assert results.read_batch(0) is None


def test_batches_behind_all_but_two_checkpoints_expire(tmp_path: Path) -> None:
    run, lineage = store(tmp_path), Lineage.begin("this code")
    results = Kept(run, lineage)

    def steps_kept() -> list[int]:
        return [step for step in range(9) if run.kept(results.batch_name(step)) is not None]

    def save(step: int) -> None:
        (tmp_path / "files").mkdir(exist_ok=True)
        run.rewind(step)
        run.save_checkpoint(
            step=step, state_uri=None, algorithm_state={}, folder=tmp_path / "files"
        )

    run.keep("evaluate-0.json", b"{}")
    for step in range(6):
        results.keep_batch(step, BATCH)
    save(2)
    results.expire()
    assert steps_kept() == [0, 1, 2, 3, 4, 5]
    save(4)
    results.expire()
    assert steps_kept() == [2, 3, 4, 5]
    assert not results.has_batch(1)
    save(6)
    again = Kept(run, lineage)  # as after a kill between the manifest and its expiry
    again.look()
    again.keep_batch(6, BATCH)
    again.expire()
    assert steps_kept() == [4, 5, 6]
    assert run.kept("evaluate-0.json") is not None
    RunStore(tmp_path, "a").take_lease()
    with pytest.raises(LeaseLost):
        run.forget([results.batch_name(4)])
    assert steps_kept() == [4, 5, 6]


def test_a_lineage_stays_while_the_code_does_and_never_comes_back() -> None:
    first = Lineage.begin("A")
    assert first.go_on("A", 4) == first
    second = first.go_on("B", 4)
    third = second.go_on("A", 6)
    assert len({lineage.name for lineage in (first, second, third)}) == 3
    assert first.go_on("B", 8) != second


async def test_changed_settings_rows_or_code_are_another_lineage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lineage(run_id: str, **changes: Any) -> Lineage:
        run = await open_live_run(
            experiment(store=str(tmp_path), **changes), store(tmp_path, run_id)
        )
        await run.backend.aclose()
        return run.kept.lineage

    first = await lineage("a")
    assert await lineage("b") == first
    assert await lineage("c", tags=["other"], checkpoints={"keep_last": 1}) == first
    others = [
        await lineage("d", seed=1),
        await lineage("e", data={"kind": "rows", "rows": ROWS[:-1]}),
        await lineage("f", algorithm={"kind": "mock_sft", "params": {"batch_size": 2}}),
    ]
    monkeypatch.setattr(kept, "_source_version", lambda module: f"{module}, edited")
    others.append(await lineage("g"))
    assert len({other.name for other in [first, *others]}) == 5


def test_the_version_of_code_is_that_of_its_whole_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "some_plugin"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "recipe.py").write_text("class Recipe: ...\n")
    (package / "helpers.py").write_text("BEST = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    recipe = importlib.import_module("some_plugin.recipe").Recipe
    before = kept.code_version(recipe())
    assert kept.code_version(recipe) == before
    (package / "helpers.py").write_text("BEST = 2\n")
    kept._source_version.cache_clear()
    assert kept.code_version(recipe) != before
    sys.modules.pop("some_plugin.recipe")
    assert kept.code_version(Sampling) != before


def test_an_evaluation_is_found_again_under_its_settings_and_rows(tmp_path: Path) -> None:
    def prepared(**changes: Any) -> Any:
        data = {"kind": "rows", "rows": changes.pop("rows", ROWS)}
        spec = EvaluationSpec.model_validate({"name": "val", "data": data} | changes)
        return prepare(spec, MockTokenizer())

    results = Kept(store(tmp_path), Lineage.begin("this code"))
    sample = Sample("2 + 2?", "4 \ud800", "4", 1 / 3)
    result = EvaluationResult("val", 6, 1 / 3, {"n": 1.0}, [sample])
    results.keep_evaluation(prepared(), result)
    assert results.read_evaluation(prepared(), 6) == result
    assert results.read_evaluation(prepared(every=3, before=False), 6) == result
    assert results.read_evaluation(prepared(), 7) is None
    assert results.read_evaluation(prepared(temperature=0.5), 6) is None
    assert results.read_evaluation(prepared(max_tokens=9), 6) is None
    assert results.read_evaluation(prepared(rows=ROWS[:-1]), 6) is None
    assert results.read_evaluation(prepared(limit=2), 6) is None
