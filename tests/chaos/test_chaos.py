"""A short part of the chaos suite, and that its comparison sees what could go wrong."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chaos.campaign import Campaign
from tests.chaos.compare import differences
from tests.chaos.scene import Servers, courses
from tests.servers.prefect import PrefectServer

pytestmark = pytest.mark.slow  # a minute of kills

KILLS = 3
RL = next(course for course in courses(32) if course.name == "rl" and not course.deployed)


@pytest.fixture(scope="module")
def campaign(prefect_server: PrefectServer, tmp_path_factory: pytest.TempPathFactory) -> Campaign:
    folder = tmp_path_factory.mktemp("chaos")
    return Campaign(folder, 39, Servers(prefect_server), victims=("engine", "flow", "engine"))


@pytest.fixture(scope="module")
def runs(campaign: Campaign) -> Path:
    """The folder of runs that were disturbed until there had been enough kills."""
    while campaign.tally.kills.total() < KILLS:
        campaign.disturb(RL, KILLS - campaign.tally.kills.total())
    return campaign.folder / "runs"


@pytest.mark.usefixtures("runs")
def test_an_on_policy_run_under_kill_9_ends_as_if_nothing_had_happened(
    campaign: Campaign,
) -> None:
    assert campaign.tally.wrong == []
    assert campaign.tally.kills == {"engine": 2, "flow": 1}


def rewrite(name: str, change: Callable[[str], str]) -> Callable[[Path], None]:
    def rewritten(run: Path) -> None:
        (run / name).write_text(change((run / name).read_text()))

    return rewritten


def first_rows(text: str) -> str:
    return "".join(text.splitlines(keepends=True)[:-1])


def other_sample(run: Path) -> None:
    file = next(path for path in (run / "evaluations").rglob("*") if path.is_file())
    file.write_bytes(file.read_bytes() + b"{}\n")


def other_adapter(run: Path) -> None:
    """Other weights, and a manifest that fits them."""
    folder = run / "checkpoints/step-000016"
    data = bytearray((folder / "adapter_model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "adapter_model.safetensors").write_bytes(data)
    manifest = json.loads((folder / "manifest.json").read_text())
    for file in manifest["files"]:
        if file["path"] == "adapter_model.safetensors":
            file["sha256"] = hashlib.sha256(data).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))


def half_a_checkpoint(run: Path) -> None:
    (run / "checkpoints/step-000018").mkdir()
    (run / "checkpoints/step-000018/adapter_model.safetensors").write_bytes(b"half")


@pytest.mark.parametrize(
    ("tamper", "found"),
    [
        (lambda run: None, []),
        (
            rewrite("metrics.jsonl", first_rows),
            [f"metrics.jsonl has rows for the steps {list(range(1, 16))}"],
        ),
        (
            rewrite("metrics.jsonl", lambda text: text.replace('"step": 3,', '"step": 3, "x": 1,')),
            ["metrics.jsonl, step 3: x is 1, not None"],
        ),
        (rewrite("evaluations.jsonl", first_rows), ["evaluations.jsonl differs"]),
        (other_sample, ["differs"]),
        (other_adapter, ["checkpoints/step-000016: adapter_model.safetensors differs"]),
        (half_a_checkpoint, ["checkpoints/step-000018/adapter_model.safetensors is left over"]),
        (
            lambda run: (run / "checkpoints/step-000010/manifest.json").unlink(),
            [
                "checkpoints/step-000010/manifest.json is missing",
                "checkpoints after the steps [5, 15, 16], not [5, 10, 15, 16]",
            ],
        ),
        (
            rewrite("result.json", lambda text: text.replace("completed", "failed")),
            ["result.json: failed"],
        ),
    ],
)
def test_every_difference_is_seen(
    runs: Path, tmp_path: Path, tamper: Callable[[Path], None], found: list[str]
) -> None:
    shutil.copytree(runs / "rl-whole", tmp_path / "other")
    tamper(tmp_path / "other")
    seen = differences(runs / "rl-whole", tmp_path / "other")
    assert len(seen) == len(found), seen
    assert all(words in line for words, line in zip(found, seen, strict=True)), seen
