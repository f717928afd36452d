"""One writer: the process that came last writes a run, and the one before is told so."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from backends.errors import FlowtuneError
from backends.storage.checkpoints import Retention
from backends.storage.lease import LEASES_KEPT, Lease, LeaseLost
from backends.storage.objects import AlreadyExists, open_store
from backends.storage.run_store import RunStore
from tests.backends.storage.runs import RUN, Scored, adapter, begun, save, taken, train


def test_the_later_writer_wins_and_the_earlier_is_told_by_whom(store_uri: str) -> None:
    first = begun(store_uri)
    train(first, 1, 2)
    second = RunStore.open_existing(store_uri, RUN)
    lease = second.take_lease("http://ui/flow-run/2")
    assert lease.number == 2
    first.append_metrics({"step": 3})
    with pytest.raises(LeaseLost) as raised:
        first.flush_metrics()
    assert isinstance(raised.value, FlowtuneError)
    for word in (
        f"run {RUN}",
        f"process {os.getpid()} on {socket.gethostname()}",
        lease.record.started,
        "http://ui/flow-run/2",
        "This process",
        "the other one goes on",
    ):
        assert word in str(raised.value)
    train(second, 3, 3)
    assert [row["step"] for row in RunStore(store_uri, RUN).metrics()] == [1, 2, 3]


def _publishing(folder: Path) -> dict[str, Callable[[RunStore], Any]]:
    return {
        "write_experiment": lambda run: run.write_experiment({"seed": 1}),
        "flush_metrics": lambda run: train(run, 3, 3),
        "write_evaluation": lambda run: run.write_evaluation(Scored("heldout", 2, 0.5)),
        "save_checkpoint": lambda run: save(run, 3, folder),
        "write_report": lambda run: run.write_report("# Report", {"loss": b"png"}),
        "write_result": lambda run: run.write_result({"status": "completed"}),
        "rewind": lambda run: run.rewind(0),
        "discard_result": lambda run: run.discard_result(),
        "expire": lambda run: run.expire(Retention(keep_last=1)),
        "collect_orphans": lambda run: run.collect_orphans(),
        "keep": lambda run: run.keep("a.json", b"{}"),
    }


@pytest.mark.parametrize("method", _publishing(Path()))
def test_nothing_is_written_without_the_lease(tmp_path: Path, method: str) -> None:
    folder = adapter(tmp_path / "a")
    first = begun(tmp_path / "store")
    train(first, 1, 2)
    for step in (1, 2):
        save(first, step, folder)
    publish = _publishing(folder)[method]
    taken(tmp_path / "store")
    objects = first.objects
    before = {key: objects.read(key) for key in objects.keys(RUN)}
    with pytest.raises(LeaseLost):
        publish(first)
    with pytest.raises(ValueError, match=r"take_lease\(\) comes before anything is written"):
        publish(RunStore(tmp_path / "store", RUN))
    assert {key: objects.read(key) for key in objects.keys(RUN)} == before


def test_a_reader_needs_no_lease(store_uri: str, tmp_path: Path) -> None:
    first = begun(store_uri)
    train(first, 1, 2)
    manifest = save(first, 2, adapter(tmp_path / "a"))
    first.keep("a.json", b"{}")
    reader = RunStore.open_existing(store_uri, RUN)
    assert reader.latest_checkpoint() == manifest
    assert (len(reader.metrics()), reader.evaluations(), reader.read_result()) == (2, [], None)
    assert reader.kept("a.json") == b"{}"
    reader.flush_metrics()
    train(first, 3, 3)


def test_what_was_read_before_the_lease_is_read_again(tmp_path: Path) -> None:
    first = begun(tmp_path)
    train(first, 1, 1)
    second = RunStore.open_existing(tmp_path, RUN)
    assert len(second.metrics()) == 1
    train(first, 2, 2)
    second.take_lease()
    train(second, 3, 3)
    assert [row["step"] for row in RunStore(tmp_path, RUN).metrics()] == [1, 2, 3]


def test_a_lease_says_who_holds_it_since_when(tmp_path: Path) -> None:
    store = RunStore(tmp_path, RUN)
    store.begin(name="sft", backend="mock", seed=0)
    store.take_lease("http://ui/1")
    told = json.loads((tmp_path / RUN / "leases" / "000001.json").read_text())
    assert told["number"] == 1
    assert len(told.pop("owner")) == 32
    assert told.pop("started").endswith("+00:00")
    assert told == {
        "number": 1,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "flow_run_url": "http://ui/1",
    }


def test_only_the_newest_leases_are_kept(tmp_path: Path) -> None:
    first = begun(tmp_path)
    leases = [taken(tmp_path) for _ in range(LEASES_KEPT + 4)]
    names = sorted(path.name for path in (tmp_path / RUN / "leases").iterdir())
    assert len(names) == LEASES_KEPT
    assert names[-1] == f"{LEASES_KEPT + 5:06d}.json"
    for old in (first, leases[0], leases[-2]):
        with pytest.raises(LeaseLost, match="has taken it over"):
            old.write_result({"status": "failed"})
    leases[-1].write_result({"status": "completed"})


def test_a_lease_that_was_removed_or_broken_is_lost(tmp_path: Path) -> None:
    store = begun(tmp_path)
    path = tmp_path / RUN / "leases" / "000001.json"
    path.write_text("{")
    with pytest.raises(LeaseLost, match=r"its lease .* was removed"):
        store.write_result({"status": "failed"})
    path.with_name("000002.json").write_text("{")
    with pytest.raises(LeaseLost, match="another process has taken it over"):
        store.write_result({"status": "failed"})


def test_a_lease_whose_answer_was_lost_is_held_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = open_store(tmp_path)
    create = objects.create

    def lose_the_answer(key: str, data: bytes) -> None:
        create(key, data)
        raise AlreadyExists(key)

    monkeypatch.setattr(objects, "create", lose_the_answer)
    lease = Lease.take(objects, RUN)
    assert lease.number == 1
    lease.check()


def test_of_two_that_create_one_number_the_one_who_is_in_it_holds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Swift looks and writes in two steps: both are told that they created it."""
    ours, theirs = open_store(tmp_path), open_store(tmp_path)
    others: list[Lease] = []

    def overwrite(key: str, data: bytes) -> None:
        ours.write(key, data)
        if not others:
            with monkeypatch.context() as patch:
                patch.setattr(theirs, "create", theirs.write)
                patch.setattr(theirs, "keys", lambda prefix: [])
                others.append(Lease.take(theirs, RUN))

    monkeypatch.setattr(ours, "create", overwrite)
    lease = Lease.take(ours, RUN)
    assert (others[0].number, lease.number) == (1, 2)
    lease.check()
    with pytest.raises(LeaseLost):
        others[0].check()


