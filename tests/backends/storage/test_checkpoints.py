"""What a checkpoint promises: whole or not there, verified when read, gone when it expired."""

from __future__ import annotations

import hashlib
import random
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from pydantic import ValidationError

from backends.storage.checkpoints import (
    KINDS_KEPT,
    Best,
    CheckpointConflict,
    DamagedCheckpoint,
    Retention,
)
from backends.storage.lease import LeaseLost
from backends.storage.objects import AlreadyExists, Look, StoreError
from backends.storage.run_store import RunStore
from tests.backends.storage.runs import RUN, STATE, Scored, adapter, begun, save, taken, train


def test_a_checkpoint_round_trips_with_all_that_a_resume_needs(
    store_uri: str, tmp_path: Path
) -> None:
    store = begun(store_uri)
    train(store, 1, 4)
    for step in (2, 4):
        save(store, step, adapter(tmp_path / f"save-{step}", b"w" * step))

    manifest = RunStore(store_uri, RUN).latest_checkpoint()
    assert manifest is not None
    assert (manifest.run_id, manifest.step, manifest.next_step) == (RUN, 4, 4)
    assert manifest.state_uri == "tinker://x/weights/4"
    assert manifest.algorithm_state == STATE
    assert manifest.metrics == store.metrics()[3]
    assert [file.path for file in manifest.files] == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "tokenizer/chat_template.jinja",
    ]
    assert manifest.files[1].size == 4
    assert manifest.files[1].sha256 == hashlib.sha256(b"wwww").hexdigest()
    assert [m.step for m in store.checkpoints()] == store.checkpoint_steps() == [2, 4]
    store.fetch_checkpoint(manifest, tmp_path / "back")
    assert (tmp_path / "back" / "adapter_model.safetensors").read_bytes() == b"wwww"
    assert (tmp_path / "back" / "tokenizer" / "chat_template.jinja").is_file()
    assert not (tmp_path / "back" / "manifest.json").exists()


def test_steps_are_ordered_by_number_beyond_six_digits(tmp_path: Path) -> None:
    store = begun(str(tmp_path))
    folder = adapter(tmp_path / "a")
    for step in (999_999, 1_000_000):
        save(store, step, folder)
    latest = store.latest_checkpoint()
    assert latest is not None
    assert latest.step == 1_000_000


def test_a_checkpoint_in_a_folder_is_used_in_place(tmp_path: Path) -> None:
    store = begun(str(tmp_path))
    manifest = save(store, 2, adapter(tmp_path / "a"))
    folder = store.checkpoint_folder(manifest)
    assert folder == tmp_path / RUN / "checkpoints" / "step-000002"
    assert str(folder) == store.checkpoint_uri(manifest)
    memory = begun(f"memory://{uuid.uuid4().hex}")
    assert memory.checkpoint_folder(save(memory, 2, tmp_path / "a")) is None


