"""Value and gradient of every loss: against the formula, and against numbers worked out by hand.

p is the model's logprob of a target, q the one that is sent, r = exp(p - q), A the advantage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from tinker import types
from torch import Tensor

from tests.conformance.bench import Bench, data, datum, logprobs, model_input
from tests.conformance.reference import (
    Example,
    Reference,
    assert_gradients,
    assert_logprobs,
    example,
    ragged,
)

VALUE = 1e-4
"""Relative to the sum of what each token adds: a ratio carries the rounding of p and q, 4e-6."""


def run(
    client: tinker.TrainingClient,
    rows: Sequence[Example],
    loss_fn: Any,
    config: Mapping[str, float] | None = None,
) -> types.ForwardBackwardOutput:
    """One forward_backward."""
    return client.forward_backward(data(rows), loss_fn, config).result()


# -- against the formula -----------------------------------------------------------------------


def off_policy(reference: Reference, seed: int, *, masked: bool) -> list[Example]:
    """q some way off p, so that about half of the ratios are clipped; advantages of both signs.

    No ratio lies so near a bound that rounding could put it on the other side.
    """
    rng = np.random.default_rng(seed)
    rows = []
    for row in (example(seed * 10 + index, length) for index, length in enumerate((40, 7, 25))):
        p = reference.logprobs(row).detach().numpy()
        ratio = np.exp(rng.normal(0, 0.5, len(p)))
        for bound in (0.5, 0.8, 1.2, 1.5, 4.0):
            ratio[np.abs(ratio - bound) < 1e-3] = 1.0
        advantages = rng.normal(0, 1.5, len(p))
        if masked:
            advantages[: len(p) // 2] = 0.0
        rows.append(row.having(logprobs=p - np.log(ratio), advantages=advantages))
    return rows


OFF_POLICY: list[tuple[str, dict[str, float] | None]] = [
    ("importance_sampling", None),
    ("ppo", None),
    ("ppo", {"clip_low_threshold": 0.5, "clip_high_threshold": 1.5}),
    ("ppo", {"clip_high_threshold": 1.5}),
    ("cispo", None),
    ("cispo", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
    ("dro", None),
    ("dro", {"beta": 0.7}),
]


@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize(("loss_fn", "config"), OFF_POLICY)
def test_off_policy_losses_are_their_formulas(
    bench: Bench,
    learner: tinker.TrainingClient,
    reference: Reference,
    loss_fn: str,
    config: dict[str, float] | None,
    masked: bool,
) -> None:
    rows = off_policy(reference, seed=20 + masked, masked=masked)
    output = run(learner, rows, loss_fn, config)
    expected = reference.loss(rows, loss_fn, config)
    size = sum(float((row.tensor("advantages").abs() * 4).sum()) for row in rows)
    assert output.metrics["loss:sum"] == pytest.approx(expected.item(), rel=VALUE, abs=1e-6 * size)
    for ours, row in zip(logprobs(output), rows, strict=True):
        assert_logprobs(ours, reference.logprobs(row).detach())
    assert_gradients(bench.gradients(learner), reference.gradients(expected))


def test_cross_entropy_takes_any_weights(
    bench: Bench, learner: tinker.TrainingClient, reference: Reference
) -> None:
    rng = np.random.default_rng(22)
    rows = [example(23, 12), *(r.having(weights=rng.normal(0, 2, 9)) for r in [example(24, 9)])]
    rows += ragged(25)
    output = run(learner, rows, "cross_entropy")
    expected = reference.loss(rows, "cross_entropy")
    assert output.metrics["loss:sum"] == pytest.approx(expected.item(), rel=VALUE)
    assert_gradients(bench.gradients(learner), reference.gradients(expected))


def soft(seed: int, length: int, width: int, filled: int) -> Example:
    """[N, K] candidates, of which `filled` a position have a weight; one weight is negative."""
    rng = np.random.default_rng(seed)
    row = example(seed, length)
    targets, weights = np.zeros((length, width), np.int64), np.zeros((length, width), np.float32)
    targets[:, :filled] = rng.integers(3, 500, (length, filled))
    weights[:, :filled] = rng.random((length, filled), np.float32)
    weights[0, 0] = -0.5
    return Example(row.tokens, targets, {"weights": weights})


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_soft_targets(
    bench: Bench, learner: tinker.TrainingClient, reference: Reference, sparse: bool
) -> None:
    """[N, K] in, [N, K] logprobs out; widths may differ within a batch."""
    rows = [soft(30, 6, 24, 2), soft(31, 17, 24, 3), soft(32, 1, 5, 5), soft(33, 8, 1, 1)]
    sent = data(rows)
    if sparse:
        sent = [
            types.Datum(
                model_input=model_input(row.tokens),
                loss_fn_inputs={
                    "target_tokens": torch.as_tensor(row.targets),
                    "weights": torch.as_tensor(row.inputs["weights"]),
                },
            )
            for row in rows
        ]
        assert sent[0].loss_fn_inputs["weights"].sparse_crow_indices is not None
    output = learner.forward_backward(sent, "cross_entropy").result()
    expected = reference.loss(rows, "cross_entropy")
    assert output.metrics["loss:sum"] == pytest.approx(expected.item(), rel=VALUE)
    for ours, row in zip(logprobs(output), rows, strict=True):
        assert ours.shape == row.targets.shape
        assert_logprobs(ours, reference.logprobs(row).detach())
    assert_gradients(bench.gradients(learner), reference.gradients(expected))


def test_soft_and_plain_targets_share_a_batch(
    learner: tinker.TrainingClient, reference: Reference
) -> None:
    rows = [soft(34, 5, 7, 7), example(35, 9), soft(36, 3, 2, 2)]
    output = run(learner, rows, "cross_entropy")
    assert output.metrics["loss:sum"] == pytest.approx(
        reference.loss(rows, "cross_entropy").item(), rel=VALUE
    )
    assert [part.shape for part in logprobs(output)] == [(5, 7), (9,), (3, 2)]


def test_passes_under_several_losses_add_up(
    bench: Bench, learner: tinker.TrainingClient, reference: Reference
) -> None:
    policy, labelled = off_policy(reference, seed=37, masked=False), ragged(38)
    run(learner, policy, "ppo")
    run(learner, labelled, "cross_entropy")
    run(learner, policy, "dro", {"beta": 0.2})
    total = (
        reference.loss(policy, "ppo")
        + reference.loss(labelled, "cross_entropy")
        + reference.loss(policy, "dro", {"beta": 0.2})
    )
    assert_gradients(bench.gradients(learner), reference.gradients(total))


# -- by hand -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ByHand:
    """Five tokens: a token adds `constant + slope * p` to the loss, and `derivative` is d/dp."""

    loss_fn: str
    ratios: tuple[float, ...]
    advantages: tuple[float, ...]
    constant: tuple[float, ...]
    derivative: tuple[float, ...]
    slope: tuple[float, ...] = (0.0,) * 5
    config: Mapping[str, float] = field(default_factory=dict)


LN2 = math.log(2)
BY_HAND = {
    "importance_sampling": ByHand(
        "importance_sampling",
        ratios=(2.0, 0.5, 1.0, 4.0, 0.25),
        advantages=(1.0, -2.0, 3.0, -1.0, 0.0),
        constant=(-2.0, 1.0, -3.0, 4.0, 0.0),
        derivative=(-2.0, 1.0, -3.0, 4.0, 0.0),
    ),
    # Clipped from above, not clipped, not clipped; then the pessimistic side of a negative A.
    "ppo": ByHand(
        "ppo",
        ratios=(2.0, 0.5, 1.1, 2.0, 0.5),
        advantages=(1.0, 1.0, 1.0, -1.0, -2.0),
        constant=(-1.2, -0.5, -1.1, 2.0, 1.6),
        derivative=(0.0, -0.5, -1.1, 2.0, 0.0),
    ),
    "ppo, wide": ByHand(
        "ppo",
        ratios=(2.0, 0.5, 2.9, 4.0, 0.125),
        advantages=(1.0, 1.0, 0.5, 0.5, -1.0),
        constant=(-2.0, -0.5, -1.45, -1.5, 0.25),
        derivative=(-2.0, -0.5, -1.45, 0.0, 0.0),
        config={"clip_low_threshold": 0.25, "clip_high_threshold": 3.0},
    ),
    # The clipped ratio is a weight: also where it clips, p has a gradient.
    "cispo": ByHand(
        "cispo",
        ratios=(8.0, 2.0, 0.01, 8.0, 3.0),
        advantages=(1.0, -1.0, 2.0, -0.5, 0.0),
        constant=(0.0,) * 5,
        slope=(-4.0, 2.0, -0.02, 2.0, 0.0),
        derivative=(-4.0, 2.0, -0.02, 2.0, 0.0),
    ),
    "cispo, narrow": ByHand(
        "cispo",
        ratios=(8.0, 2.0, 0.01, 1.0, 0.5),
        advantages=(1.0, -1.0, 2.0, 3.0, -1.0),
        constant=(0.0,) * 5,
        slope=(-1.2, 1.2, -1.6, -3.0, 0.8),
        derivative=(-1.2, 1.2, -1.6, -3.0, 0.8),
        config={"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    ),
    # -(p A - beta / 2 (p - q)^2), so d/dp = -A + beta ln r; where A is 0 the penalty stays.
    "dro": ByHand(
        "dro",
        ratios=(2.0, 0.5, 1.0, 4.0, 2.0),
        advantages=(1.0, -1.0, 2.0, 0.5, 0.0),
        constant=tuple(0.3 / 2 * (n * LN2) ** 2 for n in (1, -1, 0, 2, 1)),
        slope=(-1.0, 1.0, -2.0, -0.5, 0.0),
        derivative=tuple(
            0.3 * n * LN2 - a
            for n, a in zip((1, -1, 0, 2, 1), (1.0, -1.0, 2.0, 0.5, 0.0), strict=True)
        ),
        config={"beta": 0.3},
    ),
    "dro, default beta 0.05": ByHand(
        "dro",
        ratios=(2.0, 2.0, 2.0, 2.0, 2.0),
        advantages=(0.0,) * 5,
        constant=(0.025 * LN2**2,) * 5,
        derivative=(0.05 * LN2,) * 5,
    ),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_worked_out_by_hand(
    bench: Bench, learner: tinker.TrainingClient, reference: Reference, name: str
) -> None:
    """q is sent so that the ratios are those of the case. d/dp reaches the weights as a plain
    weighted sum of the logprobs does, which is what the gradients are compared with."""
    case, row = BY_HAND[name], example(40, 5)
    p = reference.logprobs(row)
    q = p.detach().numpy() - np.log(np.array(case.ratios))
    sent = row.having(logprobs=q, advantages=np.array(case.advantages))
    output = run(learner, [sent], case.loss_fn, case.config)
    parts = [c + s * x for c, s, x in zip(case.constant, case.slope, p.tolist(), strict=True)]
    assert output.metrics["loss:sum"] == pytest.approx(sum(parts), rel=VALUE, abs=VALUE)
    expected = reference.gradients((torch.tensor(case.derivative) * p).sum())
    assert_gradients(bench.gradients(learner), expected)


def test_cross_entropy_by_hand(learner: tinker.TrainingClient, reference: Reference) -> None:
    row = example(41, 3)
    p = reference.logprobs(row).tolist()
    weighted = row.having(weights=np.array([1.0, 0.0, -2.0]))
    output = run(learner, [weighted], "cross_entropy")
    assert output.metrics["loss:sum"] == pytest.approx(-p[0] + 2 * p[2], rel=VALUE)


# -- extreme ratios ----------------------------------------------------------------------------


@pytest.mark.parametrize("sign", [1.0, -1.0], ids=["good", "bad"])
@pytest.mark.parametrize("distance", [-1e4, -90.0, 90.0, 1e4])
@pytest.mark.parametrize("loss_fn", ["importance_sampling", "ppo", "cispo", "dro"])
def test_extreme_ratios_stay_finite(
    learner: tinker.TrainingClient,
    reference: Reference,
    loss_fn: str,
    distance: float,
    sign: float,
) -> None:
    """exp(90) is past float32. Loss and gradient stay finite; what is clipped is exact."""
    row = example(42, 4)
    p = reference.logprobs(row).detach().numpy()
    sent = row.having(logprobs=p - distance, advantages=np.full(4, sign))
    loss = run(learner, [sent], loss_fn).metrics["loss:sum"]
    metrics = learner.optim_step(types.AdamParams(learning_rate=0.0)).result().metrics
    assert math.isfinite(loss)
    assert metrics is not None
    assert math.isfinite(metrics["grad_norm"])
    high = distance > 0
    if loss_fn == "ppo" and high == (sign > 0):
        assert loss == pytest.approx(-4 * sign * (1.2 if high else 0.8), rel=1e-6)
        assert metrics["grad_norm"] == 0
    elif loss_fn == "cispo":
        assert loss == pytest.approx(-sign * 4.0 * p.sum() if high else 0.0, rel=VALUE)
        assert (metrics["grad_norm"] > 0) == high
    elif loss_fn == "dro":
        expected = -(sign * p - 0.025 * distance**2).sum()
        assert loss == pytest.approx(expected, rel=VALUE)
    elif not high:
        assert loss == pytest.approx(0.0, abs=1e-30)
    else:
        assert loss * -sign > 1e6


# -- forward_backward_custom -------------------------------------------------------------------

CustomLoss = Callable[[list[types.Datum], list[Tensor]], tuple[Tensor, dict[str, float]]]


def squared(rows: list[types.Datum], logprobs: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
    """Not linear in p, and a mean over the batch."""
    loss = torch.stack([(p + 1).square().mean() for p in logprobs]).mean()
    return loss, {"squared:mean": float(loss.detach())}


def preference(rows: list[types.Datum], logprobs: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
    """DPO's shape: pairs of examples against each other."""
    margins = [
        0.1 * (chosen.sum() - rejected.sum())
        for chosen, rejected in zip(logprobs[::2], logprobs[1::2], strict=True)
    ]
    return -torch.nn.functional.logsigmoid(torch.stack(margins)).sum(), {}


