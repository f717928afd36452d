"""Makes Prefect ready for flowtune. Safe to run again.

A server, the work pool, the deployments, and the automation that notices dead runs.

    export PREFECT_API_URL=$(python deployments/setup.py)

Finds the Prefect server that is configured, else starts a local one. Its API's address goes to
stdout, everything else to stderr.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from backends.errors import UserError
from flows.prefect_server import HEARTBEAT_SECONDS, ensure_server

if TYPE_CHECKING:
    from prefect.automations import Automation

ROOT = Path(__file__).resolve().parent.parent
POOL = "flowtune"
DEAD_RUNS = "flowtune: a run whose process is gone"
SILENT_SECONDS = 10 * HEARTBEAT_SECONDS
"""A live run is silent for seconds at most; with a limit near that it would be declared dead."""
WHAT_NEXT = (
    f"No sign of life from this run's process for {SILENT_SECONDS // 60} minutes: it was killed, "
    "or its machine is gone. Nothing up to the last checkpoint is lost, and the run goes on from "
    "there: retry it (in the UI, or with `prefect flow-run retry ID`) if a worker had started it, "
    "else repeat its `flowtune run` command with --run-id. Should the process be alive after all, "
    "it stops by itself as soon as another one has taken the run over."
)


def prefect(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a Prefect command at the root of the repository."""
    command = [sys.executable, "-m", "prefect", "--no-prompt", *arguments]
    return subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)


def must(*arguments: str) -> None:
    """The same, and the end of it all if the command goes wrong."""
    done = prefect(*arguments)
    if done.returncode:
        raise SystemExit(f"prefect {' '.join(arguments)}:\n{done.stdout}{done.stderr}")


def dead_runs() -> Automation:
    """Marks a training run as crashed that was silent for so long and had not come to an end.

    Every event of a flow run counts as a sign of life: its heartbeats, and its changes of state.
    """
    from prefect.automations import Automation
    from prefect.client.schemas.objects import StateType
    from prefect.events.actions import ChangeFlowRunState
    from prefect.events.schemas.automations import EventTrigger, Posture

    return Automation(
        name=DEAD_RUNS,
        description="Needs the heartbeats that flowtune's runs send; other flows are left alone.",
        trigger=EventTrigger(
            posture=Posture.Proactive,
            after={"prefect.flow-run.heartbeat"},
            expect={"prefect.flow-run.*"},
            match={"prefect.resource.id": "prefect.flow-run.*"},
            match_related={
                "prefect.resource.role": "flow",
                "prefect.resource.name": ["train", "train-stages"],
            },
            for_each={"prefect.resource.id"},
            threshold=1,
            within=timedelta(seconds=SILENT_SECONDS),
        ),
        actions=[ChangeFlowRunState(state=StateType.CRASHED, message=WHAT_NEXT)],
    )


async def watch_for_dead_runs() -> None:
    """Create the automation, or bring the one that is there up to date."""
    from prefect.automations import Automation

    wanted = dead_runs()
    try:
        there = await Automation.aread(name=DEAD_RUNS)
    except ValueError:  # there is none of that name
        await wanted.acreate()
        return
    wanted.id, wanted.enabled = there.id, there.enabled
    await wanted.aupdate()


def tell(words: str) -> None:
    """Say something to the person, not to the shell."""
    print(words, file=sys.stderr)


def main() -> None:
    """Find or start a server, make the work pool if there is none, register the rest."""
    try:
        server = ensure_server(tell)
    except UserError as error:
        raise SystemExit(f"{error}") from None
    if prefect("work-pool", "inspect", POOL).returncode:
        must("work-pool", "create", POOL, "--type", "process")
    must("deploy", "--all", "--prefect-file", "deployments/prefect.yaml")
    asyncio.run(watch_for_dead_runs())
    tell(f"work pool and deployments are there: {server.ui_url}/deployments")
    if server.stop_command:
        tell(f"to stop the server: {server.stop_command}")
    print(server.api_url)


if __name__ == "__main__":
    main()