def test_a_save_that_died_before_its_manifest_is_not_a_checkpoint(
    store_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = begun(store_uri)
    save(store, 2, adapter(tmp_path / "a", b"good"))

    def die(key: str, data: bytes, look: Look) -> None:
        raise KeyboardInterrupt

    dying = taken(store_uri)
    monkeypatch.setattr(dying.objects, "create", die)
    with pytest.raises(KeyboardInterrupt):
        save(dying, 4, adapter(tmp_path / "b", b"a torn save of other bits"))
    left = [key for key in store.objects.keys(RUN) if "step-000004" in key]
    assert len(left) == 3

    again = taken(store_uri)
    assert again.checkpoint_steps() == [2]
    latest = again.latest_checkpoint()
    assert latest is not None
    assert latest.step == 2
    manifest = save(again, 4, adapter(tmp_path / "c", b"whole"))
    again.fetch_checkpoint(manifest, tmp_path / "back")
    assert (tmp_path / "back" / "adapter_model.safetensors").read_bytes() == b"whole"


def test_saving_the_same_bits_again_is_the_same_save(store_uri: str, tmp_path: Path) -> None:
    store = begun(store_uri)
    folder = adapter(tmp_path / "a")
    first = save(store, 2, folder)
    store.objects.write(f"{RUN}/checkpoints/step-000002/adapter_model.safetensors", b"damaged")
    assert save(store, 2, folder, state_uri="tinker://another/session") == first
    assert store.latest_checkpoint() == first
    store.fetch_checkpoint(first, tmp_path / "healed")


def test_saving_other_bits_under_a_step_that_is_kept_is_a_conflict(
    store_uri: str, tmp_path: Path
) -> None:
    store = begun(store_uri)
    first = save(store, 2, adapter(tmp_path / "a"))
    with pytest.raises(CheckpointConflict, match=r"step-000002.*differs in adapter_model\.safet"):
        save(store, 2, adapter(tmp_path / "b", b"other"))
    with pytest.raises(CheckpointConflict, match="differs in the algorithm's state"):
        save(store, 2, tmp_path / "a", algorithm_state={})
    assert store.latest_checkpoint() == first
    store.fetch_checkpoint(first, tmp_path / "back")


def test_a_manifest_whose_answer_was_lost_is_the_save_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = begun(tmp_path)
    create = store.objects.create
    folder = adapter(tmp_path / "a")

    def lose_the_answer(key: str, data: bytes, look: Look) -> None:
        create(key, data, look)
        raise AlreadyExists(key)

    monkeypatch.setattr(store.objects, "create", lose_the_answer)
    assert save(store, 2, folder) == store.latest_checkpoint()

    def vanish(key: str, data: bytes, look: Look) -> None:
        raise AlreadyExists(key)

    monkeypatch.setattr(store.objects, "create", vanish)
    with pytest.raises(AlreadyExists):
        save(store, 3, folder)


def test_a_run_taken_over_during_an_upload_gets_no_manifest(
    store_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = begun(store_uri)
    upload = store.objects.upload

    def slow(files: list[str], folder: Path, prefix: str) -> None:
        upload(files, folder, prefix)
        taken(store_uri)

    monkeypatch.setattr(store.objects, "upload", slow)
    with pytest.raises(LeaseLost):
        save(store, 2, adapter(tmp_path / "a"))
    assert store.checkpoint_steps() == []


@pytest.mark.parametrize("name", ["optimizer.pt", "model.bin", "state.pkl", "x.npy", "noending"])
def test_kinds_of_files_that_can_hold_code_are_refused(tmp_path: Path, name: str) -> None:
    store = begun(str(tmp_path / "store"))
    folder = adapter(tmp_path / "a")
    (folder / name).write_bytes(b"")
    with pytest.raises(StoreError, match=rf"{name} is not kept in a checkpoint: only .*\.json"):
        save(store, 2, folder)
    assert store.objects.keys(f"{RUN}/checkpoints") == []
    assert ".safetensors" in KINDS_KEPT


def test_a_checkpoint_whose_server_keeps_the_files_has_none(store_uri: str, tmp_path: Path) -> None:
    store = begun(store_uri)
    (tmp_path / "empty").mkdir()
    manifest = save(store, 2, tmp_path / "empty")
    assert manifest.files == ()
    assert store.latest_checkpoint() == manifest
    store.fetch_checkpoint(manifest, tmp_path / "empty")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (None, "adapter_model.safetensors"),
        (b"short", "has 5 bytes, its manifest says 7"),
        (b"WEIGHTS", "is not what was saved"),
    ],
)
def test_damage_is_found_and_the_file_named(
    store_uri: str, tmp_path: Path, damage: bytes | None, message: str
) -> None:
    store = begun(store_uri)
    manifest = save(store, 2, adapter(tmp_path / "a"))
    key = f"{RUN}/checkpoints/step-000002/adapter_model.safetensors"
    if damage is None:
        store.objects.delete(key)
    else:
        store.objects.write(key, damage)
    with pytest.raises(
        DamagedCheckpoint, match=rf"adapter_model\.safetensors.*{message}|{message}"
    ):
        store.fetch_checkpoint(manifest, tmp_path / "back")
    if store.objects.local_path(key) is not None:
        with pytest.raises(DamagedCheckpoint, match=r"adapter_model\.safetensors"):
            store.checkpoint_folder(manifest)


def test_a_manifest_of_a_later_version_is_refused(tmp_path: Path) -> None:
    store = begun(str(tmp_path))
    save(store, 2, adapter(tmp_path / "a"))
    path = tmp_path / RUN / "checkpoints" / "step-000002" / "manifest.json"
    path.write_text(path.read_text().replace('"version": 1', '"version": 2'))
    with pytest.raises(DamagedCheckpoint, match=r"manifest\.json is not a manifest this version"):
        store.latest_checkpoint()


# -- retention -----------------------------------------------------------------------------------


def _saved(store: RunStore, folder: Path, scores: dict[int, float]) -> RunStore:
    """Five checkpoints, with an evaluation for some of them."""
    folder.mkdir()
    train(store, 1, 5)
    for step in range(1, 6):
        save(store, step, folder)
        if step in scores:
            store.write_evaluation(Scored("heldout", step, scores[step]))
    return store


@pytest.mark.parametrize(
    ("keep", "stay"),
    [
        (Retention(), [1, 2, 3, 4, 5]),
        (Retention(keep_last=1), [5]),
        (Retention(keep_last=2), [4, 5]),
        (Retention(keep_last=9), [1, 2, 3, 4, 5]),
        (Retention(keep_last=1, keep_best=Best(metric="heldout")), [2, 5]),
        (Retention(keep_last=2, keep_best=Best(metric="heldout", mode="min")), [1, 4, 5]),
        (Retention(keep_last=1, keep_best=Best(metric="loss")), [1, 5]),
        (Retention(keep_last=1, keep_best=Best(metric="loss", mode="min")), [5]),
        (Retention(keep_last=1, keep_best=Best(metric="typo")), [1, 2, 3, 4, 5]),
    ],
)
def test_the_last_ones_and_the_best_stay(tmp_path: Path, keep: Retention, stay: list[int]) -> None:
    store = _saved(begun(tmp_path / "store"), tmp_path / "empty", {1: 0.1, 2: 0.9, 4: 0.9})
    gone = store.expire(keep)
    assert [manifest.step for manifest in gone] == sorted({1, 2, 3, 4, 5} - set(stay))
    assert store.checkpoint_steps() == stay
    assert store.expire(keep) == []


