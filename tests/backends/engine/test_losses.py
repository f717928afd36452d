"""Locks: the value and gradient of every loss by hand, and what every row of the registry keeps.

p = target logprobs, q = the sampler's, A = advantages, r = exp(p - q), w = weights.
"""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from backends.engine.losses import (
    LOSSES,
    MAX_LOG_RATIO,
    Loss,
    check_config,
    check_datum,
    check_request,
)
from backends.engine.records import Datum

LN2 = math.log(2)


def evaluate(
    name: str, p: list[Any], config: dict[str, float] | None = None, **inputs: list[Any]
) -> tuple[float, list[Any]]:
    """The loss and its gradient with respect to p."""
    leaf = torch.tensor(p, requires_grad=True)
    tensors = {key: torch.tensor(value) for key, value in inputs.items()}
    loss = LOSSES[name].formula(leaf, tensors, LOSSES[name].settings(config or {}))
    loss.backward()
    assert leaf.grad is not None
    return loss.item(), leaf.grad.tolist()


def test_cross_entropy() -> None:
    loss, grad = evaluate("cross_entropy", [-1.0, -2.0, -4.0], weights=[1.0, 0.5, -0.25])
    assert loss == pytest.approx(1 + 1 - 1)
    assert grad == [-1.0, -0.5, 0.25]


def test_cross_entropy_with_soft_targets() -> None:
    loss, grad = evaluate(
        "cross_entropy", [[-1.0, -3.0], [-2.0, -5.0]], weights=[[0.5, 0.5], [1.0, 0.0]]
    )
    assert loss == pytest.approx(0.5 + 1.5 + 2)
    assert grad == [[-0.5, -0.5], [-1.0, 0.0]]


def test_importance_sampling() -> None:
    """r = 2, 1/2, 1; the gradient of -r A is -r A."""
    loss, grad = evaluate(
        "importance_sampling",
        [-1.0, -2.0, -3.0],
        logprobs=[-1.0 - LN2, -2.0 + LN2, -3.0],
        advantages=[3.0, -4.0, 5.0],
    )
    assert loss == pytest.approx(-(6 - 2 + 5))
    assert grad == pytest.approx([-6, 2, -5])


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "grad"),
    [
        (1.1, 2.0, -2.2, -2.2),  # inside: -r A
        (1.1, -2.0, 2.2, 2.2),
        (2.0, 2.0, -2.4, 0.0),  # above, better: held at 1.2 A
        (2.0, -2.0, 4.0, 4.0),  # above, worse: not held
        (0.5, 2.0, -1.0, -1.0),  # below, better: not held
        (0.5, -2.0, 1.6, 0.0),  # below, worse: held at 0.8 A
    ],
)
def test_ppo(ratio: float, advantage: float, loss: float, grad: float) -> None:
    value, grads = evaluate(
        "ppo", [-1.0], logprobs=[-1.0 - math.log(ratio)], advantages=[advantage]
    )
    assert value == pytest.approx(loss)
    assert grads == pytest.approx([grad])


def test_ppo_takes_its_thresholds_as_bounds_on_the_ratio() -> None:
    config = {"clip_low_threshold": 0.25, "clip_high_threshold": 1.5}
    value, grads = evaluate("ppo", [-1.0], config, logprobs=[-1.0 - LN2], advantages=[2.0])
    assert (value, grads) == (pytest.approx(-3.0), [0.0])


@pytest.mark.parametrize(("ratio", "held"), [(2.0, 2.0), (8.0, 4.0), (0.01, 0.01)])
def test_cispo(ratio: float, held: float) -> None:
    """Value -min(r, 4) p A; the gradient treats the ratio as a number: -min(r, 4) A."""
    value, grads = evaluate("cispo", [-3.0], logprobs=[-3.0 - math.log(ratio)], advantages=[2.0])
    assert value == pytest.approx(-held * -3.0 * 2.0)
    assert grads == pytest.approx([-held * 2.0])


def test_dro() -> None:
    """With p - q = 2: -(p A - beta/2 x 4), and the gradient -A + 2 beta."""
    value, grads = evaluate("dro", [-1.0], logprobs=[-3.0], advantages=[3.0])
    assert value == pytest.approx(3.0 + 0.1)
    assert grads == pytest.approx([-3.0 + 0.1])
    value, grads = evaluate("dro", [-1.0], {"beta": 0.5}, logprobs=[-3.0], advantages=[0.0])
    assert (value, grads) == (pytest.approx(1.0), pytest.approx([1.0]))


# What every row keeps


