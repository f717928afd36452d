"""AdamW and clipping, step for step against torch's own, fed with the engine's own gradients.

Before each step a second client stands on the same weights, takes the same batch, and gives its
gradient out (`Bench.gradients`); torch.optim.AdamW and clip_grad_norm_ then make the step here.
What differs is the optimizer alone, so that the weights can be held to 1e-6 even where a small eps
would turn the rounding of a gradient into a whole step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import pytest
import tinker
import torch
from tinker import types

from tests.conformance.bench import Bench, data
from tests.conformance.reference import Example, Reference, ragged

WEIGHTS = 1e-6
"""Absolute, on entries of size 0.1: the last digit, some steps in a row."""

NORM = 1e-5
"""Relative: 100,000 squares are added up in float32, here matrix by matrix."""


@dataclass(frozen=True)
class Step:
    """One optimizer step's settings; every field but the clip norm is AdamW's own."""

    learning_rate: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0

    def params(self) -> types.AdamParams:
        """As the SDK takes them."""
        return types.AdamParams(**asdict(self))


STEPS = (
    Step(learning_rate=1e-2),
    Step(learning_rate=3e-3, weight_decay=0.3),
    Step(beta1=0.8),
    Step(beta2=0.999),
    Step(eps=1e-3),
    Step(grad_clip_norm=1.0),
    Step(grad_clip_norm=1e9),
    Step(learning_rate=2e-2, beta1=0.0, beta2=0.5, eps=1e-8, weight_decay=0.01, grad_clip_norm=5.0),
    Step(learning_rate=0.0, weight_decay=0.9),
    Step(learning_rate=1e-5, beta1=0.95, beta2=0.9, eps=10.0, weight_decay=2.0),
    Step(learning_rate=5e-3, beta2=0.5, eps=1e-2),
    Step(learning_rate=1e-2, weight_decay=0.1, grad_clip_norm=0.5),
)
"""Everything changes at every step, and each is changed alone once."""


class TorchOptimizer:
    """torch's AdamW and its own clipping, over the matrices of an adapter."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        self.matrices = {name: w.detach().clone().requires_grad_() for name, w in weights.items()}
        self._adam = torch.optim.AdamW(self.matrices.values(), foreach=False, fused=False)

    def step(self, gradients: dict[str, torch.Tensor], settings: Step) -> float:
        """One step; the norm of the gradients before clipping."""
        for name, matrix in self.matrices.items():
            matrix.grad = gradients[name].clone()
        limit = settings.grad_clip_norm or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(self.matrices.values(), limit)
        self._adam.param_groups[0].update(
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            weight_decay=settings.weight_decay,
        )
        self._adam.step()
        return float(norm)

    def assert_equal(self, weights: dict[str, torch.Tensor]) -> None:
        """The same matrices, A and B."""
        assert weights.keys() == self.matrices.keys()
        for name, matrix in self.matrices.items():
            torch.testing.assert_close(
                weights[name],
                matrix.detach(),
                rtol=WEIGHTS,
                atol=WEIGHTS,
                msg=lambda m, n=name: f"{n}: {m}",
            )


def test_adamw_is_that_of_torch_step_for_step(bench: Bench) -> None:
    client = bench.client(rank=4, seed=9)
    ours = TorchOptimizer(bench.weights(client))
    for number, settings in enumerate(STEPS):
        batch = data(ragged(60 + number, (5, 12)))
        twin = bench.resumed(client.save_state(f"before-{number}").result().path)
        twin.forward_backward(batch, "cross_entropy")
        gradients = bench.gradients(twin)
        client.forward_backward(batch, "cross_entropy")
        metrics = client.optim_step(settings.params()).result().metrics
        norm = ours.step(gradients, settings)
        assert metrics is not None
        assert metrics["grad_norm"] == pytest.approx(norm, rel=NORM), number
        assert settings.grad_clip_norm in (0, 1e9) or norm > settings.grad_clip_norm
        ours.assert_equal(bench.weights(client))


@pytest.mark.parametrize("limit", [0.5, 1e3])
def test_clipping_is_that_of_torch(
    bench: Bench, learner: tinker.TrainingClient, far: str, limit: float
) -> None:
    """By the global norm, above the limit only: seen in the moment of a step that moves nothing."""
    batch = data(ragged(80))
    learner.forward_backward(batch, "cross_entropy").result()
    expected = {name: g.clone().requires_grad_() for name, g in bench.gradients(learner).items()}
    for matrix in expected.values():
        matrix.grad = matrix.detach().clone()
    norm = float(torch.nn.utils.clip_grad_norm_(expected.values(), limit))
    assert 1.0 < norm < 900.0
    learner.forward_backward(batch, "cross_entropy").result()
    clipping = types.AdamParams(learning_rate=0.0, beta1=0.0, grad_clip_norm=limit)
    learner.optim_step(clipping).result()
    clipped = bench.moments(learner)
    for name, matrix in expected.items():
        torch.testing.assert_close(clipped[name], matrix.grad, rtol=1e-5, atol=1e-7)


