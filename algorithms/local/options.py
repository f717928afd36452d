"""The parameters that the TRL algorithms share, and which of TRL's own options may be set.

An option is refused if the run itself says the same thing elsewhere, or if it would break what a
run promises: one place for its files, one row a step, exact resume.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any, ClassVar, get_args, get_type_hints

from pydantic import (
    Field,
    JsonValue,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from algorithms.base import BaseAlgorithmConfig
from backends.errors import Problem, UserError, first_line

Refusals = Mapping[str, tuple[str, ...]]
"""Options that cannot be set, by why."""

REFUSED: Refusals = {
    "the run's store is where its files go": ("output_dir",),
    "a run is continued with --run-id": ("resume_from_checkpoint", "ignore_data_skip"),
    "use save_every or save_at_fractions, and checkpoints.keep_last": (
        "save_strategy",
        "save_steps",
        "save_total_limit",
        "save_only_model",
        "save_on_each_node",
        "load_best_model_at_end",
        "metric_for_best_model",
        "greater_is_better",
        "enable_jit_checkpoint",
    ),
    "use the experiment's callbacks": (
        "report_to",
        "run_name",
        "project",
        "trackio_space_id",
        "trackio_bucket_id",
        "trackio_static_space_id",
    ),
    "a run publishes nothing": (
        "push_to_hub",
        "hub_model_id",
        "hub_strategy",
        "hub_token",
        "hub_private_repo",
        "hub_always_push",
        "hub_revision",
    ),
    "the experiment's seed decides": ("seed", "data_seed"),
    "use the experiment's evaluations": (
        "eval_strategy",
        "eval_steps",
        "eval_delay",
        "eval_on_start",
        "do_eval",
        "do_train",
        "do_predict",
        "per_device_eval_batch_size",
        "eval_accumulation_steps",
        "prediction_loss_only",
        "include_for_metrics",
        "batch_eval_metrics",
        "eval_packing",
    ),
    "every step has its row": (
        "logging_strategy",
        "logging_steps",
        "logging_first_step",
        "logging_nan_inf_filter",
        "disable_tqdm",
        "log_level",
        "log_completions",
    ),
    "tokens/total and time/tokens_per_second say it": ("include_num_input_tokens_seen",),
    "use batch_size, micro_batch_size, num_epochs and max_steps": (
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "auto_find_batch_size",
        "num_train_epochs",
        "max_steps",
    ),
    "use learning_rate and schedule": (
        "learning_rate",
        "lr_scheduler_type",
        "lr_scheduler_kwargs",
        "warmup_steps",
    ),
    "use beta1, beta2, eps, weight_decay and grad_clip_norm": (
        "adam_beta1",
        "adam_beta2",
        "adam_epsilon",
        "weight_decay",
        "max_grad_norm",
    ),
    "use backend.params.device and dtype": (
        "use_cpu",
        "bf16",
        "fp16",
        "bf16_full_eval",
        "fp16_full_eval",
        "model_init_kwargs",
    ),
    "the run keeps the order of the rows, so that it can go on exactly": (
        "train_sampling_strategy",
        "length_column_name",
        "dataloader_drop_last",
        "shuffle_dataset",
        "accelerator_config",
    ),
    "the run renders the rows itself, as sft does": (
        "packing",
        "packing_strategy",
        "padding_free",
        "max_length",
        "truncation_mode",
        "assistant_only_loss",
        "completion_only_loss",
        "dataset_text_field",
        "dataset_kwargs",
        "dataset_num_proc",
        "chat_template_path",
        "eos_token",
        "pad_token",
        "remove_unused_columns",
        "label_names",
    ),
    "every process holds the whole model, and backend.params.num_processes says how many": (
        "deepspeed",
        "fsdp",
        "fsdp_config",
        "parallelism_config",
        "local_rank",
        "ddp_backend",
        "ddp_timeout",
        "ddp_find_unused_parameters",
        "ddp_static_graph",
        "average_tokens_across_devices",
    ),
}
"""What no TRL trainer may be told here."""

WIDER: Mapping[str, Any] = {"scale_rewards": str | bool}
"""What TRL takes beyond the types that its config class declares."""


class LocalConfig(BaseAlgorithmConfig):
    """What every algorithm that TRL trains can be told."""

    REFUSED_TOO: ClassVar[Refusals] = {}
    """What this algorithm's trainer may not be told either."""

    train_unembed: bool = Field(
        False, description="Must be false: TRL trains no adapter on the unembedding (lm_head)."
    )
    micro_batch_size: int | None = Field(
        None,
        ge=1,
        description="Rows that go through the model at a time; a part of batch_size, all of them "
        "if left out. With it, an epoch's last batch is left out if it is not full.",
    )
    trainer: dict[str, JsonValue] = Field(
        default_factory=dict,
        description="Further options of TRL's trainer, as its own config class names them.",
        examples=[{"gradient_checkpointing": True}],
    )

    @field_validator("train_unembed")
    @classmethod
    def _no_head(cls, train_unembed: bool) -> bool:
        if train_unembed:
            raise ValueError("TRL trains no adapter on lm_head: leave it out, or use sft")
        return train_unembed

    @field_validator("trainer")
    @classmethod
    def _only_options_that_keep_promises(cls, trainer: dict[str, JsonValue]) -> dict[str, Any]:
        why = refused({**REFUSED, **cls.REFUSED_TOO})
        for name in trainer:
            if name in why:
                raise ValueError(f"{name} cannot be set: {why[name]}")
        return trainer

    @model_validator(mode="after")
    def _whole_micro_batches(self) -> LocalConfig:
        self.passes(num_processes=1)
        return self

    def passes(self, num_processes: int) -> int:
        """Passes through the model for each optimizer step, in each process.

        Raises ValueError if batch_size cannot be dealt out evenly.
        """
        if self.batch_size % num_processes:
            raise ValueError(
                f"batch_size {self.batch_size} is no multiple of num_processes {num_processes}"
            )
        rows = self.batch_size // num_processes
        size = self.micro_batch_size or rows
        if rows % size:
            share = f"gives each of {num_processes} processes {rows} rows, which are"
            raise ValueError(
                f"batch_size {self.batch_size} {share if num_processes > 1 else 'is'} no multiple "
                f"of micro_batch_size {size}"
            )
        return rows // size


