"""The engine through the SDK and HTTP, beside raw PyTorch + PEFT, in one run.

    python -m benchmarks.engine [--threads N] [--repeats 5] [--rows NAME …] [--json FILE] [--check]

One line a row: the median speeds of both sides, the median of their ratios over interleaved
repeats, and the smallest and largest. README.md says what each row does.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from backends.embedded import EmbeddedParams
from benchmarks import models
from benchmarks.measuring import Measured, load_warning, machine, matmul_flops
from benchmarks.raw import RawModel
from benchmarks.rows import ROWS, TOY, Bench, Row, Sizes
from benchmarks.served import Served

MODEL = "examples/models/tiny-qwen3"
HEADINGS = ("row", "raw", "engine", "ratio (range)", "at least", "aim", "ok")
WIDTHS = (35, 9, 10, 24, 9, 6, 5)


async def measure(given: argparse.Namespace, model: str) -> dict[str, Measured]:
    """Every row that is asked for, printed as it is there; by name."""
    if given.threads is not None:
        torch.set_num_threads(given.threads)
    params = EmbeddedParams(device=given.device, threads=given.threads)
    raw = RawModel(model, given.device)
    engine = await Served.start(model, params)
    flops = None
    if given.device == "cuda":
        flops = matmul_flops()
        print(f"the card multiplies bfloat16 matrices at {flops / 1e12:.0f} TFLOP/s")
    sizes = TOY if given.toy else Sizes()
    bench = Bench(raw, engine, params, model, given.device, sizes, given.repeats, flops)
    print(_line(HEADINGS))
    results = {}
    try:
        for row in ROWS:
            if row.name not in given.rows:
                continue
            try:
                results[row.name] = await row.measure(bench)
            except torch.OutOfMemoryError:
                print(f"{row.what}: the raw side does not fit on the card")
                continue
            finally:
                torch.cuda.empty_cache()  # both sides share the card; does nothing without one
            print(_line(_cells(row, results[row.name])), flush=True)
            if results[row.name].note:
                print(f"    {results[row.name].note}")
    finally:
        await engine.stop()
    return results


def _line(cells: Sequence[str]) -> str:
    first, *others = (
        cell.rjust(width) if place else cell.ljust(width)
        for place, (cell, width) in enumerate(zip(cells, WIDTHS, strict=True))
    )
    return "".join([first, *others])


def _cells(row: Row, measured: Measured) -> tuple[str, ...]:
    goal = row.goal
    median, low, high = (
        f"{value:.2f}" for value in (measured.figure, min(measured.figures), max(measured.figures))
    )
    speeds = ("", f"{median} {goal.unit}")
    if measured.raw:
        speeds = (
            f"{statistics.median(measured.raw):,.0f}",
            f"{statistics.median(measured.engine):,.0f}",
        )
    ratio = f"{median} ({low} to {high})"
    goals = (f"{goal.at_least:g} {goal.unit}", f"{goal.aim:g}")
    return (row.what, *speeds, ratio, *goals, verdict(row, measured))


def verdict(row: Row, measured: Measured) -> str:
    """`aim`, `yes`, or `NO` for a row that misses even what it has to reach."""
    if row.goal.reached(measured.figure, row.goal.aim):
        return "aim"
    return "yes" if row.goal.reached(measured.figure, row.goal.at_least) else "NO"


def _document(given: argparse.Namespace, results: dict[str, Measured]) -> dict[str, Any]:
    """Everything that was measured, as JSON."""
    rows = {row.name: row for row in ROWS}
    return {
        "machine": machine(given.device),
        "options": vars(given),
        "rows": {
            name: {
                "what": rows[name].what,
                "against": rows[name].against,
                "goal": dataclasses.asdict(rows[name].goal),
                "figure": measured.figure,
                "figures": measured.figures,
                "verdict": verdict(rows[name], measured),
                **dataclasses.asdict(measured),
            }
            for name, measured in results.items()
        },
    }


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    names = [row.name for row in ROWS]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--threads", type=_count, help="of both sides; torch's choice if left out")
    parser.add_argument("--repeats", type=_count, default=5)
    parser.add_argument("--rows", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument(
        "--model", default=MODEL, help=f"a folder, or random weights: {', '.join(models.SIZES)}"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", metavar="FILE", help="write every figure there as well")
    parser.add_argument(
        "--check", action="store_true", help="exit 1 if a row misses what it has to reach"
    )
    parser.add_argument(
        "--toy", action="store_true", help="as little work as can be, to see that all of it runs"
    )
    return parser.parse_args(arguments)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"is {text}; give a whole number from 1 on")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and say by the exit code whether every row was reached, if asked to."""
    given = _options(arguments)
    about = machine(given.device)
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    print(
        f"threads {given.threads or torch.get_num_threads()}, {given.repeats} repeats, "
        f"load average {os.getloadavg()[0]:.1f}"
    )
    if (warning := load_warning()) is not None:
        print(warning, file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="flowtune-benchmark-") as folder:
        model = given.model
        if model in models.SIZES:
            model = models.make_sized(Path(folder), model)
        results = asyncio.run(measure(given, model))
    if given.json:
        Path(given.json).write_text(json.dumps(_document(given, results), indent=2))
    missed = any(verdict(row, results[row.name]) == "NO" for row in ROWS if row.name in results)
    return 1 if given.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
