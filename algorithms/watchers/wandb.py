"""Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import BaseModel, Field

from algorithms.callbacks import CallbackConfig, RunPlan, check_folder
from algorithms.watchers.tracking import Tracker, settings_of
from backends.errors import Problem, UserError

if TYPE_CHECKING:
    from algorithms.base import RunResult

ANSWER_SECONDS = 30
"""How long its server may take to begin a run, and to end it."""


class WandBConfig(CallbackConfig):
    """Where the run is shown; the key comes from `wandb login` or WANDB_API_KEY."""

    project: str = Field("flowtune", min_length=1, description="The project.")
    entity: str | None = Field(None, description="The team or user; else the key's own.")
    group: str | None = Field(None, description="Runs that belong together.")
    mode: Literal["online", "offline"] = Field(
        "online", description="offline keeps all in `folder`, for `wandb sync` later."
    )
    folder: str = Field(".", min_length=1, description="Its folder wandb/ lies in this one.")


class WandB(Tracker):
    """Sends metrics and evaluations to Weights & Biases."""

    Config: ClassVar[type[BaseModel]] = WandBConfig
    kind: ClassVar[str] = "wandb"
    module: ClassVar[str] = "wandb"

    def __init__(self, cfg: WandBConfig) -> None:
        """Raises UserError without the library or the key, or if the folder cannot be written."""
        super().__init__(cfg)
        check_folder("folder", cfg.folder)
        if cfg.mode == "online":
            _check_key()

    def open(self, plan: RunPlan) -> int:
        """The run of the same id, resumed if it is there."""
        import wandb

        folder = Path(self.cfg.folder)
        folder.mkdir(parents=True, exist_ok=True)
        kept_here = any(folder.glob(f"wandb/offline-run-*-{plan.run_id}"))
        self._run = wandb.init(
            project=self.cfg.project,
            entity=self.cfg.entity,
            group=self.cfg.group,
            mode=self.cfg.mode,
            dir=self.cfg.folder,
            id=plan.run_id,
            name=plan.run_id,
            resume="allow",
            tags=plan.experiment.tags if plan.experiment is not None else None,
            config=settings_of(plan.experiment),
            settings=wandb.Settings(
                silent=True,
                console="off",
                init_timeout=ANSWER_SECONDS,
                finish_timeout=ANSWER_SECONDS,
                finish_timeout_raises=True,
            ),
        )
        # Its own step never goes back, and an evaluation ends when later steps are done.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        if self.cfg.mode == "offline":  # what is there already is in another folder
            return plan.first_step if kept_here else 0
        return int(self._run.summary.get("step") or 0)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """One row of the history."""
        self._run.log({"step": step, **values})

    def close(self, result: RunResult) -> None:
        """Send what is left, and how it ended."""
        self._run.summary["status"] = result.status
        if result.ended_early:
            self._run.summary["ended_early"] = result.ended_early
        self._run.finish(exit_code=0 if result.status == "completed" else 1)


def _check_key() -> None:
    """Raises UserError if there is none; left to itself the library would ask for it."""
    import wandb

    try:
        if wandb.login(prompt=False, verify=False):
            return
        what = "there is no API key for Weights & Biases"
    except wandb.Error as error:
        what = str(error)
    remedy = "set WANDB_API_KEY, or call `wandb login` once, or set mode: offline"
    raise UserError(Problem("mode", what, remedy))
