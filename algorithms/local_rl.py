"""Reinforcement learning with TRL's GRPOTrainer, in this process."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field, JsonValue, field_validator

from algorithms.base import BaseAlgorithmConfig, RunContext, Transcript
from algorithms.data.rendering import chat_prompt, plain_prompt, stop_tokens
from algorithms.data.shapes import Row, prompt_problem, read_prompt
from algorithms.local.algorithm import LocalAlgorithm
from algorithms.local.options import LocalConfig, Refusals
from algorithms.rewards.scoring import bind, check_row, code_behind, score
from algorithms.rewards.section import VerifierField
from backends.base import Backend
from backends.errors import Problem, UserError

if TYPE_CHECKING:
    from algorithms.local.trainer import RunsTrainer


OF_SAMPLING: Mapping[str, str] = {
    "max_new_tokens": "use max_tokens",
    "max_length": "use max_tokens",
    "max_time": "a run that goes on could not repeat it",
    "temperature": "use temperature",
    "num_return_sequences": "use num_samples",
    "do_sample": "a group is of samples",
    "num_beams": "a group is of samples",
    "return_dict_in_generate": "TRL takes the tokens alone",
    "eos_token_id": "an answer ends where the chat template ends a turn, as in rl",
}
"""What `generation_kwargs` may not say, and why."""


class LocalRLConfig(LocalConfig):
    """What reinforcement learning with TRL can be told."""

    REFUSED_TOO: ClassVar[Refusals] = {
        "use num_samples, max_tokens, temperature and kl_penalty_coef": (
            "num_generations",
            "max_completion_length",
            "temperature",
            "beta",
        ),
        "each step samples its own batch, so that a run can go on from any": (
            "num_iterations",
            "steps_per_generation",
            "generation_batch_size",
        ),
        "its samples could not be drawn again by a run that goes on": (
            "use_vllm",
            "use_transformers_continuous_batching",
            "use_transformers_paged",
        ),
        "its state is in no checkpoint": ("use_adaptive_entropy", "sync_ref_model"),
        "it is of no effect here": (
            "ref_model_mixup_alpha",
            "ref_model_sync_steps",
            "entropy_coef_min",
            "entropy_coef_max",
            "entropy_coef_delta",
            "entropy_target",
            "max_tool_calling_iterations",
            "num_generations_eval",
            "num_completions_to_print",
            "log_unique_prompts",
            "log_multimodal",
            "log_completions_hub_repo",
            "ds3_gather_for_generation",
            "transformers_continuous_batching_config",
            "vllm_mode",
            "vllm_model_impl",
            "vllm_enable_sleep_mode",
            "vllm_structured_outputs_regex",
            "vllm_server_base_url",
            "vllm_server_host",
            "vllm_server_port",
            "vllm_server_timeout",
            "vllm_group_port",
            "vllm_gpu_memory_utilization",
            "vllm_max_model_length",
            "vllm_tensor_parallel_size",
            "vllm_importance_sampling_correction",
            "vllm_importance_sampling_mode",
            "vllm_importance_sampling_clip_max",
            "vllm_importance_sampling_clip_min",
            "vllm_importance_sampling_cap",
        ),
    }

    learning_rate: float = Field(1e-5, gt=0, description="Peak learning rate of AdamW.")
    batch_size: int = Field(8, ge=1, description="Prompts (groups) in each step.")
    num_samples: int = Field(8, ge=2, description="Rollouts of each prompt: the group.")
    temperature: float = Field(1.0, gt=0, description="Of sampling.")
    max_tokens: int = Field(256, ge=1, description="Longest answer, in tokens.")
    verifier: VerifierField = Field(
        default_factory=lambda: {"kind": "exact_match"},
        validate_default=True,
        description="How answers are scored.",
    )
    kl_penalty_coef: float = Field(
        0.0, ge=0, description="Holds the policy to the weights it starts from; 0 does not."
    )
    log_rollouts: int = Field(16, ge=0, description="Transcripts that are kept of each step.")

    @field_validator("trainer")
    @classmethod
    def _sampling_is_the_runs(cls, trainer: dict[str, JsonValue]) -> dict[str, JsonValue]:
        given = trainer.get("generation_kwargs") or {}
        if not isinstance(given, dict):
            raise ValueError("generation_kwargs is no mapping: write its fields below it")
        for name in given:
            if why := OF_SAMPLING.get(name):
                raise ValueError(f"generation_kwargs.{name} cannot be set: {why}")
        template = trainer.get("chat_template_kwargs") or {}
        if not isinstance(template, dict):
            raise ValueError("chat_template_kwargs is no mapping: write its fields below it")
        return trainer


class LocalRL(LocalAlgorithm):
    """Reinforcement learning on this machine, with TRL's GRPOTrainer and our verifiers."""

    name: ClassVar[str] = "local_rl"
    Config: ClassVar[type[BaseAlgorithmConfig]] = LocalRLConfig

    def __init__(self, cfg: LocalRLConfig) -> None:
        super().__init__(cfg)
        given = cfg.trainer.get("generation_kwargs")
        if isinstance(given, dict) and importlib.util.find_spec("trl"):
            _check_sampling(given)
        self._verifier = cfg.verifier.build("algorithm.params.verifier")
        self._heard: list[Transcript] = []

    @classmethod
    def options_class(cls) -> type:
        """TRL's GRPOConfig."""
        from trl import GRPOConfig

        config: type = GRPOConfig
        return config

    def row_problem(self, row: Row, place: str) -> Problem | None:
        """A row needs a prompt, without tools of its own, and what the verifier asks for."""
        if row.get("tools"):
            return Problem(place, "has tools, which local_rl cannot call", "use rl for these")
        if row.get("chat_template_kwargs"):
            what = "has chat_template_kwargs, and TRL renders all prompts alike"
            return Problem(place, what, "use rl for these, or trainer.chat_template_kwargs for all")
        return prompt_problem(row, place) or check_row(self._verifier, row, place)

    def code(self) -> list[object]:
        """Whose source decides the rewards: the verifier's too."""
        return [self, *code_behind(self._verifier)]

    async def setup(self, ctx: RunContext, backend: Backend) -> None:
        """Look at every row, and give the verifier what it needs."""
        await super().setup(ctx, backend)
        await bind(self._verifier, backend, ctx.tokenizer)

    def prepare(self, ctx: RunContext) -> int:
        """Leave out the bad rows that may be, also those whose prompt cannot be answered."""
        most, longest = self.cfg.max_tokens, self.backend.longest
        if most >= longest:
            what = f"is {most}, and the model reads {longest} tokens, the prompt's too"
            raise UserError(Problem("algorithm.params.max_tokens", what, "lower it"))
        self._dataset = ctx.dataset.without_bad(
            lambda row, place: self.row_problem(row, place) or self._prompt_problem(row, place)
        )
        self._stop = set(stop_tokens(ctx.tokenizer))
        return len(self._dataset)

    def _prompt_problem(self, row: Row, place: str) -> Problem | None:
        """What the chat template has against a row, and whether the model can read so much."""
        prompt, tokenizer = read_prompt(row), self.context.tokenizer
        kwargs = self.cfg.trainer.get("chat_template_kwargs") or {}
        try:
            tokens = (
                plain_prompt(prompt, tokenizer)
                if isinstance(prompt, str)
                else chat_prompt(prompt, tokenizer, None, place, kwargs)
            )
        except UserError as error:
            return error.problems[0]
        most, longest = self.cfg.max_tokens, self.backend.longest
        if len(tokens) + most <= longest:
            return None
        what = f"has a prompt of {len(tokens)} tokens, and the model reads {longest}"
        return Problem(place, what, f"shorten it, or lower max_tokens, which is {most}")

    def micro_batches(self, step_idx: int) -> list[list[int]]:
        """TRL samples a whole step's groups at its first part, and is shown them at each."""
        group = [row for row in self.step_rows(step_idx) for _ in range(self.cfg.num_samples)]
        share = len(group) // self.backend.num_processes
        own = group[self.backend.rank * share :][:share]
        return [own] * self._passes

    def trainer(self, arguments: dict[str, Any]) -> RunsTrainer:
        """A GRPOTrainer that asks the verifier."""
        from datasets import Dataset
        from trl import GRPOTrainer

        from algorithms.local.trainer import owned

        cfg: LocalRLConfig = self.cfg
        extra = {
            "per_device_train_batch_size": self.rows_a_pass * cfg.num_samples,
            "num_generations": cfg.num_samples,
            "max_completion_length": cfg.max_tokens,
            "temperature": cfg.temperature,
            "beta": cfg.kl_penalty_coef,
        }
        rows = [
            {"prompt": read_prompt(row), "row": number}
            for number, row in enumerate(self._dataset.rows)
        ]
        # TRL's rollouts end at these and at the tokenizer's eos, which is one of ours.
        self.backend.model.generation_config.eos_token_id = sorted(self._stop)
        trainer: RunsTrainer = owned(GRPOTrainer, "LocalRL")(
            model=self.backend.model,
            reward_funcs=self.reward,
            args=self.options(arguments | extra),
            train_dataset=Dataset.from_list(rows),
            processing_class=self.context.tokenizer,
        )
        return trainer

    def reward(
        self, *, completion_ids: Sequence[Sequence[int]], row: Sequence[int], **_: Any
    ) -> list[float]:
        """What TRL asks for: the verifier's score of each answer, on the run's event loop."""
        texts = [self._text(tokens) for tokens in completion_ids]

        async def scores() -> list[float]:
            return await asyncio.gather(*map(self._score, row, texts))

        rewards = self.loop.wait(scores())
        self._heard = [
            self._transcript(place, number, text, reward, tokens)
            for place, (number, text, reward, tokens) in enumerate(
                zip(row, texts, rewards, completion_ids, strict=True)
            )
        ]
        return rewards

    def _text(self, tokens: Sequence[int]) -> str:
        kept = list(tokens)
        while kept and kept[-1] in self._stop:
            kept.pop()
        return str(self.context.tokenizer.decode(kept, skip_special_tokens=True))

    async def _score(self, number: int, completion: str) -> float:
        return await score(
            self.cfg.verifier,
            self._verifier,
            self._dataset.rows[number],
            completion,
            where="algorithm.params.verifier",
            place=self._dataset.places[number],
        )

    def _transcript(
        self, place: int, number: int, text: str, reward: float, tokens: Sequence[int]
    ) -> Transcript:
        prompt = read_prompt(self._dataset.rows[number])
        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        end = "stop" if tokens and tokens[-1] in self._stop else "length"
        messages = [*asked, {"role": "assistant", "content": text}]
        return Transcript(place // self.cfg.num_samples, messages, reward, None, end)

    def transcripts(self) -> list[Transcript]:
        """The step's first rollouts."""
        return self._heard[: self.cfg.log_rollouts]

    def metrics(self, step_idx: int, logs: Mapping[str, float]) -> dict[str, float]:
        """The step's mean reward, over all rollouts; the rest is under TRL's names."""
        return {"reward/mean": logs["reward"], "loss": logs["loss"]}

    def setup_metrics(self) -> dict[str, float]:
        """Rows of an epoch, and how many were left out as bad."""
        skipped = self._dataset.bad_rows.skipped
        return {"data/rows": float(len(self._dataset)), "data/rows_skipped": float(skipped)}


def _check_sampling(given: Mapping[str, JsonValue]) -> None:
    """Raises UserError for options of sampling that transformers does not have: it ignores them."""
    from transformers import GenerationConfig

    known = vars(GenerationConfig())
    if unknown := [name for name in given if name not in known]:
        what = f"transformers' GenerationConfig has no {', '.join(unknown)}"
        remedy = "leave it out; max_tokens, temperature and the seed are the run's"
        raise UserError(Problem("algorithm.params.trainer.generation_kwargs", what, remedy))
