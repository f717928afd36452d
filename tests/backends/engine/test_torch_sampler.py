"""Locks: the same bits in any company, requests that join and leave, and what is computed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from backend_contract import (
    Reference,
    ask,
    ragged,
    run,
    sample_one,
    step,
    train,
    write_base_model,
)
from torch.nn import functional
from transformers import AutoModelForCausalLM, Olmo2Config, Olmo2ForCausalLM, Qwen3Config

from backends.engine import torch_sampler
from backends.engine.drawing import StopRule
from backends.engine.records import (
    AdamParams,
    LoraConfig,
    PassRequest,
    RequestError,
    SampledSequence,
    SampleOutput,
    SampleRequest,
    SamplingParams,
)
from backends.engine.row_cache import ROW_BLOCK, RowCache
from backends.engine.torch_backend import TorchBackend, TorchConfig
from backends.engine.torch_model import FrozenModel
from backends.engine.torch_sampler import padded

TINY_QWEN3 = Path(__file__).parents[3] / "examples" / "models" / "tiny-qwen3"


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base_model(tmp_path_factory.mktemp("base"))


def make(base_folder: Path, rows: int = 256) -> TorchBackend:
    return TorchBackend(
        str(base_folder),
        TorchConfig(device="cpu", threads=1, micro_batch_tokens=64, sample_rows=rows),
    )


@pytest.fixture(scope="module")
def backend(base_folder: Path) -> TorchBackend:
    return make(base_folder)


def bits(output: SampleOutput | RequestError) -> list[Any]:
    """All of an answer, exactly."""
    assert isinstance(output, SampleOutput), output
    arrays = [
        array
        for each in output.sequences
        for array in (each.tokens, each.logprobs, each.topk_tokens, each.topk_logprobs)
    ]
    arrays += [output.prompt_logprobs, output.topk_prompt_tokens, output.topk_prompt_logprobs]
    arrays += [output.target_prompt_logprobs, output.prompt_alt_tokens, output.prompt_alt_logprobs]
    return [array if array is None else (array.shape, array.tobytes()) for array in arrays]


# -- the same bits -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TorchBackend:
    """The tiny Qwen3, whose context is long enough for all widths, under an adapter that counts."""
    backend = TorchBackend(str(TINY_QWEN3), TorchConfig(device="cpu", threads=1))
    return with_adapter(backend)


def with_adapter(backend: TorchBackend) -> TorchBackend:
    """Add a sampler `far` whose weights are far from the base's."""
    backend.create_model("m", LoraConfig(rank=4, seed=1))
    for seed in range(2):
        request = PassRequest("r", "m", backend.version("m"), ragged(seed), "cross_entropy")
        backend.forward_backward([request])
        step(backend, "m", AdamParams(learning_rate=2e-2))
    backend.save_sampler_checkpoint(None, "m", "far", persist=False)
    return backend


@pytest.fixture
def two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def others(count: int, vocab: int, longest: int, sampler: str | None) -> list[SampleRequest]:
    """Requests of all kinds and lengths."""
    rng = np.random.default_rng(count)
    return [
        replace(
            ask(
                sampler,
                rng.integers(2, vocab, rng.integers(1, longest)).tolist(),
                int(rng.integers(1, 3)),
                f"other {sampler} {index}",
                max_tokens=int(rng.integers(1, 24)),
                temperature=float(rng.choice([0, 0.7, 1, 1.3])),
                top_k=int(rng.choice([-1, 5])),
                top_p=float(rng.choice([1, 0.8])),
                seed=index,
            ),
            prompt_logprobs=bool(index % 2),
            topk_sample_logprobs=index % 3,
        )
        for index in range(count)
    ]


def asked(prompt: Sequence[int], sampler: str | None, **params: Any) -> SampleRequest:
    """A request that asks for everything there is, three times."""
    settings = {"max_tokens": 24, "seed": 7, "temperature": 0.9, "top_p": 0.95} | params
    return replace(
        ask(sampler, prompt, 3, prompt_logprobs=True, topk_prompt_logprobs=3, **settings),
        topk_sample_logprobs=2,
        prompt_alt_tokens_k=2,
        target_prompt_tokens=np.arange(2 * len(prompt) - 2).reshape(-1, 2) % 200 - 1,
    )


