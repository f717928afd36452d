"""Where a rollout takes place: it opens the conversation, answers each turn, and says when to end.

class Echo(Environment):
    async def start(self) -> list[Message]:
        return [{"role": "user", "content": self.row["word"]}]

    async def step(self, message: Message) -> Step:
        return Step(reward=float(message["content"] == self.row["word"]), done=True)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict

from algorithms.data.shapes import Message, Row
from algorithms.sections import OneOf, Section, with_params
from backends.errors import Problem
from backends.registry import Registry

Scorer = Callable[[str], Awaitable[float]]
"""What an answer to the row is worth, by the verifier of the algorithm's parameters."""


class EnvironmentConfig(BaseModel):
    """Base of every environment's `params:` block."""

    model_config = ConfigDict(extra="forbid")


@dataclass(frozen=True, slots=True)
class Step:
    """An environment's answer to an assistant turn.

    `messages` are what the model is shown next; `reward` is added to the rollout's; `metrics` are
    added up over the rollout, averaged over rollouts and logged under `env/`.
    """

    messages: Sequence[Message] = ()
    reward: float = 0.0
    done: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)


class Environment(ABC):
    """One rollout's world, made for one row; `seed` decides whatever it draws.

    What it raises is an error of the rollout, which is tried again and then ends the run; it never
    counts as a reward. `score` is the verifier's word on an answer; an environment that knows its
    own reward has no need of it.
    """

    Config: ClassVar[type[EnvironmentConfig]] = EnvironmentConfig
    min_turns: ClassVar[int] = 1
    """With fewer assistant turns than these it makes no sense."""
    own_reward: ClassVar[bool] = False
    """Whether it never asks the verifier, whose demands on a row then do not matter."""

    def __init__(self, cfg: Any, row: Row, seed: int, score: Scorer) -> None:
        self.cfg = cfg
        self.row = row
        self.seed = seed
        self.score = score

    @classmethod
    def check_row(cls, row: Row, place: str) -> Problem | None:
        """What it has against a row, found before any compute starts."""
        return None

    @classmethod
    def code(cls, cfg: Any) -> list[object]:
        """Whose source decides what happens here: other code, other rollouts."""
        return [cls]

    @property
    def tools(self) -> list[Any] | None:
        """The tools that the chat template shows the model; None without any."""
        return None

    @abstractmethod
    async def start(self) -> list[Message] | str:
        """The messages that the model answers first, or plain text to go on from, for one turn."""

    @abstractmethod
    async def step(self, message: Message) -> Step:
        """What follows from an assistant turn; its content is what the model said, to the letter.

        A turn that was cut off at max_tokens comes here too, and ends the rollout in any case.
        """


ENVIRONMENTS: Registry[type[Environment]] = Registry(
    "environment",
    "flowtune.environments",
    {
        "single_turn": "algorithms.rollouts.single_turn:SingleTurn",
        "tools": "algorithms.rollouts.tools:Tools",
        "guess_number": "algorithms.rollouts.guess_number:GuessNumber",
    },
    config=("Config", EnvironmentConfig),
    bases=(Environment,),
)


class EnvironmentSection(Section):
    """Where rollouts take place."""

    kind: str
    params: EnvironmentConfig

    def build(self, row: Row, seed: int, score: Scorer) -> Environment:
        """The environment of one rollout."""
        return ENVIRONMENTS[self.kind](self.params, row, seed, score)


EnvironmentField = Annotated[
    EnvironmentSection,
    OneOf(ENVIRONMENTS, with_params(EnvironmentSection, lambda environment: environment.Config)),
]
