"""A run's place in the object store: what is kept, under which names, and in which order.

    <store>/<run_id>/
      run.json                 who, when, with which code and data; never changed
      experiment.yaml          as resolved, defaults filled in; can be run again
      leases/000001.json       which process wrote the run, from when on
      metrics.jsonl            one row per step, counted done from 1
      evaluations.jsonl        one row per evaluation
      evaluations/<name>/step-000200.jsonl    its samples
      rollouts/step-000200.jsonl              what an on-policy step was trained on
      checkpoints/step-000200/                the files of a checkpoint, manifest.json last
      cache/                   results that must not be computed twice
      report.md, report/*.png
      result.json              how the run ended; there once it did

A checkpoint exists when its manifest does; a folder without one is a save that never ended, which
readers do not see, the next save of that step writes over, and `collect_orphans` removes. JSON here
is strict: NaN and the infinities become null. Nothing is pickled: a file of another kind than
`KINDS_KEPT` is refused.

Who writes a run holds its lease (`take_lease`); without one a `RunStore` only reads. All methods
block (callers use `asyncio.to_thread`) and may be called from several threads. Errors are those of
`objects` and `checkpoints`, and `LeaseLost`.
"""

from __future__ import annotations

import difflib
import json
import platform
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any, Literal, Protocol

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from backends.errors import Problem, UserError
from backends.storage.checkpoints import (
    KINDS_KEPT,
    Best,
    CheckpointManifest,
    Checkpoints,
    Retention,
    best_step,
    step_name,
    steps_with_manifest,
)
from backends.storage.documents import (
    as_mapping,
    encode_document,
    encode_row,
    read_json,
    timestamp,
)
from backends.storage.lease import Lease
from backends.storage.objects import AlreadyExists, NotFound, ObjectStore, StoreError, open_store
from backends.storage.tables import Table

PACKAGES_RECORDED = (
    "tinker",
    "torch",
    "transformers",
    "peft",
    "trl",
    "accelerate",
    "safetensors",
    "numpy",
    "prefect",
    "pydantic",
    "fsspec",
    "s3fs",
)

DELETES_AT_ONCE = 8

PLAIN_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}"

RunStatus = Literal["completed", "failed", "cancelled", "unfinished"]


class Evaluation(Protocol):
    """What is kept of an evaluation; samples are mappings or dataclasses."""

    @property
    def name(self) -> str:
        """Which evaluation of the experiment."""
        ...

    @property
    def step(self) -> int:
        """Steps done when the weights were scored."""
        ...

    @property
    def score(self) -> float:
        """The mean reward."""
        ...

    @property
    def metrics(self) -> Mapping[str, float]:
        """Everything else that was measured."""
        ...

    @property
    def samples(self) -> Sequence[Any]:
        """Prompt, completion, expected answer and reward of each row."""
        ...


class RunInfo(BaseModel):
    """run.json: where a run comes from. Newer fields of a newer version are passed over."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    version: Literal[1] = 1
    run_id: str
    name: str
    created: str
    backend: str
    seed: int
    data_fingerprint: str | None
    total_steps: int | None
    flow_run_url: str | None
    flowtune: str
    git_commit: str | None
    python: str
    packages: dict[str, str]


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One line of `flowtune runs`; `steps_done` are those a checkpoint holds."""

    run_id: str
    name: str
    status: RunStatus
    steps_done: int
    steps_total: int | None
    score: float | None
    created: str
    uri: str


