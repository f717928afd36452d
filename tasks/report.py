"""The last task of a run, its report, and the progress that Prefect shows until then.

The report goes to the run's store, then `result.json`; what Prefect gets is a copy.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
from collections.abc import AsyncIterator, Collection, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import httpx
from prefect import task
from prefect.artifacts import (
    acreate_markdown_artifact,
    acreate_progress_artifact,
    aupdate_progress_artifact,
)
from prefect.exceptions import PrefectHTTPStatusError

from algorithms.base import Transcript
from algorithms.callbacks import Callback, RunPlan
from algorithms.evaluators import read_sample
from backends.storage.checkpoints import Retention
from backends.storage.run_store import RunStore
from tasks.policies import policy
from tasks.report_page import Report, render
from tasks.report_record import LOSS_COLUMNS, CheckpointLine, EvaluationPoint, RunRecord
from tasks.report_text import number
from tasks.session import live

MOST_ARTIFACT_BYTES = 300_000
"""Artifacts lie in Prefect's database; a larger page goes there without its pictures."""

PROGRESS_SECONDS = 5.0

logger = logging.getLogger(__name__)


@task(name="report", task_run_name="report-{run_id}", **policy("report"))
async def report(run_id: str) -> dict[str, Any]:
    """Write the report of a run that is done, to its store and to Prefect; returns the result."""
    run = live(run_id)
    status = f"completed early: {run.ended_early}" if run.ended_early else "completed"
    page = await asyncio.to_thread(write_report, run.store, status, run.algorithm.setup_metrics())
    result = await asyncio.to_thread(run.finish)
    run.tell("on_end", result)
    await acreate_markdown_artifact(
        for_prefect(page, run.store.uri()),
        key=artifact_key("report", run_id),
        description=f"Report of run `{run_id}`",
    )
    return asdict(result)


def write_report(
    store: RunStore, status: str, setup_metrics: Mapping[str, float], error: str | None = None
) -> Report:
    """Write the report of a run that ended, with the error that ended it, to its store. Blocks."""
    page = render(collect(store, status, setup_metrics, error))
    store.write_report(page.markdown, page.images)
    return page


def for_prefect(page: Report, run_uri: str) -> str:
    """The page in one piece, small enough for Prefect's database."""
    text = page.inline(run_uri)
    if len(text.encode()) <= MOST_ARTIFACT_BYTES:
        return text
    return Report(re.sub(r"!\[[^]]*\]\([^)]*\)\n*", "", page.markdown), {}).inline(run_uri)


def artifact_key(kind: str, run_id: str) -> str:
    """A key that Prefect takes: lower-case letters, digits and dashes."""
    return f"{kind}-{re.sub(r'[^a-z0-9]+', '-', run_id.lower()).strip('-')}"


# --- from the store


def collect(
    store: RunStore, status: str, setup_metrics: Mapping[str, float], error: str | None = None
) -> RunRecord:
    """Read what the report is made of. Blocks."""
    info = store.info()
    experiment = store.read_experiment() or {}
    began = datetime.fromisoformat(info.created)
    seconds = (datetime.now(UTC) - began.astimezone(UTC)).total_seconds()
    normalized = {
        spec["name"] for spec in experiment.get("evaluations", []) if spec.get("length_normalized")
    }
    versions = ", ".join(f"{name} {version}" for name, version in info.packages.items())
    model = experiment.get("model", {})
    start = model.get("init_from")
    facts = {
        "model": f"`{model.get('name', '')}`" + (f", from `{start}`" if start else ""),
        "begun": f"{began:%Y-%m-%d %H:%M}, reported {_duration(seconds)} later",
        "code": f"flowtune {info.flowtune}, commit {(info.git_commit or 'unknown')[:12]}",
        "with": f"Python {info.python}, {versions}",
        "backend": f"{info.backend}, seed {info.seed}",
    }
    return RunRecord(
        run_id=store.run_id,
        name=info.name,
        status=status,
        uri=store.uri(),
        experiment=experiment,
        data=_data(experiment.get("data", {}), info.data_fingerprint, setup_metrics),
        facts=facts,
        rows=store.metrics(),
        evaluations=[_point(store, row, normalized) for row in store.evaluations()],
        checkpoints=_checkpoint_lines(store, experiment.get("checkpoints", {})),
        rollouts=_first_and_last_rollouts(store),
        error=error,
        flow_run_url=info.flow_run_url,
    )


