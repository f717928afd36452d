"""What every algorithm keeps to, whoever wrote it; a new kind is one more row of CASES.

Runs are real runs on the mock backend: the loop, the store, the caches and the checkpoints.
"""

from __future__ import annotations

import json
import math
import os
import re
import zlib
from pathlib import Path
from typing import Any

import pytest

from algorithms.base import BaseAlgorithm, OwnLoop, RunContext, TrainingBatch
from algorithms.experiment import Experiment, parse_experiment
from algorithms.kept import encode_batch
from algorithms.opening import open_live_run
from algorithms.registry import ALGORITHMS
from algorithms.run import LiveRun
from backends.errors import UserError
from backends.storage.run_store import RunStore
from tests.algorithms.samples import chat, open_backend, set_up
from tests.algorithms.sampling_algorithm import Sampling

assert Sampling.name  # importing it makes its kind known
ROWS = [
    {
        **chat(f"say {word}", word),
        "chosen": chat(f"say {word}", word)["messages"],
        "rejected": chat(f"say {word}", f"no {word}")["messages"],
    }
    for word in ("one", "two", "three", "four", "five", "six")
]
"""Every shape that an algorithm may ask for, in one."""


def half(row: dict[str, Any], completion: str) -> float:
    """A reward that tells one sample of the mock from another."""
    return float(zlib.crc32(completion.encode()) % 2)


CASES: dict[str, dict[str, Any]] = {
    "sft": {},
    "mock_sft": {},
    "sampling": {},
    "rl": {
        "num_samples": 4,
        "max_tokens": 8,
        "verifier": {"kind": "function", "params": {"path": f"{__name__}:half"}},
    },
    "sdft": {"teacher_sync_every": 2},
    "distill": {"teacher": {"model": "a teacher"}},
    "dpo": {},
}
"""The parameters, other than the shared ones, that a short run of each kind takes."""

STEPS = 5
METRIC = re.compile(r"[a-z_]+(/[a-z0-9_@^-]+)*")
REQUIRED = {"step", "progress/done_frac", "progress/epoch", "optim/lr", "time/build", "time/step"}


def experiment(kind: str, store: Path, seed: int = 0, **params: Any) -> Experiment:
    """A short run of a kind."""
    shared = {"batch_size": 2, "max_steps": STEPS, "learning_rate": 0.01, "save_every": 2}
    return parse_experiment(
        {
            "name": "contract",
            "seed": seed,
            "store": str(store),
            "model": {"name": "mock"},
            "data": {"kind": "rows", "rows": ROWS},
            "algorithm": {"kind": kind, "params": {**shared, **CASES[kind], **params}},
            "backend": {"kind": "mock"},
        }
    )


async def opened(spec: Experiment, run_id: str = "run") -> LiveRun:
    """The run, new or where it was left."""
    return await open_live_run(spec, RunStore(spec.store, run_id))


async def trained(run: LiveRun, stop: int = STEPS) -> None:
    """Train until so many steps are done and safe, and end the process's part in it."""
    marks = [step for step in run.plan.save_steps if run.plan.first_step < step <= stop]
    for start, end in zip([run.plan.first_step, *marks[:-1]], marks, strict=True):
        await run.run_segment(run, start, end)
    await run.settle()
    await run.cancel()
    await run.backend.aclose()


def rows_of(run: LiveRun) -> list[dict[str, float]]:
    """The metrics that are the same in every replay."""
    return [
        {name: value for name, value in row.items() if not name.startswith("time/")}
        for row in run.store.metrics()
    ]


def weights_of(run: LiveRun) -> dict[str, bytes]:
    """The files of the last checkpoint."""
    manifest = run.store.latest_checkpoint()
    assert manifest is not None
    folder = run.store.checkpoint_folder(manifest)
    assert folder is not None
    return {file.path: (folder / file.path).read_bytes() for file in manifest.files}


def test_every_algorithm_is_a_row_here() -> None:
    kinds = ALGORITHMS.rows().items()
    assert {k for k, row in kinds if not issubclass(row.item, OwnLoop)} == set(CASES)


@pytest.fixture(params=sorted(CASES))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_its_parameters_survive_a_document(kind: str, tmp_path: Path) -> None:
    spec = experiment(kind, tmp_path)
    document = json.loads(json.dumps(spec.model_dump(mode="json")))
    assert parse_experiment(document) == spec


def test_its_form_has_a_default_or_a_description_for_every_field(kind: str) -> None:
    schema = ALGORITHMS[kind].Config.model_json_schema()
    assert schema["additionalProperties"] is False
    for name, field in schema["properties"].items():
        assert "$ref" in field or field.get("description"), f"{kind}.{name} says nothing of itself"


def test_it_has_a_summary_and_its_own_name(kind: str) -> None:
    assert ALGORITHMS.rows()[kind].summary
    assert ALGORITHMS[kind].name == kind


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"bogus": 1}, "algorithm.params.bogus"),
        ({"learning_rate": 0}, "algorithm.params.learning_rate"),
        ({"batch_size": 0}, "algorithm.params.batch_size"),
        ({"beta1": 1.0}, "algorithm.params.beta1"),
        ({"lora_rank": "many"}, "algorithm.params.lora_rank"),
        ({"save_every": None, "save_at_fractions": [1.5]}, "algorithm.params"),
        ({"save_at_fractions": [0.5]}, "algorithm.params"),
    ],
)
def test_bad_parameters_are_refused_with_the_field(
    kind: str, tmp_path: Path, params: dict[str, Any], field: str
) -> None:
    with pytest.raises(UserError) as refused:
        experiment(kind, tmp_path, **params)
    assert [problem.where for problem in refused.value.problems] == [field]


