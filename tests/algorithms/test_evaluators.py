"""Held-out scores: prompts, scoring, cadence, errors."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Awaitable
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import pytest_asyncio
from pydantic import BaseModel
from tinker import types as tinker_types

from algorithms.base import RunContext
from algorithms.evaluators import (
    REQUESTS_IN_FLIGHT,
    Benchmark,
    EvaluationResult,
    HeldOutNLL,
    Sample,
    ScoredRow,
    evaluate,
    prepare,
    read_result,
)
from algorithms.experiment import EvaluationSpec, parse_experiment
from algorithms.rewards.verifiers import VERIFIERS, ExactMatch, ExactMatchConfig, VerifierConfig
from backends.base import Backend, ModelSpec
from backends.embedded import EmbeddedKind, EmbeddedParams
from backends.errors import TransientError, UserError
from backends.mock import MockSamplingClient, MockState, MockTokenizer
from tests.algorithms.samples import ECHOES, MODEL, chat, document

TOKENIZER = MockTokenizer()


def spec(*rows: dict[str, Any], **fields: Any) -> EvaluationSpec:
    base = {"name": "held", "data": {"kind": "rows", "rows": list(rows) or ECHOES}}
    return EvaluationSpec.model_validate(base | fields)


def trained() -> MockSamplingClient:
    fresh = MockState.fresh(0)
    return MockSamplingClient(MockState(fresh.weights, fresh.weights, fresh.weights, 1))


def benchmark(*rows: dict[str, Any], **fields: Any) -> Benchmark:
    prepared = prepare(spec(*rows, **fields), TOKENIZER)
    assert isinstance(prepared, Benchmark)
    return prepared


def rewards(result: EvaluationResult) -> list[float]:
    return [sample.reward for sample in result.samples if isinstance(sample, Sample)]


def completions(result: EvaluationResult) -> list[str]:
    return [sample.completion for sample in result.samples if isinstance(sample, Sample)]


def prompt_of(prepared: Benchmark, index: int = 0) -> str:
    return TOKENIZER.decode(prepared.questions[index].tokens)


# --- preparing ----------------------------------------------------------------------------------


def test_the_prompt_is_all_before_the_last_answer() -> None:
    prepared = benchmark(chat("a", "b", "c", "d"))
    assert prompt_of(prepared) == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
        "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
    )
    assert prepared.questions[0].expected == "d"
    assert prepared.questions[0].prompt == "c"
    assert prepared.stop == [TOKENIZER.eos_token_id]


def test_a_system_prompt_goes_before_rows_that_have_none() -> None:
    own = {"messages": [{"role": "system", "content": "mine"}, *chat("a", "b")["messages"]]}
    prepared = benchmark(chat("a", "b"), own, system_prompt="ours")
    assert prompt_of(prepared).startswith("<|im_start|>system\nours<|im_end|>\n<|im_start|>user")
    assert prompt_of(prepared, 1).startswith("<|im_start|>system\nmine<|im_end|>\n<|im_start|>user")


def test_a_plain_prompt_is_taken_as_it_is() -> None:
    prepared = benchmark({"prompt": "1+1=", "completion": "2"})
    assert prompt_of(prepared) == "1+1="
    with pytest.raises(UserError, match="system_prompt"):
        prepare(spec({"prompt": "1+1=", "completion": "2"}, system_prompt="x"), TOKENIZER)


def test_a_limit_takes_the_first_rows() -> None:
    assert [q.expected for q in benchmark(limit=2).questions] == ["one", "two"]


def test_bad_rows_are_all_named() -> None:
    with pytest.raises(UserError) as caught:
        prepare(spec(chat("a"), chat("a", "b"), {"x": 1}), TOKENIZER)
    assert [problem.where for problem in caught.value.problems] == [
        "evaluations.held.data.rows[0]",
        "evaluations.held.data.rows[2]",
    ]


def test_it_is_due_before_at_its_marks_and_at_the_end() -> None:
    def due(**fields: Any) -> list[int]:
        prepared = benchmark(**fields)
        return [step for step in range(11) if prepared.is_due(step, 10)]

    assert due(every=4) == [0, 4, 8, 10]
    assert due(every=5) == [0, 5, 10]
    assert due(every=4, before=False) == [4, 8, 10]
    assert due() == [0, 10]


# --- what is refused when it is built -----------------------------------------------------------

HELD = {"name": "held", "data": {"kind": "rows", "rows": ECHOES}}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_samples": 4}, "num_samples is 4 at temperature 0"),
        ({"num_samples": 4, "temperature": 1, "pass_at": [1, 8]}, "pass_at asks for 8 of 4"),
        ({"pass_at": [1, 1]}, "names a k twice"),
        ({"pass_at": [0]}, "greater than or equal to 1"),
        ({"kind": "nll", "temperature": 1}, "temperature says nothing to kind: nll"),
        ({"kind": "nll", "pass_at": [1]}, "pass_at says nothing to kind: nll"),
        ({"kind": "nll", "system_prompt": "x"}, "system_prompt says nothing to kind: nll"),
        ({"kind": "nll", "verifier": {"kind": "exact_match"}}, "verifier says nothing to"),
        ({"supervise": "last_assistant"}, "supervise says nothing to kind: benchmark"),
        ({"verifier": None}, "a benchmark needs a verifier"),
        ({"kind": "nnl"}, "'nnl' is not known"),
    ],
)
def test_evaluations_that_make_no_sense_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_experiment(document(evaluations=[HELD | fields]))
    (problem,) = caught.value.problems
    assert problem.where.startswith("evaluations[0]")
    assert words in f"{problem.what} {problem.remedy}"


def test_a_resolved_evaluation_can_be_read_again() -> None:
    drawn = {"name": "drawn", "num_samples": 4, "temperature": 1.0, "pass_at": [1, 4]}
    known = parse_experiment(
        document(evaluations=[HELD, HELD | {"name": "nll", "kind": "nll"}, HELD | drawn])
    )
    assert parse_experiment(known.model_dump(mode="json")) == known
    first, second, _ = known.evaluations
    assert (first.score_metric, first.role, second.score_metric) == (
        "reward/mean",
        "validation",
        "nll",
    )


@pytest.mark.parametrize(
    ("best", "mode"),
    [
        ({"metric": "held"}, "max"),
        ({"metric": "nll"}, "min"),
        ({"metric": "nll", "mode": "max"}, "max"),
        ({"metric": "train_mean_nll"}, "min"),
        ({"metric": "reward/mean"}, "max"),
        ({"metric": "optim/grad_norm", "mode": "min"}, "min"),
    ],
)
def test_the_best_checkpoint_is_chosen_as_its_metric_says(best: dict[str, str], mode: str) -> None:
    often = {"every": 2}
    known = parse_experiment(
        document(
            evaluations=[HELD | often, HELD | often | {"name": "nll", "kind": "nll"}],
            checkpoints={"keep_last": 2, "keep_best": best},
        )
    )
    assert known.checkpoints.keep_best is not None
    assert known.checkpoints.keep_best.mode == mode


@pytest.mark.parametrize(
    ("metric", "words"),
    [
        ("final", "'final' is a test evaluation, and everything is chosen on validation"),
        ("hold", "'hold' is no evaluation of this experiment (they are: held)"),
        ("held", "keep_best looks at held, which is evaluated at the end only: set its every"),
        ("optim/grad_norm", "set keep_best.mode to max or min"),
    ],
)
def test_a_choice_that_cannot_be_made_well_is_refused(metric: str, words: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_experiment(
            document(
                evaluations=[HELD, HELD | {"name": "final", "role": "test"}],
                checkpoints={"keep_last": 2, "keep_best": {"metric": metric}},
            )
        )
    (problem,) = caught.value.problems
    assert problem.where == "checkpoints"
    assert words in problem.what


# --- scoring ------------------------------------------------------------------------------------


async def test_scores_and_samples() -> None:
    rows = [*ECHOES, chat("four", "five")]
    result = await evaluate(prepare(spec(*rows), TOKENIZER), trained(), step=7)
    assert (result.name, result.step, result.score) == ("held", 7, 0.75)
    assert result.metrics == {
        "reward/mean": 0.75,
        "reward/std": math.sqrt(0.75 - 0.75**2),
        "pass_rate": 0.75,
        "n": 4.0,
        "answers_cut": 0.0,
    }
    assert rewards(result) == [1.0, 1.0, 1.0, 0.0]
    assert result.samples[-1] == Sample("four", "four", "five", 0.0)


async def test_answers_cut_off_are_counted() -> None:
    result = await evaluate(prepare(spec(max_tokens=3), TOKENIZER), trained(), 0)
    assert result.metrics["answers_cut"] == 1.0
    assert completions(result) == ["one", "two", "thr"]
    assert result.score == pytest.approx(2 / 3)


class Recorder(MockSamplingClient):
    """Answers late, and writes down how it was asked."""

    def __init__(self) -> None:
        super().__init__(MockState.fresh(0))
        self.asked: list[tinker_types.SamplingParams] = []
        self.under_way = self.most = 0

    def sample(
        self,
        prompt: Any,
        num_samples: int,
        sampling_params: tinker_types.SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
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
    rows = [chat(str(n), "x") for n in range(REQUESTS_IN_FLIGHT + 50)]
    prepared = prepare(spec(*rows, max_tokens=9, temperature=0.5), TOKENIZER)
    result = await evaluate(prepared, client, 0)
    assert client.most == REQUESTS_IN_FLIGHT
    assert len(result.samples) == len(client.asked) == REQUESTS_IN_FLIGHT + 50
    params = client.asked[0]
    assert (params.max_tokens, params.temperature, params.stop) == (9, 0.5, [257])
    assert len({params.seed for params in client.asked}) == len(client.asked)


async def test_several_answers_to_a_row_are_drawn_alike_at_every_step() -> None:
    def drawn(seed: int) -> Benchmark:
        wanted = spec(num_samples=6, temperature=1.0, pass_at=[1, 4])
        prepared = prepare(wanted, TOKENIZER, seed)
        assert isinstance(prepared, Benchmark)
        return prepared

    first, later, other = [
        await evaluate(drawn(seed), trained(), step) for seed, step in ((0, 1), (0, 9), (1, 1))
    ]
    assert completions(first) == completions(later) != completions(other)
    assert (first.metrics["n"], len(first.samples)) == (3.0, 18)
    assert [sample.prompt for sample in first.samples[::6]] == ["one", "two", "three"]
    rows = [rewards(first)[row : row + 6] for row in (0, 6, 12)]
    right = [sum(row) for row in rows]
    assert 0 < sum(right) < 18
    # 1 - C(6-c,4)/C(6,4), and C(c,4)/C(6,4)
    at_4 = [1 - math.comb(int(6 - c), 4) / 15 for c in right]
    hat_4 = [math.comb(int(c), 4) / 15 for c in right]
    assert first.metrics["pass@1"] == pytest.approx(sum(right) / 18)
    assert first.metrics["pass@4"] == pytest.approx(sum(at_4) / 3)
    assert first.metrics["pass^4"] == pytest.approx(sum(hat_4) / 3)
    assert drawn(0).fingerprint == drawn(0).fingerprint != drawn(1).fingerprint


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


# --- held-out likelihood ------------------------------------------------------------------------

WEIGHTS = np.asarray([0.1, 0.9, 0.3, 0.4, 1.0, 0.2, 0.6, 0.7])


def nats(text: str) -> float:
    """What the mock's weights make of an answer: its bytes, and the token that ends it."""
    logprobs = MockState(WEIGHTS, WEIGHTS, WEIGHTS, 1).logprobs(np.asarray([*text.encode(), 257]))
    return -math.fsum(logprobs.tolist())


