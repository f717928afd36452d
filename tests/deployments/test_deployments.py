"""The deployments on a real server and a real worker, as deployments/README.md has them."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.servers.prefect import PrefectServer

ROOT = Path(__file__).resolve().parents[2]
FIVE_COMMANDS = [
    "make train",
    "source .venv/bin/activate",
    "export PREFECT_API_URL=$(python deployments/setup.py)",
    "prefect worker start --pool flowtune &",
    "prefect deployment run 'train/sft' --watch",
]
ROWS = [{"prompt": f"What is {i} + {i}?", "completion": str(2 * i)} for i in range(20)]


def environment(server: PrefectServer) -> dict[str, str]:
    """That of a person who has activated the environment these tests run in."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**server.environment, "PATH": path, "PREFECT_WORKER_QUERY_SECONDS": "1"}


def shell(line: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", line], cwd=ROOT, env=env, capture_output=True, text=True, timeout=200
    )


@pytest.fixture(scope="module")
def deployed(prefect_server: PrefectServer) -> PrefectServer:
    done = shell(FIVE_COMMANDS[2] + '; printf %s "$PREFECT_API_URL"', environment(prefect_server))
    assert done.stdout == prefect_server.api_url, done.stderr
    return prefect_server


@pytest.fixture(scope="module")
def deployment(deployed: PrefectServer) -> dict[str, Any]:
    return registered_as(deployed, "train/sft")


@pytest.fixture(scope="module")
def stages(deployed: PrefectServer) -> dict[str, Any]:
    return registered_as(deployed, "train-stages/stages")


def registered_as(server: PrefectServer, name: str) -> dict[str, Any]:
    """What the server knows of a deployment."""
    answer = httpx.get(f"{server.api_url}/deployments/name/{name}", trust_env=False)
    assert answer.status_code == 200
    found: dict[str, Any] = answer.json()
    return found


@contextmanager
def working(line: str, env: dict[str, str], log: Path) -> Iterator[None]:
    """A worker for the length of the block."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            shlex.split(line), cwd=ROOT, env=env, stdout=output, stderr=output
        )
    try:
        yield
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def blocks(language: str) -> list[str]:
    """The README's code blocks."""
    text = (ROOT / "deployments/README.md").read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_the_readme_has_the_commands_that_are_tried_here() -> None:
    assert blocks("bash")[0].splitlines() == FIVE_COMMANDS