def weighted(rows: list[types.Datum], logprobs: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
    """Reads inputs that only the client has."""
    terms = [
        -(row.loss_fn_inputs["advantages"].to_torch() * p.exp()).sum()
        for row, p in zip(rows, logprobs, strict=True)
    ]
    return torch.stack(terms).sum(), {}


@pytest.mark.parametrize("loss", [squared, preference, weighted])
def test_custom_losses(
    bench: Bench, learner: tinker.TrainingClient, reference: Reference, loss: CustomLoss
) -> None:
    rng = np.random.default_rng(43)
    rows = [
        r.having(advantages=rng.normal(0, 1, len(r.targets)))
        for r in (example(44 + n, length) for n, length in enumerate((6, 13, 21, 3)))
    ]
    output = learner.forward_backward_custom(data(rows), loss).result()
    expected, metrics = loss(data(rows), [reference.logprobs(row) for row in rows])
    assert output.metrics["loss:sum"] == pytest.approx(expected.item(), rel=VALUE)
    for name, value in metrics.items():
        assert output.metrics[name] == pytest.approx(value, rel=VALUE)
    assert_gradients(bench.gradients(learner), reference.gradients(expected))


def test_a_custom_loss_over_soft_targets(
    bench: Bench, learner: tinker.TrainingClient, reference: Reference
) -> None:
    """The callable sees [N, K] logprobs: here a distillation from a teacher's distribution."""
    row = soft(48, 7, 3, 3)
    teacher = torch.softmax(torch.randn(7, 3, generator=torch.Generator().manual_seed(0)), -1)

    def distil(rows: list[types.Datum], logprobs: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
        return (teacher * (teacher.log() - logprobs[0])).sum(), {}

    plain = Example(row.tokens, row.targets)
    output = learner.forward_backward_custom([datum(plain)], distil).result()
    expected, _ = distil([], [reference.logprobs(plain)])
    assert output.metrics["loss:sum"] == pytest.approx(expected.item(), rel=VALUE)
    assert_gradients(bench.gradients(learner), reference.gradients(expected))


# -- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss_fn", "config", "said"),
    [
        ("ppo", {"clip_low_threshold": 1.3, "clip_high_threshold": 0.7}, "clip_high_threshold"),
        ("ppo", {"clip_low_threshold": -0.1}, "clip_low_threshold"),
        ("ppo", {"clip_higher_threshold": 1.2}, "clip_higher_threshold"),
        ("cispo", {"beta": 0.1}, "beta"),
        ("dro", {"beta": -1.0}, "beta"),
        ("dro", {"beta": math.nan}, "beta"),
        ("importance_sampling", {"clip_low_threshold": 0.8}, "clip_low_threshold"),
        ("cross_entropy", {"label_smoothing": 0.1}, "label_smoothing"),
    ],
)
def test_settings_out_of_range_or_unknown_are_refused(
    bench: Bench,
    learner: tinker.TrainingClient,
    reference: Reference,
    loss_fn: Any,
    config: dict[str, float],
    said: str,
) -> None:
    """They come back as the user's mistake, name the key, and leave no gradient."""
    rows = off_policy(reference, seed=49, masked=False)
    if loss_fn == "cross_entropy":
        rows = ragged(49)
    with pytest.raises(tinker.RequestFailedError, match=said) as caught:
        run(learner, rows, loss_fn, config)
    assert caught.value.category == types.RequestErrorCategory.User
    assert not any(gradient.any() for gradient in bench.gradients(learner).values())
