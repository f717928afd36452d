"""Clients for weights that stay as they are: the base, a checkpoint, another model."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import tinker
from tinker import types as tinker_types

from backends.base import ModelSpec, SamplingClient
from backends.embedded import SCRATCH, EmbeddedBackend, EmbeddedKind, EmbeddedParams
from backends.engine.lora import MODEL_STATE
from backends.errors import StateLostError, UserError
from backends.mock import MockBackend, MockParams, MockState
from backends.tinker import TinkerBackend, connect

MODEL = Path(__file__).parents[2] / "examples/models/tiny-qwen3"
SPEC = ModelSpec(name=str(MODEL), lora_rank=4, seed=3)
ADAM = tinker_types.AdamParams(learning_rate=1e-2)
TOKENS = [5, 6, 7, 8, 9, 10]
GREEDY = tinker_types.SamplingParams(max_tokens=4, temperature=0.0)

pytestmark = pytest.mark.asyncio(loop_scope="module")


def datum() -> tinker.Datum:
    return tinker.Datum(
        model_input=tinker_types.ModelInput.from_ints(TOKENS[:-1]),
        loss_fn_inputs={
            "target_tokens": np.asarray(TOKENS[1:]),
            "weights": np.ones(len(TOKENS) - 1, dtype=np.float32),
        },
    )


def engines() -> set[Path]:
    """The scratch folders of this process's engines; each is there for as long as its engine."""
    return set(Path(tempfile.gettempdir()).glob(f"{SCRATCH}{os.getpid()}-*"))


