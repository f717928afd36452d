"""One engine in a process of its own, for every test that does not need one of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from backend_contract import write_base_model
from engine_process import KEY, EngineProcess, engine


@pytest.fixture(scope="session")
def engine_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the shared engine's base model, store and log lie."""
    return tmp_path_factory.mktemp("shared_engine")


@pytest.fixture(scope="session")
def shared_engine(engine_home: Path) -> Iterator[EngineProcess]:
    """Running and ready. At its end it has to be healthy, and its log free of errors."""
    base = write_base_model(engine_home / "base")
    log = engine_home / "log"
    with engine(base, engine_home / "store", "--exit-with-parent", log=log) as running:
        running.wait_ready()
        yield running
        healthy = httpx.get(f"{running.url}/api/v1/healthz").json()
        assert running.close_stdin() == 0
    text = log.read_text()
    assert (healthy, "Traceback" in text, KEY in text) == ({"status": "ok"}, False, False)
