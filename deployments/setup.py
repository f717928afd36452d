"""Makes Prefect ready for flowtune: a server, the work pool, the deployments. Safe to run again.

    export PREFECT_API_URL=$(python deployments/setup.py)

Finds the Prefect server that is configured, else starts a local one. Its API's address goes to
stdout, everything else to stderr.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from backends.errors import UserError
from flows.prefect_server import ensure_server

ROOT = Path(__file__).resolve().parent.parent
POOL = "flowtune"


def prefect(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a Prefect command at the root of the repository."""
    command = [sys.executable, "-m", "prefect", "--no-prompt", *arguments]
    return subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)


def must(*arguments: str) -> None:
    """The same, and the end of it all if the command goes wrong."""
    done = prefect(*arguments)
    if done.returncode:
        raise SystemExit(f"prefect {' '.join(arguments)}:\n{done.stdout}{done.stderr}")


def tell(words: str) -> None:
    """Say something to the person, not to the shell."""
    print(words, file=sys.stderr)


def main() -> None:
    """Find or start a server, make the work pool if there is none, register the deployments."""
    try:
        server = ensure_server(tell)
    except UserError as error:
        raise SystemExit(f"{error}") from None
    if prefect("work-pool", "inspect", POOL).returncode:
        must("work-pool", "create", POOL, "--type", "process")
    must("deploy", "--all", "--prefect-file", "deployments/prefect.yaml")
    tell(f"work pool and deployments are there: {server.ui_url}/deployments")
    if server.stop_command:
        tell(f"to stop the server: {server.stop_command}")
    print(server.api_url)


if __name__ == "__main__":
    main()
