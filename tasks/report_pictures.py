"""The curves of a run as PNG: its training, its rollouts, its held-out scores."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from tasks.report_record import LOSS_COLUMNS, EvaluationPoint, RunRecord, column

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    Draw = Callable[[Axes], None]

Value = tuple[int, float]
"""A step, and what was measured after it."""

COLUMN_UNITS = {"train_mean_nll": "nats per supervised token", "reward/mean": "reward"}
REWARD, ACCURACY = "mean reward", "accuracy\n(share of pairs)"
COLOURS = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2")
GROUPS = {
    "reward/groups_all_good": ("all good", "#059669"),
    "reward/groups_mixed": ("mixed", "#93c5fd"),
    "reward/groups_all_bad": ("all bad", "#dc2626"),
}
PANELS = {
    "sampling/kl": "KL, sampler to trainer\n(nats per token)",
    "kl/base": "KL to the base model\n(nats per token)",
    "sampling/entropy": "entropy\n(nats per token)",
    "rollout/tokens": "tokens a rollout",
}
"""Columns that have a panel of their own, and its axis."""

COLOURS_KEPT = 64

MOST_POINTS = 40
"""A curve of more is drawn faintly, under its moving mean."""


def draw_pictures(record: RunRecord) -> dict[str, bytes]:
    """All pictures that there is something to draw for, by file name."""
    pictures = {
        "loss.png": training_curve(record),
        "rollouts.png": rollout_curves(record),
        "scores.png": score_curves(record.evaluations),
    }
    return {name: _png(draws) for name, draws in pictures.items() if draws}


def training_curve(record: RunRecord) -> list[Draw]:
    """What stands for the training by step, checkpoints marked; a reward has its deviation."""
    name = next((c for c in LOSS_COLUMNS if column(record.rows, c)[0]), None)
    if name is None:
        return []
    kind = record.experiment.get("algorithm", {}).get("kind")
    steps, values = column(record.rows, name)
    deviations = dict(zip(*column(record.rows, "reward/std"), strict=True))

    def draw(axes: Axes) -> None:
        _line(axes, steps, values, COLOURS[0])
        if name == "reward/mean":
            reach = [deviations.get(step, 0.0) for step in steps]
            low = [value - std for value, std in zip(values, reach, strict=True)]
            high = [value + std for value, std in zip(values, reach, strict=True)]
            axes.fill_between(steps, low, high, color=COLOURS[0], alpha=0.12, lw=0)
        elif min(values) >= 0:
            axes.set_ylim(0, 1.05 * max(values) or 1.0)
        for checkpoint in record.checkpoints:
            axes.axvline(checkpoint.step, color="#9ca3af", lw=0.9, ls=":")
        axes.set_ylabel(COLUMN_UNITS.get(name, f"{kind} loss"))
        shade = "band: ± one standard deviation, " if name == "reward/mean" else ""
        axes.set_title(f"{name}  ({shade}dotted: checkpoints)", loc="left", fontsize=10)

    return [draw]


def rollout_curves(record: RunRecord) -> list[Draw]:
    """Shares of groups, KL, entropy and length by step, those that the run has."""
    draws: list[Draw] = []
    if all(column(record.rows, name)[0] for name in GROUPS):
        draws.append(partial(_draw_groups, record=record))
    draws.extend(
        partial(_draw_column, record=record, name=name, words=words)
        for name, words in PANELS.items()
        if column(record.rows, name)[0]
    )
    return draws


def _draw_groups(axes: Axes, record: RunRecord) -> None:
    rows = [row for row in record.rows if all(row.get(name) is not None for name in GROUPS)]
    steps = column(rows, next(iter(GROUPS)))[0]
    shares = [column(rows, name)[1] for name in GROUPS]
    words, colours = zip(*GROUPS.values(), strict=True)
    axes.stackplot(steps, *shares, labels=words, colors=colours, alpha=0.75, lw=0)
    axes.set_ylim(0, 1)
    axes.set_ylabel("share of groups")
    axes.legend(fontsize=8, loc="lower left")


def _draw_column(axes: Axes, record: RunRecord, name: str, words: str) -> None:
    _line(axes, *column(record.rows, name), COLOURS[0])
    axes.set_ylabel(words)


def score_curves(evaluations: Sequence[EvaluationPoint]) -> list[Draw]:
    """Every evaluation by step; a panel for each unit, and one for the margins of pairs."""
    panels: dict[str, dict[str, list[Value]]] = {}
    for point in sorted(evaluations, key=lambda point: point.step):
        for unit, value in _measured(point):
            if math.isfinite(value):
                named = panels.setdefault(unit, {})
                named.setdefault(point.name, []).append((point.step, value))
    return [partial(_draw_scores, unit=unit, named=named) for unit, named in panels.items()]


def _measured(point: EvaluationPoint) -> list[tuple[str, float]]:
    """What an evaluation says, each value with its axis."""
    if point.is_likelihood:
        return [("NLL (nats per supervised token)", point.score)]
    if not point.is_preference:
        return [(REWARD, point.score)]
    margin = point.metrics.get("margin", math.nan)
    return [(ACCURACY, point.score), (f"mean margin ({point.margin_unit})", margin)]


def _draw_scores(axes: Axes, unit: str, named: Mapping[str, Sequence[Value]]) -> None:
    for colour, (name, points) in zip(COLOURS * 9, named.items(), strict=False):
        steps, scores = zip(*points, strict=True)
        axes.plot(steps, scores, color=colour, lw=1.8, marker="o", ms=4.5, label=name)
        axes.annotate(
            f"{scores[-1]:.3f}",
            (steps[-1], scores[-1]),
            textcoords="offset points",
            xytext=(7, -3),
            fontsize=9,
            color=colour,
        )
    values = [value for points in named.values() for _, value in points]
    if unit in (REWARD, ACCURACY) and all(0 <= value <= 1 for value in values):
        axes.set_ylim(-0.04, 1.04)
    axes.margins(x=0.06)
    axes.set_ylabel(unit)
    axes.set_title("scores on held-out rows", loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=9, loc="best")


def _line(axes: Axes, steps: Sequence[int], values: Sequence[float], colour: str) -> None:
    if len(values) < MOST_POINTS:
        axes.plot(steps, values, color=colour, lw=1.6)
    else:
        axes.plot(steps, values, color=colour, lw=1.0, alpha=0.3)
        axes.plot(steps, smoothed(values, max(2, len(values) // 60)), color=colour, lw=1.8)


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


def _png(draws: Sequence[Draw]) -> bytes:
    """One panel in full width, or several, two in a row."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from PIL import Image

    columns = min(len(draws), 2)
    lines = -(-len(draws) // 2)
    height = 2.9 if lines == 1 else 2.2 * lines
    figure = Figure(figsize=(7.2, height), dpi=110, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    for place, draw in enumerate(draws, start=1):
        axes = figure.add_subplot(lines, columns, place)
        draw(axes)
        axes.set_xlabel("optimizer step")
        axes.locator_params(axis="x", integer=True)
        axes.grid(color="#e5e7eb", lw=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=9, color="#9ca3af")
    canvas.draw()
    # Few colours make a third of the bytes; the page goes into Prefect's database.
    picture = (
        Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB").quantize(COLOURS_KEPT)
    )
    output = io.BytesIO()
    picture.save(output, format="png", optimize=True)
    return output.getvalue()
