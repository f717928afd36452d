"""The engine, put together. See `core` for its parts and for what the services promise."""

from __future__ import annotations

from collections.abc import Callable

from backends.engine import SESSION_SECONDS
from backends.engine.abstract import AbstractBackend
from backends.engine.checkpoints import CheckpointStore
from backends.engine.core import Core
from backends.engine.models import Models
from backends.engine.rest import Rest
from backends.engine.sampling import HeldSamplers, Samplers
from backends.engine.storing import Storing
from backends.engine.training import Training


class Engine(Core):
    """One base model, its adapters, and everyone who trains and samples them."""

    def __init__(
        self,
        base_model: str,
        store: CheckpointStore,
        *,
        session_seconds: float = SESSION_SECONDS,
    ) -> None:
        super().__init__(base_model, store)
        held = HeldSamplers(self)
        self.models = Models(self, held.let_go, session_seconds=session_seconds)
        self.training = Training(self)
        self.storing = Storing(self, self.models)
        self.samplers = Samplers(self, self.storing, held)
        self.rest = Rest(self, self.storing)
        self.run_samples = self.samplers.run

    async def load(self, make: Callable[[], AbstractBackend]) -> None:
        """Become ready, and from then on remove checkpoints when their time is over."""
        await super().load(make)
        self.storing.sweep()
