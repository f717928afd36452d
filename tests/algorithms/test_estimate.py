"""Estimates and suggestions, against numbers worked out by hand and files of the shipped model."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from safetensors import safe_open

from algorithms.estimate import Estimate, adapter_weights, estimate
from algorithms.experiment import parse_experiment
from algorithms.model_facts import weight_shapes
from algorithms.suggestion import suggest
from backends.base import ModelSpec
from backends.errors import UserError
from flows.figures import price_per_million, print_estimate
from tests.algorithms.samples import MODEL, document

CHATS = [
    {
        "messages": [
            {"role": "user", "content": f"What is {n} plus {n}?"},
            {"role": "assistant", "content": str(2 * n)},
        ]
    }
    for n in range(10, 50)
]


def estimated(kind: str = "sft", backend: str = "embedded", **params: Any) -> Estimate:
    return estimate(
        parse_experiment(
            document(
                model={"name": str(MODEL)},
                data={"kind": "rows", "rows": CHATS},
                algorithm={"kind": kind, "params": {"batch_size": 8, **params}},
                backend={"kind": backend},
            )
        )
    )


# --- what a run takes ---------------------------------------------------------------------------


def test_steps_and_tokens_of_supervised_rows() -> None:
    from algorithms.data.rendering import render_rows
    from algorithms.data.sources import RowsData
    from backends.tokenizer import load_tokenizer

    found = estimated(num_epochs=3)
    assert (found.rows, found.steps) == (40, 15)
    rendering = render_rows(
        RowsData(kind="rows", rows=CHATS).load(), load_tokenizer(str(MODEL)), "all_assistant", None
    )
    real = sum(row.tokens.size for row in rendering.rows) / 40
    assert found.tokens_per_row == pytest.approx(real, rel=0.1)
    assert found.tokens == round(15 * 8 * (found.tokens_per_row or 0))
    assert estimated(max_steps=7).steps == 7
    budget = estimated(max_tokens_per_batch=500)
    assert budget.steps == math.ceil(40 * real / 500)


def test_tokens_of_rollouts_are_the_most_there_can_be() -> None:
    found = estimated("rl", max_steps=6, num_substeps=2, num_samples=4, max_tokens=10)
    # 3 batches of 8 prompts, 4 rollouts each of at most 10 tokens.
    assert found.sampled == 3 * 8 * 4 * 10
    assert found.tokens == round(3 * 8 * 4 * (found.tokens_per_row or 0)) + found.sampled


def test_memory_is_counted_from_the_weights_that_are_there() -> None:
    memory = estimated().memory
    assert memory is not None
    with safe_open(MODEL / "model.safetensors", "np") as file:
        weights = sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    assert memory.base == 4 * weights
    # Of each of 3 layers: q 128->128, k and v 128->64, o 128->128, gate and up 128->384, down
    # 384->128; and the head 128->512.
    attention = 3 * (256 + 192 + 192 + 256)
    mlp = 3 * 3 * 512
    assert memory.adapter == 16 * 16 * (attention + mlp + 640)
    shapes = weight_shapes(str(MODEL))
    assert shapes is not None
    only = ModelSpec(name=str(MODEL), lora_rank=2, train_mlp=False, train_unembed=False)
    assert adapter_weights(shapes, only) == 2 * attention
    assert estimated(backend="mock").memory is None


def test_the_engine_makes_as_many_weights_as_were_estimated() -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from backends.engine.lora import install_slots

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(MODEL))
    slots = install_slots(model)
    real = sum(sum(slot.weight.shape) for slot in slots.values())
    assert adapter_weights(weight_shapes(str(MODEL)) or {}, ModelSpec(name="", lora_rank=1)) == real


def test_what_is_not_here_is_not_guessed() -> None:
    found = estimate(parse_experiment(document(model={"name": "no/where"})))
    assert (found.tokens_per_row, found.tokens, found.memory) == (None, None, None)


def test_prices_are_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert price_per_million("a/b", None) is None
    prices = tmp_path / "prices.yaml"
    prices.write_text("a/b: 0.4\n")
    monkeypatch.setenv("FLOWTUNE_PRICES", str(prices))
    assert price_per_million("a/b", None) == 0.4
    assert price_per_million("a/b", 2.0) == 2.0
    assert price_per_million("a/c", None) is None
    prices.write_text("- 1")
    with pytest.raises(UserError, match="one line a model"):
        price_per_million("a/b", None)
    console = Console(width=200)
    with console.capture() as shown:
        print_estimate(console, Estimate(9, 3, 10.0, 2_500_000, 0, False, None), 0.4)
    assert "about 1.00 at 0.4 a million tokens trained on" in shown.get()


def test_nothing_heavy_is_imported() -> None:
    ask = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "import flows.cli\n"
        "config = 'examples/sft_arithmetic.yaml'\n"
        f"for line in (['validate', config], ['suggest', {str(MODEL)!r}]):\n"
        "    done = CliRunner().invoke(flows.cli.app, line)\n"
        "    assert done.exit_code == 0, done.output\n"
        "    print(done.output.splitlines()[0])\n"
        "print([name for name in ('torch', 'transformers', 'prefect') if name in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", ask],
        cwd=MODEL.parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    first, second, heavy = done.stdout.splitlines()
    assert first == "sft-arithmetic is in order"
    assert second == f"to start a LoRA run of {MODEL}:"
    assert heavy == "[]"


# --- where to start -----------------------------------------------------------------------------


def config(folder: Path, **fields: Any) -> str:
    (folder / "config.json").write_text(json.dumps(fields))
    return str(folder)


@pytest.mark.parametrize(
    ("fields", "rate"),
    [
        ({"model_type": "qwen3", "hidden_size": 4096}, 5e-4 * (2000 / 4096) ** 0.0775),
        ({"model_type": "llama", "hidden_size": 8192}, 5e-4 * (2000 / 8192) ** 0.781),
        ({"model_type": "qwen3_vl", "text_config": {"hidden_size": 2000}}, 5e-4),
        ({"model_type": "gemma3", "hidden_size": 640}, 5e-4),
    ],
)
def test_the_learning_rate_follows_family_and_size(
    tmp_path: Path, fields: dict[str, Any], rate: float
) -> None:
    found = suggest(config(tmp_path, **fields))
    assert (found.learning_rate, found.batch_size) == (pytest.approx(rate), 128)
    assert "LoRA Without Regret" in found.because[0]


def test_a_measured_rate_needs_no_file_and_is_named_as_such() -> None:
    found = suggest("meta-llama/Llama-3.1-8B")
    assert found.learning_rate == 3e-4
    assert "in a sweep on tulu3" in found.because[0]


@pytest.mark.parametrize(
    ("rows", "batch_size"), [(50, 8), (1_600, 16), (3_300, 32), (12_799, 64), (10**6, 128)]
)
def test_the_batch_leaves_a_hundred_steps(rows: int, batch_size: int) -> None:
    found = suggest("meta-llama/Llama-3.1-8B", rows)
    assert found.batch_size == batch_size
    assert found.learning_rate == pytest.approx(3e-4 * math.sqrt(batch_size / 128))


def test_a_model_that_says_nothing_of_its_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no hidden_size"):
        suggest(config(tmp_path, model_type="qwen3"))
    with pytest.raises(UserError, match=r"has no config\.json"):
        suggest(str(tmp_path.parent))
