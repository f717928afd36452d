"""The page a run leaves behind: what its store holds -> markdown and pictures. Pure functions.

One page, two renderings: for the store with pictures as files beside it and relative links, and in
one piece for Prefect with the pictures inline (its UI shows PNG data URIs and strips SVG).
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from algorithms.evaluators import Sample, ScoredPair, ScoredRow
from tasks.report_findings import findings
from tasks.report_pictures import draw_pictures
from tasks.report_record import CheckpointLine, EvaluationPoint, RunRecord, by_name
from tasks.report_rollouts import rollout_sections
from tasks.report_text import cell, fenced, number, table

TABLE_COLUMNS = {
    "step": "step",
    "reward/mean": "mean reward",
    "reward/groups_mixed": "groups mixed",
    "sampling/kl": "KL sampler-trainer",
    "sampling/entropy": "entropy",
    "kl/base": "KL to base",
    "rollout/tokens": "tokens/rollout",
    "rollout/truncated": "rollouts cut",
    "train_mean_nll": "mean NLL (nats/token)",
    "loss": "loss",
    "optim/lr": "learning rate",
    "optim/grad_norm": "gradient norm",
    "tokens/supervised": "supervised tokens",
    "time/tokens_per_second": "tokens/s",
    "time/step": "seconds",
    "time/sampling": "s sampling",
    "time/training": "s training",
}
SHOWN_BESIDE_SCORES = re.compile(r"pass_rate|pass[@^]\d+|perplexity|bits_per_byte|margin")
"""Metrics of an evaluation that the table of scores shows beside its score."""

MOST_TABLE_ROWS = 20
MOST_EVALUATION_ROWS = 30
MOST_SAMPLES = 6
MOST_CONFIG_CHARACTERS = 20_000


@dataclass(frozen=True)
class Report:
    """The page as it lies in the store: markdown beside a folder `report/` of pictures."""

    markdown: str
    images: Mapping[str, bytes]

    def inline(self, run_uri: str) -> str:
        """The same page in one piece: pictures as data URIs, links as full addresses."""
        base = run_uri if "://" in run_uri else f"file://{run_uri}"
        text = self.markdown.replace("](./checkpoints/", f"]({base}/checkpoints/")
        for name, png in self.images.items():
            data = base64.b64encode(png).decode("ascii")
            text = text.replace(f"](./report/{name})", f"](data:image/png;base64,{data})")
        return text


def render(record: RunRecord) -> Report:
    """Draw the curves and write the page."""
    images = draw_pictures(record)
    sections = [
        _heading(record),
        _what_to_look_at(record),
        _scores(record.evaluations),
        _pictures(images),
        _metrics_table(record.rows),
        _evaluations_table(record.evaluations),
        rollout_sections(record.rollouts),
        _samples(record.evaluations),
        _checkpoints(record.checkpoints),
        _data(record.data),
        _config(record.experiment),
    ]
    return Report("\n\n".join(filter(None, sections)) + "\n", images)


# --- sections


def _heading(record: RunRecord) -> str:
    facts = {"run": f"`{record.run_id}`", "status": f"**{record.status}**", **record.facts}
    facts["folder"] = f"`{record.uri}`"
    if record.flow_run_url:
        facts["in Prefect"] = f"[flow run]({record.flow_run_url})"
    return f"# {record.name}\n\n" + table(("", ""), facts.items())


def _what_to_look_at(record: RunRecord) -> str:
    """What ended it, and what is off; a run that samples is told when nothing is."""
    found = "\n".join(f"- {words}" for words in findings(record))
    failed = "" if record.error is None else f"The run {record.status}:\n\n{fenced(record.error)}"
    if found or failed:
        return "\n\n".join(filter(None, ["## What to look at", failed, found]))
    if not record.rollouts:
        return ""
    return (
        "## What to look at\n\nNothing stands out: groups were mixed, the reward rose or the "
        "task was learned, KL and entropy stayed in bounds, and answers ended by themselves."
    )


def _scores(evaluations: Sequence[EvaluationPoint]) -> str:
    lines: list[tuple[object, ...]] = []
    for name, points in by_name(evaluations).items():
        first, last = points[0], points[-1]
        lines.append((_titled(last), *_change(first.score, last.score, first, last), last.rows))
        for metric, after in last.metrics.items():
            before = first.metrics.get(metric, float("nan"))
            if SHOWN_BESIDE_SCORES.fullmatch(metric) and (before, after) != (
                first.score,
                last.score,
            ):
                unit = f" ({last.margin_unit})" if metric == "margin" else ""
                lines.append((f"{name}: {metric}{unit}", *_change(before, after, first, last), ""))
    if not lines:
        return ""
    return "## Scores\n\n" + table(("evaluation", "before", "after", "change", "rows"), lines)


def _titled(point: EvaluationPoint) -> str:
    """An evaluation's name, with what it measures if that is no reward."""
    if point.is_likelihood:
        return f"{point.name} (nats/token, less is better)"
    return f"{point.name} (accuracy)" if point.is_preference else point.name


def _change(
    before: float, after: float, first: EvaluationPoint, last: EvaluationPoint
) -> tuple[str, str, str]:
    change = f"{after - before:+.3f}" if last.step > first.step else ""
    return f"{before:.3f} (step {first.step})", f"**{after:.3f}** (step {last.step})", change


def _pictures(images: Mapping[str, bytes]) -> str:
    return "\n\n".join(
        f"![{name.partition('.')[0]} over the run](./report/{name})" for name in images
    )


