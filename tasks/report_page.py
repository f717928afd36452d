"""The page a run leaves behind: what its store holds -> markdown and pictures. Pure functions.

One page, two renderings: for the store with pictures as files beside it and relative links, and in
one piece for Prefect with the pictures inline (its UI shows PNG data URIs and strips SVG).
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LOSS_COLUMNS = ("train_mean_nll", "loss", "reward/mean")
"""The column that stands for the training itself; the first one present."""

COLUMN_UNITS = {"train_mean_nll": "nats per supervised token", "loss": "loss"}
TABLE_COLUMNS = {
    "step": "step",
    "train_mean_nll": "mean NLL (nats/token)",
    "loss": "loss",
    "optim/lr": "learning rate",
    "optim/grad_norm": "gradient norm",
    "tokens/supervised": "supervised tokens",
    "time/tokens_per_second": "tokens/s",
    "time/step": "seconds",
}
MOST_TABLE_ROWS = 20
MOST_EVALUATION_ROWS = 30
MOST_SAMPLES = 6
MOST_CELL_CHARACTERS = 160
MOST_CONFIG_CHARACTERS = 20_000
COLOURS = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2")


@dataclass(frozen=True, slots=True)
class Sample:
    """One held-out row: what was asked, what was wanted, what came, and what it was worth."""

    prompt: str
    expected: str
    completion: str
    reward: float


@dataclass(frozen=True, slots=True)
class EvaluationPoint:
    """One evaluation after so many steps: the mean reward over its rows."""

    name: str
    step: int
    score: float
    rows: int
    samples: tuple[Sample, ...] = ()


@dataclass(frozen=True, slots=True)
class CheckpointLine:
    """One checkpoint: its address, its place below the run's folder, and its size."""

    step: int
    uri: str
    path: str
    size_bytes: int


