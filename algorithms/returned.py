"""What an algorithm hands over, or raises: anyone may write one.

What it hands over is looked at before it goes to the server. Each mistake is a UserError that says
what came and what is wanted, so that it ends the run at once; an error of another kind would be
taken for the backend's, and tried again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from algorithms.base import BaseAlgorithm, TrainingBatch
from algorithms.imports import raised
from backends.base import LossCallable, ModelOutput
from backends.errors import FlowtuneError, Problem, UserError

if TYPE_CHECKING:
    import tinker
    import torch


class AlgorithmFailed(FlowtuneError):
    """A method of an algorithm raised something; the cause is its own error."""


@contextmanager
def hook(algorithm: BaseAlgorithm, name: str) -> Iterator[None]:
    """Say in which method of the algorithm, and on which line, an error comes from.

    It is no UserError, as waiting may help: what is tried again is so as before. Errors of ours and
    those of a connection pass as they are.
    """
    try:
        yield
    except (FlowtuneError, ConnectionError, TimeoutError):
        raise
    except Exception as error:
        cls = type(algorithm)
        words = f"{cls.__name__}.{name} raised {raised(error, cls)}"
        raise AlgorithmFailed(words) from error


def checked_batch(batch: Any) -> TrainingBatch:
    """The batch that `build_batch` returned. Raises UserError for what is none."""
    import tinker

    if not isinstance(batch, TrainingBatch):
        raise _wrong("build_batch", f"what it returned is {_a(batch)}", "return a TrainingBatch")
    others = [datum for datum in batch.data or [] if not isinstance(datum, tinker.Datum)]
    if not isinstance(batch.data, list) or others:
        found = f"what it holds is {_a(others[0] if others else batch.data)}"
        raise _wrong("build_batch.data", found, "give a list of tinker.Datum, [] for no data")
    if not (isinstance(batch.loss_fn, str) or callable(batch.loss_fn)):
        remedy = "give the name of a loss that the server knows, or a function"
        raise _wrong("build_batch.loss_fn", f"it is {_a(batch.loss_fn)}", remedy)
    checked_metrics(batch.metrics, "build_batch.metrics")
    return batch


def checked_metrics(metrics: Any, where: str) -> Mapping[str, float]:
    """Metrics by name. Raises UserError for what cannot stand in a row of metrics.jsonl."""
    if not isinstance(metrics, Mapping):
        raise _wrong(where, f"it is {_a(metrics)}", "give a dict of numbers, {} for none")
    for name, value in metrics.items():
        if not (isinstance(name, str) and isinstance(value, int | float)):
            raise _wrong(where, f"{name!r} is {_a(value)}", "give plain numbers: float(…)")
    return metrics


def checked_loss(loss_fn: LossCallable) -> LossCallable:
    """The same loss, whose value and gradient are looked at.

    What it raises, a loss or a gradient that is not finite, and a loss that is no scalar tensor or
    does not depend on the logprobs are raised as UserError.
    """

    def checked(model_output: ModelOutput, data: list[tinker.Datum]) -> torch.Tensor:
        try:
            loss = loss_fn(model_output, data)
        except UserError:
            raise
        except Exception as error:
            remedy = "it is called as loss_fn(model_output, data) and returns one number"
            raise _wrong("loss_fn", f"it raised {raised(error, loss_fn)}", remedy) from error
        _check_value(loss)
        for row, logprobs in enumerate(model_output.logprobs_per_datum):
            if logprobs.requires_grad:
                logprobs.register_hook(lambda gradient, row=row: _check_gradient(gradient, row))
        return loss

    return checked


def _check_value(loss: Any) -> None:
    import torch

    if not isinstance(loss, torch.Tensor):
        raise _wrong("loss_fn", f"what it returned is {_a(loss)}", "return one number, as a tensor")
    if loss.ndim != 0:
        remedy = "return one number: sum or average it"
        raise _wrong("loss_fn", f"the loss has shape {tuple(loss.shape)}", remedy)
    if not torch.isfinite(loss):
        remedy = "guard logarithms, divisions and powers, and mask with torch.where"
        raise _wrong("loss_fn", f"the loss is {loss.item()}", remedy)
    if not loss.requires_grad:
        remedy = "compute it from model_output.logprobs, without detach(), item() or numpy()"
        raise _wrong("loss_fn", "the loss does not depend on the model's logprobs", remedy)


def _check_gradient(gradient: torch.Tensor, row: int) -> None:
    import torch

    if not bool(torch.isfinite(gradient).all()):
        remedy = "guard what has no slope there, such as a root or a power of 0"
        what = f"its gradient is not finite in row {row} of the batch, though the loss is"
        raise _wrong("loss_fn", what, remedy)


def _wrong(where: str, what: str, remedy: str) -> UserError:
    return UserError(Problem(where, what, remedy))


def _a(value: Any) -> str:
    return "None" if value is None else f"of type {type(value).__name__}"
