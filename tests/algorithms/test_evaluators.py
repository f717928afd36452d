"""Held-out scores: prompts, scoring, cadence, errors."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from pydantic import BaseModel
from tinker import types as tinker_types

from algorithms.evaluators import SAMPLES_IN_FLIGHT, PreparedEvaluation, evaluate, prepare
from algorithms.experiment import EvaluationSpec
from algorithms.rewards.verifiers import VERIFIERS, ExactMatch, ExactMatchConfig, VerifierConfig
from backends.errors import TransientError, UserError
from backends.mock import MockSamplingClient, MockState, MockTokenizer
from tests.algorithms.samples import ECHOES, chat

TOKENIZER = MockTokenizer()


def spec(*rows: dict[str, Any], **fields: Any) -> EvaluationSpec:
    base = {"name": "held", "data": {"kind": "rows", "rows": list(rows) or ECHOES}}
    return EvaluationSpec.model_validate(base | fields)


def trained() -> MockSamplingClient:
    fresh = MockState.fresh(0)
    return MockSamplingClient(MockState(fresh.weights, fresh.weights, fresh.weights, 1))


def prompt_of(prepared: PreparedEvaluation, index: int = 0) -> str:
    return TOKENIZER.decode(prepared.questions[index].tokens)


# --- preparing ----------------------------------------------------------------------------------


def test_the_prompt_is_all_before_the_last_answer() -> None:
    prepared = prepare(spec(chat("a", "b", "c", "d")), TOKENIZER)
    assert prompt_of(prepared) == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
        "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
    )
    assert prepared.questions[0].expected == "d"
    assert prepared.questions[0].prompt == "c"
    assert prepared.stop == [TOKENIZER.eos_token_id]


def test_a_system_prompt_goes_before_rows_that_have_none() -> None:
    own = {"messages": [{"role": "system", "content": "mine"}, *chat("a", "b")["messages"]]}
    prepared = prepare(spec(chat("a", "b"), own, system_prompt="ours"), TOKENIZER)
    assert prompt_of(prepared).startswith("<|im_start|>system\nours<|im_end|>\n<|im_start|>user")
    assert prompt_of(prepared, 1).startswith("<|im_start|>system\nmine<|im_end|>\n<|im_start|>user")


def test_a_plain_prompt_is_taken_as_it_is() -> None:
    prepared = prepare(spec({"prompt": "1+1=", "completion": "2"}), TOKENIZER)
    assert prompt_of(prepared) == "1+1="
    with pytest.raises(UserError, match="system_prompt"):
        prepare(spec({"prompt": "1+1=", "completion": "2"}, system_prompt="x"), TOKENIZER)


def test_a_limit_takes_the_first_rows() -> None:
    assert [q.expected for q in prepare(spec(limit=2), TOKENIZER).questions] == ["one", "two"]


def test_bad_rows_are_all_named() -> None:
    with pytest.raises(UserError) as caught:
        prepare(spec(chat("a"), chat("a", "b"), {"x": 1}), TOKENIZER)
    assert [problem.where for problem in caught.value.problems] == [
        "evaluations.held.data.rows[0]",
        "evaluations.held.data.rows[2]",
    ]


def test_it_is_due_before_at_its_marks_and_at_the_end() -> None:
    def due(**fields: Any) -> list[int]:
        prepared = prepare(spec(**fields), TOKENIZER)
        return [step for step in range(11) if prepared.is_due(step, 10)]

    assert due(every=4) == [0, 4, 8, 10]
    assert due(every=5) == [0, 5, 10]
    assert due(every=4, before=False) == [4, 8, 10]
    assert due() == [0, 10]


# --- scoring ------------------------------------------------------------------------------------


async def test_scores_and_samples() -> None:
    rows = [*ECHOES, chat("four", "five")]
    result = await evaluate(prepare(spec(*rows), TOKENIZER), trained(), step=7)
    assert (result.name, result.step, result.score) == ("held", 7, 0.75)
    assert result.metrics == {"reward/mean": 0.75, "n": 4.0, "answers_cut": 0.0}
    assert [sample.reward for sample in result.samples] == [1.0, 1.0, 1.0, 0.0]
    last = result.samples[-1]
    assert (last.prompt, last.completion, last.expected) == ("four", "four", "five")


async def test_answers_cut_off_are_counted() -> None:
    result = await evaluate(prepare(spec(max_tokens=3), TOKENIZER), trained(), 0)
    assert result.metrics["answers_cut"] == 1.0
    assert [sample.completion for sample in result.samples] == ["one", "two", "thr"]
    assert result.score == pytest.approx(2 / 3)


class Recorder(MockSamplingClient):
    """Answers late, and writes down how it was asked."""

    def __init__(self) -> None:
        super().__init__(MockState.fresh(0))
        self.asked: list[tinker_types.SamplingParams] = []
        self.under_way = self.most = 0

    def sample(
        self, prompt: Any, num_samples: int, sampling_params: tinker_types.SamplingParams
    ) -> Awaitable[Any]:
        self.asked.append(sampling_params)
        answer = super().sample(prompt, num_samples, sampling_params)

        async def late() -> Any:
            self.under_way += 1
            self.most = max(self.most, self.under_way)
            await asyncio.sleep(0.01)
            self.under_way -= 1
            return await answer

        return late()


async def test_prompts_go_out_together_but_not_without_bound() -> None:
    client = Recorder()
    rows = [chat(str(n), "x") for n in range(SAMPLES_IN_FLIGHT + 50)]
    prepared = prepare(spec(*rows, max_tokens=9, temperature=0.5), TOKENIZER)
    result = await evaluate(prepared, client, 0)
    assert client.most == SAMPLES_IN_FLIGHT
    assert len(result.samples) == len(client.asked) == SAMPLES_IN_FLIGHT + 50
    params = client.asked[0]
    assert (params.max_tokens, params.temperature, params.stop) == (9, 0.5, [257])


@pytest.mark.parametrize(
    ("config", "completion", "reward"),
    [
        ({}, " 46\n", 1.0),
        ({}, "It is 46.", 0.0),
        ({}, "Ab", 0.0),
        ({"strip": False}, " 46", 0.0),
        ({"strip": False}, "46", 1.0),
        ({}, "<think>\n\n</think>\n\n46", 1.0),
        ({"drop_reasoning": False}, "<think>\n\n</think>\n\n46", 0.0),
    ],
)
def test_exact_match(config: dict[str, bool], completion: str, reward: float) -> None:
    verifier = ExactMatch(ExactMatchConfig.model_validate(config))
    assert verifier(chat("q", "46"), completion) == reward


def test_exact_match_without_case() -> None:
    assert ExactMatch(ExactMatchConfig(ignore_case=True))(chat("q", "STRASSE"), "straße") == 1.0


# --- errors -------------------------------------------------------------------------------------


class Picky:
    """Cannot judge the second row."""

    Config: ClassVar[type[BaseModel]] = VerifierConfig

    def __init__(self, cfg: VerifierConfig) -> None:
        pass

    async def __call__(self, row: dict[str, Any], completion: str) -> float:
        if row == ECHOES[1]:
            raise ZeroDivisionError("nothing to divide")
        return math.nan if row == ECHOES[2] else 1.0


@pytest.fixture
def picky() -> Any:
    VERIFIERS.register("picky", Picky)
    yield
    VERIFIERS.forget("picky")


@pytest.mark.usefixtures("picky")
async def test_a_verifier_that_raises_is_an_error_and_never_a_zero() -> None:
    prepared = prepare(spec(verifier={"kind": "picky"}), TOKENIZER)
    with pytest.raises(UserError) as caught:
        await evaluate(prepared, trained(), 0)
    (problem,) = caught.value.problems
    assert problem.where == "evaluations.held.verifier"
    assert "picky raised ZeroDivisionError: nothing to divide" in problem.what
    assert "evaluations.held.data.rows[1]" in problem.what
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.usefixtures("picky")
async def test_a_reward_that_is_no_number_is_an_error() -> None:
    only = prepare(spec(ECHOES[2], verifier={"kind": "picky"}), TOKENIZER)
    with pytest.raises(UserError, match="picky gave nan"):
        await evaluate(only, trained(), 0)
    fine = prepare(spec(ECHOES[0], verifier={"kind": "picky"}), TOKENIZER)
    assert (await evaluate(fine, trained(), 0)).score == 1.0


async def test_what_the_client_raises_passes_through() -> None:
    class Away(MockSamplingClient):
        def sample(self, *args: Any) -> Any:
            raise TransientError("busy")

    with pytest.raises(TransientError, match="busy"):
        await evaluate(prepare(spec(), TOKENIZER), Away(MockState.fresh(0)), 0)


def test_a_missing_file_is_named_with_its_evaluation(tmp_path: Path) -> None:
    wanted = EvaluationSpec.model_validate(
        {"name": "held", "data": {"kind": "jsonl", "path": str(tmp_path / "no.jsonl")}}
    )
    with pytest.raises(UserError) as caught:
        prepare(wanted, TOKENIZER)
    assert caught.value.problems[0].where == "evaluations.held.data.path"
