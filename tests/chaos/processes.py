"""The processes that are killed: a run's flow, its engine, a served engine, a Prefect server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final
from urllib.request import urlopen

import httpx

from flows.prefect_server import await_health, free_port, start_server_process
from tests.servers.prefect import PrefectServer

ROOT: Final = Path(__file__).parents[2]
MODEL: Final = "examples/models/tiny-qwen3"
GONE_SECONDS: Final = 30.0
START_SECONDS: Final = 180.0
BUSY_TRIES: Final = 10


class Attempt:
    """One process that trains a run, from its start or from where another one was killed."""

    def __init__(
        self, arguments: list[str], run_id: str, environment: Mapping[str, str], log: Path
    ) -> None:
        self.log = log
        self.started = time.monotonic()
        self._opening = f"run {run_id}: "
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                arguments,
                cwd=ROOT,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def ended(self) -> bool:
        """Whether the process is gone, however it went."""
        return self.process.poll() is not None

    @property
    def opened(self) -> bool:
        """Whether the run is open: everything is loaded, and the steps begin."""
        return self._opening in self.words()

    def words(self) -> str:
        """What it has written so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def engine(self) -> int | None:
        """The process of the engine that it started, if there is one at the moment."""
        return next(filter(_is_engine, _descendants(self.process.pid)), None)

    def kill(self) -> None:
        """End the flow's process, and the runner's if it has one; its engine has to follow."""
        family = [self.process.pid, *_descendants(self.process.pid)]
        engines = [pid for pid in family if _is_engine(pid)]
        for pid in family:
            if pid not in engines:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.process.wait()
        for pid in family:
            await_gone(pid)


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                for child in map(int, (thread / "children").read_text().split()):
                    found += [child, *_descendants(child)]
    return found


def _is_engine(pid: int) -> bool:
    with suppress(OSError):
        return b"backends.engine.server" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def await_gone(pid: int) -> None:
    """Wait until a process has ended. Raises Stuck if it does not."""
    wait_until(lambda: not _lives(pid), GONE_SECONDS, f"process {pid} outlived its run")


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


class Stuck(Exception):
    """Something that had to happen did not."""


def wait_until(happened: Callable[[], bool], seconds: float, otherwise: str) -> None:
    """Look until it has happened. Raises Stuck after so many seconds."""
    deadline = time.monotonic() + seconds
    while not happened():
        if time.monotonic() > deadline:
            raise Stuck(otherwise)
        time.sleep(0.02)


class KillableServer:
    """A Prefect server that is killed, and started again at the same address."""

    def __init__(self, home: Path) -> None:
        port = free_port()
        self._port = port
        self.server = PrefectServer(f"http://127.0.0.1:{port}/api", home, home / "server.log")
        self._process = start_server_process(home, port, self.server.log)

    def await_ready(self) -> None:
        """Wait until it answers."""
        await_health(self.server.api_url, self._process, self.server.log, START_SECONDS)

    def kill(self) -> None:
        """End it at once."""
        _kill_group(self._process)

    def restart(self) -> None:
        """Start it again on the database it had, and wait until it answers."""
        if self._process.poll() is not None:
            self._process = start_server_process(self.server.home, self._port, self.server.log)
        self.await_ready()


class ServedEngine:
    """An engine that outlives its clients, like a hosted service, at an address of its own."""

    key: Final = "tml-a-key-of-the-chaos-suite"

    def __init__(self, folder: Path) -> None:
        self.store = folder / "engine"
        self._port = free_port()
        self._log = folder / "engine.log"
        self.url = f"http://127.0.0.1:{self._port}"
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        options = {"base-model": MODEL, "store": self.store, "port": self._port, "threads": 1}
        with self._log.open("ab") as output:
            return subprocess.Popen(
                [
                    *(sys.executable, "-m", "flows.cli", "engine"),
                    *(f"--{name}={value}" for name, value in options.items()),
                ],
                cwd=ROOT,
                env={**os.environ, "FLOWTUNE_ENGINE_API_KEY": self.key},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def await_ready(self) -> None:
        """Wait until it serves its model."""

        def answers() -> bool:
            assert self._process.poll() is None, self._log.read_text()
            with suppress(OSError), urlopen(f"{self.url}/api/v1/healthz", timeout=2) as answer:
                return bool(answer.status == 200)
            return False

        wait_until(answers, START_SECONDS, f"no engine at {self.url}")

    def kill(self) -> None:
        """End it at once."""
        _kill_group(self._process)

    def restart(self) -> None:
        """Start it again on the checkpoints it had, and wait until it is ready."""
        if self._process.poll() is not None:
            self._process = self._start()
        self.await_ready()


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class PrefectRuns:
    """Flow runs of a deployment of the train flow, by Prefect's API."""

    def __init__(self, api_url: str) -> None:
        self._client = httpx.Client(base_url=api_url, trust_env=False, timeout=60)

    def deploy(self) -> str:
        """A deployment that runs from this checkout; returns its id."""
        flow = self._post("/flows/", {"name": "train"})
        deployment = {"name": "chaos", "flow_id": flow["id"], "path": str(ROOT)}
        entrypoint = {"entrypoint": "tests/chaos/flow.py:train"}
        return str(self._post("/deployments/", deployment | entrypoint)["id"])

    def create(self, deployment_id: str, parameters: Mapping[str, Any]) -> str:
        """A flow run of the deployment that waits to be executed; returns its id."""
        address = f"/deployments/{deployment_id}/create_flow_run"
        return str(self._post(address, {"parameters": parameters})["id"])

    def bury(self, flow_run_id: str) -> None:
        """What the automation of deployments/setup.py does to a run whose process is gone."""
        state = self._client.get(f"/flow_runs/{flow_run_id}").json()["state"]
        if state["type"] not in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED"):
            crashed = {"type": "CRASHED", "message": "its process is gone"}
            self._post(f"/flow_runs/{flow_run_id}/set_state", {"state": crashed, "force": True})

    def _post(self, address: str, body: Mapping[str, Any]) -> dict[str, Any]:
        for _ in range(BUSY_TRIES):
            answer = self._client.post(address, json=body)
            if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE:
                break
            time.sleep(1)  # the server's SQLite has others to serve
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found
