"""docs/your-own.md from nothing: its files in an empty folder, its commands, its package by pip."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from algorithms.registry import CALLBACKS

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "your-own.md").read_text()
FLOWTUNE = [sys.executable, "-m", "flows.cli"]
BROKEN = """
[project.entry-points."flowtune.data"]
broken = "my_losses:NotThere"

[project.entry-points."flowtune.algorithm"]
misspelt = "my_losses:FocalLoss"
"""


def files() -> dict[str, str]:
    """The page's blocks that are files, by name: the first line says it."""
    blocks = re.findall(r"^```(?:python|yaml|toml)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return {block.splitlines()[0].removeprefix("# "): block for block in blocks}


def commands() -> list[str]:
    blocks = re.findall(r"^```bash\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    lines = [line.partition("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of the page, and nothing else."""
    place = tmp_path_factory.mktemp("own")
    for name, text in files().items():
        (place / name).write_text(text)
    return place


@pytest.fixture(scope="module")
def site(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where pip has put the page's package, which has a broken entry point besides."""
    place, source = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("source")
    for name, text in files().items():
        if not name.endswith(".yaml"):
            (source / name).write_text(text + (BROKEN if name == "pyproject.toml" else ""))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, f"--target={place}", str(source)], check=True, timeout=120)
    return place


def flowtune(
    *words: str, at: Path, site: Path | None = None, check: bool = True
) -> subprocess.CompletedProcess[str]:
    places = [str(Path(__file__).parents[2]), *([str(site)] if site else [])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(places), "COLUMNS": "400"}
    done = subprocess.run(
        [*FLOWTUNE, *words], cwd=at, env=env, capture_output=True, text=True, timeout=120
    )
    assert "Traceback" not in done.stderr, done.stderr
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def test_the_page_has_the_files_and_commands_that_are_tried_here() -> None:
    assert sorted(files()) == [
        "my_backend.py",
        "my_loss.yaml",
        "my_losses.py",
        "my_parts.py",
        "my_parts.yaml",
        "pyproject.toml",
    ]
    assert commands() == [
        "flowtune validate my_loss.yaml",
        "flowtune run my_loss.yaml --dry-run",
        "flowtune run my_loss.yaml",  # as the one before, with a Prefect server
        "flowtune validate my_parts.yaml",
        "flowtune run my_parts.yaml --dry-run",
        "pip install .",
        "flowtune list",
        "flowtune schema algorithm focal_loss",
    ]


