"""Who leads a rollout: an environment turn by turn, or an agent's own code.

An agent is an async function, named by its import path:

    async def agent(chat: ChatClient, row: Row) -> float | None:
        answer = await chat.reply([{"role": "user", "content": row["question"]}])
        return float(answer["content"] == row["answer"])

It asks the policy through `chat.reply(messages, tools)`, as often as it likes up to max_turns, and
returns the reward of the rollout; None lets the verifier score the last reply.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from algorithms.data.shapes import Message, Row
from algorithms.imports import import_path
from algorithms.rollouts.chat import ChatClient, RolloutOver
from algorithms.rollouts.environment import ENVIRONMENTS, Environment, EnvironmentSection, Scorer

Agent = Callable[[ChatClient, Row], Awaitable[float | None]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a rollout went; `end` says why it is over: stop, length, or max_turns."""

    messages: list[Message]
    reward: float
    end: str
    metrics: Mapping[str, float] = field(default_factory=dict)


class Scene(Protocol):
    """One rollout about to begin."""

    @property
    def opening(self) -> tuple[list[Message] | str, list[Any] | None] | None:
        """The messages and tools that the policy sees first; None if that is not known yet."""
        ...

    async def play(self, chat: ChatClient) -> Outcome:
        """The rollout, to its end."""
        ...


class Stage(Protocol):
    """Makes the scenes of a run."""

    @property
    def parameter(self) -> str:
        """The parameter that it comes from, which is at fault when a scene raises."""
        ...

    @property
    def name(self) -> str:
        """What stands there."""
        ...

    def code(self) -> list[object]:
        """Whose source decides what happens in its scenes."""
        ...

    async def open(self, row: Row, seed: int, score: Scorer) -> Scene:
        """The scene of one rollout."""
        ...


@dataclass(frozen=True)
class EnvironmentStage:
    """Rollouts in an environment, whose first messages take the run's prompt and template."""

    section: EnvironmentSection
    system_prompt: str | None = None
    user_template: str | None = None
    parameter: str = "environment"

    @property
    def name(self) -> str:
        """Its kind."""
        return self.section.kind

    def code(self) -> list[object]:
        """The environment's."""
        return ENVIRONMENTS[self.section.kind].code(self.section.params)

    async def open(self, row: Row, seed: int, score: Scorer) -> Scene:
        """An environment that has started."""
        environment = self.section.build(row, seed, score)
        messages = await environment.start()
        if not isinstance(messages, str):
            messages = dressed(messages, self.system_prompt, self.user_template)
        return EnvironmentScene(environment, messages)


def dressed(
    messages: list[Message], system_prompt: str | None, user_template: str | None
) -> list[Message]:
    """Messages with a system turn before them, and the last user turn put into the template."""
    messages = list(messages)
    users = [index for index, turn in enumerate(messages) if turn["role"] == "user"]
    if user_template is not None and users:
        asked = messages[users[-1]]
        content = user_template.replace("{prompt}", str(asked["content"]))
        messages[users[-1]] = {**asked, "content": content}
    if system_prompt is not None and messages[0]["role"] not in ("system", "developer"):
        messages.insert(0, {"role": "system", "content": system_prompt})
    return messages


class EnvironmentScene:
    """The policy and an environment, turn by turn."""

    def __init__(self, environment: Environment, messages: list[Message] | str) -> None:
        self._environment = environment
        self._messages = messages

    @property
    def opening(self) -> tuple[list[Message] | str, list[Any] | None]:
        """What the environment starts with."""
        return self._messages, self._environment.tools

    async def play(self, chat: ChatClient) -> Outcome:
        """Until the environment is done, a turn is cut off, or there have been max_turns."""
        messages, tools = self.opening
        metrics: dict[str, float] = {}
        reward, end = 0.0, None
        while end is None:
            try:
                message = await chat.reply(messages, tools)
            except RolloutOver as over:
                end = over.end
                break
            step = await self._environment.step(message)
            reward += step.reward
            for name, value in step.metrics.items():
                metrics[name] = metrics.get(name, 0.0) + value
            messages = [*chat.messages, *step.messages]
            if step.done or chat.cut:
                end = "length" if chat.cut else "stop"
        assert not isinstance(messages, str)
        return Outcome(messages, reward, end, metrics)


@dataclass(frozen=True)
class AgentStage:
    """Rollouts led by an agent."""

    path: str
    parameter: str = "agent_import_path"

    @property
    def name(self) -> str:
        """Where the agent is found."""
        return self.path

    def code(self) -> list[object]:
        """The agent's."""
        return [import_path(self.path)]

    async def open(self, row: Row, seed: int, score: Scorer) -> Scene:
        """The agent before its first word."""
        return AgentScene(import_path(self.path), row, score)


@dataclass(frozen=True)
class AgentScene:
    """An agent with its row."""

    agent: Agent
    row: Row
    score: Scorer
    opening: None = None

    async def play(self, chat: ChatClient) -> Outcome:
        """Until the agent returns, or asks for more than max_turns."""
        reward = None
        try:
            reward = await self.agent(chat, self.row)
            end = "length" if chat.cut else "stop"
        except RolloutOver as over:
            end = over.end
        if not chat.turns:
            raise ValueError("the agent never asked the policy (await chat.reply(messages))")
        if reward is None:
            reward = await self.score(str(chat.messages[-1]["content"]))
        return Outcome(chat.messages, float(reward), end)
