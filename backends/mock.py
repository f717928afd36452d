"""A backend without a model: everything the protocol asks for, in this process, at once.

Eight numbers stand for the weights. A target token t has the log-probability
-(0.05 + (1 - w[t mod 8])^2), so that every loss has a gradient, Adam brings the loss down, and the
curve depends on the data, their order and the learning rate, like a real one. Requests run in the
order of their submission. Checkpoints are real files that restore the state to the last bit.
"""

from __future__ import annotations

import asyncio
import json
import re
import zlib
from collections.abc import Awaitable, Callable, Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import Field

from backends.base import (
    BackendParams,
    LossCallable,
    ModelOutput,
    ModelSpec,
    SamplingClient,
    SavedState,
    Tokenizer,
)
from backends.errors import Problem, StateLostError, UserError

if TYPE_CHECKING:
    import tinker
    from tinker import types as tinker_types
    from tinker.types.topk_logprobs import TopkLogprobs

    from backends.base import ForwardBackwardResult, OptimStepResult

T = TypeVar("T")
Array = npt.NDArray[np.float64]

SIZE = 8
FLOOR = 0.05
NO_LOGPROB = -99999.0
"""What the SDK takes for "nothing here" among the likeliest tokens."""
WEIGHTS = "base_model.model.mock.lora.weight"
STEPS = "base_model.model.mock.steps"


class MockParams(BackendParams):
    """What the mock can be told."""

    step_seconds: float = Field(0.0, ge=0, description="Time that each forward-backward takes.")


@dataclass(frozen=True)
class MockState:
    """Weights [8], Adam's two moments [8] each, and the optimizer steps done."""

    weights: Array
    first_moment: Array
    second_moment: Array
    steps: int

    @staticmethod
    def fresh(seed: int) -> MockState:
        """Small weights that a seed decides."""
        draws = np.random.PCG64(seed).random_raw(SIZE)
        zeros = np.zeros(SIZE)
        return MockState(draws / 2.0**64 * 0.01, zeros, zeros, 0)

    def logprobs(self, targets: npt.NDArray[np.int64]) -> Array:
        """The log-probability of each target token, in the shape of the targets."""
        values: Array = -(FLOOR + (1.0 - self.weights[targets % SIZE]) ** 2)
        return values

    def step(self, gradient: Array, adam: tinker_types.AdamParams) -> MockState:
        """AdamW on the weights, with bias correction and decoupled decay."""
        steps = self.steps + 1
        norm = float(np.linalg.norm(gradient))
        if 0 < adam.grad_clip_norm < norm:
            gradient = gradient * (adam.grad_clip_norm / norm)
        first = adam.beta1 * self.first_moment + (1 - adam.beta1) * gradient
        second = adam.beta2 * self.second_moment + (1 - adam.beta2) * gradient**2
        rate = adam.learning_rate
        update = first / (1 - adam.beta1**steps)
        update = update / (np.sqrt(second / (1 - adam.beta2**steps)) + adam.eps)
        weights = self.weights - rate * (update + adam.weight_decay * self.weights)
        return MockState(weights, first, second, steps)

    def write(self, folder: Path, model: ModelSpec) -> None:
        """The files of a checkpoint: adapter with its config, and the optimizer's state."""
        from safetensors.numpy import save_file

        adapter = {WEIGHTS: self.weights, STEPS: np.asarray([self.steps])}
        moments = {"first_moment": self.first_moment, "second_moment": self.second_moment}
        save_file(adapter, folder / "adapter_model.safetensors")
        save_file(moments, folder / "optimizer.safetensors")
        config = {
            "peft_type": "MOCK",
            "base_model_name_or_path": model.name,
            "r": model.lora_rank,
        }
        text = json.dumps(config, indent=2) + "\n"
        (folder / "adapter_config.json").write_text(text, encoding="utf-8")

    @staticmethod
    def read(folder: Path, optimizer: bool) -> MockState:
        """The state that `write` wrote; without `optimizer` the moments start from zero."""
        from safetensors.numpy import load_file

        adapter = load_file(folder / "adapter_model.safetensors")
        zeros = np.zeros(SIZE)
        state = MockState(adapter[WEIGHTS], zeros, zeros, int(adapter[STEPS][0]))
        if not optimizer:
            return state
        moments = load_file(folder / "optimizer.safetensors")
        return replace(state, **moments)


class Submitted(Generic[T]):
    """A request that is on its way; who stops waiting for it does not stop it."""

    def __init__(self, task: asyncio.Task[T]) -> None:
        self._task = task

    def __await__(self) -> Generator[Any, Any, T]:
        return (yield from asyncio.shield(self._task).__await__())


