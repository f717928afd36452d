"""A run's checkpoints: saved so that only whole ones count, verified when read, expired in time.

StoreError
├── CheckpointConflict   a save of a step that is kept already with other contents
└── DamagedCheckpoint    a file of a checkpoint is missing or not what its manifest says
"""

from __future__ import annotations

import hashlib
import logging
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from backends.storage.documents import encode_document, plain, timestamp
from backends.storage.objects import AlreadyExists, NotFound, ObjectStore, StoreError

KINDS_KEPT = frozenset(
    {".safetensors", ".json", ".jsonl", ".md", ".txt", ".png", ".yaml", ".jinja"}
)
"""Kinds of files a run may hold: data that can be read without running anything."""

MANIFEST = "manifest.json"

logger = logging.getLogger(__name__)


class CheckpointConflict(StoreError):
    """A checkpoint of that step is kept already, and it is another one."""


class DamagedCheckpoint(StoreError):
    """A file of a checkpoint is missing or differs from its manifest."""


class CheckpointFile(BaseModel):
    """One file of a checkpoint, as it was when it was saved."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str
    size: int
    sha256: str


class CheckpointManifest(BaseModel):
    """Everything needed to continue after `step` steps. `next_step` is the index, from 0."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Literal[1] = 1
    run_id: str
    step: int
    next_step: int
    created: str
    state_uri: str | None
    algorithm_state: dict[str, JsonValue]
    metrics: dict[str, JsonValue] | None
    files: tuple[CheckpointFile, ...]


class Best(BaseModel):
    """Which checkpoint is the best: by an evaluation's score, or by a column of the metrics."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    metric: str = Field(description="the name of an evaluation, or of a column of metrics.jsonl")
    mode: Literal["max", "min"] | None = Field(
        None, description="whether more or less is better; as the metric says if null"
    )


class Retention(BaseModel):
    """Which checkpoints stay when newer ones come; all of them unless `keep_last` is set."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    keep_last: int | None = Field(
        None, ge=1, description="how many of the newest stay; all if null"
    )
    keep_best: Best | None = Field(None, description="one more that stays, however old it is")

    @model_validator(mode="after")
    def _best_of_what(self) -> Retention:
        if self.keep_best is not None and self.keep_last is None:
            raise ValueError("keep_best changes nothing while all are kept: set keep_last too")
        return self


