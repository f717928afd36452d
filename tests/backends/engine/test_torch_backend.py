"""The torch backend under the contract of every backend, and what is its own."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from backend_contract import (
    VOCAB,
    BackendContract,
    Reference,
    ask,
    ragged,
    run,
    sample_one,
    step,
    train,
    write_base_model,
)
from pydantic import ValidationError
from transformers import (
    AutoModelForCausalLM,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
)

from backends.engine import torch_model
from backends.engine.lora import Adapter, LoraSlot, TrainState
from backends.engine.records import AdamParams, LoraConfig
from backends.engine.torch_backend import TorchBackend, TorchConfig
from backends.engine.torch_model import micro_batches
from backends.errors import UserError

CONFIG = TorchConfig(device="cpu", threads=1, micro_batch_tokens=40)


class TestTorchBackend(BackendContract):
    @pytest.fixture(scope="class")
    @classmethod
    def backend(cls, base_folder: Path) -> TorchBackend:
        return TorchBackend(str(base_folder), CONFIG)


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base_model(tmp_path_factory.mktemp("base"))


@pytest.fixture
def backend(base_folder: Path) -> TorchBackend:
    backend = TorchBackend(str(base_folder), CONFIG)
    backend.create_model("m", LoraConfig(rank=4, seed=11))
    return backend


def gradients(backend: TorchBackend, model_id: str = "m") -> dict[str, torch.Tensor]:
    """The accumulated gradients by matrix."""
    state = backend._models[model_id]
    return {name: g.clone() for name, g in state.adapter.like(state.gradients).named()}


def assert_gradients_match(
    ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], tolerance: float = 1e-4
) -> None:
    """Each matrix within `tolerance` of its largest entry."""
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(ours[name], gradient, rtol=0, atol=tolerance * scale + 1e-7)


def test_gradients_match_peft(backend: TorchBackend, base_folder: Path, tmp_path: Path) -> None:
    train(backend, "m", seed=1)
    backend.save_checkpoint(tmp_path, "m")
    reference, data = Reference(base_folder, tmp_path, train=True), ragged(2)
    run(backend, "m", data)
    reference.cross_entropy(data).backward()
    assert_gradients_match(
        gradients(backend), {name: p.grad for name, p in reference.parameters().items()}
    )


def test_adamw_is_that_of_torch_bar_the_last_digit() -> None:
    """The same gradients into both, with the settings that a small eps makes delicate."""
    slots = {f"{i}.q_proj": LoraSlot(torch.nn.Linear(9, 7)) for i in range(2)}
    config = LoraConfig(rank=3, seed=1, train_mlp=False, train_unembed=False)
    state = TrainState(Adapter.fresh(config, slots, torch.device("cpu")))
    copies = {name: m.detach().clone().requires_grad_() for name, m in state.adapter.named()}
    theirs = torch.optim.AdamW(copies.values(), foreach=False, fused=False)
    settings = [
        AdamParams(1e-2),
        AdamParams(3e-2, 0.8, 0.999, 1e-8, 0.3),
        AdamParams(1e-3, grad_clip_norm=0.7),
        AdamParams(1e-1, 0.0, 0.5, 1e-12, 0.1, 2.0),
        AdamParams(100.0, weight_decay=1e-3),
        AdamParams(1e-3, eps=0.0),
    ]
    rng = torch.Generator().manual_seed(0)
    for index, adam in enumerate(settings):
        ours = state.adapter.like(state.gradients).named()
        for (_, matrix), copy in zip(ours, copies.values(), strict=True):
            copy.grad = torch.randn(copy.shape, generator=rng) * 10.0 ** -(index % 3)
            matrix.copy_(copy.grad)
        expected = torch.nn.utils.clip_grad_norm_(
            copies.values(), adam.grad_clip_norm or float("inf")
        )
        theirs.param_groups[0].update(
            lr=adam.learning_rate,
            betas=(adam.beta1, adam.beta2),
            eps=adam.eps,
            weight_decay=adam.weight_decay,
        )
        theirs.step()
        norm, factor = state.step(adam)
        assert norm == pytest.approx(float(expected), rel=1e-6)
        assert (factor < 1) == (0 < adam.grad_clip_norm < norm)
        for name, matrix in state.adapter.named():
            torch.testing.assert_close(matrix.detach(), copies[name].detach(), rtol=2e-6, atol=0)
    assert state.version == len(settings)


def test_eps_0_leaves_alone_what_has_no_gradient() -> None:
    """0 / 0 in torch's, which would make A NaN at the first step of a fresh adapter."""
    slots = {"q_proj": LoraSlot(torch.nn.Linear(9, 7))}
    config = LoraConfig(rank=3, seed=1, train_mlp=False, train_unembed=False)
    state = TrainState(Adapter.fresh(config, slots, torch.device("cpu")))
    before = {name: matrix.detach().clone() for name, matrix in state.adapter.named()}
    state.step(AdamParams(eps=0.0))
    for name, matrix in state.adapter.named():
        assert torch.equal(matrix.detach(), before[name])


