"""The report of on-policy runs: what it finds wrong, which rollouts it shows, and its curves."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from algorithms.base import Transcript
from algorithms.evaluators import EvaluationResult, Sample, ScoredRow
from backends.storage.run_store import RunStore
from tasks.report import MOST_ARTIFACT_BYTES, collect, for_prefect
from tasks.report_findings import findings
from tasks.report_page import render
from tasks.report_record import EvaluationPoint, RunRecord

Row = dict[str, float]


def healthy(step: int) -> Row:
    """The row of a step of 60: the reward rises from 0.1 to 0.69, and wobbles."""
    reward = 0.1 + 0.01 * step + 0.02 * (-1) ** step
    return {
        "step": step,
        "optim/grad_norm": 1.0,
        "reward/mean": reward,
        "reward/std": 0.3,
        "reward/groups_all_good": 0.2,
        "reward/groups_mixed": 0.7,
        "reward/groups_all_bad": 0.1,
        "sampling/kl": 1e-5,
        "sampling/entropy": 1.0 - 0.005 * step,
        "sampling/staleness": 0.0,
        "kl/base": 0.001 * step,
        "rollout/tokens": 12.0,
        "rollout/truncated": 0.0,
        "time/sampling": 1.0,
        "time/training": 0.4,
    }


def transcript(reward: float, *said: str, group: int = 0, **fields: Any) -> Transcript:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(said)]
    known: dict[str, Any] = {"advantage": reward - 0.5, "end": "stop"}
    return Transcript(group=group, messages=messages, reward=reward, **known | fields)


def run(change: Callable[[Row], Row] = lambda row: row, steps: int = 60, **more: Any) -> RunRecord:
    rows = [change(healthy(step)) for step in range(1, steps + 1)]
    rollouts = {
        1: [transcript(0.0, "3 + 4?", "It is 7.")],
        60: [
            transcript(0.0, "1 + 1?", "3", group=1),
            transcript(1.0, "1 + 1?", "2", group=1),
            transcript(0.5, "1 + 1?", "two", group=1, end="length"),
        ],
    }
    known: dict[str, Any] = {"rows": rows, "rollouts": rollouts, "status": "completed"}
    return RunRecord(run_id="r", name="r", uri="/runs/r", experiment={}, **known | more)


def section(page: str, title: str) -> str:
    return page.split(f"## {title}\n")[1].split("\n## ")[0]


# --- what to look at ----------------------------------------------------------------------------


def test_of_a_good_run_nothing_is_said() -> None:
    assert findings(run()) == []
    assert "Nothing stands out" in section(render(run()).markdown, "What to look at")


def flat(row: Row) -> Row:
    return row | {"reward/mean": 0.2 + 0.02 * (-1) ** row["step"]}


def all_bad(row: Row) -> Row:
    groups = {"reward/groups_mixed": 0.0, "reward/groups_all_bad": 1.0, "reward/groups_all_good": 0}
    return row | groups | {"reward/mean": 0.0, "reward/std": 0.0}


def all_good_late(row: Row) -> Row:
    if row["step"] <= 30:
        return row
    groups = {"reward/groups_mixed": 0.0, "reward/groups_all_bad": 0, "reward/groups_all_good": 1.0}
    return row | groups | {"reward/mean": 1.0, "reward/std": 0.0}


def skipped(row: Row) -> Row:
    return {k: v for k, v in row.items() if row["step"] % 3 or not k.startswith("optim")}


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (flat, ["**The reward is flat:** 0.200 over the first 12 steps, 0.200 over"]),
        (lambda row: row | {"reward/mean": 0.8 - row["reward/mean"]}, ["**The reward fell:** "]),
        (
            all_bad,
            [
                "**No group was mixed in 60 of 60 steps.** All rewards of a group were alike, so "
                "no answer had an advantage over another, and these steps taught nothing; 0 % of "
                "their groups were all good. The rows are too hard",
                "**The reward is flat:** 0.000 over the first 12 steps, 0.000 over the last",
            ],
        ),
        (all_good_late, ["**No group was mixed in 30 of 60 steps.** "]),
        (skipped, ["**20 of 60 steps trained nothing.** "]),
        (
            lambda row: row | {"optim/grad_norm": math.nan if row["step"] > 57 else 1.0},
            ["**The gradient was not finite at step 58** (3 steps in all)"],
        ),
        (
            lambda row: row | {"optim/grad_norm": float(row["step"] < 40), "loss": 6.24},
            ["**The gradient is exactly 0 over the last 12 steps**, at a loss of 6.24: nothing"],
        ),
        (lambda row: row | {"optim/grad_norm": float(row["step"] < 60), "loss": 6.24}, []),
        (lambda row: row | {"optim/grad_norm": 0.0, "loss": 1e-9}, []),  # learned
        (
            lambda row: row | {"rollout/truncated": row["step"] / 60},
            ["**Answers were cut at max_tokens:** 51 % of the rollouts, 91 % at last."],
        ),
        (
            lambda row: row | {"sampling/entropy": 2.0 / row["step"] ** 2},
            ["**Entropy collapsed:** from 0.261 to 0.000682 nats per token."],
        ),
        (
            lambda row: row | {"sampling/kl": 0.001 * row["step"]},
            ["**The sampler and the trainer drift apart:** their KL went from 0.0065 to 0.0545"],
        ),
        (lambda row: row | {"sampling/kl": 0.05, "sampling/staleness": 2.0}, []),
        (
            lambda row: row | {"sampling/kl": 0.5, "sampling/staleness": 2.0},
            ["**The sampler and the trainer drift apart:** "],
        ),
        (
            lambda row: row | {"kl/base": 0.02 * row["step"]},
            ["**The policy is far from the base model:** 1.09 nats per token at last."],
        ),
    ],
)
def test_what_is_off_is_said_with_its_figures(
    change: Callable[[Row], Row], wanted: list[str]
) -> None:
    found = findings(run(change))
    assert len(found) == len(wanted), found
    for said, words in zip(found, wanted, strict=True):
        assert said.startswith(words)


def test_a_short_run_is_left_alone_where_noise_would_speak() -> None:
    assert findings(run(flat, steps=9)) == []


def test_a_run_that_failed_says_why_first() -> None:
    page = render(run(all_bad, status="failed", error="none of the 60 batches held anything"))
    words = section(page.markdown, "What to look at").strip()
    assert words.startswith(
        "The run failed:\n\n```text\nnone of the 60 batches held anything\n```\n\n"
        "- **No group was mixed in 60 of 60 steps.**"
    )


def test_held_out_scores_that_went_the_wrong_way_are_named() -> None:
    def points(name: str, scores: list[float], **metrics: float) -> list[EvaluationPoint]:
        return [
            EvaluationPoint(name, 10 * place, score, 4, metrics=metrics)
            for place, score in enumerate(scores)
        ]

    worse = points("val", [0.5, 0.75, 0.25], answers_cut=0.5)
    fine = points("more", [0.5, 0.75, 0.625], answers_cut=0.0)
    nll_worse, nll_fine = points("nll", [1.0, 2.0], nll=0.0), points("less", [2.0, 1.0], nll=0.0)
    found = findings(run(evaluations=[*worse, *fine, *nll_worse, *nll_fine]))
    assert found == [
        "**val is worse than before:** 0.500 at step 0, 0.250 at the end, 0.750 at its best "
        "(step 10). **50 % of the answers of val were cut at its max_tokens**, and scored as they "
        "stand: raise it if they were still on their way.",
        "**nll is worse than before:** 1.000 at step 0, 2.000 at the end, 1.000 at its best "
        "(step 0).",
    ]
    page = render(run(flat, evaluations=worse)).markdown
    assert page.index("## What to look at") < page.index("## Scores")
    assert section(page, "What to look at").count("\n- **") == 2


# --- rollouts -----------------------------------------------------------------------------------


def test_the_worst_a_typical_and_the_best_rollout_are_shown() -> None:
    text = section(render(run()).markdown, "Rollouts")
    assert "Step 1: rollouts: 1; ended by: 1 stop." in text
    assert "Step 60: rollouts: 3; ended by: 2 stop, 1 length." in text
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert rows[2:] == [
        ["1", "all alike", "0", "-0.5", "0", "stop", "1", "It is 7."],
        ["60", "worst", "0", "-0.5", "1", "stop", "1", "3"],
        ["60", "typical", "0.5", "0", "1", "length", "1", "two"],
        ["60", "best", "1", "0.5", "1", "stop", "1", "2"],
    ]
    assert "### Step 60, typical: reward 0.5" in text
    assert "**user**\n\n```text\n1 + 1?\n```\n\n**assistant**\n\n```text\ntwo\n```" in text


def test_long_turns_are_folded_and_cut_and_nothing_in_them_is_markdown() -> None:
    long = "x" * 500 + "</details>\n# no heading\n````\n" + "y" * 3000 + "the end"
    rollout = transcript(1.0, "q", long, advantage=None)
    text = section(render(run(rollouts={5: [rollout]})).markdown, "Rollouts")
    assert f"<details><summary><b>assistant</b>: {len(long):,} characters</summary>" in text
    assert "`````text\nxxx" in text
    assert f"… ({len(long) - 1200:,} characters are left out) …" in text
    assert "ythe end\n`````\n\n</details>" in text
    assert " | not trained on | " in text


def test_tool_calls_are_shown_and_many_turns_left_out() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    messages += [{"role": "tool", "content": f"answer {n}"} for n in range(11)]
    rollout = Transcript(0, messages, 1.0, 0.0, "max_turns")
    text = section(render(run(rollouts={5: [rollout]})).markdown, "Rollouts")
    assert '"name": "add", "arguments": {"a": 1}' in text
    assert "… (4 turns are left out)" in text
    assert "answer 2\n" in text
    assert "answer 3\n" not in text
    assert "answer 6\n" not in text
    assert "answer 7\n" in text
    assert r"ended by: 1 max\_turns" in text


def test_the_longest_rollouts_fit_into_prefect() -> None:
    said = ["é" * 100_000] * 40
    rollouts = {step: [transcript(r, *said) for r in (0.0, 0.5, 1.0)] for step in (1, 60)}
    assert len(for_prefect(render(run(rollouts=rollouts)), "/runs/r").encode()) < (
        MOST_ARTIFACT_BYTES
    )


def test_the_store_has_it_all(tmp_path: Path) -> None:
    store = RunStore(tmp_path, "r")
    store.begin(name="r", backend="mock", seed=0)
    store.take_lease()
    for step in (1, 2, 3):
        store.append_metrics(healthy(step))
        store.write_rollouts(step, [transcript(0.0, "q", f"at {step}"), transcript(1.0, "q", "a")])
    store.flush_metrics()
    answers = [Sample("p", "a", "e", 1.0), Sample("p", "b", "e", 0.0)]
    store.write_evaluation(EvaluationResult("val", 3, 0.5, {"n": 1.0}, answers))
    rows = [ScoredRow("p", "q", 0.5, 3)]
    likely = {"nll": 0.5, "perplexity": math.inf}
    store.write_evaluation(EvaluationResult("nll", 3, 0.5, likely, rows))
    record = collect(RunStore(tmp_path, "r"), "completed", {})
    assert list(record.rollouts) == [1, 3]
    assert record.rollouts[3][0] == transcript(0.0, "q", "at 3")
    by_name = {point.name: point for point in record.evaluations}
    assert by_name["val"].samples == answers
    assert (by_name["val"].rows, by_name["val"].is_likelihood) == (1, False)
    assert by_name["nll"].samples == rows
    assert (by_name["nll"].metrics, by_name["nll"].is_likelihood) == ({"nll": 0.5}, True)
    assert "at 3" in render(record).markdown


# --- curves and tables --------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 60, 2000])
def test_an_on_policy_run_has_its_curves(steps: int) -> None:
    page = render(run(steps=steps))
    assert list(page.images) == ["loss.png", "rollouts.png"]
    assert all(4_000 < len(png) < 80_000 for png in page.images.values())
    head = page.markdown.split("## Training")[1].splitlines()[2]
    assert "| mean reward | groups mixed | KL sampler-trainer | entropy | KL to base |" in head


def test_steps_without_a_number_leave_a_gap_and_no_error() -> None:
    def broken(row: Row) -> Row:
        return {"step": row["step"]} if row["step"] % 2 else row | {"reward/mean": math.nan}

    assert list(render(run(broken)).images) == ["rollouts.png"]


def test_rewards_and_likelihoods_are_told_apart() -> None:
    drawn = {"reward/mean": 0.5, "pass_rate": 0.5, "pass@4": 0.75, "n": 2.0}
    likely = {"nll": 0.5, "perplexity": 1.649, "bits_per_byte": 0.25, "n": 2.0}
    answers = [Sample("p", "a", "e", 1.0), Sample("p", "b", "e", 0.0)] * 2
    rows = [ScoredRow("p", "q", 0.1, 3), ScoredRow("P", "Q", 0.9, 4)]
    page = render(
        run(
            evaluations=[
                EvaluationPoint("val", 0, 0.25, 2, (), drawn | {"pass_rate": 0.25, "pass@4": 0.5}),
                EvaluationPoint("val", 60, 0.5, 2, answers, drawn),
                EvaluationPoint("text", 60, 0.5, 2, rows, likely),
            ]
        )
    )
    scores = section(page.markdown, "Scores")
    assert "| val | 0.250 (step 0) | **0.500** (step 60) | +0.250 | 2 |" in scores
    assert "| val: pass@4 | 0.500 (step 0) | **0.750** (step 60) | +0.250 |  |" in scores
    assert "val: pass_rate" not in scores  # it is the score
    assert "| text (nats/token, less is better) | " in scores
    assert "| text: bits_per_byte | 0.250 (step 60) | **0.250** (step 60) |  |  |" in scores
    worst_first = section(page.markdown, "Samples of text, step 60")
    assert "| P | Q | 0.9 | 4 |\n| p | q | 0.1 | 3 |" in worst_first
    assert "| prompt | expected | answer | reward |" in page.markdown
    assert len(page.images["scores.png"]) > 4_000
