"""What every compute backend of the engine must do: inherit `BackendContract`, give it `backend`.

The numbers are checked against a reference that shares no code with the engine: plain transformers
and torch, one sequence at a time, and PEFT for adapters, which reaches the engine's weights through
the files it saves. Shapes: N positions of a datum, K target candidates a position.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from backends.engine.abstract import AbstractBackend, ModelNotFound, StaleVersion
from backends.engine.losses import LOSSES
from backends.engine.records import (
    AdamParams,
    Datum,
    LoraConfig,
    PassOutput,
    PassRequest,
    RequestError,
    SampledSequence,
    SampleOutput,
    SampleRequest,
    SamplingParams,
)
from backends.errors import UserError

END = 256
"""The end-of-sequence token of the test model; tokens 0-255 are bytes."""
VOCAB = 272
CONTEXT = 96

ADAM_STEPS = (
    AdamParams(learning_rate=2e-2, beta1=0.9, beta2=0.95, eps=1.0),
    AdamParams(learning_rate=1e-2, beta1=0.8, beta2=0.99, eps=2.0, weight_decay=0.5),
    AdamParams(learning_rate=3e-2, eps=0.5, grad_clip_norm=40.0),
    AdamParams(learning_rate=5e-3, eps=1.0, weight_decay=0.1, grad_clip_norm=1e6),
)
"""Settings that change from step to step; eps is of the gradients' own size (their norm is about
100), for Adam with a small one turns the rounding of a gradient near 0 into a whole step."""


def write_base_model(folder: Path, *, tied: bool = True, seed: int = 0) -> Path:
    """A Qwen3 of two layers with sharp, random logits, and a tokenizer of one token a byte."""
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=tied,
        initializer_range=0.15,
        eos_token_id=END,
        bos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        Qwen3ForCausalLM(config).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    order = {chr_: index for index, chr_ in enumerate(_byte_alphabet())}
    assert sorted(order) == alphabet
    tokenizer = Tokenizer(models.BPE(vocab=order | {"<|end|>": END}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(folder)
    return folder


def _byte_alphabet() -> list[str]:
    """GPT-2's printable character for each byte, in byte order."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    rest = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(rest)) for byte in range(256)]


class Reference:
    """The base model in plain transformers, with a saved adapter through PEFT if one is named."""

    def __init__(self, base: Path, adapter: Path | None = None, *, train: bool = False) -> None:
        model = AutoModelForCausalLM.from_pretrained(
            base, dtype=torch.float32, attn_implementation="eager"
        )
        if adapter is not None:
            model = peft.PeftModel.from_pretrained(model, str(adapter), is_trainable=train)
        self.model = model.eval()

    def logprobs(self, tokens: Sequence[int], targets: Any) -> torch.Tensor:
        """Logprobs of the targets [N] or [N, K] after each of the tokens [N]."""
        logits = self.model(input_ids=torch.as_tensor(np.asarray(tokens))[None]).logits[0]
        wanted = torch.as_tensor(np.asarray(targets))
        picked = logits.log_softmax(-1).gather(-1, wanted.reshape(len(wanted), -1))
        return picked.reshape(wanted.shape)

    def cross_entropy(self, data: Sequence[Datum]) -> torch.Tensor:
        """-sum w * logprob over all datums."""
        terms = []
        for datum in data:
            targets = datum.loss_inputs["target_tokens"]
            weights = datum.loss_inputs.get("weights", np.ones(targets.shape, np.float32))
            logprobs = self.logprobs(datum.tokens, targets)
            terms.append(-(torch.as_tensor(weights) * logprobs).sum())
        return torch.stack(terms).sum()

    def parameters(self) -> dict[str, torch.Tensor]:
        """The trainable matrices under the names of the saved files."""
        return {
            name.replace(".default", ""): parameter
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        }


def datum(rng: np.random.Generator, length: int, **inputs: Any) -> Datum:
    """Random tokens predicting their successors, weight 1 unless `weights` says otherwise."""
    tokens = rng.integers(0, 256, length + 1)
    return Datum(tokens[:-1], {"target_tokens": tokens[1:], **inputs})


def ragged(seed: int, lengths: Sequence[int] = (9, 31, 4, 17, 1, 24)) -> tuple[Datum, ...]:
    """Datums of several lengths whose weights are zero, fractional, negative and one."""
    rng = np.random.default_rng(seed)
    choices = np.array([0.0, 0.0, 1.0, 0.25, -0.5], np.float32)
    return tuple(datum(rng, n, weights=rng.choice(choices, n)) for n in lengths)


def run(
    backend: AbstractBackend,
    model_id: str,
    data: Sequence[Datum],
    loss_fn: str = "cross_entropy",
    *,
    train: bool = True,
    **config: float,
) -> PassOutput:
    """One pass that has to succeed."""
    output = attempt(backend, model_id, data, loss_fn, train=train, **config)
    assert isinstance(output, PassOutput), output
    return output


def attempt(
    backend: AbstractBackend,
    model_id: str,
    data: Sequence[Datum],
    loss_fn: str = "cross_entropy",
    *,
    train: bool = True,
    **config: float,
) -> PassOutput | RequestError:
    """One pass."""
    version = backend.version(model_id)
    request = PassRequest("r", model_id, version, tuple(data), loss_fn, config)
    return (backend.forward_backward if train else backend.forward)([request])["r"]


def step(backend: AbstractBackend, model_id: str, adam: AdamParams) -> Mapping[str, float]:
    """One optimizer step on whatever has been accumulated."""
    return backend.optim_step(model_id, backend.version(model_id), adam).metrics


def train(backend: AbstractBackend, model_id: str, seed: int, steps: int = 2) -> None:
    """A few steps, so that no matrix of the adapter is zero any more."""
    for index in range(steps):
        run(backend, model_id, ragged(seed + index))
        step(backend, model_id, AdamParams(learning_rate=2e-2))


def weights(backend: AbstractBackend, model_id: str, folder: Path) -> dict[str, torch.Tensor]:
    """The model's matrices, read from the files it saves."""
    backend.save_checkpoint(folder, model_id)
    return load_file(folder / "adapter_model.safetensors")


def sample_one(backend: AbstractBackend, request: SampleRequest) -> SampleOutput:
    """One sampling request that has to succeed."""
    output = backend.sample([request])[request.request_id]
    assert isinstance(output, SampleOutput), output
    return output


def ask(
    sampler_id: str | None,
    prompt: Sequence[int] | str,
    num_samples: int = 1,
    request_id: str = "q",
    *,
    prompt_logprobs: bool = False,
    topk_prompt_logprobs: int = 0,
    **params: Any,
) -> SampleRequest:
    """A sampling request; it samples past the end unless told otherwise."""
    tokens = np.array(list(prompt.encode()) if isinstance(prompt, str) else prompt, np.int64)
    settings = SamplingParams(**({"max_tokens": 12, "stop_tokens": ()} | params))
    return SampleRequest(
        request_id, sampler_id, tokens, num_samples, settings, prompt_logprobs, topk_prompt_logprobs
    )


