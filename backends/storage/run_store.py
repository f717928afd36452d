"""A run's place in the object store: what is kept, under which names, and in which order.

    <store>/<run_id>/
      run.json                 who, when, with which code and data; never changed
      experiment.yaml          as resolved, defaults filled in; can be run again
      metrics.jsonl            one row per step, counted done from 1
      evaluations.jsonl        one row per evaluation
      evaluations/<name>/step-000200.jsonl    its samples
      checkpoints/step-000200/                the files of a checkpoint, manifest.json last
      report.md, report/*.png
      result.json              how the run ended; there once it did

A checkpoint exists when its manifest does; a folder without one is a save that never ended, which
readers do not see and the next save of that step writes over. JSON here is strict: NaN and the
infinities become null. Nothing is pickled: a file of another kind than `KINDS_KEPT` is refused.

All methods block (callers use `asyncio.to_thread`) and may be called from several threads. Errors
are those of `objects`, and:

    StoreError
    ├── CheckpointConflict   a save of a step that is kept already with other contents
    └── DamagedCheckpoint    a file of a checkpoint is missing or not what its manifest says
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import numbers
import platform
import re
import subprocess
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, is_dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any, Literal, Protocol

import yaml
from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from backends.errors import Problem, UserError
from backends.storage.objects import AlreadyExists, NotFound, ObjectStore, StoreError, open_store

KINDS_KEPT = frozenset(
    {".safetensors", ".json", ".jsonl", ".md", ".txt", ".png", ".yaml", ".jinja"}
)
"""Kinds of files a checkpoint may hold: data that can be read without running anything."""

PACKAGES_RECORDED = (
    "tinker",
    "torch",
    "transformers",
    "peft",
    "safetensors",
    "numpy",
    "prefect",
    "pydantic",
    "fsspec",
    "s3fs",
)

MANIFEST = "manifest.json"

RunStatus = Literal["completed", "failed", "cancelled", "unfinished"]


class CheckpointConflict(StoreError):
    """A checkpoint of that step is kept already, and it is another one."""


class DamagedCheckpoint(StoreError):
    """A file of a checkpoint is missing or differs from its manifest."""


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
    """One run in the store. Making one touches nothing; `begin` or `open_existing` comes first."""

    def __init__(self, store_uri: str | Path, run_id: str) -> None:
        """Raises UserError for a run id that is no plain name, or a store of an unknown kind."""
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}", run_id):
            raise UserError(
                Problem(
                    "run id",
                    f"{run_id!r} cannot name a run",
                    "use letters, digits, '.', '_' and '-', beginning with a letter or digit",
                )
            )
        self.run_id = run_id
        self.objects: ObjectStore = open_store(store_uri)
        self._metrics = _Table(
            self.objects, self._key("metrics.jsonl"), lambda row: (int(row["step"]), "")
        )
        self._evaluations = _Table(
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
            created=_now(),
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
            self.objects.create(self._key("run.json"), _document(info.model_dump()))
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
        self.objects.write(self._key("experiment.yaml"), text.encode())

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
            self.objects.write(self._key(f"report/{name.removesuffix('.png')}.png"), data)
        self.objects.write(self._key("report.md"), markdown.encode())
        return self.uri("report.md")

    def write_result(self, result: Mapping[str, Any]) -> str:
        """Keep how the run ended (with its `status`), in place of an earlier end."""
        self.objects.write(self._key("result.json"), _document(result))
        return self.uri("result.json")

    def read_result(self) -> dict[str, Any] | None:
        """How the run ended, or None while it has not."""
        return _read_json(self.objects, self._key("result.json"))

    def discard_result(self) -> None:
        """Forget that a run failed or was cancelled, because it goes on."""
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
        self._metrics.flush()

    def metrics(self) -> list[dict[str, Any]]:
        """All rows so far, flushed or not, in the order of steps."""
        return self._metrics.rows()

    def write_evaluation(self, result: Evaluation) -> str:
        """Keep an evaluation, samples first; the same one again takes the place of the first.

        Returns the samples' place.
        """
        samples = f"evaluations/{result.name}/{_step_name(result.step)}.jsonl"
        lines = [_line(_mapping(sample)) for sample in result.samples]
        self.objects.write(self._key(samples), b"".join(lines))
        row = {
            "step": result.step,
            "name": result.name,
            "score": result.score,
            "metrics": dict(result.metrics),
            "samples": samples,
        }
        self._evaluations.put(row)
        self._evaluations.flush()
        return self.uri(samples)

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
        self._metrics.flush()
        self._evaluations.flush()

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
        files = _describe_files(folder)
        row = self._metrics.get((step, ""))
        manifest = CheckpointManifest(
            run_id=self.run_id,
            step=step,
            next_step=step,
            created=_now(),
            state_uri=state_uri,
            algorithm_state=_plain(algorithm_state),
            metrics=row,
            files=files,
        )
        prefix = self._checkpoint_key(step)
        if (kept := self._read_manifest(step)) is not None:
            self._check_same_save(kept, manifest)
        self.objects.upload([file.path for file in files], folder, prefix)
        if kept is not None:
            return kept  # its files were written again all the same: one may have been damaged
        try:
            self.objects.create(f"{prefix}/{MANIFEST}", _document(manifest.model_dump()))
        except AlreadyExists:  # another writer's, or our own whose answer was lost
            if (kept := self._read_manifest(step)) is not None:
                self._check_same_save(kept, manifest)
                return kept
            raise
        return manifest

    def checkpoint_steps(self) -> list[int]:
        """Steps that have a checkpoint, rising; one listing, nothing read."""
        keys = self.objects.keys(self._key("checkpoints"))
        return _steps_with_manifest(key.removeprefix(f"{self.run_id}/") for key in keys)

    def checkpoints(self) -> list[CheckpointManifest]:
        """All checkpoints, by step."""
        manifests = (self._read_manifest(step) for step in self.checkpoint_steps())
        return [manifest for manifest in manifests if manifest is not None]

    def latest_checkpoint(self) -> CheckpointManifest | None:
        """The checkpoint of the most steps, or None."""
        for step in reversed(self.checkpoint_steps()):
            if (manifest := self._read_manifest(step)) is not None:
                return manifest
        return None

    def checkpoint_uri(self, manifest: CheckpointManifest) -> str:
        """Where the checkpoint's files lie."""
        return self.objects.uri(self._checkpoint_key(manifest.step))

    def fetch_checkpoint(self, manifest: CheckpointManifest, folder: Path) -> None:
        """Copy the checkpoint's files into a folder and verify them.

        Raises DamagedCheckpoint, naming the file that is missing or not what the manifest says.
        """
        prefix = self._checkpoint_key(manifest.step)
        try:
            self.objects.download([file.path for file in manifest.files], prefix, folder)
        except NotFound as error:
            raise DamagedCheckpoint(f"checkpoint {prefix} has lost a file: {error}") from error
        self._verify(manifest, folder)

    def checkpoint_folder(self, manifest: CheckpointManifest) -> Path | None:
        """The checkpoint's verified files in place, for reading only; None if they lie elsewhere.

        Raises DamagedCheckpoint as `fetch_checkpoint` does.
        """
        folder = self.objects.local_path(self._checkpoint_key(manifest.step))
        if folder is not None:
            self._verify(manifest, folder)
        return folder

    def _check_same_save(self, kept: CheckpointManifest, again: CheckpointManifest) -> None:
        before = {file.path: file for file in kept.files}
        now = {file.path: file for file in again.files}
        differing = sorted(path for path in before | now if before.get(path) != now.get(path)) + [
            "the algorithm's state"
        ] * (kept.algorithm_state != again.algorithm_state)
        if differing:
            raise CheckpointConflict(
                f"{self.checkpoint_uri(kept)} is kept already (saved {kept.created}) and this save "
                f"of step {kept.step} differs in {', '.join(differing)}. A replay must give the "
                "same bits: continue on the machine and versions the run began with, delete that "
                "checkpoint, or take another run id"
            )

    def _verify(self, manifest: CheckpointManifest, folder: Path) -> None:
        for file in manifest.files:
            path = folder / file.path
            address = self.objects.uri(f"{self._checkpoint_key(manifest.step)}/{file.path}")
            if not path.is_file():
                raise DamagedCheckpoint(f"{address} is missing")
            if path.stat().st_size != file.size:
                raise DamagedCheckpoint(
                    f"{address} has {path.stat().st_size} bytes, its manifest says {file.size}"
                )
            if _sha256(path) != file.sha256:
                raise DamagedCheckpoint(f"{address} is not what was saved: its sha256 differs")

    def _read_manifest(self, step: int) -> CheckpointManifest | None:
        key = f"{self._checkpoint_key(step)}/{MANIFEST}"
        try:
            return CheckpointManifest.model_validate_json(self.objects.read(key))
        except NotFound:
            return None
        except ValidationError as error:
            raise DamagedCheckpoint(
                f"{self.objects.uri(key)} is not a manifest this version of flowtune can read: "
                f"{error.errors()[0]['msg']}"
            ) from error

    def _key(self, name: str) -> str:
        return f"{self.run_id}/{name}"

    def _checkpoint_key(self, step: int) -> str:
        return self._key(f"checkpoints/{_step_name(step)}")


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
    result = _read_json(objects, f"{run_id}/result.json") if "result.json" in keys else None
    statuses: dict[Any, RunStatus] = {
        "completed": "completed",
        "failed": "failed",
        "cancelled": "cancelled",
    }
    return RunSummary(
        run_id=run_id,
        name=info.name,
        status=statuses.get((result or {}).get("status"), "unfinished"),
        steps_done=max(_steps_with_manifest(keys), default=0),
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


# -- tables ------------------------------------------------------------------------------------

Identity = tuple[int, str]
"""A step, and what else tells a row from the others of that step."""


class _Table:
    """A JSON-lines object kept in memory: read when first needed, written whole, sorted.

    Rows are held as encoded lines, so that a flush of many thousands only joins them.
    """

    def __init__(
        self,
        objects: ObjectStore,
        key: str,
        identify: Callable[[Mapping[str, Any]], Identity],
    ) -> None:
        self._objects = objects
        self._key = key
        self._identify = identify
        self._lines: dict[Identity, bytes] | None = None
        self._changed = False
        self._memory = threading.RLock()
        self._writing = threading.Lock()
        self.last: int | None = None

    def put(self, row: Mapping[str, Any]) -> None:
        """Add a row, or put it in the place of the one it repeats."""
        with self._memory:
            self._loaded()[self._identify(row)] = _line(row)
            self._changed = True

    def add_next(self, row: Mapping[str, Any]) -> None:
        """Add the row of the step after the last. Raises StoreError for any other."""
        with self._memory:
            if self.last is None:
                self.last = max((step for step, _ in self._loaded()), default=0)
            if row["step"] != self.last + 1:
                raise StoreError(
                    f"{self._objects.uri(self._key)}: a row of step {row['step']} cannot follow "
                    f"that of step {self.last}"
                )
            self.put(row)
            self.last += 1

    def get(self, identity: Identity) -> dict[str, Any] | None:
        """The row of that identity, or None."""
        with self._memory:
            line = self._loaded().get(identity)
        return json.loads(line) if line is not None else None

    def rows(self) -> list[dict[str, Any]]:
        """All rows, sorted."""
        with self._memory:
            lines = self._loaded()
            return [json.loads(lines[identity]) for identity in sorted(lines)]

    def keep(self, wanted: Callable[[Identity], bool]) -> None:
        """Drop the rows that are not wanted."""
        with self._memory:
            lines = self._loaded()
            self._lines = {identity: line for identity, line in lines.items() if wanted(identity)}
            self._changed |= len(self._lines) < len(lines)

    def flush(self) -> None:
        """Write the object if anything changed. A failed write is tried again at the next flush."""
        with self._writing:
            with self._memory:
                if not self._changed:
                    return
                lines = self._loaded()
                data = b"".join(lines[identity] for identity in sorted(lines))
                self._changed = False
            try:
                self._objects.write(self._key, data)
            except BaseException:
                with self._memory:
                    self._changed = True
                raise

    def _loaded(self) -> dict[Identity, bytes]:
        if self._lines is None:
            self._lines = {}
            try:
                data = self._objects.read(self._key)
            except NotFound:
                data = b""
            for number, line in enumerate(data.splitlines(keepends=True), 1):
                try:
                    self._lines[self._identify(json.loads(line))] = line
                except (ValueError, KeyError, TypeError) as error:
                    self._lines = None
                    address = self._objects.uri(self._key)
                    raise StoreError(f"{address}, line {number}: not a row ({error})") from error
        return self._lines


# -- names, JSON, hashes -----------------------------------------------------------------------


def _step_name(step: int) -> str:
    return f"step-{step:06d}"


def _steps_with_manifest(keys: Iterable[str]) -> list[int]:
    """The steps of all manifests among the keys (relative to the run)."""
    found = (re.fullmatch(rf"checkpoints/step-(\d+)/{MANIFEST}", key) for key in keys)
    return sorted(int(match[1]) for match in found if match)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _plain(value: Any) -> Any:
    """The value as strict JSON has it: NaN and infinities as None, numpy's numbers as Python's."""
    match value:
        case None | bool() | str():
            return value
        case Mapping():
            return {str(key): _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case Path():
            return str(value)
        case numbers.Integral():
            return int(value)
        case numbers.Real():
            return float(value) if math.isfinite(value) else None
        case _:
            raise TypeError(f"a {type(value).__name__} cannot be kept as JSON: {value!r:.100}")


def _document(value: Mapping[str, Any]) -> bytes:
    """A JSON object as people read it; keys stay in the order they were given."""
    return _encoded(json.dumps(_plain(value), indent=2, ensure_ascii=False, allow_nan=False))


def _line(row: Mapping[str, Any]) -> bytes:
    """A row of JSON lines; keys stay in the order they were given."""
    return _encoded(json.dumps(_plain(row), ensure_ascii=False, allow_nan=False))


def _encoded(text: str) -> bytes:
    try:
        return f"{text}\n".encode()
    except UnicodeEncodeError:  # half a surrogate pair, which only JSON's escapes can hold
        return f"{json.dumps(json.loads(text))}\n".encode()


def _mapping(sample: Any) -> Mapping[str, Any]:
    return asdict(sample) if is_dataclass(sample) and not isinstance(sample, type) else sample


def _read_json(objects: ObjectStore, key: str) -> dict[str, Any] | None:
    """A JSON object; None if it is not there or someone broke it."""
    try:
        loaded = json.loads(objects.read(key))
    except (NotFound, ValueError):
        return None
    return loaded if isinstance(loaded, dict) else None


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
