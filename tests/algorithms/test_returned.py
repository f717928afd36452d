"""What an algorithm of anyone's may hand over, and how it is told that it is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tinker
import torch

from algorithms.base import RunContext, TrainingBatch
from algorithms.data.dataset import load_dataset
from algorithms.mock_sft import MockSFT
from algorithms.returned import checked_batch, checked_loss, checked_metrics
from backends.base import ModelOutput
from backends.errors import UserError
from tests.algorithms.samples import experiment, open_backend

DATUM = tinker.Datum(model_input=tinker.ModelInput.from_ints([1, 2]), loss_fn_inputs={})


def output() -> ModelOutput:
    """Logprobs of two rows, of 2 and 3 target tokens."""
    rows = ([-1.0, -2.0], [-3.0, 0.0, -0.5])
    return ModelOutput([torch.tensor(row, requires_grad=True) for row in rows])


def test_a_loss_that_is_right_is_left_as_it_is() -> None:
    asked = output()
    loss = checked_loss(lambda model_output, data: -model_output.logprobs.sum())(asked, [DATUM] * 2)
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == 6.5
    gradients = [row.grad for row in asked.logprobs_per_datum if row.grad is not None]
    assert [gradient.tolist() for gradient in gradients] == [[-1, -1], [-1, -1, -1]]


LOSSES: dict[str, tuple[Callable[..., Any], str]] = {
    "nan": (lambda o, d: o.logprobs.sum() * float("nan"), "the loss is nan"),
    "infinite": (lambda o, d: o.logprobs.sum() / 0, "the loss is -inf"),
    "one a row": (lambda o, d: o.logprobs, r"the loss has shape \(5,\)"),
    "a float": (lambda o, d: 1.0, "what it returned is of type float"),
    "nothing": (lambda o, d: None, "what it returned is None"),
    "with metrics": (lambda o, d: (o.logprobs.sum(), {}), "is of type tuple"),
    "detached": (lambda o, d: o.logprobs.sum().detach(), "does not depend on the model's logprobs"),
    "of wrong length": (
        lambda o, d: (o.logprobs * torch.zeros(3)).sum(),
        r"RuntimeError: .*size.* \(test_returned.py, line \d+\)",
    ),
    "of no arguments": (lambda: None, r"it raised TypeError: .* 0 positional arguments"),
}


@pytest.mark.parametrize("how", LOSSES)
def test_a_loss_that_is_wrong_is_the_users_to_mend(how: str) -> None:
    loss_fn, said = LOSSES[how]
    with pytest.raises(UserError, match=said) as refused:
        checked_loss(loss_fn)(output(), [DATUM] * 2)
    assert refused.value.problems[0].where == "loss_fn"
    assert refused.value.problems[0].remedy


def test_a_gradient_that_is_not_finite_is_found_in_its_row() -> None:
    loss = checked_loss(lambda o, d: (-o.logprobs).sqrt().sum())(output(), [])
    assert torch.isfinite(loss)
    with pytest.raises(UserError, match="gradient is not finite in row 1"):
        loss.backward()  # type: ignore[no-untyped-call]


def test_what_an_error_of_its_own_says_is_kept() -> None:
    mine = UserError()

    def loss_fn(model_output: ModelOutput, data: list[tinker.Datum]) -> torch.Tensor:
        raise mine

    with pytest.raises(UserError) as refused:
        checked_loss(loss_fn)(output(), [])
    assert refused.value is mine


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (None, "build_batch: what it returned is None"),
        (([DATUM], "cross_entropy"), "build_batch: what it returned is of type tuple"),
        (TrainingBatch(None, "dro"), "build_batch.data: what it holds is None"),  # type: ignore[arg-type]
        (TrainingBatch([DATUM, 1], "dro"), "build_batch.data: .* of type int"),  # type: ignore[list-item]
        (TrainingBatch([DATUM], None), "build_batch.loss_fn: it is None"),  # type: ignore[arg-type]
        (
            TrainingBatch([DATUM], "dro", metrics={"a": torch.tensor(1.0)}),  # type: ignore[dict-item]
            r"build_batch.metrics: 'a' is of type Tensor\n *-> give plain numbers",
        ),
    ],
)
def test_a_batch_that_is_none_is_named_with_what_it_is(batch: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        checked_batch(batch)


def test_batches_and_metrics_that_are_right_pass() -> None:
    for data in ([], [DATUM]):
        batch = TrainingBatch(data, "dro", metrics={"a": 1.0, "b": 2})
        assert checked_batch(batch) is batch
    with pytest.raises(UserError, match="step_metrics: it is None"):
        checked_metrics(None, "step_metrics")


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("loss", "loss_fn: what it returned is None"),
        ("batch", "build_batch: what it returned is None"),
        ("metrics", "step_metrics: 'a' is of type str"),
    ],
)
async def test_a_run_ends_with_it(
    where: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = MockSFT.build_batch

    async def build_batch(self: MockSFT, step_idx: int) -> Any:
        batch: Any = await build(self, step_idx)
        if where == "loss":
            batch.loss_fn = lambda model_output, data: None
        return None if where == "batch" else batch

    monkeypatch.setattr(MockSFT, "build_batch", build_batch)
    if where == "metrics":
        monkeypatch.setattr(MockSFT, "step_metrics", lambda *_: {"a": "b"})
    spec = experiment(backend={"kind": "mock"}, store=str(tmp_path))
    backend = await open_backend(spec)
    dataset = load_dataset(spec.data)
    context = RunContext("r", str(tmp_path), spec, dataset, backend, backend.get_tokenizer())
    result = await spec.algorithm.build().train(context)
    assert result.status == "failed"
    assert said in str(result.error)
