"""The contract of an algorithm: how each step's batch is built, and which loss it trains under.

Everything else (backend, step and save cadence, evaluation, logging, resume) is shared and knows
algorithms only through what is here. `BaseAlgorithm` is the easy path: set up, build a batch.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from algorithms.schedules import LearningRateSchedule, learning_rate_at, save_marks
from backends.base import Backend, LossCallable, SamplingClient, Tokenizer
from backends.errors import Problem

if TYPE_CHECKING:
    import tinker
    from tinker import types as tinker_types

    from algorithms.data.dataset import Dataset
    from algorithms.experiment import Experiment
    from backends.base import ForwardBackwardResult

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Transcript:
    """One rollout as a person reads it: its messages, what it earned, and why it ended.

    `group` tells the prompts of a step apart, `advantage` is None where the rollout was not trained
    on, and `end` is one word: stop, length, max_turns, …
    """

    group: int
    messages: list[dict[str, Any]]
    reward: float
    advantage: float | None
    end: str


@dataclass
class TrainingBatch:
    """One step's examples and the loss they are trained under.

    `loss_fn` is a server-side name (with `loss_fn_config`) or a Python callable; `metrics` are
    merged into the step's row, `transcripts` are kept in the run's store and shown in its report.
    A batch without data trains nothing: its step is counted, and the weights stay as they are.

    A callable is given a `ModelOutput`, whose `logprobs_per_datum` are the target logprobs of each
    row ([N] each, `logprobs` all of them in one), and `data`. It returns one number as a tensor,
    computed from the logprobs: their gradient is what trains.
    """

    data: list[tinker.Datum]
    loss_fn: str | LossCallable
    loss_fn_config: dict[str, float] | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    transcripts: list[Transcript] = field(default_factory=list)


class Policy:
    """The weights in training, to sample from; the run takes the snapshots in their turn."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._held: dict[int, asyncio.Task[SamplingClient]] = {}

    def hold(self, step_idx: int, snapshot: asyncio.Task[SamplingClient]) -> None:
        """Say which snapshot the batch of a step is sampled from."""
        self._held[step_idx] = snapshot

    def release(self, step_idx: int) -> None:
        """The batch of a step is built."""
        self._held.pop(step_idx, None)

    async def sampler(self, step_idx: int) -> SamplingClient:
        """What the batch of a step is sampled from; where nothing is held, the weights as they are.

        Asked again for the same step, it gives the same weights.
        """
        if (snapshot := self._held.get(step_idx)) is not None:
            return await asyncio.shield(snapshot)
        return await self._backend.snapshot_sampling_client()


@dataclass(frozen=True)
class RunContext:
    """What a run gives its algorithm: who it is, its data, and the live backend."""

    run_id: str
    output_dir: str
    config: Experiment
    dataset: Dataset
    backend: Backend
    tokenizer: Tokenizer

    @cached_property
    def policy(self) -> Policy:
        """The weights in training, for algorithms that sample from them."""
        return Policy(self.backend)


@dataclass(frozen=True)
class RunResult:
    """How a run ended: final scalars, named artifacts (paths or URIs), and the error if any.

    `recoveries` counts how often its last process went back to a checkpoint by itself;
    `ended_early` says why a completed run has fewer steps than planned.
    """

    run_id: str
    status: Literal["completed", "failed", "cancelled"]
    metrics: dict[str, float] = field(default_factory=dict)
    artifacts: dict[str, str] = field(default_factory=dict)
    error: str | None = None
    recoveries: int = 0
    ended_early: str | None = None


class Algorithm(Protocol):
    """The least an algorithm must be: a name, a config, and one full run."""

    name: ClassVar[str]
    Config: ClassVar[type[BaseModel]]

    async def train(self, ctx: RunContext) -> RunResult:
        """Execute one full run."""
        ...


class BaseAlgorithmConfig(BaseModel):
    """The knobs every recipe shares. Learning rates are per optimizer step of summed losses."""

    model_config = ConfigDict(extra="forbid")

    learning_rate: float = Field(1e-4, gt=0, description="Peak learning rate of AdamW.")
    schedule: LearningRateSchedule = Field(
        default_factory=LearningRateSchedule,
        title="Schedule",
        description="How the learning rate moves over the run.",
    )
    batch_size: int = Field(32, ge=1, description="Rows in each optimizer step.")
    num_epochs: int = Field(1, ge=1, description="Passes over the data.")
    max_steps: int | None = Field(
        None, ge=1, description="Optimizer steps; wins over num_epochs when set."
    )
    lora_rank: int = Field(16, ge=1, description="Rank of the LoRA adapter.")
    train_attn: bool = Field(True, description="Adapt the attention projections.")
    train_mlp: bool = Field(True, description="Adapt the MLP projections.")
    train_unembed: bool = Field(True, description="Adapt the unembedding (lm_head).")
    beta1: float = Field(0.9, ge=0, lt=1, description="Adam's decay of the mean gradient.")
    beta2: float = Field(0.95, ge=0, lt=1, description="Adam's decay of the mean square.")
    eps: float = Field(1e-12, gt=0, description="Adam's guard against division by zero.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled, as in AdamW.")
    grad_clip_norm: float = Field(0.0, ge=0, description="Global norm; 0 turns clipping off.")
    save_every: int | None = Field(None, ge=1, description="Checkpoint each n steps.")
    save_at_fractions: list[float] | None = Field(
        None, description="Checkpoint at these fractions of the run, e.g. [0.5, 1.0]."
    )

    @model_validator(mode="after")
    def _one_way_to_save(self) -> BaseAlgorithmConfig:
        if self.save_every is not None and self.save_at_fractions is not None:
            raise ValueError("set save_every or save_at_fractions, not both")
        for fraction in self.save_at_fractions or []:
            if not 0 < fraction <= 1:
                raise ValueError(f"save_at_fractions holds {fraction}; fractions lie in (0, 1]")
        return self