@dataclass(frozen=True)
class RunRecord:
    """What the report is made of, as the run's store holds it."""

    run_id: str
    name: str
    status: str
    uri: str
    experiment: Mapping[str, Any]
    data: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)
    rows: Sequence[Mapping[str, float]] = ()
    evaluations: Sequence[EvaluationPoint] = ()
    checkpoints: Sequence[CheckpointLine] = ()
    flow_run_url: str | None = None


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
    images = {
        name: png
        for name, png in (("loss.png", loss_curve(record)), ("scores.png", score_curve(record)))
        if png is not None
    }
    sections = [
        _heading(record),
        _scores(record.evaluations),
        _pictures(images),
        _metrics_table(record.rows),
        _evaluations_table(record.evaluations),
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
    return f"# {record.name}\n\n" + _table(("", ""), facts.items())


def _scores(evaluations: Sequence[EvaluationPoint]) -> str:
    lines = []
    for name, points in _by_name(evaluations).items():
        first, last = points[0], points[-1]
        change = f"{last.score - first.score:+.3f}" if last.step > first.step else ""
        before = f"{first.score:.3f} (step {first.step})"
        lines.append((name, before, f"**{last.score:.3f}** (step {last.step})", change, last.rows))
    if not lines:
        return ""
    return "## Scores\n\n" + _table(("evaluation", "before", "after", "change", "rows"), lines)


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
    return f"{title}\n\n" + _table([TABLE_COLUMNS[name] for name in columns], lines)


def _evaluations_table(evaluations: Sequence[EvaluationPoint]) -> str:
    names = list(_by_name(evaluations))
    steps = sorted({point.step for point in evaluations})
    if len(steps) < 3:
        return ""  # the table of scores says it all
    scores = {(point.step, point.name): point.score for point in evaluations}
    every = -(-len(steps) // MOST_EVALUATION_ROWS)
    shown = [step for place, step in enumerate(steps) if place % every == 0 or step == steps[-1]]
    lines = [[step, *(_score(scores.get((step, name))) for name in names)] for step in shown]
    return "## Evaluations\n\n" + _table(("step", *names), lines)


def _samples(evaluations: Sequence[EvaluationPoint]) -> str:
    parts = []
    for name, points in _by_name(evaluations).items():
        first, last = points[0], points[-1]
        if not last.samples:
            continue
        before = {sample.prompt: sample.completion for sample in first.samples}
        compared = last.step > first.step and bool(before)
        lines = [
            (
                cell(sample.prompt),
                cell(sample.expected),
                *([cell(before.get(sample.prompt, ""))] if compared else []),
                cell(sample.completion),
                number(sample.reward),
            )
            for sample in _worth_showing(last.samples)
        ]
        middle = ("before", "after") if compared else ("answer",)
        head = ("prompt", "expected", *middle, "reward")
        parts.append(f"## Samples of {name}, step {last.step}\n\n" + _table(head, lines))
    return "\n\n".join(parts)


def _worth_showing(samples: Sequence[Sample]) -> list[Sample]:
    """The worst two, if they failed, and then the first ones in their order."""
    best = max(sample.reward for sample in samples)
    failed = sorted((s for s in samples if s.reward < best), key=lambda s: s.reward)[:2]
    rest = [sample for sample in samples if sample not in failed]
    chosen = rest[: MOST_SAMPLES - len(failed)] + failed
    return chosen


def _checkpoints(checkpoints: Sequence[CheckpointLine]) -> str:
    if not checkpoints:
        return ""
    lines = [
        (line.step, f"[{line.path}](./{line.path})", f"{line.size_bytes / 1e6:.2f} MB", line.uri)
        for line in checkpoints
    ]
    return "## Checkpoints\n\n" + _table(("step", "folder", "size", "address"), lines)


def _data(data: Mapping[str, Any]) -> str:
    if not data:
        return ""
    lines = [(name, f"`{cell(str(value))}`") for name, value in data.items()]
    return "## Data\n\n" + _table(("", ""), lines)


def _config(experiment: Mapping[str, Any]) -> str:
    text = yaml.safe_dump(dict(experiment), sort_keys=False, allow_unicode=True)
    if len(text) > MOST_CONFIG_CHARACTERS:
        text = text[:MOST_CONFIG_CHARACTERS] + "\n# (cut here; the run's folder holds all of it)\n"
    fence = "```" if "```" not in text else "~~~~~~"
    return f"## Configuration\n\n{fence}yaml\n{text}{fence}"


def _score(score: float | None) -> str:
    return "" if score is None else f"{score:.3f}"


def _by_name(points: Iterable[EvaluationPoint]) -> dict[str, list[EvaluationPoint]]:
    grouped: dict[str, list[EvaluationPoint]] = {}
    for point in sorted(points, key=lambda point: point.step):
        grouped.setdefault(point.name, []).append(point)
    return grouped


def _table(head: Sequence[str], lines: Iterable[Iterable[object]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(str(value) for value in row) + " |" for row in rows)


def cell(text: str) -> str:
    """Text as a table cell shows it: one line, nothing that markdown takes for its own, cut."""
    one_line = " ⏎ ".join(text.strip().splitlines())
    if len(one_line) > MOST_CELL_CHARACTERS:
        one_line = one_line[: MOST_CELL_CHARACTERS - 1] + "…"
    for special in "\\`*_[]<>|#":
        one_line = one_line.replace(special, "\\" + special)
    return one_line


def number(value: float | None) -> str:
    """A number as short as it can be told: whole ones whole, others with four digits."""
    if value is None:
        return ""
    if float(value).is_integer() and abs(value) < 1e9:
        return f"{int(value):,}" if abs(value) >= 10_000 else str(int(value))
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


# --- pictures


def loss_curve(record: RunRecord) -> bytes | None:
    """The loss (or what stands for it) by step, with the checkpoints marked; None without rows."""
    column = next((c for c in LOSS_COLUMNS if any(c in row for row in record.rows)), None)
    if column is None:
        return None
    rows = [row for row in record.rows if column in row]
    steps, values = [row["step"] for row in rows], [row[column] for row in rows]

    def draw(axes: Axes) -> None:
        if len(values) < 40:
            axes.plot(steps, values, color=COLOURS[0], lw=1.6)
        else:
            axes.plot(steps, values, color=COLOURS[0], lw=1.0, alpha=0.3)
            axes.plot(steps, smoothed(values, max(2, len(values) // 60)), color=COLOURS[0], lw=1.8)
        if min(values) >= 0:
            axes.set_ylim(bottom=0)
        for checkpoint in record.checkpoints:
            axes.axvline(checkpoint.step, color="#9ca3af", lw=0.9, ls=":")
        axes.set_ylabel(COLUMN_UNITS.get(column, column))
        axes.set_title(f"{column}  (dotted: checkpoints)", loc="left", fontsize=10)

    return _png(draw)


def score_curve(record: RunRecord) -> bytes | None:
    """Every evaluation's score by step; None without evaluations."""
    if not record.evaluations:
        return None

    def draw(axes: Axes) -> None:
        for colour, (name, points) in zip(
            COLOURS * 9, _by_name(record.evaluations).items(), strict=False
        ):
            steps, scores = [p.step for p in points], [p.score for p in points]
            axes.plot(steps, scores, color=colour, lw=1.8, marker="o", ms=4.5, label=name)
            axes.annotate(
                f"{scores[-1]:.2f}",
                (steps[-1], scores[-1]),
                textcoords="offset points",
                xytext=(7, -3),
                fontsize=9,
                color=colour,
            )
        if all(0 <= point.score <= 1 for point in record.evaluations):
            axes.set_ylim(-0.04, 1.04)
        axes.margins(x=0.06)
        axes.set_ylabel("mean reward")
        axes.set_title("scores on held-out rows", loc="left", fontsize=10)
        axes.legend(frameon=False, fontsize=9, loc="best")

    return _png(draw)


def smoothed(values: Sequence[float], reach: int) -> list[float]:
    """Mean of each value and its neighbours, at most `reach` on either side, as many on each."""
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    means = []
    for place in range(len(values)):
        near = min(reach, place, len(values) - 1 - place)
        means.append((sums[place + near + 1] - sums[place - near]) / (2 * near + 1))
    return means


def _png(draw: Any) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 2.9), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    draw(axes)
    axes.set_xlabel("optimizer step")
    axes.locator_params(axis="x", integer=True)
    axes.grid(color="#e5e7eb", lw=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9, color="#9ca3af")
    output = io.BytesIO()
    figure.savefig(output, format="png", pil_kwargs={"optimize": True})
    return output.getvalue()
