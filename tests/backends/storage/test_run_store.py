"""What a run's store promises: a person finds everything, a reader sees only what is whole."""

from __future__ import annotations

import hashlib
import json
import math
import random
import signal
import subprocess
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from backends.errors import UserError
from backends.storage.objects import AlreadyExists, StoreError, open_store
from backends.storage.run_store import (
    KINDS_KEPT,
    CheckpointConflict,
    CheckpointManifest,
    DamagedCheckpoint,
    RunInfo,
    RunStore,
    list_runs,
)

RUN = "run-1"
STATE = {"epoch": 1, "step_in_epoch": 2, "shuffle": [3, 1, 2]}


@dataclass(frozen=True)
class Sample:
    prompt: str
    completion: str
    expected: str
    reward: float


@dataclass(frozen=True)
class Scored:
    name: str
    step: int
    score: float
    metrics: dict[str, float] = field(default_factory=dict)
    samples: list[Any] = field(default_factory=list)


def begun(store_uri: str, run_id: str = RUN, **changes: Any) -> RunStore:
    store = RunStore(store_uri, run_id)
    options = {"name": "sft", "backend": "embedded", "seed": 7, "total_steps": 4}
    assert store.begin(**{**options, **changes})
    return store


def adapter(folder: Path, content: bytes = b"weights") -> Path:
    """A folder of checkpoint files."""
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(content)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def train(store: RunStore, first: int, last: int) -> None:
    for step in range(first, last + 1):
        store.append_metrics({"step": step, "loss": 1 / step, "time/step": time.monotonic()})
    store.flush_metrics()


def save(store: RunStore, step: int, folder: Path, **changes: Any) -> CheckpointManifest:
    options = {"state_uri": f"tinker://x/weights/{step}", "algorithm_state": STATE}
    return store.save_checkpoint(step=step, folder=folder, **{**options, **changes})


# -- the layout ----------------------------------------------------------------------------------


def test_a_run_lies_where_a_person_looks_for_it(store_uri: str, tmp_path: Path) -> None:
    store = begun(store_uri)
    store.write_experiment({"name": "sft", "seed": 7})
    train(store, 1, 2)
    save(store, 2, adapter(tmp_path / "a"))
    store.write_evaluation(Scored("heldout", 2, 0.5, {}, [Sample("1+1", "2", "2", 1.0)]))
    store.write_report("# Report", {"loss": b"png", "score.png": b"png"})
    store.write_result({"status": "completed"})
    assert open_store(store_uri).keys() == [
        "run-1/checkpoints/step-000002/adapter_config.json",
        "run-1/checkpoints/step-000002/adapter_model.safetensors",
        "run-1/checkpoints/step-000002/manifest.json",
        "run-1/checkpoints/step-000002/tokenizer/chat_template.jinja",
        "run-1/evaluations.jsonl",
        "run-1/evaluations/heldout/step-000002.jsonl",
        "run-1/experiment.yaml",
        "run-1/metrics.jsonl",
        "run-1/report.md",
        "run-1/report/loss.png",
        "run-1/report/score.png",
        "run-1/result.json",
        "run-1/run.json",
    ]
    assert store.uri("report.md") == f"{store.uri()}/report.md" == f"{store_uri}/run-1/report.md"


def test_everything_comes_back_in_another_process_of_the_run(
    store_uri: str, tmp_path: Path
) -> None:
    first = begun(store_uri, data_fingerprint="abc", flow_run_url="http://ui/1")
    experiment = {"name": "sft", "seed": 7, "algorithm": {"params": {"eps": 1e-12, "max": None}}}
    first.write_experiment(experiment)
    train(first, 1, 3)
    manifest = save(first, 3, adapter(tmp_path / "a"))
    first.write_evaluation(Scored("heldout", 3, 0.5, {"tokens": 9.0}))
    first.write_result({"status": "cancelled", "metrics": {"loss": 0.5}})

    again = RunStore.open_existing(store_uri, RUN)
    assert again.info() == first.info()
    assert again.info().data_fingerprint == "abc"
    assert again.read_experiment() == experiment
    assert again.metrics() == first.metrics()
    assert [row["step"] for row in again.metrics()] == [1, 2, 3]
    assert again.latest_checkpoint() == manifest
    assert again.checkpoints() == [manifest]
    assert again.evaluations() == first.evaluations()
    assert again.read_result() == {"status": "cancelled", "metrics": {"loss": 0.5}}
    again.discard_result()
    assert first.read_result() is None


