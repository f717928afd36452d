"""What Prefect costs: the train flow beside a bare loop on the same backend, in one run.

    python -m benchmarks.orchestration [--rows NAME …] [--repeats 3] [--toy] [--json FILE] [--check]

It uses the Prefect server that is configured, else starts a local one, as `flowtune run` does.
README.md says what each row does.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import httpx

from algorithms.base import RunContext
from algorithms.callbacks import Callback
from algorithms.data.dataset import load_dataset
from algorithms.experiment import Experiment
from backends.storage.run_store import RunStore
from benchmarks.measuring import load_warning, machine, memory_bytes
from flows.prefect_server import ServerInfo, ensure_server

AHEAD: Final = 2
"""Steps submitted and not yet awaited, in both loops; the next batch is built meanwhile."""
ROWS: Final = [{"prompt": f"What is {i} + {i}?", "completion": str(2 * i)} for i in range(64)]


@dataclass(frozen=True)
class Figure:
    """One figure of a row, and the most that it may be; ratios are flow / bare, seconds are s."""

    what: str
    values: tuple[float, ...]
    at_most: float

    @property
    def value(self) -> float:
        """The median of the repeats."""
        return statistics.median(self.values)

    @property
    def reached(self) -> bool:
        """Whether it is as good as it has to be."""
        return self.value <= self.at_most


@dataclass(frozen=True)
class Bench:
    """Where rows keep their runs, how often they repeat, and how much of each is done."""

    store: Path
    server: ServerInfo
    repeats: int
    toy: bool


# -- the two loops -----------------------------------------------------------------------------


def mock_experiment(
    store: Path, steps: int, step_seconds: float, mode: str, save_every: int | None = None
) -> Experiment:
    """SFT on the mock backend, whose forward-backward takes so many seconds."""
    params: dict[str, Any] = {"batch_size": 4, "max_steps": steps}
    if save_every is not None:
        params["save_every"] = save_every
    return Experiment.model_validate(
        {
            "name": "orchestration",
            "store": str(store),
            "model": {"name": "none"},
            "data": {"kind": "rows", "rows": ROWS},
            "algorithm": {"kind": "mock_sft", "params": params},
            "backend": {"kind": "mock", "params": {"step_seconds": step_seconds}},
            "orchestration": {"task_runs": mode},
        }
    )


class Clock(Callback):
    """When each step was done, and the memory this process then held (bytes)."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.memory: list[int] = []

    def on_step(self, row: Mapping[str, float]) -> None:
        """Note it."""
        self.times.append(time.perf_counter())
        if int(row["step"]) % 1_000 == 0:
            self.memory.append(memory_bytes(os.getpid()))

    def seconds_a_step(self) -> float:
        """From the end of the first step to the end of the last."""
        return (self.times[-1] - self.times[0]) / (len(self.times) - 1)


async def bare_loop(experiment: Experiment) -> float:
    """The same batches and requests with nothing around them; seconds a step."""
    dataset = load_dataset(experiment.data)
    row = experiment.backend.row()
    backend = await row.open(experiment.backend.params, experiment.model_spec(), None)
    algorithm: Any = experiment.algorithm.build()
    context = RunContext("bare", "", experiment, dataset, backend, backend.get_tokenizer())
    await algorithm.setup(context, backend)
    clock = Clock()
    under_way: deque[tuple[Awaitable[Any], Awaitable[Any]]] = deque()

    async def finish() -> None:
        passed, stepped = under_way.popleft()
        await passed
        await stepped
        clock.on_step({"step": len(clock.times) + 1})

    building = asyncio.create_task(algorithm.build_batch(0))
    for step in range(algorithm.total_steps):
        batch = await building
        passed = backend.forward_backward_async(batch.data, loss_fn=batch.loss_fn)
        under_way.append((passed, backend.optim_step_async(algorithm.adam_params(step))))
        if step + 1 < algorithm.total_steps:
            building = asyncio.create_task(algorithm.build_batch(step + 1))
        if len(under_way) == AHEAD:
            await finish()
    while under_way:
        await finish()
    await backend.aclose()
    return clock.seconds_a_step()


