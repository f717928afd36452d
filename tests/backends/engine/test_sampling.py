"""Sampling sessions and their turns, and all that the SDK's sampling client can ask for."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from backend_contract import VOCAB, Reference
from engine_process import KEY, EngineProcess
from scripted_backend import ScriptedBackend
from test_api import Client, start
from tinker import types

from backends.engine import sampling
from backends.engine.records import RequestError, SampleOutput, SampleRequest
from backends.engine.scheduler import Job


class JoiningBackend(ScriptedBackend):
    """Answers one request a step; others join meanwhile. A prompt that starts with 14 raises."""

    def __init__(self) -> None:
        super().__init__()
        self.stepped = threading.Semaphore(0)
        """A step is taken for each release."""
        self.steps = 0

    def serve_samples(
        self,
        arriving: Callable[[], Sequence[SampleRequest]],
        finished: Callable[[str, SampleOutput | RequestError], None],
    ) -> None:
        running: list[SampleRequest] = []
        while True:
            running += arriving()
            if not running:
                return
            assert self.stepped.acquire(timeout=10)
            self.steps += 1
            request = running.pop(0)
            if request.prompt[0] == 14:
                raise MemoryError("no room")
            finished(request.request_id, self._draw(request))


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[Client]:
    client = await start(tmp_path, JoiningBackend())
    yield client
    client.backend.gate.set()
    client.backend.stepped.release(100)
    client.engine.stop()
    assert await client.engine.stopped(10)


async def sampler_of(client: Client, **made: Any) -> tuple[str, str]:
    """A new session, and a sampling session in it."""
    session = str((await client.post("create_session", {}))["session_id"])
    body = {"session_id": session, "sampling_session_seq_id": 0} | (made or {"base_model": "none"})
    made = await client.post("create_sampling_session", body)
    return session, str(made["sampling_session_id"])


async def ask(client: Client, sampler: str, number: int, token: int = 3) -> Any:
    """Queue a sample; its ticket."""
    return await client.post(
        "asample",
        {
            "sampling_session_id": sampler,
            "seq_id": number,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [token]}]},
            "sampling_params": {"max_tokens": 1},
        },
    )


async def test_an_answer_does_not_wait_for_the_others(client: Client) -> None:
    _, sampler = await sampler_of(client)
    tickets = [await ask(client, sampler, number) for number in range(3)]
    for steps, ticket in enumerate(tickets, start=1):
        client.backend.stepped.release()
        assert len((await client.result(ticket)).sequences) == 1
        assert client.backend.steps == steps


async def test_training_goes_on_between_the_steps_of_samples(client: Client) -> None:
    model = await client.model()
    _, sampler = await sampler_of(client)
    first = await ask(client, sampler, 0)
    second = await ask(client, sampler, 1)
    passed = await client.train(model, 1, 5)
    client.backend.stepped.release()
    assert (await client.result(passed)).metrics
    assert client.backend.steps == 1
    client.backend.stepped.release()
    for ticket in (first, second):
        await client.result(ticket)


async def test_a_session_that_ends_takes_its_waiting_samples_along(client: Client) -> None:
    ending, its_sampler = await sampler_of(client)
    _, sampler = await sampler_of(client)
    client.backend.gate.clear()
    blocking = Job(lambda: client.backend.gate.wait(10), lambda _: None)
    client.engine.scheduler.run_soon(blocking)
    lost, kept = await ask(client, its_sampler, 0), await ask(client, sampler, 0)
    finished = {"reason": {"type": "success"}, "detail": None}
    await client.http.post(f"sessions/{ending}/finish", json=finished)
    client.backend.gate.set()
    client.backend.stepped.release(2)
    said = await client.result(lost)
    assert said["category"] == "user"
    assert said["error"].startswith(f"session {ending}: has ended")
    assert "open a new ServiceClient" in said["error"]
    assert len((await client.result(kept)).sequences) == 1


async def test_what_the_backend_raises_fails_the_unanswered_only(client: Client) -> None:
    _, sampler = await sampler_of(client)
    tickets = [await ask(client, sampler, n, token) for n, token in enumerate((3, 14, 3))]
    client.backend.stepped.release(3)
    answers = [await client.result(ticket) for ticket in tickets]
    assert len(answers[0].sequences) == 1
    for answer in answers[1:]:
        assert answer == {"error": "MemoryError: no room", "category": "server"}
    assert len((await client.result(await ask(client, sampler, 3))).sequences) == 1


async def test_more_samplers_at_once_than_are_kept(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is at hand while its requests are begun; then there is room for one again."""
    monkeypatch.setattr(sampling, "NAMED", 1)
    model = await client.model()
    paths = []
    for index in range(3):
        await client.result(await client.train(model, 1 + 3 * index, 5))
        await client.result(await client.step(model, 2 + 3 * index))
        body = {"model_id": model, "seq_id": 3 + 3 * index, "path": f"n{index}"}
        saved = await client.result(await client.post("save_weights_for_sampler", body))
        paths.append(saved["path"])
    samplers = [(await sampler_of(client, model_path=path))[1] for path in paths]
    tickets = [await ask(client, sampler, 0) for sampler in samplers]
    client.backend.stepped.release(3)
    answers = [await client.result(ticket) for ticket in tickets]
    assert [int(answer.sequences[0].tokens[0]) for answer in answers] == [5, 10, 15]
    await client.engine.scheduler.call(lambda: None)
    assert len(client.backend._samplers) == 1


