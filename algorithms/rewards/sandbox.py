"""Runs Python programs that nobody has read: in a process with limits, cut off from the rest.

What cuts it off is in `jail.py`; this is the side of whoever asks. Limits are those of one run.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

JAIL = Path(__file__).with_name("jail.py")
GRACE_SECONDS = 30.0
"""How long the jail may take to be set up and to report, beyond the program's time."""
END_SECONDS = 10.0
"""How long a jail that was killed may take to be gone."""
JAIL_PROCESSES = 2
OPEN_FILES = 64
ENVIRONMENT = {
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PATH": "/usr/bin:/bin",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class Limits:
    """What a program may take; memory is that of each of its processes.

    `isolated` puts it where no files, processes and (without `network`) no other machine can be
    reached; else it runs as this user, and the limits on processes and on all files do not hold.
    """

    seconds: float = 10.0
    memory_bytes: int = 2**30
    processes: int = 8
    files_bytes: int = 2**26
    output_bytes: int = 2**20
    isolated: bool = True
    network: bool = False

    def rlimits(self) -> dict[str, int]:
        """The same as the system's own limits, by their names in `resource`.

        The one on processes counts all of the user's, except in a world of its own.
        """
        limits = {
            "RLIMIT_AS": self.memory_bytes,
            "RLIMIT_CPU": math.ceil(self.seconds),
            "RLIMIT_FSIZE": self.files_bytes,
            "RLIMIT_NOFILE": OPEN_FILES,
            "RLIMIT_CORE": 0,
        }
        return (
            limits | {"RLIMIT_NPROC": self.processes + JAIL_PROCESSES} if self.isolated else limits
        )


@dataclass(frozen=True)
class Outcome:
    """How a program ended: by itself with a code, or at a limit of time or output."""

    end: Literal["exit", "timeout", "output"]
    code: int
    stdout: str
    stderr: str

    @property
    def succeeded(self) -> bool:
        """Whether it came to its end, with code 0."""
        return self.end == "exit" and self.code == 0


class SandboxError(RuntimeError):
    """The sandbox itself failed; that says nothing of the program."""


async def run(program: str, stdin: str, limits: Limits) -> Outcome:
    """Run a Python program in an empty folder. Raises SandboxError."""
    with tempfile.TemporaryDirectory(prefix="flowtune-code-") as folder:
        reading, writing = os.pipe()
        try:
            try:
                process = await asyncio.create_subprocess_exec(
                    *_command(writing),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    cwd=folder,
                    env={},
                    pass_fds=(writing,),
                    start_new_session=True,
                )
            finally:
                os.close(writing)
            try:
                streams = await _talk(process, _job(program, stdin, limits), limits)
            finally:
                await _end(process)
            return _outcome(_status(reading), streams, limits)
        finally:
            os.close(reading)


@cache
def isolation_problem() -> str | None:
    """Why programs cannot be isolated on this machine; None if they can. Tried once, blocks."""
    if sys.platform != "linux":
        return f"{sys.platform} has no namespaces"
    reading, writing = os.pipe()
    with tempfile.TemporaryDirectory(prefix="flowtune-code-") as folder:
        try:
            tried = subprocess.run(
                _command(writing),
                input=_job("", "", Limits()),
                capture_output=True,
                cwd=folder,
                env={},
                pass_fds=(writing,),
                start_new_session=True,
                timeout=GRACE_SECONDS,
            )
        finally:
            os.close(writing)
        status = _status(reading)
        os.close(reading)
    if status[-1:] == ["exit 0"]:
        return None
    return _last_line(tried.stderr.decode(errors="replace"))


def _command(status: int) -> list[str]:
    return [sys.executable, "-I", "-S", str(JAIL), str(status)]


def _job(program: str, stdin: str, limits: Limits) -> bytes:
    job: dict[str, Any] = {
        "program": program,
        "stdin": stdin,
        "python": os.path.realpath(sys.executable),
        "argv0": sys.executable,  # how a virtual environment's Python finds its packages
        "readable": [sys.base_prefix, sys.prefix],
        "env": ENVIRONMENT,
        "namespaces": limits.isolated,
        "network": limits.network,
        "seconds": limits.seconds,
        "files_bytes": limits.files_bytes,
        "rlimits": limits.rlimits(),
    }
    return json.dumps(job).encode()


class _TooMuch(Exception):
    """A program wrote more than it may."""


async def _talk(
    process: asyncio.subprocess.Process, job: bytes, limits: Limits
) -> tuple[bytes, bytes] | None:
    """What the program wrote, (stdout, stderr); None if that is too much."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdin.write(job)
    try:
        async with asyncio.timeout(limits.seconds + GRACE_SECONDS), asyncio.TaskGroup() as group:
            group.create_task(_feed(process.stdin))
            out = group.create_task(_read(process.stdout, limits.output_bytes))
            err = group.create_task(_read(process.stderr, limits.output_bytes))
    except BaseExceptionGroup as errors:
        if errors.subgroup(_TooMuch) is not None:
            return None
        raise
    return out.result(), err.result()


async def _feed(stream: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        await stream.drain()
        stream.close()


async def _read(stream: asyncio.StreamReader, limit: int) -> bytes:
    read = bytearray()
    while chunk := await stream.read(2**16):
        read += chunk
        if len(read) > limit:
            raise _TooMuch
    return bytes(read)


async def _end(process: asyncio.subprocess.Process) -> None:
    """End the jail, and with it all that runs in there."""
    with contextlib.suppress(ProcessLookupError):
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.stdout is not None
    assert process.stderr is not None
    with contextlib.suppress(TimeoutError):  # what left its process group may hold a pipe open
        async with asyncio.timeout(END_SECONDS):  # `wait` needs the pipes read to their ends
            await asyncio.gather(process.wait(), _drain(process.stdout), _drain(process.stderr))


async def _drain(stream: asyncio.StreamReader) -> None:
    while await stream.read(2**16):
        pass


def _status(reading: int) -> list[str]:
    """What the jail has reported; all of it was written before it ended."""
    os.set_blocking(reading, False)
    try:
        return os.read(reading, 4096).decode().splitlines()
    except BlockingIOError:
        return []


def _outcome(status: list[str], streams: tuple[bytes, bytes] | None, limits: Limits) -> Outcome:
    texts = [stream.decode(errors="replace") for stream in streams or (b"", b"")]
    if status[:1] != ["ready"] or "failed" in status:
        raise SandboxError(f"a program could not be started: {_last_line(texts[1])}")
    if streams is None:
        return Outcome("output", -1, "", "")
    if status[-1] == "timeout":
        return Outcome("timeout", -1, *texts)
    if not status[-1].startswith("exit "):
        raise SandboxError("a program's jail ended before it")
    return Outcome("exit", int(status[-1].removeprefix("exit ")), *texts)


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no reason was given"])[-1]
