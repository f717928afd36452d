"""Estimates and suggestions, against numbers worked out by hand and files of the shipped model."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from safetensors import safe_open

from algorithms.base import RunContext
from algorithms.data.dataset import load_dataset
from algorithms.estimate import Estimate, adapter_weights, estimate, in_sum
from algorithms.experiment import parse_experiment
from algorithms.model_facts import weight_shapes
from algorithms.suggestion import suggest
from backends.base import ModelSpec
from backends.errors import UserError
from backends.local import LocalKind, LocalParams
from flows.figures import price_per_million, print_estimate
from tests.algorithms.samples import MODEL, document, open_backend, set_up

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


def on_the_local_backend(kind: str, rows: list[dict[str, Any]], **params: Any) -> Estimate:
    backend = {"num_processes": params.pop("num_processes", 1)}
    return estimate(
        parse_experiment(
            document(
                model={"name": str(MODEL)},
                data={"kind": "rows", "rows": rows},
                algorithm={"kind": kind, "params": {"batch_size": 8, **params}},
                backend={"kind": "local", "params": backend},
            )
        )
    )


PAIRS = [{"prompt": "a b", "chosen": "c", "rejected": "d"}] * 20
A_TOKEN = 3 * 128 * 43 * 2 + 6 * 512 * 4
"""Bytes of a token of the tiny model: 3 layers of 128 units in float32, six copies of logits."""


def activations(kind: str, rows: list[dict[str, Any]] = CHATS, **params: Any) -> int:
    memory = on_the_local_backend(kind, rows, **params).memory
    assert memory is not None
    return memory.activations


def test_activations_of_a_local_run_are_those_of_the_rows_that_pass_at_a_time() -> None:
    from algorithms.model_facts import read_tokenizer

    tokenizer = read_tokenizer(str(MODEL))
    assert tokenizer is not None
    question, answer = CHATS[0]["messages"]
    row = sum(len(tokenizer.encode(turn["content"]).ids) for turn in (question, answer)) + 2 * 5
    same = CHATS[:1] * 20
    assert activations("local_sft", same) == 8 * row * A_TOKEN
    assert activations("local_sft", same, micro_batch_size=2) == 2 * row * A_TOKEN
    assert activations("local_sft", same, num_processes=2) == 4 * row * A_TOKEN
    assert activations("local_sft", same, max_seq_len=10) == 8 * 10 * A_TOKEN
    sampled = {"num_samples": 4, "max_tokens": 10, "micro_batch_size": 2}
    assert activations("local_rl", same, **sampled) == 2 * 4 * (row + 10) * A_TOKEN
    pair = sum(2 * len(tokenizer.encode(text).ids) for text in ("a b", "c"))
    assert activations("local_dpo", PAIRS) == 8 * pair * A_TOKEN
    checkpointing = {"trainer": {"gradient_checkpointing": True}}
    kept = 128 * (3 * 4 + 43 * 2) + 6 * 512 * 4  # what each layer is given, and one layer
    assert activations("local_sft", same, **checkpointing) == 8 * row * kept
    rl = on_the_local_backend("local_rl", same, max_steps=3, **sampled)
    assert rl.sampled == 3 * 8 * 4 * 10


def test_texts_without_a_prompt_are_counted_whole() -> None:
    from algorithms.model_facts import read_tokenizer

    tokenizer = read_tokenizer(str(MODEL))
    assert tokenizer is not None
    text = "What is 1 plus 1?"
    row = len(tokenizer.encode(text).ids)
    found = on_the_local_backend("local_sft", [{"text": text}] * 16)
    assert (found.tokens_per_row, found.tokens) == (row, 2 * 8 * row)
    assert activations("local_sft", [{"text": text}] * 16) == 8 * row * A_TOKEN
    beside = [{**chat, "text": text * 9} for chat in CHATS[:1]] * 20  # a column like any
    assert activations("local_sft", beside) == activations("local_sft", CHATS[:1] * 20)


ON_THE_MOCK: dict[str, dict[str, Any]] = {
    "mock_sft": {"num_epochs": 2},
    "sft": {"num_epochs": 3},
    "dpo": {},
    "rl": {"num_substeps": 2, "num_samples": 2, "num_epochs": 2},
    "sdft": {"num_epochs": 2},
    "distill": {"teacher": {"model": "another"}},
}


@pytest.mark.parametrize("kind", sorted(ON_THE_MOCK))
async def test_as_many_steps_are_taken_as_were_estimated(kind: str) -> None:
    rows = PAIRS if kind == "dpo" else CHATS[:20]
    for batch_size in (8, 10):
        params = {"batch_size": batch_size, **ON_THE_MOCK[kind]}
        data, algorithm = {"kind": "rows", "rows": rows}, {"kind": kind, "params": params}
        spec = parse_experiment(document(data=data, algorithm=algorithm, backend={"kind": "mock"}))
        taken = await set_up(spec, await open_backend(spec))
        assert estimate(spec).steps == taken.total_steps


@pytest.mark.parametrize("kind", ["local_sft", "local_dpo", "local_rl"])
async def test_a_local_run_takes_as_many_too(kind: str) -> None:
    rows = PAIRS if kind == "local_dpo" else CHATS[:20]
    data, model = {"kind": "rows", "rows": rows}, {"name": str(MODEL)}
    for params in ({"batch_size": 8}, {"batch_size": 8, "micro_batch_size": 4}):
        algorithm = {"kind": kind, "params": {**params, "num_epochs": 3}}
        spec = parse_experiment(document(model=model, data=data, algorithm=algorithm))
        backend = await LocalKind.open(LocalParams(threads=1), spec.model_spec(), None)
        taken = spec.algorithm.build()
        rows_of = load_dataset(spec.data)
        context = RunContext("run", "runs/run", spec, rows_of, backend, backend.get_tokenizer())
        await taken.setup(context, backend)
        await backend.aclose()
        assert estimate(spec).steps == taken.total_steps == (6 if len(params) == 2 else 9)


def test_processes_leave_out_a_batch_that_is_not_full() -> None:
    found = on_the_local_backend("local_sft", CHATS[:20], num_processes=2)
    assert found.steps == 2
    console = Console(width=200)
    with console.capture() as shown:
        print_estimate(console, found, None)
    assert "to train in each of 2 processes: base" in shown.get()


def test_what_is_not_here_is_not_guessed() -> None:
    found = estimate(parse_experiment(document(model={"name": "no/where"})))
    assert (found.tokens_per_row, found.tokens, found.memory) == (None, None, None)


@pytest.mark.parametrize(
    ("names", "known"),
    [
        (("num_hidden_layers", "hidden_size"), True),
        (("n_layer", "n_embd"), True),
        (("n_layers", "d_model"), True),
        (("n_layer", "hidden_size"), True),
        (("depth", "width"), False),
    ],
)
def test_memory_is_read_by_an_architectures_own_names(
    names: tuple[str, str], known: bool, tmp_path: Path
) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    sizes = dict(zip(names, (2, 8), strict=True))
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 16, **sizes}))
    shutil.copy(MODEL / "tokenizer.json", tmp_path)
    layers = {"attn.c_attn": (8, 24), "attn.c_proj": (8, 8), "mlp.c_fc": (8, 32), "ln": (8,)}
    weights = {f"h.{i}.{name}.weight": layers[name] for i in (0, 1) for name in layers}
    weights |= {"wte.weight": (16, 8), "h.0.experts.w1.weight": (8, 8)}
    tensors = {name: np.zeros(shape, np.float32) for name, shape in weights.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    params = {"batch_size": 1, "lora_rank": 3, "train_unembed": False}
    spec = document(
        model={"name": str(tmp_path)},
        data={"kind": "rows", "rows": [{"prompt": "a", "completion": "b"}]},
        algorithm={"kind": "sft", "params": params},
        backend={"kind": "embedded"},
    )
    memory = estimate(parse_experiment(spec)).memory
    if not known:
        assert memory is None
        return
    assert memory is not None
    assert memory.adapter == 16 * 3 * 2 * (32 + 16 + 40)
    assert memory.base == 4 * (2 * (192 + 64 + 256 + 8) + 128 + 64)
    # Of each of the engine's tokens: 2 layers of 8 units, and two copies of 16 logits, in float32.
    assert memory.activations == 2048 * (2 * 8 * 43 * 2 + 16 * 4 * 2)


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs", b"\x02" + b"\0" * 7 + b"{}"])
def test_a_weights_file_that_is_not_whole_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(UserError, match="no whole safetensors file"):
        weight_shapes(str(tmp_path))
    whole = (MODEL / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-1])
    with pytest.raises(UserError, match="no whole safetensors file"):
        weight_shapes(str(tmp_path))


def test_stages_take_the_sum_and_the_memory_of_the_largest() -> None:
    small, large = estimated(max_steps=3), estimated(max_steps=4, lora_rank=32)
    both = in_sum([small, large])
    assert (both.steps, both.tokens) == (7, (small.tokens or 0) + (large.tokens or 0))
    assert both.memory == large.memory
    unknown = estimate(parse_experiment(document(model={"name": "no/where"})))
    assert in_sum([small, unknown]).tokens is None


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
