"""The report as a page, as pictures, and as Prefect's artifacts of a real flow run."""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from algorithms.callbacks import RunPlan
from algorithms.evaluators import Sample, ScoredPair
from backends.storage.checkpoints import Retention
from backends.storage.run_store import RunStore
from tasks.report import collect
from tasks.report_page import Report, render
from tasks.report_pictures import score_curves, smoothed, training_curve
from tasks.report_record import CheckpointLine, EvaluationPoint, RunRecord
from tasks.report_text import cell, number
from tests.algorithms.watched import HELD, checkpoints, experiment, finished
from tests.servers.prefect import PrefectServer


def samples(step: int) -> tuple[Sample, ...]:
    """Untrained: all wrong; trained: all right but the fourth."""
    right = step > 0
    return tuple(
        Sample(
            f"What is {n} + {n}?",
            (str(2 * n) if n != 4 else "9") if right else f"It is {2 * n}.",
            str(2 * n),
            float(right and n != 4),
        )
        for n in range(1, 9)
    )


def record(steps: int = 60, **changes: Any) -> RunRecord:
    rows = [
        {"step": n, "train_mean_nll": 2.0 / n, "optim/lr": 3e-3, "time/tokens_per_second": 8123.4}
        for n in range(1, steps + 1)
    ]
    scores = {0: 0.0, 20: 0.5, 40: 0.75, 60: 0.875}
    known: dict[str, Any] = {
        "run_id": "Sums_1.a",
        "name": "sums",
        "status": "completed",
        "uri": "/data/runs/Sums_1.a",
        "experiment": {"name": "sums", "algorithm": {"kind": "sft"}},
        "data": {"fingerprint": "abc"},
        "rows": rows,
        "evaluations": [EvaluationPoint("val", s, v, 8, samples(s)) for s, v in scores.items()],
        "checkpoints": [
            CheckpointLine(
                60,
                "/data/runs/Sums_1.a/checkpoints/step-000060",
                "checkpoints/step-000060",
                1_300_000,
            )
        ],
        "flow_run_url": "http://prefect/v2/runs/flow-run/1",
    }
    return RunRecord(**known | changes)


def table(page: str, title: str) -> list[list[str]]:
    """The cells of the table below a heading, without its head."""
    lines = page.split(f"## {title}")[1].split("\n##")[0].strip().splitlines()
    rows = [line for line in lines if line.startswith("|")]
    return [[part.strip() for part in row.strip("|").split(" | ")] for row in rows[2:]]


def test_the_page_leads_with_the_scores_before_and_after() -> None:
    page = render(record()).markdown
    expected = ["val", "0.000 (step 0)", "**0.875** (step 60)", "+0.875", "8"]
    assert table(page, "Scores") == [expected]
    assert page.index("## Scores") < page.index("](./report/loss.png)") < page.index("## Training")


def test_every_evaluation_and_some_steps_are_listed() -> None:
    page = render(record()).markdown
    rows = table(page, "Training, every 3 steps")
    assert [row[0] for row in rows] == ["1", *(str(step) for step in range(3, 61, 3))]
    assert rows[1] == ["3", "0.6667", "0.003", "8123"]
    assert [row[1] for row in table(page, "Evaluations")] == ["0.000", "0.500", "0.750", "0.875"]


def test_the_last_step_is_listed_whatever_the_stride() -> None:
    rows = table(render(record(steps=59)).markdown, "Training, every 3 steps")
    assert [row[0] for row in rows[-2:]] == ["57", "59"]


def test_samples_show_both_answers_and_the_failures() -> None:
    rows = table(render(record()).markdown, "Samples of val, step 60")
    assert rows[0] == ["What is 1 + 1?", "2", "It is 2.", "2", "1"]
    assert rows[-1] == ["What is 4 + 4?", "8", "It is 8.", "9", "0"]
    assert len(rows) == 6


def test_a_table_survives_what_a_model_says() -> None:
    assert cell("a | b\n<b>*c*</b>\n") == r"a \| b ⏎ \<b\>\*c\*\</b\>"
    assert len(cell("x" * 1000)) == 160
    nasty = Sample("p", "| --- |\n# x ![i](j)", "e", 0.0)
    points = [EvaluationPoint("val", 1, 0.0, 1, (nasty,))]
    rows = table(render(record(evaluations=points)).markdown, "Samples of val, step 1")
    assert rows == [["p", "e", r"\| --- \| ⏎ \# x !\[i\](j)", "0"]]


def test_numbers_are_short() -> None:
    shown = [number(value) for value in (None, 3.0, 12345.0, 1.5e-5, 0.66666, 8123.4)]
    assert shown == ["", "3", "12,345", "1.5e-05", "0.6667", "8123"]


def test_smoothing_by_hand() -> None:
    # The ends keep their value; the middle takes as many neighbours on either side as it has.
    assert smoothed([1, 2, 6, 4, 2], reach=1) == [1, 3, 4, 4, 2]
    assert smoothed([1, 2, 6, 4, 2], reach=2) == [1, 3, 3, 4, 2]


