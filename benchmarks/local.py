"""`local_sft` beside TRL's SFTTrainer alone: the whole run, on the same rows, by turns.

    python -m benchmarks.local [--steps 60] [--batch 16] [--repeats 5] [--threads 1]

Both sides load the model, take the same steps on the same rows in the same order, log each, and
save twice. Printed are the ratios of time and of CPU seconds, ours by TRL's: less is better.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any, Final

from benchmarks.measuring import load_warning, machine

MODEL: Final = "examples/models/tiny-qwen3"
ROWS: Final = "examples/data/arithmetic/train.jsonl"
GOAL: Final = 1.1


def experiment(store: str, options: argparse.Namespace) -> dict[str, Any]:
    """The run as a document."""
    params = {"learning_rate": 1e-3, "batch_size": options.batch, "max_steps": options.steps}
    saves = {"save_at_fractions": [0.5, 1.0]}
    return {
        "name": "local",
        "store": store,
        "model": {"name": MODEL},
        "data": {"kind": "jsonl", "path": ROWS},
        "algorithm": {"kind": "local_sft", "params": {**params, **saves}},
        "backend": {"kind": "local", "params": {"device": "cpu"}},
    }


def ours(options: argparse.Namespace) -> None:
    """One run of local_sft, without Prefect."""
    from algorithms.experiment import parse_experiment
    from algorithms.opening import open_live_run
    from backends.storage.run_store import RunStore

    async def train(store: str) -> None:
        spec = parse_experiment(experiment(store, options))
        run = await open_live_run(spec, RunStore(store, "run"))
        try:
            await run.run_segment(run, 0, run.plan.total_steps)
            await run.settle()
        finally:
            await run.cancel()
            await run.backend.aclose()
        await asyncio.to_thread(run.finish)

    with tempfile.TemporaryDirectory() as store:
        asyncio.run(train(store))


def trl_alone(options: argparse.Namespace) -> None:
    """The same steps in a script of TRL's."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback
    from trl import SFTConfig, SFTTrainer

    from algorithms.data.order import batch_rows
    from algorithms.data.rendering import render_rows
    from algorithms.data.sources import JsonlData

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    rendered = render_rows(JsonlData(kind="jsonl", path=ROWS).load(), tokenizer).rows
    order = (batch_rows(len(rendered), options.batch, 0, step) for step in range(options.steps))
    rows = [rendered[index] for picked in order for index in picked]
    data = [
        {
            "input_ids": row.tokens.tolist(),
            "labels": [
                token if counts else -100
                for token, counts in zip(row.tokens.tolist(), row.mask.tolist(), strict=True)
            ],
        }
        for row in rows
    ]
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            output_dir=folder,
            per_device_train_batch_size=options.batch,
            max_steps=options.steps,
            train_sampling_strategy="sequential",
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            logging_steps=1,
            save_strategy="steps",
            save_steps=max(options.steps // 2, 1),
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            max_length=None,
            dataset_kwargs={"skip_prepare_dataset": True},
        )
        trainer = SFTTrainer(
            model=AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32),
            args=arguments,
            train_dataset=Dataset.from_list(data),
            processing_class=tokenizer,
            peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()


def timed(side: Callable[[argparse.Namespace], None], options: argparse.Namespace) -> list[float]:
    """Seconds by the clock, and of the CPU."""
    began, cpu = time.perf_counter(), time.process_time()
    side(options)
    return [time.perf_counter() - began, time.process_time() - cpu]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("steps", 60), ("batch", 16), ("repeats", 5), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    import torch

    torch.set_num_threads(options.threads)
    print(*(f"{name}: {value}" for name, value in machine("cpu").items()), sep=", ")
    if (warning := load_warning()) is not None:
        print(warning)
    for side in (trl_alone, ours):  # warm up
        timed(side, options)
    ratios = []
    for repeat in range(options.repeats):
        sides = (trl_alone, ours) if repeat % 2 == 0 else (ours, trl_alone)
        figures = {side: timed(side, options) for side in sides}
        pairs = zip(figures[ours], figures[trl_alone], strict=True)
        ratios.append([mine / theirs for mine, theirs in pairs])
        print("time {:.3f} x, CPU {:.3f} x".format(*ratios[-1]), flush=True)
    clock, cpu = (statistics.median(column) for column in zip(*ratios, strict=True))
    print(f"median: time {clock:.3f} x, CPU {cpu:.3f} x of TRL alone; at most {GOAL} wanted")


if __name__ == "__main__":
    main()