async def test_nll_by_hand() -> None:
    rows = [chat("one", "1"), chat("two", "zwei"), chat("é", "ééé", "c", "d")]
    prepared = prepare(spec(*rows, kind="nll"), TOKENIZER)
    client = MockSamplingClient(MockState(WEIGHTS, WEIGHTS, WEIGHTS, 1))
    result = await evaluate(prepared, client, 3)
    sums = [nats("1"), nats("zwei"), nats("ééé") + nats("d")]
    counts = [2, 5, 9]
    assert result.score == result.metrics["nll"] == pytest.approx(sum(sums) / 16, rel=1e-6)
    assert result.metrics["perplexity"] == pytest.approx(math.exp(sum(sums) / 16), rel=1e-6)
    bits = sum(sums) / math.log(2)
    assert result.metrics["bits_per_byte"] == pytest.approx(bits / (1 + 4 + 6 + 1), rel=1e-6)
    assert (result.metrics["tokens"], result.metrics["n"]) == (16.0, 3.0)
    first, _, last = result.samples
    assert isinstance(last, ScoredRow)
    assert (last.prompt, last.expected, last.tokens) == ("c", "d", 9)
    assert last.nll == pytest.approx(sums[2] / 9, rel=1e-6)
    assert read_result(json.loads(json.dumps(asdict(result)))) == result
    assert first == ScoredRow("one", "1", pytest.approx(sums[0] / 2, rel=1e-6), counts[0])


