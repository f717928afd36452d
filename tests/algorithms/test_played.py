"""Evaluations that are played in an environment: who wins, in how many turns, by the same seeds."""

from __future__ import annotations

from typing import Any

import pytest

from algorithms.check import check_experiment
from algorithms.evaluators import evaluate, prepare
from algorithms.experiment import EvaluationSpec
from algorithms.rollouts.played import Played
from tests.algorithms.rollout_parts import Scripted
from tests.algorithms.samples import ROWS, byte_tokenizer, document

NUMBERS = [{"number": number} for number in (1, 2, 3)]
END = "<|im_end|>"


def spec(**changes: Any) -> EvaluationSpec:
    base: dict[str, Any] = {
        "name": "games",
        "data": {"kind": "rows", "rows": NUMBERS},
        "environment": {"kind": "guess_number"},
        "max_turns": 2,
        "max_tokens": 20,
    }
    return EvaluationSpec.model_validate(base | changes)


def listener(prompt: str, index: int) -> str:
    """Guesses 2, and then what the hint says."""
    if "Higher." in prompt:
        return f"3{END}"
    return f"1{END}" if "Lower." in prompt else f"2{END}"


def stubborn(prompt: str, index: int) -> str:
    """Always 2."""
    return f"2{END}"


async def test_a_player_who_listens_wins_and_one_who_does_not_wins_once_in_three() -> None:
    tokenizer = byte_tokenizer()
    prepared = prepare(spec(), tokenizer)
    assert isinstance(prepared, Played)
    good = await evaluate(prepared, Scripted(tokenizer, listener), 4)
    assert (good.name, good.step, good.score) == ("games", 4, 1.0)
    assert good.metrics["turns"] == pytest.approx(5 / 3)
    assert good.metrics["env/guesses"] == pytest.approx(5 / 3)
    assert [sample.reward for sample in good.samples] == [1.0, 1.0, 1.0]
    first: Any = good.samples[0]
    assert first.prompt == "Guess my number from 1 to 3."
    assert first.completion == "2\nLower.\n1"
    assert first.expected == '{"number": 1}'
    bad = await evaluate(prepared, Scripted(tokenizer, stubborn), 4)
    assert bad.score == pytest.approx(1 / 3)


async def test_several_games_of_a_row_give_pass_at_k() -> None:
    tokenizer = byte_tokenizer()

    def say(prompt: str, index: int) -> str:
        return f"{1 + index % 3}{END}"

    drawn = spec(num_samples=3, temperature=1.0, pass_at=[1, 3], max_turns=1)
    result = await evaluate(prepare(drawn, tokenizer), Scripted(tokenizer, say), 0)
    assert result.metrics["pass@1"] == pytest.approx(1 / 3)
    assert result.metrics["pass@3"] == 1.0
    assert result.metrics["pass^3"] == 0.0


async def test_the_experiments_seed_decides_what_is_drawn() -> None:
    tokenizer = byte_tokenizer()

    async def seeds(seed: int) -> list[int | None]:
        client = Scripted(tokenizer, stubborn)
        await evaluate(prepare(spec(), tokenizer, seed), client, 0)
        return [params.seed for _, _, params in client.requests]

    assert await seeds(1) == await seeds(1) != await seeds(2)
    one, two = (prepare(spec(), tokenizer, seed).fingerprint for seed in (1, 2))
    assert one != two


def test_rows_are_what_the_environment_needs() -> None:
    evaluation = spec(data={"kind": "rows", "rows": ROWS}).model_dump(mode="json")
    _, problems = check_experiment(document(evaluations=[evaluation]))
    assert "has no number to guess" in problems[0].what


def test_an_nll_is_not_played() -> None:
    with pytest.raises(ValueError, match="environment says nothing to kind: nll"):
        spec(kind="nll", max_turns=8, max_tokens=256)
