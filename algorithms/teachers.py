"""Whom a student learns from: another model, fixed weights, or the student as it was.

A teacher that follows the student is found again when the run is resumed, to the last bit: its
weights are in the run's folder before the first batch that it teaches is built.

    <run>/teachers/step-<steps done>-<code>/    the adapter's files, if the backend gives them out
        teacher.json                            comes last: {"uri": …, "files": […]}
"""

from __future__ import annotations

import asyncio
import json
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from pydantic import Field, model_validator

from algorithms.model_facts import model_problems, weights_problems
from algorithms.sections import Section
from backends.base import Backend, SamplingClient, Tokenizer
from backends.errors import Problem, UserError
from backends.storage.objects import NotFound, ObjectStore

FOLDER = "teachers"
MARKS_IN_DOUBT = 3
"""So many of the last checkpoints may not be published yet (see `algorithms.beside`)."""

_STEP = re.compile(r"step-(\d+)-.*")


class TeacherSection(Section):
    """Whom to learn from: a model, or a checkpoint of it."""

    model: str | None = Field(
        None, min_length=1, description="A hub name or a folder; empty: the model that is trained."
    )
    weights: str | None = Field(
        None, min_length=1, description="A checkpoint of that model: a folder, or tinker://…"
    )

    @model_validator(mode="after")
    def _somebody(self) -> TeacherSection:
        if self.model is None and self.weights is None:
            raise ValueError("names nobody: give a model, weights, or both")
        return self


async def open_teacher(backend: Backend, section: TeacherSection, where: str) -> SamplingClient:
    """The teacher's client. Raises UserError with the field below `where` that will not do."""
    try:
        return await backend.open_sampling_client(section.model, section.weights)
    except UserError as error:
        raise UserError(
            *(Problem(f"{where}.{p.where}", p.what, p.remedy) for p in error.problems)
        ) from error


async def open_start(backend: Backend, init_from: str | None) -> SamplingClient:
    """The weights that the run starts from: the base model, or those of `model.init_from`."""
    try:
        return await backend.open_sampling_client(weights=init_from)
    except UserError as error:
        raise UserError(
            *(Problem("model.init_from", p.what, p.remedy) for p in error.problems)
        ) from error


def teacher_problems(
    section: TeacherSection,
    student: str,
    where: str,
    vocabulary: Callable[[str], Mapping[str, int] | None],
) -> list[Problem]:
    """Why nobody can teach a student (the name of its model) as the section says; may block.

    `vocabulary` gives a model's tokens, or None where that is not known.
    """
    problems: list[Problem] = []
    if section.weights is not None:
        problems += weights_problems(section.weights, f"{where}.weights")
    if section.model in (None, student):
        return problems
    assert section.model is not None
    where = f"{where}.model"
    found = model_problems(section.model, chat=False, where=where)
    if not found:
        theirs, ours = vocabulary(section.model), vocabulary(student)
        if theirs is not None and ours is not None and theirs != ours:
            found = [_other_vocabulary(section.model, theirs, ours, where)]
    return problems + found


def check_teacher(section: TeacherSection, student: str, tokenizer: Tokenizer, where: str) -> None:
    """The same with the tokenizers themselves, the teacher's loaded. Blocks; raises UserError."""
    from backends.tokenizer import load_tokenizer

    def loaded(model: str) -> Mapping[str, int]:
        whose = tokenizer if model == student else load_tokenizer(model)
        numbers: Mapping[str, int] = whose.get_vocab()
        return numbers

    try:
        problems = teacher_problems(section, student, where, loaded)
    except UserError as error:
        problems = [Problem(f"{where}.model", p.what, p.remedy) for p in error.problems]
    if problems:
        raise UserError(*problems)


