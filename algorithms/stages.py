"""Several trainings one after the other, each from the weights that the one before ended with.

    name: sft-then-dpo
    model: {name: examples/models/tiny-qwen3}
    stages:
      - {name: sft, data: …, algorithm: …, evaluations: …}
      - {name: dpo, data: …, algorithm: …}

Each stage is a run of its own: `<run id>-1-sft`, `<run id>-2-dpo`. The optimizer starts afresh.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, field_validator

from algorithms.check import check_experiment
from algorithms.document import Document, explain, read_document, with_overrides
from algorithms.experiment import (
    AlgorithmField,
    BackendField,
    CallbackField,
    DataField,
    EvaluationSpec,
    Experiment,
    ModelSection,
    Orchestration,
    WithImports,
    on_new_kinds,
    plain_name,
)
from algorithms.sections import Section
from backends.errors import Problem, UserError
from backends.storage.checkpoints import Retention

OF_A_STAGE = ("data", "algorithm", "evaluations", "checkpoints")
"""The sections of an experiment that each stage has for itself."""

_FIELD_OF_A_STAGE = re.compile(r"stages\[\d+\]\.(\w+)")


class Stage(Section):
    """One training: on which rows, by which recipe."""

    name: str = Field(description="Names the stage's run.", examples=["sft"])
    data: DataField = Field(description="The rows to train on.")
    algorithm: AlgorithmField = Field(description="The recipe and its parameters.")
    evaluations: list[EvaluationSpec] = Field(
        default_factory=list, description="Scores on held-out rows, each with its own cadence."
    )
    checkpoints: Retention = Field(
        default_factory=Retention, description="Which checkpoints stay when newer ones come."
    )

    @field_validator("name")
    @classmethod
    def _name(cls, name: str) -> str:
        return plain_name(name)


class StagedExperiment(WithImports):
    """Stages that are trained one after the other, each from the last one's weights."""

    name: str = Field(description="Names the runs' folders.", examples=["sft-then-dpo"])
    seed: int = Field(0, ge=0, description="Decides the order of the rows and the fresh adapter.")
    store: str = Field(
        "runs", min_length=1, description="Where runs are kept: a folder, or s3://bucket/prefix."
    )
    model: ModelSection = Field(title="Model", description="Which model is trained.")
    backend: BackendField | None = Field(
        None, description="The compute of all stages; left out, the algorithm's own."
    )
    stages: list[Stage] = Field(min_length=1, description="What is trained, in this order.")
    orchestration: Orchestration = Field(
        default_factory=Orchestration,
        description="How the runs are cut into task runs, and how often each recovers by itself.",
    )
    callbacks: list[CallbackField] = Field(
        default_factory=list, description="What else watches the runs."
    )
    imports: list[str] = Field(
        default_factory=list, description="Modules of your own that register kinds."
    )
    tags: list[str] = Field(default_factory=list, description="Words to find the runs by.")

    @field_validator("name")
    @classmethod
    def _name(cls, name: str) -> str:
        return plain_name(name)

    @field_validator("stages")
    @classmethod
    def _they_follow_each_other(cls, stages: list[Stage]) -> list[Stage]:
        names = [stage.name for stage in stages]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two stages are called {twice[0]!r}: give each its own name")
        ranks = {stage.name: stage.algorithm.params.lora_rank for stage in stages}
        if len(set(ranks.values())) > 1:
            listed = ", ".join(f"{name} {rank}" for name, rank in ranks.items())
            raise ValueError(
                f"the stages' lora_rank differ ({listed}), and a stage goes on with the adapter of "
                "the one before: give all the same"
            )
        return stages

    @classmethod
    def load(cls, path: str | Path, overrides: Iterable[str] = ()) -> StagedExperiment:
        """That of a YAML file, with `a.b=value` overrides put in. Raises UserError."""
        try:
            return cls.model_validate(with_overrides(read_document(path), overrides))
        except ValidationError as error:
            raise UserError(*_explained(error)) from None

    def run_id(self, run_id: str, index: int) -> str:
        """The run of a stage (from 0)."""
        return f"{run_id}-{index + 1}-{self.stages[index].name}"

    def experiment(self, index: int, start: str | None) -> Experiment:
        """A stage (from 0) as the experiment that it is, from the weights at `start`."""
        document = stage_documents(self.model_dump(mode="json"))[index]
        if self.backend is None:
            del document["backend"]
        if start is not None:
            document["model"] = {**document["model"], "init_from": start}
        return Experiment.model_validate(document)


