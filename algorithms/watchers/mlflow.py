"""MLflow."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from pydantic import BaseModel, Field

from algorithms.callbacks import CallbackConfig, RunPlan, check_folder
from algorithms.watchers.tracking import Tracker, settings_of
from backends.errors import Problem, UserError

if TYPE_CHECKING:
    from mlflow.entities import Metric

    from algorithms.base import RunResult

RUN_TAG = "flowtune.run_id"
DATABASE = "sqlite:///"
SEND_SECONDS = 5.0
PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
"""MLflow's own settings, where nobody set them: else it takes minutes to give one up."""
MOST_METRICS = 1000
MOST_PARAMS = 100
"""What one request takes: limits of MLflow's own interface."""
LONGEST_PARAM = 500
STATUS = {"completed": "FINISHED", "failed": "FAILED", "cancelled": "KILLED"}


class MLflowConfig(CallbackConfig):
    """Which server or database, and which experiment in it."""

    tracking_uri: str | None = Field(
        None, description="A server, or sqlite:///file.db; else MLFLOW_TRACKING_URI."
    )
    experiment: str = Field("flowtune", min_length=1, description="Made if it is not there.")


class MLflow(Tracker):
    """Sends metrics and evaluations to MLflow."""

    Config: ClassVar[type[BaseModel]] = MLflowConfig
    kind: ClassVar[str] = "mlflow"
    module: ClassVar[str] = "mlflow"

    def __init__(self, cfg: MLflowConfig) -> None:
        """Raises UserError without the library, or if a database's folder cannot be written."""
        super().__init__(cfg)
        uri = cfg.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or ""
        if uri.startswith(DATABASE):
            check_folder("callbacks.mlflow.tracking_uri", Path(uri.removeprefix(DATABASE)).parent)

    def open(self, plan: RunPlan) -> int:
        """The run that has this one's id as its tag, or a new one."""
        from mlflow import MlflowClient

        for name, value in PATIENCE.items():
            os.environ.setdefault(name, value)
        self._waiting: list[Metric] = []
        self._sent = time.monotonic()
        self._client = MlflowClient(tracking_uri=self.cfg.tracking_uri)
        place = self._place()
        found = self._client.search_runs([place], f"tags.`{RUN_TAG}` = '{plan.run_id}'")
        if found:
            self._id = found[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return int(found[0].data.metrics.get("step", 0))
        tags = {RUN_TAG: plan.run_id}
        self._id = self._client.create_run(place, run_name=plan.run_id, tags=tags).info.run_id
        self._log_settings(plan)
        return 0

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Sent every few seconds; the row's own step is how a resumed run knows what is there."""
        from mlflow.entities import Metric

        now = round(time.time() * 1000)
        if any(not name.startswith("val/") for name in values):
            values = {**values, "step": float(step)}
        self._waiting += [Metric(_name(name), values[name], now, step) for name in values]
        if time.monotonic() - self._sent > SEND_SECONDS:
            self._send()

    def close(self, result: RunResult) -> None:
        """Send what is left, and how it ended."""
        self._send()
        if result.ended_early:
            self._client.set_tag(self._id, "flowtune.ended_early", result.ended_early)
        self._client.set_terminated(self._id, STATUS[result.status])

    def _place(self) -> str:
        """The id of the experiment there. Raises UserError if nobody answers."""
        from mlflow.exceptions import MlflowException

        try:
            known = self._client.get_experiment_by_name(self.cfg.experiment)
            if known is not None:
                return str(known.experiment_id)
            return str(self._client.create_experiment(self.cfg.experiment))
        except MlflowException as error:
            remedy = "start the server, or name another one: the run is not shown in MLflow"
            raise UserError(Problem("callbacks.mlflow.tracking_uri", str(error), remedy)) from error

    def _send(self) -> None:
        """What is not taken stays, and is sent with what comes later."""
        try:
            while self._waiting:
                self._client.log_batch(self._id, metrics=self._waiting[:MOST_METRICS])
                del self._waiting[:MOST_METRICS]
        finally:
            self._sent = time.monotonic()

    def _log_settings(self, plan: RunPlan) -> None:
        from mlflow.entities import Param

        settings = settings_of(plan.experiment)
        params = [Param(name, str(value)[:LONGEST_PARAM]) for name, value in settings.items()]
        for start in range(0, len(params), MOST_PARAMS):
            self._client.log_batch(self._id, params=params[start : start + MOST_PARAMS])


def _name(name: str) -> str:
    """pass@k and pass^k in the characters that MLflow takes."""
    return name.replace("@", "_at_").replace("^", "_hat_")
