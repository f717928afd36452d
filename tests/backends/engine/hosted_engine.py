"""An engine in this process, on an event loop of its own: raw requests in, answers out.

What the application raises reaches the test as it is, with its traceback.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_proto_response

from backends.engine.abstract import AbstractBackend
from backends.engine.api import create_app
from backends.engine.checkpoints import CheckpointStore
from backends.engine.service import Engine

T = TypeVar("T")

KEY = "tml-right"
FEW_SECONDS = 60.0
"""A request that takes longer hangs."""


class HostedEngine:
    """Requests are blocking, and may come from any thread. Made by `hosted_engine`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, base_model: str) -> None:
        self._loop = loop
        self.base_model = base_model
        self.engine: Engine
        self.app: Any
        self.http: httpx.AsyncClient

    async def start(
        self, store: str, make: Callable[[], AbstractBackend], lost_number_seconds: float
    ) -> None:
        """On the loop: load the backend and open a client with the right key."""
        self.engine = Engine(self.base_model, CheckpointStore(store))
        self.engine.scheduler._lost_number_seconds = lost_number_seconds
        await self.engine.load(make)
        self.app = create_app(self.engine, KEY)
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(self.app),
            base_url="http://engine/api/v1",
            headers={"X-API-Key": KEY},
        )

    async def stop(self) -> None:
        """On the loop: stop, and wait for what runs."""
        self.engine.stop()
        assert await self.engine.stopped(10)
        await self.http.aclose()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run on the engine's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(FEW_SECONDS)

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Any request, relative to /api/v1/."""
        return self.run(self.http.request(method, path, **options))

    def post(self, path: str, body: Any) -> Any:
        """A JSON request that has to be answered 200; its answer."""
        answer = self.request("POST", path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def answer(self, request_id: str) -> httpx.Response:
        """What a ticket came to."""
        return self.request("POST", "retrieve_future", json={"request_id": request_id})

    def result(self, ticket: Any, kind: Any = types.ForwardBackwardOutput) -> Any:
        """What a ticket came to: JSON, or the SDK's type."""
        answer = self.answer(ticket["request_id"])
        assert answer.status_code == 200, answer.text
        if answer.headers["content-type"] == "application/json":
            return answer.json()
        return deserialize_proto_response(answer.content, kind)

    # -- what every test needs --

    def session(self) -> str:
        """A new session's id."""
        return str(self.post("create_session", {})["session_id"])

    def model(self, session: str, number: int = 0, rank: int = 2, seed: int = 3) -> str:
        """A new model's id."""
        body = {"session_id": session, "model_seq_id": number, "base_model": self.base_model}
        body |= {"lora_config": {"rank": rank, "seed": seed}}
        return str(self.result(self.post("create_model", body))["model_id"])

    def train(self, message: bytes, **headers: str) -> httpx.Response:
        """Post a forward_backward."""
        return self.request("POST", "forward_backward", content=message, headers=headers)

    def learn(self, model: str, first: int, count: int) -> bytes:
        """Train for some steps with operations from number `first` on; the logprobs seen."""
        seen = []
        for seq in range(first, first + 2 * count, 2):
            passed = self.train(a_pass(model, seq).SerializeToString()).json()
            step = {"model_id": model, "seq_id": seq + 1, "adam_params": {"learning_rate": 1e-2}}
            stepped = self.post("optim_step", step)
            seen.append(self.result(passed).loss_fn_outputs[0]["logprobs"].to_numpy().tobytes())
            assert "metrics" in self.result(stepped)
        return b"".join(seen)


def a_pass(model: str, seq: int, loss_fn: Any = "cross_entropy", seed: int = 0) -> Any:
    """A good forward_backward of two datums, as protobuf message."""
    rng = np.random.default_rng(seed + seq)
    data = []
    for length in (5, 3):
        tokens = rng.integers(0, 256, length + 1)
        inputs: dict[str, Any] = {"target_tokens": tokens[1:]}
        if loss_fn != "cross_entropy":
            inputs |= {"logprobs": np.full(length, -2.0, np.float32)}
            inputs |= {"advantages": rng.standard_normal(length).astype(np.float32)}
        prompt = types.ModelInput.from_ints(tokens[:-1].tolist())
        data.append(types.Datum(model_input=prompt, loss_fn_inputs=inputs))
    return forward_backward_request_to_proto(
        types.ForwardBackwardRequest(
            forward_backward_input=types.ForwardBackwardInput(data=data, loss_fn=loss_fn),
            model_id=model,
            seq_id=seq,
        )
    )


@contextmanager
def hosted_engine(
    base_model: str,
    store: Path,
    make: Callable[[], AbstractBackend],
    *,
    lost_number_seconds: float = 0.02,
) -> Iterator[HostedEngine]:
    """An engine for the length of the block."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="engine", daemon=True)
    thread.start()
    hosted = HostedEngine(loop, base_model)
    hosted.run(hosted.start(str(store), make, lost_number_seconds))
    try:
        yield hosted
    finally:
        hosted.run(hosted.stop())
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


def check(answer: httpx.Response) -> Any:
    """What holds for every answer: no fault of the server's, short, and readable. The JSON."""
    assert answer.status_code < 500, (answer.status_code, answer.text)
    assert answer.status_code != 408, "nothing here takes that long"
    if not answer.content:
        return None
    if answer.headers["content-type"] != "application/json":
        return None
    body = json.loads(answer.content, parse_constant=_no_constant)
    if answer.status_code >= 400 or (isinstance(body, dict) and "error" in body):
        assert len(answer.content) < 5000, answer.text[:500]
        assert "category" not in body or body["category"] == "user", body
    return body


def _no_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")
