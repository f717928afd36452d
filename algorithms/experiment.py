"""The one document that says what to train: read, checked, and turned into a form.

`Experiment` is the parameter of the `train` flow and what a YAML file holds. Its sections
`algorithm`, `backend`, `data`, `verifier` and `callbacks` are unions over the registries, told
apart by `kind`; a kind's `params` are its own Config class, so that forms, checks and messages come
from one place. Importing this module imports no compute library.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from algorithms.base import BaseAlgorithm, BaseAlgorithmConfig, OwnLoop
from algorithms.callbacks import Callback
from algorithms.data.dataset import DATA_SOURCES, DataSource
from algorithms.data.rendering import Supervise
from algorithms.data.transforms import TRANSFORMS
from algorithms.document import Document, explain, read_document, with_overrides
from algorithms.imports import import_modules
from algorithms.local.options import LocalConfig
from algorithms.registry import ALGORITHMS, CALLBACKS
from algorithms.rewards.metrics import SCORES, direction_of
from algorithms.rewards.section import VerifierField
from algorithms.rewards.verifiers import VERIFIERS
from algorithms.rollouts.environment import ENVIRONMENTS, EnvironmentField
from algorithms.sections import OneOf, Section, built, forget_sections, with_params
from backends.base import BackendKind, BackendParams, ModelSpec
from backends.errors import UserError
from backends.local import LocalKind, LocalParams
from backends.registry import BACKENDS, Row
from backends.storage.checkpoints import Best, Retention

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


# --- sections that are one of a registry's kinds ------------------------------------------------


class AlgorithmSection(Section):
    """Which recipe, and its parameters."""

    kind: str
    params: BaseAlgorithmConfig

    def build(self) -> BaseAlgorithm:
        """The algorithm, ready for `setup`. Raises UserError if it cannot be made."""
        algorithm: BaseAlgorithm = built(ALGORITHMS, self.kind, self.params, "algorithm")
        return algorithm


class BackendSection(Section):
    """Which compute, and its parameters."""

    kind: str
    params: BackendParams

    def row(self) -> type[BackendKind]:
        """What checks and opens this kind of backend."""
        return BACKENDS[self.kind]


class CallbackSection(Section):
    """Something that watches the run."""

    kind: str
    params: BaseModel
    on_error: Literal["tell", "stop"] = Field(
        "tell", description="If it fails: tell, and train on; or stop the run as failed."
    )

    def build(self, where: str = "callback") -> Callback:
        """The callback. Raises UserError for one that cannot work on this machine.

        `where` names the section, and is put before the fields of its own that such an error names.
        """
        try:
            callback: Callback = built(CALLBACKS, self.kind, self.params, where)
        except UserError as error:
            fields = {name: f"{where}.params.{name}" for name in type(self.params).model_fields}
            fields["kind"] = f"{where}.kind"
            raise UserError(
                *(replace(p, where=fields.get(p.where, p.where)) for p in error.problems)
            ) from error
        callback.stops_the_run = self.on_error == "stop"
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


def _default_verifier(data: dict[str, Any]) -> Any:
    return {"kind": "exact_match"} if data.get("kind") == "benchmark" else None


class EvaluationSpec(Section):
    """Held-out rows that the weights are scored on during the run, and how."""

    name: str = Field(description="Names its metrics: val/<name>/reward/mean.")
    kind: Literal["benchmark", "nll", "preference"] = Field(
        "benchmark",
        description="benchmark: the model answers, a verifier scores (more is better); nll: how "
        "likely the rows' own answers are to it, in nats per token (less is better); preference: "
        "for which share of the rows the chosen answer is likelier to it than the rejected one.",
    )
    role: Literal["validation", "test"] = Field(
        "validation", description="Nothing is ever chosen by the score of a test evaluation."
    )
    data: DataField = Field(
        description="Rows whose last assistant turn is the right answer; for preference, pairs."
    )
    verifier: VerifierField | None = Field(
        default_factory=_default_verifier,
        validate_default=True,
        description="How answers are scored; exact_match if left out.",
    )
    environment: EnvironmentField | None = Field(
        None,
        title="Environment",
        description="Where the model plays the rows; left out, it answers each in one turn.",
    )
    max_turns: int = Field(8, ge=1, description="Most assistant turns in an environment.")
    every: int | None = Field(
        None, ge=1, description="Evaluate each n steps, and always after the last step."
    )
    before: bool = Field(True, description="Evaluate once before the first step too.")
    max_tokens: int = Field(256, ge=1, description="Longest answer, in tokens.")
    temperature: float = Field(0.0, ge=0, description="0 takes the likeliest token each time.")
    num_samples: int = Field(1, ge=1, description="Answers to each row.")
    pass_at: list[Annotated[int, Field(ge=1)]] = Field(
        default_factory=list,
        description="For each k: pass@k (one of k answers passes) and pass^k (all of them do).",
        examples=[[1, 4]],
    )
    pass_threshold: float = Field(1.0, description="The least reward of an answer that passes.")
    system_prompt: str | None = Field(
        None, description="Put before rows that have no system turn of their own."
    )
    supervise: Supervise = Field(
        "all_assistant", description="For nll: which assistant turns are scored."
    )
    length_normalized: bool = Field(
        False, description="For preference: compare answers by their likelihood per token."
    )
    limit: int | None = Field(None, ge=1, description="Evaluate on the first n rows only.")

    @property
    def score_metric(self) -> str:
        """The one of its metrics that is its score."""
        return SCORES[self.kind]

    @field_validator("name")
    @classmethod
    def _name(cls, name: str) -> str:
        return plain_name(name)

    @model_validator(mode="after")
    def _fits_its_kind(self) -> EvaluationSpec:
        others = [names for kind, names in OWN_FIELDS.items() if kind != self.kind]
        for name in chain.from_iterable(others):
            default = type(self).model_fields[name].get_default(call_default_factory=True)
            if getattr(self, name) != default:
                raise ValueError(f"{name} says nothing to kind: {self.kind}; leave it out")
        if self.kind == "benchmark" and self.verifier is None:
            raise ValueError("a benchmark needs a verifier: leave it out for exact_match")
        if self.kind != "benchmark" and self.verifier is not None:
            raise ValueError(f"verifier says nothing to kind: {self.kind}; leave it out")
        return self

    @model_validator(mode="after")
    def _samples_differ_and_suffice(self) -> EvaluationSpec:
        if self.num_samples > 1 and self.temperature == 0:
            raise ValueError(
                f"num_samples is {self.num_samples} at temperature 0, where all answers are the "
                "same: raise temperature, or ask for one"
            )
        if len(set(self.pass_at)) < len(self.pass_at):
            raise ValueError(f"pass_at names a k twice: {self.pass_at}")
        if self.pass_at and max(self.pass_at) > self.num_samples:
            raise ValueError(
                f"pass_at asks for {max(self.pass_at)} of {self.num_samples} answers: raise "
                "num_samples"
            )
        return self


OWN_FIELDS: Mapping[str, Sequence[str]] = {
    "benchmark": (
        "max_tokens",
        "temperature",
        "num_samples",
        "pass_at",
        "pass_threshold",
        "system_prompt",
        "environment",
        "max_turns",
    ),
    "nll": ("supervise",),
    "preference": ("length_normalized",),
}
"""Fields that say something to one kind of evaluation only; `verifier` is one more of benchmark."""


def best_by(best: Best, evaluations: Sequence[EvaluationSpec]) -> Best:
    """The same with its mode: what the metric says, unless it is set.

    Raises ValueError for a test evaluation, for one that scores the last checkpoint only, and for a
    metric that does not say.
    """
    for spec in evaluations:
        if spec.name == best.metric and spec.role == "validation" and spec.every is None:
            raise ValueError(
                f"keep_best looks at {spec.name}, which is evaluated at the end only: set its every"
            )
    mode = direction_of(best.metric, best.mode, evaluations, "keep_best")
    return best.model_copy(update={"mode": mode})


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
        description="How often, between two checkpoints, the run goes back by itself to the last "
        "one, when the engine is lost or the model's state is in doubt, before it fails.",
    )


def _default_backend(data: dict[str, Any]) -> Any:
    return {"kind": ALGORITHMS[data["algorithm"].kind].default_backend}


class WithImports(Section):
    """A document that names modules under `imports`, which bring kinds of its own."""

    @model_validator(mode="wrap")
    @classmethod
    def _with_imports(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Import what the document names before it is read: kinds may come of it."""
        if not isinstance(value, dict):
            return handler(value)
        try:
            new = import_modules(value.get("imports"))
        except ValueError as error:
            problem = PydanticCustomError("value_error", "{what}", {"what": str(error)})
            raise ValidationError.from_exception_data(
                cls.__name__, [{"type": problem, "loc": ("imports",), "input": value["imports"]}]
            ) from error
        return cls.model_validate(value) if new else handler(value)


