"""A verifier that takes two ways of writing the same mathematics for the same answer."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import weakref
from pathlib import Path
from typing import ClassVar

from pydantic import BaseModel, Field

from algorithms.data.shapes import Row
from algorithms.rewards.verifiers import AnswerConfig
from backends.errors import Problem, UserError

WORKER = Path(__file__).with_name("math_worker.py")


class MathConfig(AnswerConfig):
    """How long a comparison may take. Numbers are compared to six decimals."""

    PLACES: ClassVar[int] = os.cpu_count() or 1

    timeout_seconds: float = Field(
        120, gt=0, description="Longest time that one score may take; longer is an error."
    )
    cpu_seconds: float = Field(
        5.0,
        gt=0,
        le=30,
        description="Longest computation that an answer is worth; one that needs more, as "
        "9^9^9^9 does, is wrong.",
    )


class MathEquality:
    """1 if the answer is mathematically the row's: 1/2, 0.5 and \\boxed{\\frac{1}{2}} are one."""

    Config: ClassVar[type[BaseModel]] = MathConfig

    def __init__(self, cfg: MathConfig) -> None:
        self.cfg = cfg
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()

    def __call__(self, row: Row, completion: str) -> float:
        """1.0 if equal, else 0.0. Raises UserError if the right answer is no mathematics."""
        expected, answer = self.cfg.expected(row), self.cfg.answer(completion)
        try:
            worker = self._idle.get_nowait()
        except queue.Empty:
            worker = _Worker()
        readable = worker.ask(expected=expected, answer=answer, cpu_seconds=self.cfg.cpu_seconds)
        equal = worker.answer() if readable else None
        if equal is not None or readable is False:  # it is alive
            self._idle.put(worker)
        if not readable:
            what = f"the right answer {expected[:60]!r} cannot be read as mathematics"
            remedy = "write it as a number or LaTeX, or choose another verifier"
            raise UserError(Problem("row", what, remedy))
        return float(equal is True)

    def check_row(self, row: Row, place: str) -> Problem | None:
        """A row needs a right answer."""
        return self.cfg.row_problem(row, place)


class _Worker:
    """A process with sympy loaded, for one question at a time; it ends with its owner."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # a Ctrl-C is for the run, which ends it in its turn
        )
        weakref.finalize(self, _end, self._process)
        if self.answer() is None:
            raise RuntimeError(f"{WORKER.name} does not start: is math-verify installed?")

    def ask(self, **question: str | float) -> bool | None:
        """Whether the right answer can be read; `answer` then says whether they are equal."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self.answer()

    def answer(self) -> bool | None:
        """The next thing it says; None if it ended over the question."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return bool(json.loads(line)) if line else None


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()
