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

S3 takes its key, secret, region and endpoint from the standard AWS environment and files
(`AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_REGION`, `AWS_ENDPOINT_URL`, `~/.aws`). All
calls block and may come from any thread. fsspec and s3fs are imported when a store that needs them
is opened.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import tempfile
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from backends.errors import FlowtuneError, Problem, TransientError, UserError

PART_BYTES = 8 * 2**20
"""Size of one part; a file of at least two parts is sent to S3 in parts, several at once."""

MOST_PARTS = 10_000
"""How many parts S3 accepts in one object."""

TEMPORARY = ".tmp-"
"""How names of unfinished local files begin; no reader sees them."""

CREATE_ATTEMPTS = 5

ANSWER_SECONDS = 30.0
"""How long S3 may take to answer one attempt of a request, beyond the time its body takes."""

SLOWEST_BYTES_PER_SECOND = 50_000
"""The slowest a body is expected to travel, on one of several connections at once."""


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
            raise _problem(
                text,
                "this names no bucket",
                "write s3://bucket/prefix; a bucket has 3 to 63 characters of a-z, 0-9, '.', '-'",
            )
        return S3Store(text)
    raise _problem(text, f"unknown kind of store {scheme}://", "use a folder or s3://bucket/prefix")


class ObjectStore(ABC):
    """Objects by key. A key is a relative path (`run-1/report.md`); a prefix is a key's folder."""

    @property
    @abstractmethod
    def root(self) -> str:
        """Where the store lies, for people and for `open_store`."""

    @abstractmethod
    def read(self, key: str) -> bytes:
        """The whole object. Raises NotFound."""

    @abstractmethod
    def write(self, key: str, data: bytes) -> None:
        """Put the object there, in place of what was there."""

    @abstractmethod
    def create(self, key: str, data: bytes) -> None:
        """Put the object there if there is none. Raises AlreadyExists for all but one creator.

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

    def write(self, key: str, data: bytes) -> None:
        """See ObjectStore."""
        with self._explained(key), self._unfinished(self.local_path(key)) as temporary:
            _write_synced(temporary, data)
            temporary.replace(self.local_path(key))

    def create(self, key: str, data: bytes) -> None:
        """See ObjectStore. A hard link is what a file system does exclusively and in whole."""
        with self._explained(key), self._unfinished(self.local_path(key)) as temporary:
            _write_synced(temporary, data)
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
            raise _problem(
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
            raise _problem(
                self.root, f"it cannot be written to: {error}", "name another folder as `store:`"
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
    errno.EDQUOT: "free space, or name another folder as `store:`; then continue the run",
}


def _explain_local(error: OSError, root: str) -> FlowtuneError:
    place = f" ({error.filename})" if error.filename and str(error.filename) != root else ""
    what = f"{os.strerror(error.errno) if error.errno else error}{place}"
    remedy = _LOCAL_REMEDIES.get(error.errno or 0)
    return _problem(root, what, remedy) if remedy else StoreError(f"store {root}: {what}")


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
        with self._explained(key):
            return bytes(self._fs.cat_file(self._path(key)))

    def write(self, key: str, data: bytes) -> None:
        """See ObjectStore."""
        with self._explained(key):
            self._fs.pipe_file(self._path(key), data)

    def create(self, key: str, data: bytes) -> None:
        """See ObjectStore."""
        with self._explained(key):
            self._fs.pipe_file(self._path(key), data, mode="create")

    def exists(self, key: str) -> bool:
        """See ObjectStore."""
        try:
            with self._explained(key):
                return bool(self._fs.info(self._path(key))["type"] == "file")
        except NotFound:
            return False

    def keys(self, prefix: str = "") -> list[str]:
        """See ObjectStore."""
        top = self._path(prefix) if prefix else self._base
        try:
            with self._explained(prefix):
                paths = self._fs.find(top)
        except NotFound:
            return []
        below = [str(path) for path in paths if str(path).startswith(f"{top}/")]
        return sorted(path.removeprefix(f"{self._base}/") for path in below)

    def folders(self, prefix: str = "") -> list[str]:
        """See ObjectStore."""
        try:
            with self._explained(prefix):
                top = self._path(prefix) if prefix else self._base
                entries = self._fs.ls(top, detail=True)
        except NotFound:
            return []
        names = [entry["name"].rstrip("/") for entry in entries if entry["type"] == "directory"]
        return sorted(name.rpartition("/")[2] for name in names)

    def delete(self, prefix: str) -> None:
        """See ObjectStore."""
        keys = [*self.keys(prefix), *([prefix] if self.exists(prefix) else [])]
        if not keys:
            return
        with self._explained(prefix):
            self._fs.rm([self._path(key) for key in keys])
        # s3fs drops the errors of single objects in a bulk delete: look whether all are gone.
        if self.keys(prefix):
            raise StoreError(f"some objects below {self.uri(prefix)} could not be deleted")

    def upload(self, files: Iterable[str], folder: Path, prefix: str) -> None:
        """See ObjectStore."""
        names = list(files)
        if not names:
            return
        sources = [str(folder / name) for name in names]
        targets = [self._path(f"{prefix}/{name}") for name in names]
        with self._explained(prefix):
            self._fs.put(sources, targets, **self._put_options(sources))

    def download(self, files: Iterable[str], prefix: str, folder: Path) -> None:
        """See ObjectStore."""
        names = list(files)
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
        sources = [self._path(f"{prefix}/{name}") for name in names]
        try:
            with self._explained(prefix):
                self._fs.get(sources, [str(folder / name) for name in names])
        except NotFound as error:  # of which file, fsspec does not say
            lost = [key for name in names if not self.exists(key := f"{prefix}/{name}")]
            raise NotFound(f"there is no {', '.join(map(self.uri, lost))}") from error

    def check_writable(self) -> None:
        """See ObjectStore."""
        key = f".flowtune-check-{uuid.uuid4().hex}"
        self.create(key, b"one")
        try:
            self.create(key, b"two")
        except AlreadyExists:
            pass
        else:
            raise _problem(
                self.root,
                "it lets a second writer replace an object that must be created only once",
                "use an S3 service that honours `If-None-Match: *` (AWS S3, recent MinIO, …)",
            )
        finally:
            self.delete(key)

    def _path(self, key: str) -> str:
        return f"{self._base}/{_checked(key)}"

    def _put_options(self, sources: list[str]) -> dict[str, Any]:
        return {}

    @contextlib.contextmanager
    def _explained(self, key: str) -> Iterator[None]:
        """Give fsspec's errors the meaning this module promises."""
        try:
            yield
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

    def create(self, key: str, data: bytes) -> None:
        """See ObjectStore. fsspec looks and writes in two steps; the lock makes them one."""
        with _MEMORY_LOCK:
            super().create(key, data)


