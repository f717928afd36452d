"""The benchmark of local_sft runs, and prints its ratios."""

from __future__ import annotations

import sys

import pytest

from benchmarks.local import main


@pytest.mark.slow
def test_it_compares_both_sides(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["local", "--steps", "2", "--batch", "2", "--repeats", "1"]
    monkeypatch.setattr(sys, "argv", command)
    main()
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("median: time ")
    assert last.endswith(" x of TRL alone; at most 1.1 wanted")