class RunStore:
    """One run in the store. Making one touches nothing; `begin` or `open_existing` comes first.

    Methods that write raise LeaseLost, before they write, once another process has the lease, and
    ValueError if `take_lease` was never called.
    """

    def __init__(self, store_uri: str | Path, run_id: str) -> None:
        """Raises UserError for a run id that is no plain name, or a store of an unknown kind."""
        if not re.fullmatch(PLAIN_NAME, run_id):
            raise UserError(
                Problem(
                    "run id",
                    f"{run_id!r} cannot name a run",
                    "use letters, digits, '.', '_' and '-', beginning with a letter or digit",
                )
            )
        self.run_id = run_id
        self.objects: ObjectStore = open_store(store_uri)
        self._lease: Lease | None = None
        self._checkpoints = Checkpoints(self.objects, run_id, self._check_lease)
        self._metrics = Table(
            self.objects, self._key("metrics.jsonl"), lambda row: (int(row["step"]), "")
        )
        self._evaluations = Table(
            self.objects,
            self._key("evaluations.jsonl"),
            lambda row: (int(row["step"]), str(row["name"])),
        )

    # -- opening ---------------------------------------------------------------------------------

    def begin(
        self,
        *,
        name: str,
        backend: str,
        seed: int,
        data_fingerprint: str | None = None,
        total_steps: int | None = None,
        flow_run_url: str | None = None,
    ) -> bool:
        """Open the run under its id: True if it is new, False if it was there already.

        Of several processes that begin one id, exactly one gets True.
        """
        info = RunInfo(
            run_id=self.run_id,
            name=name,
            created=timestamp(),
            backend=backend,
            seed=seed,
            data_fingerprint=data_fingerprint,
            total_steps=total_steps,
            flow_run_url=flow_run_url,
            flowtune=_version("flowtune") or "not installed",
            git_commit=_git_commit(),
            python=platform.python_version(),
            packages={p: v for p in PACKAGES_RECORDED if (v := _version(p)) is not None},
        )
        try:
            self.objects.create(self._key("run.json"), encode_document(info.model_dump()))
        except AlreadyExists:
            self.info()
            return False
        return True

    @classmethod
    def open_existing(cls, store_uri: str | Path, run_id: str) -> RunStore:
        """The run of that id. Raises UserError, with the nearest names, if there is none."""
        store = cls(store_uri, run_id)
        if not store.objects.exists(store._key("run.json")):
            near = difflib.get_close_matches(run_id, store.objects.folders(), n=3)
            raise UserError(
                Problem(
                    f"run {run_id}",
                    f"there is no such run in {store.objects.root}",
                    f"did you mean {' or '.join(near)}?" if near else "see `flowtune runs`",
                )
            )
        return store

    def take_lease(self, flow_run_url: str | None = None) -> Lease:
        """Become the one process that writes this run; whoever did so until now is shut out.

        What the run holds may have changed until this moment, so read where to continue after it.
        """
        self._lease = Lease.take(self.objects, self.run_id, flow_run_url)
        self._metrics.forget()
        self._evaluations.forget()
        return self._lease

    def _check_lease(self) -> Lease:
        if self._lease is None:
            raise ValueError(f"run {self.run_id}: take_lease() comes before anything is written")
        self._lease.check()
        return self._lease

    def info(self) -> RunInfo:
        """What `begin` wrote down. Raises UserError if the folder is not a run's."""
        try:
            return RunInfo.model_validate_json(self.objects.read(self._key("run.json")))
        except ValidationError as error:
            raise UserError(
                Problem(
                    f"run {self.run_id}",
                    f"{self.uri('run.json')} is not one this version of flowtune can read",
                    "use another run id or store",
                )
            ) from error

    def uri(self, key: str = "") -> str:
        """Where the run, or an object of it, lies: an absolute path or a URI."""
        return self.objects.uri(self._key(key) if key else self.run_id)

    # -- the experiment, the report, the result --------------------------------------------------

    def write_experiment(self, experiment: Mapping[str, Any]) -> None:
        """Keep the resolved experiment as YAML, in the order of its fields."""
        text = yaml.safe_dump(
            dict(experiment), sort_keys=False, allow_unicode=True, default_flow_style=False
        )
        self._write("experiment.yaml", text.encode())

    def read_experiment(self) -> dict[str, Any] | None:
        """The experiment that was kept, or None."""
        try:
            text = self.objects.read(self._key("experiment.yaml"))
        except NotFound:
            return None
        loaded: dict[str, Any] = yaml.safe_load(text)
        return loaded

    def write_report(self, markdown: str, images: Mapping[str, bytes] | None = None) -> str:
        """Keep the report and its images (`report/<name>.png`); returns where it lies."""
        for name, data in (images or {}).items():
            self._write(f"report/{name.removesuffix('.png')}.png", data)
        self._write("report.md", markdown.encode())
        return self.uri("report.md")

    def write_result(self, result: Mapping[str, Any]) -> str:
        """Keep how the run ended (with its `status`), in place of an earlier end."""
        self._write("result.json", encode_document(result))
        return self.uri("result.json")

    def read_result(self) -> dict[str, Any] | None:
        """How the run ended, or None while it has not."""
        return read_json(self.objects, self._key("result.json"))

    def discard_result(self) -> None:
        """Forget that a run failed or was cancelled, because it goes on."""
        self._check_lease()
        self.objects.delete(self._key("result.json"))

    # -- metrics and evaluations -----------------------------------------------------------------

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        """Add the row of the next step, in memory; `flush_metrics` makes it last.

        Its step comes first, the other columns by name, so that equal rows are equal lines.
        Raises StoreError for a row that repeats or leaves out a step.
        """
        rest = {name: row[name] for name in sorted(row) if name != "step"}
        self._metrics.add_next({"step": row["step"], **rest})

    def flush_metrics(self) -> None:
        """Write all rows as one object, if there are new ones."""
        self._metrics.flush(self._check_lease)

    def metrics(self) -> list[dict[str, Any]]:
        """All rows so far, flushed or not, in the order of steps."""
        return self._metrics.rows()

    def write_evaluation(self, result: Evaluation) -> str:
        """Keep an evaluation, samples first; the same one again takes the place of the first.

        Returns the samples' place.
        """
        samples = f"evaluations/{result.name}/{step_name(result.step)}.jsonl"
        lines = [encode_row(as_mapping(sample)) for sample in result.samples]
        self._write(samples, b"".join(lines))
        row = {
            "step": result.step,
            "name": result.name,
            "score": result.score,
            "metrics": dict(result.metrics),
            "samples": samples,
        }
        self._evaluations.put(row)
        self._evaluations.flush(self._check_lease)
        return self.uri(samples)

    def write_rollouts(self, step: int, rollouts: Sequence[Any]) -> None:
        """Keep the rollouts that a step was trained on, one a line; again: in their place."""
        lines = [encode_row(as_mapping(rollout)) for rollout in rollouts]
        self._write(f"rollouts/{step_name(step)}.jsonl", b"".join(lines))

    def rollouts(self, step: int) -> list[dict[str, Any]]:
        """The rollouts that were kept of a step."""
        data = self.objects.read(self._key(f"rollouts/{step_name(step)}.jsonl"))
        return [json.loads(line) for line in data.splitlines()]

    def rollout_steps(self) -> list[int]:
        """The steps that rollouts were kept of, in their order."""
        keys = self.objects.keys(self._key("rollouts"))
        return sorted(int(PurePosixPath(key).stem.rpartition("-")[2]) for key in keys)

    def evaluations(self) -> list[dict[str, Any]]:
        """All evaluations so far, by step and name."""
        return self._evaluations.rows()

    def rewind(self, step: int) -> None:
        """Before a replay from `step` steps done: forget the rows of later steps.

        The row of step + 1 is then the next that `append_metrics` takes. Evaluations of `step`
        itself stay. Rewind to 0 when a run continues that has no checkpoint.
        """
        self._metrics.keep(lambda identity: identity[0] <= step)
        self._metrics.last = step
        self._evaluations.keep(lambda identity: identity[0] <= step)
        self._metrics.flush(self._check_lease)
        self._evaluations.flush(self._check_lease)

    # -- checkpoints -----------------------------------------------------------------------------

    def save_checkpoint(
        self,
        *,
        step: int,
        state_uri: str | None,
        algorithm_state: Mapping[str, Any],
        folder: Path,
    ) -> CheckpointManifest:
        """Copy the folder's files to the store, then create the manifest that makes them count.

        A save of a step that is kept already, with the same files and state (a replay's), is the
        same save: the first manifest is returned. Raises CheckpointConflict if they differ, and
        StoreError for a kind of file that is not kept (see `KINDS_KEPT`).
        """
        return self._checkpoints.save(
            step=step,
            state_uri=state_uri,
            algorithm_state=algorithm_state,
            metrics=self._metrics.get((step, "")),
            folder=folder,
        )

    def checkpoint_steps(self) -> list[int]:
        """Steps that have a checkpoint, rising; one listing, nothing read."""
        return self._checkpoints.steps()

    def checkpoints(self) -> list[CheckpointManifest]:
        """All checkpoints, by step."""
        return self._checkpoints.all()

    def latest_checkpoint(self) -> CheckpointManifest | None:
        """The checkpoint of the most steps, or None."""
        return self._checkpoints.latest()

    def best_checkpoint(self, best: Best) -> CheckpointManifest | None:
        """The best checkpoint that is kept, as `keep_best` says; None if none is scored."""
        rows = self.evaluations()
        scores = {row["step"]: row["score"] for row in rows if row["name"] == best.metric}
        manifests = self.checkpoints()
        step = best_step(manifests, best, scores)
        return next((manifest for manifest in manifests if manifest.step == step), None)

    def checkpoint_uri(self, manifest: CheckpointManifest) -> str:
        """Where the checkpoint's files lie."""
        return self.objects.uri(self._checkpoints.key(manifest.step))

    def fetch_checkpoint(self, manifest: CheckpointManifest, folder: Path) -> None:
        """Copy the checkpoint's files into a folder and verify them.

        Raises DamagedCheckpoint, naming the file that is missing or not what the manifest says.
        """
        self._checkpoints.fetch(manifest, folder)

    def checkpoint_folder(self, manifest: CheckpointManifest) -> Path | None:
        """The checkpoint's verified files in place, for reading only; None if they lie elsewhere.

        Raises DamagedCheckpoint as `fetch_checkpoint` does.
        """
        return self._checkpoints.folder(manifest)

    def expire(self, keep: Retention) -> list[CheckpointManifest]:
        """Remove the checkpoints that need not be kept, manifest first; returns what they were.

        The newest, from which the run continues, always stays. `keep_best` names an evaluation of
        this run or else a column of its metrics; while no checkpoint has that, all of them stay.
        """
        self._check_lease()
        metric = keep.keep_best.metric if keep.keep_best is not None else None
        scores = {row["step"]: row["score"] for row in self.evaluations() if row["name"] == metric}
        return self._checkpoints.expire(keep, scores)

    def collect_orphans(self) -> list[int]:
        """Remove what died half-way before this lease was taken; returns the steps of the saves.

        Those are folders of checkpoints without a manifest, and uploads that never ended. What is
        newer than the lease, by the store's own clock, may still be on its way and stays.
        """
        lease = self._check_lease()
        started = self.objects.modified(lease.key)[lease.key]
        return self._checkpoints.collect_orphans(started)

    # -- results that must not be computed twice -------------------------------------------------

    def kept(self, name: str) -> bytes | None:
        """What was kept under that name, or None."""
        try:
            return self.objects.read(self._key(_cache_name(name)))
        except NotFound:
            return None

    def keep(self, name: str, data: bytes) -> None:
        """Keep a result under a plain name, such as `build_batch-<sha256>.safetensors`."""
        self._write(_cache_name(name), data)

    def kept_names(self) -> list[str]:
        """The names of everything that was kept; one listing."""
        return [PurePosixPath(key).name for key in self.objects.keys(self._key("cache"))]

    def forget(self, names: Iterable[str]) -> None:
        """Remove kept results that nobody will ask for again; what is not there is no error."""
        keys = [self._key(_cache_name(name)) for name in names]
        if not keys:
            return
        self._check_lease()
        with ThreadPoolExecutor(max_workers=DELETES_AT_ONCE) as pool:
            list(pool.map(self.objects.delete, keys))

    def _write(self, name: str, data: bytes) -> None:
        self.objects.write(self._key(name), data, self._check_lease)

    def _key(self, name: str) -> str:
        return f"{self.run_id}/{name}"


