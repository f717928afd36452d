"""Show that the algorithms learn: run the examples, and hold their held-out scores to a goal.

    python -m examples.learn [NAME …] [--store runs] [--curves FOLDER]

Each lesson is an example, after the short fine-tune it starts from. A run that is finished in the
store is not run again. Exit code 1 if a lesson missed its goal.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

EXAMPLES: Final = Path(__file__).parent


@dataclass(frozen=True)
class Score:
    """Where a score stands: an evaluation of a run, its first or its last."""

    run: str
    evaluation: str = "heldout"
    first: bool = False

    def read(self, store: Path) -> float:
        """The score. Raises FileNotFoundError for a run that has not been."""
        return self.points(store)[0 if self.first else -1][1]

    def points(self, store: Path) -> list[tuple[int, float]]:
        """All scores of that name by step."""
        lines = (store / self.run / "evaluations.jsonl").read_text().splitlines()
        rows: list[dict[str, Any]] = [json.loads(line) for line in lines]
        return [(row["step"], row["score"]) for row in rows if row["name"] == self.evaluation]


@dataclass(frozen=True)
class Lesson:
    """An example, what it starts from, and what it has to reach.

    The goal is a score, or the share of the gap to a teacher's score that has to be closed. `stage`
    is the run that counts, of an example with stages.
    """

    name: str
    start: str | None
    start_at_most: float
    at_least: float
    teacher: Score | None = None
    stage: str | None = None
    evaluation: str = "heldout"

    def score(self, first: bool = False) -> Score:
        """Its score, the first or the last."""
        return Score(self.stage or run_id_of(self.name), self.evaluation, first)

    def goal(self, before: float, store: Path) -> float:
        """The score that has to be reached."""
        if self.teacher is None:
            return self.at_least
        return before + self.at_least * (self.teacher.read(store) - before)


LESSONS: Final = (
    Lesson("rl_arithmetic", "starts/halfway", start_at_most=0.60, at_least=0.85),
    Lesson("rl_guess", "starts/games", start_at_most=0.65, at_least=0.90),
    Lesson(
        "sdft_arithmetic",
        "starts/demonstrations",
        start_at_most=0.10,
        at_least=0.5,
        teacher=Score("demonstrations", "demonstrated"),
    ),
    Lesson(
        "distill_arithmetic",
        "sft_arithmetic",
        start_at_most=0.10,
        at_least=0.5,
        teacher=Score("sft-arithmetic"),
    ),
    Lesson("dpo_arithmetic", "starts/undecided", start_at_most=0.60, at_least=0.85),
    Lesson(
        "focal_sft",
        "sft_arithmetic",
        start_at_most=0.10,
        at_least=0.99,
        teacher=Score("sft-arithmetic"),
    ),
    Lesson("local_sft_arithmetic", None, start_at_most=0.10, at_least=0.99),
    Lesson(
        "sft_then_dpo",
        None,
        start_at_most=0.60,
        at_least=0.85,
        stage="sft-then-dpo-2-dpo",
        evaluation="pairs",
    ),
    Lesson("sft_then_dpo", None, start_at_most=0.90, at_least=0.90, stage="sft-then-dpo-2-dpo"),
)


def run_id_of(config: str) -> str:
    """The run of an example."""
    return Path(config).name.replace("_", "-")


def train(config: str, store: Path) -> float:
    """Run an example to its end; the seconds that it took, 0 if it was finished before."""
    run_id = run_id_of(config)
    if (store / run_id / "result.json").exists():
        result = json.loads((store / run_id / "result.json").read_text())
        if result["status"] == "completed":
            return 0.0
    started = time.monotonic()
    command = [sys.executable, "-m", "flows.cli", "run", str(EXAMPLES / f"{config}.yaml")]
    command += ["--run-id", run_id, "--set", f"store={store}"]
    for field in ("model.init_from", "algorithm.params.teacher.weights"):
        if (path := _path_in(config, field)) is not None:
            command += ["--set", f"{field}={store / Path(path).relative_to('runs')}"]
    if subprocess.run(command, check=False).returncode != 0:
        sys.exit(f"{config} did not run to its end")
    return time.monotonic() - started


def _path_in(config: str, field: str) -> str | None:
    """The path below runs/ that an example has in a field, or None."""
    import yaml

    value: Any = yaml.safe_load((EXAMPLES / f"{config}.yaml").read_text())
    for name in field.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value if isinstance(value, str) and value.startswith("runs/") else None


def learn(lesson: Lesson, store: Path) -> bool:
    """Run a lesson and say how it went; whether it reached its goal."""
    if lesson.start is not None:
        train(lesson.start, store)
    seconds = train(lesson.name, store)
    before, after = lesson.score(first=True).read(store), lesson.score().read(store)
    goal = lesson.goal(before, store)
    learnt = before <= lesson.start_at_most and after >= goal
    took = f"{seconds:.0f} s" if seconds else "run before"
    what = f"{lesson.name}, {lesson.evaluation}"
    print(
        f"{what:32} {before:.3f} -> {after:.3f}  (goal {goal:.3f}, "
        f"{'reached' if learnt else 'MISSED'}; {took})",
        flush=True,
    )
    return learnt


def draw(lesson: Lesson, store: Path, folder: Path) -> None:
    """The lesson's scores by step, as a picture."""
    from matplotlib.figure import Figure

    points = lesson.score().points(store)
    figure = Figure(figsize=(6.4, 2.6), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    axes.plot(*zip(*points, strict=True), color="#2563eb", lw=1.8, marker="o", ms=4)
    if lesson.teacher is not None:
        axes.axhline(lesson.teacher.read(store), color="#9ca3af", ls=":", label="teacher")
        axes.legend(frameon=False)
    axes.set(ylim=(-0.04, 1.04), xlabel="optimizer step", ylabel="held-out score")
    axes.set_title(lesson.name, loc="left", fontsize=10)
    axes.grid(color="#e5e7eb", lw=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / f"{lesson.name}.png", pil_kwargs={"optimize": True})


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m examples.learn", description=__doc__)
    names = list(dict.fromkeys(lesson.name for lesson in LESSONS))
    parser.add_argument("names", nargs="*", choices=[[], *names], metavar="NAME", default=[])
    parser.add_argument("--store", type=Path, default=Path("runs"), help="where the runs are kept")
    parser.add_argument("--curves", type=Path, default=None, help="draw the scores into a folder")
    given = parser.parse_args(arguments)
    missed = 0
    for lesson in LESSONS:
        if given.names and lesson.name not in given.names:
            continue
        missed += not learn(lesson, given.store)
        if given.curves is not None:
            draw(lesson, given.store, given.curves)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
