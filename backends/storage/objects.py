"""Whole objects under one prefix: in a folder, in an S3 bucket, or in memory.

The one place that knows where bytes lie. Everything above it relies on four promises:

- an object is there whole or not at all, for every reader, whenever a writer dies;
- of two writers that `create` the same key, exactly one succeeds;
- what is read is what was written last: nothing is cached here;
- errors say what the user has to mend (`UserError`), what may pass by itself (`TransientError`),
  or what the caller asked wrongly (`StoreError` below).

    StoreError(FlowtuneError)
    ├── NotFound         no object under that key
    └── AlreadyExists    `create` came second

All calls block and may come from any thread. fsspec and s3fs are imported when a store that needs
them is opened.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import tempfile
import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from backends.errors import FlowtuneError, Problem, UserError

TEMPORARY = ".tmp-"
"""How names of unfinished local files begin; no reader sees them."""


class StoreError(FlowtuneError):
    """A request that the store cannot do as asked."""


class NotFound(StoreError):
    """There is no object under that key."""


class AlreadyExists(StoreError):
    """An object that was to be created is there already."""


def open_store(uri: str | Path) -> ObjectStore:
    """The store behind a folder's path, `file://…`, `s3://bucket/prefix` or `memory://prefix`.

    Nothing is touched or contacted yet. Raises UserError for any other scheme or an empty bucket.
    """
    text = str(uri)
    scheme, separator, rest = text.partition("://")
    if not separator or scheme == "file":
        return FolderStore(Path(rest if separator else text))
    if scheme == "memory":
        return MemoryStore(text)
    if scheme == "s3":
        if not re.fullmatch(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/.*)?", rest):
            raise store_problem(
                text,
                "this names no bucket",
                "write s3://bucket/prefix; a bucket has 3 to 63 characters of a-z, 0-9, '.', '-'",
            )
        from backends.storage.s3 import S3Store

        return S3Store(text)
    raise store_problem(
        text, f"unknown kind of store {scheme}://", "use a folder or s3://bucket/prefix"
    )


Look = Callable[[], object]
"""A last look at whether a write is still to be done."""


def no_look() -> None:
    """Write whatever has happened."""


class ObjectStore(ABC):
    """Objects by key. A key is a relative path (`run-1/report.md`); a prefix is a key's folder."""

    @property
    @abstractmethod
    def root(self) -> str:
        """Where the store lies, for people and for `open_store`."""

    def hurry(self) -> None:  # noqa: B027  (most stores never wait)
        """Wait no longer for a service that is away: whatever is asked of it now, or is, fails."""

    @abstractmethod
    def read(self, key: str) -> bytes:
        """The whole object. Raises NotFound."""

    @abstractmethod
    def write(self, key: str, data: bytes, look: Look = no_look) -> None:
        """Put the object there, in place of what was there.

        `look` is called at the last moment before the object counts, and stops it by raising.
        """

    @abstractmethod
    def create(self, key: str, data: bytes, look: Look = no_look) -> None:
        """Put the object there if there is none. Raises AlreadyExists for all but one creator.

        `look` as in `write`.

        When the answer to a request was lost on the way, the object that exists can be the
        caller's own: who must know reads it and compares. On S3 it is as exclusive as the service
        makes `If-None-Match: *` (AWS and MinIO: fully; Swift checks it without a lock, so that two
        creators within one request's time can both succeed, and the later one's object stays).
        """

    @abstractmethod
    def exists(self, key: str) -> bool:
        """Whether there is an object under exactly this key."""

    @abstractmethod
    def keys(self, prefix: str = "") -> list[str]:
        """Keys of all objects below the prefix, sorted; none if there is nothing."""

    @abstractmethod
    def modified(self, prefix: str) -> dict[str, datetime]:
        """When the object of this key and each below it was written, by the store's own clock."""

    @abstractmethod
    def collect_unfinished(self, prefix: str, before: datetime) -> None:
        """Remove what no reader sees: writes below the prefix that were begun and never ended.

        Only those begun before that moment of the store's own clock; the others may be under way.
        """

    @abstractmethod
    def folders(self, prefix: str = "") -> list[str]:
        """Names directly below the prefix that have objects below them, sorted."""

    @abstractmethod
    def delete(self, prefix: str) -> None:
        """Remove the object of this key and every object below it; nothing there is no error."""

    @abstractmethod
    def upload(self, files: Iterable[str], folder: Path, prefix: str) -> None:
        """Copy files (paths relative to the local folder) to below the prefix, replacing."""

    @abstractmethod
    def download(self, files: Iterable[str], prefix: str, folder: Path) -> None:
        """Copy objects (keys relative to the prefix) into the local folder. Raises NotFound."""

    @abstractmethod
    def check_writable(self) -> None:
        """Try what a run needs: create exclusively, read, delete. Leaves nothing behind.

        Raises UserError with one problem and its remedy; fails fast rather than waiting.
        """

    def uri(self, key: str = "") -> str:
        """Where an object or folder is, as a path or URI a person can use."""
        return f"{self.root.rstrip('/')}/{_checked(key)}" if key else self.root

    def local_path(self, key: str) -> Path | None:
        """The object's or folder's place on this machine, if it has one."""
        return None