async def test_nll_of_the_last_turn_alone() -> None:
    wanted = spec(chat("a", "b", "c", "d"), kind="nll", supervise="last_assistant")
    client = MockSamplingClient(MockState(WEIGHTS, WEIGHTS, WEIGHTS, 1))
    result = await evaluate(prepare(wanted, TOKENIZER), client, 0)
    assert result.score == pytest.approx(nats("d") / 2, rel=1e-6)


async def test_a_server_that_scores_no_prompts_is_an_error() -> None:
    prepared = prepare(spec(kind="nll"), TOKENIZER)
    with pytest.raises(UserError, match="gave no log-probabilities"):
        await evaluate(prepared, Recorder(), 0)


def test_a_row_leaves_the_sampler_room_for_a_token() -> None:
    class Short(MockTokenizer):
        model_max_length: ClassVar[int] = 60

    prepared = prepare(spec(chat("q", "x" * 100), chat("q", "a"), kind="nll"), Short())
    assert isinstance(prepared, HeldOutNLL)
    assert [len(row.tokens) for row in prepared.rows] == [59, len(prepared.rows[1].tokens)]
    assert prepared.rows_cut == 1


# --- on the engine ------------------------------------------------------------------------------

SUMS = [chat(f"What is {a} + {b}?", str(a + b)) for a in range(3) for b in range(4, 9)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend() -> AsyncIterator[Backend]:
    model = ModelSpec(name=str(MODEL), lora_rank=4, seed=1)
    backend = await EmbeddedKind.open(EmbeddedParams(threads=1), model, None)
    yield backend
    await backend.aclose()


@pytest.mark.asyncio(loop_scope="module")
async def test_held_out_nll_is_the_training_nll_of_the_same_rows(backend: Backend) -> None:
    wanted = {
        "name": "x",
        "model": {"name": str(MODEL)},
        "data": {"kind": "rows", "rows": SUMS},
        "algorithm": {"kind": "sft", "params": {"learning_rate": 1e-2, "batch_size": len(SUMS)}},
    }
    experiment = parse_experiment(wanted)
    tokenizer = backend.get_tokenizer()
    sft = experiment.algorithm.build()
    await sft.setup(
        RunContext("r", "r", experiment, experiment.data.load(), backend, tokenizer), backend
    )
    batch = await sft.build_batch(0)
    await backend.forward_backward_async(batch.data, loss_fn="cross_entropy")
    await backend.optim_step_async(sft.adam_params(0))
    evaluation = prepare(spec(*SUMS, kind="nll"), tokenizer)
    held_out = await evaluate(evaluation, await backend.snapshot_sampling_client(), 1)
    passed = await backend.forward_backward_async(batch.data, loss_fn="cross_entropy")
    trained_on = sft.step_metrics(1, batch, passed)
    assert held_out.score == pytest.approx(trained_on["train_mean_nll"], rel=2e-6)
    assert held_out.metrics["tokens"] == trained_on["tokens/supervised"]
    # each answer is its digits and the end of the turn; digits are one byte each
    size = sum(len(row["messages"][1]["content"]) for row in SUMS)
    bits = held_out.score * held_out.metrics["tokens"] / math.log(2)
    assert held_out.metrics["bits_per_byte"] == pytest.approx(bits / size, rel=1e-12)


@pytest.mark.asyncio(loop_scope="module")
async def test_drawn_answers_of_the_engine_are_the_same_again(backend: Backend) -> None:
    wanted = spec(*SUMS[:6], num_samples=4, temperature=1.0, max_tokens=8, pass_at=[1, 4])
    prepared = prepare(wanted, backend.get_tokenizer(), seed=3)
    client = await backend.snapshot_sampling_client()
    first, again = [await evaluate(prepared, client, step) for step in (1, 2)]
    assert completions(first) == completions(again)
    assert len(set(completions(first)[:4])) > 1
    assert first.metrics["pass^4"] <= first.metrics["pass@1"] <= first.metrics["pass@4"]


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
