"""A run in an S3 bucket when things go wrong: the service, the network, the run's own process."""

from __future__ import annotations

import hashlib
import itertools
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from backends.errors import TransientError, UserError
from backends.storage import s3
from backends.storage.run_store import RunStore
from backends.storage.s3 import PART_BYTES
from tests.backends.storage.runs import RUN, Scored, adapter, begun, save, taken, train
from tests.servers.s3_faults import FaultyS3, Request, Way, faulty_s3
from tests.servers.swift import S3Server, client

pytestmark = pytest.mark.slow


@pytest.fixture
def faulty(aws: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyS3]:
    """The service behind a proxy that fails when asked to; this process talks to the proxy."""
    with faulty_s3(aws.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        yield proxy


def large(folder: Path, content: bytes = b"w") -> Path:
    """Files of a checkpoint, one of them sent in three parts."""
    adapter(folder)
    (folder / "adapter_model.safetensors").write_bytes(content * (2 * PART_BYTES + 1))
    return folder


def unfinished(server: S3Server, store_uri: str) -> list[str]:
    """Keys of uploads in parts that were neither completed nor aborted."""
    bucket, _, prefix = store_uri.removeprefix("s3://").partition("/")
    answer = client(server).call_s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix)
    return [upload["Key"] for upload in answer.get("Uploads", ())]


# -- faults that pass ----------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["busy", "reset", "cut upload", "lost answer", "cut answer"])
def test_a_run_is_the_same_whatever_happens_on_the_way(
    faulty: FaultyS3, s3_uri: str, tmp_path: Path, way: Way
) -> None:
    count = itertools.count()
    faulty.fail(way, lambda request: next(count) % 5 == 0, times=8)
    store = RunStore(s3_uri, RUN)
    store.begin(name="sft", backend="mock", seed=0)
    store.take_lease()
    train(store, 1, 2)
    manifest = save(store, 2, large(tmp_path / "a"))
    store.write_evaluation(Scored("heldout", 2, 0.5, {}, [{"prompt": "1+1"}]))

    again = taken(s3_uri)
    again.rewind(2)
    train(again, 3, 4)
    again.collect_orphans()
    latest = again.latest_checkpoint()
    assert latest == manifest
    again.fetch_checkpoint(manifest, tmp_path / "back")
    again.write_result({"status": "completed"})
    assert len(faulty.failed) > 5

    faulty.heal()
    last = RunStore(s3_uri, RUN)
    assert [row["step"] for row in last.metrics()] == [1, 2, 3, 4]
    assert [row["score"] for row in last.evaluations()] == [0.5]
    assert last.read_result() == {"status": "completed"}
    assert last.checkpoints() == [manifest]
    again.write_report("still the writer")


