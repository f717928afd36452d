"""TensorBoard: event files beside each other, one folder a run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, Field

from algorithms.callbacks import CallbackConfig, RunPlan, check_folder
from algorithms.watchers.tracking import Tracker

if TYPE_CHECKING:
    from algorithms.base import RunResult


FLUSH_SECONDS = 5


class TensorBoardConfig(CallbackConfig):
    """Where the event files go."""

    folder: str = Field(
        "tensorboard", min_length=1, description="Holds a folder for each run: tensorboard --logdir"
    )


class TensorBoard(Tracker):
    """Writes metrics and evaluations for TensorBoard."""

    Config: ClassVar[type[BaseModel]] = TensorBoardConfig
    kind: ClassVar[str] = "tensorboard"
    module: ClassVar[str] = "tensorboard"

    def __init__(self, cfg: TensorBoardConfig) -> None:
        """Raises UserError without the library, or if the folder cannot be written."""
        super().__init__(cfg)
        check_folder("folder", cfg.folder)

    def open(self, plan: RunPlan) -> int:
        """A new event file; what earlier ones hold of steps that are done again is struck out."""
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder = Path(self.cfg.folder) / plan.run_id
        been_here = any(folder.glob("events.out.tfevents.*"))
        self._writer = EventFileWriter(str(folder), flush_secs=FLUSH_SECONDS)
        if not been_here:
            return 0
        # As torch's SummaryWriter does with its purge_step.
        self._write(plan.first_step + 1, session_log=SessionLog(status=SessionLog.START))
        return plan.first_step

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """One event."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(step, summary=Summary(value=scalars))

    def close(self, result: RunResult) -> None:
        """Write what is left."""
        self._writer.close()

    def _write(self, step: int, **what: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(step=step, wall_time=time.time(), **what))