class MockBackend:
    """One run's pretended training client; see `backends.base.Backend` for the methods."""

    def __init__(self, params: MockParams, model: ModelSpec, state: MockState) -> None:
        self._params = params
        self._model = model
        self._state = state
        self._gradient = np.zeros(SIZE)
        self._saved: dict[str, MockState] = {}
        self._last: asyncio.Task[Any] | None = None
        self._pending: set[asyncio.Task[Any]] = set()
        self._closed = False

    def forward_backward_async(
        self,
        data: list[tinker.Datum],
        *,
        loss_fn: str,
        loss_fn_config: dict[str, float] | None = None,
    ) -> Awaitable[ForwardBackwardResult]:
        """Log-probabilities of the targets; the gradient of -sum(w * logp) is added.

        w are the `weights`, or the `advantages` of a policy-gradient loss; the loss's name is not
        looked at.
        """

        def work() -> ForwardBackwardResult:
            factors = [_factors(datum) for datum in data]
            return self._backward(data, factors, -_dot(factors, self._logprobs(data)))

        return self._submit(work, self._params.step_seconds)

    def forward_backward_custom_async(
        self, data: list[tinker.Datum], loss_fn: LossCallable
    ) -> Awaitable[ForwardBackwardResult]:
        """The callable's loss on the log-probabilities, differentiated by torch."""

        def work() -> ForwardBackwardResult:
            import torch

            logprobs = [torch.tensor(p, requires_grad=True) for p in self._logprobs(data)]
            loss = loss_fn(ModelOutput(logprobs), data)
            loss.backward()
            factors = [
                np.zeros(tuple(p.shape)) if p.grad is None else -p.grad.numpy() for p in logprobs
            ]
            return self._backward(data, factors, float(loss.detach()))

        return self._submit(work, self._params.step_seconds)

    def optim_step_async(self, adam: tinker_types.AdamParams) -> Awaitable[OptimStepResult]:
        """Adam on what has been added up since the last step."""

        def work() -> OptimStepResult:
            from tinker import types as tinker_types

            norm = float(np.linalg.norm(self._gradient))
            self._state = self._state.step(self._gradient, adam)
            self._gradient = np.zeros(SIZE)
            return tinker_types.OptimStepResponse(metrics={"grad_norm:mean": norm})

        return self._submit(work)

    def save_for_sampler(self, name: str) -> Awaitable[str]:
        """Keep the state under a name for as long as this backend lives."""
        return self._submit(lambda: self._keep("sampler_weights", name))

    def save_full_state(self, name: str) -> Awaitable[str]:
        """The same; `export_state` writes its files."""
        return self._submit(lambda: self._keep("weights", name))

    def snapshot_sampling_client(self, name: str | None = None) -> Awaitable[SamplingClient]:
        """A client that answers as the weights are behind everything submitted so far."""

        def work() -> SamplingClient:
            if name is not None:
                self._keep("sampler_weights", name)
            return MockSamplingClient(self._state)

        return self._submit(work)

    async def open_sampling_client(
        self, model: str | None = None, weights: str | None = None
    ) -> SamplingClient:
        """The fresh weights of the run's seed if nothing is named; another model has its own."""
        if weights is not None:
            return MockSamplingClient(_read_state(Path(weights), False, "weights"))
        seed = self._model.seed if model is None else zlib.crc32(model.encode())
        return MockSamplingClient(MockState.fresh(seed))

    def get_tokenizer(self) -> Tokenizer:
        """A tokenizer of bytes with a chat template of its own."""
        return MockTokenizer()

    async def export_state(self, uri: str, folder: Path) -> bool:
        """Write the files of a saved state."""
        if uri not in self._saved:
            raise StateLostError(f"the mock backend holds no state {uri}")
        self._saved[uri].write(folder, self._model)
        return True

    def discard_state(self, uri: str) -> None:
        """Forget a saved state."""
        self._saved.pop(uri, None)

    async def aclose(self) -> None:
        """Stop; what was submitted and has not run never will."""
        self._closed = True
        for task in self._pending:
            task.cancel()

    def _submit(self, work: Callable[[], T], seconds: float = 0.0) -> Awaitable[T]:
        if self._closed:
            raise StateLostError("the mock backend is closed")
        before = self._last

        async def run() -> T:
            if before is not None:
                await asyncio.wait([before])
            if seconds:
                await asyncio.sleep(seconds)
            return work()

        task = asyncio.get_running_loop().create_task(run())
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)
        self._last = task
        return Submitted(task)

    def _logprobs(self, data: Sequence[tinker.Datum]) -> list[Array]:
        return [self._state.logprobs(_targets(datum)) for datum in data]

    def _backward(
        self, data: Sequence[tinker.Datum], factors: Sequence[Array], loss: float
    ) -> ForwardBackwardResult:
        """Add the gradient of -sum(factor * logp) and answer with the log-probabilities."""
        import tinker
        from tinker import types as tinker_types

        logprobs = self._logprobs(data)
        for datum, factor in zip(data, factors, strict=True):
            places = _targets(datum).ravel() % SIZE
            slopes = -2.0 * (1.0 - self._state.weights[places]) * factor.ravel()
            self._gradient += np.bincount(places, slopes, minlength=SIZE)
        return tinker_types.ForwardBackwardOutput(
            loss_fn_output_type="ArrayRecord",
            loss_fn_outputs=[
                {"logprobs": tinker.TensorData.from_numpy(p.astype(np.float32))} for p in logprobs
            ],
            metrics={"loss:sum": loss},
        )

    def _keep(self, kind: str, name: str) -> str:
        uri = f"mock://{kind}/{name}"
        self._saved[uri] = self._state
        return uri


