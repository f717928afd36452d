"""The Prefect server a run talks to: the one that is configured, else a local one kept running.

A local server is started in the background, outlives the command that started it and is found again
by the next one. Nothing here imports prefect, so that a server can come up while prefect is being
imported; `begin_server` sets the process's environment and belongs before that import.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from backends.errors import Problem, UserError

RECORDER_SETTINGS = {
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "200",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_READ_BATCH_SIZE": "200",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
}
"""Without these SQLite records about 19 task runs a second, and new flow runs stall behind it."""

HEARTBEAT_SECONDS = 30
"""How often a flow run says that it lives; Prefect takes no less."""

EPHEMERAL_OFF = {"PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false"}
HOST = "127.0.0.1"
START_TIMEOUT_SECONDS = 180.0
CLOUD = "https://api.prefect.cloud"

Answer = Literal["prefect", "refused", "other", "silent"]


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """A server that answers (or is about to), and how to stop it; not ours to stop: empty."""

    api_url: str
    ui_url: str
    started: bool
    stop_command: str

    def flow_run_url(self, flow_run_id: object) -> str:
        """The page of a flow run in the server's UI."""
        return f"{self.ui_url}/runs/flow-run/{flow_run_id}"


class PendingServer:
    """A server that was found, or is starting: `wait` before the first request."""

    def __init__(
        self,
        info: ServerInfo,
        process: subprocess.Popen[bytes] | None = None,
        lock: IO[str] | None = None,
    ) -> None:
        self.info = info
        self._process = process
        self._lock = lock

    def wait(self, timeout_seconds: float = START_TIMEOUT_SECONDS) -> ServerInfo:
        """Block until the server answers; a server that cannot start is stopped and reported."""
        if self._process is None:
            return self.info
        try:
            await_health(self.info.api_url, self._process, server_log(), timeout_seconds)
            self._process = None
        finally:
            self.close()
        return self.info

    def close(self) -> None:
        """Stop a server of this command that did not come to answer; once it does, nothing."""
        if self._process is not None:
            stop_process(self._process)
            forget_local_server()
            self._process = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def ensure_server(notify: Callable[[str], None] | None = None) -> ServerInfo:
    """The server to use, up and answering; starts a local one in the background if need be.

    `notify` is told when there is something to wait for. Raises `UserError` when the configured
    server does not answer or a local one cannot start.
    """
    pending = begin_server()
    if pending.info.started and notify is not None:
        notify("starting a local Prefect server (the first start takes about half a minute)")
    return pending.wait()


def begin_server() -> PendingServer:
    """Find the server, or start a local one without waiting, and point this process at it."""
    configured = configured_api_url()
    pending = _reach_configured(*configured) if configured else _find_or_start_local()
    _point_process_at(pending.info)
    return pending


# --- the configured server


def configured_api_url() -> tuple[str, str] | None:
    """The API URL that Prefect's own settings hold, and where it was set; None if nowhere.

    In Prefect's order: environment, `.env`, `prefect.toml`, `pyproject.toml`, active profile.
    """
    if url := os.environ.get("PREFECT_API_URL"):
        return url.rstrip("/"), "PREFECT_API_URL"
    places: list[tuple[Any, str]] = [
        (_dotenv_value("PREFECT_API_URL"), "PREFECT_API_URL in .env"),
        (_toml_value("prefect.toml", "api", "url"), "api.url in prefect.toml"),
        (
            _toml_value("pyproject.toml", "tool", "prefect", "api", "url"),
            "tool.prefect.api.url in pyproject.toml",
        ),
        _profile_api_url(),
    ]
    return next(((str(url).rstrip("/"), where) for url, where in places if url), None)


def _reach_configured(api_url: str, where: str) -> PendingServer:
    answer: Answer = "silent"
    for pause_seconds in (0.0, 0.5, 1.5):
        time.sleep(pause_seconds)
        answer = probe(api_url, timeout_seconds=5.0)
        if answer != "silent":
            break
    if answer == "prefect":
        ours = remembered_api_url() == api_url
        return PendingServer(
            ServerInfo(api_url, find_ui_url(api_url), False, stop_command() if ours else "")
        )
    if answer == "refused":
        problem = Problem(
            where,
            f"the Prefect server at {api_url} refuses this user",
            "set PREFECT_API_KEY (Prefect Cloud) or PREFECT_API_AUTH_STRING (your own server)",
        )
    else:
        state = "does not answer" if answer == "silent" else "is not a Prefect API"
        problem = Problem(
            where,
            f"{api_url} {state}",
            "start that server (`prefect server start`), mend the URL (it ends in /api), or unset "
            "it and flowtune starts a local server by itself",
        )
    raise UserError(problem)


