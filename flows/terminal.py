"""What a run looks like in a terminal: phases, a progress bar, the closing table, mistakes.

Without a terminal (a log file, CI) the bar becomes a plain line every few seconds.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.status import Status
from rich.table import Table
from rich.text import Text

from algorithms.callbacks import Callback, RunPlan
from algorithms.rewards.metrics import scores

if TYPE_CHECKING:
    from algorithms.base import RunResult, Transcript
    from algorithms.evaluators import EvaluationResult
    from backends.errors import Problem
    from backends.storage.run_store import RunSummary

PLAIN_LINE_SECONDS = 5.0
LOG_FILES_KEPT = 20
WARM_UP_STEPS = 2
"""Their times say nothing of the others."""
LOSS_COLUMNS = {"reward/mean": "reward", "train_mean_nll": "loss", "loss": "loss"}
"""Which column of a row stands for the training, and what it is called here; the first there is."""

SHOWN_ELSEWHERE = ("prefect.flow_runs", "prefect.task_runs", "prefect.engine")
"""Loggers that tell of a failed run with its traceback: for the log file; people get the cause."""


class Terminal(Callback):
    """Shows one run: `phase` until it is open, then the bar; a context manager that cleans up."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.plan: RunPlan | None = None
        self.steps_done = 0
        self.saved_step: int | None = None
        self._status: Status | None = None
        self._bar: Progress | None = None
        self._speed = Average(least=0.1)
        self._seconds = Average(least=0.0)
        self._spoke = 0.0

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Take spinner and bar away; what was printed stays."""
        if self._status is not None:
            self._status.stop()
            self._status = None
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def phase(self, words: str) -> None:
        """Say what is being waited for; the next phase or the first step takes it away."""
        if not self.console.is_terminal:
            self.console.print(f"{words} …")
        elif self._status is None:
            self._status = self.console.status(f"{words} …")
            self._status.start()
        else:
            self._status.update(f"{words} …")

    def on_start(self, plan: RunPlan) -> None:
        """Put the bar in the place of the phases."""
        self.close()
        self.plan, self.steps_done = plan, plan.first_step
        self.saved_step = plan.first_step or None
        again = f", from step {plan.first_step}" if plan.first_step else ""
        self.console.print(f"run [bold]{plan.run_id}[/]: {plan.total_steps} steps{again}")
        if plan.flow_run_url:
            self.console.print(Text(plan.flow_run_url, style="blue"), soft_wrap=True)
        if self.console.is_terminal:
            self._start_bar(plan)

    def on_step(self, row: Mapping[str, float]) -> None:
        """Move the bar, or print a line if the last one is some seconds old."""
        self.steps_done = int(row["step"])
        words = self._measures(row) + self._time_left()
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self.steps_done, measures=words)
        elif self._time_for_a_line():
            self.console.print(f"{self._position()}  {words}")

    def on_evaluation(self, result: EvaluationResult) -> None:
        """One line for each evaluation."""
        self.console.print(f"  step {result.step:>5}  {result.name} [bold]{result.score:.3f}[/]")

    def on_save(self, step: int, uri: str) -> None:
        """Remember where the run could go on from."""
        self.saved_step = step

    def on_notice(self, words: str) -> None:
        """One line, above the bar."""
        self.console.print(Text(f"  {words}", style="yellow"), soft_wrap=True)

    def on_end(self, result: RunResult) -> None:
        """Take the bar away."""
        self.close()

    def _start_bar(self, plan: RunPlan) -> None:
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[measures]}"),
            console=self.console,
            refresh_per_second=5,
        )
        self._bar.start()
        self._bar.add_task(
            "training", total=plan.total_steps, completed=plan.first_step, measures=""
        )

    def _measures(self, row: Mapping[str, float]) -> str:
        words = []
        column = next((name for name in LOSS_COLUMNS if row.get(name) is not None), None)
        if column is not None:
            words.append(f"{LOSS_COLUMNS[column]} {row[column]:#.3g}")
        if (speed := row.get("time/tokens_per_second")) is not None:
            words.append(f"{self._speed.add(speed):,.0f} tokens/s")
        if (seconds := row.get("time/step")) is not None:
            self._seconds.add(seconds)
        return "  ".join(words)

    def _time_for_a_line(self) -> bool:
        last = self.plan is not None and self.steps_done == self.plan.total_steps
        now = time.monotonic()
        if not last and now - self._spoke < PLAIN_LINE_SECONDS:
            return False
        self._spoke = now
        return True

    def _position(self) -> str:
        total = self.plan.total_steps if self.plan else 0
        return f"  step {self.steps_done:>{len(str(total))}}/{total}"

    def _time_left(self) -> str:
        if self.plan is None or self._seconds.value is None:
            return ""
        left = (self.plan.total_steps - self.steps_done) * self._seconds.value
        return f"  {_clock(left)} left" if left >= 1 else ""


class Average:
    """The mean of some values, each new one counting for at least a part; the first hardly count.

    With `least` 0 all count alike; with 0.1 the last ten or so are what counts.
    """

    def __init__(self, least: float) -> None:
        self.value: float | None = None
        self._least = least
        self._count = 0

    def add(self, value: float) -> float:
        """Take a value in; returns the mean."""
        self._count += 1
        later = max(self._count - WARM_UP_STEPS, 1)
        weight = max(1 / later, self._least)
        self.value = value if self.value is None else self.value + weight * (value - self.value)
        return self.value


# --- words for the end


def print_result(console: Console, result: Mapping[str, Any], lines: Mapping[str, str]) -> None:
    """The closing table: scores before and after, then where things are."""
    rows = {name: _change(*pair) for name, pair in scores(result.get("metrics", {})).items()}
    rows |= {name: Text(text) for name, text in lines.items() if text}
    width = max(map(len, rows), default=0)
    console.print()
    for name, text in rows.items():
        console.print(Text.assemble((f"{name:<{width}}  ", "bold"), text), soft_wrap=True)


def _change(before: float | None, after: float) -> Text:
    end = Text(f"{after:.3f}", style="bold green")
    return end if before is None else Text(f"{before:.3f} → ") + end


def print_problems(console: Console, problems: Sequence[Problem], nothing_done: bool) -> None:
    """Every mistake: where, what, and how to mend it."""
    for problem in problems:
        line = Text.assemble((problem.where, "bold red"), f": {problem.what}")
        console.print(line, soft_wrap=True)
        if problem.remedy:
            console.print(Text(f"    -> {problem.remedy}", style="dim"), soft_wrap=True)
    if nothing_done:
        count = f"{len(problems)} problem{'s' if len(problems) != 1 else ''}"
        console.print(Text(f"{count}; nothing was started", style="dim"))


def print_transcript(console: Console, transcript: Transcript) -> None:
    """Show a rollout: who said what, and what it earned."""
    for message in transcript.messages:
        console.print(f"{message['role']:>9}  ", style="bold", end="")
        console.print(str(message.get("content") or ""), markup=False, highlight=False)
    console.print(f"{'reward':>9}  {transcript.reward:.3g} ({transcript.end})", highlight=False)


def print_example(console: Console, spans: Iterable[tuple[str, bool]], counted: int) -> None:
    """A row as the model sees it; what the loss counts is coloured."""
    console.print(f"\none row as it is trained on ([bold green]{counted} tokens with loss[/]):\n")
    opening, closing = ("", "") if console.color_system else ("⟦", "⟧")
    text = Text()
    for piece, supervised in spans:
        if supervised:
            text.append(f"{opening}{piece}{closing}", style="bold black on green")
        else:
            text.append(piece, style="dim")
    console.print(text, soft_wrap=True)
    console.print()


def runs_table(runs: Iterable[RunSummary]) -> Table:
    """One line a run."""
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="bold")
    for head in ("run", "name", "status"):
        table.add_column(head, overflow="fold")
    table.add_column("steps", justify="right")
    table.add_column("score", justify="right")
    table.add_column("created")
    colours = {"completed": "green", "failed": "red", "unfinished": "yellow"}
    for run in runs:
        total = "" if run.steps_total is None else f"/{run.steps_total}"
        table.add_row(
            run.run_id,
            run.name,
            Text(run.status, style=colours.get(run.status, "")),
            f"{run.steps_done}{total}",
            "" if run.score is None else f"{run.score:.3f}",
            f"{datetime.fromisoformat(run.created).astimezone():%Y-%m-%d %H:%M}",
        )
    return table


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


# --- logging


class _ErrorsAbove(logging.Handler):
    """Prints errors above the bar, one line each; the log file has their tracebacks."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.ERROR)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        """Print the message, and the exception's last words if it has any."""
        if record.name.startswith(SHOWN_ELSEWHERE):
            return
        cause = f" ({record.exc_info[1]})" if record.exc_info else ""
        self._console.print(Text(f"{record.name}: {record.getMessage()}{cause}", style="red"))


def quiet_logging(console: Console, path: Path | None) -> None:
    """Send logs and warnings to a file, if there is one, and only errors to the terminal.

    Belongs before the import of prefect, which leaves a root logger alone that has handlers.
    """
    handlers: list[logging.Handler] = [_ErrorsAbove(console)]
    if path is not None:
        handlers.append(logging.FileHandler(path, encoding="utf-8"))
    for handler in handlers:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=handlers, force=True)
    for chatty in ("httpx", "httpcore", "urllib3", "botocore", "matplotlib"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    logging.captureWarnings(True)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def new_log_file(folder: Path, name: str) -> Path:
    """A name for the log of a command; the oldest logs make room."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in sorted(folder.glob("*.log"))[: -LOG_FILES_KEPT + 1]:
        old.unlink(missing_ok=True)
    return folder / f"{datetime.now():%Y%m%d-%H%M%S}-{name}-{os.getpid()}.log"
