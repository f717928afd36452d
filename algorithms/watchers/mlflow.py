"""MLflow."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from pydantic import BaseModel, Field

from algorithms.callbacks import CallbackConfig, RunPlan, check_folder
from algorithms.watchers.tracking import Tracker, settings_of
from backends.errors import FlowtuneError, Problem, UserError

if TYPE_CHECKING:
    from mlflow.entities import Metric
    from mlflow.exceptions import MlflowException

    from algorithms.base import RunResult

RUN_TAG = "flowtune.run_id"
DATABASE = "sqlite:///"
TRACKING_URI = "MLFLOW_TRACKING_URI"
SEND_SECONDS = 5.0
PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
"""MLflow's own settings, where nobody set them: else it takes minutes to give one up."""
MOST_METRICS = 1000
MOST_PARAMS = 100
"""What one request takes: limits of MLflow's own interface."""
MOST_WAITING = 50_000
"""Numbers kept for a server that is away; then the oldest go."""
LONGEST_NAME = 250
LONGEST_PARAM = 500
STATUS = {"completed": "FINISHED", "failed": "FAILED", "cancelled": "KILLED"}


class NotTaken(FlowtuneError):
    """Numbers that MLflow will never have."""


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
        from_environment = os.environ.get(TRACKING_URI) if cfg.tracking_uri is None else None
        self._uri_field = TRACKING_URI if from_environment else "tracking_uri"
        uri = cfg.tracking_uri or from_environment or ""
        if uri.startswith(DATABASE):
            check_folder(self._uri_field, Path(uri.removeprefix(DATABASE)).parent)
        self._waiting: list[Metric] = []
        self._sent = time.monotonic()
        self._dropped = 0
        self._refusal: MlflowException | None = None

    def open(self, plan: RunPlan) -> int:
        """The run that has this one's id as its tag, or a new one."""
        from mlflow import MlflowClient

        for name, value in PATIENCE.items():
            os.environ.setdefault(name, value)
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
            self._raise_dropped()

    def close(self, result: RunResult) -> None:
        """Send what is left, and how it ended."""
        try:
            self._send()
            if result.ended_early:
                self._client.set_tag(self._id, "flowtune.ended_early", result.ended_early)
            self._client.set_terminated(self._id, STATUS[result.status])
        finally:
            self._raise_dropped()

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
            raise UserError(Problem(self._uri_field, str(error), remedy)) from error

    def _send(self) -> None:
        """What does not get there is sent with what comes later, as far as there is room for it.

        What the server takes amiss is dropped: it would stand before all that follows.
        """
        try:
            while self._waiting:
                self._send_batch(self._waiting[:MOST_METRICS])
                del self._waiting[:MOST_METRICS]
        finally:
            self._sent = time.monotonic()
            too_many = max(0, len(self._waiting) - MOST_WAITING)
            del self._waiting[:too_many]
            self._dropped += too_many

    def _send_batch(self, batch: list[Metric]) -> None:
        from mlflow.exceptions import MlflowException

        try:
            self._client.log_batch(self._id, metrics=batch)
        except MlflowException as error:
            # 400 is about what was sent; any other may be a proxy's, or come right with time.
            if error.get_http_status_code() != HTTPStatus.BAD_REQUEST:
                raise
            self._dropped += len(batch)
            self._refusal = error

    def _raise_dropped(self) -> None:
        """Raises NotTaken for what was dropped since it was last told."""
        count, refusal = self._dropped, self._refusal
        self._dropped, self._refusal = 0, None
        if count:
            why = refusal or "nobody answered for too long"
            raise NotTaken(
                f"{count} numbers are not in MLflow: {why}; the run's own folder has them"
            ) from refusal

    def _log_settings(self, plan: RunPlan) -> None:
        from mlflow.entities import Param

        settings = settings_of(plan.experiment)
        params = [
            Param(_name(name), str(value)[:LONGEST_PARAM]) for name, value in settings.items()
        ]
        for start in range(0, len(params), MOST_PARAMS):
            self._client.log_batch(self._id, params=params[start : start + MOST_PARAMS])


def _name(name: str) -> str:
    """In the characters that MLflow takes: a batch that has others it refuses as a whole."""
    plain = name.replace("@", "_at_").replace("^", "_hat_")  # pass@k, pass^k
    return re.sub(r"[^\w./ -]", "_", plain)[:LONGEST_NAME]
