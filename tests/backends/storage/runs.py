"""Small runs for the tests of a run's store."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backends.storage.checkpoints import CheckpointManifest
from backends.storage.run_store import RunStore

RUN = "run-1"
STATE = {"epoch": 1, "step_in_epoch": 2, "shuffle": [3, 1, 2]}


@dataclass(frozen=True)
class Sample:
    prompt: str
    completion: str
    expected: str
    reward: float


@dataclass(frozen=True)
class Scored:
    name: str
    step: int
    score: float
    metrics: dict[str, float] = field(default_factory=dict)
    samples: list[Any] = field(default_factory=list)


def begun(store_uri: str | Path, run_id: str = RUN, **changes: Any) -> RunStore:
    store = RunStore(store_uri, run_id)
    options = {"name": "sft", "backend": "embedded", "seed": 7, "total_steps": 4}
    assert store.begin(**{**options, **changes})
    store.take_lease()
    return store


def taken(store_uri: str | Path, run_id: str = RUN) -> RunStore:
    """The run as the next process continues it."""
    store = RunStore.open_existing(store_uri, run_id)
    store.take_lease()
    return store


def adapter(folder: Path, content: bytes = b"weights") -> Path:
    """A folder of checkpoint files."""
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(content)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def train(store: RunStore, first: int, last: int) -> None:
    for step in range(first, last + 1):
        store.append_metrics({"step": step, "loss": 1 / step, "time/step": time.monotonic()})
    store.flush_metrics()


def save(store: RunStore, step: int, folder: Path, **changes: Any) -> CheckpointManifest:
    options = {"state_uri": f"tinker://x/weights/{step}", "algorithm_state": STATE}
    return store.save_checkpoint(step=step, folder=folder, **{**options, **changes})
