"""What is special to S3: large files, settings and their mistakes, a service that misbehaves."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from backends.errors import TransientError, UserError
from backends.storage import s3 as module
from backends.storage.objects import AlreadyExists, NotFound, StoreError, open_store
from backends.storage.s3 import PART_BYTES, S3Store
from tests.servers.swift import S3Server, client


def test_large_files_go_to_s3_in_parts(aws: S3Server, s3_uri: str, tmp_path: Path) -> None:
    sizes = {"two-parts.txt": 2 * PART_BYTES, "one-part.txt": 2 * PART_BYTES - 1}
    for name, size in sizes.items():
        (tmp_path / name).write_bytes(bytes(size))
    open_store(s3_uri).upload(sizes, tmp_path, "step")
    for name, parts in {"two-parts.txt": '-2"', "one-part.txt": '"'}.items():
        etag = client(aws).info(f"{s3_uri}/step/{name}")["ETag"]
        assert etag.endswith(parts), etag
    assert "-" not in client(aws).info(f"{s3_uri}/step/one-part.txt")["ETag"]


def test_listings_longer_than_a_page_are_whole(s3_uri: str) -> None:
    store = open_store(s3_uri)
    keys = [f"run/{number:03d}" for number in range(60)]  # the test service has pages of 50
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: store.write(key, b""), keys))
    assert store.keys() == keys
    store.delete("run")
    assert store.keys() == []


@pytest.mark.parametrize(
    ("setting", "value", "what", "remedy"),
    [
        ("AWS_SECRET_ACCESS_KEY", "wrong", "do not belong together", "AWS_SECRET_ACCESS_KEY"),
        ("AWS_ACCESS_KEY_ID", "nobody", "do not belong together", "AWS_ACCESS_KEY_ID"),
        ("AWS_ACCESS_KEY_ID", None, "credentials", "set AWS_ACCESS_KEY_ID"),
        ("AWS_ENDPOINT_URL", "http://127.0.0.1:9", "cannot be reached", "AWS_ENDPOINT_URL"),
        ("AWS_ENDPOINT_URL", "nonsense", "Invalid endpoint", "AWS_ENDPOINT_URL"),
        ("AWS_PROFILE", "nobody", "nobody", "AWS_PROFILE"),
    ],
)
def test_wrong_settings_are_named_with_their_remedy(
    s3_uri: str,
    monkeypatch: pytest.MonkeyPatch,
    setting: str,
    value: str | None,
    what: str,
    remedy: str,
) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    if value is None:
        monkeypatch.delenv(setting)
    else:
        monkeypatch.setenv(setting, value)
    with pytest.raises(UserError, match=what) as raised:
        open_store(s3_uri).check_writable()
    (problem,) = raised.value.problems
    assert problem.where == f"store {s3_uri}"
    assert remedy in problem.remedy


def test_a_missing_bucket_is_named_by_every_call(aws: S3Server) -> None:
    store = open_store("s3://no-such-bucket/runs")
    for call in (
        store.check_writable,
        store.keys,
        store.folders,
        lambda: store.exists("run/a"),
        lambda: store.read("run/a"),
        lambda: store.write("run/a", b""),
    ):
        with pytest.raises(UserError, match=r"(?s)no such bucket.*create the bucket"):
            call()


def test_settings_may_come_from_the_aws_files(
    aws: S3Server, s3_uri: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in aws.settings:
        monkeypatch.delenv(name)
    (tmp_path / "config").write_text(
        f"[profile lab]\nregion = us-east-1\nendpoint_url = {aws.endpoint}\n"
    )
    (tmp_path / "credentials").write_text(
        f"[lab]\naws_access_key_id = {aws.key}\naws_secret_access_key = {aws.secret}\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "lab")
    store = open_store(s3_uri)
    store.check_writable()
    store.write("run/a", b"one")
    assert store.read("run/a") == b"one"


def test_a_service_that_lets_two_create_is_refused(
    s3_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import s3fs

    plain = s3fs.S3FileSystem._pipe_file

    async def ignoring(fs: object, path: str, data: bytes, mode: str = "overwrite") -> object:
        return await plain(fs, path, data)

    monkeypatch.setattr(s3fs.S3FileSystem, "_pipe_file", ignoring)
    with pytest.raises(UserError, match=r"(?s)second writer.*If-None-Match"):
        open_store(s3_uri).check_writable()
    assert open_store(s3_uri).keys() == []


def test_a_service_that_goes_away_is_transient_and_found_again(
    aws: S3Server, s3_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.0)
    store = open_store(s3_uri)
    store.write("run/a", b"one")
    aws.stop()
    try:
        with pytest.raises(TransientError, match="run/a"):
            store.read("run/a")
        with pytest.raises(TransientError, match="run/b"):
            store.create("run/b", b"two")
    finally:
        aws.start()
    assert store.read("run/a") == b"one"
    store.create("run/b", b"two")
    assert store.read("run/b") == b"two"


@pytest.mark.parametrize("status", [404, 501])
def test_an_endpoint_that_is_no_s3_is_said_to_be_none(
    s3_uri: str, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    class Other(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # which answers `Expect: 100-continue`

        def do_PUT(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_error(status)

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Other) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        with pytest.raises(UserError, match=r"(?s)does not answer as S3 does.*AWS_ENDPOINT_URL"):
            open_store(s3_uri).check_writable()
        server.shutdown()


def test_a_service_that_stands_still_is_not_waited_for_for_ever(
    s3_uri: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "big.txt").write_bytes(bytes(2 * PART_BYTES))
    monkeypatch.setattr(module, "ANSWER_SECONDS", 0.9)
    monkeypatch.setattr(module, "SLOWEST_BYTES_PER_SECOND", 1e9)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, says nothing
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        store = S3Store(s3_uri, patient=False)
        for call in (
            lambda: store.read("run/a"),
            lambda: store.create("run/a", b"1"),
            lambda: store.upload(["big.txt"], tmp_path, "run"),
        ):
            with pytest.raises(TransientError, match="run"):
                call()


def test_who_stops_a_run_does_not_wait_for_a_service_that_is_away(
    s3_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = threading.Event()

    def away(self: S3Store, key: str, *_: object) -> None:
        asked.set()
        raise module._Passing(f"{key}: the service is away")

    monkeypatch.setattr(S3Store, "_call_once", away)
    store = S3Store(s3_uri)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(store.read, "run/a")
        assert asked.wait(10)
        store.hurry()
        with pytest.raises(TransientError, match="run/a: the service is away"):
            reading.result(module.PATIENCE_SECONDS / 6)


@pytest.mark.parametrize(
    ("code", "meaning"),
    [
        ("SlowDown", TransientError),
        ("ServiceUnavailable", TransientError),
        ("InternalError", TransientError),
        ("AccessDenied", UserError),
        ("ExpiredToken", UserError),
        ("NoSuchBucket", UserError),
        ("NoSuchKey", NotFound),
        ("PreconditionFailed", AlreadyExists),
        ("EntityTooLarge", StoreError),
    ],
)
def test_codes_of_s3_mean_what_the_module_promises(
    s3_uri: str, monkeypatch: pytest.MonkeyPatch, code: str, meaning: type[Exception]
) -> None:
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.0)
    store = open_store(s3_uri)
    monkeypatch.setattr(store._fs, "pipe_file", _answering(code))
    with pytest.raises(meaning) as raised:
        store.create("run/a", b"")
    assert type(raised.value) is meaning


def test_a_conflict_between_creators_is_asked_again(
    s3_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(s3_uri)
    plain = store._fs.pipe_file
    answers = [_answering("ConditionalRequestConflict")] * 2 + [plain]
    monkeypatch.setattr(store._fs, "pipe_file", lambda *a, **o: answers.pop(0)(*a, **o))
    store.create("run/a", b"one")
    assert answers == []
    assert store.read("run/a") == b"one"


def _answering(code: str) -> Callable[..., None]:
    """What s3fs does when S3 answers with an error code."""
    from botocore.exceptions import ClientError
    from s3fs.errors import translate_boto_error

    def answer(*arguments: object, **options: object) -> None:
        error = {"Error": {"Code": code, "Message": "as S3 words it"}}
        raise translate_boto_error(ClientError(error, "PutObject"))

    return answer
