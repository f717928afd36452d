"""What the algorithms that TRL trains share: rows, options, and TRL's loop inside the run's."""

from __future__ import annotations

import asyncio
import importlib.util
import tempfile
import warnings
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from algorithms.base import OwnLoop, RunContext, StepLoop, Transcript
from algorithms.data.order import batch_rows, steps_per_epoch
from algorithms.data.rendering import model_limit
from algorithms.local.options import LocalConfig, blamed_on, check_options, no_full_batch
from algorithms.local.processes import Follower, Leader, announced, led
from algorithms.schedules import learning_rate_at
from backends.base import Backend
from backends.errors import Problem, UserError
from backends.local import LocalBackend, quiet_torch

if TYPE_CHECKING:
    from algorithms.local.trainer import RunsTrainer

MADE_WRONGLY = (AttributeError, ImportError, TypeError, ValueError)
"""What TRL raises while a trainer is made of options that will not do."""

FIRST_USED = (ImportError, TypeError, ValueError)
"""What it raises of options that it looks at no sooner than in its first step."""


class LocalAlgorithm(OwnLoop):
    """A recipe of TRL's: says which rows, which options and which trainer."""

    def __init__(self, cfg: LocalConfig) -> None:
        super().__init__(cfg)
        quiet_torch()
        if cfg.trainer and importlib.util.find_spec("trl"):  # the backend says what is missing
            check_options(cfg.trainer, self.options_class())

    @classmethod
    @abstractmethod
    def options_class(cls) -> type:
        """TRL's config class."""

    @abstractmethod
    def prepare(self, ctx: RunContext) -> int:
        """Make the rows ready; returns how many there are. Blocks."""

    @abstractmethod
    def trainer(self, arguments: dict[str, Any]) -> RunsTrainer:
        """TRL's trainer, with the model and the rows."""

    @abstractmethod
    def metrics(self, step_idx: int, logs: Mapping[str, float]) -> dict[str, float]:
        """A step's row, from what TRL logs of it."""

    async def setup(self, ctx: RunContext, backend: Backend) -> None:
        """Make the rows ready, and see that the backend is one for TRL."""
        cfg: LocalConfig = self.cfg
        if not isinstance(backend, LocalBackend):
            what = f"{self.name} trains with TRL, in this process"
            raise UserError(Problem("backend.kind", what, "set it to local, or leave it out"))
        self.backend = backend
        self.context = ctx
        self.rows = await asyncio.to_thread(self.prepare, ctx)
        self._passes = cfg.passes(backend.num_processes)
        self._steps_per_epoch = steps_per_epoch(self.rows, cfg.batch_size)
        if self._passes * backend.num_processes > 1:
            self._steps_per_epoch = self.rows // cfg.batch_size
        if not self._steps_per_epoch:
            raise UserError(no_full_batch(self.rows, cfg.batch_size))

    def step_rows(self, step_idx: int) -> list[int]:
        """The rows of a step, in the order that sft takes them in."""
        epoch, step = divmod(step_idx, self._steps_per_epoch)
        per_epoch = steps_per_epoch(self.rows, self.cfg.batch_size)
        seed = self.context.config.seed
        return batch_rows(self.rows, self.cfg.batch_size, seed, epoch * per_epoch + step)

    def micro_batches(self, step_idx: int) -> list[list[int]]:
        """This process's rows of a step, in the parts that go through the model one by one."""
        rows = self.step_rows(step_idx)
        size = -(-len(rows) // (self._passes * self.backend.num_processes))
        parts = [rows[start : start + size] for start in range(0, len(rows), size)]
        return parts[self.backend.rank :: self.backend.num_processes]

    def transcripts(self) -> list[Transcript]:
        """What the last step was trained on, where that is worth reading."""
        return []

    def run_loop(self, loop: StepLoop) -> None:
        """TRL's loop, from the first step to the last, in as many processes as asked for. Blocks.

        Raises StateLostError if one of the other processes is lost.
        """
        with led(self.context, self.backend, loop) as leader:
            self.take_steps(leader)

    def take_steps(self, loop: Leader | Follower) -> None:
        """TRL's loop in this process. Blocks."""
        from algorithms.local.trainer import Plan, quiet

        self.loop = loop
        first = loop.first_step
        quiet()
        with tempfile.TemporaryDirectory(prefix="flowtune-trl-") as folder:
            options = self.cfg.trainer
            with announced(self.backend), blamed_on(options, *MADE_WRONGLY):
                trainer = self.trainer(self._arguments(folder))
            plan = Plan(
                self.backend,
                loop,
                self.context.config.seed,
                self.micro_batches,
                self._learning_rate,
                self.metrics,
                self.transcripts,
            )
            trainer.follow(plan)
            with blamed_on(options, *FIRST_USED, untried=lambda: trainer.steps_done <= first):
                trainer.train_from(Path(folder))

    def longest_row(self, max_seq_len: int | None) -> int:
        """Tokens of a row at most: what was asked for, or all that the model reads.

        Raises UserError if more was asked for than that.
        """
        longest = self.backend.longest
        if max_seq_len is not None and max_seq_len > longest:
            what = f"is {max_seq_len}, and the model reads {longest} tokens"
            raise UserError(Problem("algorithm.params.max_seq_len", what, "lower it"))
        return min(max_seq_len or model_limit(self.context.tokenizer) or longest, longest)

    @property
    def rows_a_pass(self) -> int:
        """How many rows go through the model at a time in each process."""
        size: int = self.cfg.batch_size // (self._passes * self.backend.num_processes)
        return size

    def _learning_rate(self, step_idx: int) -> float:
        cfg: LocalConfig = self.cfg
        return learning_rate_at(step_idx, self.total_steps, cfg.learning_rate, cfg.schedule)

    def _arguments(self, folder: str) -> dict[str, Any]:
        """TRL's options: the run's own, and those of `trainer`."""
        cfg: LocalConfig = self.cfg
        device = self.backend.model.device.type
        return {
            "output_dir": folder,
            "per_device_train_batch_size": self.rows_a_pass,
            "gradient_accumulation_steps": self._passes,
            "max_steps": self.total_steps,
            "learning_rate": cfg.learning_rate,
            "adam_beta1": cfg.beta1,
            "adam_beta2": cfg.beta2,
            "adam_epsilon": cfg.eps,
            "weight_decay": cfg.weight_decay,
            "max_grad_norm": cfg.grad_clip_norm,
            "seed": self.context.config.seed,
            "logging_steps": 1,
            "logging_nan_inf_filter": False,
            "save_strategy": "no",
            "eval_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "use_cpu": device == "cpu",
            "bf16": False,  # the weights have the dtype of the backend
            "gradient_checkpointing": False,
            "dataloader_pin_memory": device == "cuda",
            # Without it torch orders the gradients anew after the first step, also that of a run
            # that goes on, and three or more processes would add them up in another order.
            "ddp_find_unused_parameters": True,
            **cfg.trainer,
        }

    def options(self, arguments: dict[str, Any]) -> Any:
        """TRL's config."""
        with warnings.catch_warnings():  # some of TRL's own names are on their way out
            warnings.simplefilter("ignore", FutureWarning)
            options = self.options_class()(**arguments)
        _ = options.device  # decides n_gpu, which would spread the model over all that there are
        options._n_gpu = min(options.n_gpu, 1)
        return options