def _targets(datum: tinker.Datum) -> npt.NDArray[np.int64]:
    targets: npt.NDArray[np.int64] = datum.loss_fn_inputs["target_tokens"].to_numpy()
    return targets


def _factors(datum: tinker.Datum) -> Array:
    inputs = datum.loss_fn_inputs
    return (inputs["weights"] if "weights" in inputs else inputs["advantages"]).to_numpy()


def _dot(factors: Sequence[Array], logprobs: Sequence[Array]) -> float:
    return float(sum(np.sum(f * p) for f, p in zip(factors, logprobs, strict=True)))


class MockSamplingClient:
    """Says back what the user said last; greedily, untrained weights say nothing.

    Of the samples drawn at a temperature, half have one letter changed; the seed says which. All
    log-probabilities are those of a forward pass of the same weights.
    """

    def __init__(self, state: MockState) -> None:
        self._state = state

    def sample(
        self,
        prompt: tinker_types.ModelInput,
        num_samples: int,
        sampling_params: tinker_types.SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
    ) -> Awaitable[tinker_types.SampleResponse]:
        """`num_samples` answers; without a seed, drawn ones differ from call to call."""
        from tinker import types as tinker_types

        tokens = prompt.to_ints()
        response = tinker_types.SampleResponse(
            sequences=self._sequences(tokens, num_samples, sampling_params),
            prompt_logprobs_np=self._prompt_logprobs(tokens) if include_prompt_logprobs else None,
            topk_prompt_logprobs_np=(
                self._likeliest(len(tokens), topk_prompt_logprobs) if topk_prompt_logprobs else None
            ),
        )

        async def answered() -> tinker_types.SampleResponse:
            return response

        return answered()

    def _sequences(
        self, prompt: list[int], num_samples: int, params: tinker_types.SamplingParams
    ) -> list[tinker_types.SampledSequence]:
        from tinker import types as tinker_types

        heard = MockTokenizer.last_user_turn(prompt)
        if params.temperature == 0:
            answers = [heard if self._state.steps else []] * num_samples
        else:
            entropy = None if params.seed is None else [params.seed, *prompt]
            draws = np.random.PCG64(np.random.SeedSequence(entropy)).random_raw(2 * num_samples)
            answers = [_misheard(heard, *map(int, pair)) for pair in draws.reshape(-1, 2)]
        sequences = []
        for index, answer in enumerate(answers):
            spoken = np.asarray([*answer, MockTokenizer.eos_token_id][: params.max_tokens])
            sequences.append(
                tinker_types.SampledSequence(
                    stop_reason="stop" if len(spoken) > len(answer) else "length",
                    sequence_id=str(index),
                    tokens_np=spoken.astype(np.int32),
                    logprobs_np=self._state.logprobs(spoken).astype(np.float32),
                )
            )
        return sequences

    def _prompt_logprobs(self, prompt: list[int]) -> npt.NDArray[np.float32]:
        logprobs = self._state.logprobs(np.asarray(prompt)).astype(np.float32)
        logprobs[0] = np.nan
        return logprobs

    def _likeliest(self, length: int, k: int) -> TopkLogprobs:
        """The k likeliest tokens, the same at every place [length, k]; nothing at the first."""
        from tinker.types.topk_logprobs import TopkLogprobs

        logprobs = self._state.logprobs(np.arange(MockTokenizer.VOCABULARY))
        ids = np.argsort(-logprobs, kind="stable")[:k]
        all_ids = np.tile(ids.astype(np.int32), (length, 1))
        all_logprobs = np.tile(logprobs[ids].astype(np.float32), (length, 1))
        all_ids[0], all_logprobs[0] = 0, NO_LOGPROB
        return TopkLogprobs(token_ids=all_ids, logprobs=all_logprobs)


