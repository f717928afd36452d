"""SFT and its fake twin: loss by hand, weights, batches by tokens, metrics, exact resume."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch

from algorithms.base import TrainingBatch
from algorithms.data.order import PackedOrder, epoch_order
from algorithms.experiment import load_experiment
from algorithms.registry import ALGORITHMS
from algorithms.sft import SFT, SFTConfig
from backends.base import ModelOutput, SavedState
from backends.errors import UserError
from tests.algorithms.samples import ROWS, chat, experiment, open_backend, set_up, train

ROOT = Path(__file__).parents[2]


def datum(weights: list[float]) -> tinker.Datum:
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(list(range(len(weights)))),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData.from_numpy(np.arange(len(weights))),
            "weights": tinker.TensorData.from_numpy(np.asarray(weights, dtype=np.float32)),
        },
    )


def output(*logprobs: list[float]) -> tinker.types.ForwardBackwardOutput:
    return tinker.types.ForwardBackwardOutput(
        loss_fn_output_type="ArrayRecord",
        loss_fn_outputs=[
            {"logprobs": tinker.TensorData.from_numpy(np.asarray(p, dtype=np.float32))}
            for p in logprobs
        ],
    )


def test_the_loss_is_in_nats_per_supervised_token() -> None:
    batch = TrainingBatch([datum([0, 1, 1]), datum([0, 0.5])], "cross_entropy")
    metrics = SFT(SFTConfig()).step_metrics(0, batch, output([-9, -1, -2], [-9, -4]))
    # (1 * 1 + 1 * 2 + 0.5 * 4) / 2.5
    assert metrics == {"train_mean_nll": 2.0, "tokens/supervised": 3.0, "tokens/total": 5.0}


async def test_set_up_counts_what_it_did() -> None:
    rows = [*ROWS, chat("x" * 100, "y")]
    spec = experiment(
        data={"kind": "rows", "rows": rows},
        algorithm={"kind": "sft", "params": {"max_seq_len": 60, "batch_size": 4}},
        backend={"kind": "mock"},
    )
    algorithm = await set_up(spec, await open_backend(spec))
    # 25 tokens before the answer of "say n", 8 of "number n", its end and a line break
    assert algorithm.setup_metrics() == {
        "data/rows": 7.0,
        "data/rows_cut": 0.0,
        "data/rows_dropped": 1.0,
        "data/rows_skipped": 0.0,
        "data/tokens": 7 * 34.0,
        "data/tokens_supervised": 7 * 9.0,
    }
    assert algorithm.steps_per_epoch == 2


async def test_a_batch_is_the_rows_of_its_step() -> None:
    spec = experiment(algorithm={"kind": "mock_sft", "params": {"batch_size": 3}})
    algorithm = await set_up(spec, await open_backend(spec))
    built = [await algorithm.build_batch(step) for step in range(3)]
    assert [len(batch.data) for batch in built] == [3, 3, 1]
    assert all(batch.loss_fn == "cross_entropy" for batch in built)
    seen = {tuple(d.model_input.to_ints()) for batch in built for d in batch.data}
    assert len(seen) == 7


async def test_the_state_is_the_data_cursor() -> None:
    spec = experiment()
    algorithm = await set_up(spec, await open_backend(spec))
    assert algorithm.state_dict(5) == {"epoch": 1, "step_in_epoch": 2}


async def test_the_mock_curve_is_golden() -> None:
    spec = experiment(
        algorithm={
            "kind": "mock_sft",
            "params": {"batch_size": 3, "max_steps": 5, "learning_rate": 0.1},
        }
    )
    losses = [row["train_mean_nll"] for row in await train(spec, await open_backend(spec))]
    golden = [1.0401648459, 0.8569808845, 0.6818146242, 0.5578797371, 0.4284270891]
    assert losses == pytest.approx(golden, abs=1e-6)


@pytest.mark.parametrize("stop", [1, 3, 6])
async def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path, stop: int) -> None:
    spec = experiment(
        algorithm={
            "kind": "mock_sft",
            "params": {"batch_size": 3, "max_steps": 8, "schedule": {"kind": "cosine"}},
        }
    )
    whole_backend = await open_backend(spec)
    whole = await train(spec, whole_backend)
    first = await open_backend(spec)
    begun = await train(spec, first, last=stop)
    folder = tmp_path / "state"
    folder.mkdir()
    await first.export_state(await first.save_full_state("x"), folder)
    await first.aclose()
    second = await open_backend(spec, SavedState("mock://gone", folder))
    assert begun + await train(spec, second, first=stop) == whole
    ends = []
    for name, backend in (("whole", whole_backend), ("resumed", second)):
        (tmp_path / name).mkdir()
        await backend.export_state(await backend.save_full_state("end"), tmp_path / name)
        ends.append({f.name: f.read_bytes() for f in (tmp_path / name).iterdir()})
    assert ends[0] == ends[1]
    assert set(ends[0]) == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "optimizer.safetensors",
    }


# --- what a row counts ---------------------------------------------------------------------------


def weighed(*rows: dict[str, Any], **params: Any) -> Any:
    """A mock experiment whose batches hold two rows."""
    return experiment(
        data={"kind": "rows", "rows": list(rows)},
        algorithm={"kind": "sft", "params": {"batch_size": 2, **params}},
        backend={"kind": "mock"},
    )


async def weights_of(spec: Any) -> dict[str, list[float]]:
    """The weights of each row's supervised tokens, by what these say."""
    backend = await open_backend(spec)
    algorithm = await set_up(spec, backend)
    decode, found = backend.get_tokenizer().decode, {}
    for step in range(algorithm.steps_per_epoch):
        for datum in (await algorithm.build_batch(step)).data:
            weights = datum.loss_fn_inputs["weights"].to_numpy()
            targets = datum.loss_fn_inputs["target_tokens"].to_numpy()[weights > 0]
            found[decode(targets.tolist())] = weights[weights > 0].tolist()
    return found


