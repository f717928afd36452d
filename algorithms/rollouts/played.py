"""A benchmark that is played: the weights are scored by rollouts in an environment."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from algorithms.data.dataset import Dataset
from algorithms.data.rendering import model_limit, stop_tokens
from algorithms.data.shapes import Row
from algorithms.evaluators import PreparedEvaluation, Sample, ScoredRow
from algorithms.rewards.metrics import reward_metrics
from algorithms.rewards.scoring import bind, code_behind, score
from algorithms.rewards.section import VerifierSection
from algorithms.rewards.verifiers import Verifier
from algorithms.rollouts.chat import Voice
from algorithms.rollouts.environment import EnvironmentSection, Scorer
from algorithms.rollouts.metrics import rollout_metrics
from algorithms.rollouts.runner import Limits, RolloutRunner
from algorithms.rollouts.scenes import EnvironmentStage
from algorithms.rollouts.trajectory import Rollout
from backends.base import Backend, SamplingClient, Tokenizer

if TYPE_CHECKING:
    from algorithms.experiment import EvaluationSpec

ROLLOUTS_AT_ONCE = 256
RETRIES = 2
TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True)
class Played(PreparedEvaluation):
    """The model plays each row once or several times in an environment."""

    rows: list[tuple[Row, str]]
    stage: EnvironmentStage
    section: VerifierSection
    verifier: Verifier
    seed: int

    @classmethod
    def of(
        cls,
        spec: EvaluationSpec,
        environment: EnvironmentSection,
        dataset: Dataset,
        tokenizer: Tokenizer,
        verifier: tuple[VerifierSection, Verifier],
        seed: int,
    ) -> Played:
        """Ready to be played; the rows have been looked at."""
        rows = list(zip(dataset.rows, dataset.places, strict=True))
        stage = EnvironmentStage(environment, spec.system_prompt)
        return cls(spec, tokenizer, rows, stage, *verifier, seed)

    async def bind(self, backend: Backend) -> None:
        """Give a verifier that asks a model the backend to open it on."""
        await bind(self.verifier, backend, self.tokenizer)

    def code(self) -> list[object]:
        """The environment, the verifier, and what they call."""
        return [*self.stage.code(), *code_behind(self.verifier)]

    def content(self) -> Any:
        """The rows, and the seed of all that is drawn."""
        return [self.seed, [row for row, _ in self.rows]]

    async def measure(
        self, client: SamplingClient
    ) -> tuple[dict[str, float], Sequence[Sample | ScoredRow]]:
        """Rewards, how often a rollout passes, turns, and what the environment measures."""
        groups = await self._runner().run(client, 0, self.rows)
        rewards_P_N = [[rollout.reward for rollout in group] for group in groups]
        rolled = rollout_metrics(groups)
        metrics = {
            **reward_metrics(rewards_P_N, self.spec.pass_threshold, self.spec.pass_at),
            "n": float(len(self.rows)),
            "answers_cut": rolled["rollout/truncated"],
            "turns": rolled["rollout/turns"],
            **{name: value for name, value in rolled.items() if name.startswith("env/")},
        }
        return metrics, [
            _sample(row, rollout)
            for (row, _), group in zip(self.rows, groups, strict=True)
            for rollout in group
        ]

    def _runner(self) -> RolloutRunner:
        spec = self.spec
        voice = Voice(
            self.tokenizer,
            stop_tokens(self.tokenizer),
            spec.max_tokens,
            spec.temperature,
            model_limit(self.tokenizer),
        )
        limits = Limits(
            spec.num_samples, ROLLOUTS_AT_ONCE, spec.max_turns, RETRIES, TIMEOUT_SECONDS
        )
        where = f"evaluations.{spec.name}"
        return RolloutRunner(self.stage, voice, limits, self.seed, self._scorer, where)

    def _scorer(self, row: Row, place: str) -> Scorer:
        where = f"evaluations.{self.spec.name}.verifier"
        return partial(score, self.section, self.verifier, row, where=where, place=place)


def _sample(row: Row, rollout: Rollout) -> Sample:
    """A rollout as a row of the samples' table: the opening, and all that followed."""
    said = [str(turn.get("content") or "") for turn in rollout.messages]
    asked = next(
        (i for i, turn in enumerate(rollout.messages) if turn["role"] == "assistant"), len(said)
    )
    shown = {name: value for name, value in row.items() if name not in ("messages", "prompt")}
    return Sample(
        prompt="\n".join(said[:asked]),
        completion="\n".join(said[asked:]),
        expected=json.dumps(shown, ensure_ascii=False) if shown else "",
        reward=rollout.reward,
    )
