"""The mock keeps the promises of the backend protocol."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from safetensors.numpy import load_file
from tinker import types as tinker_types

from backends.base import Backend, ModelOutput, ModelSpec, SavedState
from backends.errors import StateLostError, UserError
from backends.mock import FLOOR, MockBackend, MockKind, MockParams, MockState, MockTokenizer

MODEL = ModelSpec(name="mock")


def datum(targets: list[int], weights: list[float]) -> tinker.Datum:
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(targets),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData.from_numpy(np.asarray(targets)),
            "weights": tinker.TensorData.from_numpy(np.asarray(weights, dtype=np.float32)),
        },
    )


def backend(**params: Any) -> MockBackend:
    made: Backend = MockBackend(MockParams(**params), MODEL, MockState.fresh(0))
    assert isinstance(made, MockBackend)
    return made


ADAM = tinker_types.AdamParams(learning_rate=0.1)


async def test_log_probabilities_and_loss_by_hand() -> None:
    mock = backend()
    w = MockState.fresh(0).weights
    result = await mock.forward_backward_async(
        [datum([1, 9, 2], [0, 1, 2])], loss_fn="cross_entropy"
    )
    p1, p2 = -(FLOOR + (1 - w[1]) ** 2), -(FLOOR + (1 - w[2]) ** 2)
    got = result.loss_fn_outputs[0]["logprobs"].to_numpy()
    assert got == pytest.approx([p1, p1, p2], abs=1e-6)  # 9 is 1 modulo 8
    assert result.metrics["loss:sum"] == pytest.approx(-(p1 + 2 * p2), abs=1e-12)


async def test_the_first_adam_step_moves_by_the_learning_rate(tmp_path: Path) -> None:
    mock = backend()
    before = MockState.fresh(0).weights
    await mock.forward_backward_async([datum([1, 2], [1, 0])], loss_fn="cross_entropy")
    # Adam's first update is the gradient's sign; only weight 1 has a gradient: -2 (1 - w)
    metrics = (await mock.optim_step_async(ADAM)).metrics
    assert metrics is not None
    assert metrics["grad_norm:mean"] == pytest.approx(2 * (1 - before[1]))
    await mock.export_state(await mock.save_full_state("s"), tmp_path)
    after = load_file(tmp_path / "adapter_model.safetensors")["base_model.model.mock.lora.weight"]
    assert after - before == pytest.approx([0, 0.1, 0, 0, 0, 0, 0, 0], abs=1e-9)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["r"] == MODEL.lora_rank


async def test_gradients_add_up_until_the_step() -> None:
    rows = [datum([1], [1.0]), datum([2], [3.0])]
    once, twice = backend(), backend()
    await once.forward_backward_async(rows, loss_fn="cross_entropy")
    for row in rows:
        await twice.forward_backward_async([row], loss_fn="cross_entropy")
    norms = [(await mock.optim_step_async(ADAM)).metrics for mock in (once, twice)]
    assert norms[0] == norms[1]


async def test_a_custom_loss_gives_the_same_gradient() -> None:
    rows = [datum([1, 2], [1.0, 0.5]), datum([3], [2.0])]
    named, custom = backend(), backend()

    def cross_entropy(output: ModelOutput, data: list[tinker.Datum]) -> torch.Tensor:
        weights = torch.cat([d.loss_fn_inputs["weights"].to_torch() for d in data])
        return -(weights * output.logprobs).sum()

    first = await named.forward_backward_async(rows, loss_fn="cross_entropy")
    second = await custom.forward_backward_custom_async(rows, cross_entropy)
    assert first.metrics["loss:sum"] == pytest.approx(second.metrics["loss:sum"])
    norms = [(await mock.optim_step_async(ADAM)).metrics for mock in (named, custom)]
    assert norms[0] == pytest.approx(norms[1])


async def test_requests_run_in_the_order_of_submission_without_being_awaited() -> None:
    mock = backend(step_seconds=0.02)
    rows = [datum([1], [1.0])]
    results = []
    for _ in range(3):
        results.append(mock.forward_backward_async(rows, loss_fn="cross_entropy"))
        mock.optim_step_async(ADAM)
    before = mock.snapshot_sampling_client()
    losses = [(await result).metrics["loss:sum"] for result in reversed(results)]
    assert losses == sorted(losses)  # the last submitted saw the most steps
    assert losses[0] < losses[1] < losses[2]
    await before


async def test_who_stops_waiting_does_not_stop_the_request() -> None:
    mock = backend(step_seconds=0.02)
    passed = mock.forward_backward_async([datum([1], [1.0])], loss_fn="cross_entropy")

    async def wait() -> None:
        await passed

    waiter = asyncio.ensure_future(wait())
    await asyncio.sleep(0)
    waiter.cancel()
    assert (await mock.optim_step_async(ADAM)).metrics["grad_norm:mean"] > 1.0  # type: ignore[index]
    assert (await passed).metrics["loss:sum"] > 0


async def test_weights_alone_start_with_a_fresh_optimizer(tmp_path: Path) -> None:
    mock = backend()
    await mock.forward_backward_async([datum([1], [1.0])], loss_fn="cross_entropy")
    await mock.optim_step_async(ADAM)
    await mock.export_state(await mock.save_full_state("s"), tmp_path)
    whole = MockState.read(tmp_path, optimizer=True)
    alone = MockState.read(tmp_path, optimizer=False)
    assert (whole.weights == alone.weights).all()
    assert whole.first_moment.any()
    assert not alone.first_moment.any()


async def test_seeds_decide_the_fresh_weights() -> None:
    assert (MockState.fresh(1).weights == MockState.fresh(1).weights).all()
    assert (MockState.fresh(1).weights != MockState.fresh(2).weights).all()


async def test_a_closed_backend_takes_nothing_and_keeps_nothing() -> None:
    mock = backend(step_seconds=5)
    pending = mock.forward_backward_async([datum([1], [1.0])], loss_fn="cross_entropy")
    await asyncio.sleep(0)
    await mock.aclose()
    await mock.aclose()
    with pytest.raises(asyncio.CancelledError):
        await pending
    with pytest.raises(StateLostError):
        mock.optim_step_async(ADAM)


async def test_it_cannot_start_from_somewhere_else(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot start from tinker://x"):
        await MockKind.open(MockParams(), MODEL, SavedState("tinker://x", None))
    with pytest.raises(UserError, match="not a checkpoint of the mock"):
        await MockKind.open(MockParams(), MODEL, SavedState(None, tmp_path))


def test_the_tokenizer_reads_what_it_writes() -> None:
    tokenizer = MockTokenizer()
    text = "<|im_start|>user\nÜ ☃<|im_end|>"
    tokens = tokenizer([text])["input_ids"][0]
    assert tokens[0] == 256
    assert tokens[-1] == 257
    assert tokenizer.decode(tokens) == text
    assert tokenizer.decode(tokens, skip_special_tokens=True) == "user\nÜ ☃"