def test_run_json_says_where_a_run_comes_from(tmp_path: Path) -> None:
    store = begun(str(tmp_path))
    info = json.loads((tmp_path / RUN / "run.json").read_bytes())
    assert info["run_id"] == RUN
    assert info["python"] == ".".join(map(str, sys.version_info[:3]))
    assert info["packages"]["numpy"] == np.__version__
    assert "torch" in info["packages"]
    assert info["flowtune"]
    assert info["created"].endswith("+00:00")
    assert store.info() == RunInfo(**info)
    newer = {**info, "a_field_of_a_later_version": 1}
    (tmp_path / RUN / "run.json").write_text(json.dumps(newer))
    assert store.info() == RunInfo(**info)


def test_an_experiment_reads_well_and_can_be_run_again(tmp_path: Path) -> None:
    store = begun(str(tmp_path))
    experiment = {"name": "zahlen-größer", "seed": 0, "algorithm": {"learning_rate": 1e-5}}
    store.write_experiment(experiment)
    text = (tmp_path / RUN / "experiment.yaml").read_text()
    assert text == ("name: zahlen-größer\nseed: 0\nalgorithm:\n  learning_rate: 1.0e-05\n")
    assert yaml.safe_load(text) == experiment


# -- opening -------------------------------------------------------------------------------------


def test_a_run_id_that_exists_is_opened_and_stays_as_it_was(store_uri: str) -> None:
    first = begun(store_uri, seed=1)
    second = RunStore(store_uri, RUN)
    assert not second.begin(name="other", backend="mock", seed=2)
    assert second.info() == first.info()
    assert second.info().seed == 1


def test_of_processes_that_begin_one_run_exactly_one_is_first(store_uri: str) -> None:
    stores = [RunStore(store_uri, RUN) for _ in range(4)]

    def begin(number: int) -> bool:
        return stores[number].begin(name=f"n{number}", backend="mock", seed=number)

    with ThreadPoolExecutor(4) as pool:
        firsts = list(pool.map(begin, range(4)))
    assert sum(firsts) == 1
    assert stores[0].info().seed == firsts.index(True)


@pytest.mark.parametrize("run_id", ["", ".", "..", "a/b", "a b", ".hidden", "-x", "ü", "x" * 201])
def test_a_run_id_is_one_plain_name(run_id: str) -> None:
    with pytest.raises(UserError, match=r"(?s)cannot name a run.*letters, digits"):
        RunStore("runs", run_id)


def test_a_run_that_is_not_there_is_answered_with_the_nearest(tmp_path: Path) -> None:
    begun(str(tmp_path), "sft-arithmetic")
    with pytest.raises(UserError, match=r"(?s)no such run in .*did you mean sft-arithmetic\?"):
        RunStore.open_existing(tmp_path, "sft-arithmetik")
    with pytest.raises(UserError, match="no such run"):
        RunStore.open_existing(tmp_path / "nowhere", "x")


def test_a_folder_that_is_not_a_runs_is_not_taken_over(tmp_path: Path) -> None:
    (tmp_path / RUN).mkdir()
    (tmp_path / RUN / "run.json").write_text('{"mine": true}')
    with pytest.raises(UserError, match=r"run\.json is not one"):
        RunStore(tmp_path, RUN).begin(name="sft", backend="mock", seed=0)
    assert (tmp_path / RUN / "run.json").read_text() == '{"mine": true}'


# -- metrics and evaluations ---------------------------------------------------------------------


def test_rows_are_lines_with_the_step_first_and_last_only_when_flushed(tmp_path: Path) -> None:
    store = begun(str(tmp_path))
    path = tmp_path / RUN / "metrics.jsonl"
    store.append_metrics({"loss": 2.5, "step": 1, "a": 1})
    assert not path.exists()
    assert store.metrics() == [{"step": 1, "loss": 2.5, "a": 1}]
    store.flush_metrics()
    assert path.read_text() == '{"step": 1, "a": 1, "loss": 2.5}\n'
    written = path.stat().st_mtime_ns
    store.flush_metrics()
    assert path.stat().st_mtime_ns == written
    store.append_metrics({"step": 2})
    store.flush_metrics()
    assert path.read_text() == '{"step": 1, "a": 1, "loss": 2.5}\n{"step": 2}\n'


def test_json_is_strict_and_knows_numpys_numbers(tmp_path: Path) -> None:
    store = begun(str(tmp_path))
    row = {
        "step": np.int64(1),
        "nan": math.nan,
        "inf": -math.inf,
        "f32": np.float32(0.5),
        "f32nan": np.float32("nan"),
        "words": "Ü\u2028\ud800",
        "flag": True,
    }
    store.append_metrics(row)
    store.flush_metrics()

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    text = (tmp_path / RUN / "metrics.jsonl").read_text()
    assert json.loads(text, parse_constant=refuse) == {
        "step": 1,
        "nan": None,
        "inf": None,
        "f32": 0.5,
        "f32nan": None,
        "words": "Ü\u2028\ud800",
        "flag": True,
    }
    with pytest.raises(TypeError, match="a set cannot be kept as JSON"):
        store.write_result({"metrics": {1, 2}})
    assert store.read_result() is None


