"""A run's store on a disk that is full: what is whole stays whole, and the user is told."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FILL = """
import pathlib, sys
from backends.errors import UserError
from backends.storage.run_store import RunStore
store = RunStore(sys.argv[1], "run-1")
store.begin(name="sft", backend="mock", seed=0)
store.take_lease()
folder = pathlib.Path(sys.argv[2])
try:
    for step in range(1, 100):
        store.append_metrics({"step": step})
        store.flush_metrics()
        store.save_checkpoint(step=step, state_uri=None, algorithm_state={}, folder=folder)
        if sys.argv[3:]:
            folder = pathlib.Path(sys.argv[3])
except UserError as error:
    print(error)
kept = store.checkpoints()
for manifest in kept:
    assert store.checkpoint_folder(manifest)
print("kept", len(kept), "rows", len(store.metrics()))
print("unfinished", *pathlib.Path(sys.argv[1]).rglob(".tmp-*"))
"""


def _sized(folder: Path, size: int) -> str:
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(os.urandom(size))
    return str(folder)


def test_a_full_disk_leaves_whole_checkpoints_and_says_so(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    source = _sized(tmp_path / "a", 300_000)
    mounted = 'mount -t tmpfs -o size=1m tmpfs "$0" && exec "$@"'
    enter = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mounted, str(disk)]
    if not shutil.which("unshare") or subprocess.run([*enter, "true"]).returncode:
        pytest.skip("a small disk cannot be mounted here: neither as root nor in a namespace")
    command = [*enter, sys.executable, "-c", FILL, f"{disk}/runs", source]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "No space left on device" in done.stdout
    assert "free space, or name another folder as `store:`; then continue the run" in done.stdout
    assert done.stdout.splitlines()[-2:] == ["kept 3 rows 4", "unfinished"]


def test_a_limit_on_the_size_of_files_does_so_too(tmp_path: Path) -> None:
    small, big = _sized(tmp_path / "a", 1_000), _sized(tmp_path / "b", 300_000)
    done = subprocess.run(
        [sys.executable, "-c", FILL, str(tmp_path / "runs"), small, big],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)),
    )
    assert done.returncode == 0, done.stderr
    assert "File too large" in done.stdout
    assert "raise the limit on the size of files (`ulimit -f`)" in done.stdout
    assert done.stdout.splitlines()[-2:] == ["kept 1 rows 2", "unfinished"]
