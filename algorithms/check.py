"""Everything that can be found wrong with an experiment before any compute starts, all at once.

Each section is looked at by itself as well, so that a mistake in one does not hide those in others.
Imports no compute library; a model is judged by its files, a hub name by its shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from algorithms.data.dataset import Dataset, dataset_problems, shorten
from algorithms.data.shapes import Row
from algorithms.document import Document, explain, read_document, with_overrides
from algorithms.evaluators import evaluation_problems
from algorithms.experiment import (
    AlgorithmField,
    AlgorithmSection,
    BackendField,
    BackendSection,
    DataField,
    EvaluationSpec,
    Experiment,
    ModelSection,
    model_spec,
)
from algorithms.model_facts import model_problems, vocabulary, weights_problems
from algorithms.registry import ALGORITHMS
from algorithms.teachers import TeacherSection, teacher_problems
from backends.base import ModelSpec
from backends.errors import FlowtuneError, Problem, UserError
from backends.mock import MockKind

T = TypeVar("T")


def check_experiment(
    source: str | Path | Document, overrides: Iterable[str] = ()
) -> tuple[Experiment | None, list[Problem]]:
    """The experiment of a file or document, and every problem; it is None if it does not parse."""
    try:
        document = source if isinstance(source, dict) else read_document(source)
        document = with_overrides(document, overrides)
    except UserError as error:
        return None, list(error.problems)
    experiment, problems = _parse(document)
    sections = _Sections(document, experiment)
    datasets = _check_data(sections, problems)
    if sections.backend is None or sections.backend.kind != MockKind.kind:
        _check_model(sections, datasets, problems)
    for index, section in enumerate(experiment.callbacks if experiment is not None else []):
        _collect(problems, partial(section.build, f"callbacks[{index}]"))
    _check_store(sections, problems)
    _check_backend(sections, problems)
    return experiment, list(dict.fromkeys(problems))


def _parse(document: Document) -> tuple[Experiment | None, list[Problem]]:
    try:
        return Experiment.model_validate(document), []
    except ValidationError as error:
        return None, explain(error, Experiment)


class _Sections:
    """The sections of a document that are valid by themselves; None for the others."""

    def __init__(self, document: Document, experiment: Experiment | None) -> None:
        self.document = document
        if experiment is not None:
            self.model: ModelSection | None = experiment.model
            self.data: Any = experiment.data
            self.algorithm: AlgorithmSection | None = experiment.algorithm
            self.backend: BackendSection | None = experiment.backend
            self.evaluations: list[EvaluationSpec | None] = list(experiment.evaluations)
            self.store: Any = experiment.store
            return
        self.model = _valid(ModelSection, document.get("model"))
        self.data = _valid(DataField, document.get("data"))
        self.algorithm = _valid(AlgorithmField, document.get("algorithm"))
        self.backend = _valid(BackendField, document.get("backend", self._default_backend()))
        listed = document.get("evaluations")
        items = listed if isinstance(listed, list) else []
        self.evaluations = [_evaluation(item) for item in items]
        self.store = document.get("store", Experiment.model_fields["store"].default)

    def algorithm_kind(self) -> str | None:
        """The kind of algorithm, if it is a known one, whatever its parameters."""
        section = self.document.get("algorithm")
        kind = section.get("kind") if isinstance(section, dict) else None
        if self.algorithm is not None:
            kind = self.algorithm.kind
        return kind if isinstance(kind, str) and kind in ALGORITHMS.rows() else None

    def _default_backend(self) -> dict[str, str] | None:
        kind = self.algorithm_kind()
        return {"kind": ALGORITHMS[kind].default_backend} if kind else None


def _evaluation(item: Any) -> EvaluationSpec | None:
    """The evaluation, or if only its data is valid, a plain evaluation on that."""
    given = item if isinstance(item, dict) else {}
    plain = {name: given[name] for name in ("kind", "data") if name in given}
    spec: EvaluationSpec | None = _valid(EvaluationSpec, item)
    return spec or _valid(EvaluationSpec, {"name": "evaluation", **plain})


def _valid(annotation: Any, value: Any) -> Any:
    try:
        return TypeAdapter(annotation).validate_python(value)
    except ValidationError:
        return None


def _collect(problems: list[Problem], work: Callable[[], T]) -> T | None:
    try:
        return work()
    except UserError as error:
        problems.extend(error.problems)
        return None


# --- data ---------------------------------------------------------------------------------------


def _check_data(sections: _Sections, problems: list[Problem]) -> list[Dataset]:
    """The data sets that could be read; what is wrong with their rows goes to the problems."""
    datasets: list[Dataset] = []
    if sections.data is not None:
        dataset = _collect(problems, lambda: sections.data.load())
        kind = sections.algorithm_kind()
        if dataset is not None:
            datasets.append(dataset)
            if kind is not None:
                check = _row_check(sections, kind, problems)
                problems.extend(dataset.bad_rows.refused(dataset_problems(dataset, check)))
    for index, spec in enumerate(sections.evaluations):
        if spec is not None:
            dataset = _read_held_out(spec, f"evaluations[{index}]", problems)
            if dataset is not None:
                datasets.append(dataset)
    return datasets


def _row_check(
    sections: _Sections, kind: str, problems: list[Problem]
) -> Callable[[Row, str], Problem | None]:
    """What looks at the rows: the algorithm with its parameters, or without, if these are bad."""
    if sections.algorithm is not None:
        algorithm = _collect(problems, sections.algorithm.build)
        if algorithm is not None:
            return algorithm.row_problem
    return ALGORITHMS[kind].check_row


def _read_held_out(spec: EvaluationSpec, where: str, problems: list[Problem]) -> Dataset | None:
    dataset = _collect(problems, lambda: spec.data.load(f"{where}.data").head(spec.limit))
    if dataset is not None and not dataset.bad_rows.refused(dataset.unreadable):
        dataset = dataset.without_unreadable()
    verifier = None
    if spec.verifier is not None:
        verifier = _collect(problems, partial(spec.verifier.build, f"{where}.verifier"))
    if dataset is not None:
        problems.extend(shorten(evaluation_problems(spec, dataset, verifier)))
    return dataset


# --- model --------------------------------------------------------------------------------------


def _check_model(sections: _Sections, datasets: list[Dataset], problems: list[Problem]) -> None:
    if sections.model is None:
        return
    model = sections.model
    problems.extend(model_problems(model.name, any(map(_holds_chat, datasets))))
    if model.init_from is not None:
        found = _not_loaded(sections, model.init_from, "model.init_from")
        problems.extend(found or weights_problems(model.init_from, "model.init_from"))
    for name, value in sections.algorithm.params if sections.algorithm is not None else ():
        if isinstance(value, TeacherSection):
            where = f"algorithm.params.{name}"
            check = partial(teacher_problems, value, model.name, where, vocabulary)
            problems.extend(_collect(problems, check) or [])
            if value.weights is not None:
                problems.extend(_not_loaded(sections, value.weights, f"{where}.weights"))


def _not_loaded(sections: _Sections, source: str, where: str) -> list[Problem]:
    """Why the backend cannot load a checkpoint, if that is known."""
    if sections.backend is None:
        return []
    return sections.backend.params.weights_problems(source, where)


def _holds_chat(dataset: Dataset) -> bool:
    return any(
        "messages" in row or any(isinstance(row.get(name), list) for name in ("prompt", "chosen"))
        for row in dataset.rows
    )


# --- store and backend --------------------------------------------------------------------------


def _check_store(sections: _Sections, problems: list[Problem]) -> None:
    if not isinstance(sections.store, str) or not sections.store:
        return
    from backends.storage.objects import open_store

    try:
        open_store(sections.store).check_writable()
    except UserError as error:
        problems.extend(
            Problem("store", f"{sections.store}: {p.what}", p.remedy) for p in error.problems
        )
    except FlowtuneError as error:
        problems.append(Problem("store", f"{sections.store}: {error}"))


def _check_backend(sections: _Sections, problems: list[Problem]) -> None:
    if sections.backend is None or sections.model is None:
        return
    spec = ModelSpec(name=sections.model.name)
    if sections.algorithm is not None:
        spec = model_spec(sections.model, sections.algorithm, 0)
    problems.extend(sections.backend.row().check(sections.backend.params, spec))