def _cache_name(name: str) -> str:
    if not re.fullmatch(PLAIN_NAME, name) or PurePosixPath(name).suffix not in KINDS_KEPT:
        raise ValueError(
            f"{name!r} cannot name a kept result: a plain name with one of the endings "
            f"{', '.join(sorted(KINDS_KEPT))} can"
        )
    return f"cache/{name}"


# -- all runs of a store -----------------------------------------------------------------------


def list_runs(store_uri: str | Path) -> list[RunSummary]:
    """The runs in a store, oldest first, from one listing and at most three small objects each.

    What is not a run, or only half of one, is passed over. Raises UserError if the store cannot
    be read; a store that is not there yet has no runs.
    """
    objects = open_store(store_uri)
    with ThreadPoolExecutor(max_workers=16) as pool:
        summaries = pool.map(lambda name: _summarize(objects, name), objects.folders())
        runs = [summary for summary in summaries if summary is not None]
    return sorted(runs, key=lambda run: (run.created, run.run_id))


def _summarize(objects: ObjectStore, run_id: str) -> RunSummary | None:
    try:
        info = RunInfo.model_validate_json(objects.read(f"{run_id}/run.json"))
    except (StoreError, UserError, ValueError):  # a pydantic error is a ValueError
        return None
    keys = [key.removeprefix(f"{run_id}/") for key in objects.keys(run_id)]
    result = read_json(objects, f"{run_id}/result.json") if "result.json" in keys else None
    statuses: dict[Any, RunStatus] = {
        "completed": "completed",
        "failed": "failed",
        "cancelled": "cancelled",
    }
    return RunSummary(
        run_id=run_id,
        name=info.name,
        status=statuses.get((result or {}).get("status"), "unfinished"),
        steps_done=max(steps_with_manifest(keys), default=0),
        steps_total=info.total_steps,
        score=_last_score(objects, run_id) if "evaluations.jsonl" in keys else None,
        created=info.created,
        uri=objects.uri(run_id),
    )


def _last_score(objects: ObjectStore, run_id: str) -> float | None:
    try:
        lines = objects.read(f"{run_id}/evaluations.jsonl").splitlines()
        score = json.loads(lines[-1])["score"]
        return None if score is None else float(score)
    except (NotFound, ValueError, TypeError, KeyError, IndexError):
        return None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    """The commit flowtune's own checkout is at, `-dirty` if changed; None if it is installed."""
    checkout = Path(__file__).resolve().parents[2]
    if not (checkout / ".git").exists():
        return None
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