def _dotenv_value(name: str) -> str | None:
    path = Path(".env")
    if not path.is_file():
        return None
    from dotenv import dotenv_values

    return dotenv_values(path).get(name)


def _toml_value(path: str | Path, *keys: str) -> Any:
    try:
        value: Any = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (FileNotFoundError, tomllib.TOMLDecodeError):
        return None  # Prefect itself complains of a file it cannot read
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _profile_api_url() -> tuple[Any, str]:
    path = Path(os.environ.get("PREFECT_PROFILES_PATH") or prefect_home() / "profiles.toml")
    name = os.environ.get("PREFECT_PROFILE") or _toml_value(path, "active")
    if not name:
        return None, ""
    return _toml_value(path, "profiles", name, "PREFECT_API_URL"), f"Prefect profile {name!r}"


# --- the local server


def _find_or_start_local() -> PendingServer:
    if found := _reuse_local():
        return found
    lock = _hold_start_lock()
    try:
        # Another command may have brought a server up while this one waited for the lock.
        if found := _reuse_local():
            lock.close()
            return found
        port = int(os.environ.get("PREFECT_SERVER_API_PORT") or 4200)
        if _port_taken(port):
            port = free_port()
        api_url = f"http://{HOST}:{port}/api"
        process = start_server_process(prefect_home(), port, server_log())
        remember_local_server(api_url, process.pid)
    except BaseException:
        lock.close()
        raise
    info = ServerInfo(api_url, f"http://{HOST}:{port}/v2", True, stop_command())
    return PendingServer(info, process, lock)


def _reuse_local() -> PendingServer | None:
    """The server of an earlier command, or one that the user runs on the usual port."""
    port = int(os.environ.get("PREFECT_SERVER_API_PORT") or 4200)
    ours = remembered_api_url()
    for api_url in dict.fromkeys(filter(None, (ours, f"http://{HOST}:{port}/api"))):
        if probe(api_url, timeout_seconds=3.0) == "prefect":
            stop = stop_command() if api_url == ours else ""
            return PendingServer(ServerInfo(api_url, find_ui_url(api_url), False, stop))
    return None


def start_server_process(home: Path, port: int, log: Path) -> subprocess.Popen[bytes]:
    """Start `prefect server start` on loopback, detached from this terminal, output in `log`."""
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    command = [sys.executable, "-m", "prefect", "server", "start"]
    command += ["--host", HOST, "--port", str(port)]
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            env=server_environment(home, port),
            cwd=home,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def server_environment(home: Path, port: int) -> dict[str, str]:
    """The environment of a server: the measured settings, yet what the user set himself wins."""
    ours = {**RECORDER_SETTINGS, "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
    client_only = ("PREFECT_API_URL", "PREFECT_UI_URL")
    inherited = {name: value for name, value in os.environ.items() if name not in client_only}
    # The UI in the browser calls the API at the port of the settings, not of the command line.
    place = {"PREFECT_SERVER_API_HOST": HOST, "PREFECT_SERVER_API_PORT": str(port)}
    return ours | inherited | place | {"PREFECT_HOME": str(home)}


def await_health(
    api_url: str, process: subprocess.Popen[bytes], log: Path, timeout_seconds: float
) -> None:
    """Wait until the server answers; `UserError` with the end of its log if it never does."""
    deadline = time.monotonic() + timeout_seconds
    while probe(api_url, timeout_seconds=2.0) != "prefect":
        gone = process.poll() is not None
        if gone or time.monotonic() > deadline:
            tail = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-5:]
            end = "ended at once" if gone else f"does not answer after {timeout_seconds:.0f} s"
            raise UserError(
                Problem(
                    "Prefect server",
                    f"the local server {end}; its last words: {' | '.join(tail) or 'none'}",
                    f"the whole log is {log}; or set PREFECT_API_URL to a server that runs",
                )
            )
        time.sleep(0.1)


def stop_process(process: subprocess.Popen[bytes], grace_seconds: float = 10.0) -> None:
    """End a server process of our own, by force if it does not go."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(grace_seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


# --- what is remembered under PREFECT_HOME


def prefect_home() -> Path:
    """Prefect's folder of settings and, for a local server, of its database."""
    return Path(os.environ.get("PREFECT_HOME") or Path.home() / ".prefect").expanduser()


