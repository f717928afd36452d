"""Objects in an S3 bucket.

S3 takes its key, secret, region and endpoint from the standard AWS environment and files
(`AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_REGION`, `AWS_ENDPOINT_URL`, `~/.aws`).

A service that is busy or away is asked again: by botocore and s3fs a few times at once, then by
this module for `PATIENCE_SECONDS`, with a warning in the log. All requests may be made twice: an
object is written whole, and who creates one looks whose it is.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from backends.errors import FlowtuneError, TransientError, UserError
from backends.storage.objects import (
    AlreadyExists,
    Look,
    NotFound,
    RemoteStore,
    StoreError,
    no_look,
    store_problem,
)

PART_BYTES = 8 * 2**20
"""Size of one part; a file of at least two parts is sent to S3 in parts, several at once."""

MOST_PARTS = 10_000
"""How many parts S3 accepts in one object."""

CREATE_ATTEMPTS = 5

ANSWER_SECONDS = 30.0
"""How long S3 may take to answer one attempt of a request, beyond the time its body takes."""

SLOWEST_BYTES_PER_SECOND = 50_000
"""The slowest a body is expected to travel, on one of several connections at once."""

PATIENCE_SECONDS = 60.0
"""How long a service that is busy or away is asked again, when no single request waits longer."""

logger = logging.getLogger(__name__)


class S3Store(RemoteStore):
    """Objects in a bucket, through s3fs. One client a store, used by all its threads."""

    def __init__(self, uri: str, *, patient: bool = True) -> None:
        super().__init__(uri, _s3_filesystem(patient))
        self._patient = patient
        self._hurried = threading.Event()

    def hurry(self) -> None:
        """See ObjectStore. A request that is under way has its own time still."""
        self._hurried.set()

    def create(self, key: str, data: bytes, look: Look = no_look) -> None:
        """See ObjectStore. `If-None-Match: *`; a conflict between two creators is asked again."""
        for attempt in range(CREATE_ATTEMPTS):
            try:
                return super().create(key, data, look)
            except _Conflict:
                time.sleep(0.1 * 2**attempt)
        raise TransientError(f"{self.uri(key)}: other writers kept the store busy")

    def collect_unfinished(self, prefix: str, before: datetime) -> None:
        """See ObjectStore. A writer that was killed leaves the parts of a large file.

        They are invisible and are paid for. A key that may not list or abort uploads leaves them,
        with a warning: a rule of the bucket (`AbortIncompleteMultipartUpload`) removes them too.
        """
        bucket, _, top = self._path(prefix).partition("/")
        try:
            self._call(prefix, self._abort_unfinished, bucket, f"{top}/", before)
        except (StoreError, UserError) as error:
            logger.warning("unfinished uploads below %s stay: %s", self.uri(prefix), error)

    def _abort_unfinished(self, bucket: str, prefix: str, before: datetime) -> None:
        for upload in self._unfinished(bucket, prefix):
            if upload["Initiated"] < before:
                place = {"Key": upload["Key"], "UploadId": upload["UploadId"]}
                with contextlib.suppress(FileNotFoundError):  # it ended meanwhile
                    self._fs.call_s3("abort_multipart_upload", Bucket=bucket, **place)

    def _unfinished(self, bucket: str, prefix: str) -> Iterator[Mapping[str, Any]]:
        """Every upload in parts below the prefix that was not completed, page by page."""
        place = {"Bucket": bucket, "Prefix": prefix}
        page: Mapping[str, Any] = {}
        while not page or page.get("IsTruncated"):
            start = {
                name: page[f"Next{name}"]
                for name in ("KeyMarker", "UploadIdMarker")
                if page.get(f"Next{name}")
            }
            page = self._fs.call_s3("list_multipart_uploads", **place, **start)
            yield from page.get("Uploads", ())

    def _time(self, entry: Mapping[str, Any]) -> datetime:
        written: datetime = entry["LastModified"]
        return written

    def check_writable(self) -> None:
        """See ObjectStore. With a client that does not wait for an endpoint that is away."""
        try:
            RemoteStore.check_writable(S3Store(self._uri, patient=False))
        except (TransientError, StoreError) as error:
            away = isinstance(error, TransientError)
            raise store_problem(
                self.root,
                f"the endpoint {'cannot be reached' if away else 'does not answer as S3 does'}: "
                f"{error.__cause__ or error}",
                "check the network and AWS_ENDPOINT_URL (unset it for Amazon's own S3)",
            ) from error

    def _put_options(self, source: Path) -> dict[str, Any]:
        return {"chunksize": max(PART_BYTES, -(-source.stat().st_size // MOST_PARTS))}

    def _call(self, key: str, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """See RemoteStore. While the service is busy or away it is asked again, then given up."""
        started, pause = time.monotonic(), 0.2
        while True:
            try:
                return self._call_once(key, function, *args, **options)
            except _Passing as error:
                waited = time.monotonic() - started
                patient = self._patient and not self._hurried.is_set()
                if not patient or waited + pause > PATIENCE_SECONDS:
                    raise TransientError(
                        f"{error}. The store did not do it within {waited:.0f} s: see that "
                        "it is reachable, then continue the run"
                    ) from error
                logger.warning("the store is asked again in %.1f s: %s", pause, error)
            self._hurried.wait(pause)
            pause = min(2 * pause, 5.0)

    def _call_once(self, key: str, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        from aiohttp import ClientError as HttpError
        from botocore.exceptions import (  # type: ignore[import-untyped, unused-ignore]
            BotoCoreError,
            ClientError,
        )

        try:
            return function(*args, **options)
        except (OSError, ValueError, HttpError, BotoCoreError, ClientError) as error:
            raise _explain_s3(error, self._uri, self.uri(key)) from error


class _Passing(FlowtuneError):
    """The service is busy or away: it is asked again."""


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
            # An answer that is cut off never gives its connection back; with botocore's ten, the
            # eleventh request after as many faults would wait for ever.
            "max_pool_connections": 1_000,
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
    "403": (
        "this key may not do that here",
        "check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and the bucket's policy",
    ),
    "AuthorizationHeaderMalformed": ("the request is signed for another region", "set AWS_REGION"),
    "PermanentRedirect": ("the bucket lies in another region", "set AWS_REGION"),
    "RequestTimeTooSkewed": ("this machine's clock is wrong", "set the clock"),
    "NotImplemented": (
        "the service does not know a request that is needed",
        "use an S3 service that honours `If-None-Match: *` (AWS S3, recent MinIO, …)",
    ),
    "QuotaExceeded": ("the quota is used up", "free space, then continue the run"),
    "XMinioStorageFull": ("its disks are full", "free space, then continue the run"),
}

_S3_TRANSIENT = {"SlowDown", "ServiceUnavailable", "InternalError", "RequestTimeout", "500", "503"}


def _explain_s3(error: Exception, root: str, place: str) -> FlowtuneError:
    """What an error of s3fs or botocore means; `place` is the object it was about."""
    from aiohttp import ClientError as HttpError
    from botocore import exceptions as boto  # type: ignore[import-untyped, unused-ignore]

    code = _s3_code(error)
    if code in _S3_PROBLEMS:
        what, remedy = _S3_PROBLEMS[code]
        return store_problem(root, what if place == root else f"{what} ({place})", remedy)
    if code in ("ConditionalRequestConflict", "409", "OperationAborted"):
        return _Conflict(f"{place}: {error}")
    if code in ("PreconditionFailed", "412") or isinstance(error, FileExistsError):
        return AlreadyExists(f"{place} exists already")
    if isinstance(error, FileNotFoundError):
        return NotFound(f"there is no {place}")
    if isinstance(error, (boto.NoCredentialsError, boto.PartialCredentialsError)):
        return store_problem(root, str(error), "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
    if isinstance(error, boto.ProfileNotFound):
        return store_problem(root, str(error), "check AWS_PROFILE and ~/.aws")
    if isinstance(error, PermissionError):
        return store_problem(root, str(error), _S3_PROBLEMS["AccessDenied"][1])
    away = (boto.HTTPClientError, boto.ConnectionError, HttpError, ConnectionError, TimeoutError)
    if isinstance(error, away) or code in _S3_TRANSIENT:
        return _Passing(f"{place}: {error}")
    if isinstance(error, (ValueError, boto.BotoCoreError)):
        return store_problem(root, str(error), "check AWS_ENDPOINT_URL and the other AWS settings")
    return StoreError(f"{place}: {error}")


def _s3_code(error: BaseException | None) -> str:
    """The S3 error code at the bottom of an exception's causes; s3fs keeps only the message."""
    from botocore.exceptions import ClientError

    while error is not None:
        if isinstance(error, ClientError):
            return str(error.response.get("Error", {}).get("Code", ""))
        error = error.__cause__
    return ""
