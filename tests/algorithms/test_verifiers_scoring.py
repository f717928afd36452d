"""`score`: time limits, bounds, one kind of error; with functions, judges and weighted sums."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from pydantic import BaseModel
from tinker import types as tinker_types

from algorithms.kept import code_version
from algorithms.rewards import scoring
from algorithms.rewards.judge import PROMPT
from algorithms.rewards.section import VerifierSection
from algorithms.rewards.verifiers import VERIFIERS, VerifierConfig
from backends.base import ModelSpec, SamplingClient
from backends.errors import TransientError, UserError
from backends.mock import MockKind, MockParams, MockTokenizer
from tests.algorithms.samples import chat
from tests.algorithms.test_verifiers import reward, section

HERE = "tests.algorithms.test_verifiers_scoring"
ROW = chat("1+1?", "2")
GATE = threading.Event()
BUSY = {"now": 0, "most": 0}


# --- functions, as a user writes them -----------------------------------------------------------


def half(row: dict[str, Any], completion: str, more: float = 0.0) -> float:
    return 0.5 + more


async def later(row: dict[str, Any], completion: str) -> bool:
    await asyncio.sleep(0)
    return completion == "2"


def breaks(row: dict[str, Any], completion: str) -> float:
    raise ZeroDivisionError("nothing to divide")


def leaves(row: dict[str, Any], completion: str) -> float:
    raise SystemExit(3)


def stuck(row: dict[str, Any], completion: str) -> float:
    GATE.wait()
    return 1.0


def never(row: dict[str, Any], completion: str) -> Any:
    return asyncio.Event().wait()


def counted(row: dict[str, Any], completion: str, seconds: float = 0.002) -> float:
    BUSY["now"] += 1
    BUSY["most"] = max(BUSY["most"], BUSY["now"])
    time.sleep(seconds)
    BUSY["now"] -= 1
    return 1.0


def no_number(row: dict[str, Any], completion: str) -> Any:
    return "good"


def infinite(row: dict[str, Any], completion: str) -> float:
    return float("inf")


async def judged_by(name: str, completion: str = "2", **params: Any) -> float:
    return await reward("function", ROW, completion, path=f"{HERE}:{name}", **params)


async def test_functions() -> None:
    assert await judged_by("half") == 0.5
    assert await judged_by("half", arguments={"more": 0.25}) == 0.75
    assert await judged_by("later") == 1.0
    assert await judged_by("later", "3") == 0.0


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("breaks", "function raised ZeroDivisionError: nothing to divide (row rows[0])"),
        ("leaves", "function raised SystemExit: 3 (row rows[0])"),
        ("no_number", "function raised ValueError: could not convert"),
        ("infinite", "function gave inf (row rows[0])"),
    ],
)
async def test_what_goes_wrong_is_an_error_with_kind_row_and_cause(name: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        await judged_by(name)
    (problem,) = caught.value.problems
    assert problem.where == "verifier"
    assert said in problem.what
    assert problem.remedy


@pytest.mark.parametrize("name", ["stuck", "never"])
async def test_a_time_limit_holds_for_threads_and_coroutines(name: str) -> None:
    with pytest.raises(UserError, match=r"function took longer than 0.05 seconds \(row rows") as e:
        await judged_by(name, timeout_seconds=0.05)
    assert isinstance(e.value.__cause__, TimeoutError)
    GATE.set()


async def test_the_loop_goes_on_while_a_function_works() -> None:
    GATE.clear()
    scored = asyncio.create_task(judged_by("stuck"))
    await asyncio.sleep(0.01)
    assert not scored.done()
    GATE.set()
    assert await scored == 1.0


def whose_thread(row: dict[str, Any], completion: str) -> int:
    return threading.get_ident()


async def test_threads_are_used_again_but_not_one_that_has_not_come_back() -> None:
    first = await judged_by("whose_thread")
    assert await judged_by("whose_thread") == first
    GATE.clear()
    with pytest.raises(UserError, match=r"took longer than 0\.05 seconds"):
        await judged_by("stuck", timeout_seconds=0.05)
    other = await judged_by("whose_thread")
    assert other != first
    GATE.set()


@pytest.mark.parametrize("limit", [1, 3])
async def test_no_more_answers_at_a_time_than_allowed(limit: int) -> None:
    BUSY["most"] = 0
    rewards = await asyncio.gather(*(judged_by("counted", max_concurrent=limit) for _ in range(12)))
    assert rewards == [1.0] * 12
    assert BUSY["most"] <= limit


async def test_waiting_for_a_place_takes_none_of_the_time() -> None:
    """12 of 50 ms, one at a time, take longer together than each of them may."""
    params = {"max_concurrent": 1, "timeout_seconds": 0.5, "arguments": {"seconds": 0.05}}
    assert await asyncio.gather(*(judged_by("counted", **params) for _ in range(12))) == [1.0] * 12


def test_the_function_is_part_of_the_verifiers_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_rewards.py").write_text("def one(row, completion):\n    return 1.0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    verifier = section("function", path="own_rewards:one").build()
    behind = scoring.code_behind(verifier)
    assert [getattr(item, "__name__", "") for item in behind] == ["", "one"]
    assert code_version(behind[1]) != code_version(half)


# --- weighted -----------------------------------------------------------------------------------


async def test_weighted_is_the_weighted_mean() -> None:
    parts = [
        {"kind": "exact_match", "weight": 3},
        {"kind": "function", "params": {"path": f"{HERE}:half"}},
    ]
    assert await reward("weighted", ROW, "2", verifiers=parts) == (3 * 1.0 + 0.5) / 4
    assert await reward("weighted", ROW, "3", verifiers=parts) == 0.5 / 4
    verifier = section("weighted", verifiers=parts).build()
    assert len(scoring.code_behind(verifier)) == 4


async def test_a_part_that_breaks_is_named() -> None:
    parts = [{"kind": "exact_match"}, {"kind": "function", "params": {"path": f"{HERE}:breaks"}}]
    with pytest.raises(UserError, match="weighted: function raised ZeroDivisionError"):
        await reward("weighted", ROW, "2", verifiers=parts)


# --- judge --------------------------------------------------------------------------------------


class Scripted:
    """Says what it is told to, and keeps what it was asked."""

    def __init__(self, said: str | Exception) -> None:
        self.said = said
        self.asked: list[str] = []
        self.params: list[tinker_types.SamplingParams] = []

    def sample(
        self,
        prompt: tinker_types.ModelInput,
        num_samples: int,
        sampling_params: tinker_types.SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
    ) -> Awaitable[tinker_types.SampleResponse]:
        self.asked.append(MockTokenizer().decode(prompt.to_ints()))
        self.params.append(sampling_params)

        async def answered() -> tinker_types.SampleResponse:
            if isinstance(self.said, Exception):
                raise self.said
            tokens = MockTokenizer()([self.said])["input_ids"][0]
            sequence = tinker_types.SampledSequence(
                stop_reason="stop",
                sequence_id="0",
                tokens_np=np.asarray([*tokens, MockTokenizer.eos_token_id], np.int32),
                logprobs_np=None,
            )
            return tinker_types.SampleResponse(sequences=[sequence])

        return answered()


class Bench:
    """A backend that opens nothing but the judge."""

    def __init__(self, client: SamplingClient) -> None:
        self.client = client
        self.opened: list[tuple[str | None, str | None]] = []

    async def open_sampling_client(
        self, model: str | None = None, weights: str | None = None
    ) -> SamplingClient:
        self.opened.append((model, weights))
        return self.client


async def judged(said: str | Exception, **params: Any) -> tuple[float, Scripted, Bench]:
    client = Scripted(said)
    bench = Bench(client)
    wanted = section("judge", **params)
    verifier = wanted.build()
    await scoring.bind(verifier, bench, MockTokenizer())  # type: ignore[arg-type]
    given = await scoring.score(wanted, verifier, ROW, "3", where="verifier", place="rows[0]")
    return given, client, bench


async def test_a_judge_reads_question_and_answers_and_its_grade_is_read() -> None:
    said = "One might say Grade: 10, but it is wrong.\nGrade: 2.5"
    given, client, bench = await judged(said, weights="w", max_tokens=77)
    assert given == 0.25
    assert bench.opened == [(None, "w")]
    wanted = PROMPT.format(question="1+1?", expected="2", answer="3")
    assert client.asked == [f"<|im_start|>user\n{wanted}<|im_end|>\n<|im_start|>assistant\n"]
    (params,) = client.params
    assert (params.max_tokens, params.temperature, params.stop) == (77, 0.0, [257])
    again = await judged(said)
    assert again[1].params[0].seed == params.seed


async def test_a_judges_own_prompt_and_pattern() -> None:
    pattern = {"prompt": "{answer}: {{1}}?", "pattern": r"(\d)/5", "full_marks": 5}
    given, client, _ = await judged("4/5", **pattern)
    assert given == 0.8
    assert "3: {1}?" in client.asked[0]


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ("Good.", "judge: no grade in what the judge said: 'Good.' (row rows[0])"),
        ("Grade: 11", "judge: the judge gave 11 of 10 (row rows[0])"),
    ],
)
async def test_a_judge_without_a_grade_is_an_error(said: str, error: str) -> None:
    with pytest.raises(UserError) as caught:
        await judged(said)
    assert caught.value.problems[0].what == error
    assert "prompt, pattern" in caught.value.problems[0].remedy


async def test_what_the_judges_backend_raises_passes_through() -> None:
    with pytest.raises(TransientError, match="busy"):
        await judged(TransientError("busy"))


async def test_a_judge_that_is_not_bound_is_an_error() -> None:
    with pytest.raises(UserError, match="no model to judge with"):
        await reward("judge", ROW, "3")


async def test_a_judge_on_a_backend_also_inside_of_weighted() -> None:
    backend = await MockKind.open(MockParams(), ModelSpec(name="mock"), None)
    part = {"kind": "judge", "params": {"temperature": 1.0, "prompt": "{answer}: grade: 10"}}
    wanted = section("weighted", verifiers=[part])
    verifier = wanted.build()
    await scoring.bind(verifier, backend, backend.get_tokenizer())
    said = [
        await scoring.score(wanted, verifier, ROW, answer, where="v", place="r")
        for answer in ("aaaa", "aaaa")
    ]
    assert said == [1.0, 1.0]
    await backend.aclose()


# --- plug-ins -----------------------------------------------------------------------------------


class Slow:
    """Has a bound of its own."""

    class Config(VerifierConfig):
        """Two at a time."""

        PLACES: ClassVar[int] = 2

    def __init__(self, cfg: BaseModel) -> None:
        pass

    def __call__(self, row: dict[str, Any], completion: str) -> float:
        return counted(row, completion)


@pytest.fixture
def slow() -> Iterator[None]:
    VERIFIERS.register("slow", Slow)
    yield
    VERIFIERS.forget("slow")


@pytest.mark.usefixtures("slow")
async def test_a_kind_may_say_how_many_suit_it() -> None:
    wanted = VerifierSection(kind="slow", params=Slow.Config())
    verifier = wanted.build()
    BUSY["most"] = 0
    await asyncio.gather(
        *(scoring.score(wanted, verifier, ROW, "2", where="v", place="r") for _ in range(10))
    )
    assert BUSY["most"] <= 2
