"""A real engine in a process of its own, and the real SDK's clients at it, over HTTP."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Sequence
from typing import Any, Final
from urllib.request import urlopen

import numpy as np
import tinker
from tinker import types

from backends.embedded import EmbeddedParams, EngineProcess
from benchmarks.raw import LEARNING_RATE, RANK, Tokens

AHEAD: Final = 2
"""How many steps are under way at a time: one runs, the next one waits at the engine."""
ADAM: Final = types.AdamParams(
    learning_rate=LEARNING_RATE, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0
)
"""What torch.optim.AdamW takes for itself."""


class Served:
    """An engine that serves one model."""

    def __init__(self, process: EngineProcess, key: str, model: str, ready_seconds: float) -> None:
        self._process = process
        self._key = key
        self._model = model
        self._services: list[tinker.ServiceClient] = []
        self.ready_seconds = ready_seconds
        """From before the process was started until `healthz` answered 200."""

    @classmethod
    async def start(cls, model: str, params: EmbeddedParams) -> Served:
        """Start an engine and wait until it is ready."""
        key = f"tml-{secrets.token_urlsafe(32)}"
        started = time.perf_counter()
        process = await EngineProcess.start(params, model, key)
        answer = await asyncio.to_thread(urlopen, f"{process.url}/api/v1/healthz")
        assert answer.status == 200
        return cls(process, key, model, time.perf_counter() - started)

    @property
    def pid(self) -> int:
        """Of the engine's process."""
        return self._process.process.pid

    async def client(self) -> tinker.TrainingClient:
        """A client with a session and a fresh adapter of its own."""
        service = await asyncio.to_thread(
            tinker.ServiceClient, base_url=self._process.url, api_key=self._key
        )
        self._services.append(service)
        client: tinker.TrainingClient = await service.create_lora_training_client(
            self._model, rank=RANK, seed=0
        )
        return client

    async def stop(self) -> None:
        """Close the clients' sessions and end the process."""
        try:
            for service in self._services:
                await service.close("success")
        finally:
            await self._process.stop()


def datums(rows: Sequence[Tokens]) -> list[types.Datum]:
    """Rows [N + 1] of tokens, each position to be trained on."""
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(row[:-1].tolist()),
            loss_fn_inputs={
                "target_tokens": types.TensorData.from_numpy(row[1:]),
                "weights": types.TensorData.from_numpy(np.ones(row.size - 1, np.float32)),
            },
        )
        for row in rows
    ]


async def train(client: tinker.TrainingClient, data: list[types.Datum], steps: int) -> float:
    """Pipelined steps on one batch; the first step's loss sum."""
    losses: list[float] = []
    under_way: deque[tuple[Awaitable[Any], Awaitable[Any]]] = deque()

    async def finish() -> None:
        passed, stepped = under_way.popleft()
        losses.append((await passed).metrics["loss:sum"])
        await stepped

    for _ in range(steps):
        passed = client.forward_backward(data, "cross_entropy")
        under_way.append((passed, client.optim_step(ADAM)))
        if len(under_way) == AHEAD:
            await finish()
    while under_way:
        await finish()
    return losses[0]


async def sample(
    sampler: tinker.SamplingClient,
    prompts: Sequence[Tokens],
    params: Sequence[types.SamplingParams],
    samples: int = 1,
) -> list[list[int]]:
    """All prompts at once; the tokens of every sample."""
    futures = [
        sampler.sample(types.ModelInput.from_ints(prompt.tolist()), samples, one)
        for prompt, one in zip(prompts, params, strict=True)
    ]
    answers = [await future for future in futures]
    return [sequence.tokens for answer in answers for sequence in answer.sequences]
