"""The seam of the engine: computation below it, requests and storage above it.

A backend knows models, adapters and samplers by id and nothing of HTTP, databases or object
stores; paths it is given are local folders. It is called from one thread at a time. Every training
call names the version of the weights it is meant for, so that a backend that lost its state (a
restarted worker, say) refuses instead of training on something else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import BaseModel

from backends.engine.records import (
    AdamParams,
    Capabilities,
    LoraConfig,
    OptimStepOutput,
    PassOutput,
    PassRequest,
    RequestError,
    SampleOutput,
    SampleRequest,
)


class ModelNotFound(KeyError):
    """No model, sampler or checkpoint of that name is held here."""


class StaleVersion(RuntimeError):
    """The call named a version of the weights that this backend does not hold."""


class AbstractBackend(ABC):
    """Holds one base model and any number of LoRA adapters on it.

    The state of a model is its adapter, its optimizer, its version (0 when new, plus one at each
    optimizer step, kept in checkpoints) and the gradients accumulated since the last step.
    """

    @abstractmethod
    def __init__(self, base_model: str, config: BaseModel) -> None:
        """Load the base model (a hub name or a folder). Returns when it can serve."""

    @abstractmethod
    def capabilities(self) -> Capabilities:
        """What this backend can do."""

    @abstractmethod
    def create_model(self, model_id: str, lora_config: LoraConfig) -> None:
        """Add a model with a fresh adapter, drawn from the config's seed alone, at version 0."""

    @abstractmethod
    def delete_model(self, model_id: str) -> None:
        """Free the model's adapter, optimizer and gradients. Samplers made from it stay."""

    @abstractmethod
    def has_model(self, model_id: str) -> bool:
        """Whether the model is held here."""

    @abstractmethod
    def version(self, model_id: str) -> int:
        """The version of the model's weights."""

    @abstractmethod
    def forward_backward(
        self, batch: Sequence[PassRequest]
    ) -> dict[str, PassOutput | RequestError]:
        """Add each request's gradients (token sums) to its model's accumulator; by request id.

        Requests are worked through in the order given, each on its own, so the result does not
        depend on what else is in the batch. A request with one bad datum fails whole and leaves
        no gradient. One for a model or version that is not held here gets a RequestError of
        category "server"; nothing is raised for it.
        """

    @abstractmethod
    def forward(self, batch: Sequence[PassRequest]) -> dict[str, PassOutput | RequestError]:
        """The same outputs without gradients."""

    @abstractmethod
    def optim_step(self, model_id: str, version: int, adam: AdamParams) -> OptimStepOutput:
        """One AdamW step with the accumulated gradients, which are then cleared."""

    @abstractmethod
    def clear_gradients(self, model_id: str) -> None:
        """Drop the accumulated gradients; weights, moments and version stay."""

    @abstractmethod
    def sample(self, batch: Sequence[SampleRequest]) -> dict[str, SampleOutput | RequestError]:
        """Draw from sampler weights; a sample depends on its request alone, not on the batch.

        A request for a sampler that is not held here gets a RequestError of category "server".
        """

    def serve_samples(
        self,
        arriving: Callable[[], Sequence[SampleRequest]],
        finished: Callable[[str, SampleOutput | RequestError], None],
    ) -> None:
        """Draw the requests that `arriving` gives, and tell `finished` each answer by request id.

        A backend that can let requests join while others run calls `arriving` between its steps,
        until it has nothing more and neither has the backend; answers are told as they come. While
        `arriving` runs, other methods of this backend may be called, from the same thread: this is
        where training takes its turns. It may raise, which ends the call. Here requests are taken
        once, and drawn together.
        """
        for request_id, answer in self.sample(arriving()).items():
            finished(request_id, answer)

    @abstractmethod
    def save_checkpoint(self, output_path: Path, model_id: str) -> None:
        """Write adapter (PEFT layout), optimizer and version into the folder; no pickles."""

    @abstractmethod
    def load_checkpoint(self, checkpoint_path: Path, model_id: str, *, optimizer: bool) -> None:
        """Create or overwrite the model from a folder; without `optimizer` its moments start new.

        Accumulated gradients are cleared. The version comes from the folder with `optimizer`,
        else it is 0.
        """

    @abstractmethod
    def save_sampler_checkpoint(
        self, output_path: Path | None, model_id: str, sampler_id: str, *, persist: bool = True
    ) -> None:
        """Freeze the model's weights under `sampler_id`; with `persist` write the adapter too."""

    @abstractmethod
    def load_sampler_checkpoint(self, checkpoint_path: Path, sampler_id: str) -> None:
        """Make an adapter on disk (from either kind of save) available under `sampler_id`."""

    @abstractmethod
    def has_sampler(self, sampler_id: str) -> bool:
        """Whether these sampler weights are held here."""

    @abstractmethod
    def delete_sampler(self, sampler_id: str) -> None:
        """Free the sampler's weights."""