def _misheard(heard: list[int], chance: int, which: int) -> list[int]:
    """What was heard, with one letter changed if the lowest bit of `chance` says so."""
    place = which % max(len(heard), 1)
    letter = ord("a") + (which // 2**32) % 26
    return [*heard[:place], letter, *heard[place + 1 :]] if chance % 2 else heard


class MockTokenizer:
    """Bytes and two special tokens, behind the methods of a Hugging Face tokenizer in use here."""

    VOCABULARY: ClassVar[int] = 258
    START: ClassVar[int] = 256
    eos_token_id: ClassVar[int] = 257
    all_special_ids: ClassVar[list[int]] = [256, 257]
    added_tokens_decoder: ClassVar[dict[int, Any]] = {}
    model_max_length: ClassVar[int] = 10**30
    chat_template: ClassVar[str] = "<|im_start|>{role}\n{content}<|im_end|>\n"

    _special: ClassVar[dict[str, int]] = {"<|im_start|>": 256, "<|im_end|>": 257}

    def apply_chat_template(
        self,
        conversations: list[list[dict[str, Any]]],
        *,
        tools: list[Any] | None = None,
        tokenize: bool = False,
        add_generation_prompt: bool = False,
        **chat_template_kwargs: Any,
    ) -> list[str]:
        """The text of each conversation; this template asks for nothing else."""
        opening = "<|im_start|>assistant\n" if add_generation_prompt else ""
        return [
            "".join(f"<|im_start|>{m['role']}\n{m.get('content') or ''}<|im_end|>\n" for m in turns)
            + opening
            for turns in conversations
        ]

    def __call__(
        self, texts: list[str], *, add_special_tokens: bool = False
    ) -> dict[str, list[list[int]]]:
        """The tokens of each text."""
        return {"input_ids": [self._encode(text) for text in texts]}

    def _encode(self, text: str) -> list[int]:
        tokens: list[int] = []
        for part in re.split(r"(<\|im_start\|>|<\|im_end\|>)", text):
            special = self._special.get(part)
            tokens.extend(part.encode() if special is None else [special])
        return tokens

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of tokens."""
        names = {token: name for name, token in self._special.items()}
        text = b""
        for token in tokens:
            if token < 256:
                text += bytes([token])
            elif not skip_special_tokens:
                text += names[token].encode()
        return text.decode("utf-8", "replace")

    @classmethod
    def last_user_turn(cls, tokens: Sequence[int]) -> list[int]:
        """The content of the last user turn of a rendered prompt; all of a plain one."""
        header = list(b"user\n")
        turns = _split(tokens, cls.START)
        for turn in reversed(turns):
            if turn[: len(header)] == header and cls.eos_token_id in turn:
                return turn[len(header) : turn.index(cls.eos_token_id)]
        return list(tokens)


def _split(tokens: Sequence[int], at: int) -> list[list[int]]:
    parts: list[list[int]] = [[]]
    for token in tokens:
        if token == at:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


class MockKind:
    """Pretends to compute: no model, no server, no waiting."""

    kind: ClassVar[str] = "mock"
    Params: ClassVar[type[BackendParams]] = MockParams

    @staticmethod
    def check(params: MockParams, model: ModelSpec) -> list[Problem]:
        """Nothing can be wrong."""
        return []

    @staticmethod
    async def open(params: MockParams, model: ModelSpec, state: SavedState | None) -> MockBackend:
        """A client with fresh weights, or those of a checkpoint's folder."""
        if state is None:
            return MockBackend(params, model, MockState.fresh(model.seed))
        if state.folder is None:
            raise UserError(
                Problem(
                    "model.init_from",
                    f"the mock backend cannot start from {state.uri}",
                    "give the folder of a checkpoint",
                )
            )
        saved = _read_state(state.folder, state.optimizer, "model.init_from")
        return MockBackend(params, model, saved)


def _read_state(folder: Path, optimizer: bool, where: str) -> MockState:
    try:
        return MockState.read(folder, optimizer)
    except (FileNotFoundError, KeyError) as error:
        what = f"{folder} is not a checkpoint of the mock backend ({error})"
        remedy = "give the folder of a checkpoint that a mock run wrote"
        raise UserError(Problem(where, what, remedy)) from error