def _checked(key: str) -> str:
    """The key itself; a ValueError for one that could leave the prefix or mean several objects."""
    segments = key.split("/")
    if any(segment in ("", ".", "..") or segment.startswith(TEMPORARY) for segment in segments):
        raise ValueError(f"{key!r} is no key of an object store")
    if re.search(r"[\x00-\x1f*?\[\]\\]", key):
        raise ValueError(f"{key!r} has characters that a key may not have")
    return key


# -- a folder ----------------------------------------------------------------------------------


class FolderStore(ObjectStore):
    """Files in a folder. Written beside their place, synced, and moved or linked into it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.expanduser().absolute()

    @property
    def root(self) -> str:
        """The folder's absolute path."""
        return str(self._folder)

    def local_path(self, key: str) -> Path:
        """The file or folder itself."""
        return self._folder / _checked(key)

    def read(self, key: str) -> bytes:
        """See ObjectStore."""
        with self._explained(key, reading=True):
            return self.local_path(key).read_bytes()

    def write(self, key: str, data: bytes, look: Look = no_look) -> None:
        """See ObjectStore."""
        with self._explained(key), self._unfinished(self.local_path(key)) as temporary:
            _write_synced(temporary, data)
            look()
            temporary.replace(self.local_path(key))

    def create(self, key: str, data: bytes, look: Look = no_look) -> None:
        """See ObjectStore. A hard link is what a file system does exclusively and in whole."""
        with self._explained(key), self._unfinished(self.local_path(key)) as temporary:
            _write_synced(temporary, data)
            look()
            self.local_path(key).hardlink_to(temporary)

    def exists(self, key: str) -> bool:
        """See ObjectStore."""
        return self.local_path(key).is_file()

    def keys(self, prefix: str = "") -> list[str]:
        """See ObjectStore."""
        top = self.local_path(prefix) if prefix else self._folder
        keys = []
        with self._explained(prefix):
            for folder, _, names in os.walk(top, onerror=_raise_unless_gone):
                inside = Path(folder).relative_to(self._folder)
                kept = (name for name in names if not name.startswith(TEMPORARY))
                keys += [(inside / name).as_posix() for name in kept]
        return sorted(keys)

    def modified(self, prefix: str) -> dict[str, datetime]:
        """See ObjectStore. An object that goes away meanwhile is left out."""
        times = {}
        for key in [*self.keys(prefix), *([prefix] if self.exists(prefix) else [])]:
            with contextlib.suppress(NotFound), self._explained(key):
                times[key] = _modified(self.local_path(key))
        return times

    def collect_unfinished(self, prefix: str, before: datetime) -> None:
        """See ObjectStore. A writer that was killed leaves its temporary file."""
        with self._explained(prefix):
            for path in self.local_path(prefix).rglob(f"{TEMPORARY}*"):
                with contextlib.suppress(FileNotFoundError):
                    if _modified(path) < before:
                        path.unlink()

    def folders(self, prefix: str = "") -> list[str]:
        """See ObjectStore. Folders that are empty count too."""
        top = self.local_path(prefix) if prefix else self._folder
        with self._explained(prefix):
            if not top.exists():
                return []
            return sorted(entry.name for entry in top.iterdir() if entry.is_dir())

    def delete(self, prefix: str) -> None:
        """See ObjectStore."""
        path = self.local_path(prefix)
        with self._explained(prefix), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    def upload(self, files: Iterable[str], folder: Path, prefix: str) -> None:
        """See ObjectStore."""
        for name in files:
            key = f"{prefix}/{name}"
            with self._explained(key), self._unfinished(self.local_path(key)) as temporary:
                shutil.copyfile(folder / name, temporary)
                _sync(temporary)
                temporary.replace(self.local_path(key))

    def download(self, files: Iterable[str], prefix: str, folder: Path) -> None:
        """See ObjectStore."""
        for name in files:
            key = f"{prefix}/{name}"
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            with self._explained(key, reading=True):
                shutil.copyfile(self.local_path(key), target)

    def check_writable(self) -> None:
        """See ObjectStore. Tried in the nearest folder that exists, so that none is made."""
        nearest = self._folder
        while not (nearest.exists() or nearest.is_symlink()):
            nearest = nearest.parent
        if not nearest.is_dir():
            raise store_problem(
                self.root,
                f"{nearest} is not a folder",
                "name another folder as `store:`, or move that file away",
            )
        try:
            with tempfile.TemporaryDirectory(dir=nearest, prefix=".flowtune-check-") as trial:
                _write_synced(Path(trial, "a"), b"")
                Path(trial, "b").hardlink_to(Path(trial, "a"))
        except OSError as error:
            explained = _explain_local(error, self.root)
            if isinstance(explained, UserError):
                raise explained from error
            raise store_problem(
                self.root,
                f"it cannot be written to: {error.strerror or error}",
                "name another folder as `store:`",
            ) from error

    @contextlib.contextmanager
    def _unfinished(self, target: Path) -> Iterator[Path]:
        """A name beside the target for what is not whole yet; gone afterwards, whatever happens."""
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f"{TEMPORARY}{uuid.uuid4().hex[:12]}-{target.name}")
        try:
            yield temporary
            _sync(target.parent)
        finally:
            temporary.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _explained(self, key: str, *, reading: bool = False) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if isinstance(error, FileExistsError) and self.exists(key):
                raise AlreadyExists(f"{self.uri(key)} exists already") from error
            no_file = isinstance(error, (IsADirectoryError, NotADirectoryError))
            if isinstance(error, FileNotFoundError) or (reading and no_file):
                raise NotFound(f"there is no {self.uri(key)}") from error
            raise _explain_local(error, self.root) from error


