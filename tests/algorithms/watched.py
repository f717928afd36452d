"""Runs on the mock backend that tests of callbacks watch, break and continue."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

from algorithms.experiment import Experiment, parse_experiment
from algorithms.opening import open_live_run
from algorithms.run import LiveRun
from backends.storage.run_store import RunStore

ROWS = [{"prompt": f"{i}", "completion": f"{i}{i}"} for i in range(8)]
HELD = [{"prompt": word, "completion": word} for word in ("one", "two")]


def experiment(store: Path, **changes: Any) -> Experiment:
    document: dict[str, Any] = {
        "name": "watched",
        "store": str(store),
        "model": {"name": "any/model"},
        "data": {"kind": "rows", "rows": ROWS},
        "algorithm": {
            "kind": "mock_sft",
            "params": {"batch_size": 2, "max_steps": 12, "save_every": 4},
        },
        "evaluations": [{"name": "val", "data": {"kind": "rows", "rows": HELD}, "every": 3}],
    }
    return parse_experiment(document | changes)


async def opened(spec: Experiment, run_id: str = "a") -> LiveRun:
    run = await open_live_run(spec, RunStore(spec.store, run_id))
    run.tell("on_start", run.plan)
    return run


async def finished(spec: Experiment, run_id: str = "a", until: int | None = None) -> LiveRun:
    """Open or continue the run and train it, to the end or to the checkpoint of that step."""
    run = await opened(spec, run_id)
    marks = [run.plan.first_step, *(s for s in run.plan.save_steps if s > run.plan.first_step)]
    for start, stop in pairwise(marks):
        await run.run_segment(run, start, stop)
        if run.ended_early or stop == until:
            break
    await run.settle()
    if until is None:
        run.tell("on_end", run.finish())
    await run.backend.aclose()
    return run


def table(store: Path, run_id: str, name: str = "metrics") -> list[dict[str, Any]]:
    """The rows that the run left, without what a clock put in."""
    lines = (store / run_id / f"{name}.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]


def checkpoints(store: Path, run_id: str) -> list[str]:
    return sorted(path.name for path in (store / run_id / "checkpoints").iterdir())