def server_log() -> Path:
    """The log of the local server that flowtune started last."""
    return prefect_home() / "flowtune-server.log"


def _state_file() -> Path:
    return prefect_home() / "flowtune-server.json"


def _pid_file() -> Path:
    return prefect_home() / "server.pid"  # where `prefect server stop` looks


def remember_local_server(api_url: str, pid: int) -> None:
    """Note the server for the next command, and its pid where `prefect server stop` finds it."""
    _state_file().write_text(json.dumps({"api_url": api_url, "pid": pid}), encoding="utf-8")
    _pid_file().write_text(str(pid), encoding="utf-8")


def forget_local_server() -> None:
    """Drop the notes of a server that is gone."""
    _state_file().unlink(missing_ok=True)
    _pid_file().unlink(missing_ok=True)


def remembered_api_url() -> str | None:
    """The API URL of the local server that flowtune started last, if that process still lives."""
    try:
        state = json.loads(_state_file().read_text(encoding="utf-8"))
        os.kill(state["pid"], 0)
    except (FileNotFoundError, json.JSONDecodeError, ProcessLookupError, PermissionError):
        return None
    return str(state["api_url"])


def stop_command() -> str:
    """The command that stops the local server, as this user can type it."""
    return f"{as_typed('prefect')} server stop"


def as_typed(program: str) -> str:
    """How this user calls a program of this environment: by name if that finds it, else by path."""
    beside = Path(sys.executable).parent / program
    found = shutil.which(program)
    if found and Path(found).resolve() == beside.resolve():
        return program
    with contextlib.suppress(ValueError):
        return str(beside.relative_to(Path.cwd()))
    return str(beside)


# --- wire and process


def probe(api_url: str, timeout_seconds: float) -> Answer:
    """Ask the health endpoint who is there."""
    request = urllib.request.Request(f"{api_url}/health")
    if key := os.environ.get("PREFECT_API_KEY"):
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with _opener(api_url).open(request, timeout=timeout_seconds) as response:
            return "prefect" if response.read(16).strip() == b"true" else "other"
    except urllib.error.HTTPError as error:
        if api_url.startswith(CLOUD) and error.code < 500:
            return "prefect"  # Prefect's client knows better what Cloud means by it
        if error.code in (401, 403):
            return "refused"
        return "silent" if error.code >= 500 else "other"
    except urllib.error.URLError as error:
        # A certificate of the user's own is for Prefect's client to judge: it has settings for it.
        return "prefect" if isinstance(error.reason, ssl.SSLError) else "silent"
    except (OSError, ValueError):
        return "silent"


def find_ui_url(api_url: str) -> str:
    """The base of the UI's links: version 2 of the UI where the server has it."""
    if url := os.environ.get("PREFECT_UI_URL"):
        return url.rstrip("/")
    if api_url.startswith(CLOUD):
        ui_url = api_url.replace("https://api.", "https://app.", 1).replace("/api/", "/", 1)
        return ui_url.replace("/accounts/", "/account/").replace("/workspaces/", "/workspace/")
    root = api_url.removesuffix("/api")
    try:
        with _opener(root).open(f"{root}/ui-settings", timeout=3.0) as response:
            base = json.load(response).get("v2_base_url")
    except (OSError, ValueError):
        base = None
    return root + base if base else root


def _opener(url: str) -> urllib.request.OpenerDirector:
    on_loopback = url.startswith((f"http://{HOST}", "http://localhost"))
    proxies = [urllib.request.ProxyHandler({})] if on_loopback else []
    return urllib.request.build_opener(*proxies)


def free_port() -> int:
    """A port of loopback that nothing listens on."""
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return int(listener.getsockname()[1])


def _port_taken(port: int) -> bool:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((HOST, port))
        except OSError:
            return True
    return False


def _hold_start_lock() -> IO[str]:
    """One command at a time starts a server; the lock goes with the process that holds it."""
    prefect_home().mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = (prefect_home() / "flowtune-server.lock").open("w", encoding="utf-8")
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def _point_process_at(info: ServerInfo) -> None:
    os.environ.update({"PREFECT_API_URL": info.api_url, **EPHEMERAL_OFF})
    os.environ.setdefault("PREFECT_UI_URL", info.ui_url)
    os.environ.setdefault("PREFECT_FLOWS_HEARTBEAT_FREQUENCY", str(HEARTBEAT_SECONDS))
    if "prefect" in sys.modules:
        from prefect.context import refresh_global_settings_context

        refresh_global_settings_context()
