"""What a run changes of a TRL trainer, whichever it is: order, schedule, resume, and its rows.

TRL's loop stays as it is. A mixin gives it the run's batches, the run's learning rates and the
run's checkpoint; a callback hands each step over as soon as it is logged, and waits there while the
run evaluates and saves.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate.data_loader import prepare_data_loader
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Sampler
from transformers import (
    PrinterCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer import TRAINER_STATE_NAME

from algorithms.base import Transcript
from algorithms.local.processes import Follower, Leader
from algorithms.local.randomness import seed_step, set_random_state
from backends.errors import Problem, UserError
from backends.local import LocalBackend

Logs = Mapping[str, float]

REFERENCE = "ref"
"""The adapter in which TRL keeps the weights that a run started from, where it needs them."""

OF_THE_RUN = {
    "loss",
    "grad_norm",
    "learning_rate",
    "epoch",
    "num_tokens",
    "step_time",
    "reward",
    "rewards/accuracies",
    "rewards/chosen",
    "rewards/margins",
    "rewards/rejected",
}
"""What TRL logs that the run has names of its own for, or that differs in every replay."""


@dataclass(frozen=True)
class Plan:
    """A run's side of TRL's loop."""

    backend: LocalBackend
    loop: Leader | Follower
    seed: int
    """Of the run; it decides what each step draws."""
    micro_batches: Callable[[int], list[list[int]]]
    """This process's rows of a step (from 0), in the parts that go through the model one by one."""
    learning_rate: Callable[[int], float]
    metrics: Callable[[int, Logs], dict[str, float]]
    """What an algorithm makes of the logs of a step (from 0)."""
    transcripts: Callable[[], list[Transcript]]
    """What the last step was trained on, for people."""


class StepBatches(Sampler[list[int]]):  # type: ignore[misc]
    """The micro-batches of all steps of the run, one after the other, as a single epoch."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._parts = len(plan.micro_batches(0))

    def __len__(self) -> int:
        return self._plan.loop.total_steps * self._parts

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(self._plan.loop.total_steps):
            yield from self._plan.micro_batches(step)


class RunsTrainer:
    """Put in front of a TRL trainer's class: its data, schedule and checkpoints are the run's."""

    plan: Plan
    args: Any
    state: Any
    model: Any
    optimizer: Any
    lr_scheduler: Any
    accelerator: Any
    train_dataset: Any
    data_collator: Any

    def _send_telemetry(self) -> None:
        """Tell nobody that a run takes place."""

    def follow(self, plan: Plan) -> None:
        """Take the run's side, before `train`."""
        self.plan = plan
        plan.backend.training_state = self.training_state
        self.remove_callback(PrinterCallback)  # type: ignore[attr-defined]
        self.add_callback(HandsOver(plan))  # type: ignore[attr-defined]

    def get_train_dataloader(self) -> Any:
        """The steps' batches in the run's order."""
        loader = DataLoader(
            self.train_dataset,
            batch_sampler=StepBatches(self.plan),
            collate_fn=self.data_collator,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory,
        )
        # The batches are this process's own already: accelerate is not to deal them out again.
        return prepare_data_loader(
            loader,
            self.accelerator.device,
            num_processes=1,
            process_index=0,
            put_on_device=True,
        )

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The run's learning rates."""
        peak = self.args.learning_rate
        last = num_training_steps - 1  # asked for once more after the last step

        def share(step: int) -> float:
            return self.plan.learning_rate(min(step, last)) / float(peak)

        self.lr_scheduler = LambdaLR(optimizer or self.optimizer, share)
        return self.lr_scheduler

    def training_state(self) -> dict[str, Any]:
        """All that the next step depends on beside the weights."""
        state = {
            "step": self.state.global_step,
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.lr_scheduler.state_dict(),
            "random": self.plan.loop.random_states(),
        }
        if REFERENCE in self.plan.backend.model.peft_config:
            state["reference"] = self.plan.backend.weights(REFERENCE)
        return state

    @property
    def steps_done(self) -> int:
        """Of the whole run; none before the loop begins."""
        done: int = self.state.global_step
        return done

    def train_from(self, folder: Path) -> None:
        """Take the steps that are left; `folder` is empty and for TRL's own use."""
        resumed = self.plan.backend.resumed
        if resumed is None:
            self.train()  # type: ignore[attr-defined]
            return
        size = self.args.per_device_train_batch_size
        state = TrainerState(global_step=resumed["step"], logging_steps=1, train_batch_size=size)
        state.save_to_json(str(folder / TRAINER_STATE_NAME))
        self.train(resume_from_checkpoint=str(folder))  # type: ignore[attr-defined]

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        backend = self.plan.backend
        backend.restore_weights()
        if REFERENCE in backend.model.peft_config:  # TRL made it of the weights that were there
            backend.set_weights(backend.resumed["reference"], REFERENCE)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self.optimizer.load_state_dict(self.plan.backend.resumed["optimizer"])
            self.lr_scheduler.load_state_dict(self.plan.backend.resumed["scheduler"])

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            backend = self.plan.backend
            set_random_state(backend.resumed["random"][backend.rank])


class HandsOver(TrainerCallback):  # type: ignore[misc]
    """Gives the run each step's row, and stops where the run does."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._tokens = 0.0

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """The trainer is made and has all it needs."""
        self._plan.loop.begins()

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Others have drawn from the process's generators, and in a replay other numbers."""
        seed_step(self._plan.seed, state.global_step, self._plan.backend.rank)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Logs | None = None,
        **kwargs: Any,
    ) -> None:
        """A step is done, and its numbers are known. Raises UserError if these are not finite."""
        if logs is None or "loss" not in logs:
            return  # TRL's last words
        state.log_history.clear()  # the run's store has the rows
        step = state.global_step
        for name, of in (("loss", "loss"), ("grad_norm", "norm of the gradient")):
            if not math.isfinite(logs[name]):
                what = f"the {of} of step {step} is {logs[name]}"
                remedy = "lower it, or look at the rows of that step"
                raise UserError(Problem("algorithm.params.learning_rate", what, remedy))
        row = {
            "optim/lr": logs["learning_rate"],
            "optim/grad_norm": logs["grad_norm"],
            **{f"trl/{name}": value for name, value in logs.items() if name not in OF_THE_RUN},
        }
        if "num_tokens" in logs:  # of all steps in this process
            row["tokens/total"] = logs["num_tokens"] - self._tokens
            self._tokens = logs["num_tokens"]
        row |= self._plan.metrics(step - 1, logs)
        if not self._plan.loop.step_done(row, self._plan.transcripts()):
            control.should_training_stop = True


def owned(trainer: type, name: str) -> Any:
    """The trainer's class with the run's side put in front of it."""
    return type(name, (RunsTrainer, trainer), {})


def quiet() -> None:
    """Keep the libraries' own progress to themselves; warnings stay."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    logging.getLogger("accelerate").setLevel(logging.WARNING)
    # TRL and PEFT ask by names that are on their way out of transformers.
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