# -- through the SDK ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sampler(shared_engine: EngineProcess, engine_home: Path) -> Any:
    service = tinker.ServiceClient(base_url=shared_engine.url, api_key=KEY)
    return service.create_sampling_client(base_model=str(engine_home / "base")).result()


@pytest.fixture(scope="module")
def reference(engine_home: Path, sampler: Any) -> Reference:
    return Reference(engine_home / "base")


PROMPT = [*b"a prompt"]


def logprobs_after(reference: Reference, tokens: Sequence[int]) -> torch.Tensor:
    """All logprobs [N, V] after each token."""
    with torch.no_grad():
        logits = reference.model(input_ids=torch.tensor([list(tokens)])).logits[0]
    logprobs: torch.Tensor = logits.log_softmax(-1)
    return logprobs


def draw(sampler: Any, samples: int = 1, *, settings: Any = None, **asked: Any) -> Any:
    """A sample of few tokens, past the end."""
    params = types.SamplingParams(**({"max_tokens": 5, "seed": 3, "stop": []} | (settings or {})))
    return sampler.sample(types.ModelInput.from_ints(PROMPT), samples, params, **asked).result()


def test_likeliest_tokens_at_each_sampled_position(sampler: Any, reference: Reference) -> None:
    response = draw(sampler, 2, topk_sample_logprobs=4)
    for sequence in response.sequences:
        everything = [*PROMPT, *sequence.tokens[:-1]]
        expected = logprobs_after(reference, everything)[len(PROMPT) - 1 :].topk(4)
        assert len(sequence.topk_logprobs) == 5
        for got, ids, values in zip(sequence.topk_logprobs, *reversed(expected), strict=True):
            assert [token for token, _ in got] == ids.tolist()
            np.testing.assert_allclose([value for _, value in got], values, rtol=1e-4)
    assert draw(sampler).sequences[0].topk_logprobs is None


@pytest.mark.parametrize("sparse", [True, False])
def test_logprobs_of_chosen_tokens(sampler: Any, reference: Reference, sparse: bool) -> None:
    """As in the SDK's own example: -1 where nothing is wanted."""
    ids = torch.full((len(PROMPT) - 1, 12), -1)
    ids[2, 5], ids[6, 0], ids[6, 9] = 7, 200, 0
    target = types.TensorData.from_torch(ids)
    if sparse:
        target = types.TensorData.from_torch_sparse(ids, pad_value=-1)
    response = draw(sampler, target_prompt_logprobs=target, include_prompt_logprobs=True)
    got = response.target_prompt_logprobs
    assert (got.sparse_crow_indices is not None) == sparse
    picked = logprobs_after(reference, PROMPT)[:-1].gather(-1, ids.clamp(min=0))
    expected = torch.where(ids < 0, 0, picked)
    torch.testing.assert_close(got.to_torch(), expected, rtol=1e-4, atol=0)
    assert response.prompt_logprobs[0] is None


def test_alternatives_to_the_prompt(sampler: Any, reference: Reference) -> None:
    one, again = (draw(sampler, prompt_alt_tokens_k=30).prompt_alt_tokens for _ in range(2))
    tokens, logprobs = one.tokens.to_torch(), one.logprobs.to_torch()
    assert tokens.shape == (len(PROMPT) - 1, 30)
    assert tokens.tolist() == again.tokens.to_torch().tolist()
    assert 1 < len(set(tokens[0].tolist())) <= VOCAB
    expected = logprobs_after(reference, PROMPT)[:-1].gather(-1, tokens)
    torch.testing.assert_close(logprobs, expected, rtol=1e-4, atol=0)
    greedy = draw(sampler, prompt_alt_tokens_k=2, settings={"temperature": 0}).prompt_alt_tokens
    likeliest = logprobs_after(reference, PROMPT)[:-1].argmax(-1)
    assert greedy.tokens.to_torch().tolist() == likeliest[:, None].expand(-1, 2).tolist()


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
def test_strings_and_tokens_stop_together(sampler: Any) -> None:
    """The SDK's types say one kind a list; it sends both kinds all the same."""
    free = draw(sampler, settings={"max_tokens": 60}).sequences[0].tokens
    first = {token: free.index(token) for token in reversed(free)}
    by_text = next(token for token in first if 32 < token < 127 and first[token] > 3)
    by_token = next(token for token in first if token != by_text and first[token] > 3)
    for stop, at in (
        ([by_token], first[by_token]),
        (chr(by_text), first[by_text]),
        ([chr(by_text), by_token], min(first[by_text], first[by_token])),
    ):
        params = types.SamplingParams(max_tokens=60, seed=3)
        params = params.model_copy(update={"stop": stop})
        prompt = types.ModelInput.from_ints(PROMPT)
        cut = sampler.sample(prompt, 1, params).result().sequences[0]
        assert (cut.tokens, cut.stop_reason) == (free[: at + 1], "stop")


def test_what_cannot_be_asked_is_said_at_once(sampler: Any) -> None:
    target = types.TensorData.from_torch(torch.zeros(3, 1, dtype=torch.int64))
    for asked, said in (
        ({"topk_sample_logprobs": VOCAB + 1}, "topk_sample_logprobs: is 273; give from 0 to 272"),
        ({"target_prompt_logprobs": target}, r"has the shape \[3, 1\]; give"),
        ({"include_prompt_logprobs": True, "prompt_logprobs_last_n": 8}, "prompt_logprobs_last_n"),
    ):
        with pytest.raises(tinker.RequestFailedError, match=said) as failed:
            draw(sampler, **asked)
        assert failed.value.category == types.RequestErrorCategory.User
    assert len(draw(sampler).sequences[0].tokens) == 5
