"""A real Prefect server for a test session: its own port, home and database, stopped at the end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from flows.prefect_server import (
    EPHEMERAL_OFF,
    RECORDER_SETTINGS,
    await_health,
    free_port,
    start_server_process,
    stop_process,
)


@dataclass(frozen=True)
class PrefectServer:
    api_url: str
    home: Path
    log: Path

    @property
    def settings(self) -> dict[str, str]:
        """What a process needs in its environment to talk to this server."""
        return {
            "PREFECT_API_URL": self.api_url,
            "PREFECT_UI_URL": self.api_url.removesuffix("/api") + "/v2",
            "PREFECT_HOME": str(self.home),
            "PREFECT_PROFILES_PATH": str(self.home / "profiles.toml"),
            **RECORDER_SETTINGS,
            **EPHEMERAL_OFF,
        }

    @property
    def environment(self) -> dict[str, str]:
        """The whole environment for a subprocess: this process's, pointed at this server."""
        return {**os.environ, **self.settings}


@contextmanager
def running_prefect_server(home: Path) -> Iterator[PrefectServer]:
    """Start a server with everything it keeps under `home`, and stop it on the way out."""
    port = free_port()
    log = home / "server.log"
    server = PrefectServer(f"http://127.0.0.1:{port}/api", home, log)
    process = start_server_process(home, port, log)
    try:
        await_health(server.api_url, process, log, timeout_seconds=180)
        yield server
    finally:
        stop_process(process)


@pytest.fixture(scope="session")
def prefect_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectServer]:
    """The session's server; this process and the ones it starts are pointed at it."""
    with (
        running_prefect_server(tmp_path_factory.mktemp("prefect")) as server,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, value in server.settings.items():
            patch.setenv(name, value)
        # Flows of this process read settings that Prefect took from the environment at its import.
        from prefect.context import refresh_global_settings_context

        refresh_global_settings_context()
        yield server

        # Log lines that are still queued would complain of a server that is gone.
        from prefect.logging.handlers import APILogHandler

        APILogHandler().flush()
