"""The process: what it refuses before loading, how it becomes ready, and how it ends."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from backend_contract import write_base_model
from engine_process import KEY, ROOT, command, engine, environment

from backends.engine.server import EngineOptions, serve
from backends.errors import UserError


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base_model(tmp_path_factory.mktemp("base"))


def test_it_is_healthy_once_loaded_and_ends_on_a_signal(base: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}/api/v1/healthz"
    with engine(base, tmp_path / "s", "--port", str(port), log=tmp_path / "log") as running:
        seen = set()
        while 200 not in seen:
            assert running.process.poll() is None, running.log.read_text()
            with contextlib.suppress(httpx.ConnectError):
                seen.add(httpx.get(url, timeout=60).status_code)
            time.sleep(0.02)
        assert seen == {503, 200}
        running.wait_ready()
        assert running.url == f"http://127.0.0.1:{port}"
        running.process.send_signal(signal.SIGTERM)
        started = time.monotonic()
        assert running.process.wait(20) == 0
        assert time.monotonic() - started < 5


def test_it_does_not_outlive_its_parent(base: Path, tmp_path: Path) -> None:
    """The parent is killed while the engine still loads."""
    script = (
        "import subprocess, sys, time\n"
        "engine = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE)\n"
        "print('started', flush=True)\n"
        "time.sleep(60)\n"
    )
    arguments = command(base, tmp_path / "s", "--exit-with-parent")
    with subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"started\n"
        time.sleep(1)
        parent.kill()
        # stdout ends when the engine, which holds it too, is gone.
        started = time.monotonic()
        parent.stdout.read()
        assert time.monotonic() - started < 60


def options(base: Path, store: Path, **more: object) -> EngineOptions:
    given: dict[str, object] = {"base_model": str(base), "store": str(store), "api_key": KEY}
    return EngineOptions(**(given | more))  # type: ignore[arg-type]


def test_a_port_that_is_taken(base: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} on 127.0.0.1 is taken") as caught:
            serve(options(base, tmp_path / "s", port=port))
    assert "take another port" in str(caught.value)
    assert not (tmp_path / "s").exists()


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    for name in (str(tmp_path / "none"), "./none", "examples/models/none"):
        with pytest.raises(UserError, match=f"base_model: there is no folder {name}"):
            serve(options(Path(name), tmp_path / "s", base_model=name))
    with pytest.raises(UserError, match=r"holds no config\.json"):
        serve(options(tmp_path, tmp_path / "s"))


def test_a_store_that_cannot_be_written(base: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is not a folder"):
        serve(options(base, tmp_path / "file" / "store"))


def test_a_key_that_will_not_do(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FLOWTUNE_ENGINE_API_KEY", raising=False)
    with pytest.raises(UserError, match="api_key: is missing"):
        serve(options(base, tmp_path, api_key=None))
    with pytest.raises(UserError, match="does not start with tml-"):
        serve(options(base, tmp_path, api_key="secret"))


def test_a_session_timeout_that_will_not_do(base: Path, tmp_path: Path) -> None:
    for seconds in (0, -1, float("inf"), float("nan")):
        with pytest.raises(UserError, match="session_timeout: is"):
            serve(options(base, tmp_path / "s", session_seconds=seconds))


def test_what_does_not_load(base: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(UserError, match=f"base_model: {broken} cannot be loaded"):
        serve(options(broken, tmp_path / "s"))
    with pytest.raises(UserError, match="threads: Input should be greater"):
        serve(options(base, tmp_path / "s", compute={"threads": 0}))


def test_failure_is_told_on_both_outputs(base: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with engine(base, tmp_path / "s", "--port", port, log=tmp_path / "log") as running:
            line = running.line()
            assert running.process.wait(20) == 2
    assert (line["event"], [problem["where"] for problem in line["problems"]]) == (
        "failed",
        ["port"],
    )
    assert (tmp_path / "log").read_text().startswith(f"port: port {port} on 127.0.0.1 is taken")


def test_the_command_line_stays_light() -> None:
    check = (
        "import sys, backends.engine.server as s\n"
        "heavy = {'torch', 'transformers', 'fastapi', 'uvicorn', 'tinker'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", check], cwd=ROOT, check=True, timeout=60)
