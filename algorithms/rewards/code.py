"""A verifier that runs the answer's code against the row's tests, in a sandbox."""

from __future__ import annotations

import os
import re
import secrets
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import BaseModel, Field, model_validator

from algorithms.data.shapes import Row
from algorithms.rewards import sandbox
from algorithms.rewards.verifiers import VerifierConfig
from backends.errors import Problem, UserError

if TYPE_CHECKING:
    from typing import Self

FENCED = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
MEBIBYTE = 2**20
SHAPES = (
    "tests are Python source, a list of assert lines, or a list of "
    '{"input": …, "output": …} for a program that reads and writes'
)


class CodeConfig(VerifierConfig):
    """Where the tests stand, and what the answer's code may take."""

    PLACES: ClassVar[int] = os.cpu_count() or 1

    timeout_seconds: float = Field(
        300, gt=0, description="Longest time that one score may take; longer is an error."
    )
    tests_field: str = Field("tests", description=f"The row's field with the tests: {SHAPES}.")
    seconds: float = Field(
        10.0, gt=0, description="Time for all tests of an answer; one that needs more is wrong."
    )
    memory_mb: int = Field(1024, ge=64, description="Memory of each process, in MiB.")
    max_processes: int = Field(8, ge=1, description="Processes and threads at a time.")
    files_mb: int = Field(64, ge=1, description="Room for files, in MiB; none of them are kept.")
    output_kb: int = Field(1024, ge=1, description="Longest output, in KiB.")
    isolation: Literal["namespaces", "limits"] = Field(
        "namespaces",
        description="namespaces: the code sees neither your files nor other processes; limits: it "
        "runs as you, with limits on time, memory and output only.",
    )
    network: Literal["deny", "allow"] = Field(
        "deny", description="Whether the code may reach other machines."
    )

    @model_validator(mode="after")
    def _can_be(self) -> Self:
        if self.isolation == "limits" and self.network == "deny":
            raise ValueError(
                "limits alone do not cut off the network: set network: allow, or isolation: "
                "namespaces"
            )
        if self.timeout_seconds <= self.seconds:
            raise ValueError(
                f"timeout_seconds ({self.timeout_seconds:g}) must be more than seconds "
                f"({self.seconds:g}), as code that takes too long is wrong, not an error"
            )
        return self

    def limits(self) -> sandbox.Limits:
        """What one run of the answer's code may take."""
        return sandbox.Limits(
            seconds=self.seconds,
            memory_bytes=self.memory_mb * MEBIBYTE,
            processes=self.max_processes,
            files_bytes=self.files_mb * MEBIBYTE,
            output_bytes=self.output_kb * 1024,
            isolated=self.isolation == "namespaces",
            network=self.network == "allow",
        )


class CodeTests:
    """1 if the answer's Python code passes the tests of its row, run in a sandbox."""

    Config: ClassVar[type[BaseModel]] = CodeConfig

    def __init__(self, cfg: CodeConfig) -> None:
        self.cfg = cfg
        self.limits = cfg.limits()
        problem = sandbox.isolation_problem() if self.limits.isolated else None
        if problem is not None:
            raise UserError(
                Problem(
                    "verifier.params.isolation",
                    f"code cannot be cut off from network and files here: {problem}",
                    "run on Linux 5.12 or newer with user namespaces permitted (in Docker: "
                    "--security-opt seccomp=unconfined), or set isolation: limits and network: "
                    "allow to run the code as yourself",
                )
            )

    async def __call__(self, row: Row, completion: str) -> float:
        """1.0 if all tests pass, else 0.0. Raises SandboxError, which is not the answer's fault."""
        program, tests = code_of(completion), row[self.cfg.tests_field]
        if isinstance(tests, str):
            return float(await self._passes(program, tests))
        if all(isinstance(test, str) for test in tests):
            return float(await self._passes(program, "\n".join(tests)))
        return float(await self._answers(program, tests))

    def check_row(self, row: Row, place: str) -> Problem | None:
        """A row needs tests."""
        field = self.cfg.tests_field
        if field not in row:
            return Problem(place, f"has no {field}", f"{SHAPES}: add them, or set tests_field")
        tests = row[field]
        if isinstance(tests, str) and tests.strip():
            return None
        if isinstance(tests, list) and tests:
            if all(isinstance(test, str) for test in tests):
                return None
            if all(_is_case(test) for test in tests):
                return None
        return Problem(place, f"{field} are no tests", SHAPES)

    async def _passes(self, program: str, tests: str) -> bool:
        """Whether the tests, run behind the code and in its process, come to their end.

        The mark at the end, which the code cannot know beforehand, tells that from `sys.exit(0)`.
        """
        mark = secrets.token_hex(16)
        whole = f"{program}\n\n{tests}\n\nimport os\nos.write(1, b'\\n{mark}\\n')\n"
        outcome = await sandbox.run(whole, "", self.limits)
        return outcome.succeeded and mark in outcome.stdout.splitlines()

    async def _answers(self, program: str, cases: list[dict[str, Any]]) -> bool:
        """Whether the program writes the right output for each input; it never sees that."""
        end = time.monotonic() + self.limits.seconds
        for case in cases:
            left = end - time.monotonic()
            if left <= 0:
                return False
            outcome = await sandbox.run(program, case["input"], replace(self.limits, seconds=left))
            if not outcome.succeeded or _lines(outcome.stdout) != _lines(case["output"]):
                return False
        return True


def code_of(completion: str) -> str:
    """The last code block of an answer, or all of what follows its reasoning if it has none."""
    answer = completion.rpartition("</think>")[2]
    blocks = FENCED.findall(answer)
    return str(blocks[-1]) if blocks else answer


def _is_case(test: Any) -> bool:
    return (
        isinstance(test, dict)
        and isinstance(test.get("input"), str)
        and isinstance(test.get("output"), str)
    )


def _lines(output: str) -> list[str]:
    """Output as it is compared: white space at the ends of lines and at the end does not count."""
    return [line.rstrip() for line in output.rstrip().splitlines()]
