"""Trackio: a local database, or a Hugging Face space."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from pydantic import BaseModel, Field

from algorithms.callbacks import CallbackConfig, RunPlan, check_folder
from algorithms.watchers.tracking import Tracker, settings_of

if TYPE_CHECKING:
    from algorithms.base import RunResult


class TrackioConfig(CallbackConfig):
    """Where the run is shown: `trackio show --project …`; its files lie where TRACKIO_DIR says."""

    project: str = Field("flowtune", min_length=1, description="The project.")
    space_id: str | None = Field(None, description="A Hugging Face space; else on this machine.")


class Trackio(Tracker):
    """Sends metrics and evaluations to Trackio."""

    Config: ClassVar[type[BaseModel]] = TrackioConfig
    kind: ClassVar[str] = "trackio"
    module: ClassVar[str] = "trackio"

    def __init__(self, cfg: TrackioConfig) -> None:
        """Raises UserError without the library, or if TRACKIO_DIR cannot be written."""
        super().__init__(cfg)
        if folder := os.environ.get("TRACKIO_DIR"):
            check_folder("TRACKIO_DIR", folder)

    def open(self, plan: RunPlan) -> int:
        """The run of the same name, resumed if it is there.

        It does not tell what it holds, so it gets no row twice only if it got none after the
        checkpoint that the run goes on from.
        """
        import trackio

        self._run = trackio.init(
            project=self.cfg.project,
            name=plan.run_id,
            space_id=self.cfg.space_id,
            config=settings_of(plan.experiment),
            resume="allow",
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )
        return plan.first_step

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """One row."""
        self._run.log(dict(values), step=step)

    def close(self, result: RunResult) -> None:
        """Write what is left."""
        self._run.finish()
