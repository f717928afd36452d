"""Finding, starting and reusing a Prefect server; in other processes, as it sets variables."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from flows import prefect_server
from tests.servers.prefect import PrefectServer

TELL = """
import json, sys
from flows.prefect_server import ensure_server
info = ensure_server()
print(json.dumps([info.api_url, info.ui_url, info.started, info.stop_command, list(sys.modules)]))
"""


class Stranger(BaseHTTPRequestHandler):
    """Something that is not Prefect."""

    def do_GET(self) -> None:
        self.send_error(404)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def stranger() -> Iterator[int]:
    server = HTTPServer(("127.0.0.1", 0), Stranger)
    Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()


def environment(home: Path, **more: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    return {**clean, "PREFECT_HOME": str(home), **more}


def start(env: dict[str, str], cwd: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", TELL]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=env, cwd=cwd, stdout=pipe, stderr=pipe, text=True)


def answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    names = ["api_url", "ui_url", "started", "stop_command", "modules"]
    return dict(zip(names, json.loads(out), strict=True))


def read(url: str, **headers: str) -> bytes:
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=20) as got:
        assert got.status == 200
        body: bytes = got.read()
    return body


# --- what is configured


def test_the_api_url_is_found_where_prefect_looks_and_in_its_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    for name in ("PREFECT_API_URL", "PREFECT_PROFILE", "PREFECT_PROFILES_PATH"):
        monkeypatch.delenv(name, raising=False)
    found = []

    def look() -> None:
        found.append(prefect_server.configured_api_url())

    look()
    profiles = 'active = "x"\n[profiles.x]\nPREFECT_API_URL = "http://profile/api"\n'
    (tmp_path / "profiles.toml").write_text(profiles)
    look()
    (tmp_path / "pyproject.toml").write_text('[tool.prefect.api]\nurl = "http://project/api"\n')
    look()
    (tmp_path / "prefect.toml").write_text('[api]\nurl = "http://toml/api"\n')
    look()
    (tmp_path / ".env").write_text("PREFECT_API_URL=http://dotenv/api\n")
    look()
    monkeypatch.setenv("PREFECT_API_URL", "http://env/api/")
    look()
    assert found == [
        None,
        ("http://profile/api", "Prefect profile 'x'"),
        ("http://project/api", "tool.prefect.api.url in pyproject.toml"),
        ("http://toml/api", "api.url in prefect.toml"),
        ("http://dotenv/api", "PREFECT_API_URL in .env"),
        ("http://env/api", "PREFECT_API_URL"),
    ]


def test_the_order_is_prefects_own(tmp_path: Path) -> None:
    """Prefect itself, asked in the same folder, names the same URL."""
    (tmp_path / "prefect.toml").write_text('[api]\nurl = "http://127.0.0.1:9/toml"\n')
    profiles = 'active = "x"\n[profiles.x]\nPREFECT_API_URL = "http://127.0.0.1:9/profile"\n'
    (tmp_path / "profiles.toml").write_text(profiles)
    ask = (
        "from flows.prefect_server import configured_api_url as ours\n"
        "from prefect.settings import get_current_settings as theirs\n"
        "assert ours()[0] == theirs().api.url == 'http://127.0.0.1:9/toml', theirs().api.url"
    )
    subprocess.run([sys.executable, "-c", ask], env=environment(tmp_path), cwd=tmp_path, check=True)


def test_a_configured_server_is_used_as_it_is(
    prefect_server: PrefectServer, tmp_path: Path
) -> None:
    env = environment(tmp_path / "home", PREFECT_API_URL=prefect_server.api_url)
    told = answer(start(env, tmp_path))
    assert told["api_url"] == prefect_server.api_url
    assert told["ui_url"] == prefect_server.api_url.removesuffix("/api") + "/v2"
    assert (told["started"], told["stop_command"]) == (False, "")
    assert "prefect" not in told["modules"]
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("is_there", [False, True])
def test_a_configured_server_that_is_none_is_a_clear_mistake(
    tmp_path: Path, stranger: int, is_there: bool
) -> None:
    port = stranger if is_there else prefect_server.free_port()
    url = f"http://127.0.0.1:{port}/api"
    process = start(environment(tmp_path / "home", PREFECT_API_URL=url), tmp_path)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    what = "is not a Prefect API" if is_there else "does not answer"
    assert f"UserError: PREFECT_API_URL: {url} {what}" in err
    assert "unset it and flowtune starts a local server" in err
    assert not (tmp_path / "home").exists()


# --- the local one


def test_a_local_server_is_started_once_shared_and_stopped(tmp_path: Path, stranger: int) -> None:
    """Two commands at once, on a machine where something else holds the usual port."""
    home = tmp_path / "home"
    env = environment(home, PREFECT_SERVER_API_PORT=str(stranger))
    first, second = [answer(p) for p in [start(env, tmp_path), start(env, tmp_path)]]
    try:
        assert sorted([first["started"], second["started"]]) == [False, True]
        assert first["api_url"] == second["api_url"] != f"http://127.0.0.1:{stranger}/api"
        assert "prefect" not in first["modules"]
        began = time.monotonic()
        again = answer(start(env, tmp_path))
        assert time.monotonic() - began < 10
        assert (again["api_url"], again["started"]) == (first["api_url"], False)

        # The settings that were measured, a UI that calls this server, and pages behind the links.
        settings = json.loads(read(f"{first['api_url']}/admin/settings"))
        recorder = settings["server"]["services"]["task_run_recorder"]
        assert (recorder["batch_size"], recorder["read_batch_size"]) == (200, 200)
        assert recorder["flush_interval"] == 1
        root = first["api_url"].removesuffix("/api")
        assert json.loads(read(f"{root}/ui-settings"))["api_url"] == first["api_url"]
        page = f"{first['ui_url']}/runs/flow-run/00000000-0000-0000-0000-000000000000"
        assert b"<html" in read(page, Accept="text/html")
    finally:
        stopped = subprocess.run(
            first["stop_command"], shell=True, cwd=tmp_path, env=env, capture_output=True, text=True
        )
    assert "Server stopped" in stopped.stdout
    deadline = time.monotonic() + 20
    while prefect_server.probe(first["api_url"], 1.0) == "prefect" and time.monotonic() < deadline:
        time.sleep(0.2)
    assert prefect_server.probe(first["api_url"], 1.0) == "silent"


def test_an_interrupted_start_leaves_no_server_behind(tmp_path: Path) -> None:
    home = tmp_path / "home"
    env = environment(home, PREFECT_SERVER_API_PORT=str(prefect_server.free_port()))
    process = start(env, tmp_path)
    state = home / "flowtune-server.json"
    while not state.exists():
        assert process.poll() is None
        time.sleep(0.02)
    pid = json.loads(state.read_text())["pid"]
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert "KeyboardInterrupt" in err
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert not state.exists()
    assert not (home / "server.pid").exists()


def test_a_server_that_cannot_start_is_reported_with_its_last_words(tmp_path: Path) -> None:
    env = environment(
        tmp_path / "home",
        PREFECT_SERVER_API_PORT=str(prefect_server.free_port()),
        PREFECT_API_DATABASE_CONNECTION_URL="nonsense://",
    )
    process = start(env, tmp_path)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "UserError: Prefect server: the local server ended at once; its last words:" in err
    assert "flowtune-server.log" in err


def test_a_port_is_free_when_asked_for() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", prefect_server.free_port()))
