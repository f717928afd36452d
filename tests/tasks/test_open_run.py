"""The handle that the flow has of a run."""

from __future__ import annotations

import pytest

from tasks.open_run import RunHandle


@pytest.mark.parametrize(
    ("first_step", "segments"),
    [(0, [(0, 4), (4, 8), (8, 10)]), (4, [(4, 8), (8, 10)]), (9, [(9, 10)]), (10, [])],
)
def test_segments_end_at_checkpoints(first_step: int, segments: list[tuple[int, int]]) -> None:
    """A run that was killed between its last checkpoint and its result has none left."""
    assert RunHandle("a", "runs/a", first_step, 10, (4, 8, 10), "segment").segments() == segments