def random_inputs(name: str, n: int, seed: int) -> dict[str, list[float]]:
    rng = np.random.default_rng(seed)
    return {row.name: rng.normal(-1, 1, n).tolist() for row in LOSSES[name].inputs}


@pytest.mark.parametrize("name", LOSSES)
def test_reduction_is_the_sum_over_positions(name: str) -> None:
    p = np.random.default_rng(1).normal(-2, 1, 5).tolist()
    inputs = random_inputs(name, 5, 2)
    whole, grads = evaluate(name, p, **inputs)
    parts = [
        evaluate(name, p[i : i + 1], **{k: v[i : i + 1] for k, v in inputs.items()})
        for i in range(5)
    ]
    assert whole == pytest.approx(sum(value for value, _ in parts), rel=1e-5)
    assert grads == pytest.approx([grad[0] for _, grad in parts], rel=1e-5)


@pytest.mark.parametrize("name", sorted(LOSSES.keys() - {"cispo"}))
def test_gradient_is_that_of_the_value(name: str) -> None:
    """Central differences in float64; not for cispo, which stops a gradient on purpose."""
    inputs = {k: torch.tensor(v, dtype=torch.float64) for k, v in random_inputs(name, 4, 3).items()}
    p = torch.tensor([-1.0, -2.0, -0.5, -3.0], dtype=torch.float64, requires_grad=True)
    loss = LOSSES[name]
    assert torch.autograd.gradcheck(lambda x: loss.formula(x, inputs, loss.settings({})), (p,))


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize(("p", "q"), [(-1e-6, -1000.0), (-1000.0, -1e-6), (-80.0, -0.1)])
def test_finite_at_extreme_ratios(name: str, advantage: float, p: float, q: float) -> None:
    given = {"logprobs": [q], "advantages": [advantage], "weights": [advantage]}
    inputs = {row.name: given[row.name] for row in LOSSES[name].inputs}
    value, grads = evaluate(name, [p], **inputs)
    assert math.isfinite(value)
    assert math.isfinite(grads[0])


def test_ratios_are_exact_up_to_the_limit() -> None:
    high = MAX_LOG_RATIO - 1
    value, grads = evaluate("importance_sampling", [-1.0], logprobs=[-1.0 - high], advantages=[1.0])
    assert value == pytest.approx(-math.exp(high), rel=1e-5)
    assert grads == pytest.approx([-math.exp(high)], rel=1e-5)


@pytest.mark.parametrize("name", [name for name, row in LOSSES.items() if row.silent_at_zero])
def test_silent_positions_add_nothing(name: str) -> None:
    inputs = random_inputs(name, 3, 4)
    silent = LOSSES[name].silent_at_zero
    assert silent is not None
    inputs[silent][1] = 0.0
    p = [-1.0, -2.0, -3.0]
    value, grads = evaluate(name, p, **inputs)
    rest, _ = evaluate(name, [p[0], p[2]], **{k: [v[0], v[2]] for k, v in inputs.items()})
    assert value == pytest.approx(rest, rel=1e-6)
    assert grads[1] == 0


@pytest.mark.parametrize("name", LOSSES)
def test_defaults_pass_their_own_check(name: str) -> None:
    assert check_config(name, LOSSES[name].settings({})) is None


# Checks

LIMITS = {"vocab_size": 100, "max_length": 8}
RIGHT: dict[str, Any] = {
    "target_tokens": np.array([1, 2, 3]),
    "logprobs": np.zeros(3, np.float32),
    "advantages": np.zeros(3, np.float32),
}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"logprobs": None}, "data[4].loss_fn_inputs.logprobs: is missing; ppo needs it"),
        ({"target_tokens": None}, "data[4].loss_fn_inputs.target_tokens: is missing"),
        (
            {"weights": np.ones(3)},
            "data[4].loss_fn_inputs.weights: ppo takes no such input; leave it out (it takes "
            "target_tokens, logprobs, advantages)",
        ),
        (
            {"advantages": np.ones(4)},
            "data[4].loss_fn_inputs.advantages: has shape [4] but target_tokens has [3]; "
            "give one value for each target",
        ),
        (
            {"advantages": np.array([0, np.inf, 0])},
            "data[4].loss_fn_inputs.advantages: value 1 is inf, which is not finite",
        ),
        ({"advantages": np.array([1e300, 0, 0])}, "value 0 is 1e+300, which is not finite in"),
        ({"advantages": np.array(["a", "b", "c"])}, "advantages: holds <U1 values; give numbers"),
        (
            {"target_tokens": np.array([1, 2])},
            "target_tokens: has 2 positions but model_input has 3 tokens; give one target for each",
        ),
        ({"target_tokens": np.array([1, -1, 3])}, "token id -1 at position 1 is outside the"),
        ({"target_tokens": np.array([1, 2, 100])}, "token id 100 at position 2 is outside the"),
        ({"target_tokens": np.ones(3)}, "target_tokens: holds float64 values; token ids are"),
        ({"target_tokens": np.ones((3, 2), int)}, "target_tokens: has shape [3, 2]; ppo takes [N]"),
    ],
)
def test_a_wrong_input_is_named(change: dict[str, Any], said: str) -> None:
    inputs = {key: value for key, value in {**RIGHT, **change}.items() if value is not None}
    problem = check_datum("ppo", Datum(np.array([4, 5, 6]), inputs), index=4, **LIMITS)
    assert problem is not None
    assert said in problem


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (np.array([], int), "data[0].model_input: holds no tokens"),
        (np.arange(9), "data[0].model_input: has 9 tokens but the context holds 8; shorten"),
        (np.array([1, 100]), "data[0].model_input: token id 100 at position 1"),
    ],
)
def test_wrong_tokens_are_named(tokens: Any, said: str) -> None:
    datum = Datum(tokens, {"target_tokens": np.zeros_like(tokens)})
    problem = check_datum("cross_entropy", datum, index=0, **LIMITS)
    assert problem is not None
    assert said in problem


