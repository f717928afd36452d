"""What a run's own numbers say went wrong, in words: each rule looks for one thing.

Rules compare the first fifth of the steps with the last. What they say is a hint with its figures,
not a verdict; a run of few steps is left alone where its noise would speak.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, variance

from tasks.report_record import EvaluationPoint, RunRecord, by_name, column

FEWEST_STEPS = 10
"""Fewer say nothing of where a curve goes."""

MOST_CONSTANT = 0.25
"""Share of steps without a mixed group."""

LEARNED = 0.8
"""A share of groups that are all good above this is a task learned, not a run gone wrong."""

MOST_SAMPLING_KL = 0.01
MOST_STALE_SAMPLING_KL = 0.1
"""Nats per token between the weights that sampled and those that train on it."""

MOST_BASE_KL = 0.5
"""Nats per token away from the base model."""

LEAST_ENTROPY_LEFT = 0.1
"""Share of the entropy at first that is left at last."""

LEAST_LOSS = 1e-6
"""Below this a loss without a gradient is one that is learned."""

MOST_CUT = 0.05
"""Share of answers that end at max_tokens."""

Rows = Sequence[Mapping[str, float]]


def findings(record: RunRecord) -> list[str]:
    """Everything that is worth a look, the most likely cause first."""
    rows = record.rows
    found = [
        _constant_groups(rows),
        _skipped(rows),
        _gradients(rows),
        _stuck(rows),
        _reward(rows),
        _cut(rows),
        _entropy(rows),
        _sampling_kl(rows),
        _base_kl(rows),
        *(_evaluation(points) for points in by_name(record.evaluations).values()),
    ]
    return [words for words in found if words is not None]


# --- helpers ------------------------------------------------------------------------------------


def _ends(values: Sequence[float]) -> tuple[Sequence[float], Sequence[float]] | None:
    """The first and the last fifth; None of a short run."""
    if len(values) < FEWEST_STEPS:
        return None
    reach = len(values) // 5
    return values[:reach], values[-reach:]


def _learned(rows: Rows) -> bool:
    ends = _ends(column(rows, "reward/groups_all_good")[1])
    return ends is not None and fmean(ends[1]) > LEARNED


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


# --- rules --------------------------------------------------------------------------------------


def _constant_groups(rows: Rows) -> str | None:
    mixed = column(rows, "reward/groups_mixed")[1]
    constant = [row for row in rows if row.get("reward/groups_mixed") == 0]
    if not mixed or len(constant) <= MOST_CONSTANT * len(mixed):
        return None
    good = fmean(row.get("reward/groups_all_good") or 0.0 for row in constant)
    steps = f"**No group was mixed in {len(constant)} of {len(mixed)} steps.** "
    why = (
        "All rewards of a group were alike, so no answer had an advantage over another, and these "
        f"steps taught nothing; {_percent(good)} of their groups were all good. "
    )
    if good > 0.5:
        return steps + why + "The rows are too easy by then: take harder ones, or fewer steps."
    return (
        steps + why + "The rows are too hard, or the verifier never says yes: read the rollouts "
        "below against the expected answers, raise num_samples or temperature, or start from "
        "weights that know the form of the answer (model.init_from)."
    )


def _skipped(rows: Rows) -> str | None:
    """Steps without an optimizer step have no gradient norm."""
    trained = column(rows, "optim/grad_norm")[0]
    skipped = sum("optim/grad_norm" not in row for row in rows)
    if not skipped or not trained:
        return None  # a server that gives no gradient norms says nothing
    return (
        f"**{skipped} of {len(rows)} steps trained nothing.** Their batches were empty: every "
        "group was dropped (see reward/groups_mixed), and the weights stayed as they were."
    )


def _gradients(rows: Rows) -> str | None:
    broken = [
        int(row["step"])
        for row in rows
        if "optim/grad_norm" in row
        and (row["optim/grad_norm"] is None or not math.isfinite(row["optim/grad_norm"]))
    ]
    if not broken:
        return None
    return (
        f"**The gradient was not finite at step {broken[0]}** ({len(broken)} steps in all): lower "
        "learning_rate, set grad_clip_norm, and look for extreme advantages."
    )


def _stuck(rows: Rows) -> str | None:
    """A loss that is not 0 and has no gradient: of weights that were thrown too far."""
    ends = _ends([row.get("optim/grad_norm", math.nan) for row in rows])
    if ends is None or any(norm != 0 for norm in ends[1]):
        return None
    last = rows[-len(ends[1]) :]
    losses = [row.get("train_mean_nll") or row.get("loss") or 0.0 for row in last]
    if max(map(abs, losses)) < LEAST_LOSS:
        return None
    return (
        f"**The gradient is exactly 0 over the last {len(last)} steps**, at a loss of "
        f"{fmean(losses):.3g}: nothing is learned any more. The weights have left the range in "
        "which the loss can tell them apart: lower learning_rate by much."
    )


def _reward(rows: Rows) -> str | None:
    ends = _ends(column(rows, "reward/mean")[1])
    if ends is None or _learned(rows):
        return None
    first, last = (fmean(end) for end in ends)
    noise = 2 * math.sqrt(sum(variance(end) / len(end) for end in ends))
    means = f"{first:.3f} over the first {len(ends[0])} steps, {last:.3f} over the last"
    if first - last > noise:
        return (
            f"**The reward fell:** {means}. Lower learning_rate, or hold the policy by a KL "
            "penalty or a clipped loss; the best checkpoint may be an early one."
        )
    if last - first > noise:
        return None
    return (
        f"**The reward is flat:** {means}, which is within its noise (± {noise:.3f}). Are there "
        "mixed groups to learn from? If so: raise learning_rate, or take more groups a step."
    )


def _cut(rows: Rows) -> str | None:
    ends = column(rows, "rollout/truncated")[1]
    if not ends:
        return None
    overall, last = fmean(ends), fmean(ends[-max(1, len(ends) // 5) :])
    if max(overall, last) <= MOST_CUT:
        return None
    return (
        f"**Answers were cut at max_tokens:** {_percent(overall)} of the rollouts, "
        f"{_percent(last)} at last. What is cut is scored as it stands, and mostly as wrong: raise "
        "max_tokens, or see below whether the model ever ends its turn."
    )


def _entropy(rows: Rows) -> str | None:
    ends = _ends(column(rows, "sampling/entropy")[1])
    if ends is None or _learned(rows):
        return None
    first, last = (fmean(end) for end in ends)
    if last >= LEAST_ENTROPY_LEFT * first:
        return None
    return (
        f"**Entropy collapsed:** from {first:.3g} to {last:.3g} nats per token. The answers to a "
        "prompt hardly differ any more, so groups turn constant: lower learning_rate, raise "
        "temperature, or add a KL penalty."
    )


def _sampling_kl(rows: Rows) -> str | None:
    values = column(rows, "sampling/kl")[1]
    if not values:
        return None
    first, last = (fmean(end) for end in _ends(values) or (values[:1], values[-1:]))
    staleness = max(column(rows, "sampling/staleness")[1], default=0.0)
    if last <= (MOST_STALE_SAMPLING_KL if staleness else MOST_SAMPLING_KL):
        return None
    why = (
        f"The samples are up to {staleness:.0f} batches old: lower max_staleness, num_substeps or "
        "learning_rate."
        if staleness
        else "Nothing is stale, so the two disagree on the same weights: look at their precision, "
        "and at the sampling temperature."
    )
    return (
        f"**The sampler and the trainer drift apart:** their KL went from {first:.3g} to "
        f"{last:.3g} nats per token. {why}"
    )


def _base_kl(rows: Rows) -> str | None:
    values = column(rows, "kl/base")[1]
    if not values:
        return None
    last = fmean(values[-max(1, len(values) // 5) :])
    if last <= MOST_BASE_KL:
        return None
    return (
        f"**The policy is far from the base model:** {last:.3g} nats per token at last. Read the "
        "rollouts for answers that please the verifier alone; raise the KL penalty."
    )


def _evaluation(points: Sequence[EvaluationPoint]) -> str | None:
    """A held-out score that is worse than it was, and answers that end at max_tokens."""
    sign = -1 if points[0].is_likelihood else 1
    first, last = points[0], points[-1]
    best = max(points, key=lambda point: sign * point.score)
    words = []
    if last.step > first.step and sign * last.score < sign * first.score:
        words.append(
            f"**{last.name} is worse than before:** {first.score:.3f} at step {first.step}, "
            f"{last.score:.3f} at the end, {best.score:.3f} at its best (step {best.step})."
        )
    if (cut := last.metrics.get("answers_cut") or 0.0) > MOST_CUT:
        words.append(
            f"**{_percent(cut)} of the answers of {last.name} were cut at its max_tokens**, and "
            "scored as they stand: raise it if they were still on their way."
        )
    return " ".join(words) or None