@pytest.mark.parametrize("step", [0, 1, 3])
def test_a_row_that_repeats_or_leaves_out_a_step_is_refused(tmp_path: Path, step: int) -> None:
    store = begun(str(tmp_path))
    train(store, 1, 1)
    with pytest.raises(StoreError, match=f"step {step} cannot follow that of step 1"):
        store.append_metrics({"step": step})


def test_a_replay_leaves_one_row_per_step(store_uri: str) -> None:
    first = begun(store_uri)
    train(first, 1, 5)
    for step in (0, 2, 4):
        first.write_evaluation(Scored("heldout", step, step / 10))

    again = RunStore.open_existing(store_uri, RUN)
    again.rewind(2)
    assert [row["step"] for row in again.metrics()] == [1, 2]
    assert [row["step"] for row in again.evaluations()] == [0, 2]
    assert RunStore(store_uri, RUN).metrics() == again.metrics()
    train(again, 3, 6)
    again.write_evaluation(Scored("heldout", 4, 0.4))

    rows = RunStore(store_uri, RUN).metrics()
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["loss"] for row in rows] == [1 / step for step in range(1, 7)]
    assert [row["step"] for row in RunStore(store_uri, RUN).evaluations()] == [0, 2, 4]


def test_rows_go_on_after_a_rewind_even_if_someone_removed_the_file(tmp_path: Path) -> None:
    train(begun(str(tmp_path)), 1, 3)
    (tmp_path / RUN / "metrics.jsonl").unlink()
    again = RunStore(tmp_path, RUN)
    again.rewind(2)
    train(again, 3, 4)
    assert [row["step"] for row in again.metrics()] == [3, 4]


def test_a_store_that_was_not_rewound_goes_on_from_the_rows_that_are_there(tmp_path: Path) -> None:
    train(begun(str(tmp_path)), 1, 2)
    train(RunStore(tmp_path, RUN), 3, 3)
    assert [row["step"] for row in RunStore(tmp_path, RUN).metrics()] == [1, 2, 3]


def test_a_broken_row_is_named_by_its_line(tmp_path: Path) -> None:
    train(begun(str(tmp_path)), 1, 2)
    path = tmp_path / RUN / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 3, "lo\n')
    with pytest.raises(StoreError, match=r"metrics\.jsonl, line 3: not a row"):
        RunStore(tmp_path, RUN).metrics()


def test_a_flush_that_failed_is_made_good_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = begun(str(tmp_path))
    store.append_metrics({"step": 1})

    def away(key: str, data: bytes) -> None:
        raise OSError("away")

    with monkeypatch.context() as patch:
        patch.setattr(store.objects, "write", away)
        with pytest.raises(OSError, match="away"):
            store.flush_metrics()
    store.flush_metrics()
    assert RunStore(tmp_path, RUN).metrics() == [{"step": 1}]


def test_rows_appended_while_another_thread_flushes_are_not_lost(tmp_path: Path) -> None:
    store = begun(str(tmp_path))
    with ThreadPoolExecutor(3) as pool:
        flushes = [pool.submit(_flush_for_a_while, store) for _ in range(3)]
        for step in range(1, 2001):
            store.append_metrics({"step": step})
        for flush in flushes:
            flush.result()
    store.flush_metrics()
    assert [r["step"] for r in RunStore(tmp_path, RUN).metrics()] == list(range(1, 2001))


def _flush_for_a_while(store: RunStore) -> None:
    for _ in range(20):
        store.flush_metrics()


def test_evaluations_are_kept_with_their_samples(tmp_path: Path) -> None:
    store = begun(str(tmp_path))
    samples = [Sample("1+1=", "2", "2", 1.0), {"prompt": "2+2=", "completion": "5", "reward": 0}]
    store.write_evaluation(Scored("probe", 20, 0.25))
    uri = store.write_evaluation(Scored("heldout", 20, 0.5, {"rows": 2.0}, samples))
    store.write_evaluation(Scored("heldout", 10, 0.1))
    assert uri == str(tmp_path / RUN / "evaluations" / "heldout" / "step-000020.jsonl")
    assert Path(uri).read_text() == (
        '{"prompt": "1+1=", "completion": "2", "expected": "2", "reward": 1.0}\n'
        '{"prompt": "2+2=", "completion": "5", "reward": 0}\n'
    )
    rows = [json.loads(line) for line in (tmp_path / RUN / "evaluations.jsonl").open()]
    assert [(row["step"], row["name"], row["score"]) for row in rows] == [
        (10, "heldout", 0.1),
        (20, "heldout", 0.5),
        (20, "probe", 0.25),
    ]
    assert rows[1]["metrics"] == {"rows": 2.0}
    assert rows[1]["samples"] == "evaluations/heldout/step-000020.jsonl"