async def flow(experiment: Experiment, run_id: str) -> Clock:
    """The train flow in this process."""
    from flows.train import train
    from tasks.session import watch

    clock = Clock()
    with watch(clock):
        await train.with_options(flow_run_name=run_id)(experiment, run_id=run_id)
    return clock


# -- rows --------------------------------------------------------------------------------------


def beside_bare(
    step_seconds: float, mode: Literal["segment", "operation"], steps: int, at_most: float
) -> Callable[[Bench], list[Figure]]:
    """Both loops by turns, one warm-up turn, one run each a turn."""

    def measure(bench: Bench) -> list[Figure]:
        ratios = []
        for repeat in range(bench.repeats + 1):
            experiment = mock_experiment(bench.store, 4 if bench.toy else steps, step_seconds, mode)
            seconds = {}
            run_id = f"{mode}-{1000 * step_seconds:g}-{repeat}"
            for side in ("bare", "flow") if repeat % 2 else ("flow", "bare"):
                if side == "bare":
                    seconds[side] = asyncio.run(bare_loop(experiment))
                else:
                    seconds[side] = asyncio.run(flow(experiment, run_id)).seconds_a_step()
            if repeat:
                ratios.append(seconds["flow"] / seconds["bare"])
        return [Figure("flow / bare loop", tuple(ratios), at_most)]

    return measure


def long_run(bench: Bench) -> list[Figure]:
    """10,000 steps without compute: speed and memory at the end, and what was kept of them."""
    steps = 2_000 if bench.toy else 10_000
    experiment = mock_experiment(bench.store, steps, 0.0, "segment", save_every=500)
    clock = asyncio.run(flow(experiment, "long"))
    first, last = (clock.times[i + 999] - clock.times[i] for i in (0, steps - 1_000))
    kept = [row["step"] for row in RunStore.open_existing(bench.store, "long").metrics()]
    lost = len(set(range(1, steps + 1)) ^ set(kept)) + abs(len(kept) - steps)
    shown = _completed_task_runs(bench.server, "long")
    missing = [f"train_segment-{s}-{s + 500}" for s in range(0, steps, 500)]
    missing = [name for name in [*missing, "open_run-long", "report-long"] if name not in shown]
    return [
        Figure("last 1,000 steps / first 1,000", (last / first,), 1.1),
        Figure("memory at the end / at step 1,000", (clock.memory[-1] / clock.memory[0],), 1.1),
        Figure("rows of metrics lost or doubled", (lost,), 0),
        Figure("task runs that Prefect does not show", (len(missing),), 0),
    ]


def _completed_task_runs(server: ServerInfo, name: str) -> set[str]:
    """Names of the task runs that Prefect shows as completed, once its recorder has caught up."""
    query = {
        "flow_runs": {"name": {"any_": [name]}},
        "task_runs": {"state": {"type": {"any_": ["COMPLETED"]}}},
        "limit": 200,
    }
    shown: set[str] = set()
    for _ in range(20):
        answer = httpx.post(f"{server.api_url}/task_runs/filter", json=query, trust_env=False)
        answer.raise_for_status()
        now = {row["name"] for row in answer.json()}
        if now and now == shown:
            break
        shown = now
        time.sleep(2)  # its recorder writes once a second
    return shown