@pytest.mark.parametrize("length", [3, 40, 230])
def test_any_company_gives_the_same_bits(tiny: TorchBackend, length: int) -> None:
    request = asked(np.random.default_rng(length).integers(2, 512, length).tolist(), "far")
    alone = bits(sample_one(tiny, request))
    for count in (3, 17, 64):
        crowd = others(count, 512, 300, "far")
        crowd.insert(count // 2, request)
        assert bits(tiny.sample(crowd)[request.request_id]) == alone, count
    assert bits(tiny.sample(crowd[::-1])[request.request_id]) == alone


def test_any_company_on_two_threads(tiny: TorchBackend, two_threads: None) -> None:
    requests = [replace(asked(range(2, 2 + n), "far"), request_id=str(n)) for n in (3, 40, 230)]
    alone = {request.request_id: bits(sample_one(tiny, request)) for request in requests}
    crowd = others(40, 512, 200, "far")
    for request in requests:
        crowd.insert(int(request.request_id) % 40, request)
    answers = tiny.sample(crowd)
    assert {name: bits(answers[name]) for name in alone} == alone


def test_coming_late_gives_the_same_bits(tiny: TorchBackend) -> None:
    request = asked(range(2, 40), "far")
    alone = bits(sample_one(tiny, request))
    crowd = others(24, 512, 100, "far") + others(2, 512, 100, None)
    crowd.insert(12, request)
    answers: dict[str, SampleOutput | RequestError] = {}
    one_by_one = iter([[one] for one in crowd])
    tiny.serve_samples(lambda: next(one_by_one, []), answers.__setitem__)
    assert len(answers) == 27
    assert bits(answers[request.request_id]) == alone


def olmo2(folder: Path) -> Path:
    """A family that transformers computes."""
    config = Olmo2Config(
        vocab_size=300,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.15,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Olmo2ForCausalLM(config).save_pretrained(folder)
    return folder


def windowed(folder: Path) -> Path:
    """A Qwen3 whose second layer sees the last 24 positions only."""
    config = Qwen3Config(
        vocab_size=300,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        initializer_range=0.15,
        use_sliding_window=True,
        sliding_window=24,
        max_window_layers=1,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("write", [olmo2, windowed])
def test_other_families(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    folder = write(tmp_path)
    backend = with_adapter(TorchBackend(str(folder), TorchConfig(device="cpu", threads=1)))
    prompt = np.random.default_rng(0).integers(2, 300, 50).tolist()
    greedy = sample_one(backend, ask(None, prompt, temperature=0, max_tokens=60)).sequences[0]
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    whole = torch.tensor([prompt + greedy.tokens.tolist()])
    with torch.no_grad():
        logits = model(whole[:, :-1]).logits[0, len(prompt) - 1 :]
    assert greedy.tokens.tolist() == logits.argmax(-1).tolist()
    expected = logits.log_softmax(-1).max(-1).values
    torch.testing.assert_close(torch.from_numpy(greedy.logprobs), expected, rtol=1e-4, atol=1e-5)
    request = asked(prompt, "far")
    alone = bits(sample_one(backend, request))
    crowd = [request, *others(16, 300, 150, "far")]
    for threads in (1, 2):
        torch.set_num_threads(threads)
        assert bits(backend.sample(crowd)[request.request_id]) == alone
    torch.set_num_threads(1)


def test_half_precision_takes_the_fused_attention(base_folder: Path) -> None:
    """What CUDA takes; logprobs are those of the same weights as far as bfloat16 tells."""
    backend = TorchBackend(str(base_folder), TorchConfig(device="cpu", dtype="bfloat16", threads=1))
    requests = [ask(None, "p" * n, 2, str(n), seed=n, max_tokens=20) for n in (3, 40, 41)]
    reference = Reference(base_folder)
    for request_id, answer in backend.sample(requests).items():
        assert isinstance(answer, SampleOutput)
        for sequence in answer.sequences:
            tokens = [*b"p" * int(request_id), *sequence.tokens.tolist()]
            with torch.no_grad():
                expected = reference.logprobs(tokens[:-1], tokens[1:])[int(request_id) - 1 :]
            assert np.abs(sequence.logprobs - expected.numpy()).mean() < 0.1


def crowd() -> list[SampleRequest]:
    """Requests of unlike lengths, so that rows come and go."""
    return [
        ask(None, "p" * (1 + 5 * i), 1 + i % 3, str(i), max_tokens=3 + 11 * i % 40, seed=i)
        for i in range(9)
    ]


@pytest.mark.parametrize("rows", [1, 3])
def test_few_places_give_the_same_samples(
    backend: TorchBackend, base_folder: Path, rows: int
) -> None:
    expected, answers = backend.sample(crowd()), make(base_folder, rows).sample(crowd())
    for request in crowd():
        output = answers[request.request_id]
        assert bits(output) == bits(expected[request.request_id])
        assert isinstance(output, SampleOutput)
        assert len(output.sequences) == request.num_samples
        assert {len(s.tokens) for s in output.sequences} == {request.params.max_tokens}


# -- coming and going --------------------------------------------------------------------------


def test_requests_join_and_answers_are_told_at_once(backend: TorchBackend) -> None:
    events: list[str] = []
    arrivals: list[list[SampleRequest]] = [[ask(None, "long", 1, "long", max_tokens=40)], [], []]
    arrivals += [[ask(None, "late", 1, "late", max_tokens=3)]]

    def arriving() -> list[SampleRequest]:
        events.append("asked")
        return arrivals.pop(0) if arrivals else []

    backend.serve_samples(arriving, lambda request_id, _: events.append(request_id))
    assert [event for event in events if event != "asked"] == ["late", "long"]
    assert events.index("late") <= 10


def test_adapters_take_turns(backend: TorchBackend) -> None:
    """A short sample of one does not wait for the end of a long one of the other."""
    backend.create_model("turns", LoraConfig(rank=2, seed=1))
    backend.save_sampler_checkpoint(None, "turns", "other", persist=False)
    done: list[str] = []
    batch = [ask(None, "x", 1, "long", max_tokens=90), ask("other", "x", 1, "short", max_tokens=9)]
    batches = iter([batch])
    backend.serve_samples(lambda: next(batches, []), lambda request_id, _: done.append(request_id))
    assert done == ["short", "long"]
    backend.delete_model("turns")
    backend.delete_sampler("other")


def test_training_and_unloading_between_steps_change_no_sample(base_folder: Path) -> None:
    """`arriving` may call the backend; a running sample keeps the weights that it started with."""
    backend, undisturbed = (with_adapter(make(base_folder)) for _ in range(2))
    request = ask("far", "disturbed or not", 3, seed=1, max_tokens=30)
    expected = bits(sample_one(undisturbed, request))

    def train(backend: TorchBackend, seed: int) -> None:
        batch = PassRequest("r", "m", backend.version("m"), ragged(seed), "cross_entropy")
        assert not isinstance(backend.forward_backward([batch])["r"], RequestError)
        step(backend, "m", AdamParams(learning_rate=2e-2))

    steps: list[Callable[[], Any]] = [
        partial(train, backend, 7),
        partial(backend.save_sampler_checkpoint, None, "m", "far", persist=False),
        partial(train, backend, 8),
        partial(backend.delete_sampler, "far"),
        partial(backend.delete_model, "m"),
    ]
    answers: dict[str, SampleOutput | RequestError] = {}
    batches = iter([[request]])

    def arriving() -> list[SampleRequest]:
        if batch := next(batches, []):
            return batch
        if steps:
            steps.pop(0)()
        return []

    train(undisturbed, 7)
    train(undisturbed, 8)
    after = weights(undisturbed)
    steps.insert(4, lambda: trained.update(weights(backend)))
    trained: dict[str, torch.Tensor] = {}
    backend.serve_samples(arriving, answers.__setitem__)
    assert bits(answers[request.request_id]) == expected
    assert not steps
    assert after.keys() == trained.keys()
    assert all(torch.equal(after[name], trained[name]) for name in after)
    gone = backend.sample([request])[request.request_id]
    assert gone == RequestError("no sampler far is held here", category="server")


def weights(backend: TorchBackend) -> dict[str, torch.Tensor]:
    return {name: matrix.clone() for name, matrix in backend._models["m"].adapter.named()}


def test_what_arriving_raises_ends_the_call_and_nothing_else(backend: TorchBackend) -> None:
    batches = iter([[ask(None, "x", 1, "x", max_tokens=50)], []])
    expected = bits(sample_one(backend, ask(None, "x", seed=3)))
    with pytest.raises(StopIteration):
        backend.serve_samples(lambda: next(batches), lambda *_: None)
    assert bits(sample_one(backend, ask(None, "x", seed=3))) == expected


# -- what is computed --------------------------------------------------------------------------


def shapes_computed(
    backend: TorchBackend, monkeypatch: pytest.MonkeyPatch, requests: list[SampleRequest]
) -> list[tuple[int, ...]]:
    """The shape of the token ids in every call of the model."""
    seen: list[tuple[int, ...]] = []
    decoder = backend._base.decoder

    def noting(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(ids: torch.Tensor, *rest: Any) -> Any:
            seen.append(tuple(ids.shape))
            return method(ids, *rest)

        return call

    with monkeypatch.context() as patch:
        for name in ("prefill", "step"):
            patch.setattr(decoder, name, noting(getattr(decoder, name)))
        backend.sample(requests)
    return seen


def test_a_shared_prompt_is_computed_once(
    backend: TorchBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [
        ask(None, "the same prompt", 5, "a", max_tokens=3),
        ask(None, "the same prompt", 2, "b", max_tokens=3, prompt_logprobs=True),
    ]
    assert shapes_computed(backend, monkeypatch, requests) == [(1, 16), (8,), (8,), (8,)]


def test_prompts_of_one_padded_length_are_computed_together(
    backend: TorchBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the micro-batch's 64 tokens."""
    lengths = (40, 1, 20, 17, 18, 3, 5, 9)
    requests = [ask(None, "p" * n, 1, str(n), max_tokens=1) for n in lengths]
    seen = shapes_computed(backend, monkeypatch, requests)
    assert seen == [(4, 16), (1, 16), (2, 32), (1, 48), (8,)]


def test_finished_rows_cost_nothing(backend: TorchBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond what fills a block."""
    requests = [ask(None, "abc", 10, str(n), max_tokens=n) for n in (4, 1, 2, 4)]
    seen = shapes_computed(backend, monkeypatch, requests)
    assert seen == [(1, 16), (40,), (32,), (24,), (24,)]


def test_padding_follows_from_the_length_alone() -> None:
    assert [padded(n, 1000) for n in (0, 1, 16, 17, 100, 130, 257, 990)] == [
        16, 16, 16, 32, 112, 160, 320, 1000,
    ]  # fmt: skip
    for length in range(1, 5000):
        assert length <= padded(length, 10**6) <= max(16, 1.25 * length + 16)


def test_sampling_needs_no_tokenizer_without_stop_strings(
    base_folder: Path, tmp_path: Path
) -> None:
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((base_folder / name).read_bytes())
    assert len(sample_one(make(tmp_path), ask(None, "x")).sequences[0].tokens) == 12


@pytest.mark.parametrize("window", [None, 40])
def test_attention_over_ragged_rows(window: int | None) -> None:
    """Against torch's own, row by row, through growth and rows that are moved."""
    heads, size, kind = 2, 64, "full_attention" if window is None else "sliding_attention"
    lengths = [300, 290, 5, 1, 3, 9, 2, 7] + [40] * 8 + [700, 2, 650, 1, 1, 1, 1, 1]
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(2, heads, n + 1, size, generator=generator) for n in lengths]
    cache = RowCache(torch.device("cpu"), window)
    for index, (keys, values) in enumerate(rows):
        filled = [(keys[None, :, :-1], values[None, :, :-1])]
        cache.reserve(filled, len(rows), 1)
        cache.fill(filled, torch.tensor([0]), torch.tensor([(index - 1) % len(rows)]))
    cache.move(torch.tensor([23]), torch.tensor([22]), 0)
    order = [*range(1, len(rows)), 0]
    places = np.array([lengths[index] for index in order])
    cache.point_at(torch.from_numpy(places), places)
    assert 1 < len(cache.segments) <= len(rows) // ROW_BLOCK
    q = torch.randn(len(rows), 3 * heads, size, generator=generator)
    k, v = (torch.stack([rows[index][part][:, -1] for index in order]) for part in (0, 1))
    got = cache.layers[0].attend(q, k, v, kind, 0.2).view(len(rows), 3 * heads, size)
    for row, index in enumerate(order):
        keys, values = (
            part[:, -(window or 10**6) :].repeat_interleave(3, 0) for part in rows[index]
        )
        expected = functional.scaled_dot_product_attention(q[row, :, None], keys, values, scale=0.2)
        torch.testing.assert_close(got[row], expected[:, 0], rtol=1e-4, atol=1e-5)


# -- what is asked beside the samples ----------------------------------------------------------


@pytest.fixture(scope="module")
def reference(base_folder: Path) -> Reference:
    return Reference(base_folder)


def logprobs_after(reference: Reference, tokens: Sequence[int]) -> np.ndarray[Any, Any]:
    """All logprobs [N, V] after each token."""
    with torch.no_grad():
        logits = reference.model(input_ids=torch.tensor([list(tokens)])).logits[0]
    logprobs: np.ndarray[Any, Any] = logits.log_softmax(-1).numpy()
    return logprobs


def test_likeliest_tokens_of_the_samples(backend: TorchBackend, reference: Reference) -> None:
    requests = [
        replace(ask(None, "top", 2, str(k), seed=1, top_k=7), topk_sample_logprobs=k)
        for k in (0, 1, 4)
    ]
    answers = backend.sample(requests)
    for request in requests:
        answer = answers[request.request_id]
        assert isinstance(answer, SampleOutput)
        for sequence in answer.sequences:
            if not request.topk_sample_logprobs:
                assert sequence.topk_tokens is sequence.topk_logprobs is None
                continue
            expected = logprobs_after(reference, [*b"top", *sequence.tokens[:-1]])[2:]
            ids = np.argsort(-expected, axis=1)[:, : request.topk_sample_logprobs]
            assert sequence.topk_tokens is not None
            assert sequence.topk_logprobs is not None
            assert sequence.topk_tokens.tolist() == ids.tolist()
            values = np.take_along_axis(expected, ids, 1)
            np.testing.assert_allclose(sequence.topk_logprobs, values, rtol=1e-4, atol=1e-5)


def test_logprobs_of_chosen_tokens(backend: TorchBackend, reference: Reference) -> None:
    prompt = list(b"any token here")
    rng = np.random.default_rng(0)
    targets = rng.integers(-1, 20, (len(prompt) - 1, 5))
    request = replace(ask(None, prompt, max_tokens=1), target_prompt_tokens=targets)
    got = sample_one(backend, request).target_prompt_logprobs
    assert got is not None
    expected = np.take_along_axis(logprobs_after(reference, prompt)[:-1], targets.clip(0), 1)
    np.testing.assert_allclose(got, np.where(targets < 0, 0, expected), rtol=1e-4, atol=1e-5)
    assert got[targets < 0].tolist() == [0] * int((targets < 0).sum())


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
def test_alternatives_to_the_prompt(
    backend: TorchBackend, reference: Reference, temperature: float
) -> None:
    """Drawn with the right frequencies: chi-square per position, as sure as 1 in 10,000."""
    prompt, draws = list(b"alternatives"), 3000
    request = replace(
        ask(None, prompt, 2, max_tokens=1, temperature=temperature, seed=4, top_k=1),
        prompt_alt_tokens_k=draws,
    )
    output = sample_one(backend, request)
    tokens, logprobs = output.prompt_alt_tokens, output.prompt_alt_logprobs
    assert tokens is not None
    assert logprobs is not None
    assert tokens.shape == logprobs.shape == (len(prompt) - 1, draws)
    expected = logprobs_after(reference, prompt)[:-1]
    np.testing.assert_allclose(
        logprobs, np.take_along_axis(expected, tokens, 1), rtol=1e-4, atol=1e-5
    )
    if temperature == 0:
        assert (tokens == expected.argmax(-1)[:, None]).all()
        return
    weights = np.exp(expected.astype(np.float64) / temperature)
    for row, position in zip(weights / weights.sum(1, keepdims=True), tokens, strict=True):
        counts = np.bincount(position, minlength=row.size)
        likely = row * draws >= 5
        seen = np.append(counts[likely], counts[~likely].sum())
        wanted = np.append(row[likely], row[~likely].sum()) * draws
        wanted, seen = wanted[wanted > 1], seen[wanted > 1]
        freedom = len(seen) - 1
        chi_square = ((seen - wanted) ** 2 / wanted).sum()
        assert chi_square < freedom + 3.9 * np.sqrt(2 * freedom) + 10
    fewer = sample_one(backend, replace(request, num_samples=1)).prompt_alt_tokens
    assert fewer is not None
    assert fewer.tolist() == tokens.tolist()
    assert len({tuple(column) for column in tokens.T[:20].tolist()}) > 10


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"topk_prompt_logprobs": 273}, "topk_prompt_logprobs: is 273; give from 0 to 272"),
        ({"topk_sample_logprobs": -1}, "topk_sample_logprobs: is -1; give"),
        ({"num_samples": 20000, "topk_sample_logprobs": 200}, "200 at 240000 positions are over"),
        ({"prompt_alt_tokens_k": 2**24}, "prompt_alt_tokens_k: 16777216 at 3 positions are over"),
        ({"target_prompt_tokens": np.zeros((3, 1), np.int64)}, r"give \[len\(prompt\) - 1, K\]"),
        ({"target_prompt_tokens": np.zeros((2, 0), np.int64)}, "with at least one token id"),
        ({"target_prompt_tokens": -np.ones((2, 1), np.int64)}, "with at least one token id"),
        ({"target_prompt_tokens": np.full((2, 1), 272)}, "token id 272 is outside the vocabulary"),
        ({"target_prompt_tokens": np.array([[1], [-2]])}, "token id -2 is outside"),
    ],
)
def test_what_cannot_be_asked(backend: TorchBackend, fields: dict[str, Any], said: str) -> None:
    bad = replace(ask(None, "abc"), **fields)
    good = ask(None, "abc", 1, "good")
    answers = backend.sample([bad, good])
    answer = answers[bad.request_id]
    assert isinstance(answer, RequestError)
    assert answer.category == "user"
    assert re.search(said, answer.message)
    assert isinstance(answers["good"], SampleOutput)


# -- drawing and stopping ----------------------------------------------------------------------


def first_stop(backend: TorchBackend, text: str, stops: tuple[str, ...]) -> int | None:
    """How many byte tokens of the text are sampled until it stops."""
    params = SamplingParams(max_tokens=100, stop_strings=stops)
    rule, tokens = StopRule(params, backend._base), list(text.encode())
    ends = [n for n in range(1, len(tokens) + 1) if rule.completed_by(tokens[:n])]
    return ends[0] if ends else None


@pytest.mark.parametrize(
    ("text", "stops", "kept"),
    [
        ("one\ntwo\n", ("\n",), "one\n"),
        ("a END b", ("END",), "a END"),
        ("a END b", (" b", "D b"), "a END b"),
        ("aaab", ("aab", "ab"), "aaab"),
        ("x" * 200 + "stop", ("stop",), "x" * 200 + "stop"),
        ("na\u00efve \u2713 done", ("\u00efv",), "na\u00efv"),
        ("na\u00efve \u2713 done", ("\u2713",), "na\u00efve \u2713"),
        ("\u2713" * 40 + "\U0001f600!", ("\U0001f600",), "\u2713" * 40 + "\U0001f600"),
        ("nothing of it", ("zzz",), None),
    ],
)
def test_the_token_that_completes_a_stop_string_is_the_last(
    backend: TorchBackend, text: str, stops: tuple[str, ...], kept: str | None
) -> None:
    expected = len(kept.encode()) if kept is not None else None
    assert first_stop(backend, text, stops) == expected


def test_temperature_near_zero_is_nearly_greedy(backend: TorchBackend) -> None:
    def tokens(temperature: float) -> list[int]:
        request = ask(None, "cold", temperature=temperature, seed=1)
        sequence: SampledSequence = sample_one(backend, request).sequences[0]
        return sequence.tokens.tolist()

    assert tokens(1e-4) == tokens(0.0) == tokens(1e-30) == tokens(1e-300)


def test_sampling_does_not_touch_the_global_random_state(backend: TorchBackend) -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    sample_one(backend, ask(None, "random", 3))
    assert torch.equal(torch.rand(3), expected)


def test_weights_that_are_not_finite_are_not_sampled_from(base_folder: Path) -> None:
    backend = make(base_folder)
    backend.create_model("m", LoraConfig(rank=2, seed=0))
    train(backend, "m", seed=1, steps=1)
    run(backend, "m", ragged(2))
    step(backend, "m", AdamParams(learning_rate=1e38))
    backend.save_sampler_checkpoint(None, "m", "s", persist=False)
    asked = [ask("s", "a", request_id="bad"), ask(None, "a", request_id="good")]
    answers = backend.sample(asked)
    assert isinstance(answers["good"], SampleOutput)
    bad = answers["bad"]
    assert isinstance(bad, RequestError)
    assert (bad.category, "not finite" in bad.message) == ("user", True)


def test_a_request_that_cannot_be_begun_fails_alone(
    base_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = make(base_folder)

    def broken(params: SamplingParams, base: FrozenModel) -> StopRule:
        if params.stop_strings:
            raise RuntimeError("no such rule")
        return StopRule(params, base)

    monkeypatch.setattr(torch_sampler, "StopRule", broken)
    asked = [
        ask(None, "a", request_id="bad", stop_strings=("x",)),
        ask(None, "a", request_id="good"),
    ]
    answers = backend.sample(asked)
    assert isinstance(answers["good"], SampleOutput)
    told = RequestError("RuntimeError: no such rule", category="server")
    assert answers["bad"] == told
    assert backend.sample(asked[:1]) == {"bad": told}
