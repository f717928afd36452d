"""Working at an engine with the real SDK: examples in, numbers out of the files that it saves."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tinker
import torch
from safetensors.torch import load_file
from tinker import types

from tests.backends.engine.engine_process import KEY
from tests.conformance.reference import ADAPTER, MODEL, OPTIMIZER, Example, ragged

BASE = str(MODEL)
READ_GRADIENT = types.AdamParams(learning_rate=0.0, beta1=0.0, eps=1.0)
"""Moves nothing and leaves the gradient itself in exp_avg, whatever was in it before."""


def model_input(tokens: Iterable[Any]) -> types.ModelInput:
    """Tokens as the SDK takes them."""
    return types.ModelInput.from_ints([int(token) for token in tokens])


def datum(row: Example) -> types.Datum:
    """An example as the SDK takes it."""
    inputs: dict[str, Any] = {"target_tokens": row.targets, **row.inputs}
    return types.Datum(model_input=model_input(row.tokens), loss_fn_inputs=inputs)


def data(rows: Sequence[Example]) -> list[types.Datum]:
    """Examples as the SDK takes them."""
    return [datum(row) for row in rows]


def logprobs(output: types.ForwardBackwardOutput) -> list[Any]:
    """Each datum's logprobs in the shape of its targets."""
    return [row["logprobs"].to_numpy() for row in output.loss_fn_outputs]


class Bench:
    """A session with an engine, and the folder where that engine keeps its checkpoints."""

    def __init__(self, url: str, store: Path) -> None:
        self.url, self.store = url, store
        self.service = tinker.ServiceClient(base_url=url, api_key=KEY)
        self._names = (f"at-{number}" for number in itertools.count())

    def client(self, rank: int = 8, seed: int = 0, **layers: Any) -> tinker.TrainingClient:
        """A fresh adapter; the same one for the same seed."""
        return self.service.create_lora_training_client(
            BASE, rank=rank, seed=seed, **layers
        ).result()

    def resumed(self, path: str, *, optimizer: bool = False) -> tinker.TrainingClient:
        """A client that starts from a saved state."""
        if optimizer:
            return self.service.create_training_client_from_state_with_optimizer(path).result()
        return self.service.create_training_client_from_state(path).result()

    def folder(self, path: str) -> Path:
        """Where the engine keeps what it calls `tinker://<model>/<kind>/<name>`."""
        model, kind, name = path.removeprefix("tinker://").split("/")
        return self.store / model.replace(":", "_") / kind / name

    def saved(self, client: tinker.TrainingClient) -> Path:
        """The folder of a state saved now."""
        return self.folder(client.save_state(next(self._names)).result().path)

    def weights(self, client: tinker.TrainingClient) -> dict[str, torch.Tensor]:
        """The adapter's matrices now."""
        return load_file(self.saved(client) / ADAPTER)

    def moments(self, client: tinker.TrainingClient) -> dict[str, torch.Tensor]:
        """Adam's first moment by matrix, as saved now; after a step with beta1 0, the gradient."""
        saved, ending = load_file(self.saved(client) / OPTIMIZER), ".exp_avg"
        return {
            name.removesuffix(ending): moment
            for name, moment in saved.items()
            if name.endswith(ending)
        }

    def gradients(self, client: tinker.TrainingClient) -> dict[str, torch.Tensor]:
        """The accumulated gradient by matrix, taken out with a step that moves no weight."""
        client.optim_step(READ_GRADIENT).result()
        return self.moments(client)


def train(
    client: tinker.TrainingClient,
    steps: range,
    adam: types.AdamParams | None = None,
) -> list[float]:
    """Pipelined steps, each on a batch of its own; their losses."""
    adam = adam or types.AdamParams(learning_rate=1e-2, weight_decay=0.1)
    sent = [
        (client.forward_backward(data(ragged(step)), "cross_entropy"), client.optim_step(adam))
        for step in steps
    ]
    losses = [passed.result().metrics["loss:sum"] for passed, _ in sent]
    for _, stepped in sent:
        stepped.result()
    return losses