async def test_a_row_weighs_what_it_says() -> None:
    rows = [chat("a", "b") | {"weight": 0.5}, {"prompt": "c", "completion": "d", "weight": 3}]
    assert await weights_of(weighed(*rows, chat("e", "f"))) == {
        "b<|im_end|>": [0.5, 0.5],
        "d<|im_end|>": [3.0, 3.0],
        "f<|im_end|>": [1.0, 1.0],
    }


async def test_a_turn_weighs_what_it_says_and_what_its_row_says() -> None:
    row = chat("a", "b", "c", "d", "e", "f") | {"weight": 0.5}
    row["messages"][1]["weight"] = 0.25
    row["messages"][3]["train"] = False
    assert await weights_of(weighed(row)) == {"b<|im_end|>f<|im_end|>": [0.125] * 2 + [0.5] * 2}


async def test_rows_of_tokens_are_taken_as_they_are() -> None:
    first = {"input_ids": [97, 98, 99, 100], "weights": [1, 0, 0.5, 2], "weight": 2}
    second = {"input_ids": [101, 102, 103]}
    assert await weights_of(weighed(first, second)) == {"cd": [1.0, 4.0], "fg": [1.0, 1.0]}


def test_the_rows_of_the_page_are_in_order() -> None:
    page = (ROOT / "docs/preferences.md").read_text()
    lines = page.partition("```json\n")[2].partition("```")[0].splitlines()
    assert [SFT.check_row(json.loads(line), "page") for line in lines] == [None] * 3


async def test_what_weighs_nothing_is_dropped() -> None:
    nothing = [chat("a", "b") | {"weight": 0}, {"input_ids": [1, 2], "weights": [1, 0]}]
    spec = weighed(*nothing, chat("e", "f"))
    metrics = (await set_up(spec, await open_backend(spec))).setup_metrics()
    assert (metrics["data/rows"], metrics["data/rows_dropped"]) == (1.0, 2.0)
    with pytest.raises(UserError, match=r"every weight in .* is 0"):
        await set_up(weighed(*nothing), await open_backend(spec))


def with_turn(**fields: Any) -> dict[str, Any]:
    """A chat row whose answer has these fields too."""
    asked, answered = chat("a", "b")["messages"]
    return {"messages": [asked, {**answered, **fields}]}


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (chat("a", "b") | {"weight": -1}, "weight is -1"),
        (chat("a", "b") | {"weight": "much"}, 'weight is "much"'),
        (chat("a", "b") | {"weight": float("nan")}, "weight is NaN"),
        (with_turn(weight=True), r"messages\[1\].weight is true"),
        (with_turn(train=0), r"messages\[1\].train is 0"),
        ({"input_ids": [5]}, r"input_ids is \[5\]"),
        ({"input_ids": [5, -1]}, r"input_ids is \[5, -1\]"),
        ({"input_ids": "ab"}, 'input_ids is "ab"'),
        ({"input_ids": [5, 6], "weights": [1]}, "has 2 input_ids and 1 weights"),
        ({"input_ids": [5, 6], "weights": [1, None]}, r"weights is \[1, null\]"),
    ],
)  # fmt: skip
async def test_what_is_no_weight_is_named_with_its_row(row: dict[str, Any], says: str) -> None:
    assert SFT.check_row(row, "here") is not None
    spec = weighed(chat("e", "f"), row)
    with pytest.raises(UserError, match=says) as refused:
        await set_up(spec, await open_backend(spec))
    assert [problem.where for problem in refused.value.problems] == ["data.rows[1]"]