def test_an_outage_is_waited_for_and_told(
    faulty: FaultyS3, s3_uri: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = begun(s3_uri)
    faulty.fail("busy", times=8)  # more than botocore and s3fs try by themselves
    train(store, 1, 2)
    assert len(faulty.failed) == 8
    assert "the store is asked again in" in caplog.text
    assert [row["step"] for row in RunStore(s3_uri, RUN).metrics()] == [1, 2]


# -- faults that stay ----------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["busy", "reset", "cut upload", "lost answer"])
def test_an_outage_that_stays_names_the_object_and_what_to_do(
    faulty: FaultyS3, s3_uri: str, monkeypatch: pytest.MonkeyPatch, way: Way
) -> None:
    store = begun(s3_uri)
    monkeypatch.setattr(s3, "PATIENCE_SECONDS", 0.1)
    faulty.fail(way, lambda request: request.method == "PUT")
    with pytest.raises(TransientError) as raised:
        store.write_result({"status": "completed"})
    assert f"{s3_uri}/{RUN}/result.json" in str(raised.value)
    assert "continue the run" in str(raised.value)
    faulty.heal()
    store.write_result({"status": "completed"})


def test_an_upload_in_parts_that_fails_is_aborted(
    aws: S3Server, faulty: FaultyS3, s3_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = begun(s3_uri)
    monkeypatch.setattr(s3, "PATIENCE_SECONDS", 0.1)
    faulty.fail("busy", lambda request: "partNumber=3" in request.target)
    with pytest.raises(TransientError, match=f"{RUN}/checkpoints/step-000002"):
        save(store, 2, large(tmp_path / "a"))
    assert unfinished(aws, s3_uri) == []
    assert RunStore(s3_uri, RUN).checkpoint_steps() == []
    faulty.heal()
    manifest = save(store, 2, tmp_path / "a")
    store.fetch_checkpoint(manifest, tmp_path / "back")


@pytest.mark.parametrize(
    ("setting", "value", "what", "remedy"),
    [
        ("AWS_SECRET_ACCESS_KEY", "changed", "do not belong together", "AWS_SECRET_ACCESS_KEY"),
        ("bucket", "another-bucket", "no such bucket", "create the bucket"),
    ],
)
def test_a_publish_with_wrong_settings_names_object_and_remedy(
    s3_uri: str, monkeypatch: pytest.MonkeyPatch, setting: str, value: str, what: str, remedy: str
) -> None:
    if setting == "bucket":
        s3_uri = f"s3://{value}/runs"
    else:
        monkeypatch.setenv(setting, value)
    store = RunStore(s3_uri, RUN)
    for call in (store.take_lease, lambda: store.begin(name="", backend="", seed=0)):
        with pytest.raises(UserError, match=what) as raised:
            call()
        (problem,) = raised.value.problems
        assert problem.where == f"store {s3_uri}"
        assert f"{s3_uri}/{RUN}/" in problem.what
        assert remedy in problem.remedy


# -- killed --------------------------------------------------------------------------------------

SAVE_ONCE = """
import sys, pathlib
from backends.storage.run_store import RunStore
store = RunStore(sys.argv[1], "run-1")
store.begin(name="sft", backend="mock", seed=0)
store.take_lease()
store.append_metrics({"step": 1})
store.append_metrics({"step": 2})
store.flush_metrics()
store.save_checkpoint(
    step=2, state_uri=None, algorithm_state={}, folder=pathlib.Path(sys.argv[2])
)
"""


@pytest.mark.parametrize(
    ("moment", "whole", "parts"),
    [
        (lambda request: "partNumber=3" in request.target, 2, 1),
        (lambda request: "manifest.json" in request.target and request.method == "PUT", 3, 0),
    ],
    ids=["within a large file", "between the files and the manifest"],
)
def test_a_save_that_was_killed_is_not_seen_and_then_collected(
    aws: S3Server,
    faulty: FaultyS3,
    s3_uri: str,
    tmp_path: Path,
    moment: Callable[[Request], bool],
    whole: int,
    parts: int,
) -> None:
    """kill -9 with the request on its way; the next process collects and saves the step again."""
    folder = large(tmp_path / "a")
    faulty.fail("held", moment)
    command = [sys.executable, "-c", SAVE_ONCE, s3_uri, str(folder)]
    with subprocess.Popen(command) as writer:
        assert faulty.arrived.wait(60)
        writer.send_signal(signal.SIGKILL)
    faulty.release()
    faulty.heal()

    reader = RunStore.open_existing(s3_uri, RUN)
    assert (reader.checkpoint_steps(), reader.latest_checkpoint()) == ([], None)
    left = reader.objects.keys(f"{RUN}/checkpoints")
    assert len(left) <= whole  # small files may still have been on their way
    assert ("adapter_model.safetensors" in str(left)) == (not parts)
    assert len(unfinished(aws, s3_uri)) == parts

    _pass_a_second(reader)
    again = taken(s3_uri)
    assert again.collect_orphans() == ([2] if left else [])
    assert again.objects.keys(f"{RUN}/checkpoints") == []
    assert unfinished(aws, s3_uri) == []
    manifest = save(again, 2, folder)
    again.fetch_checkpoint(manifest, tmp_path / "back")
    digest = hashlib.sha256((folder / "adapter_model.safetensors").read_bytes()).hexdigest()
    assert digest in [file.sha256 for file in manifest.files]


def _pass_a_second(store: RunStore) -> None:
    """Wait until the service's clock, which counts seconds, shows another one."""
    times = store.objects.modified(RUN)
    while store.objects.modified("tick").get("tick", min(times.values())) <= max(times.values()):
        store.objects.write("tick", b"")


def test_uploads_that_may_not_be_listed_are_left_with_a_warning(
    s3_uri: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = begun(s3_uri)
    monkeypatch.setattr(store.objects._fs, "call_s3", _denied)
    assert store.collect_orphans() == []
    assert "unfinished uploads below" in caplog.text
    assert "may not do that here" in caplog.text


def _denied(*arguments: object, **options: object) -> None:
    from botocore.exceptions import ClientError
    from s3fs.errors import translate_boto_error

    error = {"Error": {"Code": "AccessDenied", "Message": "as S3 words it"}}
    raise translate_boto_error(ClientError(error, "ListMultipartUploads"))
