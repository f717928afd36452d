"""The tinker SDK as a `Backend`, against any server that speaks its protocol.

The SDK's methods submit when they are called and return futures; what is added here is the house's
error tree and the names of the protocol in `backends.base`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

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
from backends.errors import FlowtuneError, Problem, StateLostError, TransientError, UserError
from backends.waiting import WAITS, listen_to_sdk

if TYPE_CHECKING:
    import tinker
    import torch
    from tinker import types as tinker_types

    from backends.base import ForwardBackwardResult, OptimStepResult

R = TypeVar("R")
T = TypeVar("T")

REACH_SECONDS = 10.0
DISCARD_SECONDS = 10.0

SNAPSHOT_TTL_SECONDS = 7 * 24 * 3600
"""How long a server keeps a named snapshot that was made to sample from."""

_FRAMED = re.compile(
    r"Request failed: (?P<said>.*) for self\.request_id=\S+ "
    r"and expected type self\.model_cls=(?P<answer>.*)",
    re.DOTALL,
)
"""What the SDK (`tinker.lib.api_future_impl`) makes of a server's sentence."""

_FIELD = re.compile(r"(?P<where>(?:loss_fn|data\[)[\w.\[\]]*): (?P<what>.*)", re.DOTALL)
"""How the sentence of an engine of ours begins (`backends.engine.losses`)."""

logger = logging.getLogger(__name__)


class TinkerParams(BackendParams):
    """A server that speaks the Tinker protocol: the hosted service, SkyRL, a `flowtune engine`."""

    base_url: str | None = Field(
        None, description="The server. Without it TINKER_BASE_URL, else the hosted service."
    )
    api_key_env: str = Field(
        "TINKER_API_KEY", description="The environment variable that holds the API key."
    )

    def url(self) -> str:
        """The server's address, without a slash at its end."""
        given = self.base_url or os.environ.get("TINKER_BASE_URL")
        if given:
            return given.rstrip("/")
        from tinker.lib.base_url import DEFAULT_BASE_URL

        return DEFAULT_BASE_URL

    def weights_problems(self, source: str, where: str) -> list[Problem]:
        """A server has its own weights only."""
        if source.startswith("tinker://"):
            return []
        what = f"{self.url()} reads no files of yours, such as {source}"
        return [Problem(where, what, "give the tinker:// address of weights that it holds")]


def house_error(error: Exception) -> FlowtuneError:
    """The SDK's error in the house's tree (see `backends.errors`)."""
    from tinker import _exceptions as sdk

    if isinstance(error, FlowtuneError):
        return error
    if isinstance(error, sdk.RequestFailedError):
        where, what = _said(error.message)
        if error.category == "user":
            return UserError(Problem(where, what))
        return StateLostError(f"the server failed on a request: {what}")
    if isinstance(error, sdk.AuthenticationError | sdk.PermissionDeniedError):
        return UserError(
            Problem("backend", f"the server refused the API key: {error}", "check the key")
        )
    if isinstance(error, sdk.BillingError | sdk.RateLimitError):
        return TransientError(f"the server does not take requests at the moment: {error}")
    if isinstance(error, sdk.APIStatusError) and error.status_code in (404, 410):
        return StateLostError(f"the server no longer knows the model or session: {error}")
    if isinstance(error, sdk.APIStatusError) and error.status_code < 500:
        return UserError(Problem("backend", f"the server refused a request: {error}"))
    if isinstance(error, RuntimeError) and isinstance(error.__cause__, Exception):
        return house_error(error.__cause__)  # a poisoned client: what poisoned it says more
    return StateLostError(f"{type(error).__name__}: {error}")


def _said(message: str) -> tuple[str, str]:
    """The field that the server's sentence is about, and the sentence without the SDK's frame."""
    framed = _FRAMED.fullmatch(message)
    if framed is None:
        return "backend", message
    if "ForwardBackward" not in framed["answer"]:
        return "backend", framed["said"]
    field = _FIELD.fullmatch(framed["said"])
    return (field["where"], field["what"]) if field else ("loss_fn", framed["said"])


