"""What a run's store promises: a person finds everything, a reader sees only what is whole."""

from __future__ import annotations

import json
import math
import sys
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import yaml

from backends.errors import UserError
from backends.storage.objects import Look, StoreError, open_store
from backends.storage.run_store import RunInfo, RunStore, list_runs
from tests.backends.storage.runs import RUN, Sample, Scored, adapter, begun, save, taken, train

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
        "run-1/leases/000001.json",
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

    again = taken(store_uri)
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

    again = taken(store_uri)
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
    again = taken(tmp_path)
    again.rewind(2)
    train(again, 3, 4)
    assert [row["step"] for row in again.metrics()] == [3, 4]


def test_a_store_that_was_not_rewound_goes_on_from_the_rows_that_are_there(tmp_path: Path) -> None:
    train(begun(str(tmp_path)), 1, 2)
    train(taken(tmp_path), 3, 3)
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

    def away(key: str, data: bytes, look: Look) -> None:
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


# -- results that must not be computed twice -----------------------------------------------------


def test_a_kept_result_comes_back_in_another_process(store_uri: str) -> None:
    store = begun(store_uri)
    name = f"build_batch-{'0' * 64}.safetensors"
    assert store.kept(name) is None
    store.keep(name, b"first")
    store.keep(name, b"again")
    assert taken(store_uri).kept(name) == b"again"
    assert f"{RUN}/cache/{name}" in store.objects.keys(RUN)


@pytest.mark.parametrize("name", ["a/b.json", "../a.json", ".json", "a.pkl", "a", "a b.json"])
def test_a_kept_result_has_a_plain_name_and_no_code_in_it(tmp_path: Path, name: str) -> None:
    store = begun(tmp_path)
    for call in (lambda: store.keep(name, b""), lambda: store.kept(name)):
        with pytest.raises(ValueError, match="cannot name a kept result"):
            call()


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