def continued(bench: Bench) -> list[Figure]:
    """`flowtune run --run-id` of a run with 5,000 steps behind it, until its first new step.

    Behind it are as many rows of metrics, five checkpoints and six evaluations.
    """
    done = 10 if bench.toy else 5_000
    file = bench.store / "continued.yaml"
    params = {"batch_size": 1, "lora_rank": 1, "max_steps": 20 * done, "save_every": done // 5}
    heldout = {
        "name": "heldout",
        "data": {"kind": "jsonl", "path": "examples/data/arithmetic/test.jsonl"},
        "every": done // 5,
        "max_tokens": 8,
        "limit": 16,
    }
    experiment = {
        "name": "continued",
        "store": str(bench.store),
        "model": {"name": "examples/models/tiny-qwen3"},
        "data": {"kind": "jsonl", "path": "examples/data/arithmetic/train.jsonl"},
        "algorithm": {"kind": "sft", "params": params},
        "evaluations": [heldout],
        "orchestration": {"task_runs": "segment"},
    }
    file.write_text(json.dumps(experiment))
    manifest = bench.store / f"continued/checkpoints/step-{done:06d}/manifest.json"
    _run_until(file, lambda _: manifest.exists())
    times = []
    for _ in range(bench.repeats):
        store = RunStore.open_existing(bench.store, "continued")
        from_step = store.checkpoint_steps()[-1]
        assert from_step >= done, "the run is not as far as it was"
        begun = re.compile(rf"step\s+{from_step + 1}/")
        times.append(_run_until(file, lambda words, begun=begun: bool(begun.search(words))))
    return [Figure("seconds to the first new step", tuple(times), 10.0)]


def _run_until(file: Path, happened: Callable[[str], bool]) -> float:
    """Run the command until then, and kill it; the seconds that it took."""
    command = [sys.executable, "-m", "flows.cli", "run", str(file), "--run-id=continued"]
    log = file.with_suffix(".log")
    started = time.perf_counter()
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        while not happened(log.read_text(errors="replace")):
            if process.poll() is not None:
                raise RuntimeError(f"the run ended too early:\n{log.read_text()}")
            time.sleep(0.02)
        return time.perf_counter() - started
    finally:
        process.kill()
        process.wait()


TABLE: Final[dict[str, tuple[str, Callable[[Bench], list[Figure]]]]] = {
    "segment-20ms": ("20 ms a step, segments", beside_bare(0.02, "segment", 500, 1.10)),
    "operation-250ms": ("250 ms a step, operations", beside_bare(0.25, "operation", 40, 1.05)),
    "operation-1s": ("1 s a step, operations", beside_bare(1.0, "operation", 20, 1.02)),
    "long": ("10,000 steps on the mock backend, segments", long_run),
    "continue": ("a run of 5,000 steps continued", continued),
}


# -- the command -------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.orchestration")
    parser.add_argument("--rows", nargs="+", choices=TABLE, default=list(TABLE), metavar="NAME")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--toy", action="store_true", help="hardly any steps: does all of it run?")
    parser.add_argument("--json", type=Path, default=None, help="write the figures there")
    parser.add_argument("--check", action="store_true", help="exit code 1 if a row misses its goal")
    given = parser.parse_args(arguments)
    if (warning := load_warning()) is not None:
        print(warning)
    server = ensure_server(print)
    figures: dict[str, list[Figure]] = {}
    with tempfile.TemporaryDirectory(prefix="flowtune-bench-") as store:
        bench = Bench(Path(store), server, given.repeats, given.toy)
        for name in given.rows:
            what, measure = TABLE[name]
            figures[name] = measure(bench)
            for figure in figures[name]:
                print(_line(what, figure), flush=True)
    if given.json is not None:
        document = {
            "machine": machine("cpu"),
            "rows": {
                name: [dataclasses.asdict(figure) for figure in row]
                for name, row in figures.items()
            },
        }
        given.json.write_text(json.dumps(document, indent=2) + "\n")
    missed = [figure for row in figures.values() for figure in row if not figure.reached]
    return 1 if given.check and missed else 0


def _line(what: str, figure: Figure) -> str:
    spread = ""
    if len(figure.values) > 1:
        spread = f" ({min(figure.values):.3f} to {max(figure.values):.3f})"
    verdict = "yes" if figure.reached else "NO"
    goal = f"at most {figure.at_most:g}"
    return f"{what:44}{figure.what:38}{figure.value:8.3f}{spread:20} {goal:14} {verdict}"


if __name__ == "__main__":
    sys.exit(main())
