"""A backend without a model, for tests of order, turns and bookkeeping: it notes its calls."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from backends.engine.abstract import AbstractBackend
from backends.engine.records import (
    AdamParams,
    Capabilities,
    LoraConfig,
    OptimStepOutput,
    PassOutput,
    PassRequest,
    RequestError,
    SampledSequence,
    SampleOutput,
    SampleRequest,
)


class ScriptedBackend(AbstractBackend):
    """A model's weights are a number: the sum of the first tokens that its steps have seen.

    A token 13 fails its pass, a token 14 raises. `gate` holds every computation up while cleared.
    """

    def __init__(self, base_model: str = "none", config: None = None) -> None:
        self.calls: list[str] = []
        self.batches: list[list[str | None]] = []
        self.gate = threading.Event()
        self.gate.set()
        self._gradients: dict[str, int] = {}
        self._weights: dict[str, int] = {}
        self._versions: dict[str, int] = {}
        self._samplers: dict[str, int] = {}

    def capabilities(self) -> Capabilities:
        return Capabilities("none", 32, 100, ("cross_entropy",), 8, "cpu", "float32")

    def create_model(self, model_id: str, lora_config: LoraConfig) -> None:
        self.calls.append(f"create {lora_config.rank}")
        self._gradients[model_id] = self._weights[model_id] = self._versions[model_id] = 0

    def delete_model(self, model_id: str) -> None:
        self.calls.append("delete")
        del self._weights[model_id]

    def has_model(self, model_id: str) -> bool:
        return model_id in self._weights

    def version(self, model_id: str) -> int:
        return self._versions[model_id]

    def forward_backward(
        self, batch: Sequence[PassRequest]
    ) -> dict[str, PassOutput | RequestError]:
        return {request.request_id: self._pass(request, train=True) for request in batch}

    def forward(self, batch: Sequence[PassRequest]) -> dict[str, PassOutput | RequestError]:
        return {request.request_id: self._pass(request, train=False) for request in batch}

    def _pass(self, request: PassRequest, *, train: bool) -> PassOutput | RequestError:
        self.gate.wait(10)
        assert request.version == self._versions[request.model_id]
        token = int(request.data[0].tokens[0])
        self.calls.append(f"{'train' if train else 'forward'} {token}")
        if token == 13:
            return RequestError("data[0]: 13 brings bad luck")
        if token == 14:
            raise MemoryError("no room")
        self._gradients[request.model_id] += token if train else 0
        seen = np.full(request.data[0].tokens.size, self._weights[request.model_id], np.float32)
        return PassOutput(({"logprobs": seen},), {"loss:sum": 1.0})

    def optim_step(self, model_id: str, version: int, adam: AdamParams) -> OptimStepOutput:
        self.gate.wait(10)
        assert version == self._versions[model_id]
        self.calls.append(f"step {self._gradients[model_id]}")
        self._weights[model_id] += self._gradients[model_id]
        self._gradients[model_id] = 0
        self._versions[model_id] += 1
        return OptimStepOutput(self._versions[model_id], {"grad_norm": 1.0})

    def clear_gradients(self, model_id: str) -> None:
        self.calls.append("clear")
        self._gradients[model_id] = 0

    def sample(self, batch: Sequence[SampleRequest]) -> dict[str, SampleOutput | RequestError]:
        self.gate.wait(10)
        self.batches.append([request.sampler_id for request in batch])
        return {request.request_id: self._draw(request) for request in batch}

    def _draw(self, request: SampleRequest) -> SampleOutput:
        weights = self._samplers[request.sampler_id] if request.sampler_id else 0
        one = SampledSequence(np.array([weights]), np.zeros(1, np.float32), "length")
        return SampleOutput((one,) * request.num_samples)

    def save_checkpoint(self, output_path: Path, model_id: str) -> None:
        self.calls.append("save")
        state = {"r": 4, "weights": self._weights[model_id], "version": self._versions[model_id]}
        (output_path / "adapter_config.json").write_text(json.dumps(state))

    def load_checkpoint(self, checkpoint_path: Path, model_id: str, *, optimizer: bool) -> None:
        self.calls.append(f"load {optimizer}")
        state = json.loads((checkpoint_path / "adapter_config.json").read_text())
        self._weights[model_id], self._gradients[model_id] = state["weights"], 0
        self._versions[model_id] = state["version"] if optimizer else 0

    def save_sampler_checkpoint(
        self, output_path: Path | None, model_id: str, sampler_id: str, *, persist: bool = True
    ) -> None:
        self._samplers[sampler_id] = self._weights[model_id]
        if persist:
            assert output_path is not None
            self.save_checkpoint(output_path, model_id)

    def load_sampler_checkpoint(self, checkpoint_path: Path, sampler_id: str) -> None:
        self.calls.append("load sampler")
        state = json.loads((checkpoint_path / "adapter_config.json").read_text())
        self._samplers[sampler_id] = state["weights"]

    def has_sampler(self, sampler_id: str) -> bool:
        return sampler_id in self._samplers

    def delete_sampler(self, sampler_id: str) -> None:
        del self._samplers[sampler_id]
