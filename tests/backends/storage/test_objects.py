"""What an object store promises, on each kind of store; and what is special to one kind."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from backends.errors import UserError
from backends.storage.objects import (
    AlreadyExists,
    FolderStore,
    NotFound,
    ObjectStore,
    StoreError,
    open_store,
)


@pytest.fixture
def objects(store_uri: str) -> ObjectStore:
    return open_store(store_uri)


# -- every kind of store -------------------------------------------------------------------------


def test_objects_come_back_as_written_last(objects: ObjectStore) -> None:
    objects.write("run/a.json", b"one")
    objects.write("run/a.json", b"two")
    objects.write("run/empty", b"")
    assert objects.read("run/a.json") == b"two"
    assert objects.read("run/empty") == b""


def test_a_second_store_sees_what_the_first_wrote(objects: ObjectStore, store_uri: str) -> None:
    other = open_store(store_uri)
    assert other.keys() == []
    assert not other.exists("run/a.json")
    objects.write("run/a.json", b"one")
    assert other.keys() == ["run/a.json"]
    assert other.exists("run/a.json")
    objects.write("run/a.json", b"second")
    assert other.read("run/a.json") == b"second"
    objects.delete("run")
    assert not other.exists("run/a.json")
    assert other.folders() == []


def test_a_missing_object_is_not_found(objects: ObjectStore, tmp_path: Path) -> None:
    objects.write("run/a.json", b"one")
    for key in ("nothing", "run", "run/a.json/below", "run/a"):
        with pytest.raises(NotFound, match=key):
            objects.read(key)
        assert not objects.exists(key)
    with pytest.raises(NotFound):
        objects.download(["b.json"], "run", tmp_path)


def test_listings_are_of_folders_not_of_name_beginnings(objects: ObjectStore) -> None:
    for key in ("run/b", "run/a/deep/c", "run-2/a", "top"):
        objects.write(key, b"")
    assert objects.keys() == ["run-2/a", "run/a/deep/c", "run/b", "top"]
    assert objects.keys("run") == ["run/a/deep/c", "run/b"]
    assert objects.keys("run/a") == ["run/a/deep/c"]
    assert objects.keys("nothing") == []
    assert objects.folders() == ["run", "run-2"]
    assert objects.folders("run") == ["a"]
    assert objects.folders("nothing") == []


def test_delete_takes_one_folder_or_one_object_and_nothing_else(objects: ObjectStore) -> None:
    for key in ("run/a", "run/b/c", "run/bb", "run-2/a"):
        objects.write(key, b"")
    objects.delete("run/b")
    assert objects.keys() == ["run-2/a", "run/a", "run/bb"]
    objects.delete("run/a")
    objects.delete("run/a")
    assert objects.keys() == ["run-2/a", "run/bb"]
    objects.delete("run")
    assert objects.keys() == ["run-2/a"]


def test_the_second_creator_is_refused(objects: ObjectStore) -> None:
    objects.create("run/manifest.json", b"first")
    with pytest.raises(AlreadyExists, match=r"run/manifest\.json"):
        objects.create("run/manifest.json", b"second")
    assert objects.read("run/manifest.json") == b"first"
    assert objects.keys() == ["run/manifest.json"]
    objects.delete("run/manifest.json")
    objects.create("run/manifest.json", b"third")
    assert objects.read("run/manifest.json") == b"third"


def test_of_creators_at_the_same_moment_exactly_one_wins(store_uri: str) -> None:
    writers = [open_store(store_uri) for _ in range(4)]
    for turn in range(5):
        together = threading.Barrier(len(writers))

        def create(
            writer: int, turn: int = turn, together: threading.Barrier = together
        ) -> bytes | None:
            data = f"{turn}/{writer}".encode()
            together.wait()
            try:
                writers[writer].create(f"lease-{turn}", data)
            except AlreadyExists:
                return None
            return data

        with ThreadPoolExecutor(len(writers)) as pool:
            winners = [data for data in pool.map(create, range(len(writers))) if data]
        assert len(winners) == 1
        assert writers[0].read(f"lease-{turn}") == winners[0]


def test_one_store_serves_several_threads(objects: ObjectStore) -> None:
    def round_trip(number: int) -> bytes:
        objects.write(f"many/{number}", b"%d" % number)
        return objects.read(f"many/{number}")

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(round_trip, range(24))) == [b"%d" % n for n in range(24)]
    assert len(objects.keys("many")) == 24


def test_files_travel_whole_whatever_their_size(objects: ObjectStore, tmp_path: Path) -> None:
    sizes = {"empty.txt": 0, "deep/small.json": 1_000, "big.safetensors": 20 * 2**20 + 1}
    for name, size in sizes.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(os.urandom(size))
    objects.upload(sizes, tmp_path, "run/step")
    objects.upload([], tmp_path, "run/none")
    back = tmp_path / "back"
    objects.download(sizes, "run/step", back)
    for name in sizes:
        assert (back / name).read_bytes() == (tmp_path / name).read_bytes(), name
    assert objects.keys("run") == sorted(f"run/step/{name}" for name in sizes)


def test_a_check_finds_a_good_store_and_leaves_nothing(objects: ObjectStore) -> None:
    objects.check_writable()
    objects.write("run/a", b"")
    objects.check_writable()
    assert objects.keys() == ["run/a"]


@pytest.mark.parametrize("key", ["", "/etc", "../up", "a//b", "a/", "a/./b", "a*", ".tmp-x", "a\n"])
def test_a_key_cannot_leave_the_prefix_or_mean_several_objects(key: str) -> None:
    with pytest.raises(ValueError, match="key"):
        open_store("memory://keys").write(key, b"")


# -- a folder ------------------------------------------------------------------------------------


def test_a_folder_is_where_a_person_expects_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for given, folder in {
        "runs": tmp_path / "runs",
        "~/runs": tmp_path / "home" / "runs",
        f"file://{tmp_path}/f": tmp_path / "f",
    }.items():
        store = open_store(given)
        store.write("run/report.md", b"words")
        assert (folder / "run" / "report.md").read_bytes() == b"words"
        assert store.uri("run/report.md") == str(folder / "run" / "report.md")
        assert store.local_path("run") == folder / "run"


def test_readers_of_a_folder_never_see_half_an_object(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    letters = [bytes([letter]) * 300_000 for letter in b"abc"]
    store.write("metrics.jsonl", letters[0])
    done = threading.Event()

    def write() -> None:
        for turn in range(60):
            store.write("metrics.jsonl", letters[turn % 3])
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not done.is_set():
        assert store.read("metrics.jsonl") in letters
    writer.join()


def test_a_write_that_dies_leaves_the_old_object_and_no_litter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path)
    store.write("result.json", b"old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"(?s)No space left.*free space"):
        store.write("result.json", b"new")
    with pytest.raises(UserError, match="No space left"):
        store.create("manifest.json", b"new")
    assert store.read("result.json") == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_unfinished_files_of_a_killed_writer_are_not_objects(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".tmp-0123-report.md").write_bytes(b"half")
    assert open_store(tmp_path).keys() == []


def test_checking_a_folder_makes_none(tmp_path: Path) -> None:
    open_store(tmp_path / "not" / "yet").check_writable()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", ["file", "file/below/it"])
def test_a_file_is_no_store(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").write_text("mine")
    store = open_store(tmp_path / path)
    with pytest.raises(UserError, match="is not a folder") as raised:
        store.check_writable()
    assert raised.value.problems[0].where == f"store {tmp_path / path}"
    assert "name another folder" in raised.value.problems[0].remedy
    with pytest.raises(UserError, match="name another folder"):
        store.write("run/a", b"")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_without_permission_is_the_users_to_mend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The tests may run as root, whom no permission stops: so the refusal itself is simulated.
    def refuse(*arguments: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path))

    store = open_store(tmp_path / "runs")
    with monkeypatch.context() as patch:
        patch.setattr(os, "mkdir", refuse)
        with pytest.raises(UserError, match=r"(?s)Permission denied.*change its permissions"):
            store.check_writable()
        with pytest.raises(UserError, match="Permission denied"):
            store.write("run/a", b"")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_found_by_the_check(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match="Permission denied"):
        open_store(tmp_path / "runs").check_writable()
    tmp_path.chmod(0o700)


def test_a_folder_without_hard_links_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(UserError, match="hard links"):
        open_store(tmp_path).check_writable()
    assert list(tmp_path.iterdir()) == []


# -- addresses -----------------------------------------------------------------------------------


@pytest.mark.parametrize("uri", ["s3://", "s3:///runs", "s3://ab", "s3://UPPER/x", "gs://bucket/x"])
def test_an_address_that_is_no_store_is_refused_when_opened(uri: str) -> None:
    with pytest.raises(UserError, match="s3://bucket/prefix"):
        open_store(uri)


def test_opening_a_folder_imports_no_client_library() -> None:
    script = (
        "import sys; from backends.storage.run_store import RunStore; RunStore('runs', 'x');"
        "print([m for m in ('fsspec', 's3fs', 'botocore', 'aiohttp', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_errors_are_of_one_tree() -> None:
    assert issubclass(NotFound, StoreError)
    assert issubclass(AlreadyExists, StoreError)
    assert isinstance(open_store("runs"), FolderStore)
