"""Reinforcement learning: do more of what earned more than the rest of its group."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt

from algorithms.base import BaseAlgorithm, BaseAlgorithmConfig, RunContext, TrainingBatch
from algorithms.data.order import batch_rows, steps_per_epoch
from algorithms.data.rendering import model_limit, stop_tokens
from algorithms.data.shapes import Row
from algorithms.rewards.scoring import bind, check_row, code_behind, score
from algorithms.rl_config import RLConfig
from algorithms.rollouts.chat import Voice
from algorithms.rollouts.environment import ENVIRONMENTS, Scorer
from algorithms.rollouts.examples import anchored, kl_penalised, scored
from algorithms.rollouts.metrics import rollout_metrics
from algorithms.rollouts.runner import RolloutRunner
from algorithms.rollouts.shared import Shared
from algorithms.rollouts.trajectory import Rollout, to_datum
from backends.base import Backend
from backends.errors import Problem

if TYPE_CHECKING:
    from backends.base import ForwardBackwardResult

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Rolled:
    """A batch's rollouts, group by group, and the seconds that they took."""

    groups: list[list[Rollout]]
    seconds: float


class RL(BaseAlgorithm):
    """Reinforcement learning from rewards for the model's own rollouts, single or multi turn."""

    name: ClassVar[str] = "rl"
    Config: ClassVar[type[BaseAlgorithmConfig]] = RLConfig
    on_policy: ClassVar[bool] = True

    def __init__(self, cfg: RLConfig) -> None:
        super().__init__(cfg)
        self._verifier = cfg.verifier.build("algorithm.params.verifier")
        self._rolled: Shared[Rolled] = Shared(cfg.max_staleness + 2)

    def row_problem(self, row: Row, place: str) -> Problem | None:
        """What the environment and the verifier have against a row; an agent may take any."""
        cfg: RLConfig = self.cfg
        if cfg.agent_import_path is not None:
            return None
        if isinstance(row.get("prompt"), str) and (cfg.system_prompt or cfg.user_template):
            what = "a plain prompt, which takes no system_prompt or user_template"
            return Problem(place, what, "give the row as messages, or leave these out")
        environment = ENVIRONMENTS[cfg.environment.kind]
        if problem := environment.check_row(row, place):
            return problem
        return None if environment.own_reward else check_row(self._verifier, row, place)

    def setup_metrics(self) -> dict[str, float]:
        """Rows of an epoch, and how many were left out as bad."""
        skipped = self._dataset.bad_rows.skipped
        return {"data/rows": float(len(self._dataset)), "data/rows_skipped": float(skipped)}

    def code(self) -> list[object]:
        """Whose source decides the batches: the environment's or agent's and the verifier's too."""
        return [self, *self.cfg.stage().code(), *code_behind(self._verifier)]

    async def setup(self, ctx: RunContext, backend: Backend) -> None:
        """Look at every row; have the verifier, the runner, and the base of a KL term at hand."""
        cfg: RLConfig = self.cfg
        self._dataset = await asyncio.to_thread(ctx.dataset.without_bad, self.row_problem)
        await bind(self._verifier, backend, ctx.tokenizer)
        self._base = await backend.open_sampling_client() if cfg.kl_penalty_coef else None
        self._policy, self._seed = ctx.policy, ctx.config.seed
        voice = Voice(
            ctx.tokenizer,
            stop_tokens(ctx.tokenizer),
            cfg.max_tokens,
            cfg.temperature,
            cfg.max_context or model_limit(ctx.tokenizer),
        )
        self._runner = RolloutRunner(cfg.stage(), voice, cfg.limits(), self._seed, self._scorer)
        batches = steps_per_epoch(len(self._dataset), cfg.batch_size)
        self._steps_per_epoch = batches * cfg.num_substeps

    def _scorer(self, row: Row, place: str) -> Scorer:
        section, where = self.cfg.verifier, "algorithm.params.verifier"
        return partial(score, section, self._verifier, row, where=where, place=place)

    def sampled_after(self, step_idx: int) -> int:
        """All steps of a batch: behind the batch that lies `max_staleness` before it."""
        cfg: RLConfig = self.cfg
        return max(0, step_idx // cfg.num_substeps - cfg.max_staleness) * cfg.num_substeps

    async def build_batch(self, step_idx: int) -> TrainingBatch:
        """The step's share of a batch's groups, compared and made into examples.

        `num_substeps` steps share one batch of rollouts; each cuts its part of the groups out.
        """
        cfg: RLConfig = self.cfg
        batch, part = divmod(step_idx, cfg.num_substeps)
        rolled = await self._rolled.get(batch, partial(self._roll_out, batch, step_idx))
        first, last = (len(rolled.groups) * n // cfg.num_substeps for n in (part, part + 1))
        groups = rolled.groups[first:last]
        compared = [
            one
            for group in groups
            for one in scored(group, cfg.advantage, cfg.drop_constant_reward)
        ]
        metrics = rollout_metrics(groups) if groups else {}
        stale = batch - self.sampled_after(step_idx) // cfg.num_substeps
        metrics |= {"sampling/staleness": float(stale), "time/sampling": rolled.seconds}
        examples = [example for one in compared for example in one.examples()]
        if examples and self._base is not None:
            examples, kl = await kl_penalised(examples, self._base, cfg.kl_penalty_coef)
            metrics["kl/base"] = kl
        if cfg.loss_fn == "dro":
            examples = await anchored(examples, await self._policy.sampler(step_idx))
        return TrainingBatch(
            [to_datum(example.segment, example.advantages) for example in examples],
            cfg.loss_fn,
            cfg.loss_fn_config,
            metrics,
            [one.transcript() for one in compared[: cfg.log_rollouts]],
        )

    async def _roll_out(self, batch: int, step_idx: int) -> Rolled:
        client = await self._policy.sampler(step_idx)
        picked = batch_rows(len(self._dataset), self.cfg.batch_size, self._seed, batch)
        some = await asyncio.to_thread(self._dataset.pick, picked)
        started = time.monotonic()
        rows = list(zip(some.rows, some.places, strict=True))
        groups = await self._runner.run(client, batch, rows)
        return Rolled(groups, time.monotonic() - started)

    def step_metrics(
        self, step_idx: int, batch: TrainingBatch, fb_result: ForwardBackwardResult
    ) -> dict[str, float]:
        """How far the trainer is from the sampler, over the tokens that have an advantage.

        `sampling/kl` is the mean of q - p (q the sampler's logprob, p the trainer's before the
        step), an estimate of KL(q || p); the ratio is exp(p - q). `loss` is a mean over the same
        tokens, `loss:sum` divided by their number.
        """
        p_T, q_T = trained_logprobs(batch, fb_result)
        metrics = {
            "tokens/total": float(sum(datum.model_input.length for datum in batch.data)),
            "tokens/trained": float(len(q_T)),
        }
        if len(q_T):
            ratios_T = np.exp(p_T - q_T)
            metrics |= {
                "sampling/kl": float((q_T - p_T).mean()),
                "sampling/ratio_mean": float(ratios_T.mean()),
                "sampling/ratio_max": float(ratios_T.max()),
            }
            if (loss_sum := fb_result.metrics.get("loss:sum")) is not None:
                metrics["loss"] = loss_sum / len(q_T)
        return metrics


def trained_logprobs(
    batch: TrainingBatch, fb_result: ForwardBackwardResult
) -> tuple[FloatArray, FloatArray]:
    """The trainer's and the sampler's logprobs of the tokens that have an advantage, [T] each."""
    pairs = []
    for datum, output in zip(batch.data, fb_result.loss_fn_outputs, strict=True):
        heard = datum.loss_fn_inputs["advantages"].to_numpy() != 0
        p_T = output["logprobs"].to_numpy()[heard].astype(np.float64)
        q_T = datum.loss_fn_inputs["logprobs"].to_numpy()[heard].astype(np.float64)
        pairs.append((p_T, q_T))
    return np.concatenate([p for p, _ in pairs]), np.concatenate([q for _, q in pairs])
