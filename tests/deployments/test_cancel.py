"""`prefect flow-run cancel` on a run that a worker trains."""

from __future__ import annotations

import json
import time
from pathlib import Path

import httpx
import pytest
import yaml

from tests.deployments.test_deployments import (
    FIVE_COMMANDS,
    ROWS,
    deployed,
    environment,
    shell,
    working,
)
from tests.servers.prefect import PrefectServer

__all__ = ["deployed"]

pytestmark = pytest.mark.slow  # a worker of its own


def test_a_run_that_is_cancelled_on_a_worker_saves_and_is_cancelled(
    deployed: PrefectServer, tmp_path: Path
) -> None:
    config = tmp_path / "experiment.yaml"
    params = {"batch_size": 4, "max_steps": 60, "save_every": 50}
    experiment = {
        "name": "cancelled",
        "model": {"name": "none"},
        "data": {"kind": "rows", "rows": ROWS},
        "algorithm": {"kind": "mock_sft", "params": params},
        "backend": {"kind": "mock", "params": {"step_seconds": 0.5}},
    }
    config.write_text(yaml.safe_dump(experiment))
    env = environment(deployed)
    parameter = f"$(flowtune validate {config} --set store={tmp_path}/runs --json)"
    ask = f'{FIVE_COMMANDS[4].removesuffix(" --watch")} --param "experiment={parameter}"'
    run = tmp_path / "runs/a"
    log = tmp_path / "worker.log"
    with working(FIVE_COMMANDS[3].rstrip(" &"), env, log):
        done = shell(f"{ask} --param 'run_id=\"a\"'", env)
        assert done.returncode == 0, done.stderr
        found = wait_for_row(deployed, run / "metrics.jsonl", log)
        done = shell(f"prefect flow-run cancel {found}", env)
        assert done.returncode == 0, done.stderr
        state = wait_for_end(deployed, found)
    assert state == "CANCELLED", log.read_text()
    result = json.loads((run / "result.json").read_text())
    assert result["status"] == "cancelled", log.read_text()
    [kept] = (run / "checkpoints").iterdir()
    assert (kept / "manifest.json").exists()
    assert len((run / "metrics.jsonl").read_text().splitlines()) == int(kept.name[-6:])


def wait_for_row(server: PrefectServer, path: Path, log: Path) -> str:
    """Until a step is done; returns the id of the flow run that does them."""
    deadline = time.monotonic() + 120
    while not path.exists() or not path.read_bytes():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)
    wanted = {"flow_runs": {"state": {"type": {"any_": ["RUNNING"]}}}}
    answer = httpx.post(f"{server.api_url}/flow_runs/filter", json=wanted, trust_env=False)
    [found] = [run["id"] for run in answer.json() if run["parameters"].get("run_id") == "a"]
    return str(found)


def wait_for_end(server: PrefectServer, flow_run_id: str) -> str:
    """The type of the state that the flow run ends in."""
    deadline = time.monotonic() + 60
    url = f"{server.api_url}/flow_runs/{flow_run_id}"
    while True:
        state = str(httpx.get(url, trust_env=False).json()["state"]["type"])
        if state not in ("RUNNING", "CANCELLING") or time.monotonic() > deadline:
            return state
        time.sleep(0.2)