def test_a_backend_of_ones_own_goes_on_from_a_checkpoint(folder: Path) -> None:
    ask = (
        "import asyncio, my_backend\n"
        "from unittest.mock import patch\n"
        "async def opened(params, model, state): return state\n"
        "with patch.object(my_backend.MockKind, 'open', opened):\n"
        "    params = my_backend.CountedParams()\n"
        "    print(asyncio.run(my_backend.Counted.open(params, None, 'saved'))._client)\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(DOCS.parent)])}
    done = subprocess.run(
        [sys.executable, "-c", ask], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout == "saved\n"


def test_a_loss_of_ones_own(folder: Path) -> None:
    shown = flowtune("validate", "my_loss.yaml", at=folder).stdout
    assert "my-loss is in order" in shown
    assert "steps   8" in shown
    done = flowtune("run", "my_loss.yaml", "--dry-run", at=folder)
    assert "3 steps done; nothing was kept" in done.stdout
    wrong = ("--set", "algorithm.params.gamma=-1")
    done = flowtune("validate", "my_loss.yaml", *wrong, at=folder, check=False)
    assert done.returncode == 2
    assert "algorithm.params.gamma" in done.stderr


def test_the_loss_is_plain_sft_where_gamma_is_nothing(folder: Path) -> None:
    """On two rows of three tokens, of which the first is a prompt, against the sum by hand."""
    ask = (
        "import asyncio, math, torch\n"
        "from types import SimpleNamespace as N\n"
        "import my_losses\n"
        "from algorithms.base import TrainingBatch\n"
        "from algorithms.sft import SFT\n"
        "made = []\n"
        "async def batch(self, step):\n"
        "    made.append(TrainingBatch([], 'cross_entropy'))\n"
        "    return made[-1]\n"
        "SFT.build_batch = batch\n"
        "datum = N(loss_fn_inputs={'weights': N(to_numpy=lambda: [0.0, 1.0, 1.0])})\n"
        "logprobs = torch.log(torch.tensor([0.9, 0.5, 0.25]))\n"
        "for gamma in (0.0, 2.0):\n"
        "    one = my_losses.FocalLoss(my_losses.FocalConfig(gamma=gamma))\n"
        "    loss = asyncio.run(one.build_batch(0)).loss_fn\n"
        "    print(float(loss(N(logprobs_per_datum=[logprobs] * 2), [datum] * 2)))\n"
        "    assert made[-1].metrics['focal'] > 0\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(DOCS.parent)])}
    done = subprocess.run(
        [sys.executable, "-c", ask], env=env, capture_output=True, text=True, check=True
    )
    plain, focal = map(float, done.stdout.split())
    assert plain == pytest.approx(2 * (0.693147 + 1.386294), abs=1e-5)
    assert focal == pytest.approx(2 * (0.25 * 0.693147 + 0.5625 * 1.386294), abs=1e-5)


def test_parts_of_ones_own(folder: Path) -> None:
    assert "my-parts is in order" in flowtune("validate", "my_parts.yaml", at=folder).stdout
    done = flowtune("run", "my_parts.yaml", "--dry-run", at=folder)
    assert "3 steps done" in done.stdout
    assert "Please: Say" in done.stdout  # the row that it shows went through the transform
    assert (folder / "told.txt").read_text().split() == ["1", "2", "3"]


def test_a_package_with_every_kind_of_entry_point(site: Path, tmp_path: Path) -> None:
    shown = flowtune("list", at=tmp_path, site=site).stdout
    lines = [line.rstrip() for line in shown.splitlines()]
    for kind in ("focal_loss", "short", "say_it_again", "polite", "budget", "counted"):
        (line,) = [line for line in lines if re.search(rf"\b{kind}\b", line)]
        assert line.endswith("plug-in house-recipes 1.2"), line
    (broken,) = [line for line in lines if "NotThere" in line]
    assert "house-recipes 1.2" in broken
    (misspelt,) = [line for line in lines if "misspelt" in line]
    assert (
        "plug-in house-recipes 1.2 names it in flowtune.algorithm, and there is no such group"
        in misspelt
    )
    schema = json.loads(
        flowtune("schema", "algorithm", "focal_loss", at=tmp_path, site=site).stdout
    )
    assert schema["properties"]["gamma"]["description"] == "0 is plain SFT."


def test_all_of_a_package_is_chosen_by_a_yaml_without_imports(site: Path, tmp_path: Path) -> None:
    experiment = yaml.safe_load(files()["my_loss.yaml"])
    rows = {"kind": "rows", "rows": [{"prompt": "Say three.", "completion": "three"}]}
    del experiment["imports"]
    experiment["data"]["transforms"] = [{"kind": "polite"}]
    experiment["backend"] = {"kind": "counted"}
    experiment["callbacks"] = [{"kind": "budget", "params": {"steps": 9}}]
    experiment["evaluations"] = [
        {"name": "short", "data": rows, "verifier": {"kind": "short"}},
        {"name": "again", "data": rows, "environment": {"kind": "say_it_again"}},
    ]
    (tmp_path / "all.yaml").write_text(yaml.safe_dump(experiment))
    done = flowtune("run", "all.yaml", "--dry-run", at=tmp_path, site=site)
    assert "3 steps done" in done.stdout
    assert "Please: What is" in done.stdout
    assert (tmp_path / "calls.txt").read_text() == "3"
    assert (tmp_path / "told.txt").read_text().split() == ["1", "2", "3"]


def test_the_callbacks_page_lists_them_all() -> None:
    page = (DOCS / "callbacks.md").read_text()
    built_in = {kind for kind, row in CALLBACKS.rows().items() if row.origin == "built in"}
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == built_in
