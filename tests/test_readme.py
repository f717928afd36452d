"""Every code block of the README is something that works."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from algorithms.experiment import load_experiment
from algorithms.stages import StagedExperiment, has_stages
from flows.cli import app

ROOT = Path(__file__).parents[1]
PAGES = [
    "README.md",
    "benchmarks/README.md",
    "deployments/README.md",
    "docs/engine.md",
    "docs/evaluations.md",
    "docs/orchestration.md",
    "docs/performance.md",
    "docs/preferences.md",
    "docs/rewards.md",
]
ALL_PAGES = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/*.md")) + [
    page for page in PAGES if not page.startswith("docs/")
]


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def commands(program: str) -> list[list[str]]:
    lines = [
        line.partition("  #")[0].strip()
        for page in PAGES
        for block in blocks(page, "bash")
        for line in block.replace("\\\n", " ").splitlines()
    ]
    words = [shlex.split(line) for line in lines if line]
    return [line for line in words if Path(line[0]).name == program]


@pytest.mark.parametrize("line", commands("flowtune"), ids=" ".join)
def test_each_flowtune_command_is_understood(
    line: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    names = {command.name or command.callback.__name__ for command in app.registered_commands}
    assert line[1] in names
    if line[1] == "run":
        overrides = [line[i + 1] for i, word in enumerate(line) if word == "--set"]
        read = StagedExperiment.load if has_stages(line[2]) else load_experiment
        assert read(Path(line[2]), overrides).name


def test_there_are_commands_to_test() -> None:
    assert len(commands("flowtune")) >= 5
    assert {line[1] for line in commands("make")} >= {"train", "test"}


def test_each_make_target_exists() -> None:
    targets = re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {line[1] for line in commands("make")} <= set(targets)


def test_each_file_that_is_linked_exists() -> None:
    for page in ALL_PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", (ROOT / page).read_text()):
            assert ((ROOT / page).parent / target).exists(), f"{page} links to {target}"
