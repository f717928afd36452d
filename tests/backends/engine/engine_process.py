"""An engine in a process of its own, as `flowtune engine` and the embedded backend run it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[3]
KEY = "tml-key-of-the-tests"


@dataclass
class EngineProcess:
    """A running engine; `url` is set once it has said that it is ready."""

    process: subprocess.Popen[bytes]
    log: Path
    url: str = ""

    def wait_ready(self) -> None:
        """Read the one line on stdout. Fails with the log if that says anything else."""
        line = self.line()
        assert line.get("event") == "ready", self.log.read_text()
        self.url = line["url"]

    def line(self) -> dict[str, Any]:
        """The line on stdout."""
        stdout: IO[bytes] | None = self.process.stdout
        assert stdout is not None
        line = stdout.readline()
        assert line, self.log.read_text()
        document: dict[str, Any] = json.loads(line)
        return document

    def close_stdin(self) -> int:
        """Do what a dying parent does to the pipe; the exit code."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(20)


def command(base_model: Path, store: Path, *more: str) -> list[str]:
    """The engine's command line."""
    module = [sys.executable, "-m", "backends.engine.server", "--threads", "1", "--announce"]
    return [*module, "--base-model", str(base_model), "--store", str(store), *more]


def environment(key: str | None = KEY) -> dict[str, str]:
    """The environment that carries the key."""
    given = {"FLOWTUNE_ENGINE_API_KEY": key} if key is not None else {}
    return {**os.environ, "HF_HUB_OFFLINE": "1"} | given


@contextmanager
def engine(base_model: Path, store: Path, *more: str, log: Path) -> Iterator[EngineProcess]:
    """Start one; it is not waited for. It does not outlive the block."""
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command(base_model, store, *more),
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
    try:
        yield EngineProcess(process, log)
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
