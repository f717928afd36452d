"""Runs whose process is gone are marked as crashed, and live ones are not."""

from __future__ import annotations

import asyncio
import runpy
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from flows.prefect_server import HEARTBEAT_SECONDS
from tests.servers.prefect import PrefectServer

ROOT = Path(__file__).resolve().parents[2]
SETUP = runpy.run_path(str(ROOT / "deployments/setup.py"))
SILENT_SECONDS = 10
"""The least that Prefect takes: the test cannot wait for minutes."""


@pytest.fixture(scope="module")
def api(prefect_server: PrefectServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=prefect_server.api_url, trust_env=False) as client:
        yield client


def automations(api: httpx.Client) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = api.post("/automations/filter", json={}).json()
    return [each for each in found if each["name"] == SETUP["DEAD_RUNS"]]


@pytest.fixture(scope="module")
def automation(prefect_server: PrefectServer, api: httpx.Client) -> dict[str, Any]:
    """The automation as `setup.py` leaves it behind; set up twice, and still one."""
    for _ in range(2):
        asyncio.run(SETUP["watch_for_dead_runs"]())
    [found] = automations(api)
    return found


def test_the_limit_is_wide_and_the_message_says_what_to_do(automation: dict[str, Any]) -> None:
    assert automation["enabled"]
    assert automation["trigger"]["within"] >= 10 * HEARTBEAT_SECONDS
    [action] = automation["actions"]
    assert (action["type"], action["state"]) == ("change-flow-run-state", "CRASHED")
    assert "prefect flow-run retry" in action["message"]
    assert "--run-id" in action["message"]


def running_flow_run(api: httpx.Client, flow: str) -> str:
    flow_id = api.post("/flows/", json={"name": flow}).json()["id"]
    new = {"flow_id": flow_id, "name": f"dead-{flow}", "state": {"type": "RUNNING"}}
    flow_run_id: str = api.post("/flow_runs/", json=new).json()["id"]
    return flow_run_id


def state(api: httpx.Client, flow_run_id: str) -> dict[str, Any]:
    found: dict[str, Any] = api.get(f"/flow_runs/{flow_run_id}").json()["state"]
    return found


def beat(*runs: tuple[str, str]) -> None:
    """What Prefect's flow engine sends for (flow run, name of its flow)."""
    from prefect.events import Event, RelatedResource, Resource, get_events_client

    async def send() -> None:
        async with get_events_client() as client:
            for flow_run_id, flow in runs:
                of_flow = {"id": "prefect.flow.any", "role": "flow", "name": flow}
                related = {f"prefect.resource.{name}": value for name, value in of_flow.items()}
                await client.emit(
                    Event(
                        event="prefect.flow-run.heartbeat",
                        resource=Resource(
                            {"prefect.resource.id": f"prefect.flow-run.{flow_run_id}"}
                        ),
                        related=[RelatedResource(related)],
                    )
                )

    asyncio.run(send())


def test_only_the_silent_run_is_marked_and_told_what_to_do(
    api: httpx.Client, automation: dict[str, Any]
) -> None:
    """The same automation with the shortest limit there is: one run goes silent, others do not."""
    kept = {"name", "description", "enabled", "trigger", "actions"}
    hasty = {name: value for name, value in automation.items() if name in kept}
    hasty |= {"name": "hasty", "trigger": automation["trigger"] | {"within": SILENT_SECONDS}}
    created = api.post("/automations/", json=hasty)
    assert created.status_code == 201, created.text
    try:
        flows = ("train", "train-stages", "train", "train", "other")
        silent, of_stages, live, ended, others = (
            (running_flow_run(api, flow), flow) for flow in flows
        )
        beat(silent, of_stages, live, ended, others)
        done = {"state": {"type": "COMPLETED"}}
        api.post(f"/flow_runs/{ended[0]}/set_state", json=done).raise_for_status()
        deadline = time.monotonic() + 6 * SILENT_SECONDS
        while "RUNNING" in {state(api, run[0])["type"] for run in (silent, of_stages)}:
            assert time.monotonic() < deadline, "nobody noticed"
            beat(live)
            time.sleep(0.5)
    finally:
        api.delete(f"/automations/{created.json()['id']}")
    assert {state(api, run[0])["type"] for run in (silent, of_stages)} == {"CRASHED"}
    assert "--run-id" in state(api, silent[0])["message"]
    assert [state(api, run[0])["type"] for run in (live, ended, others)] == [
        "RUNNING",
        "COMPLETED",
        "RUNNING",
    ]