def _data(
    source: Mapping[str, Any], fingerprint: str | None, setup_metrics: Mapping[str, float]
) -> dict[str, Any]:
    """Where the rows come from, which they were, and what set-up made of them."""
    facts = {
        name: f"{len(value)} rows" if name == "rows" else value for name, value in source.items()
    }
    made = {name.removeprefix("data/").replace("_", " "): v for name, v in setup_metrics.items()}
    return facts | {"sha256": fingerprint} | {name: number(value) for name, value in made.items()}


def _point(store: RunStore, row: Mapping[str, Any], normalized: Collection[str]) -> EvaluationPoint:
    lines = store.objects.read(f"{store.run_id}/{row['samples']}").splitlines()
    samples = [read_sample(json.loads(line)) for line in lines]
    known = {name: value for name, value in row["metrics"].items() if value is not None}
    return EvaluationPoint(
        name=row["name"],
        step=row["step"],
        score=float("nan") if row["score"] is None else row["score"],
        rows=int(known.get("n", len(samples))),
        samples=samples,
        metrics=known,
        per_token=row["name"] in normalized,
    )


def _first_and_last_rollouts(store: RunStore) -> dict[int, list[Transcript]]:
    """The rollouts of the first and the last step that any were kept of."""
    steps = store.rollout_steps()
    return {
        step: [Transcript(**fields) for fields in store.rollouts(step)]
        for step in dict.fromkeys([*steps[:1], *steps[-1:]])
    }


def _checkpoint_lines(store: RunStore, kept: Mapping[str, Any]) -> list[CheckpointLine]:
    how = Retention.model_validate(kept).keep_best
    best = None if how is None else store.best_checkpoint(how)
    return [
        CheckpointLine(
            manifest.step,
            store.checkpoint_uri(manifest),
            store.checkpoint_uri(manifest).removeprefix(store.uri()).lstrip("/"),
            sum(file.size for file in manifest.files),
            how.metric if how is not None and manifest == best else None,
        )
        for manifest in store.checkpoints()
    ]


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


# --- progress


class _Progress(Callback):
    """How far the run is, as Prefect shows it."""

    def __init__(self, plan: RunPlan) -> None:
        self._total = plan.total_steps
        self._done = plan.first_step
        self._words: list[str] = []

    def on_step(self, row: Mapping[str, float]) -> None:
        """Take the row's step, its loss and its speed."""
        self._done = int(row["step"])
        loss = next((name for name in LOSS_COLUMNS if name in row), None)
        self._words = [f"{loss} {number(row[loss])}"] if loss else []
        if speed := row.get("time/tokens_per_second"):
            self._words.append(f"{speed:,.0f} tokens/s")

    @property
    def percent(self) -> float:
        """From 0 to 100."""
        return 100.0 * self._done / max(self._total, 1)

    @property
    def description(self) -> str:
        """The line below the bar."""
        return " · ".join([f"step {self._done} of {self._total}", *self._words])


@contextlib.asynccontextmanager
async def progress_artifact(
    run_id: str, every_seconds: float = PROGRESS_SECONDS
) -> AsyncIterator[None]:
    """Show an open run's progress in Prefect while the block runs: one artifact, kept up to date.

    Training never waits for it; a server that does not take an update costs a line in the log.
    """
    run = live(run_id)
    progress, over = _Progress(run.plan), asyncio.Event()
    run.callbacks.append(progress)
    key = artifact_key("progress", run_id)
    shown = asyncio.create_task(_show(progress, key, every_seconds, over))
    try:
        yield
    finally:
        over.set()
        await shown
        run.callbacks.remove(progress)


async def _show(progress: _Progress, key: str, every_seconds: float, over: asyncio.Event) -> None:
    artifact_id: UUID | None = None
    told = ""
    while True:
        last = over.is_set()
        if progress.description != told:
            told = progress.description
            artifact_id = await _tell(progress, key, artifact_id)
        if last:
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(over.wait(), every_seconds)


async def _tell(progress: _Progress, key: str, artifact_id: UUID | None) -> UUID | None:
    try:
        if artifact_id is None:
            return await acreate_progress_artifact(progress.percent, key, progress.description)
        return await aupdate_progress_artifact(artifact_id, progress.percent, progress.description)
    except (httpx.HTTPError, PrefectHTTPStatusError) as error:
        logger.warning("Prefect did not take the progress of the run: %s", error)
        return artifact_id
