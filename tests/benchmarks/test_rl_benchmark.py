"""The benchmark of reinforcement learning runs, on both sides alike. No speed is judged.

That the work is alike it checks by itself: it ends with an error where the samples of one side are
longer than those of the other.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import models
from benchmarks.raw import RawModel, Tokens
from benchmarks.rl import Figure, main

ROOT = Path(__file__).parents[2]


@pytest.fixture
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_server", "in_the_repository")
def test_a_row_is_measured(tmp_path: Path) -> None:
    file, threads = tmp_path / "figures.json", torch.get_num_threads()
    asked = ["--rows", "staleness-1", "--toy", "--repeats", "1", "--json", str(file)]
    assert main(asked) == 0
    torch.set_num_threads(threads)
    rows = json.loads(file.read_text())["rows"]
    assert list(rows) == ["staleness-1"]
    share, cpu_share, flow, raw, ratio = (figure["values"] for figure in rows["staleness-1"])
    assert 0 < cpu_share[0] <= share[0] < 1.1
    assert ratio == [flow[0] / raw[0]]


@pytest.mark.usefixtures("in_the_repository")
def test_answers_end_as_often_as_asked_and_the_raw_loop_counts_up_to_there(tmp_path: Path) -> None:
    torch.manual_seed(0)
    raw = RawModel(models.make_talker(tmp_path, end=0.25), "cpu")
    raw.fresh()
    seen: list[Tokens] = []

    def reward(tokens: Tokens) -> float:
        seen.append(tokens)
        return float(tokens.size % 2)

    prompts = [np.arange(3, 8)] * 8
    sampled = raw.reinforce(prompts, 32, 24, models.END_OF_TURN, reward)
    assert len(seen) == 8 * 32
    assert sampled == sum(tokens.size for tokens in seen)
    for tokens in seen:
        assert (tokens[:-1] != models.END_OF_TURN).all()
        assert tokens[-1] == models.END_OF_TURN or tokens.size == 24
    # The mean is 1 / 0.25, less what is cut off; 256 samples leave a deviation of 0.22.
    assert sampled / len(seen) == pytest.approx(4.0, abs=0.7)


def test_a_figure_is_judged_by_its_median() -> None:
    assert Figure("x", (0.8, 0.86, 0.9), 0.85).reached
    assert not Figure("x", (0.8, 0.84, 0.9), 0.85).reached
    assert Figure("x", (0.1,)).reached