class Experiment(WithImports):
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
    imports: list[str] = Field(
        default_factory=list,
        description="Modules of your own that register kinds (algorithms, verifiers, environments, "
        "callbacks); those of the working directory are found too.",
        examples=[["my_rewards"]],
    )
    tags: list[str] = Field(default_factory=list, description="Words to find the run by.")

    @field_validator("name")
    @classmethod
    def _name(cls, name: str) -> str:
        return plain_name(name)

    @field_validator("backend")
    @classmethod
    def _who_takes_the_steps(cls, backend: BackendSection, info: ValidationInfo) -> BackendSection:
        if "algorithm" not in info.data:
            return backend
        kind, params = info.data["algorithm"].kind, info.data["algorithm"].params
        algorithm = ALGORITHMS[kind]
        if issubclass(algorithm, OwnLoop) and backend.kind != algorithm.default_backend:
            raise ValueError(
                f"{kind} takes its steps on the backend {algorithm.default_backend!r} only, not on "
                f"{backend.kind!r}: leave backend out"
            )
        if backend.kind == LocalKind.kind and not issubclass(algorithm, OwnLoop):
            raise ValueError(
                f"the backend 'local' is for algorithms that TRL trains, not for {kind}: set "
                "algorithm.kind to local_sft, local_dpo or local_rl, or take embedded"
            )
        if isinstance(params, LocalConfig) and isinstance(backend.params, LocalParams):
            params.passes(backend.params.num_processes)
        return backend

    @field_validator("checkpoints")
    @classmethod
    def _best_on_validation(cls, retention: Retention, info: ValidationInfo) -> Retention:
        if retention.keep_best is None or "evaluations" not in info.data:
            return retention
        best = best_by(retention.keep_best, info.data["evaluations"])
        return retention.model_copy(update={"keep_best": best})

    @field_validator("evaluations")
    @classmethod
    def _one_of_a_name(cls, evaluations: list[EvaluationSpec]) -> list[EvaluationSpec]:
        names = [evaluation.name for evaluation in evaluations]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two evaluations are called {twice[0]!r}: give each its own name")
        return evaluations

    @field_validator("callbacks")
    @classmethod
    def _callbacks_fit(
        cls, callbacks: list[CallbackSection], info: ValidationInfo
    ) -> list[CallbackSection]:
        for section in callbacks if "evaluations" in info.data else []:
            CALLBACKS[section.kind].check(section.params, info.data["evaluations"])
        return callbacks

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


def plain_name(name: str) -> str:
    """The name, if a folder can have it. Raises ValueError with one that can."""
    if not NAME.fullmatch(name):
        near = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._") or "my-run"
        raise ValueError(
            f"{name!r} cannot name a folder: use letters, digits, dots, dashes and underscores, "
            f"for example {near!r}"
        )
    return name


_documents: list[type[BaseModel]] = [EvaluationSpec, Experiment]


def on_new_kinds(*documents: type[BaseModel]) -> None:
    """Rebuild these too when a registry has changed, in this order."""
    _documents.extend(documents)


def _rebuild() -> None:
    """Take new kinds into the schema after a registry has changed."""
    for row in ALGORITHMS.rows().values():  # their parameters may name a kind of something else
        row.item.Config.model_rebuild(force=True)
    forget_sections()
    for source in DATA_SOURCES.rows().values():
        source.item.model_rebuild(force=True)
    for document in _documents:
        document.model_rebuild(force=True)


_NAMED = (ALGORITHMS, BACKENDS, DATA_SOURCES, TRANSFORMS, VERIFIERS, ENVIRONMENTS, CALLBACKS)
for _registry in _NAMED:
    _registry.on_change.append(_rebuild)