on_new_kinds(Stage, StagedExperiment)


def stage_documents(document: Document) -> dict[int, Document]:
    """Each stage (from 0) as an experiment's document; what is no mapping is left out."""
    shared = StagedExperiment.model_fields.keys() & Experiment.model_fields.keys()
    common = {name: value for name, value in document.items() if name in shared}
    stages = document.get("stages")
    return {
        index: {
            **common,
            **{name: stage[name] for name in OF_A_STAGE if name in stage},
            "name": f"{document.get('name')}-{stage.get('name')}",
        }
        for index, stage in enumerate(stages if isinstance(stages, list) else [])
        if isinstance(stage, dict)
    }


def check_stages(
    source: str | Path | Document, overrides: Iterable[str] = ()
) -> tuple[StagedExperiment | None, list[Problem]]:
    """As `check_experiment`: every problem of every stage; None if the document does not parse."""
    document = source if isinstance(source, dict) else read_document(source)
    document = with_overrides(document, overrides)
    staged, problems = None, []
    try:
        staged = StagedExperiment.model_validate(document)
    except ValidationError as error:
        problems = _explained(error)
    told = {problem.where for problem in problems}
    found: dict[Problem, list[int]] = {}
    stages = stage_documents(document)
    if "name" in told:  # which is in all of theirs
        told |= {f"stages[{index}].name" for index in stages}
    for index, stage in stages.items():
        for problem in dict.fromkeys(check_experiment(stage)[1]):
            found.setdefault(_in_stage(problem, index), []).append(index)
    for problem, indices in found.items():
        if problem.where not in told:
            everywhere = len(indices) == len(stages) or problem.where.startswith("stages[")
            names = [] if everywhere else [document["stages"][i].get("name") for i in indices]
            problems += [_for_stage(problem, name) for name in names] or [problem]
    return staged, problems


def _in_stage(problem: Problem, index: int) -> Problem:
    section = problem.where.partition(".")[0].partition("[")[0]
    if section not in (*OF_A_STAGE, "name"):
        return problem
    return Problem(f"stages[{index}].{problem.where}", problem.what, problem.remedy)


def _for_stage(problem: Problem, name: Any) -> Problem:
    """A problem of what the stages share, or of a file's rows, that one of them only has."""
    return Problem(problem.where, f"for stage {name!r}: {problem.what}", problem.remedy)


def _explained(error: ValidationError) -> list[Problem]:
    return [_where_it_belongs(problem) for problem in explain(error, StagedExperiment)]


def _where_it_belongs(problem: Problem) -> Problem:
    """The same, or for a field of an experiment that stands on the wrong level: where it goes."""
    where = problem.where
    if where in OF_A_STAGE:
        remedy = f"write it into the stages: `{where}:` of the first is stages.0.{where} to --set"
        return Problem(where, "each stage has its own", remedy)
    inside = _FIELD_OF_A_STAGE.fullmatch(where)
    if inside and inside[1] not in Stage.model_fields and inside[1] in Experiment.model_fields:
        remedy = f"write `{inside[1]}:` beside `stages:`"
        if inside[1] == "model":
            remedy += "; every stage but the first starts from the weights of the one before"
        return Problem(where, "is the same for all stages", remedy)
    return problem


def has_stages(source: str | Path, overrides: Iterable[str] = ()) -> bool:
    """Whether a file holds stages. Raises UserError for one that cannot be read."""
    document = with_overrides(read_document(source), overrides)
    mistyped = difflib.get_close_matches("stages", map(str, document), n=1, cutoff=0.85)
    return "stages" in document or ("algorithm" not in document and bool(mistyped))


def last_weights(result: Mapping[str, Any]) -> str:
    """Where the weights are that a finished run ended with. Raises UserError without any."""
    artifacts = result["artifacts"]
    for name in ("adapter", "state"):
        if name in artifacts:
            return str(artifacts[name])
    raise UserError(Problem("stages", f"run {result['run_id']!r} left no weights to go on from"))