def test_the_pull_step_for_other_machines_goes_where_the_worker_says(
    deployed: PrefectServer, tmp_path: Path
) -> None:
    (tmp_path / "steps.yaml").write_text(blocks("yaml")[0])
    run = (
        "import asyncio, os, sys, yaml\n"
        "from prefect.deployments.steps.core import run_steps\n"
        "asyncio.run(run_steps(yaml.safe_load(open(sys.argv[1]))['pull']))\n"
        "print(os.getcwd())"
    )
    env = {**environment(deployed), "FLOWTUNE_HOME": str(tmp_path)}
    command = [sys.executable, "-c", run, str(tmp_path / "steps.yaml")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == str(tmp_path), done.stderr


def test_the_parameters_are_the_examples(deployed: PrefectServer) -> None:
    declared = yaml.safe_load((ROOT / "deployments/prefect.yaml").read_text(encoding="utf-8"))
    shown = {
        entry["name"]: ("train", "sft_arithmetic.yaml") for entry in declared["deployments"]
    } | {"stages": ("train-stages", "sft_then_dpo.yaml")}
    for entry in declared["deployments"]:
        flow, file = shown[entry["name"]]
        example = yaml.safe_load((ROOT / "examples" / file).read_text(encoding="utf-8"))
        assert entry["parameters"] == {"experiment": example}
        registered = registered_as(deployed, f"{flow}/{entry['name']}")
        assert registered["parameters"] == {"experiment": example}
        assert registered["work_pool_name"] == "flowtune"


def test_the_nightly_one_has_its_schedule_and_runs_alone(deployed: PrefectServer) -> None:
    url = f"{deployed.api_url}/deployments/name/train/sft-nightly"
    found = httpx.get(url, trust_env=False).json()
    [schedule] = found["schedules"]
    assert (schedule["schedule"]["cron"], schedule["active"]) == ("0 2 * * *", True)
    assert found["global_concurrency_limit"]["limit"] == 1
    assert found["concurrency_options"]["collision_strategy"] == "ENQUEUE"
    listed = shell(blocks("bash")[1], environment(deployed))
    assert listed.returncode == 0, listed.stderr
    assert "0 2 * * *" in listed.stdout


def test_the_form_is_the_experiment(deployment: dict[str, Any]) -> None:
    """The schema that the UI makes its form of: fields, their meaning, and a choice of kinds."""
    schema = deployment["parameter_openapi_schema"]
    assert deployment["enforce_parameter_schema"]
    assert schema["required"] == ["experiment"]
    definitions = schema["definitions"]
    experiment = definitions["Experiment"]
    fields = {"name", "seed", "store", "model", "data", "algorithm", "backend", "evaluations"}
    assert fields <= set(experiment["properties"])
    assert all(experiment["properties"][name]["description"] for name in fields - {"model"})
    assert definitions["ModelSection"]["properties"]["name"]["description"]
    kinds = experiment["properties"]["algorithm"]["oneOf"]
    titles = {definitions[kind["$ref"].rpartition("/")[2]]["title"] for kind in kinds}
    assert {"sft", "mock_sft"} <= titles
    assert definitions["SFTConfig"]["properties"]["supervise"]["description"]


def test_the_form_of_stages_is_a_list_of_them(stages: dict[str, Any]) -> None:
    schema = stages["parameter_openapi_schema"]
    assert stages["enforce_parameter_schema"]
    assert schema["required"] == ["experiment"]
    definitions = schema["definitions"]
    fields = definitions["StagedExperiment"]["properties"]
    assert fields["stages"]["items"] == {"$ref": "#/definitions/Stage"}
    of_one = definitions["Stage"]["properties"]
    assert set(of_one) == {"name", "data", "algorithm", "evaluations", "checkpoints"}
    assert all(field["description"] for name, field in of_one.items() if name != "checkpoints")
    kinds = of_one["algorithm"]["oneOf"]
    titles = {definitions[kind["$ref"].rpartition("/")[2]]["title"] for kind in kinds}
    assert {"sft", "dpo"} <= titles


def test_stages_that_are_not_allowed_are_refused_before_a_run_exists(
    deployed: PrefectServer, stages: dict[str, Any]
) -> None:
    url = f"{deployed.api_url}/deployments/{stages['id']}/create_flow_run"
    wrong = json.loads(json.dumps(stages["parameters"]))
    wrong["experiment"]["stages"][1]["algorithm"]["params"]["batch_size"] = 0
    for parameters in (wrong, {"experiment": stages["parameters"]["experiment"] | {"stages": []}}):
        answer = httpx.post(url, json={"parameters": parameters}, trust_env=False)
        assert answer.status_code == 409


def test_a_value_that_is_not_allowed_is_refused_before_a_run_exists(
    deployed: PrefectServer, deployment: dict[str, Any]
) -> None:
    wrong = json.loads(json.dumps(deployment["parameters"]))
    wrong["experiment"]["algorithm"]["params"]["batch_size"] = 0
    url = f"{deployed.api_url}/deployments/{deployment['id']}/create_flow_run"
    answer = httpx.post(url, json={"parameters": wrong}, trust_env=False)
    assert answer.status_code == 409
    assert "batch_size" in answer.text or "0 is less than the minimum" in answer.text


def test_a_run_that_is_asked_for_ends_completed_on_a_worker(
    deployed: PrefectServer, tmp_path: Path
) -> None:
    config = tmp_path / "experiment.yaml"
    experiment = {
        "name": "deployed",
        "model": {"name": "none"},
        "data": {"kind": "rows", "rows": ROWS},
        "algorithm": {"kind": "mock_sft", "params": {"batch_size": 4, "max_steps": 6}},
        "orchestration": {"task_runs": "segment"},
    }
    config.write_text(yaml.safe_dump(experiment))
    env = environment(deployed)
    parameter = f"$(flowtune validate {config} --set store={tmp_path}/runs --json)"
    ask = f'{FIVE_COMMANDS[4]} --param "experiment={parameter}" --param \'run_id="by-hand"\''
    with working(FIVE_COMMANDS[3].rstrip(" &"), env, tmp_path / "worker.log"):
        done = shell(ask, env)
    assert done.returncode == 0, done.stdout + (tmp_path / "worker.log").read_text()
    assert "Flow run finished successfully in 'Completed'" in done.stdout
    result = json.loads((tmp_path / "runs/by-hand/result.json").read_text())
    assert (result["status"], result["metrics"]["step"]) == ("completed", 6)
    # Without its heartbeats nobody would notice that its process is gone.
    query = {"filter": {"event": {"name": ["prefect.flow-run.heartbeat"]}}}
    beats = httpx.post(f"{deployed.api_url}/events/filter", json=query, trust_env=False).json()
    query = {"flow_runs": {"state": {"type": {"any_": ["COMPLETED"]}}}}
    address = f"{deployed.api_url}/flow_runs/filter"
    completed = httpx.post(address, json=query, trust_env=False).json()
    [flow_run] = [row for row in completed if row["parameters"].get("run_id") == "by-hand"]
    resource = f"prefect.flow-run.{flow_run['id']}"
    assert resource in {beat["resource"]["prefect.resource.id"] for beat in beats["events"]}


@pytest.mark.slow
def test_stages_that_are_asked_for_end_completed_on_a_worker(
    deployed: PrefectServer, tmp_path: Path
) -> None:
    config = tmp_path / "experiment.yaml"
    stage = {
        "data": {"kind": "rows", "rows": ROWS},
        "algorithm": {"kind": "mock_sft", "params": {"batch_size": 4, "max_steps": 3}},
    }
    experiment = {
        "name": "deployed",
        "model": {"name": "none"},
        "orchestration": {"task_runs": "segment"},
        "stages": [{"name": "first", **stage}, {"name": "second", **stage}],
    }
    config.write_text(yaml.safe_dump(experiment))
    env = environment(deployed)
    parameter = f"$(flowtune validate {config} --set store={tmp_path}/runs --json)"
    ask = "prefect deployment run 'train-stages/stages' --watch"
    with working(FIVE_COMMANDS[3].rstrip(" &"), env, tmp_path / "worker.log"):
        done = shell(f'{ask} --param "experiment={parameter}" --param \'run_id="two"\'', env)
    assert done.returncode == 0, done.stdout + (tmp_path / "worker.log").read_text()
    assert "Flow run finished successfully in 'Completed'" in done.stdout
    result = json.loads((tmp_path / "runs/two/result.json").read_text())
    assert (result["status"], result["metrics"]["second/step"]) == ("completed", 3)
    begun = (tmp_path / "runs/two-2-second/experiment.yaml").read_text()
    assert f"init_from: {tmp_path}/runs/two-1-first/checkpoints/step-000003" in begun