class Checkpoints:
    """The checkpoints below one prefix; saving, expiring and collecting exclude each other."""

    def __init__(
        self, objects: ObjectStore, run_id: str, check_lease: Callable[[], object]
    ) -> None:
        """`check_lease` raises when this process may no longer write the run."""
        self._objects = objects
        self._run_id = run_id
        self._prefix = f"{run_id}/checkpoints"
        self._check_lease = check_lease
        self._changing = threading.Lock()

    def save(
        self,
        *,
        step: int,
        state_uri: str | None,
        algorithm_state: Mapping[str, Any],
        metrics: dict[str, Any] | None,
        folder: Path,
    ) -> CheckpointManifest:
        """See `RunStore.save_checkpoint`; `metrics` is the row of the step."""
        files = _describe_files(folder)
        manifest = CheckpointManifest(
            run_id=self._run_id,
            step=step,
            next_step=step,
            created=timestamp(),
            state_uri=state_uri,
            algorithm_state=plain(algorithm_state),
            metrics=metrics,
            files=files,
        )
        prefix = self.key(step)
        with self._changing:
            self._check_lease()  # a writer that lost it must not touch the other's files either
            if (kept := self._read_manifest(step)) is not None:
                self._check_same_save(kept, manifest)
            self._objects.upload([file.path for file in files], folder, prefix)
            if kept is not None:
                return kept  # its files were written again all the same: one may have been damaged
            try:
                self._objects.create(
                    f"{prefix}/{MANIFEST}",
                    encode_document(manifest.model_dump()),
                    self._check_lease,
                )
            except AlreadyExists:  # another writer's, or our own whose answer was lost
                if (kept := self._read_manifest(step)) is not None:
                    self._check_same_save(kept, manifest)
                    return kept
                raise
        return manifest

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, rising; one listing, nothing read."""
        keys = self._objects.keys(self._prefix)
        return steps_with_manifest(key.removeprefix(f"{self._run_id}/") for key in keys)

    def all(self) -> list[CheckpointManifest]:
        """All checkpoints, by step."""
        manifests = (self._read_manifest(step) for step in self.steps())
        return [manifest for manifest in manifests if manifest is not None]

    def latest(self) -> CheckpointManifest | None:
        """The checkpoint of the most steps, or None."""
        for step in reversed(self.steps()):
            if (manifest := self._read_manifest(step)) is not None:
                return manifest
        return None

    def key(self, step: int) -> str:
        """The prefix that a checkpoint's objects lie below."""
        return f"{self._prefix}/{step_name(step)}"

    def fetch(self, manifest: CheckpointManifest, folder: Path) -> None:
        """See `RunStore.fetch_checkpoint`."""
        prefix = self.key(manifest.step)
        try:
            self._objects.download([file.path for file in manifest.files], prefix, folder)
        except NotFound as error:
            raise DamagedCheckpoint(f"checkpoint {prefix} has lost a file: {error}") from error
        self._verify(manifest, folder)

    def folder(self, manifest: CheckpointManifest) -> Path | None:
        """See `RunStore.checkpoint_folder`."""
        folder = self._objects.local_path(self.key(manifest.step))
        if folder is not None:
            self._verify(manifest, folder)
        return folder

    def expire(self, keep: Retention, scores: Mapping[int, float]) -> list[CheckpointManifest]:
        """See `RunStore.expire`; `scores` are those of the evaluation that `keep_best` names."""
        if keep.keep_last is None:
            return []
        with self._changing:
            if len(self.steps()) <= keep.keep_last:
                return []
            manifests = self.all()
            kept = {manifest.step for manifest in manifests[-keep.keep_last :]}
            if keep.keep_best is not None:
                best = best_step(manifests, keep.keep_best, scores)
                if best is None:
                    logger.warning(
                        "no checkpoint expires: none of them has %r, which "
                        "checkpoints.keep_best.metric names",
                        keep.keep_best.metric,
                    )
                    return []
                kept.add(best)
            expired = [manifest for manifest in manifests if manifest.step not in kept]
            self._check_lease()
            for manifest in expired:
                prefix = self.key(manifest.step)
                self._objects.delete(f"{prefix}/{MANIFEST}")
                self._objects.delete(prefix)
            return expired

    def collect_orphans(self, before: datetime) -> list[int]:
        """See `RunStore.collect_orphans`; `before` is on the store's own clock."""
        with self._changing:
            self._objects.collect_unfinished(self._run_id, before)
            steps = set(self.steps())
            written: dict[int, list[datetime]] = {}
            for key, when in self._objects.modified(self._prefix).items():
                if (step := _step_of(key.removeprefix(f"{self._prefix}/"))) is not None:
                    written.setdefault(step, []).append(when)
            orphans = sorted(
                step for step, times in written.items() if step not in steps and max(times) < before
            )
            self._check_lease()
            for step in orphans:
                self._objects.delete(self.key(step))
            return orphans

    def _check_same_save(self, kept: CheckpointManifest, again: CheckpointManifest) -> None:
        before = {file.path: file for file in kept.files}
        now = {file.path: file for file in again.files}
        differing = sorted(path for path in before | now if before.get(path) != now.get(path)) + [
            "the algorithm's state"
        ] * (kept.algorithm_state != again.algorithm_state)
        if differing:
            raise CheckpointConflict(
                f"{self._objects.uri(self.key(kept.step))} is kept already (saved {kept.created}) "
                f"and this save of step {kept.step} differs in {', '.join(differing)}. A replay "
                "must give the same bits: continue on the machine and versions the run began "
                "with, delete that checkpoint, or take another run id"
            )

    def _verify(self, manifest: CheckpointManifest, folder: Path) -> None:
        for file in manifest.files:
            path = folder / file.path
            address = self._objects.uri(f"{self.key(manifest.step)}/{file.path}")
            if not path.is_file():
                raise DamagedCheckpoint(f"{address} is missing")
            if path.stat().st_size != file.size:
                raise DamagedCheckpoint(
                    f"{address} has {path.stat().st_size} bytes, its manifest says {file.size}"
                )
            if _sha256(path) != file.sha256:
                raise DamagedCheckpoint(f"{address} is not what was saved: its sha256 differs")

    def _read_manifest(self, step: int) -> CheckpointManifest | None:
        key = f"{self.key(step)}/{MANIFEST}"
        try:
            return CheckpointManifest.model_validate_json(self._objects.read(key))
        except NotFound:
            return None
        except ValidationError as error:
            raise DamagedCheckpoint(
                f"{self._objects.uri(key)} is not a manifest this version of flowtune can read: "
                f"{error.errors()[0]['msg']}"
            ) from error


def step_name(step: int) -> str:
    """How a step is written in the names of objects."""
    return f"step-{step:06d}"


def steps_with_manifest(keys: Iterable[str]) -> list[int]:
    """The steps of all manifests among the keys (relative to the run)."""
    found = (re.fullmatch(rf"checkpoints/step-(\d+)/{MANIFEST}", key) for key in keys)
    return sorted(int(match[1]) for match in found if match)


def _step_of(key: str) -> int | None:
    match = re.match(r"step-(\d+)/", key)
    return int(match[1]) if match else None


def best_step(
    manifests: list[CheckpointManifest], best: Best, scores: Mapping[int, float]
) -> int | None:
    """The step of the best checkpoint, the earliest of equals; None if none has the metric.

    `scores` are those of the evaluation that `best` names, by step.
    """
    values: dict[int, float] = {}
    for manifest in manifests:
        value = scores.get(manifest.step, (manifest.metrics or {}).get(best.metric))
        if isinstance(value, (int, float)):
            values[manifest.step] = -value if best.mode == "min" else value
    if not values:
        return None
    return max(values, key=lambda step: (values[step], -step))


def _describe_files(folder: Path) -> tuple[CheckpointFile, ...]:
    files = []
    for path in sorted(path for path in folder.rglob("*") if not path.is_dir()):
        name = path.relative_to(folder).as_posix()
        if PurePosixPath(name).suffix not in KINDS_KEPT or name == MANIFEST:
            raise StoreError(
                f"{name} is not kept in a checkpoint: only {', '.join(sorted(KINDS_KEPT))} are, "
                f"and {MANIFEST} is the store's own"
            )
        files.append(CheckpointFile(path=name, size=path.stat().st_size, sha256=_sha256(path)))
    return tuple(files)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