def test_a_large_vocabulary_goes_through_the_head_in_chunks(
    backend: TorchBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = ragged(5)
    whole = run(backend, "m", data)
    expected = gradients(backend)
    step(backend, "m", AdamParams(learning_rate=0.0))
    monkeypatch.setattr(torch_model, "LOGITS_AT_ONCE", 3 * VOCAB)
    largest = 0
    logits = backend._base.logits

    def watched(hidden: torch.Tensor) -> torch.Tensor:
        nonlocal largest
        largest = max(largest, len(hidden))
        return logits(hidden)

    monkeypatch.setattr(backend._base, "logits", watched)
    chunked = run(backend, "m", data)
    assert largest == 3
    assert chunked.metrics["loss:sum"] == pytest.approx(whole.metrics["loss:sum"], rel=1e-6)
    for left, right in zip(whole.outputs, chunked.outputs, strict=True):
        np.testing.assert_allclose(left["logprobs"], right["logprobs"], rtol=1e-5, atol=1e-6)
    assert_gradients_match(gradients(backend), expected, 1e-6)
    request = ask(None, "a prompt", prompt_logprobs=True, topk_prompt_logprobs=2)
    assert sample_one(backend, request).prompt_logprobs is not None


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("adapter_config.json", "{", "adapter_config.json: is not JSON"),
        ("adapter_config.json", "{}", "adapter_config.json: has no usable r and lora_alpha"),
        ("adapter_config.json", '{"use_dora": true}', "sets use_dora, which this engine does not"),
        ("adapter_model.safetensors", "garbage", "adapter_model.safetensors: cannot be read"),
        ("optimizer.safetensors", "garbage", "optimizer.safetensors: cannot be read"),
        ("state.json", '{"version": 1}', "state.json: does not describe a model"),
    ],
)
def test_a_damaged_checkpoint_is_named(
    backend: TorchBackend, tmp_path: Path, file: str, content: str, said: str
) -> None:
    backend.save_checkpoint(tmp_path, "m")
    (tmp_path / file).write_text(content)
    with pytest.raises(UserError, match=re.escape(said)):
        backend.load_checkpoint(tmp_path, "copy", optimizer=True)
    assert not backend.has_model("copy")


def test_the_memory_of_deleted_models_and_samplers_returns(backend: TorchBackend) -> None:
    run(backend, "m", ragged(7))
    backend.save_sampler_checkpoint(None, "m", "s", persist=False)
    sample_one(backend, ask("s", "x"))
    held = [
        weakref.ref(backend._models["m"].adapter.flat),
        weakref.ref(backend._samplers["s"].flat),
    ]
    backend.delete_model("m")
    backend.delete_sampler("s")
    gc.collect()
    assert [ref() for ref in held] == [None, None]


FAMILIES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "qwen2": (Qwen2Config, {}),
    "mistral, sliding window": (MistralConfig, {"sliding_window": 6}),
    "qwen2, every other layer sliding": (
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
}