class BaseAlgorithm(ABC):
    """A recipe: prepare once, then one `TrainingBatch` a step."""

    name: ClassVar[str]
    Config: ClassVar[type[BaseAlgorithmConfig]] = BaseAlgorithmConfig
    on_policy: ClassVar[bool] = False
    """Whether batches are sampled from the weights being trained, through `RunContext.policy`."""
    default_backend: ClassVar[str] = "embedded"
    """The backend of an experiment that names none."""

    def __init__(self, cfg: BaseAlgorithmConfig) -> None:
        self.cfg: Any = cfg
        self._steps_per_epoch = 0

    @classmethod
    def check_row(cls, row: dict[str, Any], place: str) -> Problem | None:
        """What this recipe has against a row of its data, whatever its parameters."""
        return None

    def row_problem(self, row: dict[str, Any], place: str) -> Problem | None:
        """What it has against a row with these parameters, found before any compute starts."""
        return self.check_row(row, place)

    def code(self) -> list[object]:
        """Everything whose source decides its batches: itself, and what its parameters name."""
        return [self]

    async def train(self, ctx: RunContext) -> RunResult:
        """Execute one full run: set up, every step, evaluations, checkpoints, the result.

        The same loop that the `train` flow drives, without Prefect and without its recoveries. What
        a person can mend ends as a result with status "failed" and the error in it.
        """
        from algorithms.opening import train_alone

        return await train_alone(self, ctx)

    @abstractmethod
    async def setup(self, ctx: RunContext, backend: Backend) -> None:
        """Prepare the data; must set `self._steps_per_epoch` from the rows really there."""

    @abstractmethod
    async def build_batch(self, step_idx: int) -> TrainingBatch:
        """The batch of a step (from 0): a function of the rows, the seed and the step alone."""

    def sampled_after(self, step_idx: int) -> int:
        """How many steps the weights have had that an on-policy batch is sampled from.

        The step itself by default: its samples are fresh. Less lets rollouts overlap training; it
        must never fall from one step to the next. A batch that trains in several steps says the
        same for each of them.
        """
        return step_idx

    def step_metrics(
        self, step_idx: int, batch: TrainingBatch, fb_result: ForwardBackwardResult
    ) -> dict[str, float]:
        """Metrics from the forward-backward result (one `loss_fn_outputs` entry a datum)."""
        return {}

    def setup_metrics(self) -> dict[str, float]:
        """What set-up did to the data (rows kept, cut, dropped), for the result and the report."""
        return {}

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run; `max_steps` wins over the epochs."""
        steps: int = self.cfg.max_steps or self._steps_per_epoch * self.cfg.num_epochs
        return steps

    @property
    def steps_per_epoch(self) -> int:
        """Steps that one pass over the kept rows takes."""
        return self._steps_per_epoch

    def save_steps(self) -> list[int]:
        """The steps (counted done, 1..total) after which a checkpoint is kept; the last always."""
        return save_marks(self.total_steps, self.cfg.save_every, self.cfg.save_at_fractions)

    def adam_params(self, step_idx: int) -> tinker_types.AdamParams:
        """The optimizer's settings at a step (from 0)."""
        from tinker import types as tinker_types

        cfg = self.cfg
        return tinker_types.AdamParams(
            learning_rate=learning_rate_at(
                step_idx, self.total_steps, cfg.learning_rate, cfg.schedule
            ),
            beta1=cfg.beta1,
            beta2=cfg.beta2,
            eps=cfg.eps,
            weight_decay=cfg.weight_decay,
            grad_clip_norm=cfg.grad_clip_norm,
        )

    def cursor(self, step_idx: int) -> tuple[int, int]:
        """The epoch of a step, and which step of that epoch it is (all from 0)."""
        return divmod(step_idx, max(self._steps_per_epoch, 1))

    def state_dict(self, next_step: int) -> dict[str, Any]:
        """Data cursor and random state at a step boundary, as JSON; batches are pure otherwise."""
        epoch, step_in_epoch = self.cursor(next_step)
        return {"epoch": epoch, "step_in_epoch": step_in_epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a state that `state_dict` gave; called after `setup`, before the first batch."""
        return None


class StepLoop(Protocol):
    """What a run gives an algorithm that takes its steps itself; to be called from its thread."""

    first_step: int
    total_steps: int

    def begins(self) -> None:
        """The first step is about to be taken: its time counts from now, without what led to it."""
        ...

    def step_done(self, row: Mapping[str, float], transcripts: Sequence[Transcript] = ()) -> bool:
        """Record the next step, evaluate and save where that is due; False if it was the last.

        `row` holds the step's own metrics. Blocks until the weights may change again; raises what
        recording a step, evaluating or saving raises, for recording one step later.
        """
        ...

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of what has to run on the run's event loop."""
        ...


class OwnLoop(BaseAlgorithm):
    """An algorithm whose steps another library takes, in one go: it has no batches of its own.

    The run records, evaluates, saves and stops through the `StepLoop` that `run_loop` is given.
    """

    default_backend: ClassVar[str] = "local"

    async def build_batch(self, step_idx: int) -> TrainingBatch:
        """Never called: the library builds them."""
        raise NotImplementedError(f"{self.name} takes its steps itself")

    @abstractmethod
    def run_loop(self, loop: StepLoop) -> None:
        """Take every step from `loop.first_step` on, until `step_done` says to stop. Blocks."""