# -- S3 ----------------------------------------------------------------------------------------


class S3Store(RemoteStore):
    """Objects in a bucket, through s3fs. One client a store, used by all its threads."""

    def __init__(self, uri: str, *, patient: bool = True) -> None:
        super().__init__(uri, _s3_filesystem(patient))

    def create(self, key: str, data: bytes) -> None:
        """See ObjectStore. `If-None-Match: *`; a conflict between two creators is asked again."""
        for attempt in range(CREATE_ATTEMPTS):
            try:
                return super().create(key, data)
            except _Conflict:
                time.sleep(0.1 * 2**attempt)
        raise TransientError(f"{self.uri(key)}: other writers kept the store busy")

    def check_writable(self) -> None:
        """See ObjectStore. With a client that does not wait for an endpoint that is away."""
        try:
            RemoteStore.check_writable(S3Store(self._uri, patient=False))
        except (TransientError, StoreError) as error:
            away = isinstance(error, TransientError)
            raise _problem(
                self.root,
                f"the endpoint {'cannot be reached' if away else 'does not answer as S3 does'}: "
                f"{error.__cause__ or error}",
                "check the network and AWS_ENDPOINT_URL (unset it for Amazon's own S3)",
            ) from error

    def _put_options(self, sources: list[str]) -> dict[str, Any]:
        largest = max(Path(source).stat().st_size for source in sources)
        return {"chunksize": max(PART_BYTES, -(-largest // MOST_PARTS))}

    @contextlib.contextmanager
    def _explained(self, key: str) -> Iterator[None]:
        from aiohttp import ClientError as HttpError
        from botocore.exceptions import (  # type: ignore[import-untyped, unused-ignore]
            BotoCoreError,
            ClientError,
        )

        try:
            yield
        except (OSError, ValueError, HttpError, BotoCoreError, ClientError) as error:
            raise _explain_s3(error, self._uri, self.uri(key)) from error


class _Conflict(StoreError):
    """S3 could not decide between two creators and wants to be asked again."""


def _s3_filesystem(patient: bool) -> Any:
    """A client of its own: no shared instance and no cached listings, so nothing stale is read."""
    import s3fs
    from aiobotocore.session import AioSession  # type: ignore[import-untyped, unused-ignore]

    session = AioSession()
    session.register_component("data_loader", _service_descriptions())
    filesystem = s3fs.S3FileSystem(
        session=session,
        skip_instance_cache=True,
        use_listings_cache=False,
        default_block_size=PART_BYTES,
        client_kwargs={"region_name": os.environ.get("AWS_REGION") or None},
        config_kwargs={
            "connect_timeout": 5,
            "read_timeout": ANSWER_SECONDS,
            "retries": {"mode": "standard", "total_max_attempts": 3 if patient else 1},
            "http_session_cls": _punctual_session(
                ANSWER_SECONDS if patient else ANSWER_SECONDS / 3
            ),
        },
    )
    filesystem.retries = 2 if patient else 1
    return filesystem


@cache
def _service_descriptions() -> Any:
    """What botocore knows of S3: large JSON files, and most of the time a new client takes."""
    from botocore.loaders import create_loader  # type: ignore[import-untyped, unused-ignore]

    return create_loader()


def _punctual_session(seconds: float) -> type:
    """aiobotocore's HTTP session with an end to its patience.

    A body is sent after the service's `100 Continue`, and aiohttp has no limit on the wait for
    that, nor on sending to a service that stands still: a run would hang for ever.
    """
    import asyncio

    from aiobotocore.httpsession import (  # type: ignore[import-untyped, unused-ignore]
        AIOHTTPSession,
    )
    from botocore.exceptions import ReadTimeoutError

    class PunctualSession(AIOHTTPSession):  # type: ignore[misc, unused-ignore]
        async def send(self, request: Any) -> Any:
            size = int(request.headers.get("Content-Length") or 0)
            limit = seconds + size / SLOWEST_BYTES_PER_SECOND
            try:
                return await asyncio.wait_for(super().send(request), limit)
            except TimeoutError as error:
                raise ReadTimeoutError(endpoint_url=request.url, error=error) from error

    return PunctualSession


_S3_PROBLEMS = {
    "NoSuchBucket": ("there is no such bucket", "create the bucket, or name another as `store:`"),
    "InvalidBucketName": ("that is no name of a bucket", "write s3://bucket/prefix"),
    "InvalidAccessKeyId": ("the access key is not known there", "check AWS_ACCESS_KEY_ID"),
    "SignatureDoesNotMatch": (
        "the access key and the secret key do not belong together",
        "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    ),
    "ExpiredToken": ("the session token has expired", "sign in again, then continue the run"),
    "InvalidToken": ("the session token is not valid", "check AWS_SESSION_TOKEN"),
    "AccessDenied": (
        "this key may not do that here",
        "give it s3:ListBucket, s3:GetObject, s3:PutObject and s3:DeleteObject on the prefix",
    ),
    "403": ("this key may not do that here", "check the key and the bucket's policy"),
    "AuthorizationHeaderMalformed": ("the request is signed for another region", "set AWS_REGION"),
    "PermanentRedirect": ("the bucket lies in another region", "set AWS_REGION"),
    "RequestTimeTooSkewed": ("this machine's clock is wrong", "set the clock"),
    "NotImplemented": (
        "the service does not know a request that is needed",
        "use an S3 service that honours `If-None-Match: *` (AWS S3, recent MinIO, …)",
    ),
    "QuotaExceeded": ("the quota is used up", "free space, then continue the run"),
}

_S3_TRANSIENT = {"SlowDown", "ServiceUnavailable", "InternalError", "RequestTimeout", "500", "503"}


def _explain_s3(error: Exception, root: str, place: str) -> FlowtuneError:
    """What an error of s3fs or botocore means; `place` is the object it was about."""
    from aiohttp import ClientError as HttpError
    from botocore import exceptions as boto  # type: ignore[import-untyped, unused-ignore]

    code = _s3_code(error)
    if code in _S3_PROBLEMS:
        return _problem(root, *_S3_PROBLEMS[code])
    if code in ("ConditionalRequestConflict", "409", "OperationAborted"):
        return _Conflict(f"{place}: {error}")
    if code in ("PreconditionFailed", "412") or isinstance(error, FileExistsError):
        return AlreadyExists(f"{place} exists already")
    if isinstance(error, FileNotFoundError):
        return NotFound(f"there is no {place}")
    if isinstance(error, (boto.NoCredentialsError, boto.PartialCredentialsError)):
        return _problem(root, str(error), "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
    if isinstance(error, boto.ProfileNotFound):
        return _problem(root, str(error), "check AWS_PROFILE and ~/.aws")
    if isinstance(error, PermissionError):
        return _problem(root, str(error), _S3_PROBLEMS["AccessDenied"][1])
    away = (boto.HTTPClientError, boto.ConnectionError, HttpError, ConnectionError, TimeoutError)
    if isinstance(error, away) or code in _S3_TRANSIENT:
        return TransientError(f"{place}: {error}")
    if isinstance(error, (ValueError, boto.BotoCoreError)):
        return _problem(root, str(error), "check AWS_ENDPOINT_URL and the other AWS settings")
    return StoreError(f"{place}: {error}")


def _s3_code(error: BaseException | None) -> str:
    """The S3 error code at the bottom of an exception's causes; s3fs keeps only the message."""
    from botocore.exceptions import ClientError

    while error is not None:
        if isinstance(error, ClientError):
            return str(error.response.get("Error", {}).get("Code", ""))
        error = error.__cause__
    return ""


def _problem(root: str, what: str, remedy: str) -> UserError:
    return UserError(Problem(f"store {root}", what, remedy))