async def scores(client: SamplingClient) -> np.ndarray:
    """The logprobs of TOKENS but the first."""
    prompt = tinker_types.ModelInput.from_ints(TOKENS)
    answer = await client.sample(prompt, 1, GREEDY, include_prompt_logprobs=True)
    assert answer.prompt_logprobs is not None
    return np.asarray(answer.prompt_logprobs[1:], np.float64)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend() -> AsyncIterator[EmbeddedBackend]:
    """A backend whose adapter has had two steps."""
    opened = await EmbeddedKind.open(EmbeddedParams(threads=1), SPEC, None)
    assert isinstance(opened, EmbeddedBackend)
    for _ in range(2):
        passed = opened.forward_backward_async([datum()], loss_fn="cross_entropy")
        await opened.optim_step_async(ADAM)
        await passed
    yield opened
    await opened.aclose()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def checkpoint(backend: EmbeddedBackend, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The backend's weights as a folder."""
    folder = tmp_path_factory.mktemp("checkpoint")
    await backend.export_state(await backend.save_full_state("two-steps"), folder)
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another folder with the tiny model: to the backend, another model."""
    return Path(shutil.copytree(MODEL, tmp_path_factory.mktemp("models") / "other"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def base_scores() -> np.ndarray:
    """Transformers' own logprobs of TOKENS under the base model."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(MODEL), dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([TOKENS])).logits[0].double()
    logprobs = torch.log_softmax(logits, -1)[torch.arange(5), torch.tensor(TOKENS[1:])]
    return np.asarray(logprobs.numpy())


async def test_nothing_named_is_the_base_model_without_its_adapter(
    backend: EmbeddedBackend, base_scores: np.ndarray
) -> None:
    client = await backend.open_sampling_client()
    np.testing.assert_allclose(await scores(client), base_scores, atol=1e-4)
    tuned = await scores(await backend.snapshot_sampling_client())
    assert np.abs(tuned - base_scores).max() > 0.1


async def test_a_checkpoints_folder_is_the_weights_that_were_saved(
    backend: EmbeddedBackend, checkpoint: Path
) -> None:
    tuned = await scores(await backend.snapshot_sampling_client())
    for weights in (str(checkpoint), await backend.save_for_sampler("named")):
        client = await backend.open_sampling_client(weights=weights)
        assert (await scores(client) == tuned).all()


async def test_another_model_has_an_engine_of_its_own_and_its_clients_share_it(
    backend: EmbeddedBackend, checkpoint: Path, other_model: Path, base_scores: np.ndarray
) -> None:
    name = str(other_model)
    plain, tuned = await asyncio.gather(
        backend.open_sampling_client(name),
        backend.open_sampling_client(name, str(checkpoint)),
    )
    np.testing.assert_allclose(await scores(plain), base_scores, atol=1e-4)
    assert (await scores(tuned) == await scores(await backend.snapshot_sampling_client())).all()
    assert len(engines()) == 2


async def test_the_likeliest_tokens_of_each_place_of_the_prompt(backend: EmbeddedBackend) -> None:
    client = await backend.open_sampling_client()
    prompt = tinker_types.ModelInput.from_ints(TOKENS)
    answer = await client.sample(prompt, 1, GREEDY, topk_prompt_logprobs=3)
    top = answer.topk_prompt_logprobs
    assert top is not None
    assert top[0] is None
    assert [len(place or []) for place in top[1:]] == [3] * 5
    greedy = (await client.sample(prompt, 1, GREEDY)).sequences[0]
    longer = tinker_types.ModelInput.from_ints([*TOKENS, *greedy.tokens])
    answer = await client.sample(longer, 1, GREEDY, topk_prompt_logprobs=3)
    assert answer.topk_prompt_logprobs is not None
    said = [(place or [(-1, 0.0)])[0] for place in answer.topk_prompt_logprobs[len(TOKENS) :]]
    assert [token for token, _ in said] == greedy.tokens
    assert [logprob for _, logprob in said] == pytest.approx(greedy.logprobs, abs=1e-4)


async def test_what_is_not_there_is_refused_when_it_is_opened(
    backend: EmbeddedBackend, checkpoint: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"^model: .*no-such-folder"):
        await backend.open_sampling_client("no-such-folder/no-such-model/at-all")
    with pytest.raises(UserError, match=r"^weights: nowhere is no folder with an adapter"):
        await backend.open_sampling_client(weights="nowhere")
    with pytest.raises(UserError, match=r"^weights: s3://b/k is no folder with an adapter"):
        await backend.open_sampling_client(weights="s3://b/k")
    with pytest.raises(UserError, match=r"^weights: tinker://x/weights/y: .*no checkpoint"):
        await backend.open_sampling_client(weights="tinker://x/weights/y")
    misfit = Path(shutil.copytree(checkpoint, tmp_path / "misfit"))
    (misfit / MODEL_STATE).unlink()  # as PEFT has it: the rank is that of adapter_config.json
    config = json.loads((misfit / "adapter_config.json").read_text())
    (misfit / "adapter_config.json").write_text(json.dumps(config | {"r": 7}))
    with pytest.raises(UserError, match=r"^weights: .*adapter_model"):
        await backend.open_sampling_client(weights=str(misfit))


async def test_a_server_opens_what_it_serves_and_holds(backend: EmbeddedBackend) -> None:
    served = await connect(TinkerBackend, backend.engine.url, backend.engine.key, SPEC, None)
    saved = await backend.save_for_sampler("for-others")
    tuned = await scores(await backend.snapshot_sampling_client())
    assert (await scores(await served.open_sampling_client(weights=saved)) == tuned).all()
    assert (await scores(await served.open_sampling_client(SPEC.name, saved)) == tuned).all()
    base = await scores(await backend.open_sampling_client())
    assert (await scores(await served.open_sampling_client()) == base).all()
    with pytest.raises(UserError, match=r"^model: Qwen/Qwen3-8B: .*does not serve"):
        await served.open_sampling_client("Qwen/Qwen3-8B")
    with pytest.raises(UserError, match=r"are weights of .*tiny-qwen3, not of Qwen/Qwen3-8B"):
        await served.open_sampling_client("Qwen/Qwen3-8B", saved)
    with pytest.raises(UserError, match=r"^weights: the server reads no files of yours"):
        await served.open_sampling_client(weights="some/folder")
    await served.aclose()


async def test_closing_the_backend_stops_the_engines_of_other_models(
    backend: EmbeddedBackend, other_model: Path
) -> None:
    client = await backend.open_sampling_client(str(other_model))
    missing = asyncio.ensure_future(backend.open_sampling_client(str(MODEL.parent / "not-there")))
    await asyncio.sleep(0)
    await backend.aclose()
    await backend.aclose()
    assert engines() == set()
    for ended in (scores(client), missing):
        with pytest.raises((StateLostError, asyncio.CancelledError)):
            await ended


# --- the mock ------------------------------------------------------------------------------------


def mock() -> MockBackend:
    return MockBackend(MockParams(), ModelSpec(name="mock"), MockState.fresh(0))


async def test_the_mocks_samples_follow_the_seed_and_its_own_forward_pass() -> None:
    backend = mock()
    client = await backend.snapshot_sampling_client()
    prompt = tinker_types.ModelInput.from_ints(list(b"a word"))
    drawn = tinker_types.SamplingParams(max_tokens=20, temperature=1.0, seed=1)
    first, again = [await client.sample(prompt, 8, drawn) for _ in range(2)]
    assert [s.tokens for s in first.sequences] == [s.tokens for s in again.sequences]
    texts = [bytes(s.tokens[:-1]).decode() for s in first.sequences]
    assert "a word" in texts
    assert len(set(texts)) > 2
    for sequence in first.sequences:
        data = tinker.Datum(
            model_input=tinker_types.ModelInput.from_ints(sequence.tokens),
            loss_fn_inputs={
                "target_tokens": np.asarray(sequence.tokens),
                "weights": np.ones(len(sequence.tokens), np.float32),
            },
        )
        passed = await backend.forward_backward_async([data], loss_fn="cross_entropy")
        assert passed.loss_fn_outputs[0]["logprobs"].tolist() == sequence.logprobs


async def test_the_mock_scores_prompts(tmp_path: Path) -> None:
    backend = mock()
    state = MockState.fresh(0)
    prompt = tinker_types.ModelInput.from_ints([1, 9, 2])
    client = await backend.open_sampling_client()
    answer = await client.sample(prompt, 1, GREEDY, True, 2)
    by_class = state.logprobs(np.arange(8))
    assert answer.prompt_logprobs == [None, pytest.approx(by_class[1]), pytest.approx(by_class[2])]
    best = int(np.argmax(by_class))
    pair = [(best, pytest.approx(by_class[best])), (best + 8, pytest.approx(by_class[best]))]
    assert answer.topk_prompt_logprobs == [None, pair, pair]
    await backend.forward_backward_async([datum()], loss_fn="cross_entropy")
    await backend.optim_step_async(ADAM)
    await backend.export_state(await backend.save_full_state("s"), tmp_path)
    tuned = await scores(await backend.snapshot_sampling_client())
    assert (await scores(await backend.open_sampling_client(weights=str(tmp_path))) == tuned).all()
    other = await scores(await backend.open_sampling_client("another"))
    assert (other != await scores(client)).all()
    with pytest.raises(UserError, match=r"weights: .*not a checkpoint of the mock"):
        await backend.open_sampling_client(weights=str(tmp_path / "none"))
