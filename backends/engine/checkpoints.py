"""The engine's checkpoints: folders below its store, found by their manifests.

    <store>/<model id, ':' as '_'>/weights/<name>/            what training goes on from
    <store>/<model id, ':' as '_'>/sampler_weights/<name>/    an adapter to sample from
    <store>/<model id, ':' as '_'>/external_weights/<name>/   an adapter to download
        adapter_model.safetensors  adapter_config.json  …  manifest.json  [flags.json]

`manifest.json` comes last, is created exclusively, and holds size and sha256 of every other file:
without it there is no checkpoint. It never changes. What may change later, whether the checkpoint
is public and when it expires, is in `flags.json`, which is replaced as a whole; readers see both as
one `Manifest`. The URI is `tinker://<model id>/weights/<name>`. A process beside the engine can put
a folder there itself and make it a checkpoint with `publish`; `import_folder` does both.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from backends.errors import Problem, UserError
from backends.storage.objects import AlreadyExists, NotFound, ObjectStore, open_store

Kind = Literal["weights", "sampler_weights", "external_weights"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
MANIFEST: Final = "manifest.json"
FLAGS: Final = "flags.json"
IMPORTED: Final = "imported"
"""The model id under which folders of other processes are published."""

log = logging.getLogger("flowtune.engine")

D = TypeVar("D", bound=BaseModel)

_MODEL_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,254}")
_ADAPTER_CONFIG = "adapter_config.json"
_FORBIDDEN = re.compile(r"[\x00-\x1f\x7f/\\*?\[\]]")
"""What a name may not hold: path separators, control characters, and what stores take as globs."""


@dataclass(frozen=True, slots=True)
class CheckpointUri:
    """Where a checkpoint is: `tinker://<model_id>/<kind>/<name>`."""

    model_id: str
    kind: Kind
    name: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises UserError for anything that is not such a URI."""
        parts = text.removeprefix("tinker://").split("/")
        shaped = text.startswith("tinker://") and len(parts) == 3
        for kind in KINDS:
            if shaped and parts[1] == kind and _MODEL_ID.fullmatch(parts[0]):
                return cls(parts[0], kind, checked_name(parts[2]))
        raise UserError(
            Problem(
                "path",
                f"{text[:300]!r} is not the URI of a checkpoint",
                f"write tinker://<model>/<kind>/<name>; a kind is {', '.join(KINDS)}",
            )
        )

    @property
    def prefix(self) -> str:
        """The folder below the store."""
        return f"{self.model_id.replace(':', '_')}/{self.kind}/{self.name}"

    def __str__(self) -> str:
        return f"tinker://{self.model_id}/{self.kind}/{self.name}"


def checked_name(name: str) -> str:
    """The name itself. Raises UserError unless it is one path segment of at most 255 characters."""
    bad = _FORBIDDEN.search(name)
    problem = None
    if not name or name in (".", "..") or name.startswith(".tmp-"):
        problem = f"{name!r} is no name"
    elif bad:
        problem = f"{name[:100]!r} holds {bad[0]!r}"
    elif len(name.encode(errors="replace")) > 255:
        problem = f"the name has {len(name)} characters"
    elif not name.isprintable() or name != name.strip():
        problem = f"{name[:100]!r} holds characters that are not printed, or ends in a space"
    if problem:
        raise UserError(
            Problem("path", problem, "take one path segment of at most 255 letters, digits, - _ .")
        )
    return name


