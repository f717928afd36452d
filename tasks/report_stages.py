"""What a run of several stages leaves behind: one page and one result for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from prefect import task
from prefect.artifacts import acreate_markdown_artifact
from prefect.runtime import flow_run
from prefect.utilities.urls import url_for

from algorithms.base import RunResult
from algorithms.opening import check_continues
from algorithms.rewards.metrics import scores
from algorithms.stages import StagedExperiment
from backends.storage.run_store import RunStore
from tasks.policies import policy
from tasks.report import artifact_key
from tasks.report_text import table


async def finished_stages(experiment: StagedExperiment, run_id: str) -> dict[str, Any] | None:
    """The result of a run of stages that is complete.

    Raises UserError if it was begun with another experiment.
    """

    def read() -> dict[str, Any] | None:
        store = RunStore(experiment.store, run_id)
        check_continues(store, experiment)
        return store.read_result()

    return await asyncio.to_thread(read)


@task(name="report", task_run_name="report-{run_id}", **policy("report"))
async def report_stages(
    experiment: StagedExperiment, run_id: str, results: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Write the page and the result of all stages, to the store and to Prefect."""
    url = url_for("flow-run", flow_run.id) if flow_run.id else None
    result, page = await asyncio.to_thread(_write, experiment, run_id, results, url)
    await acreate_markdown_artifact(
        page, key=artifact_key("report", run_id), description=f"Report of the stages of `{run_id}`"
    )
    return result


def _write(
    experiment: StagedExperiment, run_id: str, results: Sequence[dict[str, Any]], url: str | None
) -> tuple[dict[str, Any], str]:
    store = RunStore(experiment.store, run_id)
    backend = experiment.experiment(0, None).backend.kind
    store.begin(name=experiment.name, backend=backend, seed=experiment.seed, flow_run_url=url)
    store.take_lease(url)
    store.write_experiment(experiment.model_dump(mode="json"))
    page = render(experiment, run_id, results)
    report = store.write_report(page)
    last = results[-1]["artifacts"]
    artifacts = {name: last[name] for name in ("adapter", "state", "sampler") if name in last}
    artifacts |= {"run": store.uri(), "report": report}
    for stage, result in zip(experiment.stages, results, strict=True):
        artifacts[f"stages/{stage.name}"] = result["artifacts"]["run"]
    result = asdict(RunResult(run_id, "completed", _metrics(experiment, results), artifacts))
    store.write_result(result)
    return result, page


def _metrics(experiment: StagedExperiment, results: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Every stage's metrics under its name; held-out scores as val/<stage>.<name>/…"""
    metrics: dict[str, float] = {}
    for stage, result in zip(experiment.stages, results, strict=True):
        for name, value in result["metrics"].items():
            first, _, rest = name.partition("/")
            place = f"val/{stage.name}.{rest}" if first == "val" else f"{stage.name}/{name}"
            metrics[place] = value
    return metrics


def render(experiment: StagedExperiment, run_id: str, results: Sequence[dict[str, Any]]) -> str:
    """The page: which stages there were, and a section for each."""
    overview = [
        (
            index + 1,
            f"[{stage.name}](../{experiment.run_id(run_id, index)}/report.md)",
            stage.algorithm.kind,
            int(result["metrics"].get("step", 0)),
            _scores(result["metrics"]),
        )
        for index, (stage, result) in enumerate(zip(experiment.stages, results, strict=True))
    ]
    parts = [
        f"# {experiment.name}",
        "Each stage starts from the weights that the one before it ended with.",
        table(("", "stage", "algorithm", "steps", "held-out scores"), overview),
    ]
    for index, (stage, result) in enumerate(zip(experiment.stages, results, strict=True)):
        places = {name: place for name, place in result["artifacts"].items() if place}
        parts += [
            f"## {index + 1}. {stage.name} ({stage.algorithm.kind})",
            table(("", ""), [(name, f"`{place}`") for name, place in places.items()]),
        ]
    return "\n\n".join(parts) + "\n"


def _scores(metrics: dict[str, float]) -> str:
    """Held-out scores before and after."""
    shown = [
        f"{name} {after:.3f}" if before is None else f"{name} {before:.3f} → {after:.3f}"
        for name, (before, after) in scores(metrics).items()
    ]
    return ", ".join(shown)
