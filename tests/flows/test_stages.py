"""Stages: the weights chain, a run goes on in the stage it had come to, mistakes name the stage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from algorithms.stages import StagedExperiment, check_stages, has_stages
from backends.errors import StateLostError, UserError
from tests.servers.prefect import PrefectServer

ROWS = [{"prompt": f"What is {i} + {i}?", "completion": str(2 * i)} for i in range(20)]


def stage(name: str, **params: Any) -> dict[str, Any]:
    """Three steps of SFT."""
    params = {"batch_size": 4, "max_steps": 3} | params
    return {
        "name": name,
        "data": {"kind": "rows", "rows": ROWS},
        "algorithm": {"kind": "mock_sft", "params": params},
        "evaluations": [
            {"name": "nll", "kind": "nll", "data": {"kind": "rows", "rows": ROWS}},
        ],
    }


def document(store: Path, *stages: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": "two",
        "store": str(store),
        "model": {"name": "examples/models/tiny-qwen3"},
        "orchestration": {"max_recoveries": 0},
        "stages": list(stages) or [stage("first"), stage("second", learning_rate=1e-3)],
    }


async def run(spec: StagedExperiment, run_id: str) -> dict[str, Any]:
    from flows.stages import train_stages

    result = await train_stages(spec, run_id)
    assert isinstance(result, dict)
    return result


def scores(store: Path, run_id: str) -> list[float]:
    lines = (store / run_id / "evaluations.jsonl").read_text().splitlines()
    return [json.loads(line)["score"] for line in lines]


def weights(store: Path, run_id: str) -> bytes:
    folder = store / run_id / "checkpoints/step-000003"
    return (folder / "adapter_model.safetensors").read_bytes()


async def test_each_stage_starts_from_the_weights_of_the_one_before(
    prefect_server: PrefectServer, tmp_path: Path
) -> None:
    spec = StagedExperiment.model_validate(document(tmp_path))
    result = await run(spec, "a")
    first, second = scores(tmp_path, "a-1-first"), scores(tmp_path, "a-2-second")
    assert first[0] > first[1] == second[0] > second[1]
    started = (tmp_path / "a-2-second/experiment.yaml").read_text()
    assert f"init_from: {tmp_path}/a-1-first/checkpoints/step-000003" in started
    assert result["status"] == "completed"
    assert result["metrics"]["val/second.nll/nll/first"] == first[1]
    assert result["artifacts"]["adapter"].endswith("a-2-second/checkpoints/step-000003")
    page = (tmp_path / "a/report.md").read_text()
    assert "[second](../a-2-second/report.md)" in page
    assert f"nll {first[1]:.3f} → {second[1]:.3f}" in page
    of_second = (tmp_path / "a-2-second/report.md").read_text()
    assert f", from `{tmp_path}/a-1-first/checkpoints/step-000003`" in of_second
    assert await run(spec, "a") == result
    other = document(tmp_path, stage("first"), stage("second", learning_rate=2e-3))
    with pytest.raises(UserError, match=r"stages"):
        await run(StagedExperiment.model_validate(other), "a")


async def test_a_run_goes_on_in_the_stage_that_it_had_come_to(
    prefect_server: PrefectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from algorithms.mock_sft import MockSFT

    spec = StagedExperiment.model_validate(document(tmp_path))
    real = MockSFT.build_batch
    with monkeypatch.context() as patch:

        async def build_batch(self: MockSFT, step_idx: int) -> Any:
            if step_idx == 1 and self.cfg.learning_rate == 1e-3:
                raise StateLostError("gone")
            return await real(self, step_idx)

        patch.setattr(MockSFT, "build_batch", build_batch)
        with pytest.raises(StateLostError, match="gone"):
            await run(spec, "cut")
    written = (tmp_path / "cut-1-first/result.json").stat().st_mtime_ns
    await run(spec, "cut")
    assert (tmp_path / "cut-1-first/result.json").stat().st_mtime_ns == written
    await run(spec, "whole")
    assert weights(tmp_path, "cut-2-second") == weights(tmp_path, "whole-2-second")


@pytest.mark.parametrize(
    ("stages", "where", "what"),
    [
        ([stage("a"), stage("a")], "stages", "two stages are called 'a'"),
        ([stage("a"), stage("b", lora_rank=8)], "stages", "lora_rank differ (a 16, b 8)"),
        ([stage("a") | {"model": {}}], "stages[0].model", "is the same for all stages"),
        ([stage("a") | {"init_from": "x"}], "stages[0].init_from", "unknown field"),
        ([stage("a/b")], "stages[0].name", "'a/b' cannot name a folder"),
        ([3, stage("a", batch_size=0)], "stages[1].algorithm.params.batch_size", ""),
        ([stage("a"), stage("b", batch_size=0)], "stages[1].algorithm.params.batch_size", ""),
        ([{"name": "a"}], "stages[0].data", "is missing"),
        ([stage("a") | {"data": {"kind": "rows", "rows": [{"x": 1}]}}], "stages[0].data", "row"),
        ([], "stages", ""),
    ],
)
def test_a_mistake_is_told_with_its_stage(
    tmp_path: Path, stages: list[dict[str, Any]], where: str, what: str
) -> None:
    _, problems = check_stages({**document(tmp_path), "stages": stages})
    said = [f"{problem.where}: {problem.what}" for problem in problems]
    assert any(where in line and what in line for line in said), said


def test_what_all_stages_share_is_told_once_and_what_one_has_with_its_name(tmp_path: Path) -> None:
    wrong = {"name": "a/b", "sede": 1, "store": "ftp://x", "backend": {"kind": "local"}}
    local = stage("second") | {"algorithm": {"kind": "local_sft"}}
    _, problems = check_stages({**document(tmp_path, stage("first"), local), **wrong})
    assert sorted(problem.where for problem in problems) == ["backend", "name", "sede", "store"]
    (one,) = [problem.what for problem in problems if problem.where == "backend"]
    assert one.startswith("for stage 'first': ")


def test_a_mistyped_list_of_stages_is_still_one(tmp_path: Path) -> None:
    config = tmp_path / "staged.yaml"
    config.write_text("name: x\ntags: []\nstage: []\n")
    assert has_stages(config)
    config.write_text("name: x\ntags: []\n")
    assert not has_stages(config)
