"""How fast a training step is through the SDK and the engine, against a raw PEFT loop.

    python -m benchmarks.train_step [--threads 1] [--repeats 5] [--steps 20]

Both train the shipped model with rank-16 LoRA on the same batches, taking turns in one run, so that
a busy machine slows both. The raw loop is transformers + PEFT + torch.optim.AdamW in this process,
padded batches, the loss summed; the engine is a process of its own behind HTTP, pipelined one step
ahead. Printed are tokens per second, the median of the repeats, and the ratio repeat by repeat.
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import statistics
import time
from collections import deque
from collections.abc import Awaitable

import numpy as np
import peft
import tinker
import torch
from tinker import types
from transformers import AutoModelForCausalLM

from backends.base import Backend, ModelSpec
from backends.embedded import EmbeddedKind, EmbeddedParams

MODEL = "examples/models/tiny-qwen3"
SHAPES = {"16 x 128": (16, 128), "64 x 128": (64, 128), "4 x 32": (4, 32), "32 x 24": (32, 24)}
RATE = 1e-4


class RawLoop:
    """transformers and PEFT as their documentation has them."""

    def __init__(self) -> None:
        base = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
        layers = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        config = peft.LoraConfig(r=16, lora_alpha=32, target_modules=[*layers, "lm_head"])
        self.model = peft.get_peft_model(base, config)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.0)

    def train(self, tokens: np.ndarray, steps: int) -> None:
        """Steps on a batch of tokens [B, T + 1]."""
        ids = torch.from_numpy(tokens)
        for _ in range(steps):
            logits = self.model(input_ids=ids[:, :-1]).logits
            targets = ids[:, 1:].reshape(-1)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets, reduction="sum")
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


async def train_engine(backend: Backend, tokens: np.ndarray, steps: int) -> None:
    """The same steps through the SDK, the next one submitted while one runs."""
    data = [
        tinker.Datum(
            model_input=types.ModelInput.from_ints(row[:-1].tolist()),
            loss_fn_inputs={
                "target_tokens": row[1:],
                "weights": np.ones(len(row) - 1, dtype=np.float32),
            },
        )
        for row in tokens
    ]
    adam = types.AdamParams(learning_rate=RATE)
    waiting: deque[tuple[Awaitable[object], Awaitable[object]]] = deque()
    for _ in range(steps):
        passed = backend.forward_backward_async(data, loss_fn="cross_entropy")
        waiting.append((passed, backend.optim_step_async(adam)))
        if len(waiting) == 2:
            for result in waiting.popleft():
                await result
    for pair in waiting:
        for result in pair:
            await result


async def measure(threads: int, repeats: int, steps: int) -> None:
    """Print one line a shape."""
    torch.set_num_threads(threads)
    raw = RawLoop()
    spec = ModelSpec(name=MODEL, lora_rank=16)
    backend = await EmbeddedKind.open(EmbeddedParams(threads=threads), spec, None)
    print(
        f"{platform.processor() or platform.machine()}, {threads} thread(s), torch "
        f"{torch.__version__}; {repeats} repeats of {steps} steps"
    )
    print(f"{'batch':>10}{'raw tokens/s':>16}{'engine tokens/s':>18}{'ratio':>8}   (range)")
    for name, (rows, length) in SHAPES.items():
        tokens = np.random.default_rng(0).integers(3, 500, (rows, length + 1))
        speeds: dict[str, list[float]] = {"raw": [], "engine": []}
        for repeat in range(repeats + 1):
            started = time.perf_counter()
            raw.train(tokens, steps)
            middle = time.perf_counter()
            await train_engine(backend, tokens, steps)
            ended = time.perf_counter()
            if repeat:  # the first one warms up
                work = rows * length * steps
                speeds["raw"].append(work / (middle - started))
                speeds["engine"].append(work / (ended - middle))
        ratios = [e / r for e, r in zip(speeds["engine"], speeds["raw"], strict=True)]
        print(
            f"{name:>10}{statistics.median(speeds['raw']):>16,.0f}"
            f"{statistics.median(speeds['engine']):>18,.0f}{statistics.median(ratios):>8.2f}"
            f"   ({min(ratios):.2f} to {max(ratios):.2f})"
        )
    await backend.aclose()


def main() -> None:
    """Read the arguments and measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()
    asyncio.run(measure(given.threads, given.repeats, given.steps))


if __name__ == "__main__":
    main()