def refused(groups: Refusals) -> dict[str, str]:
    """Each option that cannot be set, and why."""
    return {name: why for why, names in groups.items() for name in names}


def check_options(trainer: Mapping[str, JsonValue], config: type) -> None:
    """Raises UserError for options that TRL's config class does not have, or not of this type."""
    hints = get_type_hints(config)
    problems = []
    for name, value in trainer.items():
        where = f"algorithm.params.trainer.{name}"
        if name not in hints:
            what = f"TRL's {config.__name__} has no such option"
            problems.append(Problem(where, what, _nearest(name, list(hints))))
        elif problem := _value_problem(value, WIDER.get(name, hints[name]), where):
            problems.append(problem)
    if problems:
        raise UserError(*problems)


def _value_problem(value: JsonValue, hint: Any, where: str) -> Problem | None:
    """What is wrong with a value by its type: exact, but for a whole number that is a float."""
    kinds = [kind for kind in get_args(hint) if isinstance(kind, type) and issubclass(kind, Enum)]
    if kinds:  # an enum or text, of which only what the enum knows will do
        known = [str(member.value) for member in kinds[0]]
        if value in known:
            return None
        return Problem(where, f"{value!r} is not known", _nearest(str(value), known))
    try:
        TypeAdapter(hint).validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        wanted = {each["msg"].removeprefix("Input ") for each in error.errors()}
        return Problem(where, f"{value!r} {' or '.join(sorted(wanted))}", "see TRL's documentation")
    return None


def _nearest(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else "see TRL's documentation"


@contextmanager
def blamed_on(
    trainer: Mapping[str, JsonValue],
    *errors: type[Exception],
    untried: Callable[[], bool] = lambda: True,
) -> Iterator[None]:
    """Where TRL meets options for the first time: what it raises is told as their fault.

    Raises UserError with TRL's words instead of `errors`, if there are options, and `untried` ones.
    """
    try:
        yield
    except errors as error:
        if not trainer or not untried():
            raise
        remedy = f"leave them out one by one: {', '.join(trainer)}"
        raise UserError(Problem("algorithm.params.trainer", first_line(error), remedy)) from error


def no_full_batch(rows: int, batch_size: int) -> Problem:
    """What to say where batches that are not full are left out, and there is no other."""
    what = f"there are {rows} rows, which fill no batch of {batch_size}"
    return Problem("algorithm.params.batch_size", what, "lower it")