def test_all_mistakes_are_told_at_once(kind: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        experiment(kind, tmp_path, batch_size=0, learnig_rate=1.0, max_steps="many")
    assert {problem.where for problem in refused.value.problems} == {
        "algorithm.params.batch_size",
        "algorithm.params.learnig_rate",
        "algorithm.params.max_steps",
    }


async def test_steps_are_counted_from_the_rows(kind: str, tmp_path: Path) -> None:
    spec = experiment(kind, tmp_path, batch_size=4, num_epochs=2, max_steps=None)
    algorithm = await set_up(spec, await open_backend(spec))
    assert (algorithm.steps_per_epoch, algorithm.total_steps) == (2, 4)  # 6 rows, 4 at a time
    capped = experiment(kind, tmp_path, batch_size=4, num_epochs=2, max_steps=50)
    assert (await set_up(capped, await open_backend(capped))).total_steps == 50


async def test_a_batch_does_not_depend_on_those_before(kind: str, tmp_path: Path) -> None:
    spec = experiment(kind, tmp_path)
    run = await opened(spec)
    try:
        late = bits(await run.algorithm.build_batch(2))
    finally:
        await run.backend.aclose()
    assert late == (await batches(experiment(kind, tmp_path / "again"), 3))[2]


def bits(batch: TrainingBatch) -> bytes:
    """The batch less what no two runs have in common: times, and where a callable loss lies."""
    batch.metrics = {k: v for k, v in batch.metrics.items() if not k.startswith("time/")}
    batch.loss_fn = "a callable" if callable(batch.loss_fn) else batch.loss_fn
    return encode_batch(batch)


async def batches(spec: Experiment, count: int) -> list[bytes]:
    """The first batches of a run that does not train."""
    run = await opened(spec)
    try:
        built = [await run.algorithm.build_batch(step) for step in range(count)]
    finally:
        await run.backend.aclose()
    return [bits(batch) for batch in built]


async def test_a_seed_decides_its_batches(kind: str, tmp_path: Path) -> None:
    one = await batches(experiment(kind, tmp_path / "1", seed=1), 3)
    same = await batches(experiment(kind, tmp_path / "2", seed=1), 3)
    other = await batches(experiment(kind, tmp_path / "3", seed=2), 3)
    assert one == same
    assert one != other


async def test_a_run_that_was_cut_off_ends_like_one_that_was_not(kind: str, tmp_path: Path) -> None:
    whole = await opened(experiment(kind, tmp_path / "whole"))
    await trained(whole)
    cut = await opened(experiment(kind, tmp_path / "cut"))
    await cut.run_segment(cut, 0, 2)
    await cut.run_segment(cut, 2, 4)
    await cut.cancel()  # whatever is on its way at this moment is lost
    await cut.backend.aclose()
    again = await opened(experiment(kind, tmp_path / "cut"))
    await trained(again)
    assert rows_of(again) == rows_of(whole)
    assert weights_of(again) == weights_of(whole)


async def test_its_curve_is_the_one_that_is_committed(kind: str, tmp_path: Path) -> None:
    """The numbers of a short run, to ten digits: whoever changes them has to say so.

    `FLOWTUNE_GOLDEN=write pytest tests/algorithms/test_contract.py -k committed` writes them anew.
    """
    run = await opened(experiment(kind, tmp_path))
    await trained(run)
    rows = [{name: f"{value:.10g}" for name, value in row.items()} for row in rows_of(run)]
    golden = Path(__file__).parent / "golden" / f"{kind}.jsonl"
    if os.environ.get("FLOWTUNE_GOLDEN") == "write":
        golden.parent.mkdir(exist_ok=True)
        golden.write_text("".join(json.dumps(row, sort_keys=True) + "\n" for row in rows))
    assert [json.loads(line) for line in golden.read_text().splitlines()] == rows


async def test_its_metrics_are_finite_numbers_with_plain_names(kind: str, tmp_path: Path) -> None:
    run = await opened(experiment(kind, tmp_path))
    await trained(run)
    rows = run.store.metrics()
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    for row in rows:
        assert row.keys() >= REQUIRED
        for name, value in row.items():
            assert METRIC.fullmatch(name), name
            assert isinstance(value, int | float), name
            assert math.isfinite(value), name


async def test_a_batch_without_data_is_a_step_like_the_others(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await opened(experiment(kind, tmp_path))
    real = run.algorithm.build_batch

    async def build_batch(step: int) -> TrainingBatch:
        batch = await real(step)
        if step == 1:
            batch.data = []
        return batch

    monkeypatch.setattr(run.algorithm, "build_batch", build_batch)
    await trained(run)
    assert [row["step"] for row in run.store.metrics()] == [1, 2, 3, 4, 5]
    assert run.store.checkpoint_steps() == [2, 4, 5]


async def test_it_trains_by_itself(kind: str, tmp_path: Path) -> None:
    """`train(ctx)`: one full run, without Prefect, with the result of any other."""
    whole = await opened(experiment(kind, tmp_path / "loop"))
    await trained(whole)
    spec = experiment(kind, tmp_path / "alone")
    backend = await spec.backend.row().open(spec.backend.params, spec.model_spec(), None)
    algorithm: BaseAlgorithm = spec.algorithm.build()
    context = RunContext(
        "run", str(tmp_path), spec, spec.data.load(), backend, backend.get_tokenizer()
    )
    result = await algorithm.train(context)
    await backend.aclose()
    assert (result.status, result.run_id) == ("completed", "run")
    store = RunStore(spec.store, "run")
    alone = LiveRun(context, store, algorithm, {}, whole.plan, whole.kept)
    assert rows_of(alone) == rows_of(whole)
    assert weights_of(alone) == weights_of(whole)
