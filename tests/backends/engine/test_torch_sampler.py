"""Locks: what the sampler computes and no more, places in the cache, and where sequences stop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from backend_contract import ask, sample_one, write_base_model

from backends.engine.records import SampledSequence, SampleOutput, SampleRequest, SamplingParams
from backends.engine.torch_backend import TorchBackend, TorchConfig
from backends.engine.torch_sampler import _StopRule


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
        left, right = expected[request.request_id], answers[request.request_id]
        assert isinstance(left, SampleOutput)
        assert isinstance(right, SampleOutput)
        assert len(left.sequences) == request.num_samples
        for one, other in zip(left.sequences, right.sequences, strict=True):
            assert len(one.tokens) == request.params.max_tokens
            assert one.tokens.tolist() == other.tokens.tolist()
            assert one.logprobs == pytest.approx(other.logprobs, rel=1e-4, abs=1e-5)


def shapes_computed(
    backend: TorchBackend, monkeypatch: pytest.MonkeyPatch, requests: list[SampleRequest]
) -> list[tuple[int, ...]]:
    """The [B, T] of every call of the model."""
    seen: list[tuple[int, ...]] = []
    hook = backend._base.backbone.embed_tokens.register_forward_pre_hook(
        lambda _module, args: seen.append(tuple(args[0].shape))
    )
    backend.sample(requests)
    hook.remove()
    return seen


def test_a_shared_prompt_is_computed_once(
    backend: TorchBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [
        ask(None, "the same prompt", 5, "a", max_tokens=3),
        ask(None, "the same prompt", 2, "b", max_tokens=3, prompt_logprobs=True),
    ]
    assert shapes_computed(backend, monkeypatch, requests) == [(1, 15), (7, 1), (7, 1)]


def test_finished_rows_cost_nothing(backend: TorchBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [ask(None, "abc", 1, str(n), max_tokens=n) for n in (4, 1, 2, 4)]
    seen = shapes_computed(backend, monkeypatch, requests)
    assert seen == [(1, 3), (3, 1), (2, 1), (2, 1)]


def test_sampling_needs_no_tokenizer_without_stop_strings(
    base_folder: Path, tmp_path: Path
) -> None:
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((base_folder / name).read_bytes())
    assert len(sample_one(make(tmp_path), ask(None, "x")).sequences[0].tokens) == 12


def first_stop(backend: TorchBackend, text: str, stops: tuple[str, ...]) -> int | None:
    """How many byte tokens of the text are sampled until it stops."""
    params = SamplingParams(max_tokens=100, stop_strings=stops)
    rule, tokens = _StopRule(params, backend._base), list(text.encode())
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
