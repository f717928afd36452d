"""What reinforcement learning can be told, and what is refused before anything starts."""

from __future__ import annotations

import inspect
from typing import Literal

from pydantic import Field, field_validator
from pydantic_core.core_schema import ValidationInfo

from algorithms.base import BaseAlgorithmConfig
from algorithms.imports import import_path
from algorithms.rewards.advantages import AdvantageKind
from algorithms.rewards.section import VerifierField
from algorithms.rollouts.environment import ENVIRONMENTS, EnvironmentField, EnvironmentSection
from algorithms.rollouts.runner import Limits
from algorithms.rollouts.scenes import AgentStage, EnvironmentStage, Stage

PolicyLoss = Literal["importance_sampling", "ppo", "cispo", "dro"]
"""The losses of the engine's registry that take advantages."""


class RLConfig(BaseAlgorithmConfig):
    """What reinforcement learning can be told."""

    learning_rate: float = Field(1e-5, gt=0, description="Peak learning rate of AdamW.")
    batch_size: int = Field(32, ge=1, description="Prompts (groups) in each batch of rollouts.")
    num_samples: int = Field(8, ge=1, description="Rollouts of each prompt: the group.")
    temperature: float = Field(
        1.0, ge=0, description="Of sampling; trained on are the logprobs at temperature 1."
    )
    max_tokens: int = Field(256, ge=1, description="Longest assistant turn, in tokens.")
    verifier: VerifierField = Field(
        default_factory=lambda: {"kind": "exact_match"},
        validate_default=True,
        description="How answers are scored.",
    )
    environment: EnvironmentField = Field(
        default_factory=lambda: {"kind": "single_turn"},
        validate_default=True,
        description="Where rollouts take place.",
    )
    agent_import_path: str | None = Field(
        None,
        description="module:function of an async function (chat, row) that leads the rollouts in "
        "the environment's place.",
    )
    max_turns: int = Field(
        8, ge=1, validate_default=True, description="Most assistant turns of a rollout."
    )
    max_context: int | None = Field(
        None,
        ge=2,
        description="A rollout ends before a later turn that might not fit into so many tokens; "
        "empty: the limit that the tokenizer knows of.",
    )
    n_concurrent: int = Field(256, ge=1, description="Most rollouts at the same time.")
    max_retries: int = Field(
        2, ge=0, description="How often a rollout is tried again before the run ends."
    )
    rollout_timeout_seconds: float = Field(
        600.0, gt=0, description="Longest time that one rollout may take, its verifier included."
    )
    system_prompt: str | None = Field(
        None, description="Put before conversations that have no system turn of their own."
    )
    user_template: str | None = Field(
        None, description="How the last user turn is put; {prompt} stands for what it says."
    )
    advantage: AdvantageKind = Field(
        "mean", description="What a rollout's reward is compared with: the rest of its group."
    )
    drop_constant_reward: bool = Field(
        True, description="Leave out groups whose rewards are all alike: nothing is better there."
    )
    loss_fn: PolicyLoss = Field("importance_sampling", description="The policy-gradient loss.")
    loss_fn_config: dict[str, float] | None = Field(
        None, description="The loss's own settings, e.g. clip_low_threshold; else its defaults."
    )
    num_substeps: int = Field(
        1, ge=1, description="Optimizer steps that the groups of a batch are cut into."
    )
    kl_penalty_coef: float = Field(
        0.0, ge=0, description="Holds the policy to the base model; 0 does not."
    )
    max_staleness: int = Field(
        0, ge=0, description="Batches by which the sampled weights may lag behind."
    )
    log_rollouts: int = Field(16, ge=0, description="Transcripts that are kept of each step.")

    @field_validator("num_samples")
    @classmethod
    def _a_group(cls, num_samples: int) -> int:
        if num_samples < 2:
            raise ValueError(
                "is 1: compared with itself alone, a rollout has the advantage 0 and nothing is "
                "ever trained; take at least 2"
            )
        return num_samples

    @field_validator("temperature")
    @classmethod
    def _not_all_alike(cls, temperature: float) -> float:
        if temperature == 0:
            raise ValueError(
                "is 0: all samples of a prompt are the same then, and none is better than the "
                "others; take 1.0"
            )
        return temperature

    @field_validator("agent_import_path")
    @classmethod
    def _agent_is_there(cls, path: str | None, info: ValidationInfo) -> str | None:
        if path is None:
            return None
        if not inspect.iscoroutinefunction(import_path(path)):
            raise ValueError(f"{path} is no async function: write async def agent(chat, row)")
        environment = info.data.get("environment")
        if environment is not None and environment.kind != "single_turn":
            raise ValueError(
                f"leads the rollouts itself, in the place of environment {environment.kind}; keep "
                "one of the two"
            )
        return path

    @field_validator("max_turns")
    @classmethod
    def _turns_enough(cls, max_turns: int, info: ValidationInfo) -> int:
        environment: EnvironmentSection | None = info.data.get("environment")
        if environment is not None:
            least = ENVIRONMENTS[environment.kind].min_turns
            if max_turns < least:
                raise ValueError(
                    f"is {max_turns}, but environment {environment.kind} needs {least}; raise it"
                )
        return max_turns

    @field_validator("system_prompt", "user_template")
    @classmethod
    def _agents_write_their_own(cls, text: str | None, info: ValidationInfo) -> str | None:
        if text is not None and info.data.get("agent_import_path") is not None:
            raise ValueError("does nothing: an agent writes its own messages; leave it out")
        if info.field_name == "user_template" and text is not None and "{prompt}" not in text:
            raise ValueError("does not say where the prompt goes; put {prompt} into it")
        return text

    @field_validator("loss_fn_config")
    @classmethod
    def _known_settings(
        cls, config: dict[str, float] | None, info: ValidationInfo
    ) -> dict[str, float] | None:
        from backends.engine.losses import check_config

        loss_fn = info.data.get("loss_fn")
        if loss_fn and (problem := check_config(loss_fn, config or {})):
            raise ValueError(problem)
        return config

    @field_validator("num_substeps")
    @classmethod
    def _a_group_each(cls, num_substeps: int, info: ValidationInfo) -> int:
        groups = info.data.get("batch_size")
        if groups is not None and num_substeps > groups:
            raise ValueError(
                f"is {num_substeps}, but a batch has {groups} groups to cut; lower it, or raise "
                "batch_size"
            )
        return num_substeps

    def stage(self) -> Stage:
        """Who leads the rollouts."""
        if self.agent_import_path is not None:
            return AgentStage(self.agent_import_path)
        return EnvironmentStage(self.environment, self.system_prompt, self.user_template)

    def limits(self) -> Limits:
        """How many rollouts at once, and how much each may take."""
        return Limits(
            self.num_samples,
            self.n_concurrent,
            self.max_turns,
            self.max_retries,
            self.rollout_timeout_seconds,
        )
