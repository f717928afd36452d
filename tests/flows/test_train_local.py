"""The train flow with an algorithm that TRL trains, on a real Prefect server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from algorithms.experiment import parse_experiment
from algorithms.opening import open_live_run
from backends.storage.run_store import RunStore
from tasks.open_run import handle_of
from tests.servers.prefect import PrefectServer


def document(store: Path) -> dict[str, Any]:
    held_out = {"kind": "jsonl", "path": "examples/data/arithmetic/test.jsonl"}
    return {
        "name": "local",
        "store": str(store),
        "model": {"name": "examples/models/tiny-qwen3"},
        "data": {"kind": "jsonl", "path": "examples/data/arithmetic/train.jsonl"},
        "algorithm": {
            "kind": "local_sft",
            "params": {"batch_size": 4, "max_steps": 6, "lora_rank": 4, "save_every": 2},
        },
        "evaluations": [{"name": "heldout", "data": held_out, "limit": 8, "max_tokens": 8}],
        "orchestration": {"task_runs": "operation"},
    }


async def test_one_task_owns_the_loop(tmp_path: Path) -> None:
    spec = parse_experiment(document(tmp_path))
    run = await open_live_run(spec, RunStore(spec.store, "run"))
    await run.backend.aclose()
    handle = handle_of(run)
    assert handle.task_runs == "segment"
    assert handle.segments() == [(0, 6)]
    assert run.plan.save_steps == (2, 4, 6)


async def test_a_run_is_like_any_other(prefect_server: PrefectServer, tmp_path: Path) -> None:
    from flows.train import train

    result = await train(parse_experiment(document(tmp_path)), "run")
    assert isinstance(result, dict)
    assert result["status"] == "completed"
    store = RunStore(str(tmp_path), "run")
    assert result == store.read_result()
    assert [row["step"] for row in store.metrics()] == [1, 2, 3, 4, 5, 6]
    assert store.checkpoint_steps() == [2, 4, 6]
    assert [row["step"] for row in store.evaluations()] == [0, 6]
    assert result["metrics"]["val/heldout/reward/mean"] >= 0
    assert result["artifacts"]["adapter"] == store.uri("checkpoints/step-000006")
    report = (tmp_path / "run" / "report.md").read_text()
    assert "local, seed 0" in report
    assert json.loads((tmp_path / "run" / "run.json").read_text())["backend"] == "local"
    assert await train(parse_experiment(document(tmp_path)), "run") == result
