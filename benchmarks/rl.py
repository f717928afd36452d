"""Reinforcement learning through the train flow, beside a loop of `generate` + PEFT, in one run.

    python -m benchmarks.rl [--rows NAME …] [--repeats 3] [--threads 1] [--toy] [--json FILE]
        [--check]

It uses the Prefect server that is configured, else starts a local one, as `flowtune run` does.
README.md says what each row does.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from transformers import AutoTokenizer

from algorithms.callbacks import Callback, RunPlan
from algorithms.data.rendering import chat_prompt
from algorithms.experiment import Experiment
from backends.embedded import EmbeddedBackend
from benchmarks import models
from benchmarks.measuring import load_warning, machine, thread_seconds
from benchmarks.raw import LEARNING_RATE, RANK, RawModel, Tokens
from flows.prefect_server import ensure_server

QUESTIONS: Final = [[{"role": "user", "content": f"What is {i} + {i}?"}] for i in range(10, 74)]
"""All of one length in tokens."""
UNMEASURED: Final = 2
"""Steps at the beginning of a run: the engine warms up, the pipeline fills."""
NOTHING_BESIDE: Final = 1
"""Steps at the end of a run that no rollouts overlap with."""
LIKE: Final = 0.1
"""By so much the mean lengths of both sides' samples may differ: they are random."""


@dataclass(frozen=True)
class Row:
    """What is trained how, and the least that its figures may be."""

    name: str
    end: float
    """The probability that an answer ends with its next token."""
    max_staleness: int
    share_at_least: float
    ratio_at_least: float | None


ROWS: Final = (
    Row("on-policy", 1 / 48, 0, 0.85, 1.3),
    Row("staleness-1", 1 / 48, 1, 0.95, 1.3),
    Row("endless", 0.0, 0, 0.85, None),
)


@dataclass(frozen=True)
class Sizes:
    """The work of a step, and the measured steps of a turn; `tokens` at most in an answer."""

    prompts: int = 32
    samples: int = 8
    tokens: int = 96
    steps: int = 4


TOY: Final = Sizes(prompts=4, samples=4, tokens=4, steps=1)


@dataclass(frozen=True)
class Figure:
    """One figure of a row, and the least that it may be, if anything is asked of it."""

    what: str
    values: tuple[float, ...]
    at_least: float | None = None

    @property
    def value(self) -> float:
        """The median of the repeats."""
        return statistics.median(self.values)

    @property
    def reached(self) -> bool:
        """Whether it is as good as it has to be."""
        return self.at_least is None or self.value >= self.at_least


@dataclass(frozen=True)
class Bench:
    """A model and its raw side, the store of the runs, and how much is done."""

    model: str
    raw: RawModel
    tokenizer: Any
    prompts: Sequence[Tokens]
    store: Path
    sizes: Sizes
    repeats: int
    threads: int


@dataclass(frozen=True)
class Speed:
    """What a side did: samples a second, and the mean length of a sample in tokens."""

    samples_per_second: float
    tokens: float


def odd_length(row: Mapping[str, Any], completion: str) -> float:
    """The reward: 1 for an odd number of characters. Half of a group or so has it, at no cost."""
    return float(len(completion) % 2)


# -- the flow ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mark:
    """The end of a step: when it was, and what the engine's threads had done by then (seconds)."""

    seconds: float
    computed: Mapping[int, float]
    """CPU time by thread."""
    runnable: Mapping[int, float]
    """CPU time, and time that a thread waited for a core."""


class Watch(Callback):
    """A mark at the end of each step."""

    def __init__(self) -> None:
        self.marks: list[Mark] = []
        self.rows: list[Mapping[str, float]] = []

    def on_start(self, plan: RunPlan) -> None:
        """Find the engine."""
        from tasks.session import live

        backend = live(plan.run_id).backend
        assert isinstance(backend, EmbeddedBackend)
        self._pid = backend.engine.process.pid

    def on_step(self, row: Mapping[str, float]) -> None:
        """Mark it."""
        computed, waited = thread_seconds(self._pid)
        runnable = {thread: computed[thread] + waited[thread] for thread in computed}
        self.marks.append(Mark(time.perf_counter(), computed, runnable))
        self.rows.append(row)


@dataclass(frozen=True)
class Trained:
    """What a flow did in its measured steps: its speed, and shares of the wall time."""

    speed: Speed
    engine_share: float
    cpu_share: float


def experiment(bench: Bench, max_staleness: int) -> Experiment:
    """The run: the measured steps, and those before and behind them."""
    sizes = bench.sizes
    params = {
        "learning_rate": LEARNING_RATE,
        "lora_rank": RANK,
        "batch_size": sizes.prompts,
        "num_samples": sizes.samples,
        "max_tokens": sizes.tokens,
        "max_steps": UNMEASURED + sizes.steps + NOTHING_BESIDE,
        "max_staleness": max_staleness,
        "verifier": {"kind": "function", "params": {"path": "benchmarks.rl:odd_length"}},
    }
    return Experiment.model_validate(
        {
            "name": "rl",
            "store": str(bench.store),
            "model": {"name": bench.model},
            "data": {"kind": "rows", "rows": [{"messages": asked} for asked in QUESTIONS]},
            "algorithm": {"kind": "rl", "params": params},
            "backend": {"kind": "embedded", "params": {"device": "cpu", "threads": bench.threads}},
            "orchestration": {"task_runs": "segment"},
        }
    )


