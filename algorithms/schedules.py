"""Learning rates over a run, and the steps at which checkpoints are kept. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class LearningRateSchedule(BaseModel):
    """Warm up linearly, then stay, or fall to `min_ratio` of the peak by the end of the run."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="The shape after the warm-up."
    )
    warmup_steps: int = Field(0, ge=0, description="Steps of linear warm-up from 0.")
    min_ratio: float = Field(0.0, ge=0, le=1, description="Final rate as a share of the peak.")


def learning_rate_at(step: int, total: int, peak: float, schedule: LearningRateSchedule) -> float:
    """The learning rate of step `step` (from 0) of `total`.

    Warm-up reaches the peak at its last step: peak * (step + 1) / warmup_steps. The decay is over
    the remaining steps, d = (step - warmup) / (total - warmup), as in the schedules of
    transformers: linear 1 - d, cosine (1 + cos(pi d)) / 2, each scaled into [min_ratio, 1].
    """
    warmup = schedule.warmup_steps
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(total - warmup, 1)
    if schedule.kind == "constant":
        share = 1.0
    elif schedule.kind == "linear":
        share = 1.0 - done
    else:
        share = (1.0 + math.cos(math.pi * done)) / 2
    return peak * (schedule.min_ratio + (1.0 - schedule.min_ratio) * share)


def save_marks(total: int, every: int | None, fractions: Sequence[float] | None) -> list[int]:
    """The steps (counted done, 1..total) to keep, in order, each once; the last is always one.

    A fraction f is the first whole step at which at least f of the run is done; it is read as the
    decimal the user wrote, so that 0.07 of 100 steps is step 7 and not 8.
    """
    marks = {total}
    if every is not None:
        marks.update(range(every, total + 1, every))
    for fraction in fractions or []:
        marks.add(max(1, math.ceil(Fraction(str(fraction)) * total)))
    return sorted(marks)