def _other_vocabulary(
    teacher: str, theirs: Mapping[str, int], ours: Mapping[str, int], where: str
) -> Problem:
    alike = sum(theirs.get(token) == index for token, index in ours.items())
    return Problem(
        where,
        f"{teacher} has another vocabulary: {alike} of the {len(ours)} tokens of the trained model "
        f"are the same in its {len(theirs)}",
        "a teacher scores the student's tokens: take a model of the same family, or sft on its "
        "answers",
    )


class SyncedTeacher:
    """The student as it was after every n steps; before the first n, as the run started."""

    def __init__(
        self,
        backend: Backend,
        run: ObjectStore,
        start: SamplingClient,
        every: int,
        save_steps: Sequence[int],
        code: str,
    ) -> None:
        self._backend = backend
        self._run = run
        self._every = every
        self._save_steps = save_steps
        self._code = code
        self._saved: dict[int, str] = {}
        self._held: tuple[int, SamplingClient] = (0, start)
        self._start = start

    async def at(self, step: int) -> SamplingClient:
        """The teacher of a step's batch: the student after the last multiple of n steps.

        To be called once the weights of the step have been sampled from, so that no later step can
        come before the teacher is saved. Raises UserError if a teacher of earlier steps is gone.
        """
        taught = step // self._every * self._every
        if taught == 0:
            return self._start
        if taught != self._held[0]:
            if taught == step:
                await self._keep(step)
            self._held = taught, await self._open(taught)
        return self._held[1]

    async def _keep(self, step: int) -> None:
        if step not in self._saved:
            self._saved[step] = await self._backend.save_for_sampler(f"teacher-{step:06d}")
        with tempfile.TemporaryDirectory(prefix="flowtune-") as temporary:
            folder = Path(temporary)
            await self._backend.export_state(self._saved[step], folder)
            await asyncio.to_thread(self._write, step, folder)

    def _write(self, step: int, folder: Path) -> None:
        prefix = self._prefix(step)
        self._run.delete(prefix)  # of a lineage that the run did not go on in
        files = sorted(file.name for file in folder.iterdir())
        self._run.upload(files, folder, prefix)
        document = {"uri": self._saved[step], "files": files}
        self._run.write(f"{prefix}/teacher.json", json.dumps(document).encode())
        self._remove_older(step)

    def _remove_older(self, step: int) -> None:
        """Let go of the teachers that no checkpoint can ask for any more. Blocks."""
        passed = [mark for mark in self._save_steps if mark <= step]
        surely = passed[-MARKS_IN_DOUBT - 1] if len(passed) > MARKS_IN_DOUBT else 0
        for old in self._run.folders(FOLDER):
            match = _STEP.fullmatch(old)
            if match is None or int(match[1]) >= surely // self._every * self._every:
                continue
            with suppress(NotFound):  # it was never finished
                kept = json.loads(self._run.read(f"{FOLDER}/{old}/teacher.json"))
                if not kept["files"]:
                    self._backend.discard_state(kept["uri"])
            self._run.delete(f"{FOLDER}/{old}")

    async def _open(self, step: int) -> SamplingClient:
        prefix = self._prefix(step)
        try:
            said = await asyncio.to_thread(self._run.read, f"{prefix}/teacher.json")
        except NotFound as error:
            raise UserError(
                Problem(
                    "algorithm.params.teacher_sync_every",
                    f"the teacher after {step} steps is not in {self._run.uri(prefix)}",
                    "it was removed, or made by other code: take another --run-id",
                )
            ) from error
        document = json.loads(said)
        if not document["files"]:
            return await self._backend.open_sampling_client(weights=document["uri"])
        if (local := self._run.local_path(prefix)) is not None:
            return await self._backend.open_sampling_client(weights=str(local))
        with tempfile.TemporaryDirectory(prefix="flowtune-") as temporary:
            folder = Path(temporary)
            await asyncio.to_thread(self._run.download, document["files"], prefix, folder)
            return await self._backend.open_sampling_client(weights=temporary)

    def _prefix(self, step: int) -> str:
        return f"{FOLDER}/step-{step:06d}-{self._code}"