def write_family(folder: Path, config: type[PreTrainedConfig], extra: dict[str, Any]) -> Path:
    """A tiny, untied model of another family."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(
            config(
                vocab_size=VOCAB,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=8,
                max_position_embeddings=64,
                initializer_range=0.2,
                tie_word_embeddings=False,
                **extra,
            )
        ).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_other_families(family: str, tmp_path: Path) -> None:
    """Passes equal PEFT's, greedy equals generate, sampled logprobs equal teacher-forced ones."""
    base = write_family(tmp_path / "base", *FAMILIES[family])
    backend = TorchBackend(str(base), CONFIG)
    backend.create_model("m", LoraConfig(rank=4, seed=0))
    train(backend, "m", seed=8)
    backend.save_sampler_checkpoint(tmp_path / "adapter", "m", "s")
    reference, data = Reference(base, tmp_path / "adapter"), ragged(9)
    for output, row in zip(run(backend, "m", data, train=False).outputs, data, strict=True):
        expected = reference.logprobs(row.tokens, row.loss_inputs["target_tokens"]).detach()
        np.testing.assert_allclose(output["logprobs"], expected, rtol=1e-4, atol=1e-5)
    requests = [
        ask("s", text, request_id=text, temperature=0, max_tokens=10)
        for text in ("a", "a longer prompt", "short")
    ]
    for text, answer in backend.sample(requests).items():
        prompt = torch.as_tensor(list(text.encode()))
        expected = reference.model.generate(
            input_ids=prompt[None],
            do_sample=False,
            max_new_tokens=10,
            eos_token_id=None,
            pad_token_id=0,
        )[0]
        sequence = answer.sequences[0]
        assert sequence.tokens.tolist() == expected[len(prompt) :].tolist()
        logprobs = reference.logprobs(expected[:-1], expected[1:])[len(prompt) - 1 :]
        np.testing.assert_allclose(sequence.logprobs, logprobs.detach(), rtol=1e-4, atol=1e-5)


def test_a_family_that_would_come_out_wrong_is_refused(tmp_path: Path) -> None:
    base = write_family(tmp_path, GraniteConfig, {"logits_scaling": 4.0})
    with pytest.raises(UserError, match=r"granite\) rescales its logits"):
        TorchBackend(str(base), CONFIG)


def test_a_base_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nothing-here cannot be loaded"):
        TorchBackend(str(tmp_path / "nothing-here"), CONFIG)


def test_bfloat16_computes_near_float32(base_folder: Path) -> None:
    """bfloat16 keeps 8 bits: about 1 % of the logits' size (here up to 5)."""
    data, losses = ragged(10), []
    for dtype in ("float32", "bfloat16"):
        config = CONFIG.model_copy(update={"dtype": dtype})
        backend = TorchBackend(str(base_folder), config)
        backend.create_model("m", LoraConfig(rank=4, seed=0))
        losses.append(run(backend, "m", data).outputs)
        assert backend._models["m"].adapter.flat.dtype == torch.float32
        assert backend.capabilities().dtype == dtype
        assert step(backend, "m", AdamParams())["grad_norm"] > 0
    for left, right in zip(*losses, strict=True):
        np.testing.assert_allclose(left["logprobs"], right["logprobs"], atol=0.15)


@pytest.mark.parametrize("wrong", [{"devise": "cpu"}, {"threads": 0}, {"device": "tpu"}])
def test_a_wrong_config_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        TorchConfig(**wrong)


@pytest.mark.parametrize(
    ("lengths", "budget", "groups"),
    [
        ([3, 9, 5, 5], 10, [[1], [2, 3], [0]]),
        ([3, 9, 5, 5], 18, [[1, 2], [3, 0]]),
        ([50, 2, 2, 2], 6, [[0], [1, 2, 3]]),
        ([4, 4, 4], 100, [[0, 1, 2]]),
    ],
)
def test_micro_batches(lengths: Sequence[int], budget: int, groups: list[list[int]]) -> None:
    assert micro_batches(lengths, budget) == groups
