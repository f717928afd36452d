"""Whether a run that was disturbed ended as the one that nothing happened to."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from backends.engine.checkpoints import CheckpointUri
from backends.storage.checkpoints import CheckpointManifest
from backends.storage.run_store import RunStore

OF_THIS_PROCESS: Final = ("leases/", "cache/")
"""Below these, names and numbers of files tell of the processes that wrote them."""
TRAINED: Final = (
    "adapter_model.safetensors",
    "optimizer.safetensors",
    "adapter_config.json",
    "state.json",
)


def differences(whole: Path, disturbed: Path, engine_store: Path | None = None) -> list[str]:
    """Everything about the disturbed run's folder that is not as in the whole run's, in words.

    `engine_store` is where a served engine keeps its checkpoints: a run on one has none itself.
    """
    found = [
        *_result(disturbed),
        *_files(whole, disturbed),
        *_metrics(whole, disturbed),
        *_same_bytes(whole, disturbed, "evaluations.jsonl"),
        *_checkpoints(whole, disturbed, engine_store),
    ]
    for folder in ("evaluations", "rollouts"):
        for path in sorted((whole / folder).rglob("*")):
            if path.is_file():
                found += _same_bytes(whole, disturbed, path.relative_to(whole).as_posix())
    return found


def _result(disturbed: Path) -> Iterator[str]:
    result = json.loads((disturbed / "result.json").read_text())
    if result["status"] != "completed":
        yield f"result.json: {result['status']}"


def _files(whole: Path, disturbed: Path) -> Iterator[str]:
    """No file is missing, and none is left over from a write that was cut short."""
    names = [_names(folder) for folder in (whole, disturbed)]
    for name in sorted(names[0] - names[1]):
        yield f"{name} is missing"
    for name in sorted(names[1] - names[0]):
        yield f"{name} is left over"


def _names(folder: Path) -> set[str]:
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return {name for name in names if not name.startswith(OF_THIS_PROCESS)}


def _metrics(whole: Path, disturbed: Path) -> Iterator[str]:
    expected, there = (_untimed(folder / "metrics.jsonl") for folder in (whole, disturbed))
    if (steps := [row["step"] for row in there]) != [row["step"] for row in expected]:
        yield f"metrics.jsonl has rows for the steps {steps}"
        return
    for row, other in zip(expected, there, strict=True):
        for name in sorted(row.keys() | other.keys()):
            if row.get(name) != other.get(name):
                values = f"{other.get(name)}, not {row.get(name)}"
                yield f"metrics.jsonl, step {row['step']}: {name} is {values}"


def _untimed(path: Path) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in json.loads(line).items() if not name.startswith("time/")}
        for line in path.read_text().splitlines()
    ]


def _same_bytes(whole: Path, disturbed: Path, name: str) -> Iterator[str]:
    other = disturbed / name
    if other.exists() and other.read_bytes() != (whole / name).read_bytes():
        yield f"{name} differs"


def _checkpoints(whole: Path, disturbed: Path, engine_store: Path | None) -> Iterator[str]:
    """Every checkpoint is whole (sizes and hashes as in its manifest), and the same."""
    stores = [RunStore.open_existing(path.parent, path.name) for path in (whole, disturbed)]
    expected, there = (store.checkpoint_steps() for store in stores)
    if expected != there:
        yield f"checkpoints after the steps {there}, not {expected}"
        return
    for pair in zip(*(store.checkpoints() for store in stores), strict=True):
        trained = [
            _trained_files(store, manifest, engine_store)
            for store, manifest in zip(stores, pair, strict=True)
        ]
        for name in TRAINED:
            if trained[0][name] != trained[1][name]:
                yield f"checkpoints/step-{pair[0].step:06d}: {name} differs"


def _trained_files(
    store: RunStore, manifest: CheckpointManifest, engine_store: Path | None
) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        store.fetch_checkpoint(manifest, folder)
        if not (folder / TRAINED[0]).exists():
            assert engine_store is not None, f"{store.run_id} keeps no adapters"
            assert manifest.state_uri is not None
            folder = engine_store / CheckpointUri.parse(manifest.state_uri).prefix
        return {name: (folder / name).read_bytes() for name in TRAINED}