# -- checkpoints ---------------------------------------------------------------------------------


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

    def die(key: str, data: bytes) -> None:
        raise KeyboardInterrupt

    dying = RunStore(store_uri, RUN)
    monkeypatch.setattr(dying.objects, "create", die)
    with pytest.raises(KeyboardInterrupt):
        save(dying, 4, adapter(tmp_path / "b", b"a torn save of other bits"))
    left = [key for key in store.objects.keys(RUN) if "step-000004" in key]
    assert len(left) == 3

    again = RunStore(store_uri, RUN)
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


def test_of_two_saves_at_once_one_is_kept_and_the_other_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = begun(str(tmp_path)), RunStore(tmp_path, RUN)
    create = ours.objects.create
    folder = adapter(tmp_path / "a")

    def come_second(key: str, data: bytes) -> None:
        kept.append(save(theirs, 2, folder))
        create(key, data)

    kept: list[CheckpointManifest] = []
    monkeypatch.setattr(ours.objects, "create", come_second)
    assert save(ours, 2, folder) == kept[0]

    def vanish(key: str, data: bytes) -> None:
        raise AlreadyExists(key)

    monkeypatch.setattr(ours.objects, "create", vanish)
    with pytest.raises(AlreadyExists):
        save(ours, 3, folder)


@pytest.mark.parametrize("name", ["optimizer.pt", "model.bin", "state.pkl", "x.npy", "noending"])
def test_kinds_of_files_that_can_hold_code_are_refused(tmp_path: Path, name: str) -> None:
    store = begun(str(tmp_path / "store"))
    folder = adapter(tmp_path / "a")
    (folder / name).write_bytes(b"")
    with pytest.raises(StoreError, match=rf"{name} is not kept in a checkpoint: only .*\.json"):
        save(store, 2, folder)
    assert store.objects.keys(RUN) == [f"{RUN}/run.json"]
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


SAVE_FOREVER = """
import sys, pathlib
from backends.storage.run_store import RunStore
store = RunStore(sys.argv[1], "run-1")
store.begin(name="sft", backend="mock", seed=0)
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


# -- all runs of a store -------------------------------------------------------------------------


def test_runs_are_listed_with_status_and_score(store_uri: str, tmp_path: Path) -> None:
    folder = adapter(tmp_path / "a")
    done = begun(store_uri, "done", name="arithmetic")
    save(done, 2, folder)
    save(done, 4, folder)
    done.write_evaluation(Scored("heldout", 0, 0.1))
    done.write_evaluation(Scored("heldout", 4, 0.9))
    done.write_result({"status": "completed"})
    save(begun(store_uri, "killed"), 2, folder)
    begun(store_uri, "new", total_steps=None)
    begun(store_uri, "failed").write_result({"status": "failed", "error": "why"})
    objects = open_store(store_uri)
    objects.write("broken/run.json", b'{"run_id": "bro')
    objects.write("foreign/notes.txt", b"mine")
    objects.write("halfway/checkpoints/step-000002/adapter_config.json", b"{}")
    objects.write("README.md", b"words")

    runs = {run.run_id: run for run in list_runs(store_uri)}
    assert list(runs) == ["done", "killed", "new", "failed"]
    assert {run_id: run.status for run_id, run in runs.items()} == {
        "done": "completed",
        "killed": "unfinished",
        "new": "unfinished",
        "failed": "failed",
    }
    assert (runs["done"].steps_done, runs["done"].steps_total, runs["done"].score) == (4, 4, 0.9)
    assert (runs["killed"].steps_done, runs["killed"].score) == (2, None)
    assert (runs["new"].steps_done, runs["new"].steps_total) == (0, None)
    assert runs["done"].name == "arithmetic"
    assert runs["done"].uri == done.uri()


def test_a_store_that_is_not_there_has_no_runs(tmp_path: Path) -> None:
    assert list_runs(tmp_path / "nothing") == []
    assert list_runs(f"memory://{uuid.uuid4().hex}") == []


def test_a_half_written_end_of_a_run_does_not_hide_it(tmp_path: Path) -> None:
    begun(str(tmp_path))
    (tmp_path / RUN / "result.json").write_text("{")
    (tmp_path / RUN / "evaluations.jsonl").write_text("nonsense")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "run.json").mkdir()
    (run,) = list_runs(tmp_path)
    assert (run.run_id, run.status, run.score) == (RUN, "unfinished", None)