def test_weight_decay_reaches_a_and_b_and_needs_no_gradient(bench: Bench, far: str) -> None:
    client = bench.resumed(far)
    before = bench.weights(client)
    adam = types.AdamParams(learning_rate=0.1, weight_decay=0.5)
    metrics = client.optim_step(adam).result().metrics
    assert metrics is not None
    assert metrics["grad_norm"] == 0
    for name, matrix in bench.weights(client).items():
        torch.testing.assert_close(matrix, before[name] * 0.95, rtol=1e-6, atol=0)
        assert matrix.any(), name


def test_the_defaults_are_the_documented_ones(bench: Bench, far: str) -> None:
    bare, spelt = bench.resumed(far), bench.resumed(far)
    full = types.AdamParams(
        learning_rate=1e-4,
        beta1=0.9,
        beta2=0.95,
        eps=1e-12,
        weight_decay=0.0,
        grad_clip_norm=0.0,
    )
    for client, adam in ((bare, types.AdamParams()), (spelt, full)):
        for seed in (81, 82):
            client.forward_backward(data(ragged(seed)), "cross_entropy")
            client.optim_step(adam).result()
    left, right = bench.weights(bare), bench.weights(spelt)
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_a_learning_rate_of_any_size_is_taken(bench: Bench, far: str) -> None:
    """Also a negative one, which torch itself refuses: it climbs."""
    down, up = bench.resumed(far), bench.resumed(far)
    before = bench.weights(down)
    for client, rate in ((down, 1e-3), (up, -1e-3)):
        client.forward_backward(data(ragged(83)), "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=rate)).result()
    left, right = bench.weights(down), bench.weights(up)
    for name, start in before.items():
        torch.testing.assert_close(left[name] - start, start - right[name], rtol=0, atol=1e-6)
    large = bench.client(rank=2)
    large.forward_backward(data(ragged(84)), "cross_entropy")
    large.optim_step(types.AdamParams(learning_rate=1e6)).result()
    assert max(float(matrix.abs().max()) for matrix in bench.weights(large).values()) > 9e5


# -- a whole loop ------------------------------------------------------------------------------


def plain_loop(
    reference: Reference, batches: Sequence[Sequence[Example]], steps: Sequence[Step]
) -> list[float]:
    """What a careful PyTorch loop does; the losses."""
    optimizer, losses = TorchOptimizer(dict(reference.parameters)), []
    for batch, settings in zip(batches, steps, strict=True):
        loss = reference.loss(batch, "cross_entropy")
        losses.append(loss.item())
        optimizer.step(reference.gradients(loss), settings)
        with torch.no_grad():
            for name, matrix in optimizer.matrices.items():
                reference.parameters[name].copy_(matrix)
    return losses


def test_a_training_run_has_the_numbers_of_a_plain_loop(bench: Bench) -> None:
    """Nothing is shared after the first bits of A. An eps of the gradients' size (10 when clipped)
    keeps Adam from making a whole step out of the rounding of a gradient near 0; even so the plain
    loop itself, in float32 and in float64, comes to differ by 7e-4 of how far a matrix moved."""
    steps = [
        Step(learning_rate=0.02, eps=1.0, weight_decay=0.1, grad_clip_norm=10.0) for _ in range(8)
    ]
    batches = [ragged(85 + number % 2) for number in range(len(steps))]
    client = bench.client(rank=8, seed=10)
    start = bench.weights(client)
    reference = Reference(bench.saved(client))
    sent = [
        (client.forward_backward(data(batch), "cross_entropy"), client.optim_step(step.params()))
        for batch, step in zip(batches, steps, strict=True)
    ]
    ours = [passed.result().metrics["loss:sum"] for passed, _ in sent]
    theirs = plain_loop(reference, batches, steps)
    assert ours == pytest.approx(theirs, rel=1e-4)
    assert ours[-1] < ours[1] - 1
    weights = bench.weights(client)
    for name, matrix in reference.parameters.items():
        moved = float((matrix.detach() - start[name]).abs().max())
        torch.testing.assert_close(weights[name], matrix.detach(), rtol=0, atol=2e-3 * moved)