class FileEntry(BaseModel):
    """One file of a checkpoint."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    size: int
    sha256: str


class Manifest(BaseModel):
    """What makes a folder a checkpoint."""

    model_config = ConfigDict(extra="ignore", frozen=True, protected_namespaces=())

    format: Literal[1] = 1
    model_id: str
    kind: Kind
    name: str
    created: datetime
    expires: datetime | None = None
    public: bool = False
    base_model: str | None = None
    lora_rank: int | None = None
    train_attn: bool | None = None
    train_mlp: bool | None = None
    train_unembed: bool | None = None
    user_metadata: dict[str, Any] = {}
    copied_from: str | None = None
    files: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")], FileEntry]

    @property
    def uri(self) -> CheckpointUri:
        """Where it is."""
        return CheckpointUri(self.model_id, self.kind, self.name)

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.files.values())

    @property
    def expired(self) -> bool:
        """Whether its time is over; it counts as gone then."""
        return self.expires is not None and self.expires <= datetime.now(UTC)


class Flags(BaseModel):
    """What may change of a checkpoint, in place of what its manifest says."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    of: datetime
    """When the checkpoint was created: flags of an earlier one of the same name do not count."""
    public: bool
    expires: datetime | None


def publish(folder: Path, **about: Any) -> Manifest:
    """Make a local folder `…/<model>/<kind>/<name>` a checkpoint: write its manifest, last.

    `about` sets fields of the manifest beside model, kind, name and files. Raises UserError if the
    folder has a manifest, holds no adapter, or does not lie in a place of that form.
    """
    uri = CheckpointUri.parse("tinker://" + "/".join(folder.absolute().parts[-3:]))
    manifest = describe(folder, uri, **about)
    store = open_store(folder)
    try:
        store.create(MANIFEST, manifest.model_dump_json(indent=2).encode())
    except AlreadyExists:
        raise _exists(uri) from None
    return manifest


def import_folder(store: Path, name: str, source: Path) -> str:
    """Copy a checkpoint's files into an engine's local store; returns the URI they load by.

    A manifest in the source, and folders below it, are left out.
    """
    uri = CheckpointUri(IMPORTED, "weights", checked_name(name))
    folder = store / uri.prefix
    if (folder / MANIFEST).exists():
        raise _exists(uri)
    folder.mkdir(parents=True, exist_ok=True)
    for file in _files_of(source):
        shutil.copyfile(file, folder / file.name)
    publish(folder)
    return str(uri)


def describe(
    folder: Path, uri: CheckpointUri, *, ttl_seconds: int | None = None, **about: Any
) -> Manifest:
    """The manifest of the files in a folder, which are synced to disk first."""
    entries = {file.name: _entry(file) for file in _files_of(folder)}
    if _ADAPTER_CONFIG not in entries:
        raise UserError(
            Problem(str(folder), f"holds no {_ADAPTER_CONFIG}", "name the folder of an adapter")
        )
    adapter = json.loads((folder / _ADAPTER_CONFIG).read_text())
    now = datetime.now(UTC)
    known = {
        "base_model": adapter.get("base_model_name_or_path"),
        "lora_rank": adapter.get("r"),
        "expires": now + timedelta(seconds=ttl_seconds) if ttl_seconds is not None else None,
    }
    place = {"model_id": uri.model_id, "kind": uri.kind, "name": uri.name, "created": now}
    return Manifest(**(place | known | about), files=entries)