def test_a_best_that_none_has_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = _saved(begun(tmp_path / "store"), tmp_path / "empty", {})
    store.expire(Retention(keep_last=1, keep_best=Best(metric="typo")))
    assert "no checkpoint expires: none of them has 'typo'" in caplog.text


def test_a_best_needs_a_number_of_last_ones() -> None:
    with pytest.raises(ValidationError, match="set keep_last too"):
        Retention(keep_best=Best(metric="heldout"))
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        Retention(keep_last=0)


def test_what_expires_loses_its_manifest_first_and_leaves_nothing(
    store_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = begun(store_uri)
    folder = adapter(tmp_path / "a")
    for step in (1, 2):
        save(store, step, folder)
    delete = store.objects.delete

    def die_after(prefix: str) -> None:
        delete(prefix)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(store.objects, "delete", die_after)
        with pytest.raises(KeyboardInterrupt):
            store.expire(Retention(keep_last=1))
    assert RunStore(store_uri, RUN).checkpoint_steps() == [2]
    assert any("step-000001" in key for key in store.objects.keys(RUN))
    _pass_a_tick(store)
    assert taken(store_uri).collect_orphans() == [1]
    assert not any("step-000001" in key for key in store.objects.keys(RUN))
    assert RunStore(store_uri, RUN).checkpoint_steps() == [2]


def _pass_a_tick(store: RunStore) -> None:
    """Wait until the store's clock shows a later time than the newest object's."""
    newest = max(store.objects.modified(RUN).values())
    while True:
        store.objects.write("tick", b"")
        if store.objects.modified("tick")["tick"] > newest:
            return
        time.sleep(0.01)


def test_orphans_newer_than_the_lease_are_left_alone(store_uri: str, tmp_path: Path) -> None:
    store = begun(store_uri)
    save(store, 1, adapter(tmp_path / "a"))
    _pass_a_tick(store)
    store.objects.write(f"{RUN}/checkpoints/step-000002/adapter_config.json", b"{}")
    assert store.collect_orphans() == []
    _pass_a_tick(store)
    again = taken(store_uri)
    assert again.collect_orphans() == [2]
    assert again.collect_orphans() == []
    assert again.checkpoint_steps() == [1]


def test_files_that_a_killed_writer_left_unfinished_are_collected(tmp_path: Path) -> None:
    store = begun(tmp_path)
    place = tmp_path / RUN / "checkpoints" / "step-000002"
    place.mkdir(parents=True)
    (place / ".tmp-0123456789ab-adapter_model.safetensors").write_bytes(b"half")
    (tmp_path / RUN / ".tmp-0123456789ab-metrics.jsonl").write_bytes(b"half")
    _pass_a_tick(store)
    again = taken(tmp_path)
    (tmp_path / RUN / ".tmp-0123456789ab-report.md").write_bytes(b"under way")
    assert again.collect_orphans() == []
    left = [path.name for path in (tmp_path / RUN).rglob(".tmp-*")]
    assert left == [".tmp-0123456789ab-report.md"]


# -- killed --------------------------------------------------------------------------------------


SAVE_FOREVER = """
import sys, pathlib
from backends.storage.run_store import RunStore
store = RunStore(sys.argv[1], "run-1")
store.begin(name="sft", backend="mock", seed=0)
store.take_lease()
latest = store.latest_checkpoint()
start = latest.step if latest else 0
store.rewind(start)
folder = pathlib.Path(sys.argv[2])
print("ready", flush=True)
for step in range(start + 1, 10**6):
    (folder / "adapter_model.safetensors").write_bytes(b"%d" % step * 200_000)
    store.append_metrics({"step": step, "loss": 1 / step})
    store.flush_metrics()
    store.save_checkpoint(step=step, state_uri=None, algorithm_state={}, folder=folder)
"""


def test_killed_at_any_moment_a_run_leaves_only_whole_things(tmp_path: Path) -> None:
    seed = 11
    moments = random.Random(seed)
    store_uri, folder = str(tmp_path / "store"), tmp_path / "files"
    folder.mkdir()
    reached = 0
    for _ in range(4):
        command = [sys.executable, "-c", SAVE_FOREVER, store_uri, str(folder)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"ready\n"
            time.sleep(moments.uniform(0.05, 0.3))
            writer.send_signal(signal.SIGKILL)
        store = RunStore(store_uri, RUN)
        manifests = store.checkpoints()
        for manifest in manifests:
            assert store.checkpoint_folder(manifest), f"seed {seed}"
        steps = [manifest.step for manifest in manifests]
        assert steps == list(range(1, len(steps) + 1)), f"seed {seed}"
        rows = [row["step"] for row in store.metrics()]
        assert rows == list(range(1, len(rows) + 1)), f"seed {seed}"
        assert len(rows) >= len(steps) >= reached
        reached = len(steps)
    assert reached > 4