@pytest.mark.parametrize("steps", [1, 60, 5000])
def test_pictures_are_small_pngs_with_something_on_them(steps: int) -> None:
    images = render(record(steps=steps)).images
    assert set(images) == {"loss.png", "scores.png"}
    for png in images.values():
        assert png.startswith(b"\x89PNG\r\n\x1a\n")
        width, height = struct.unpack(">II", png[16:24])
        assert 600 <= width <= 1200
        assert 250 <= height <= 600
        assert len(png) < 60_000
        # Deflated pixels: a blank picture of this size has well under a kilobyte of them.
        start = png.index(b"IDAT")
        assert struct.unpack(">I", png[start - 4 : start])[0] > 5_000
        assert zlib.crc32(png[12:29]) == struct.unpack(">I", png[29:33])[0]


def test_a_run_without_evaluations_or_steps_has_a_page() -> None:
    page = render(record(steps=0, evaluations=[], checkpoints=[]))
    assert page.images == {}
    assert page.markdown.startswith("# sums")


def test_a_score_that_is_not_a_number_does_not_break_the_page() -> None:
    points = [EvaluationPoint("val", 0, float("nan"), 8), EvaluationPoint("val", 5, 0.5, 8)]
    assert "0.500" in render(record(evaluations=points)).markdown


def panels(points: list[EvaluationPoint]) -> dict[str, dict[str, list[float]]]:
    """Of each panel of the scores its axis, and the values of each line."""
    from matplotlib.figure import Figure

    found = {}
    for draw in score_curves(points):
        axes = Figure().add_subplot()
        draw(axes)
        found[axes.get_ylabel()] = {
            str(line.get_label()): [float(value) for value in line.get_ydata()]
            for line in axes.get_lines()
        }
    return found


def test_each_kind_of_evaluation_is_drawn_and_told_in_its_own_unit() -> None:
    pair = ScoredPair("q", "yes", "no", 0.5)
    nan = float("nan")
    points = [
        EvaluationPoint("answers", 0, 0.25, 8, metrics={"reward/mean": 0.25}),
        EvaluationPoint("pairs", 0, 0.5, 4, (pair,), {"accuracy": 0.5, "margin": -0.25}),
        EvaluationPoint("pairs", 9, 0.75, 4, (pair,), {"accuracy": 0.75, "margin": 1.5}),
        EvaluationPoint("even", 9, 1.0, 4, (pair,), {"accuracy": 1.0, "margin": 0.125}, True),
        EvaluationPoint("rows", 0, 2.5, 4, metrics={"nll": 2.5}),
        EvaluationPoint("rows", 9, nan, 4, metrics={"nll": nan}),
    ]
    assert panels(points) == {
        "mean reward": {"answers": [0.25]},
        "accuracy\n(share of pairs)": {"pairs": [0.5, 0.75], "even": [1.0]},
        "mean margin (nats)": {"pairs": [-0.25, 1.5]},
        "mean margin (nats/token)": {"even": [0.125]},
        "NLL (nats per supervised token)": {"rows": [2.5]},
    }
    page = render(record(evaluations=points)).markdown
    assert [row[0] for row in table(page, "Scores")] == [
        "answers",
        "pairs (accuracy)",
        "pairs: margin (nats)",
        "rows (nats/token, less is better)",
        "even (accuracy)",
        "even: margin (nats/token)",
    ]
    assert "| prompt | chosen | rejected | margin (nats) |" in page
    assert "| prompt | chosen | rejected | margin (nats/token) |" in page


def test_a_loss_is_named_after_what_trains_under_it() -> None:
    from matplotlib.figure import Figure

    rows = [{"step": n, "loss": 0.7 - 0.01 * n} for n in range(1, 5)]
    (draw,) = training_curve(record(rows=rows, experiment={"algorithm": {"kind": "dpo"}}))
    axes = Figure().add_subplot()
    draw(axes)
    assert axes.get_ylabel() == "dpo loss"
    assert axes.get_ylim() == pytest.approx((0.0, 0.69 * 1.05))  # the curve keeps off the edge


# --- the best checkpoint


@dataclass(frozen=True)
class Saved:
    name: str
    step: int
    score: float
    metrics: dict[str, float]
    samples: tuple[Any, ...] = ()


def test_the_best_by_nll_is_the_least_number_and_the_earliest_of_equals(tmp_path: Path) -> None:
    """Steps that have no finite score are never the best, and it outlives the later ones."""
    store = RunStore(tmp_path, "r")
    store.begin(name="r", backend="mock", seed=0)
    store.take_lease()
    keep = {"keep_last": 1, "keep_best": {"metric": "val", "mode": "min"}}
    store.write_experiment({"checkpoints": keep})
    (tmp_path / "files").mkdir()
    scores = [float("nan"), 0.5, 0.5, float("inf"), 0.75]
    for step, score in enumerate(scores, 1):
        store.append_metrics({"step": step, "loss": 1.0})
        store.flush_metrics()
        store.save_checkpoint(
            step=step, state_uri=None, algorithm_state={}, folder=tmp_path / "files"
        )
        store.write_evaluation(Saved("val", step, score, {"nll": score}))
        store.expire(Retention.model_validate(keep))
    assert store.checkpoint_steps() == [2, 5]
    lines = collect(store, "completed", {}).checkpoints
    assert [(line.step, line.best_by) for line in lines] == [(2, "val"), (5, None)]
    shown = table(render(record(checkpoints=lines)).markdown, "Checkpoints")
    assert [row[0] for row in shown] == ["2, the best by val", "5"]