def all_same(left: Sequence[SampledSequence], right: Sequence[SampledSequence]) -> bool:
    """The same tokens and the same bits of their logprobs in every sequence."""
    return [(s.tokens.tolist(), s.logprobs.tobytes()) for s in left] == [
        (s.tokens.tolist(), s.logprobs.tobytes()) for s in right
    ]


def assert_same_outputs(left: PassOutput | RequestError, right: PassOutput | RequestError) -> None:
    """Two passes that went well, with the same bits."""
    assert isinstance(left, PassOutput), left
    assert isinstance(right, PassOutput), right
    assert left.metrics == right.metrics
    for ours, theirs in zip(left.outputs, right.outputs, strict=True):
        assert ours["logprobs"].tobytes() == theirs["logprobs"].tobytes()


def assert_same_bits(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> None:
    """The same names and the same bits."""
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


class BackendContract:
    """The suite. A subclass gives `backend`, on `base_folder`, with small micro-batches if any."""

    @pytest.fixture(scope="class")
    @classmethod
    def base_folder(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return write_base_model(tmp_path_factory.mktemp("base"))

    @pytest.fixture(scope="class")
    @classmethod
    def backend(cls, base_folder: Path) -> AbstractBackend:
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def base(cls, base_folder: Path) -> Reference:
        return Reference(base_folder)

    @pytest.fixture
    def model(self, backend: AbstractBackend) -> Iterator[str]:
        backend.create_model("m", LoraConfig(rank=4, seed=11))
        yield "m"
        backend.delete_model("m")

    @pytest.fixture(scope="class")
    @classmethod
    def trained(
        cls, backend: AbstractBackend, tmp_path_factory: pytest.TempPathFactory
    ) -> tuple[str, Path]:
        """A sampler of weights far from the base, and the folder they are saved in."""
        folder = tmp_path_factory.mktemp("trained")
        backend.create_model("far", LoraConfig(rank=8, seed=3))
        train(backend, "far", seed=40)
        backend.save_sampler_checkpoint(folder, "far", "far-sampler")
        backend.delete_model("far")
        return "far-sampler", folder

    # What it is

    def test_capabilities(self, backend: AbstractBackend, base_folder: Path) -> None:
        told = backend.capabilities()
        assert told.base_model == str(base_folder)
        assert (told.max_context_length, told.vocab_size) == (CONTEXT, VOCAB)
        assert "cross_entropy" in told.losses
        assert set(told.losses) <= set(LOSSES)
        assert told.max_lora_rank >= 8
        assert told.device
        assert told.dtype in {"float32", "bfloat16", "float16"}

    def test_models_come_and_go(self, backend: AbstractBackend) -> None:
        backend.create_model("one", LoraConfig(rank=2, seed=1))
        assert (backend.has_model("one"), backend.version("one")) == (True, 0)
        with pytest.raises(UserError, match="one exists"):
            backend.create_model("one", LoraConfig(rank=2, seed=1))
        backend.delete_model("one")
        assert not backend.has_model("one")
        with pytest.raises(ModelNotFound):
            backend.version("one")
        backend.create_model("one", LoraConfig(rank=3, seed=1))
        backend.delete_model("one")

    # Passes

    def test_a_fresh_adapter_gives_the_logprobs_of_the_base(
        self, backend: AbstractBackend, base: Reference, model: str
    ) -> None:
        data = ragged(0)
        for output, row in zip(run(backend, model, data, train=False).outputs, data, strict=True):
            expected = base.logprobs(row.tokens, row.loss_inputs["target_tokens"]).detach()
            np.testing.assert_allclose(output["logprobs"], expected, rtol=1e-4)

    def test_ragged_batches_equal_one_by_one(self, backend: AbstractBackend, model: str) -> None:
        train(backend, model, seed=1)
        data = ragged(2)
        together = run(backend, model, data, train=False)
        for output, row in zip(together.outputs, data, strict=True):
            alone = run(backend, model, [row], train=False).outputs[0]
            np.testing.assert_allclose(output["logprobs"], alone["logprobs"], rtol=1e-4, atol=1e-5)

    def test_loss_is_the_token_sum_and_forward_gives_the_same(
        self, backend: AbstractBackend, base: Reference, model: str
    ) -> None:
        data = ragged(3)
        expected = base.cross_entropy(data).item()
        backward, forward = run(backend, model, data), run(backend, model, data, train=False)
        assert backward.metrics["loss:sum"] == pytest.approx(expected, rel=1e-5)
        assert forward.metrics["loss:sum"] == pytest.approx(expected, rel=1e-5)
        assert all(name.count(":") == 1 for name in backward.metrics)
        for left, right in zip(backward.outputs, forward.outputs, strict=True):
            np.testing.assert_allclose(left["logprobs"], right["logprobs"], rtol=1e-5, atol=1e-6)

    def test_absent_weights_are_one(self, backend: AbstractBackend, model: str) -> None:
        rng = np.random.default_rng(4)
        row = datum(rng, 7)
        output = run(backend, model, [row], train=False)
        expected = -float(output.outputs[0]["logprobs"].sum())
        assert output.metrics["loss:sum"] == pytest.approx(expected, rel=1e-6)

    def test_soft_targets(
        self, backend: AbstractBackend, base_folder: Path, model: str, tmp_path: Path
    ) -> None:
        rng = np.random.default_rng(5)
        data = [
            Datum(
                rng.integers(0, 256, n),
                {
                    "target_tokens": rng.integers(0, 256, (n, k)),
                    "weights": rng.random((n, k), np.float32),
                },
            )
            for n, k in ((6, 3), (11, 1), (4, 5))
        ]
        backend.save_checkpoint(tmp_path / "before", model)
        output = run(backend, model, data)
        assert [part["logprobs"].shape for part in output.outputs] == [(6, 3), (11, 1), (4, 5)]
        reference = Reference(base_folder, tmp_path / "before", train=True)
        assert output.metrics["loss:sum"] == pytest.approx(
            reference.cross_entropy(data).item(), rel=1e-5
        )
        self._assert_steps_match(backend, model, reference, [data], ADAM_STEPS[1:2], tmp_path)

    def test_a_batch_equals_its_parts_accumulated(
        self, backend: AbstractBackend, model: str, tmp_path: Path
    ) -> None:
        data = ragged(6)
        backend.create_model("parts", LoraConfig(rank=4, seed=11))
        run(backend, model, data)
        for row in data:
            run(backend, "parts", [row])
        adam = AdamParams(learning_rate=0.5, eps=10.0)
        norms = [step(backend, name, adam)["grad_norm"] for name in (model, "parts")]
        assert norms[0] == pytest.approx(norms[1], rel=1e-5)
        left = weights(backend, model, tmp_path / "left")
        right = weights(backend, "parts", tmp_path / "right")
        backend.delete_model("parts")
        for name in left:
            torch.testing.assert_close(left[name], right[name], rtol=1e-4, atol=1e-6)

    def test_requests_do_not_depend_on_what_else_is_in_the_batch(
        self, backend: AbstractBackend, model: str, tmp_path: Path
    ) -> None:
        """Two models, several requests each, in either order of the models: the bits of calls
        of their own. A model's own requests stay in order."""
        seeds = {"first": 1, "second": 2, "alone-first": 1, "alone-second": 2}
        for name, seed in seeds.items():
            backend.create_model(name, LoraConfig(rank=3, seed=seed))
        requests = [
            PassRequest(f"{name}-{part}", name, 0, ragged(90 + seeds[name] + part), "cross_entropy")
            for part in (0, 10)
            for name in ("first", "second")
        ]
        gone = PassRequest("gone", "nobody", 0, ragged(0), "cross_entropy")
        forwards = backend.forward([gone, *reversed(requests)])
        answers = backend.forward_backward([requests[1], gone, requests[0], *requests[2:]])
        for found in (forwards, answers):
            lost = found["gone"]
            assert isinstance(lost, RequestError)
            assert lost.category == "server"
        for request in requests:
            alone = replace(request, model_id=f"alone-{request.model_id}")
            (answer,) = backend.forward([alone]).values()
            assert_same_outputs(forwards[request.request_id], answer)
            (answer,) = backend.forward_backward([alone]).values()
            assert_same_outputs(answers[request.request_id], answer)
        saved = {}
        for name in seeds:
            step(backend, name, AdamParams(learning_rate=0.1))
            saved[name] = weights(backend, name, tmp_path / name)
            backend.delete_model(name)
        assert_same_bits(saved["first"], saved["alone-first"])
        assert_same_bits(saved["second"], saved["alone-second"])

    def test_forward_leaves_no_gradient(self, backend: AbstractBackend, model: str) -> None:
        run(backend, model, ragged(94), train=False)
        assert step(backend, model, AdamParams(learning_rate=0.0))["grad_norm"] == 0

    def test_clearing_gradients_leaves_the_rest_as_it_was(
        self, backend: AbstractBackend, model: str, tmp_path: Path
    ) -> None:
        train(backend, model, seed=95)
        backend.save_checkpoint(tmp_path / "start", model)
        backend.load_checkpoint(tmp_path / "start", "twin", optimizer=True)
        run(backend, model, ragged(97))
        backend.clear_gradients(model)
        assert backend.version(model) == 2
        for name in (model, "twin"):
            backend.clear_gradients(name)
            run(backend, name, ragged(98))
            step(backend, name, ADAM_STEPS[0])
        left = weights(backend, model, tmp_path / "left")
        right = weights(backend, "twin", tmp_path / "right")
        backend.delete_model("twin")
        assert_same_bits(left, right)

    @pytest.mark.parametrize("distance", [-1e4, -90.0, 90.0, 1e4])
    def test_extreme_ratios_stay_finite(
        self, backend: AbstractBackend, model: str, distance: float
    ) -> None:
        """exp(90) is past float32; advantages of both signs, and none."""
        rng = np.random.default_rng(99)
        row = datum(rng, 6)
        p = run(backend, model, [row], train=False).outputs[0]["logprobs"]
        signs = np.array([1, -1, 0.5, -0.5, 0, 2], np.float32)
        inputs = {**row.loss_inputs, "logprobs": p - np.float32(distance), "advantages": signs}
        for loss_fn in set(backend.capabilities().losses) - {"cross_entropy"}:
            output = run(backend, model, [replace(row, loss_inputs=inputs)], loss_fn)
            assert np.isfinite(output.metrics["loss:sum"]), loss_fn
            norm = step(backend, model, AdamParams(learning_rate=0.0))["grad_norm"]
            assert np.isfinite(norm), loss_fn
            if loss_fn == "cispo":
                bound = 4.0 if distance > 0 else 0.0
                expected = -bound * float((p * signs).sum())
                assert output.metrics["loss:sum"] == pytest.approx(expected, rel=1e-4, abs=1e-4)

    @pytest.mark.parametrize(
        ("loss_fn", "config"),
        [
            ("importance_sampling", {}),
            ("ppo", {}),
            ("ppo", {"clip_low_threshold": 0.5, "clip_high_threshold": 1.5}),
            ("cispo", {}),
            ("dro", {"beta": 0.3}),
        ],
    )
    def test_off_policy_losses_and_their_gradients(
        self,
        backend: AbstractBackend,
        base_folder: Path,
        model: str,
        tmp_path: Path,
        loss_fn: str,
        config: dict[str, float],
    ) -> None:
        if loss_fn not in backend.capabilities().losses:
            pytest.skip(f"{loss_fn} is not offered")
        train(backend, model, seed=7)
        backend.save_checkpoint(tmp_path / "before", model)
        reference = Reference(base_folder, tmp_path / "before", train=True)
        rng = np.random.default_rng(8)
        data = []
        for n in (5, 13):
            row = datum(rng, n)
            p = reference.logprobs(row.tokens, row.loss_inputs["target_tokens"]).detach().numpy()
            q = p + rng.normal(0, 0.5, n).astype(np.float32)
            advantages = rng.choice(np.array([0, 1.5, -0.75], np.float32), n)
            data.append(
                replace(
                    row, loss_inputs={**row.loss_inputs, "logprobs": q, "advantages": advantages}
                )
            )
        output = run(backend, model, data, loss_fn, **config)
        terms = []
        for row in data:
            p = reference.logprobs(row.tokens, row.loss_inputs["target_tokens"])
            q, a = (torch.as_tensor(row.loss_inputs[k]) for k in ("logprobs", "advantages"))
            terms.append(_off_policy(loss_fn, p, q, a, config))
        loss = torch.stack(terms).sum()
        assert output.metrics["loss:sum"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-4)
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in reference.parameters().values()]).norm()
        optimizer = torch.optim.AdamW(
            reference.parameters().values(), lr=0.1, betas=(0.9, 0.95), eps=10.0, weight_decay=0.0
        )
        backend.load_checkpoint(tmp_path / "before", model, optimizer=False)
        run(backend, model, data, loss_fn, **config)
        metrics = step(backend, model, AdamParams(learning_rate=0.1, eps=10.0))
        optimizer.step()
        assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
        self._assert_weights(backend, model, reference, tmp_path)

    # The optimizer

    def test_adamw_matches_torch_step_for_step(
        self, backend: AbstractBackend, base_folder: Path, model: str, tmp_path: Path
    ) -> None:
        backend.save_checkpoint(tmp_path / "before", model)
        reference = Reference(base_folder, tmp_path / "before", train=True)
        batches = [ragged(9 + index) for index in range(len(ADAM_STEPS))]
        for data in batches[:1]:
            run(backend, model, data)
        self._assert_steps_match(backend, model, reference, batches, ADAM_STEPS, tmp_path)

    def _assert_steps_match(
        self,
        backend: AbstractBackend,
        model: str,
        reference: Reference,
        batches: Sequence[Sequence[Datum]],
        adams: Sequence[AdamParams],
        folder: Path,
    ) -> None:
        """The first batch has been passed already; each step's weights are those of torch."""
        parameters = reference.parameters()
        optimizer = torch.optim.AdamW(parameters.values())
        for index, (data, adam) in enumerate(zip(batches, adams, strict=True)):
            if index:
                run(backend, model, data)
            optimizer.zero_grad()
            reference.cross_entropy(data).backward()
            limit = adam.grad_clip_norm or float("inf")
            norm = torch.nn.utils.clip_grad_norm_(parameters.values(), limit)
            optimizer.param_groups[0].update(
                lr=adam.learning_rate,
                betas=(adam.beta1, adam.beta2),
                eps=adam.eps,
                weight_decay=adam.weight_decay,
            )
            optimizer.step()
            assert step(backend, model, adam)["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
            assert limit != 40 or norm > 60, "this step is meant to clip"
            self._assert_weights(backend, model, reference, folder)

    def _assert_weights(
        self, backend: AbstractBackend, model: str, reference: Reference, folder: Path
    ) -> None:
        ours, theirs = weights(backend, model, folder / "now"), reference.parameters()
        assert ours.keys() == theirs.keys()
        for name, matrix in ours.items():
            torch.testing.assert_close(
                matrix,
                theirs[name].detach(),
                rtol=1e-4,
                atol=2e-6,
                msg=lambda m, n=name: f"{n}: {m}",
            )

    def test_versions_count_steps_and_a_wrong_one_is_refused(
        self, backend: AbstractBackend, model: str
    ) -> None:
        assert backend.version(model) == 0
        run(backend, model, ragged(13))
        step(backend, model, AdamParams())
        assert backend.version(model) == 1
        with pytest.raises(StaleVersion, match="version 1"):
            backend.optim_step(model, 0, AdamParams())
        stale = PassRequest("r", model, 0, ragged(13), "cross_entropy")
        answer = backend.forward_backward([stale])["r"]
        assert isinstance(answer, RequestError)
        assert answer.category == "server"
        assert "version 1" in answer.message
        assert backend.version(model) == 1

    def test_a_step_without_gradients_takes_zero_gradients(
        self, backend: AbstractBackend, model: str, tmp_path: Path
    ) -> None:
        before = weights(backend, model, tmp_path / "before")
        adam = AdamParams(learning_rate=0.1, weight_decay=0.5)
        assert step(backend, model, adam)["grad_norm"] == 0
        after = weights(backend, model, tmp_path / "after")
        for name in before:
            torch.testing.assert_close(after[name], before[name] * (1 - 0.1 * 0.5))

    def test_eps_0_moves_what_has_a_gradient_and_leaves_the_rest(
        self, backend: AbstractBackend, model: str, tmp_path: Path
    ) -> None:
        """At the first step A has no gradient: 0 / 0 has to be no step, not NaN."""
        before = weights(backend, model, tmp_path / "before")
        run(backend, model, ragged(13))
        step(backend, model, AdamParams(learning_rate=0.01, eps=0.0))
        for name, matrix in weights(backend, model, tmp_path / "after").items():
            if ".lora_A." in name:
                assert torch.equal(matrix, before[name])
            else:
                moved = matrix[matrix != 0].abs()
                torch.testing.assert_close(moved, torch.full_like(moved, 0.01))

    def test_gradients_too_large_to_step_on_move_nothing(
        self, backend: AbstractBackend, model: str, tmp_path: Path
    ) -> None:
        """Refused at the pass or at the step; either way they are gone afterwards."""
        before = weights(backend, model, tmp_path / "before")
        rng = np.random.default_rng(3)
        row = datum(rng, 6, weights=np.full(6, 1e30, np.float32))
        if isinstance(attempt(backend, model, [row]), PassOutput):
            with pytest.raises(UserError, match="the step was not taken"):
                step(backend, model, AdamParams())
        assert backend.version(model) == 0
        assert step(backend, model, AdamParams(learning_rate=0.0))["grad_norm"] == 0
        assert_same_bits(before, weights(backend, model, tmp_path / "after"))

    @pytest.mark.parametrize(
        ("adam", "said"),
        [
            (AdamParams(learning_rate=float("nan")), "adam_params.learning_rate: is nan"),
            (AdamParams(beta1=1.0), "adam_params.beta1: is 1.0"),
            (AdamParams(beta2=-0.1), "adam_params.beta2: is -0.1"),
            (AdamParams(eps=-1.0), "adam_params.eps: is -1.0"),
            (AdamParams(weight_decay=float("inf")), "adam_params.weight_decay: is inf"),
            (AdamParams(grad_clip_norm=-1.0), "adam_params.grad_clip_norm: is -1.0"),
        ],
    )
    def test_bad_optimizer_settings_are_named(
        self, backend: AbstractBackend, model: str, adam: AdamParams, said: str
    ) -> None:
        run(backend, model, ragged(15))
        with pytest.raises(UserError, match=said):
            step(backend, model, adam)
        assert backend.version(model) == 0
        assert step(backend, model, AdamParams())["grad_norm"] > 0, "the gradients should be there"

    # Adapters

    def test_seeds_decide_the_adapter_and_nothing_else_does(
        self, backend: AbstractBackend, tmp_path: Path
    ) -> None:
        seeds = {"a": 5, "other": 6, "b": 5, "fresh": None, "fresher": None}
        for name, seed in seeds.items():
            torch.rand(3)
            backend.create_model(name, LoraConfig(rank=4, seed=seed))
        saved = {name: weights(backend, name, tmp_path / name) for name in seeds}
        for name in seeds:
            backend.delete_model(name)
        assert_same_bits(saved["a"], saved["b"])
        distinct = [saved[name] for name in ("a", "other", "fresh", "fresher")]
        for matrix in (name for name in saved["a"] if "lora_A" in name):
            assert len({tuple(w[matrix].flatten().tolist()) for w in distinct}) == 4
        for matrix in (name for name in saved["a"] if "lora_B" in name):
            assert not saved["a"][matrix].any()

    @pytest.mark.parametrize(
        ("config", "leaves"),
        [
            (LoraConfig(3, 0, True, False, False), {"q_proj", "k_proj", "v_proj", "o_proj"}),
            (LoraConfig(3, 0, False, True, False), {"gate_proj", "up_proj", "down_proj"}),
            (LoraConfig(3, 0, False, False, True), {"lm_head"}),
        ],
        ids=["attention", "mlp", "unembed"],
    )
    def test_the_config_chooses_the_layers(
        self, backend: AbstractBackend, tmp_path: Path, config: LoraConfig, leaves: set[str]
    ) -> None:
        backend.create_model("layers", config)
        names = weights(backend, "layers", tmp_path)
        backend.delete_model("layers")
        assert {name.split(".")[-3] for name in names} == leaves
        assert all(3 in matrix.shape for matrix in names.values())

    def test_saved_adapters_load_in_peft_with_the_same_logprobs(
        self, backend: AbstractBackend, base_folder: Path, model: str, tmp_path: Path
    ) -> None:
        train(backend, model, seed=14)
        matrices = weights(backend, model, tmp_path)
        assert all(".lora_A." in name or ".lora_B." in name for name in matrices)
        reference = Reference(base_folder, tmp_path)
        assert reference.model.peft_config["default"].lora_alpha == 32
        assert reference.model.peft_config["default"].base_model_name_or_path == str(base_folder)
        data = ragged(16)
        for output, row in zip(run(backend, model, data, train=False).outputs, data, strict=True):
            expected = reference.logprobs(row.tokens, row.loss_inputs["target_tokens"]).detach()
            np.testing.assert_allclose(output["logprobs"], expected, rtol=1e-4, atol=1e-5)

    def test_an_adapter_made_by_peft_can_be_trained_and_sampled(
        self, backend: AbstractBackend, base_folder: Path, tmp_path: Path
    ) -> None:
        plain = AutoModelForCausalLM.from_pretrained(base_folder, dtype=torch.float32)
        config = peft.LoraConfig(
            r=5, lora_alpha=10, target_modules=["q_proj", "down_proj"], init_lora_weights=False
        )
        peft.get_peft_model(plain, config).save_pretrained(tmp_path)
        backend.load_checkpoint(tmp_path, "theirs", optimizer=False)
        data, reference = ragged(6), Reference(base_folder, tmp_path)
        for output, row in zip(run(backend, "theirs", data).outputs, data, strict=True):
            expected = reference.logprobs(row.tokens, row.loss_inputs["target_tokens"]).detach()
            np.testing.assert_allclose(output["logprobs"], expected, rtol=1e-4, atol=1e-5)
        assert step(backend, "theirs", AdamParams())["grad_norm"] > 0
        backend.delete_model("theirs")
        backend.load_sampler_checkpoint(tmp_path, "theirs")
        assert len(sample_one(backend, ask("theirs", "x")).sequences[0].tokens) == 12
        backend.delete_sampler("theirs")

    def test_two_tenants_do_not_influence_each_other(
        self, backend: AbstractBackend, tmp_path: Path
    ) -> None:
        config, adam = LoraConfig(rank=4, seed=21), replace(ADAM_STEPS[1], learning_rate=0.1)
        backend.create_model("alone", config)
        for index in range(3):
            run(backend, "alone", ragged(20 + index))
            step(backend, "alone", adam)
        backend.create_model("left", config)
        backend.create_model("right", replace(config, rank=7, seed=22))
        for index in range(3):
            run(backend, "left", ragged(20 + index))
            run(backend, "right", ragged(30 + index), train=index != 1)
            step(backend, "right", replace(adam, weight_decay=0.9))
            backend.sample([ask(None, "ab", temperature=1.0)])
            step(backend, "left", adam)
        saved = [weights(backend, name, tmp_path / name) for name in ("alone", "left")]
        for name in ("alone", "left", "right"):
            backend.delete_model(name)
        assert_same_bits(*saved)

    # Checkpoints

    @pytest.mark.parametrize("after", [0, 2])
    def test_training_goes_on_from_a_checkpoint_with_the_same_bits(
        self, backend: AbstractBackend, model: str, tmp_path: Path, after: int
    ) -> None:
        train(backend, model, seed=50, steps=after)
        backend.save_checkpoint(tmp_path / "saved", model)
        assert not [
            p for p in (tmp_path / "saved").iterdir() if p.suffix in {".bin", ".pt", ".pkl"}
        ]
        backend.load_checkpoint(tmp_path / "saved", "copy", optimizer=True)
        assert backend.version("copy") == backend.version(model) == after
        for name in (model, "copy"):
            for data, adam in zip([ragged(60), ragged(61)], ADAM_STEPS, strict=False):
                run(backend, name, data)
                step(backend, name, adam)
        left = weights(backend, model, tmp_path / "left")
        right = weights(backend, "copy", tmp_path / "right")
        backend.delete_model("copy")
        assert_same_bits(left, right)

    def test_loading_drops_accumulated_gradients_and_can_leave_the_optimizer(
        self, backend: AbstractBackend, model: str, tmp_path: Path
    ) -> None:
        train(backend, model, seed=52)
        before = weights(backend, model, tmp_path)
        run(backend, model, ragged(54))
        backend.load_checkpoint(tmp_path, model, optimizer=False)
        assert backend.version(model) == 0
        assert step(backend, model, AdamParams(learning_rate=0.1))["grad_norm"] == 0
        assert_same_bits(before, weights(backend, model, tmp_path / "after"))

    def test_a_missing_or_unfit_checkpoint_is_said_and_changes_nothing(
        self, backend: AbstractBackend, model: str, tmp_path: Path
    ) -> None:
        before = weights(backend, model, tmp_path / "before")
        with pytest.raises(ModelNotFound, match="adapter_config"):
            backend.load_checkpoint(tmp_path / "nowhere", model, optimizer=True)
        backend.save_sampler_checkpoint(tmp_path / "light", model, "s")
        backend.delete_sampler("s")
        with pytest.raises(UserError, match="without the optimizer"):
            backend.load_checkpoint(tmp_path / "light", model, optimizer=True)
        other = write_base_model(tmp_path / "other", tied=False)
        wide = AutoModelForCausalLM.from_pretrained(other)
        wide.config.hidden_size = 64
        wide = Qwen3ForCausalLM(wide.config)
        lora = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
        peft.get_peft_model(wide, lora).save_pretrained(tmp_path / "wide")
        with pytest.raises(UserError, match=r"q_proj\.lora_A\.weight has shape"):
            backend.load_checkpoint(tmp_path / "wide", model, optimizer=False)
        assert_same_bits(before, weights(backend, model, tmp_path / "after"))

    # Samplers

    def test_sampling_leaves_training_untouched_and_samplers_keep_their_weights(
        self, backend: AbstractBackend, model: str, tmp_path: Path
    ) -> None:
        train(backend, model, seed=70)
        backend.save_checkpoint(tmp_path / "start", model)
        backend.load_checkpoint(tmp_path / "start", "twin", optimizer=True)
        backend.save_sampler_checkpoint(None, model, "kept", persist=False)
        request = ask("kept", "hello", 3, temperature=1.0, seed=1)
        first = sample_one(backend, request)
        for name in (model, "twin"):
            run(backend, name, ragged(72))
            if name == model:
                sample_one(backend, request)
            step(backend, name, ADAM_STEPS[0])
        assert_same_bits(
            weights(backend, model, tmp_path / "a"), weights(backend, "twin", tmp_path / "b")
        )
        backend.delete_model("twin")
        again = sample_one(backend, request)
        backend.delete_sampler("kept")
        for left, right in zip(first.sequences, again.sequences, strict=True):
            assert left.tokens.tolist() == right.tokens.tolist()
            assert left.logprobs.tolist() == right.logprobs.tolist()

    def test_either_kind_of_save_can_be_sampled_from(
        self, backend: AbstractBackend, model: str, tmp_path: Path
    ) -> None:
        train(backend, model, seed=76)
        backend.save_checkpoint(tmp_path / "full", model)
        backend.save_sampler_checkpoint(tmp_path / "light", model, "held")
        for name in ("full", "light"):
            assert not backend.has_sampler(name)
            backend.load_sampler_checkpoint(tmp_path / name, name)
            assert backend.has_sampler(name)
        drawn = [
            sample_one(backend, ask(name, "text", 2, temperature=1.0, seed=4)).sequences
            for name in ("held", "full", "light")
        ]
        assert all_same(drawn[0], drawn[1])
        assert all_same(drawn[0], drawn[2])
        for name in ("held", "full", "light"):
            backend.delete_sampler(name)
            assert not backend.has_sampler(name)
            answer = backend.sample([ask(name, "text")])["q"]
            assert isinstance(answer, RequestError)
            assert answer.category == "server"

    def test_a_sampler_can_be_saved_over(self, backend: AbstractBackend, model: str) -> None:
        request = ask("inflight", "text", 2, temperature=1.0, seed=4)
        drawn = []
        for seed in (77, 78):
            train(backend, model, seed)
            backend.save_sampler_checkpoint(None, model, "inflight", persist=False)
            drawn.append(sample_one(backend, request).sequences)
        backend.delete_sampler("inflight")
        assert not all_same(*drawn)

    @pytest.mark.parametrize("use_base", [False, True], ids=["adapter", "base"])
    def test_greedy_equals_generate(
        self,
        backend: AbstractBackend,
        base_folder: Path,
        trained: tuple[str, Path],
        use_base: bool,
    ) -> None:
        sampler, folder = trained
        reference = Reference(base_folder, None if use_base else folder)
        prompts = ["a", "some longer prompt", "middle one", "a"]
        requests = [
            ask(
                None if use_base else sampler, text, request_id=str(i), temperature=0, max_tokens=20
            )
            for i, text in enumerate(prompts)
        ]
        answers = backend.sample(requests)
        for request in requests:
            output = reference.model.generate(
                input_ids=torch.as_tensor(request.prompt)[None],
                do_sample=False,
                max_new_tokens=20,
                eos_token_id=None,
                pad_token_id=0,
            )[0, request.prompt.size :]
            answer = answers[request.request_id]
            assert isinstance(answer, SampleOutput)
            assert answer.sequences[0].tokens.tolist() == output.tolist()

    def test_sampled_logprobs_are_those_of_the_weights_at_temperature_1(
        self, backend: AbstractBackend, base_folder: Path, trained: tuple[str, Path]
    ) -> None:
        sampler, folder = trained
        reference = Reference(base_folder, folder)
        requests = [
            ask(sampler, "first prompt", 3, "q0", temperature=1.0, seed=1, max_tokens=30),
            ask(sampler, "2nd", 2, "q1", temperature=0.7, top_k=5, seed=2),
            ask(sampler, "a third one", 2, "q2", temperature=1.3, top_p=0.8, seed=3, max_tokens=7),
            ask(sampler, "2nd", 1, "q3", temperature=0.0),
        ]
        answers = backend.sample(requests)
        for request in requests:
            answer = answers[request.request_id]
            assert isinstance(answer, SampleOutput)
            for sequence in answer.sequences:
                whole = np.concatenate([request.prompt, sequence.tokens])
                expected = reference.logprobs(whole[:-1], whole[1:])[request.prompt.size - 1 :]
                np.testing.assert_allclose(
                    sequence.logprobs, expected.detach(), rtol=1e-4, atol=1e-5
                )

    def test_an_on_policy_ratio_is_one(self, backend: AbstractBackend, model: str) -> None:
        train(backend, model, seed=74)
        backend.save_sampler_checkpoint(None, model, "policy", persist=False)
        request = ask("policy", "prompt", 4, temperature=1.0, seed=5, max_tokens=20)
        data = []
        for sequence in sample_one(backend, request).sequences:
            whole = np.concatenate([request.prompt, sequence.tokens])
            masked = np.zeros(request.prompt.size - 1, np.float32)
            data.append(
                Datum(
                    whole[:-1],
                    {
                        "target_tokens": whole[1:],
                        "logprobs": np.concatenate([masked, sequence.logprobs]),
                        "advantages": np.concatenate([masked, np.ones_like(sequence.logprobs)]),
                    },
                )
            )
        output = run(backend, model, data, "importance_sampling", train=False)
        backend.delete_sampler("policy")
        assert output.metrics["loss:sum"] == pytest.approx(-80, rel=1e-4)

    def test_a_sample_depends_on_its_request_alone(
        self, backend: AbstractBackend, trained: tuple[str, Path]
    ) -> None:
        sampler, _ = trained
        request = ask(sampler, "alone or not", 3, temperature=1.0, seed=9, max_tokens=25)
        alone = sample_one(backend, request)
        crowd = [
            ask(sampler, "x" * (1 + 7 * i), 2, f"c{i}", temperature=0.5, top_k=3, max_tokens=5 + i)
            for i in range(5)
        ]
        answer = backend.sample(
            [*crowd[:2], request, ask(None, "base", request_id="b"), *crowd[2:]]
        )
        together = answer["q"]
        assert isinstance(together, SampleOutput)
        assert all_same(alone.sequences, together.sequences)
        longer = sample_one(backend, replace(request, num_samples=5))
        assert all_same(alone.sequences, longer.sequences[:3])
        assert len({tuple(sequence.tokens.tolist()) for sequence in longer.sequences}) == 5
        other = sample_one(backend, replace(request, params=replace(request.params, seed=10)))
        assert not all_same(alone.sequences, other.sequences)

    def test_samples_that_arrive_meanwhile_are_served(
        self, backend: AbstractBackend, trained: tuple[str, Path]
    ) -> None:
        """Each request that was given is answered once; a backend need not ask a second time."""
        waiting = [
            [ask(trained[0], "first", 2, "a", seed=1), ask(None, "other", 1, "b", seed=2)],
            [ask(trained[0], "joins", 1, "c", seed=3), ask("nobody", "x", 1, "d")],
        ]
        given: dict[str, SampleRequest] = {}
        answers: list[tuple[str, SampleOutput | RequestError]] = []

        def arriving() -> list[SampleRequest]:
            requests = waiting.pop(0) if waiting else []
            given.update({request.request_id: request for request in requests})
            return requests

        backend.serve_samples(arriving, lambda *answer: answers.append(answer))
        assert sorted(request_id for request_id, _ in answers) == sorted(given)
        for request_id, answer in answers:
            if isinstance(answer, RequestError):
                assert (request_id, answer.category) == ("d", "server")
                continue
            expected = sample_one(backend, given[request_id])
            assert all_same(expected.sequences, answer.sequences)

    def test_unseeded_samples_differ(
        self, backend: AbstractBackend, trained: tuple[str, Path]
    ) -> None:
        request = ask(trained[0], "z", 4, temperature=1.0, max_tokens=25)
        drawn = [*sample_one(backend, request).sequences, *sample_one(backend, request).sequences]
        assert len({tuple(sequence.tokens.tolist()) for sequence in drawn}) == 8

    @pytest.mark.parametrize(
        ("params", "kept"),
        [
            ({"temperature": 1.0}, None),
            ({"temperature": 0.6}, None),
            ({"temperature": 1.0, "top_k": 3}, 3),
            ({"temperature": 0.8, "top_p": 0.7}, None),
            ({"temperature": 1.5, "top_k": 8, "top_p": 0.5}, None),
        ],
        ids=["plain", "temperature", "top_k", "top_p", "all"],
    )
    def test_tokens_are_drawn_with_the_right_frequencies(
        self,
        backend: AbstractBackend,
        base: Reference,
        params: dict[str, float],
        kept: int | None,
    ) -> None:
        """2,000 first tokens against the distribution computed here; chi-squared below its mean
        + 6 standard deviations, and nothing outside top-k and top-p."""
        count = 2000
        request = ask(None, "frequency", count, seed=17, max_tokens=1, **params)
        drawn = np.array([int(s.tokens[0]) for s in sample_one(backend, request).sequences])
        logits = base.model(input_ids=torch.as_tensor(request.prompt)[None]).logits[0, -1].double()
        probs = (logits / params["temperature"]).softmax(-1).detach().numpy()
        order = np.argsort(-probs, kind="stable")
        allowed = order[: int(params.get("top_k", len(order)))]
        ranked = probs[allowed] / probs[allowed].sum()
        inside = np.cumsum(ranked) - ranked < params.get("top_p", 2)
        allowed, ranked = allowed[inside], ranked[inside] / ranked[inside].sum()
        assert set(drawn.tolist()) <= set(allowed.tolist())
        assert kept is None or len(allowed) == kept
        common = ranked * count >= 5
        observed = np.array([(drawn == token).sum() for token in allowed[common]])
        expected = ranked[common] * count
        rest = count - expected.sum()
        chi = float(((observed - expected) ** 2 / expected).sum())
        if rest > 1e-6:
            chi += float((count - observed.sum() - rest) ** 2 / rest)
        freedom = max(1, int(common.sum()))
        assert chi < freedom + 6 * (2 * freedom) ** 0.5

    # How sequences end

    def test_stops(self, backend: AbstractBackend, trained: tuple[str, Path]) -> None:
        request = ask(trained[0], "stop here", 1, temperature=1.0, seed=3, max_tokens=40)
        free = sample_one(backend, request).sequences[0]
        assert (len(free.tokens), free.stop_reason) == (40, "length")
        text = [bytes([token]) if token < 256 else b"" for token in free.tokens.tolist()]
        token = int(free.tokens[10])
        first = free.tokens.tolist().index(token)
        by_token = replace(request, params=replace(request.params, stop_tokens=(token,)))
        stopped = sample_one(backend, by_token).sequences[0]
        assert stopped.stop_reason == "stop"
        assert stopped.tokens.tolist() == free.tokens[: first + 1].tolist()
        assert stopped.logprobs.shape == stopped.tokens.shape
        plain = [
            i
            for i in range(4, 38)
            if all(32 <= c < 127 for c in b"".join(text[i : i + 2])) and text[i] and text[i + 1]
        ]
        string = b"".join(text[plain[0] : plain[0] + 2]).decode()
        end = b"".join(text).index(string.encode()) + 2
        for params in (
            replace(request.params, stop_strings=(string,), stop_tokens=None),
            replace(
                request.params, stop_strings=("never in there", string), stop_tokens=(END + 5,)
            ),
        ):
            by_string = sample_one(backend, replace(request, params=params)).sequences[0]
            assert by_string.stop_reason == "stop"
            kept = [bytes([t]) if t < 256 else b"" for t in by_string.tokens.tolist()]
            assert b"".join(kept).endswith(string.encode())
            assert len(b"".join(kept)) == end

    def test_end_token_stops_unless_stops_are_named(self, backend: AbstractBackend) -> None:
        open_ended = ask(None, [7, END, 9], 32, temperature=3.0, seed=1, max_tokens=40)
        implicit = replace(open_ended, params=replace(open_ended.params, stop_tokens=None))
        for left, right in zip(
            sample_one(backend, open_ended).sequences,
            sample_one(backend, implicit).sequences,
            strict=True,
        ):
            tokens = left.tokens.tolist()
            cut = tokens.index(END) + 1 if END in tokens else len(tokens)
            assert right.tokens.tolist() == tokens[:cut]
            assert right.stop_reason == ("stop" if END in tokens else "length")
        ended = [END in s.tokens for s in sample_one(backend, open_ended).sequences]
        assert any(ended), "the seed should let some sample end"

    def test_max_tokens_is_clipped_to_the_context(self, backend: AbstractBackend) -> None:
        sequence = sample_one(backend, ask(None, [1] * 90, 2, max_tokens=10**6)).sequences[1]
        assert (len(sequence.tokens), sequence.stop_reason) == (CONTEXT - 90, "length")

    # Prompts

    def test_prompt_logprobs(
        self, backend: AbstractBackend, base_folder: Path, trained: tuple[str, Path]
    ) -> None:
        sampler, folder = trained
        reference = Reference(base_folder, folder)
        prompt = "what is asked"
        answer = sample_one(
            backend, ask(sampler, prompt, 2, prompt_logprobs=True, topk_prompt_logprobs=3)
        )
        tokens = torch.as_tensor(list(prompt.encode()))
        expected = reference.model(input_ids=tokens[None]).logits[0].log_softmax(-1).detach()
        assert answer.prompt_logprobs is not None
        assert np.isnan(answer.prompt_logprobs[0])
        np.testing.assert_allclose(
            answer.prompt_logprobs[1:],
            expected[:-1].gather(-1, tokens[1:, None])[:, 0],
            rtol=1e-4,
            atol=1e-5,
        )
        top = expected[:-1].topk(3)
        assert answer.topk_prompt_tokens is not None
        assert answer.topk_prompt_logprobs is not None
        assert answer.topk_prompt_tokens[1:].tolist() == top.indices.tolist()
        np.testing.assert_allclose(
            answer.topk_prompt_logprobs[1:], top.values, rtol=1e-4, atol=1e-5
        )
        assert np.isnan(answer.topk_prompt_logprobs[0]).all()
        plain = sample_one(backend, ask(sampler, prompt))
        assert plain.prompt_logprobs is None
        assert plain.topk_prompt_tokens is None

    # Mistakes

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"target_tokens": None}, r"data\[1\]\.loss_fn_inputs\.target_tokens: is missing"),
            ({"weights": np.ones(3, np.float32)}, r"data\[1\]\.loss_fn_inputs\.weights: has shape"),
            ({"weights": np.full(5, np.nan, np.float32)}, r"data\[1\].*weights.*not finite"),
            ({"target_tokens": np.full(5, VOCAB)}, rf"data\[1\].*token id {VOCAB} at position 0"),
            ({"advantages": np.ones(5, np.float32)}, r"data\[1\].*advantages: cross_entropy takes"),
        ],
        ids=["missing", "shape", "nan", "vocabulary", "unknown"],
    )
    def test_a_bad_datum_fails_its_request_whole(
        self,
        backend: AbstractBackend,
        model: str,
        change: dict[str, Any],
        said: str,
    ) -> None:
        rng = np.random.default_rng(80)
        bad = datum(rng, 5)
        inputs = {k: v for k, v in {**bad.loss_inputs, **change}.items() if v is not None}
        requests = [
            PassRequest("good", model, 0, (datum(rng, 5),), "cross_entropy"),
            PassRequest(
                "bad", model, 0, (datum(rng, 5), replace(bad, loss_inputs=inputs)), "cross_entropy"
            ),
        ]
        answers = backend.forward_backward(requests)
        alone = run(backend, model, requests[0].data, train=False)
        answer = answers["bad"]
        assert isinstance(answer, RequestError)
        assert answer.category == "user"
        assert re.search(said, answer.message), answer.message
        good = answers["good"]
        assert isinstance(good, PassOutput)
        assert good.metrics["loss:sum"] == pytest.approx(alone.metrics["loss:sum"])
        both = step(backend, model, AdamParams(learning_rate=0.0))["grad_norm"]
        run(backend, model, requests[0].data)
        only_good = step(backend, model, AdamParams(learning_rate=0.0))["grad_norm"]
        assert both == only_good

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"loss_fn": "hinge"}, "loss_fn: there is no loss 'hinge'"),
            ({"loss_config": {"beta": 1.0}}, "loss_fn_config.beta: cross_entropy has no such key"),
            ({"data": ()}, "data: holds no datum"),
            ({"data": ragged(0, [CONTEXT + 1])}, f"model_input: has {CONTEXT + 1} tokens"),
        ],
        ids=["loss", "config", "empty", "long"],
    )
    def test_a_bad_request_says_what_is_wrong(
        self, backend: AbstractBackend, model: str, change: dict[str, Any], said: str
    ) -> None:
        request = replace(PassRequest("r", model, 0, ragged(0), "cross_entropy"), **change)
        answer = backend.forward_backward([request])["r"]
        assert isinstance(answer, RequestError)
        assert said in answer.message
        assert answer.category == "user"

    def test_a_loss_that_is_not_finite_leaves_no_gradient(
        self, backend: AbstractBackend, model: str
    ) -> None:
        rng = np.random.default_rng(81)
        huge = np.full(6, 3e38, np.float32)
        answer = attempt(backend, model, [datum(rng, 4), datum(rng, 6, weights=huge)])
        assert isinstance(answer, RequestError)
        assert "lower the learning rate" in answer.message or "scale" in answer.message
        assert step(backend, model, AdamParams(learning_rate=0.0))["grad_norm"] == 0

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"prompt": np.array([], np.int64)}, "prompt: holds no tokens"),
            ({"prompt": np.array([1, VOCAB])}, f"prompt: token id {VOCAB} at position 1"),
            ({"prompt": np.ones(CONTEXT, np.int64)}, f"prompt: has {CONTEXT} tokens"),
            ({"num_samples": 0}, "num_samples: is 0"),
            ({"params": SamplingParams(max_tokens=0)}, "max_tokens: is 0"),
            ({"params": SamplingParams(4, temperature=-1.0)}, "temperature: is -1.0"),
            ({"params": SamplingParams(4, top_p=0.0)}, "top_p: is 0.0"),
            ({"params": SamplingParams(4, top_k=-2)}, "top_k: is -2"),
            ({"params": SamplingParams(4, stop_strings=("",))}, "stop: is"),
            ({"sampler_id": "nobody"}, "no sampler nobody"),
        ],
    )
    def test_a_bad_sampling_request_fails_alone(
        self, backend: AbstractBackend, change: dict[str, Any], said: str
    ) -> None:
        bad = replace(ask(None, "bad", request_id="bad"), **change)
        answers = backend.sample([bad, ask(None, "good")])
        answer = answers["bad"]
        assert isinstance(answer, RequestError)
        assert said in answer.message
        assert isinstance(answers["q"], SampleOutput)

    @pytest.mark.parametrize(
        ("config", "said"),
        [
            (LoraConfig(rank=0), "lora_config.rank: is 0"),
            (LoraConfig(rank=10**6), "take one from 1 to"),
            (LoraConfig(4, None, False, False, False), "trains no layer"),
        ],
    )
    def test_a_bad_lora_config_is_refused(
        self, backend: AbstractBackend, config: LoraConfig, said: str
    ) -> None:
        with pytest.raises(UserError, match=said):
            backend.create_model("bad", config)
        assert not backend.has_model("bad")

    def test_unknown_names_are_said(self, backend: AbstractBackend, tmp_path: Path) -> None:
        for call in (
            lambda: backend.version("nobody"),
            lambda: backend.delete_model("nobody"),
            lambda: backend.clear_gradients("nobody"),
            lambda: backend.optim_step("nobody", 0, AdamParams()),
            lambda: backend.save_checkpoint(tmp_path, "nobody"),
            lambda: backend.save_sampler_checkpoint(None, "nobody", "s", persist=False),
            lambda: backend.load_sampler_checkpoint(tmp_path / "nowhere", "s"),
            lambda: backend.delete_sampler("nobody"),
        ):
            with pytest.raises(ModelNotFound):
                call()
        assert not backend.has_sampler("s")


def _off_policy(
    loss_fn: str, p: torch.Tensor, q: torch.Tensor, a: torch.Tensor, config: Mapping[str, float]
) -> torch.Tensor:
    """The losses as the Tinker documentation writes them, token by token."""
    ratio = torch.exp(p - q)
    if loss_fn == "importance_sampling":
        return -(ratio * a).sum()
    if loss_fn == "dro":
        return -(p * a - 0.5 * config["beta"] * (p - q) ** 2).sum()
    low, high = {"ppo": (0.8, 1.2), "cispo": (0.0, 4.0)}[loss_fn]
    clipped = torch.clamp(
        ratio, config.get("clip_low_threshold", low), config.get("clip_high_threshold", high)
    )
    if loss_fn == "cispo":
        return -(clipped.detach() * p * a).sum()
    return -torch.minimum(ratio * a, clipped * a).sum()