# --- batches by tokens ---------------------------------------------------------------------------

LENGTHS = [3, 9, 4, 4, 2, 8, 5, 10, 1, 6]


def budget(most: int, data: dict[str, Any] | None = None, **params: Any) -> Any:
    """Rows of these lengths, told apart by their first token, in steps of so many tokens."""
    rows = [{"input_ids": [index + 1] * (n + 1)} for index, n in enumerate(LENGTHS)]
    return experiment(
        data=data or {"kind": "rows", "rows": rows},
        algorithm={"kind": "mock_sft", "params": {"max_tokens_per_batch": most, **params}},
    )


async def test_a_step_takes_rows_until_the_next_would_be_too_much() -> None:
    spec = budget(12, num_epochs=3)
    algorithm = await set_up(spec, await open_backend(spec))
    step = 0
    for epoch in range(3):
        order = [int(row) for row in epoch_order(len(LENGTHS), 0, epoch)]
        while order:
            want = [order.pop(0)]
            while order and sum(LENGTHS[row] for row in [*want, order[0]]) <= 12:
                want.append(order.pop(0))
            assert algorithm.cursor(step)[0] == epoch
            batch = await algorithm.build_batch(step)
            assert [datum.model_input.to_ints()[0] - 1 for datum in batch.data] == want
            step += 1
    assert algorithm.total_steps == step  # counted exactly, though epochs differ


async def test_epochs_may_differ_in_their_steps() -> None:
    order = PackedOrder(LENGTHS, 12, seed=0)
    steps = [order.steps(epoch + 1) - order.steps(epoch) for epoch in range(20)]
    assert len(set(steps)) > 1
    assert min(steps) >= sum(LENGTHS) / 12
    assert [order.cursor(step) for step in range(steps[0] + 1)][-2:] == [(0, steps[0] - 1), (1, 0)]
    assert PackedOrder(LENGTHS, 12, seed=0).rows(100) == order.rows(100)  # whatever came before


async def test_max_steps_wins_over_the_epochs() -> None:
    spec = budget(12, num_epochs=3, max_steps=50)
    algorithm = await set_up(spec, await open_backend(spec))
    assert algorithm.total_steps == 50
    assert (await algorithm.build_batch(49)).data


async def test_a_row_that_no_batch_holds_is_named() -> None:
    spec = budget(9)
    with pytest.raises(UserError, match=r"data\.rows\[7\] has 10 tokens, and a batch may hold 9"):
        await set_up(spec, await open_backend(spec))
    cut = budget(9, max_seq_len=10)
    assert (await set_up(cut, await open_backend(cut))).total_steps


async def test_a_run_by_tokens_resumes_exactly(tmp_path: Path) -> None:
    spec = budget(12, num_epochs=3)
    whole = await train(spec, await open_backend(spec))
    assert all(row["tokens/total"] <= 12 for row in whole)
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in spec.data.rows))
    on_disk = budget(12, {"kind": "jsonl", "path": str(path), "streaming": True}, num_epochs=3)
    first = await open_backend(on_disk)
    begun = await train(on_disk, first, last=7)
    (tmp_path / "state").mkdir()
    await first.export_state(await first.save_full_state("x"), tmp_path / "state")
    second = await open_backend(on_disk, SavedState(None, tmp_path / "state"))
    assert begun + await train(on_disk, second, first=7) == whole


# --- a recipe on top of it -----------------------------------------------------------------------


@pytest.fixture
def focal() -> Iterator[None]:
    """The example's kind, known for as long as the test."""
    yield
    ALGORITHMS.forget("focal_sft")
    sys.modules.pop("examples.focal_sft", None)


async def test_the_focal_example_trains_under_its_loss(focal: None) -> None:
    changes = ["backend.kind=mock", "model.name=mock", "evaluations=[]"]
    changes += ["algorithm.params.learning_rate=0.1"]
    spec = load_experiment(ROOT / "examples/focal_sft.yaml", changes)
    batch = await (await set_up(spec, await open_backend(spec))).build_batch(0)
    assert callable(batch.loss_fn)
    logprobs = torch.tensor([-0.5, -2.0])
    loss = batch.loss_fn(ModelOutput([logprobs[:1], logprobs[1:]]), batch.data)
    by_hand = [(1 - math.exp(p)) ** 2.0 * -p for p in (-0.5, -2.0)]
    assert float(loss) == pytest.approx(sum(by_hand) / 2)
    rows = await train(spec, await open_backend(spec), last=20)
    assert rows[-1]["train_mean_nll"] < 0.5 * rows[0]["train_mean_nll"]