# -- processes -----------------------------------------------------------------------------------

WRITER = """
import os, sys
from backends.storage.lease import LeaseLost
from backends.storage.run_store import RunStore
name, steps = sys.argv[2], int(sys.argv[3])
store = RunStore(sys.argv[1], "run-1")
store.begin(name="sft", backend="mock", seed=0)
print("ready", flush=True)
sys.stdin.readline()
store.take_lease(f"flow-run-{name}")
try:
    last = max((row["step"] for row in store.metrics()), default=0)
    store.rewind(last)
    for step in range(last + 1, last + 1 + steps):
        store.append_metrics({"step": step, "writer": name})
        store.flush_metrics()
        print(step, flush=True)
        if sys.argv[4] == "pause" and step == 2:
            os.kill(os.getpid(), 19)
    store.write_result({"status": "completed", "writer": name})
    print("completed", flush=True)
except LeaseLost as error:
    print("lost:", error, flush=True)
"""


def writer(store_uri: str, name: str, steps: int, pause: str = "") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, store_uri, name, str(steps), pause]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def start(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def said(process: subprocess.Popen[str]) -> str:
    """Its next line."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("store_uri", ["folder", "s3"], indirect=True)
def test_of_processes_that_race_for_a_run_one_ends_it(store_uri: str) -> None:
    """Each is fenced or done at the end; the last one to take the lease is the one that is done."""
    steps = 6
    writers = [writer(store_uri, f"w{number}", steps) for number in range(4)]
    assert [said(process) for process in writers] == ["ready"] * 4
    for process in writers:
        start(process)
    with ThreadPoolExecutor(4) as pool:
        ends = [out.splitlines()[-1] for out, _ in pool.map(lambda w: w.communicate(), writers)]
    leases = open_store(store_uri).keys(f"{RUN}/leases")
    assert len(leases) == 4
    holder = json.loads(open_store(store_uri).read(leases[-1]))["flow_run_url"]
    last = int(holder.removeprefix("flow-run-w"))
    assert ends[last] == "completed"
    for number, end in enumerate(ends):
        assert number == last or end == "completed" or end.startswith(f"lost: run {RUN} is no")
    store = RunStore.open_existing(store_uri, RUN)
    result = store.read_result()
    assert result is not None
    assert result["writer"] == f"w{last}"
    rows = store.metrics()
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert [row["writer"] for row in rows[-steps:]] == [f"w{last}"] * steps


@pytest.mark.parametrize("store_uri", ["folder", "s3"], indirect=True)
def test_a_paused_writer_that_wakes_up_is_refused(store_uri: str) -> None:
    paused, other = writer(store_uri, "paused", 50, "pause"), writer(store_uri, "other", 3)
    assert (said(paused), said(other)) == ("ready", "ready")
    start(paused)
    assert (said(paused), said(paused)) == ("1", "2")
    while Path(f"/proc/{paused.pid}/stat").read_text().split()[2] != "T":
        pass
    start(other)
    out, _ = other.communicate()
    assert out.split() == ["3", "4", "5", "completed"]
    before = {key: open_store(store_uri).read(key) for key in open_store(store_uri).keys(RUN)}
    paused.send_signal(signal.SIGCONT)
    told, _ = paused.communicate()
    assert told.startswith(f"lost: run {RUN} is no longer this process's to write: process")
    for word in (str(other.pid), "flow-run-other", "the other one goes on"):
        assert word in told
    assert {
        key: open_store(store_uri).read(key) for key in open_store(store_uri).keys(RUN)
    } == before