def _modified(path: Path) -> datetime:
    return datetime.fromtimestamp(path.stat().st_mtime, UTC)


def _raise_unless_gone(error: OSError) -> None:
    """A folder that is not there has no objects; one that cannot be read is an error."""
    if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
        raise error


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    """Have a file or a folder's entries on the disk before what refers to them is written."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_LOCAL_REMEDIES = {
    errno.EACCES: "name a folder you may write to as `store:`, or change its permissions",
    errno.EPERM: "name a folder you may write to, on a file system that has hard links",
    errno.EOPNOTSUPP: "name a folder on a file system that has hard links",
    errno.EROFS: "name a folder that is not read-only as `store:`",
    errno.ENOTDIR: "name another folder as `store:`, or move that file away",
    errno.EEXIST: "name another folder as `store:`, or move that file away",
    errno.ENOSPC: "free space, or name another folder as `store:`; then continue the run",
    errno.EFBIG: "raise the limit on the size of files (`ulimit -f`), then continue the run",
    errno.EDQUOT: "free space, or name another folder as `store:`; then continue the run",
}


def _explain_local(error: OSError, root: str) -> FlowtuneError:
    place = f" ({error.filename})" if error.filename and str(error.filename) != root else ""
    what = f"{os.strerror(error.errno) if error.errno else error}{place}"
    remedy = _LOCAL_REMEDIES.get(error.errno or 0)
    return store_problem(root, what, remedy) if remedy else StoreError(f"store {root}: {what}")


# -- fsspec ------------------------------------------------------------------------------------


class RemoteStore(ObjectStore):
    """What memory and S3 share: fsspec's file systems over whole objects."""

    def __init__(self, uri: str, filesystem: Any) -> None:
        self._uri = uri.rstrip("/") if not uri.endswith("://") else uri
        self._fs = filesystem
        self._base = str(filesystem._strip_protocol(self._uri))

    @property
    def root(self) -> str:
        """The URI as it was given."""
        return self._uri

    def read(self, key: str) -> bytes:
        """See ObjectStore."""
        return bytes(self._call(key, self._fs.cat_file, self._path(key)))

    def write(self, key: str, data: bytes, look: Look = no_look) -> None:
        """See ObjectStore."""
        self._call(key, self._put, key, data, look)

    def create(self, key: str, data: bytes, look: Look = no_look) -> None:
        """See ObjectStore."""
        self._call(key, self._put, key, data, look, mode="create")

    def _put(self, key: str, data: bytes, look: Look, **options: Any) -> None:
        look()
        self._fs.pipe_file(self._path(key), data, **options)

    def exists(self, key: str) -> bool:
        """See ObjectStore."""
        try:
            return bool(self._call(key, self._fs.info, self._path(key))["type"] == "file")
        except NotFound:
            return False

    def keys(self, prefix: str = "") -> list[str]:
        """See ObjectStore."""
        top = self._path(prefix) if prefix else self._base
        try:
            paths = self._call(prefix, self._fs.find, top)
        except NotFound:
            return []
        below = [str(path) for path in paths if str(path).startswith(f"{top}/")]
        return sorted(path.removeprefix(f"{self._base}/") for path in below)

    def modified(self, prefix: str) -> dict[str, datetime]:
        """See ObjectStore."""
        try:
            entries = self._call(prefix, self._fs.find, self._path(prefix), detail=True)
        except NotFound:
            return {}
        times = {str(path): self._time(entry) for path, entry in entries.items()}
        return {path.removeprefix(f"{self._base}/"): times[path] for path in sorted(times)}

    @abstractmethod
    def _time(self, entry: Mapping[str, Any]) -> datetime:
        """When an object of fsspec's listing was written."""

    def folders(self, prefix: str = "") -> list[str]:
        """See ObjectStore."""
        try:
            top = self._path(prefix) if prefix else self._base
            entries = self._call(prefix, self._fs.ls, top, detail=True)
        except NotFound:
            return []
        names = [entry["name"].rstrip("/") for entry in entries if entry["type"] == "directory"]
        return sorted(name.rpartition("/")[2] for name in names)

    def delete(self, prefix: str) -> None:
        """See ObjectStore."""
        keys = [*self.keys(prefix), *([prefix] if self.exists(prefix) else [])]
        if not keys:
            return
        self._call(prefix, self._fs.rm, [self._path(key) for key in keys])
        # s3fs drops the errors of single objects in a bulk delete: look whether all are gone.
        if self.keys(prefix):
            raise StoreError(f"some objects below {self.uri(prefix)} could not be deleted")

    def upload(self, files: Iterable[str], folder: Path, prefix: str) -> None:
        """See ObjectStore."""
        for name in files:
            key, source = f"{prefix}/{name}", folder / name
            options = self._put_options(source)
            self._call(key, self._fs.put_file, str(source), self._path(key), **options)

    def download(self, files: Iterable[str], prefix: str, folder: Path) -> None:
        """See ObjectStore."""
        for name in files:
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            key = f"{prefix}/{name}"
            self._call(key, self._get, key, target)

    def _get(self, key: str, target: Path) -> None:
        # Under a name of its own: a failed attempt of fsspec's can still be writing for a while.
        temporary = target.with_name(f"{TEMPORARY}{uuid.uuid4().hex[:12]}-{target.name}")
        try:
            self._fs.get_file(self._path(key), str(temporary))
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)

    def check_writable(self) -> None:
        """See ObjectStore."""
        key = f".flowtune-check-{uuid.uuid4().hex}"
        with contextlib.suppress(AlreadyExists):  # ours: the answer was lost
            self.create(key, b"one")
        try:
            self.create(key, b"two")
        except AlreadyExists:
            pass
        else:
            raise store_problem(
                self.root,
                "it lets a second writer replace an object that must be created only once",
                "use an S3 service that honours `If-None-Match: *` (AWS S3, recent MinIO, …)",
            )
        finally:
            self.delete(key)

    def _path(self, key: str) -> str:
        return f"{self._base}/{_checked(key)}"

    def _put_options(self, source: Path) -> dict[str, Any]:
        return {}

    def _call(self, key: str, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call the file system, giving its errors the meaning this module promises."""
        try:
            return function(*args, **options)
        except FileNotFoundError as error:
            raise NotFound(f"there is no {self.uri(key)}") from error
        except FileExistsError as error:
            raise AlreadyExists(f"{self.uri(key)} exists already") from error


_MEMORY_LOCK = threading.Lock()


class MemoryStore(RemoteStore):
    """Objects in this process: fast, and gone with it. For tests and dry runs."""

    def __init__(self, uri: str) -> None:
        import fsspec

        super().__init__(uri, fsspec.filesystem("memory"))

    def create(self, key: str, data: bytes, look: Look = no_look) -> None:
        """See ObjectStore. fsspec looks and writes in two steps; the lock makes them one."""
        with _MEMORY_LOCK:
            super().create(key, data, look)

    def collect_unfinished(self, prefix: str, before: datetime) -> None:
        """See ObjectStore. Nothing is ever half there."""

    def _time(self, entry: Mapping[str, Any]) -> datetime:
        return datetime.fromtimestamp(entry["created"], UTC)


def store_problem(root: str, what: str, remedy: str) -> UserError:
    """What the user has to mend at a store, and how."""
    return UserError(Problem(f"store {root}", what, remedy))
