"""The one document that says what to train: read, checked, and turned into a form.

`Experiment` is the parameter of the `train` flow and what a YAML file holds. Its sections
`algorithm`, `backend`, `data`, `verifier` and `callbacks` are unions over the registries, told
apart by `kind`; a kind's `params` are its own Config class, so that forms, checks and messages come
from one place. Importing this module imports no compute library.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError, field_validator

from algorithms.base import BaseAlgorithm, BaseAlgorithmConfig
from algorithms.callbacks import Callback
from algorithms.data.dataset import DATA_SOURCES, DataSource
from algorithms.document import Document, explain, read_document, with_overrides
from algorithms.registry import ALGORITHMS, CALLBACKS
from algorithms.rewards.verifiers import VERIFIERS, Verifier, VerifierConfig
from algorithms.sections import OneOf, Section, with_params
from backends.base import BackendKind, BackendParams, ModelSpec
from backends.errors import UserError
from backends.registry import BACKENDS, Row
from backends.storage.checkpoints import Retention

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


# --- sections that are one of a registry's kinds ------------------------------------------------


class AlgorithmSection(Section):
    """Which recipe, and its parameters."""

    kind: str
    params: BaseAlgorithmConfig

    def build(self) -> BaseAlgorithm:
        """The algorithm, ready for `setup`."""
        return ALGORITHMS[self.kind](self.params)


class BackendSection(Section):
    """Which compute, and its parameters."""

    kind: str
    params: BackendParams

    def row(self) -> type[BackendKind]:
        """What checks and opens this kind of backend."""
        return BACKENDS[self.kind]


class VerifierSection(Section):
    """How answers are scored."""

    kind: str
    params: VerifierConfig

    def build(self) -> Verifier:
        """The verifier, ready to be called."""
        return VERIFIERS[self.kind](self.params)


class CallbackSection(Section):
    """Something that watches the run."""

    kind: str
    params: BaseModel

    def build(self) -> Callback:
        """The callback."""
        cls: Any = CALLBACKS[self.kind]
        callback: Callback = cls(self.params)
        return callback


def _config(item: Any) -> type[BaseModel]:
    config: type[BaseModel] = item.Config
    return config


def _backend_params(item: type[BackendKind]) -> type[BaseModel]:
    return item.Params


def _source(row: Row[type[DataSource]]) -> type[BaseModel]:
    return row.item


AlgorithmField = Annotated[
    AlgorithmSection, OneOf(ALGORITHMS, with_params(AlgorithmSection, _config))
]
BackendField = Annotated[
    BackendSection, OneOf(BACKENDS, with_params(BackendSection, _backend_params))
]
VerifierField = Annotated[VerifierSection, OneOf(VERIFIERS, with_params(VerifierSection, _config))]
CallbackField = Annotated[CallbackSection, OneOf(CALLBACKS, with_params(CallbackSection, _config))]
DataField = Annotated[DataSource, OneOf(DATA_SOURCES, _source)]


# --- the document -------------------------------------------------------------------------------


class ModelSection(Section):
    """Which model is trained."""

    name: str = Field(
        min_length=1,
        description="A Hugging Face hub name, or a model folder (relative to the working "
        "directory).",
        examples=["examples/models/tiny-qwen3", "Qwen/Qwen3-0.6B"],
    )
    init_from: str | None = Field(
        None,
        description="A checkpoint whose weights the run starts from, with a fresh optimizer.",
    )


class EvaluationSpec(Section):
    """Held-out rows that the model answers during the run, and how the answers are scored."""

    name: str = Field(description="Names its metrics: val/<name>/reward/mean.")
    data: DataField = Field(description="Rows whose last assistant turn is the right answer.")
    verifier: VerifierField = Field(
        default_factory=lambda: {"kind": "exact_match"},
        validate_default=True,
        description="How answers are scored.",
    )
    every: int | None = Field(
        None, ge=1, description="Evaluate each n steps, and always after the last step."
    )
    before: bool = Field(True, description="Evaluate once before the first step too.")
    max_tokens: int = Field(256, ge=1, description="Longest answer, in tokens.")
    temperature: float = Field(0.0, ge=0, description="0 takes the likeliest token each time.")
    system_prompt: str | None = Field(
        None, description="Put before rows that have no system turn of their own."
    )
    limit: int | None = Field(None, ge=1, description="Evaluate on the first n rows only.")

    @field_validator("name")
    @classmethod
    def _name(cls, name: str) -> str:
        return _plain_name(name)


class Orchestration(Section):
    """How the run is cut into Prefect task runs; the numbers trained are the same."""

    task_runs: Literal["auto", "operation", "segment"] = Field(
        "auto",
        description="operation: one for each batch, step, save and evaluation; segment: one for "
        "the steps between two checkpoints; auto: operations up to 1,500 task runs.",
    )
    max_recoveries: int = Field(
        3,
        ge=0,
        description="How often the run goes back to its last checkpoint by itself, when the engine "
        "is lost or the model's state is in doubt, before it fails.",
    )


def _default_backend(data: dict[str, Any]) -> Any:
    return {"kind": ALGORITHMS[data["algorithm"].kind].default_backend}


class Experiment(Section):
    """What to train on what, and how. Relative paths are relative to the working directory."""

    name: str = Field(
        description="Names the run's folder: letters, digits, dots, dashes and underscores.",
        examples=["sft-arithmetic"],
    )
    seed: int = Field(0, ge=0, description="Decides the order of the rows and the fresh adapter.")
    store: str = Field(
        "runs", min_length=1, description="Where runs are kept: a folder, or s3://bucket/prefix."
    )
    model: ModelSection = Field(title="Model", description="Which model is trained.")
    data: DataField = Field(description="The rows to train on.")
    algorithm: AlgorithmField = Field(description="The recipe and its parameters.")
    backend: BackendField = Field(
        default_factory=_default_backend,
        validate_default=True,
        description="The compute: embedded starts an engine on this machine.",
    )
    evaluations: list[EvaluationSpec] = Field(
        default_factory=list, description="Scores on held-out rows, each with its own cadence."
    )
    orchestration: Orchestration = Field(
        default_factory=Orchestration,
        description="How the run is cut into task runs, and how often it recovers by itself.",
    )
    checkpoints: Retention = Field(
        default_factory=Retention, description="Which checkpoints stay when newer ones come."
    )
    callbacks: list[CallbackField] = Field(
        default_factory=list, description="What else watches the run."
    )
    tags: list[str] = Field(default_factory=list, description="Words to find the run by.")

    @field_validator("name")
    @classmethod
    def _name(cls, name: str) -> str:
        return _plain_name(name)

    @field_validator("evaluations")
    @classmethod
    def _one_of_a_name(cls, evaluations: list[EvaluationSpec]) -> list[EvaluationSpec]:
        names = [evaluation.name for evaluation in evaluations]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two evaluations are called {twice[0]!r}: give each its own name")
        return evaluations

    def model_spec(self) -> ModelSpec:
        """What the backend has to know of the model."""
        return model_spec(self.model, self.algorithm, self.seed)


def model_spec(model: ModelSection, algorithm: AlgorithmSection, seed: int) -> ModelSpec:
    """The model with the adapter that the algorithm asks for."""
    params = algorithm.params
    return ModelSpec(
        name=model.name,
        lora_rank=params.lora_rank,
        seed=seed,
        train_attn=params.train_attn,
        train_mlp=params.train_mlp,
        train_unembed=params.train_unembed,
    )


def parse_experiment(document: Document) -> Experiment:
    """The experiment that a document says. Raises UserError with every mistake in it."""
    try:
        return Experiment.model_validate(document)
    except ValidationError as error:
        raise UserError(*explain(error, Experiment)) from None


def load_experiment(path: str | Path, overrides: Iterable[str] = ()) -> Experiment:
    """The experiment of a YAML file with `a.b=value` overrides put in.

    Relative paths in it are relative to the working directory. Raises UserError.
    """
    return parse_experiment(with_overrides(read_document(path), overrides))


def _plain_name(name: str) -> str:
    if not NAME.fullmatch(name):
        near = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._") or "my-run"
        raise ValueError(
            f"{name!r} cannot name a folder: use letters, digits, dots, dashes and underscores, "
            f"for example {near!r}"
        )
    return name


def _rebuild() -> None:
    """Take new kinds into the schema after a registry has changed."""
    EvaluationSpec.model_rebuild(force=True)
    Experiment.model_rebuild(force=True)


for _registry in (ALGORITHMS, BACKENDS, DATA_SOURCES, VERIFIERS, CALLBACKS):
    _registry.on_change.append(_rebuild)
