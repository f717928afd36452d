"""Checkpoints in a folder and in an object store: manifests, names, damage, imports."""

from __future__ import annotations

import json
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from backends.engine.checkpoints import (
    CheckpointStore,
    CheckpointUri,
    checked_name,
    import_folder,
    publish,
)
from backends.errors import UserError

URI = CheckpointUri("1f-2:train:0", "weights", "step-1")


def write_files(folder: Path, weights: bytes = b"weights") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(weights)
    config = {"r": 4, "base_model_name_or_path": "tiny"}
    (folder / "adapter_config.json").write_text(json.dumps(config))


@pytest.fixture(params=["folder", "objects"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> CheckpointStore:
    where = str(tmp_path / "store") if request.param == "folder" else f"memory://{tmp_path.name}"
    return CheckpointStore(where)


def save(store: CheckpointStore, uri: CheckpointUri = URI, weights: bytes = b"weights") -> None:
    folder = store.begin(uri)
    write_files(folder, weights)
    store.publish(uri, folder)


def test_what_was_saved_is_found_and_fetched(store: CheckpointStore) -> None:
    folder = store.begin(URI)
    write_files(folder)
    assert store.find(URI) is None
    saved = store.publish(URI, folder, user_metadata={"step": 1}, train_mlp=False)
    fetched, manifest = store.fetch(CheckpointUri.parse(str(URI)))
    assert manifest == saved
    assert (fetched / "adapter_model.safetensors").read_bytes() == b"weights"
    assert (manifest.lora_rank, manifest.base_model, manifest.train_mlp) == (4, "tiny", False)
    assert manifest.user_metadata == {"step": 1}
    assert manifest.files["adapter_model.safetensors"].size == 7


def test_in_a_folder_nothing_is_copied(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path))
    save(store)
    assert store.fetch(URI)[0] == tmp_path / "1f-2_train_0" / "weights" / "step-1"


def test_a_name_is_taken_once(store: CheckpointStore) -> None:
    save(store)
    with pytest.raises(UserError, match="there is a checkpoint tinker://1f-2:train:0/weights/step"):
        store.begin(URI)
    folder = store.begin(URI, overwrite=True)
    assert store.find(URI) is None
    write_files(folder, b"newer")
    store.publish(URI, folder)
    assert (store.fetch(URI)[0] / "adapter_model.safetensors").read_bytes() == b"newer"


def test_of_two_writers_one_publishes(store: CheckpointStore) -> None:
    first, second = store.begin(URI), store.begin(URI)
    write_files(first)
    store.publish(URI, first)
    write_files(second)
    with pytest.raises(UserError, match="already"):
        store.publish(URI, second)


def test_what_a_dead_writer_left_is_in_nobodys_way(store: CheckpointStore) -> None:
    folder = store.begin(URI)
    (folder / "half").write_bytes(b"")
    save(store)
    assert set(store.fetch(URI)[1].files) == {"adapter_model.safetensors", "adapter_config.json"}
    assert not (store.fetch(URI)[0] / "half").exists()


@pytest.mark.parametrize("damage", [b"weightz", b"weights and more"])
def test_damage_is_noticed(tmp_path: Path, damage: bytes) -> None:
    store = CheckpointStore(str(tmp_path))
    save(store)
    (store.fetch(URI)[0] / "adapter_model.safetensors").write_bytes(damage)
    with pytest.raises(UserError, match="step-1 is damaged"):
        store.fetch(URI)


def test_a_missing_file_is_noticed(store: CheckpointStore) -> None:
    save(store)
    store._store.delete(f"{URI.prefix}/adapter_model.safetensors")
    (store._local(URI) / "adapter_model.safetensors").unlink(missing_ok=True)
    with pytest.raises(UserError, match="is damaged"):
        store.fetch(URI)


def test_listing_and_deleting(store: CheckpointStore) -> None:
    other = CheckpointUri("other:train:0", "sampler_weights", "x")
    save(store)
    save(store, other)
    store.begin(CheckpointUri("other:train:0", "weights", "unfinished"))
    assert [manifest.uri for manifest in store.manifests()] == [URI, other]
    assert [manifest.uri for manifest in store.manifests("other:train:0")] == [other]
    assert store.manifests("nobody") == store.manifests("../x") == []
    store.delete(URI)
    assert store.find(URI) is None
    with pytest.raises(UserError, match="there is no checkpoint"):
        store.fetch(URI)


def test_its_time_ends(store: CheckpointStore) -> None:
    folder = store.begin(URI)
    write_files(folder)
    created = datetime.now(UTC)
    manifest = store.publish(URI, folder, ttl_seconds=3600, created=created)
    assert manifest.expires is not None
    assert abs(manifest.expires - created - timedelta(hours=1)) < timedelta(seconds=5)
    store._store.write(
        f"{URI.prefix}/manifest.json",
        manifest.model_copy(update={"expires": created}).model_dump_json().encode(),
    )
    assert store.find(URI) is None
    assert store.manifests() == []
    save(store)


def test_flags_beside_a_manifest_that_stays_as_it_is(store: CheckpointStore) -> None:
    save(store)
    key = f"{URI.prefix}/manifest.json"
    document = store._store.read(key)
    assert store.set_flags(CheckpointUri("nobody", "weights", "x"), public=True) is None
    expires = datetime.now(UTC) + timedelta(hours=1)
    for changes, expected in (
        ({"public": True}, (True, None)),
        ({"expires": expires}, (True, expires)),
        ({"public": False}, (False, expires)),
        ({"expires": None}, (False, None)),
        ({"public": True}, (True, None)),
    ):
        changed = store.set_flags(URI, **changes)
        found = store.find(URI)
        assert found == changed == store.manifests()[0] == store.fetch(URI)[1]
        assert found is not None
        assert (found.public, found.expires) == expected
    assert store._store.read(key) == document
    folder = store.begin(URI, overwrite=True)
    assert not store._store.exists(f"{URI.prefix}/flags.json")
    write_files(folder)
    store.publish(URI, folder)
    assert not store.manifest(URI).public


def test_flags_of_an_earlier_checkpoint_do_not_count(store: CheckpointStore) -> None:
    """As when somebody sets them while another overwrites the checkpoint."""
    save(store)
    store.set_flags(URI, public=True)
    flags = store._store.read(f"{URI.prefix}/flags.json")
    folder = store.begin(URI, overwrite=True)
    write_files(folder)
    store.publish(URI, folder)
    store._store.write(f"{URI.prefix}/flags.json", flags)
    assert not store.manifest(URI).public


def test_a_sweep_removes_what_has_expired(store: CheckpointStore) -> None:
    assert store.sweep() is None
    names = ("never", "soon", "later", "flagged", "over")
    uris = {name: CheckpointUri("m", "weights", name) for name in names}
    for name, seconds in (("never", None), ("soon", 60), ("later", 3600), ("flagged", None)):
        folder = store.begin(uris[name])
        write_files(folder)
        store.publish(uris[name], folder, ttl_seconds=seconds)
    folder = store.begin(uris["over"])
    write_files(folder)
    store.publish(uris["over"], folder, ttl_seconds=0)
    store.set_flags(uris["flagged"], expires=datetime.now(UTC))
    for name in ("over", "flagged"):
        assert store.find(uris[name]) is None
        assert store._store.keys(uris[name].prefix)
        with pytest.raises(UserError, match="it may have expired"):
            store.fetch(uris[name])
    assert store.sweep() == store.manifest(uris["soon"]).expires
    for name in ("over", "flagged"):
        assert store._store.keys(uris[name].prefix) == []
        assert not store._local(uris[name]).exists()
    assert [manifest.name for manifest in store.manifests()] == ["never", "soon", "later"]


def test_a_copy_is_one_of_its_own(store: CheckpointStore) -> None:
    folder = store.begin(URI)
    write_files(folder)
    source = store.publish(URI, folder, ttl_seconds=60, user_metadata={"a": "b"}, train_mlp=False)
    store.set_flags(URI, public=True)
    target = CheckpointUri("copy", "weights", "step-1")
    for _ in range(2):
        store.copy(URI, target, 3600)
    store.delete(URI)
    fetched, manifest = store.fetch(target)
    assert (fetched / "adapter_model.safetensors").read_bytes() == b"weights"
    assert (manifest.uri, manifest.copied_from) == (target, str(URI))
    assert (manifest.files, manifest.lora_rank) == (source.files, source.lora_rank)
    assert (manifest.public, manifest.train_mlp) == (False, False)
    assert manifest.user_metadata == {"a": "b"}
    assert manifest.expires is not None
    assert manifest.expires > datetime.now(UTC) + timedelta(minutes=59)
    with pytest.raises(UserError, match="there is no checkpoint"):
        store.copy(URI, CheckpointUri("another", "weights", "x"), None)
    save(store)
    with pytest.raises(UserError, match="already"):
        store.copy(target, URI, None)


def test_in_s3_too(s3_uri: str, tmp_path: Path) -> None:
    store = CheckpointStore(s3_uri)
    with closing(store):
        save(store)
        target = CheckpointUri("copy", "weights", "step-1")
        store.copy(URI, target, 3600)
        store.set_flags(URI, public=True)
        assert store.manifest(URI).public
        store.set_flags(URI, expires=datetime.now(UTC))
        assert store.sweep() == store.manifest(target).expires
        assert store._store.keys(URI.prefix) == []
        store.set_flags(target, expires=datetime.now(UTC))
        assert store.sweep() is None
        assert store._store.keys() == []


@pytest.mark.parametrize("name", ["a", "step-000200", "ünïcode", "a b", "x" * 255, "..."])
def test_good_names(name: str) -> None:
    assert CheckpointUri.parse(f"tinker://m/weights/{checked_name(name)}").name == name


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "a\\b", "../x", "a\0", "a\nb", " a", "*", "x" * 256, "ü" * 128]
)
def test_bad_names(name: str) -> None:
    with pytest.raises(UserError, match="take one path segment"):
        checked_name(name)