def _metrics_table(rows: Sequence[Mapping[str, float]]) -> str:
    if not rows:
        return ""
    columns = [name for name in TABLE_COLUMNS if any(name in row for row in rows)]
    every = -(-len(rows) // MOST_TABLE_ROWS)
    shown = [row for place, row in enumerate(rows) if place == 0 or (place + 1) % every == 0]
    if shown[-1] is not rows[-1]:
        shown.append(rows[-1])
    lines = [[number(row.get(name)) for name in columns] for row in shown]
    title = "## Training" if every == 1 else f"## Training, every {every} steps"
    return f"{title}\n\n" + table([TABLE_COLUMNS[name] for name in columns], lines)


def _evaluations_table(evaluations: Sequence[EvaluationPoint]) -> str:
    named = by_name(evaluations)
    steps = sorted({point.step for point in evaluations})
    if len(steps) < 3:
        return ""  # the table of scores says it all
    scores = {(point.step, point.name): point.score for point in evaluations}
    every = -(-len(steps) // MOST_EVALUATION_ROWS)
    shown = [step for place, step in enumerate(steps) if place % every == 0 or step == steps[-1]]
    lines = [[step, *(_score(scores.get((step, name))) for name in named)] for step in shown]
    titles = [_titled(points[-1]) for points in named.values()]
    return "## Evaluations\n\n" + table(("step", *titles), lines)


def _samples(evaluations: Sequence[EvaluationPoint]) -> str:
    parts = []
    for name, points in by_name(evaluations).items():
        first, last = points[0], points[-1]
        answers = [sample for sample in last.samples if isinstance(sample, Sample)]
        scored = [row for row in last.samples if isinstance(row, ScoredRow)]
        title = f"## Samples of {name}, step {last.step}\n\n"
        if answers:
            before = [] if first is last else first.samples
            answered = {sample.prompt: sample for sample in before if isinstance(sample, Sample)}
            parts.append(title + _answers_table(answers, answered))
        elif scored:
            parts.append(title + _likelihood_table(scored))
        elif pairs := [pair for pair in last.samples if isinstance(pair, ScoredPair)]:
            parts.append(title + _preference_table(pairs, last.margin_unit))
    return "\n\n".join(parts)


def _answers_table(answers: Sequence[Sample], before: Mapping[str, Sample]) -> str:
    """Some answers; beside each what was answered before, where there is one answer a prompt."""
    compared = bool(before) and len({sample.prompt for sample in answers}) == len(answers)
    lines = []
    for sample in _worth_showing(answers):
        early = before.get(sample.prompt)
        lines.append(
            (
                cell(sample.prompt),
                cell(sample.expected),
                *([cell(early.completion if early else "")] if compared else []),
                cell(sample.completion),
                number(sample.reward),
            )
        )
    middle = ("before", "after") if compared else ("answer",)
    return table(("prompt", "expected", *middle, "reward"), lines)


def _worth_showing(samples: Sequence[Sample]) -> list[Sample]:
    """The worst two, if they failed, and then the first ones in their order."""
    best = max(sample.reward for sample in samples)
    failed = sorted((s for s in samples if s.reward < best), key=lambda s: s.reward)[:2]
    rest = [sample for sample in samples if sample not in failed]
    chosen = rest[: MOST_SAMPLES - len(failed)] + failed
    return chosen


def _likelihood_table(rows: Sequence[ScoredRow]) -> str:
    """The rows whose answers are least likely."""
    worst = sorted(rows, key=lambda row: row.nll, reverse=True)[:MOST_SAMPLES]
    lines = [(cell(r.prompt), cell(r.expected), number(r.nll), r.tokens) for r in worst]
    return table(("prompt", "answer", "NLL (nats/token)", "tokens"), lines)


def _preference_table(pairs: Sequence[ScoredPair], unit: str) -> str:
    """The pairs whose chosen answers are least preferred."""
    worst = sorted(pairs, key=lambda pair: pair.margin)[:MOST_SAMPLES]
    lines = [(cell(p.prompt), cell(p.chosen), cell(p.rejected), number(p.margin)) for p in worst]
    return table(("prompt", "chosen", "rejected", f"margin ({unit})"), lines)


def _checkpoints(checkpoints: Sequence[CheckpointLine]) -> str:
    if not checkpoints:
        return ""
    lines = [
        (_step(line), f"[{line.path}](./{line.path})", f"{line.size_bytes / 1e6:.2f} MB", line.uri)
        for line in checkpoints
    ]
    return "## Checkpoints\n\n" + table(("step", "folder", "size", "address"), lines)


def _step(line: CheckpointLine) -> str:
    return f"{line.step}" if line.best_by is None else f"{line.step}, the best by {line.best_by}"


def _data(data: Mapping[str, Any]) -> str:
    if not data:
        return ""
    lines = [(name, f"`{cell(str(value))}`") for name, value in data.items()]
    return "## Data\n\n" + table(("", ""), lines)


def _config(experiment: Mapping[str, Any]) -> str:
    text = yaml.safe_dump(dict(experiment), sort_keys=False, allow_unicode=True)
    if len(text) > MOST_CONFIG_CHARACTERS:
        text = text[:MOST_CONFIG_CHARACTERS] + "\n# (cut here; the run's folder holds all of it)\n"
    fence = "```" if "```" not in text else "~~~~~~"
    return f"## Configuration\n\n{fence}yaml\n{text}{fence}"


def _score(score: float | None) -> str:
    return "" if score is None else f"{score:.3f}"