@dataclass(frozen=True)
class Server:
    """What is known of the server's own life, where it is known at all.

    `ended` is done once the server is gone for good, and `lost` says what to raise then: the SDK
    itself would go on knocking for minutes.
    """

    ended: asyncio.Future[Any] | None = None
    lost: Callable[[], FlowtuneError] = lambda: StateLostError("the server is gone")


class Submitted(Generic[R, T]):
    """A request that is already on its way; awaiting it gives the result, once or many times."""

    def __init__(self, future: Awaitable[R], then: Callable[[R], T], server: Server) -> None:
        self._future = future
        self._then = then
        self._server = server

    def __await__(self) -> Generator[Any, Any, T]:
        return (yield from self._result().__await__())

    async def _result(self) -> T:
        answer = asyncio.ensure_future(_answer(self._future))
        ended = self._server.ended
        try:
            if ended is None:
                await _patiently(answer)
            else:
                await asyncio.wait({answer, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise self._server.lost()
            return self._then(answer.result())
        finally:
            answer.cancel()


async def _patiently(answer: asyncio.Future[Any]) -> None:
    """Wait for a server that nobody here can look at; say so once it takes unusually long."""
    started = time.monotonic()
    patience = WAITS.slow_after()
    await asyncio.wait({answer}, timeout=patience)
    if not answer.done():
        WAITS.slow(patience)
        await asyncio.wait({answer})
    WAITS.answered(time.monotonic() - started)


async def _answer(future: Awaitable[R]) -> R:
    try:
        return await future
    except Exception as error:
        raise house_error(error) from error


def _itself(result: T) -> T:
    return result


class TinkerBackend:
    """One run's training client over the SDK; see `backends.base.Backend` for the methods."""

    def __init__(
        self,
        service: tinker.ServiceClient,
        client: tinker.TrainingClient,
        model_name: str,
        server: Server,
        rest: Callable[[], tinker.RestClient],
    ) -> None:
        self._service = service
        self._client = client
        self._server = server
        self._model_name = model_name
        self._rest = rest
        self._tokenizer: Tokenizer | None = None

    @property
    def model_id(self) -> str:
        """The model's id at the server."""
        return str(self._client.model_id)

    def forward_backward_async(
        self,
        data: list[tinker.Datum],
        *,
        loss_fn: str,
        loss_fn_config: dict[str, float] | None = None,
    ) -> Awaitable[ForwardBackwardResult]:
        """Submit a forward and backward pass under a server-side loss."""
        name: Any = loss_fn  # the server says which names it knows
        return Submitted(
            self._client.forward_backward(data, name, loss_fn_config), _itself, self._server
        )

    def forward_backward_custom_async(
        self, data: list[tinker.Datum], loss_fn: LossCallable
    ) -> Awaitable[ForwardBackwardResult]:
        """Submit a forward pass, the callable on its logprobs, and its backward pass."""

        def sdk_loss(
            data: list[tinker.Datum], logprobs: list[torch.Tensor]
        ) -> tuple[torch.Tensor, dict[str, float]]:
            return loss_fn(ModelOutput(logprobs), data), {}

        return Submitted(
            self._client.forward_backward_custom(data, sdk_loss), _itself, self._server
        )

    def optim_step_async(self, adam: tinker_types.AdamParams) -> Awaitable[OptimStepResult]:
        """Submit an optimizer step."""
        return Submitted(self._client.optim_step(adam), _itself, self._server)

    def save_for_sampler(self, name: str) -> Awaitable[str]:
        """Keep the current weights for inference; resolves to their `tinker://` URI."""
        return Submitted(
            self._client.save_weights_for_sampler(name), lambda saved: saved.path, self._server
        )

    def save_full_state(self, name: str) -> Awaitable[str]:
        """Keep weights and optimizer state; resolves to their `tinker://` URI."""
        return Submitted(self._client.save_state(name), lambda saved: saved.path, self._server)

    def snapshot_sampling_client(self, name: str | None = None) -> Awaitable[SamplingClient]:
        """A client for the weights as they are behind everything submitted so far.

        Unnamed ones end with the session; named ones are given a time to live, so that they do not
        pile up at the server.
        """
        if name is None:
            return Submitted(
                self._client.save_weights_and_get_sampling_client(),
                lambda client: TinkerSamplingClient(client, self._server),
                self._server,
            )
        saving = self._client.save_weights_for_sampler(name, ttl_seconds=SNAPSHOT_TTL_SECONDS)
        saved = Submitted(saving, lambda saved: saved.path, self._server)
        return _NamedSnapshot(saved, self._service, self._server)

    async def open_sampling_client(
        self, model: str | None = None, weights: str | None = None
    ) -> SamplingClient:
        """A client for the server's own weights: a base model, or those under a `tinker://` URI."""
        if weights is None:
            model = model or self._model_name
        elif not weights.startswith("tinker://"):
            raise UserError(
                Problem(
                    "weights",
                    f"the server reads no files of yours, such as {weights}",
                    "give the tinker:// address of weights that it holds",
                )
            )
        return await frozen_sampling_client(self._service, self._server, model, weights)

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer, loaded once."""
        if self._tokenizer is None:
            from backends.tokenizer import load_tokenizer

            self._tokenizer = load_tokenizer(self._model_name)
        return self._tokenizer

    async def export_state(self, uri: str, folder: Path) -> bool:
        """The server keeps its checkpoints to itself; they are found under their URI."""
        return False

    def discard_state(self, uri: str) -> None:
        """Delete the checkpoint at the server."""
        try:
            self._rest().delete_checkpoint_from_tinker_path(uri).result(DISCARD_SECONDS)
        except Exception as error:  # noqa: BLE001  (it costs storage, and no run)
            logger.warning("%s stays at the server: %s", uri, house_error(error))

    async def aclose(self) -> None:
        """Finish the session at the server."""
        await finish_session(self._service)


class TinkerSamplingClient:
    """The SDK's sampling client with the house's errors; a server that ends is noticed at once."""

    def __init__(self, client: tinker.SamplingClient, server: Server) -> None:
        self._client = client
        self._server = server

    def sample(
        self,
        prompt: tinker_types.ModelInput,
        num_samples: int,
        sampling_params: tinker_types.SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
    ) -> Awaitable[tinker_types.SampleResponse]:
        """Submit a sampling request; await the result for `num_samples` sequences."""
        future = self._client.sample(
            prompt, num_samples, sampling_params, include_prompt_logprobs, topk_prompt_logprobs
        )
        return Submitted(future, _itself, self._server)


class _NamedSnapshot:
    """A sampling client for weights that are still being saved."""

    def __init__(
        self, saved: Awaitable[str], service: tinker.ServiceClient, server: Server
    ) -> None:
        self._saved = saved
        self._service = service
        self._server = server

    def __await__(self) -> Generator[Any, Any, SamplingClient]:
        uri = yield from self._saved.__await__()
        made = self._service.create_sampling_client(model_path=uri)
        client = yield from Submitted(made, _itself, self._server).__await__()
        return TinkerSamplingClient(client, self._server)


async def finish_session(service: tinker.ServiceClient) -> None:
    """Tell the server that a session is over. Safe to call twice."""
    try:
        await service.close("success")
    except Exception as error:
        raise house_error(error) from error


async def frozen_sampling_client(
    service: tinker.ServiceClient, server: Server, model: str | None, weights: str | None
) -> SamplingClient:
    """A client for the weights under a URI, or for a base model; with both, weights of that model.

    Servers load weights when they are first asked to sample, so one token is drawn here: what
    cannot be had is found out now. Raises UserError.
    """
    from tinker import types as tinker_types

    def submit() -> Awaitable[tinker.SamplingClient]:  # creating the session blocks
        return service.create_sampling_client(weights, None if weights else model)

    async def create() -> tinker.SamplingClient:
        return await (await asyncio.to_thread(submit))

    where = "weights" if weights else "model"
    try:
        client = await Submitted(create(), _itself, server)
        if model is not None and (base := client.get_base_model()) != model:
            raise UserError(Problem("weights", f"{weights} are weights of {base}, not of {model}"))
        sampling_client = TinkerSamplingClient(client, server)
        prompt = tinker_types.ModelInput.from_ints([0])
        await sampling_client.sample(prompt, 1, tinker_types.SamplingParams(max_tokens=1))
    except UserError as error:
        raise UserError(
            *(Problem(where, f"{weights or model}: {p.what}", p.remedy) for p in error.problems)
        ) from error
    return sampling_client


B = TypeVar("B", bound=TinkerBackend)


async def connect(
    cls: type[B],
    base_url: str,
    api_key: str | None,
    model: ModelSpec,
    state: SavedState | None,
    server: Server | None = None,
) -> B:
    """A training client of class `cls`: a fresh adapter, or one from a saved state's URI.

    Raises UserError for a refused key, an unknown model or a checkpoint that is not there.
    """
    import tinker

    listen_to_sdk()
    server = server or Server()
    service = tinker.ServiceClient(base_url=base_url, api_key=api_key)

    def submit() -> Awaitable[tinker.TrainingClient]:
        # Creating the session blocks, so this runs in a thread.
        if state is None or state.uri is None:
            return service.create_lora_training_client(
                base_model=model.name,
                rank=model.lora_rank,
                seed=model.seed,
                train_attn=model.train_attn,
                train_mlp=model.train_mlp,
                train_unembed=model.train_unembed,
            )
        if state.optimizer:
            return service.create_training_client_from_state_with_optimizer(state.uri)
        return service.create_training_client_from_state(state.uri)

    async def create() -> tinker.TrainingClient:
        return await (await asyncio.to_thread(submit))

    client = await Submitted(create(), _itself, server)
    rest = cache(lambda: tinker.RestClient(base_url=base_url, api_key=api_key))
    return cls(service, client, model.name, server, rest)


class TinkerKind:
    """Any server of the Tinker protocol: the hosted service, SkyRL, a `flowtune engine`."""

    kind: ClassVar[str] = "tinker"
    Params: ClassVar[type[BackendParams]] = TinkerParams

    @staticmethod
    def check(params: TinkerParams, model: ModelSpec) -> list[Problem]:
        """The key is set, the server answers, takes the key, and serves the model."""
        key = os.environ.get(params.api_key_env)
        if not key:
            return [
                Problem(
                    "backend.params.api_key_env",
                    f"the environment variable {params.api_key_env} is not set",
                    f"export {params.api_key_env}=tml-… with your key for {params.url()}",
                )
            ]
        return _reach(params.url(), key, model.name)

    @staticmethod
    async def open(
        params: TinkerParams, model: ModelSpec, state: SavedState | None
    ) -> TinkerBackend:
        """A training client at the server. Raises UserError for weights it cannot be given."""
        if state is not None and state.uri is None:
            raise UserError(
                Problem(
                    "model.init_from",
                    f"{params.url()} reads no files of yours",
                    "give the tinker:// address of weights that it holds",
                )
            )
        key = os.environ.get(params.api_key_env)
        return await connect(TinkerBackend, params.url(), key, model, state)


def _reach(url: str, key: str, model: str) -> list[Problem]:
    import httpx

    where = "backend.params.base_url"
    try:
        answer = httpx.get(
            f"{url}/api/v1/get_server_capabilities",
            headers={"X-API-Key": key},
            timeout=REACH_SECONDS,
        )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return [
            Problem(where, f"no answer from {url} ({error})", "check the address, start the server")
        ]
    if answer.status_code in (401, 403):
        return [
            Problem(
                "backend.params.api_key_env",
                f"{url} refused the key ({answer.status_code})",
                "set the key that this server was started with, or that it issued to you",
            )
        ]
    if answer.status_code != 200:
        return [Problem(where, f"{url} answered {answer.status_code}", "is this a Tinker server?")]
    served = [row.get("model_name") for row in answer.json().get("supported_models", [])]
    if served and model not in served:
        names = ", ".join(str(name) for name in served)
        return [Problem("model.name", f"{url} does not serve {model!r}", f"it serves: {names}")]
    return []
