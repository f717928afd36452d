"""What an algorithm of anyone's may hand over, and how it is told that it is wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import tinker
import torch

from algorithms.base import RunContext, RunResult, TrainingBatch
from algorithms.data.dataset import load_dataset
from algorithms.experiment import Experiment
from algorithms.imports import raised
from algorithms.mock_sft import MockSFT
from algorithms.opening import open_live_run
from algorithms.registry import ALGORITHMS
from algorithms.returned import (
    AlgorithmFailed,
    checked_batch,
    checked_loss,
    checked_metrics,
    hook,
)
from backends.base import Backend, ModelOutput
from backends.errors import StateLostError, TransientError, UserError
from backends.storage.run_store import RunStore
from tasks.report import collect, render
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


def mean_of(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(rows).mean()


def test_the_line_of_a_loss_is_the_innermost_of_the_users() -> None:
    line = mean_of.__code__.co_firstlineno + 1
    with pytest.raises(UserError, match=rf"RuntimeError: .* \(test_returned.py, line {line}\)"):
        checked_loss(lambda o, d: mean_of(o.logprobs_per_datum))(output(), [])


class Mine(torch.nn.Module):
    """A user's class above a library's."""

    def __call__(self, model_output: ModelOutput, data: list[tinker.Datum]) -> torch.Tensor:
        return self.get_submodule("not.there")(model_output)  # type: ignore[no-any-return]


def test_the_line_is_not_that_of_a_library_that_a_class_is_built_on() -> None:
    line = Mine.__call__.__code__.co_firstlineno + 1
    with pytest.raises(AttributeError) as failed:
        Mine()(output(), [])
    assert raised(failed.value, Mine).endswith(f"(test_returned.py, line {line})")
    with pytest.raises(UserError, match=rf"\(test_returned.py, line {line}\)"):
        checked_loss(Mine())(output(), [])


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


async def run_of(spec: Experiment, store: Path) -> RunResult:
    backend = await open_backend(spec)
    dataset = load_dataset(spec.data)
    context = RunContext("r", str(store), spec, dataset, backend, backend.get_tokenizer())
    return await spec.algorithm.build().train(context)


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
    result = await run_of(experiment(backend={"kind": "mock"}, store=str(tmp_path)), tmp_path)
    assert result.status == "failed"
    assert said in str(result.error)


# --- what it raises -----------------------------------------------------------------------------


class Own(MockSFT):
    """Fails somewhere, with a library's line behind its own."""

    fails_in = ""
    error: ClassVar[type[Exception]] = json.JSONDecodeError

    def fail(self, where: str) -> None:
        if where == self.fails_in and self.error is json.JSONDecodeError:
            json.loads("{")
        if where == self.fails_in:
            raise self.error("away")

    async def setup(self, ctx: RunContext, backend: Backend) -> None:
        self.fail("setup")
        await super().setup(ctx, backend)

    async def build_batch(self, step_idx: int) -> TrainingBatch:
        self.fail("build_batch")
        return await super().build_batch(step_idx)

    def step_metrics(self, step_idx: int, batch: TrainingBatch, fb_result: Any) -> dict[str, float]:
        self.fail("step_metrics")
        return super().step_metrics(step_idx, batch, fb_result) | {"none": float("nan")}


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Experiment]:
    ALGORITHMS.register("own", Own)
    algorithm = {"kind": "own", "params": {"batch_size": 3}}
    yield experiment(algorithm=algorithm, backend={"kind": "mock"}, store=str(tmp_path))
    ALGORITHMS.forget("own")


@pytest.mark.parametrize("name", ["setup", "build_batch", "step_metrics"])
async def test_an_error_of_its_own_is_told_with_method_and_line(
    name: str, own: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Own, "fails_in", name)

    async def one_segment() -> None:
        run = await open_live_run(own, RunStore(own.store, "live"))
        await run.run_segment(run, 0, 3)

    with pytest.raises(AlgorithmFailed) as failed:
        await one_segment()
    line = Own.fail.__code__.co_firstlineno + 2
    words = f"Own.{name} raised JSONDecodeError: .* \\(test_returned.py, line {line}\\)"
    assert re.fullmatch(words, str(failed.value))
    assert isinstance(failed.value.__cause__, json.JSONDecodeError)
    if name != "setup":
        assert (await run_of(own, tmp_path)).error == str(failed.value)


@pytest.mark.parametrize("error", [StateLostError, TransientError, ConnectionError, TimeoutError])
def test_errors_that_waiting_or_a_checkpoint_may_mend_pass_as_they_are(
    error: type[Exception],
) -> None:
    algorithm, away = Own(MockSFT.Config()), error("away")
    with pytest.raises(error) as passed, hook(algorithm, "build_batch"):
        raise away
    assert passed.value is away


async def test_a_metric_that_is_no_number_is_null(own: Experiment, tmp_path: Path) -> None:
    result = await run_of(own, tmp_path)
    assert result.status == "completed"
    assert "none" not in result.metrics
    rows = [json.loads(line) for line in (tmp_path / "r/metrics.jsonl").open()]
    assert [row["none"] for row in rows] == [None] * len(rows)
    page = render(collect(RunStore(own.store, "r"), "completed", {}))
    assert "nan" not in page.markdown