class CheckpointStore:
    """An engine's checkpoints, in a folder or behind fsspec. Every method may block.

    Backends work on local folders: where the store is one, on the checkpoint's own, else on a copy
    in `scratch`, which lasts as long as this object.
    """

    def __init__(self, where: str) -> None:
        self._store = open_store(where)
        self._scratch = tempfile.TemporaryDirectory(prefix="flowtune-engine-")
        self._fetching = threading.Lock()
        self._changing = threading.Lock()
        """Held by whoever removes a checkpoint or changes its flags."""

    @property
    def root(self) -> str:
        """Where it lies, for people."""
        return self._store.root

    def check_writable(self) -> None:
        """Raises UserError if checkpoints cannot be written."""
        self._store.check_writable()

    def close(self) -> None:
        """Remove the local copies."""
        self._scratch.cleanup()

    def begin(self, uri: CheckpointUri, *, overwrite: bool = False) -> Path:
        """An empty local folder to write a checkpoint's files into.

        Raises UserError if the name is taken. With `overwrite` the old checkpoint is gone from
        here on; what a writer left that died before its manifest is gone as well.
        """
        with self._changing:
            if self.find(uri) is not None and not overwrite:
                raise _exists(uri)
            self._remove(uri)
            folder = self._local(uri)
            folder.mkdir(parents=True)
            return folder

    def publish(self, uri: CheckpointUri, folder: Path, **about: Any) -> Manifest:
        """Make what was written into `begin`'s folder a checkpoint. Raises UserError if taken."""
        manifest = describe(folder, uri, **about)
        if self._store.local_path(uri.prefix) is None:
            self._store.upload(list(manifest.files), folder, uri.prefix)
        document = manifest.model_dump_json(indent=2).encode()
        key = f"{uri.prefix}/{MANIFEST}"
        try:
            self._store.create(key, document)
        except AlreadyExists:
            if self._store.read(key) != document:  # else ours, and only the store's answer was lost
                raise _exists(uri) from None
        return manifest

    def copy(self, source: CheckpointUri, target: CheckpointUri, ttl_seconds: int | None) -> None:
        """Copy a checkpoint's files under another name; nothing to do if that was done before.

        Raises UserError if the source is not there or damaged, or the target is something else.
        """
        there = self.find(target)
        if there is not None and there.copied_from == str(source):
            return
        folder, manifest = self.fetch(source)
        copy = self.begin(target)
        for name in manifest.files:
            shutil.copyfile(folder / name, copy / name)
        kept = {"base_model", "lora_rank", "train_attn", "train_mlp", "train_unembed"}
        about = manifest.model_dump(include=kept | {"user_metadata"})
        self.publish(target, copy, ttl_seconds=ttl_seconds, copied_from=str(source), **about)

    def find(self, uri: CheckpointUri) -> Manifest | None:
        """The checkpoint's manifest, if there is one and its time is not over."""
        manifest = self._read(uri.prefix)
        if manifest is None or manifest.model_id != uri.model_id or manifest.expired:
            return None
        return manifest

    def manifest(self, uri: CheckpointUri) -> Manifest:
        """The same; raises UserError if there is no such checkpoint."""
        manifest = self.find(uri)
        if manifest is None:
            raise UserError(
                Problem(
                    "path",
                    f"there is no checkpoint {uri}",
                    f"it may have expired or been deleted; the store is {self.root}",
                )
            )
        return manifest

    def set_flags(self, uri: CheckpointUri, **changes: Any) -> Manifest | None:
        """Change `public` or `expires`; the manifest as it is then, None if there is none."""
        with self._changing:
            manifest = self.find(uri)
            if manifest is None:
                return None
            changed = manifest.model_copy(update=changes)
            flags = Flags(of=changed.created, public=changed.public, expires=changed.expires)
            self._store.write(f"{uri.prefix}/{FLAGS}", flags.model_dump_json(indent=2).encode())
            return changed

    def fetch(self, uri: CheckpointUri) -> tuple[Path, Manifest]:
        """A local folder with the checkpoint's files, checked against the manifest.

        Raises UserError if it is not there or damaged.
        """
        manifest = self.manifest(uri)
        folder = self._local(uri)
        with self._fetching:
            if self._store.local_path(uri.prefix) is None and not _whole(folder, manifest):
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
                with suppress(NotFound):
                    self._store.download(list(manifest.files), uri.prefix, folder)
            if not _whole(folder, manifest):
                raise UserError(
                    Problem("path", f"{uri} is damaged", "load an earlier checkpoint instead")
                )
        return folder, manifest

    def manifests(self, model_id: str | None = None) -> list[Manifest]:
        """Every checkpoint, or every one of a model, oldest first."""
        if model_id is not None and not _MODEL_ID.fullmatch(model_id):
            return []
        prefix = model_id.replace(":", "_") if model_id is not None else ""
        alive = (manifest for manifest in self._all(prefix) if not manifest.expired)
        return sorted(alive, key=lambda manifest: manifest.created)

    def delete(self, uri: CheckpointUri) -> None:
        """Remove a checkpoint, its manifest first."""
        with self._changing:
            self._remove(uri)

    def sweep(self) -> datetime | None:
        """Remove the checkpoints whose time is over; returns when the next one's will be."""
        coming = []
        for manifest in self._all():
            if not manifest.expired:
                coming += [manifest.expires] if manifest.expires else []
                continue
            with self._changing:
                now = self._read(manifest.uri.prefix)
                if now is not None and now.expired:
                    self._remove(manifest.uri)
        return min(coming, default=None)

    def _all(self, prefix: str = "") -> list[Manifest]:
        """Every manifest below the prefix, of expired checkpoints too."""
        keys = set(self._store.keys(prefix))
        found = []
        for key in sorted(keys):
            folder, _, name = key.rpartition("/")
            if name != MANIFEST or folder.count("/") != 2:
                continue
            try:
                manifest = self._read(folder, flagged=f"{folder}/{FLAGS}" in keys)
            except UserError as error:
                log.error("%s", error)  # one damaged checkpoint does not hide the others
                continue
            found += [manifest] if manifest is not None else []
        return found

    def _read(self, prefix: str, *, flagged: bool = True) -> Manifest | None:
        """The manifest in a folder, with its flags unless it is known to have none."""
        manifest = _read_document(self._store, f"{prefix}/{MANIFEST}", Manifest)
        if manifest is None:
            return None
        if manifest.uri.prefix != prefix:
            where = self._store.uri(f"{prefix}/{MANIFEST}")
            raise UserError(Problem(where, f"is that of {manifest.uri}", "remove its folder"))
        flags = _read_document(self._store, f"{prefix}/{FLAGS}", Flags) if flagged else None
        if flags is None or flags.of != manifest.created:
            return manifest
        return manifest.model_copy(update={"public": flags.public, "expires": flags.expires})

    def _remove(self, uri: CheckpointUri) -> None:
        self._store.delete(f"{uri.prefix}/{MANIFEST}")
        self._store.delete(uri.prefix)
        shutil.rmtree(self._local(uri), ignore_errors=True)

    def _local(self, uri: CheckpointUri) -> Path:
        return self._store.local_path(uri.prefix) or Path(self._scratch.name, uri.prefix)


