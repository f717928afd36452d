"""Rows that stay on disk: the same batches, the same run, whatever is cut, dropped or skipped."""

from __future__ import annotations

import json
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from algorithms.base import TrainingBatch
from algorithms.data.dataset import Dataset, load_dataset
from algorithms.data.rendering import render_rows, to_datum
from algorithms.data.spool import Lazy
from algorithms.distilling import Distilling
from algorithms.experiment import Experiment
from algorithms.opening import check_continues, open_live_run
from algorithms.run import LiveRun
from algorithms.stages import StagedExperiment
from backends.base import SavedState
from backends.errors import UserError
from backends.storage.run_store import RunStore
from tests.algorithms.samples import byte_tokenizer, chat, experiment, open_backend, set_up, train

LONG_ANSWER = chat("q", "y" * 100)
LONG_QUESTION = chat("x" * 100, "a")
TEXTS = [{"prompt": f"{n} + {n} =", "completion": f" {2 * n}"} for n in range(5)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Rows of both shapes, among them one to cut, one to drop, and two that are bad."""
    rows = [chat(f"say {n}", f"number {n}") for n in range(7)]
    rows += [LONG_ANSWER, LONG_QUESTION, chat("no answer"), *TEXTS]
    lines = [json.dumps(row) for row in rows]
    lines.insert(3, "{")
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def spec_of(path: Path, streaming: bool, max_bad_rows: int = 2, **params: Any) -> Experiment:
    data = {"kind": "jsonl", "path": str(path), "max_bad_rows": max_bad_rows}
    return experiment(
        data=data | {"streaming": streaming},
        algorithm={"kind": "mock_sft", "params": {"batch_size": 3, "max_seq_len": 60} | params},
    )


def bits(batch: TrainingBatch) -> list[Any]:
    return [
        (datum.model_input.to_ints(), {k: v.tolist() for k, v in datum.loss_fn_inputs.items()})
        for datum in batch.data
    ]


async def test_batches_are_the_same_bits(path: Path) -> None:
    kept, streamed = [
        await set_up(spec, await open_backend(spec))
        for spec in (spec_of(path, False), spec_of(path, True))
    ]
    assert streamed.setup_metrics() == kept.setup_metrics()
    assert kept.setup_metrics()["data/rows_cut"] == 1
    assert kept.setup_metrics()["data/rows_dropped"] == 1
    assert kept.setup_metrics()["data/rows_skipped"] == 2
    for step in range(2 * kept.steps_per_epoch):
        assert bits(await streamed.build_batch(step)) == bits(await kept.build_batch(step))


async def test_a_run_resumes_exactly(path: Path, tmp_path: Path) -> None:
    in_memory, spec = (spec_of(path, on, max_steps=8) for on in (False, True))
    whole = await train(in_memory, await open_backend(in_memory))
    first = await open_backend(spec)
    begun = await train(spec, first, last=3)
    await first.export_state(await first.save_full_state("x"), tmp_path)
    second = await open_backend(spec, SavedState(None, tmp_path))
    assert begun + await train(spec, second, first=3) == whole


SAMPLED = {
    "rl": {"num_samples": 4, "max_tokens": 8},
    "sdft": {"num_samples": 2, "topk": 258, "max_context_length": 300},
    "distill": {"num_samples": 2, "teacher": {"model": "a larger one"}},
}


@pytest.fixture
def asked(tmp_path: Path) -> Path:
    """Rows that the mock answers rightly now and then, one too long for sdft, and two bad ones."""
    words = ["alpha", "bravo", "charlie", "delta", "echo"]
    rows = [chat(word, word) for word in words]
    rows += [{"prompt": [{"role": "golf"}]}, {"prompt": "foxtrot", "completion": "foxtrot"}]
    rows += [chat("x" * 200, "x" * 200)]
    path = tmp_path / "asked.jsonl"
    path.write_text("\n".join(["{", *map(json.dumps, rows)]) + "\n")
    return path


def sampled_spec(path: Path, streaming: bool, kind: str) -> Experiment:
    data = {"kind": "jsonl", "path": str(path), "max_bad_rows": 2, "streaming": streaming}
    shared = {"batch_size": 2, "max_steps": 5, "save_every": 2, "learning_rate": 0.05}
    return experiment(
        data=data,
        algorithm={"kind": kind, "params": shared | SAMPLED.get(kind, {})},
        backend={"kind": "mock"},
    )


async def opened(store: Path, rows: Path, kind: str, streaming: bool) -> LiveRun:
    return await open_live_run(sampled_spec(rows, streaming, kind), RunStore(str(store), "run"))


async def trained(run: LiveRun, *marks: int) -> list[dict[str, float]]:
    """The run's rows, without times, once it has come from each of the marks to the next."""
    for start, stop in pairwise(marks):
        await run.run_segment(run, start, stop)
        await run.settle()
    await run.cancel()
    await run.backend.aclose()
    return [
        {name: value for name, value in row.items() if not name.startswith("time/")}
        for row in run.store.metrics()
    ]


@pytest.mark.parametrize("kind", SAMPLED)
async def test_sampled_batches_are_the_same_bits(kind: str, asked: Path) -> None:
    kept, streamed = [
        await set_up(spec, await open_backend(spec))
        for spec in (sampled_spec(asked, False, kind), sampled_spec(asked, True, kind))
    ]
    assert streamed.setup_metrics() == kept.setup_metrics()
    assert kept.setup_metrics()["data/rows_skipped"] == 2
    examples = 0
    for step in range(kept.steps_per_epoch):
        batch = await kept.build_batch(step)
        assert bits(await streamed.build_batch(step)) == bits(batch)
        examples += len(batch.data)
    assert examples
    if isinstance(streamed, Distilling):
        assert isinstance(streamed._questions, Lazy)


@pytest.mark.parametrize("kind", SAMPLED)
async def test_a_sampled_run_resumes_exactly(kind: str, asked: Path, tmp_path: Path) -> None:
    whole = await trained(await opened(tmp_path / "whole", asked, kind, False), 0, 2, 4, 5)
    await trained(await opened(tmp_path / "cut", asked, kind, True), 0, 2)
    again = await opened(tmp_path / "cut", asked, kind, True)
    assert again.plan.first_step == 2
    assert await trained(again, 2, 4, 5) == whole


@pytest.mark.parametrize("kind", ["mock_sft", "rl"])
async def test_a_run_that_was_cut_off_in_memory_goes_on_from_disk(
    kind: str, asked: Path, tmp_path: Path
) -> None:
    whole = await opened(tmp_path / "whole", asked, kind, False)
    lineage, rows = whole.kept.lineage, await trained(whole, 0, 2, 4, 5)
    await trained(await opened(tmp_path / "cut", asked, kind, False), 0, 2)
    again = await opened(tmp_path / "cut", asked, kind, True)
    assert again.context.dataset.on_disk
    assert again.plan.first_step == 2
    assert again.kept.lineage == lineage
    assert await trained(again, 2, 4, 5) == rows


def test_a_stage_may_be_continued_from_disk(path: Path, tmp_path: Path) -> None:
    def staged(streaming: bool, seed: int) -> StagedExperiment:
        spec = spec_of(path, streaming).model_dump(mode="json")
        first = {name: spec[name] for name in ("name", "data", "algorithm")}
        second = first | {"name": "second"}
        second["algorithm"] = {"kind": "mock_sft", "params": {"batch_size": seed}}
        document = {"name": "s", "model": spec["model"], "stages": [first, second]}
        return StagedExperiment.model_validate(document)

    store = RunStore(tmp_path, "run")
    store.begin(name="s", backend="mock", seed=0)
    store.take_lease()
    store.write_experiment(staged(False, 3).model_dump(mode="json"))
    assert check_continues(store, staged(True, 3))
    with pytest.raises(UserError) as refused:
        check_continues(store, staged(True, 4))
    (problem,) = refused.value.problems
    assert problem.where == "stages[1].algorithm.params.batch_size"
    with pytest.raises(UserError, match="stages: run 'run' was started with"):
        check_continues(store, spec_of(path, True))


@pytest.mark.parametrize("streaming", [False, True])
async def test_one_bad_row_too_many(path: Path, streaming: bool) -> None:
    spec = spec_of(path, streaming, max_bad_rows=1)
    with pytest.raises(UserError) as caught:
        await set_up(spec, await open_backend(spec))
    assert [problem.where for problem in caught.value.problems] == [
        f"{path}:11",
        "data.max_bad_rows",
    ]
    assert caught.value.problems[1].what == "there are 2 bad rows, and 1 may be skipped"


def test_a_real_tokenizer_gives_the_same_tokens(path: Path) -> None:
    def rendered(streaming: bool) -> list[tuple[list[int], list[bool], str]]:
        dataset = load_dataset(spec_of(path, streaming).data)
        rows = render_rows(dataset, byte_tokenizer(), max_seq_len=60).rows
        return [(row.tokens.tolist(), row.mask.tolist(), row.place) for row in rows]

    assert rendered(True) == rendered(False)


def test_what_is_no_fault_of_the_row_is_not_skipped() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    data = experiment(data={"kind": "rows", "rows": TEXTS, "max_bad_rows": 99}).data
    with pytest.raises(UserError, match=r"model\.name: the tokenizer has no eos token"):
        render_rows(load_dataset(data), tokenizer)


def test_a_full_disk_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda prefix: open("/dev/full", "wb"))  # noqa: PTH123, SIM115
    with pytest.raises(UserError, match="No space left on device") as caught:
        load_dataset(spec_of(path, True).data)
    (problem,) = caught.value.problems
    assert problem.where == tempfile.gettempdir()
    assert problem.remedy == "set TMPDIR to a folder with room for them"


def test_datums_of_slices(path: Path) -> None:
    dataset: Dataset = load_dataset(spec_of(path, True).data)
    rows = render_rows(dataset, byte_tokenizer(), max_seq_len=60).rows
    (datum,) = map(to_datum, rows[-1:])
    assert datum.model_input.to_ints() == rows[-1].tokens[:-1].tolist()
