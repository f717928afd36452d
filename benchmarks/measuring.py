"""What a row measures and how it is judged; the machine it ran on."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import torch

BUSY: Final = 0.5
"""A load average above this share of the cores disturbs what is measured."""


@dataclass(frozen=True)
class Goal:
    """What a row is judged by: a ratio is to be reached, seconds and GB are not to be passed."""

    unit: Literal["x", "s", "GB"]
    at_least: float
    aim: float

    def reached(self, value: float, goal: float) -> bool:
        """Whether a figure in this row's unit is as good as `goal`."""
        return value >= goal if self.unit == "x" else value <= goal


@dataclass(frozen=True)
class Measured:
    """One row's figures, one of each kind a repeat; ratios compare speeds in tokens/s."""

    engine: tuple[float, ...]
    raw: tuple[float, ...] = ()
    note: str = ""

    @property
    def figures(self) -> list[float]:
        """What the row is judged by: engine / raw of each repeat, else the engine's own figures."""
        if not self.raw:
            return list(self.engine)
        return [engine / raw for engine, raw in zip(self.engine, self.raw, strict=True)]

    @property
    def figure(self) -> float:
        """Their median."""
        return statistics.median(self.figures)


@dataclass(frozen=True)
class Side:
    """One of the two that are compared: does the work of one repeat, returns its tokens."""

    run: Callable[[], Awaitable[int]]

    async def tokens_per_second(self) -> float:
        """Do it once."""
        started = time.perf_counter()
        tokens = await self.run()
        return tokens / (time.perf_counter() - started)


async def interleaved(raw: Side, engine: Side, repeats: int, note: str = "") -> Measured:
    """Both sides by turns, so that a busy machine slows both; the first turn warms up."""
    speeds: dict[Side, list[float]] = {raw: [], engine: []}
    for repeat in range(repeats + 1):
        for side in (raw, engine) if repeat % 2 else (engine, raw):
            speed = await side.tokens_per_second()
            if repeat:
                speeds[side].append(speed)
    return Measured(tuple(speeds[engine]), tuple(speeds[raw]), note)


# -- the machine -------------------------------------------------------------------------------


def machine(device: str) -> dict[str, str | int]:
    """What the figures were taken on."""
    about: dict[str, str | int] = {
        "cpu": _cpu_name(),
        "cores": os.cpu_count() or 1,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if device == "cuda":
        about["gpu"] = torch.cuda.get_device_name()
    return about


def load_warning() -> str | None:
    """What to say when others use the machine."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load <= BUSY * cores:
        return None
    return (
        f"WARNING: the load average is {load:.1f} on {cores} cores: others are at work here, and "
        "these figures are not to be quoted"
    )


def peak_memory_bytes(pid: int) -> int:
    """The most memory that a process held at once since `forget_peak_memory`. Linux only."""
    return _status_bytes(pid, "VmHWM")


def memory_bytes(pid: int) -> int:
    """The memory that a process holds. Linux only."""
    return _status_bytes(pid, "VmRSS")


def forget_peak_memory(pid: int) -> None:
    """Let the peak start anew from what is held now. Linux only."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def thread_seconds(pid: int) -> tuple[dict[int, float], dict[int, float]]:
    """What each thread of a process has computed, and waited for a core, in seconds. Linux only."""
    computed, waited = {}, {}
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            ran, queued, _ = (thread / "schedstat").read_text().split()
            computed[int(thread.name)], waited[int(thread.name)] = int(ran) / 1e9, int(queued) / 1e9
    return computed, waited


def matmul_flops(size: int = 8192, repeats: int = 20) -> float:
    """The card's bfloat16 rate in large matrix products, FLOP/s: the best that it can be had at."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        a @ b
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        a @ b
    end.record()
    torch.cuda.synchronize()
    seconds: float = start.elapsed_time(end) / 1000
    return 2 * size**3 * repeats / seconds


def _status_bytes(pid: int, field: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def _cpu_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