async def test_a_run_keeps_its_best_checkpoint_and_says_where(tmp_path: Path) -> None:
    # The mock scores 0 before the first step and 1 after it: 4 is the first of the best.
    run = await finished(
        experiment(
            tmp_path,
            evaluations=[{"name": "val", "data": {"kind": "rows", "rows": HELD}, "every": 4}],
            checkpoints={"keep_last": 1, "keep_best": {"metric": "val"}},
        )
    )
    assert checkpoints(tmp_path, "a") == ["step-000004", "step-000012"]
    artifacts = json.loads((tmp_path / "a/result.json").read_text())["artifacts"]
    assert Path(artifacts["best"]).name == "step-000004"
    assert Path(artifacts["checkpoint"]).name == "step-000012"
    page = render(collect(run.store, "completed", {})).markdown
    assert [row[0] for row in table(page, "Checkpoints")] == ["4, the best by val", "12"]


def test_in_one_piece_the_pictures_are_inline_and_the_links_whole() -> None:
    text = render(record()).inline("/data/runs/Sums_1.a")
    assert text.count("](data:image/png;base64,iVBOR") == 2
    assert "](file:///data/runs/Sums_1.a/checkpoints/step-000060)" in text
    assert "](./" not in text
    remote = render(record()).inline("s3://bucket/Sums_1.a")
    assert "](s3://bucket/Sums_1.a/checkpoints/step-000060)" in remote


def test_what_prefect_gets_stays_small() -> None:
    from tasks.report import MOST_ARTIFACT_BYTES, artifact_key, for_prefect

    page = render(record(steps=5000))
    assert "](data:image/png" in for_prefect(page, "/data")
    assert len(for_prefect(page, "/data").encode()) < MOST_ARTIFACT_BYTES
    heavy = Report(page.markdown, {name: png * 20 for name, png in page.images.items()})
    lean = for_prefect(heavy, "/data")
    assert "![" not in lean
    assert "## Training" in lean
    assert artifact_key("report", "Sums_1.a--B") == "report-sums-1-a-b"


async def test_a_flow_run_shows_one_report_and_its_progress(
    prefect_server: PrefectServer, tmp_path: Path
) -> None:
    from algorithms.experiment import Experiment
    from flows.train import train

    rows = [{"prompt": f"What is {i} + {i}?", "completion": str(2 * i)} for i in range(20)]
    experiment = Experiment.model_validate(
        {
            "name": "shown",
            "store": str(tmp_path),
            "model": {"name": "none"},
            "data": {"kind": "rows", "rows": rows},
            "algorithm": {"kind": "mock_sft", "params": {"batch_size": 4, "max_steps": 9}},
            "evaluations": [{"name": "val", "data": {"kind": "rows", "rows": rows}, "every": 3}],
        }
    )
    await train(experiment, "Shown.1")
    query = {"artifacts": {"key": {"like_": "shown-1"}}}
    async with httpx.AsyncClient(base_url=prefect_server.api_url, trust_env=False) as client:
        found = (await client.post("/artifacts/filter", json=query)).json()
    by_key = {artifact["key"]: artifact for artifact in found}
    assert sorted(artifact["key"] for artifact in found) == ["progress-shown-1", "report-shown-1"]
    assert by_key["progress-shown-1"]["data"] == 100.0
    assert by_key["progress-shown-1"]["description"].startswith("step 9 of 9 · train_mean_nll ")
    shown = by_key["report-shown-1"]
    assert shown["type"] == "markdown"
    assert shown["flow_run_id"] is not None
    assert shown["data"].count("](data:image/png;base64,") == 2

    folder = tmp_path / "Shown.1"
    kept = (folder / "report.md").read_text()
    assert (folder / "report/loss.png").read_bytes().startswith(b"\x89PNG")
    assert table(kept, "Evaluations") == table(shown["data"], "Evaluations")
    fingerprint = json.loads((folder / "run.json").read_text())["data_fingerprint"]
    assert fingerprint in kept


def test_progress_counts_from_where_a_run_goes_on() -> None:
    from tasks.report import _Progress

    progress = _Progress(RunPlan("r", "/r", first_step=50, total_steps=200, save_steps=(200,)))
    assert (progress.percent, progress.description) == (25.0, "step 50 of 200")
    progress.on_step({"step": 51, "train_mean_nll": 0.51234, "time/tokens_per_second": 8123.4})
    assert progress.description == "step 51 of 200 · train_mean_nll 0.5123 · 8,123 tokens/s"
