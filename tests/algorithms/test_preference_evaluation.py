"""Held-out preference: which of two answers is likelier to the weights, by hand and in a run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from algorithms.check import check_experiment
from algorithms.evaluators import ScoredPair, evaluate, prepare, read_sample
from algorithms.experiment import EvaluationSpec, load_experiment
from algorithms.rewards.metrics import DIRECTIONS
from backends.errors import UserError
from backends.mock import MockSamplingClient, MockState, MockTokenizer
from tests.algorithms.samples import chat, document, experiment

ROOT = Path(__file__).parents[2]
WEIGHTS = np.asarray([0.1, 0.9, 0.3, 0.4, 1.0, 0.2, 0.6, 0.7])
STATE = MockState(WEIGHTS, WEIGHTS, WEIGHTS, 1)
PAIRS = [
    {"prompt": "first", "chosen": "a", "rejected": "aa"},  # fewer tokens of a kind are likelier
    {"prompt": "second", "chosen": "bb", "rejected": "b"},
    {"chosen": chat("third", "ad")["messages"], "rejected": chat("third", "da")["messages"]},
]


def spec(rows: list[dict[str, Any]] = PAIRS, **changes: Any) -> EvaluationSpec:
    fields = {"name": "held", "kind": "preference", "data": {"kind": "rows", "rows": rows}}
    return experiment(evaluations=[fields | changes]).evaluations[0]


def logprob(text: str) -> float:
    """Of an answer and the token that ends it."""
    return math.fsum(STATE.logprobs(np.asarray([*text.encode(), 257])).tolist())


async def test_the_chosen_answer_has_to_be_likelier() -> None:
    result = await evaluate(prepare(spec(), MockTokenizer()), MockSamplingClient(STATE), 7)
    margins = [logprob("a") - logprob("aa"), logprob("bb") - logprob("b"), 0.0]
    assert [pair.margin for pair in result.samples] == pytest.approx(margins, abs=1e-6)  # type: ignore[union-attr]
    assert result.metrics == pytest.approx(
        {"accuracy": 1.5 / 3, "margin": sum(margins) / 3, "n": 3.0, "rows_cut": 0.0}, abs=1e-6
    )
    assert (result.score, result.step) == (0.5, 7)  # a tie is half a hit
    assert result.samples[0] == ScoredPair("first", "a", "aa", result.samples[0].margin)  # type: ignore[union-attr]
    assert DIRECTIONS[spec().score_metric] == "max"


async def test_answers_may_be_compared_per_token() -> None:
    rows = PAIRS[:2]
    prepared = prepare(spec(rows, length_normalized=True), MockTokenizer())
    result = await evaluate(prepared, MockSamplingClient(STATE), 0)
    margins = [logprob("a") / 2 - logprob("aa") / 3, logprob("bb") / 3 - logprob("b") / 2]
    assert [pair.margin for pair in result.samples] == pytest.approx(margins, abs=1e-6)  # type: ignore[union-attr]
    assert prepared.fingerprint != prepare(spec(rows), MockTokenizer()).fingerprint


def test_a_sample_is_read_back() -> None:
    pair = ScoredPair("p", "c", "r", -0.5)
    fields = {"prompt": "p", "chosen": "c", "rejected": "r", "margin": -0.5}
    assert read_sample(fields) == pair


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"verifier": {"kind": "exact_match"}}, "verifier says nothing to kind: preference"),
        ({"max_tokens": 3}, "max_tokens says nothing to kind: preference"),
        ({"supervise": "last_assistant"}, "supervise says nothing to kind: preference"),
        ({"kind": "nll", "length_normalized": True}, "length_normalized says nothing to kind: nll"),
    ],
)
def test_fields_of_other_kinds_are_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        spec(**fields)


def test_rows_that_are_no_pairs_are_named_before_anything_starts() -> None:
    evaluation = {"name": "held", "kind": "preference"}
    evaluation["data"] = {"kind": "rows", "rows": [*PAIRS, chat("a", "b")]}  # type: ignore[assignment]
    _, problems = check_experiment(document(evaluations=[evaluation]))
    assert [problem.where for problem in problems] == ["evaluations[0].data.rows[3]"]
    assert "has no chosen and no rejected" in problems[0].what


def test_the_shipped_example_is_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    loaded = load_experiment("examples/dpo_arithmetic.yaml")
    changes = ["model.init_from=null", "store=memory://dpo"]
    _, problems = check_experiment("examples/dpo_arithmetic.yaml", changes)
    assert problems == []
    trained = {row["prompt"][0]["content"] for row in loaded.data.load().rows}
    held = {row["prompt"][0]["content"] for row in loaded.evaluations[0].data.load().rows}
    assert (len(trained), len(held), trained & held) == (1600, 200, set())