def _exists(uri: CheckpointUri) -> UserError:
    return UserError(
        Problem("path", f"there is a checkpoint {uri} already", "take another name, or overwrite")
    )


def _read_document(store: ObjectStore, key: str, kind: type[D]) -> D | None:
    try:
        return kind.model_validate_json(store.read(key))
    except NotFound:
        return None
    except ValidationError as error:
        reason = str(error.errors(include_url=False)[0]["msg"])
        raise UserError(
            Problem(
                store.uri(key),
                f"is no {Path(key).stem} of a checkpoint: {reason}",
                "remove its folder",
            )
        ) from error


def _files_of(folder: Path) -> Iterator[Path]:
    for file in sorted(folder.iterdir()):
        if file.is_file() and file.name not in (MANIFEST, FLAGS) and not file.name.startswith("."):
            yield file


def _entry(file: Path) -> FileEntry:
    """Size and hash of a file that has been brought to disk."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
        return FileEntry(size=opened.tell(), sha256=digest)


def _whole(folder: Path, manifest: Manifest) -> bool:
    """Whether every file is there as the manifest has it."""
    for name, entry in manifest.files.items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != entry.size:
            return False
    for name, entry in manifest.files.items():
        with (folder / name).open("rb") as opened:
            if hashlib.file_digest(opened, "sha256").hexdigest() != entry.sha256:
                return False
    return True
