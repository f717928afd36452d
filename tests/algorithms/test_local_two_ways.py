"""The same model, two ways: the engine and TRL, and a TRL run whose process is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import yaml
from safetensors.numpy import load_file

from algorithms.experiment import parse_experiment
from algorithms.opening import open_live_run
from backends.base import SavedState
from backends.local import LocalBackend, LocalKind, LocalParams
from backends.storage.run_store import RunStore

pytestmark = pytest.mark.slow  # an engine, TRL, and a killed process

ARITHMETIC = Path("examples/data/arithmetic")
STEPS = 12
NEAR = 1e-6
"""How far losses and margins may be apart, in nats: float32 sums in another order."""

CLIPPED_AT = {"sft": 15.0, "dpo": 0.13}
"""Gradient norms that some steps have and others have not."""


WAYS = {"sft": "train.jsonl", "dpo": "preferences.jsonl"}
"""What both can do, and on which rows."""


def document(kind: str, store: Path) -> dict[str, Any]:
    """The same rows, seed, learning rates, clipping and decay; sft sums over tokens."""
    recipe = kind.removeprefix("local_")
    held_out = {"kind": "jsonl", "path": str(ARITHMETIC / "test.jsonl")}
    return {
        "name": "two-ways",
        "seed": 3,
        "store": str(store),
        "model": {"name": "examples/models/tiny-qwen3"},
        "data": {"kind": "jsonl", "path": str(ARITHMETIC / WAYS[recipe])},
        "algorithm": {
            "kind": kind,
            "params": {
                "learning_rate": 1e-3,
                "schedule": {"kind": "linear", "warmup_steps": 2},
                "batch_size": 8,
                "max_steps": STEPS,
                "lora_rank": 8,
                "train_unembed": False,
                "grad_clip_norm": CLIPPED_AT[recipe],
                "weight_decay": 0.1,
                "save_every": 4,
            },
        },
        "backend": {"kind": "embedded" if kind == recipe else "local"},
        "evaluations": [
            {"name": "likely", "kind": "nll", "data": held_out, "limit": 40, "before": False},
            {"name": "right", "data": held_out, "limit": 40, "max_tokens": 8},
        ],
    }


async def both_ways(recipe: str, folder: Path) -> dict[str, RunStore]:
    """The stores of a run on the engine and of one with TRL."""
    done = {}
    for kind in (recipe, f"local_{recipe}"):
        spec = parse_experiment(document(kind, folder))
        store = RunStore(spec.store, kind)
        run = await open_live_run(spec, store)
        try:
            for start, stop in pairwise([0, *run.segment_ends]):
                await run.run_segment(run, start, stop)
            await run.settle()
        finally:
            await run.cancel()
            await run.backend.aclose()
        done[kind] = store
    return done


def check_same_curves(engine: RunStore, trl: RunStore, columns: tuple[str, ...]) -> None:
    """Column by column; a run must have clipped some steps and not others."""
    rows = trl.metrics()
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for one, other in zip(engine.metrics(), rows, strict=True):
        for column in columns:
            assert other[column] == pytest.approx(one[column], abs=NEAR), column
        assert other["optim/grad_norm"] == pytest.approx(one["optim/grad_norm"], rel=1e-4)
        assert other["optim/lr"] == pytest.approx(one["optim/lr"], rel=1e-12)
        for column in ("tokens/total", "tokens/supervised", "progress/epoch"):
            assert other[column] == one[column]
    assert len({one["optim/clip_factor"] < 1 for one in engine.metrics()}) == 2
    assert rows[-1][columns[0]] < 0.98 * rows[0][columns[0]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunStore]:
    """The store of each of the two runs of sft."""
    return await both_ways("sft", tmp_path_factory.mktemp("runs"))


@pytest.mark.asyncio(loop_scope="module")
async def test_the_loss_curves_are_the_same(stores: dict[str, RunStore]) -> None:
    check_same_curves(stores["sft"], stores["local_sft"], ("train_mean_nll",))


async def test_so_are_those_of_preferences(tmp_path: Path) -> None:
    ways = await both_ways("dpo", tmp_path)
    columns = ("loss", "dpo/margin", "rewards/chosen", "rewards/rejected")
    check_same_curves(ways["dpo"], ways["local_dpo"], columns)


@pytest.mark.asyncio(loop_scope="module")
async def test_so_are_the_evaluations(stores: dict[str, RunStore]) -> None:
    engine, trl = (stores[kind].evaluations() for kind in ("sft", "local_sft"))
    assert [(row["name"], row["step"]) for row in trl] == [
        (row["name"], row["step"]) for row in engine
    ]
    for one, other in zip(engine, trl, strict=True):
        assert other["score"] == pytest.approx(one["score"], abs=1e-5)
        assert other["metrics"].keys() == one["metrics"].keys()


@pytest.mark.asyncio(loop_scope="module")
async def test_a_checkpoint_of_the_one_starts_a_run_on_the_other(
    stores: dict[str, RunStore],
) -> None:
    folders = {}
    for kind, store in stores.items():
        manifest = store.latest_checkpoint()
        assert manifest is not None
        folder = store.checkpoint_folder(manifest)
        assert folder is not None
        folders[kind] = folder
    configs = [json.loads((f / "adapter_config.json").read_text()) for f in folders.values()]
    assert configs[0] == configs[1]
    spec = parse_experiment(document("local_sft", Path("unused"))).model_spec()
    start = SavedState(None, folders["sft"], optimizer=False)
    backend = await LocalKind.open(LocalParams(), spec, start)
    assert isinstance(backend, LocalBackend)
    try:
        weights = {name: tensor.numpy() for name, tensor in backend.weights().items()}
        saved = load_file(folders["sft"] / "adapter_model.safetensors")
        assert weights.keys() == saved.keys()
        assert all((weights[name] == saved[name]).all() for name in saved)
        assert backend.resumed is None
    finally:
        await backend.aclose()


def test_a_process_that_is_killed_goes_on_exactly(tmp_path: Path) -> None:
    def flowtune(run_id: str) -> subprocess.Popen[bytes]:
        file = tmp_path / f"{run_id}.yaml"
        file.write_text(yaml.safe_dump(document("local_sft", tmp_path / "runs")))
        command = [sys.executable, "-m", "flows.cli", "run", str(file), "--run-id", run_id]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)

    def of(run_id: str) -> RunStore:
        return RunStore(str(tmp_path / "runs"), run_id)

    def rows(run_id: str) -> list[dict[str, float]]:
        return [
            {name: value for name, value in row.items() if not name.startswith("time/")}
            for row in of(run_id).metrics()
        ]

    assert flowtune("whole").wait() == 0
    killed = flowtune("killed")
    while 4 not in of("killed").checkpoint_steps():
        assert killed.poll() is None
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    assert (of("killed").read_result() or {}).get("status") != "completed"
    assert flowtune("killed").wait() == 0
    assert rows("killed") == rows("whole")
    assert of("killed").evaluations() == of("whole").evaluations()
    one, other = (of(run_id).latest_checkpoint() for run_id in ("whole", "killed"))
    assert one is not None
    assert other is not None
    assert other.files == one.files
    result = of("killed").read_result()
    assert result is not None
    assert result["status"] == "completed"
    assert (tmp_path / "runs" / "killed" / "report.md").is_file()