@pytest.mark.parametrize(
    "uri",
    [
        "weights",
        "tinker://m/weights",
        "tinker://m/other/x",
        "tinker://../weights/x",
        "tinker://m/weights/x/y",
        "tinker:///weights/x",
        "tinker://m/weights/..",
        "s3://m/weights/x",
    ],
)
def test_bad_uris(uri: str) -> None:
    with pytest.raises(UserError, match="path"):
        CheckpointUri.parse(uri)


def test_a_process_beside_the_engine_imports_a_folder(tmp_path: Path) -> None:
    source, root = tmp_path / "source", tmp_path / "store"
    write_files(source)
    (source / "manifest.json").write_text("{}")
    uri = import_folder(root, "run-7", source)
    assert uri == "tinker://imported/weights/run-7"
    folder, manifest = CheckpointStore(str(root)).fetch(CheckpointUri.parse(uri))
    assert folder == root / "imported" / "weights" / "run-7"
    assert manifest.lora_rank == 4
    with pytest.raises(UserError, match="already"):
        import_folder(root, "run-7", source)


def test_publishing_by_hand(tmp_path: Path) -> None:
    folder = tmp_path / "imported" / "weights" / "x"
    folder.mkdir(parents=True)
    with pytest.raises(UserError, match=r"holds no adapter_config\.json"):
        publish(folder)
    write_files(folder)
    publish(folder)
    assert CheckpointStore(str(tmp_path)).find(CheckpointUri("imported", "weights", "x"))
    with pytest.raises(UserError, match="already"):
        publish(folder)


def test_one_that_is_damaged_does_not_hide_the_others(
    store: CheckpointStore, caplog: pytest.LogCaptureFixture
) -> None:
    save(store)
    document = store._store.read(f"{URI.prefix}/manifest.json")
    store._store.write("m/weights/bad/manifest.json", b"{}")
    store._store.write("m/weights/moved/manifest.json", document)
    assert [manifest.uri for manifest in store.manifests()] == [URI]
    assert "bad/manifest.json: is no manifest of a checkpoint" in caplog.text
    assert f"moved/manifest.json: is that of {URI}" in caplog.text
    with pytest.raises(UserError, match="is that of"):
        store.find(CheckpointUri("m", "weights", "moved"))
    store._store.write(f"{URI.prefix}/flags.json", b"{}")
    with pytest.raises(UserError, match=r"flags\.json: is no flags of a checkpoint"):
        store.find(URI)


def test_a_manifest_that_is_none_is_named(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path))
    save(store)
    (store.fetch(URI)[0] / "manifest.json").write_text('{"files": {"../x": {}}}')
    with pytest.raises(UserError, match=r"manifest\.json: is no manifest"):
        store.find(URI)
