"""SFT and its fake twin: loss by hand, metrics, exact resume."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tinker

from algorithms.base import TrainingBatch
from algorithms.sft import SFT, SFTConfig
from backends.base import SavedState
from tests.algorithms.samples import ROWS, chat, experiment, open_backend, set_up, train


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
    assert metrics == {"train_mean_nll": 2.0, "tokens/supervised": 2.5, "tokens/total": 5.0}


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