@pytest.mark.parametrize(
    ("loss_fn", "config", "said"),
    [
        ("gspo", {}, "loss_fn: there is no loss 'gspo'; use one of cross_entropy, importance"),
        ("dro", {"gamma": 1.0}, "loss_fn_config.gamma: dro has no such key; use one of beta"),
        ("cross_entropy", {"beta": 1.0}, "cross_entropy has no such key; leave the config empty"),
        (
            "dro",
            {"beta": -1.0},
            "loss_fn_config.beta: is -1.0; give a number from 0 to 3.40282e+38",
        ),
        ("dro", {"beta": 1e39}, "loss_fn_config.beta: is 1e+39; give a number from 0 to 3.40282e"),
        ("dro", {"beta": math.nan}, "loss_fn_config.beta: is nan"),
        ("dro", {"beta": "x"}, "loss_fn_config.beta: is 'x', which is not a number"),
        ("ppo", {"clip_high_threshold": 0.5}, "0.5 is below clip_low_threshold 0.8; raise it or"),
    ],
)
def test_a_wrong_config_is_named(loss_fn: str, config: dict[str, object], said: str) -> None:
    problem = check_config(loss_fn, config)
    assert problem is not None
    assert said in problem


def test_right_requests_pass() -> None:
    good = Datum(np.array([4, 5, 6]), RIGHT)
    assert check_request("ppo", [good], {"clip_low_threshold": 1.0}, **LIMITS) is None
    soft = {"target_tokens": np.ones((3, 2), int), "weights": np.ones((3, 2), int)}
    plain = {"target_tokens": np.array([0, 99, 1])}
    data = [Datum(np.array([4, 5, 6]), inputs) for inputs in (soft, plain)]
    assert check_request("cross_entropy", data, **LIMITS) is None


def test_a_request_without_datums_is_refused() -> None:
    problem = check_request("ppo", [], **LIMITS)
    assert problem is not None
    assert problem.startswith("data: holds no datum")


def test_importing_the_registry_does_not_import_torch() -> None:
    code = "import sys, backends.engine.losses; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_more_candidates_than_tokens_are_refused() -> None:
    """They would be laid out for every position of a micro-batch."""
    many = Datum(np.array([4]), {"target_tokens": np.ones((1, 101), int)})
    problem = check_datum("cross_entropy", many, index=0, **LIMITS)
    assert problem is not None
    assert "target_tokens: has 101 candidates a position, more than the 100 tokens" in problem


def test_long_names_are_shown_in_part() -> None:
    long = "x" * 10_000
    inputs = {"target_tokens": np.ones(1, int), long: np.ones(1)}
    for problem in (
        check_config(long, {}),
        check_config("ppo", {long: 1.0}),
        check_config("dro", {"beta": long}),
        check_datum("ppo", Datum(np.array([4]), inputs), index=0, **LIMITS),
    ):
        assert problem is not None
        assert len(problem) < 300


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_the_page_has_every_loss_with_its_inputs_and_defaults(loss: Loss) -> None:
    page = (Path(__file__).parents[3] / "docs" / "engine.md").read_text()
    row = next(line for line in page.splitlines() if line.startswith(f"| `{loss.name}` |"))
    for each in loss.inputs:
        assert f"`{each.name}`" in row
    for option in loss.options:
        assert f"`{option.name}` ({option.default:g})" in row
