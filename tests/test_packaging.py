"""The wheel: what is in it, and that it works where the repository is not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("algorithms", "backends", "flows", "tasks")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = tmp_path_factory.mktemp("source")  # setuptools leaves a build folder where it builds
    for room in ROOMS:
        shutil.copytree(ROOT / room, source / room, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / file, source)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        f"--wheel-dir={folder}",
    ]
    subprocess.run([*command, "--no-build-isolation", str(source)], check=True, timeout=120)
    return next(folder.glob("flowtune-*.whl"))


def test_it_holds_every_module_and_no_test(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".py")}
    modules = {
        p.relative_to(ROOT).as_posix() for room in ROOMS for p in (ROOT / room).rglob("*.py")
    }
    assert names == modules


def test_it_works_outside_the_repository(wheel: Path, tmp_path: Path) -> None:
    """In an interpreter that sees the wheel and its dependencies, and not this checkout."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    paths = [str(tmp_path / "site"), sysconfig.get_paths()["purelib"]]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    # Without -S the editable install of this checkout would be found as well.
    run = [sys.executable, "-S", "-c"]
    script = (
        "import flows.train, flows.cli, backends.engine.server, sys\n"
        "print(flows.train.__file__)\n"
        "sys.argv = ['flowtune', 'list']\n"
        "flows.cli.main()\n"
    )
    done = subprocess.run(
        [*run, script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path))
    assert "mock_sft" in done.stdout