async def flow(bench: Bench, max_staleness: int, run_id: str) -> Trained:
    """The train flow in this process."""
    from flows.train import train
    from tasks.session import watch

    watching = Watch()
    with watch(watching):
        asked = experiment(bench, max_staleness)
        await train.with_options(flow_run_name=run_id)(asked, run_id=run_id)
    sizes = bench.sizes
    behind = UNMEASURED + sizes.steps
    first, last = watching.marks[UNMEASURED - 1], watching.marks[behind - 1]
    wall = last.seconds - first.seconds
    computed = {
        thread: last.computed[thread] - first.computed.get(thread, 0.0) for thread in last.computed
    }
    compute = max(computed, key=lambda thread: computed[thread])
    tokens = statistics.fmean(row["rollout/tokens"] for row in watching.rows[UNMEASURED:behind])
    return Trained(
        Speed(sizes.prompts * sizes.samples * sizes.steps / wall, tokens),
        (last.runnable[compute] - first.runnable[compute]) / wall,
        computed[compute] / wall,
    )


# -- the loop by hand --------------------------------------------------------------------------


def by_hand(bench: Bench) -> Speed:
    """As many steps of the raw loop."""
    sizes = bench.sizes

    def reward(tokens: Tokens) -> float:
        return odd_length({}, bench.tokenizer.decode(tokens, skip_special_tokens=True))

    def step(number: int) -> int:
        start = number * sizes.prompts % len(bench.prompts)
        prompts = bench.prompts[start : start + sizes.prompts]
        return bench.raw.reinforce(prompts, sizes.samples, sizes.tokens, models.END_OF_TURN, reward)

    bench.raw.fresh()
    torch.manual_seed(0)
    step(0)  # warms up
    started = time.perf_counter()
    tokens = sum(step(number) for number in range(1, sizes.steps + 1))
    seconds = time.perf_counter() - started
    samples = sizes.prompts * sizes.samples * sizes.steps
    return Speed(samples / seconds, tokens / samples)


# -- rows --------------------------------------------------------------------------------------


def measure(bench: Bench, row: Row) -> list[Figure]:
    """Both sides by turns, so that a busy machine slows both."""
    flows: list[Trained] = []
    raw: list[Speed] = []
    for repeat in range(bench.repeats):
        for side in ("raw", "flow") if repeat % 2 else ("flow", "raw"):
            if side == "raw":
                raw.append(by_hand(bench))
            else:
                run_id = f"{row.name}-{repeat}"
                flows.append(asyncio.run(flow(bench, row.max_staleness, run_id)))
    pairs = [(done.speed, other) for done, other in zip(flows, raw, strict=True)]
    for flow_side, raw_side in pairs:
        if abs(flow_side.tokens / raw_side.tokens - 1) > LIKE:
            raise RuntimeError(
                f"not the same work: {flow_side.tokens} and {raw_side.tokens} tokens"
            )
    speeds = [[side.samples_per_second for side in sides] for sides in pairs]
    shares = tuple(done.engine_share for done in flows)
    return [
        Figure("engine at work / wall", shares, row.share_at_least),
        Figure("engine's CPU time / wall", tuple(done.cpu_share for done in flows)),
        Figure("samples/s, flow", tuple(ours for ours, _ in speeds)),
        Figure("samples/s, raw", tuple(raw for _, raw in speeds)),
        Figure(
            "samples/s, flow / raw", tuple(ours / raw for ours, raw in speeds), row.ratio_at_least
        ),
    ]


# -- the command -------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    names = [row.name for row in ROWS]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rl")
    parser.add_argument("--rows", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="of both sides")
    parser.add_argument("--toy", action="store_true", help="hardly any work: does all of it run?")
    parser.add_argument("--json", type=Path, default=None, help="write the figures there")
    parser.add_argument("--check", action="store_true", help="exit code 1 if a row misses its goal")
    given = parser.parse_args(arguments)
    if (warning := load_warning()) is not None:
        print(warning)
    torch.set_num_threads(given.threads)
    ensure_server(print)
    figures: dict[str, list[Figure]] = {}
    with tempfile.TemporaryDirectory(prefix="flowtune-bench-") as folder:
        for row in ROWS:
            if row.name not in given.rows:
                continue
            figures[row.name] = measure(_bench(Path(folder) / row.name, row, given), row)
            for figure in figures[row.name]:
                print(_line(row.name, figure), flush=True)
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


def _bench(folder: Path, row: Row, given: argparse.Namespace) -> Bench:
    model = models.make_talker(folder / "model", row.end)
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = [
        np.asarray(chat_prompt(asked, tokenizer, None, "prompt"), np.int64) for asked in QUESTIONS
    ]
    return Bench(
        model,
        RawModel(model, "cpu"),
        tokenizer,
        prompts,
        folder / "runs",
        TOY if given.toy else Sizes(),
        given.repeats,
        given.threads,
    )


def _line(name: str, figure: Figure) -> str:
    spread = ""
    if len(figure.values) > 1:
        spread = f" ({min(figure.values):.3f} to {max(figure.values):.3f})"
    goal = verdict = ""
    if figure.at_least is not None:
        goal = f"at least {figure.at_least:g}"
        verdict = "yes" if figure.reached else "NO"
    return f"{name:14}{figure.what:24}{figure.value:9.3f}{spread:22} {goal:15} {verdict}".rstrip()


if __name__ == "__main__":
    sys.exit(main())
