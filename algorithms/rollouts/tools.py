"""The model may call tools, Python functions, before it answers; the verifier scores the answer.

Calls are read as Hermes and Qwen write them: `<tool_call>{"name": …, "arguments": …}</tool_call>`.
A call that is malformed, or that a tool refuses by raising, is answered with what is wrong with it:
learning to call is part of the task.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any, ClassVar

from pydantic import Field, field_validator

from algorithms.data.shapes import Message, Row, prompt_problem, read_prompt
from algorithms.imports import import_path
from algorithms.rewards.structured import ToolCall, calls_in
from algorithms.rollouts.environment import Environment, EnvironmentConfig, Step
from backends.errors import Problem, UserError


class ToolsConfig(EnvironmentConfig):
    """Which tools there are."""

    tools: list[str] = Field(
        min_length=1,
        description="module:function of each tool. Its name, type hints and docstring (with an "
        "Args: section) are what the chat template shows the model; it may be async.",
        examples=[["my_tools:search"]],
    )

    @field_validator("tools")
    @classmethod
    def _functions(cls, paths: list[str]) -> list[str]:
        names: set[str] = set()
        for path in paths:
            tool = import_path(path)
            if not inspect.isroutine(tool):
                raise ValueError(f"{path} is no function: name one that the model may call")
            if tool.__name__ in names:
                raise ValueError(f"two tools are called {tool.__name__}: rename one")
            names.add(tool.__name__)
        return paths


class Tools(Environment):
    """The model calls tools as often as it likes, and then answers; the verifier scores that."""

    Config: ClassVar[type[EnvironmentConfig]] = ToolsConfig
    min_turns: ClassVar[int] = 2

    @classmethod
    def check_row(cls, row: Row, place: str) -> Problem | None:
        """A row needs messages; its answer may be left out."""
        problem = prompt_problem(row, place)
        if problem is None and isinstance(read_prompt(row), str):
            return Problem(place, "a plain prompt has no place for tools", "give messages")
        return problem

    @classmethod
    def code(cls, cfg: ToolsConfig) -> list[object]:
        """The tools too."""
        return [cls, *map(import_path, cfg.tools)]

    @property
    def tools(self) -> list[Any]:
        """The schema of each tool. Raises UserError for one that does not describe itself."""
        return [tool_schema(path) for path in self.cfg.tools]

    async def start(self) -> list[Message]:
        """The row's turns up to the answer."""
        messages = read_prompt(self.row)
        assert not isinstance(messages, str)
        return messages

    async def step(self, message: Message) -> Step:
        """The answers of the tools that were called, or the score of a turn that calls none."""
        content = message["content"]
        if "<tool_call>" not in content:
            return Step(reward=await self.score(content), done=True, metrics=_counts(0, 0))
        try:
            calls = calls_in(content)
        except ValueError as error:
            answer = {"role": "tool", "content": f"error: not a tool call: {error}"}
            return Step([answer], metrics=_counts(1, 1))
        answers, failed = [], 0
        for call in calls:
            try:
                text = await self._call(call)
            except Exception as error:  # noqa: BLE001  (the model is told, and can do better)
                text, failed = f"error: {type(error).__name__}: {error}", failed + 1
            answers.append({"role": "tool", "name": call.name, "content": text})
        return Step(answers, metrics=_counts(len(calls), failed))

    async def _call(self, call: ToolCall) -> str:
        functions: dict[str, Callable[..., Any]] = {
            function.__name__: function for function in map(import_path, self.cfg.tools)
        }
        if call.name not in functions:
            raise KeyError(f"there is no tool {call.name}; there are {', '.join(functions)}")
        function = functions[call.name]
        if inspect.iscoroutinefunction(function):
            result = await function(**call.arguments)
        else:
            result = await asyncio.to_thread(function, **call.arguments)
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)


def _counts(calls: int, failed: int) -> dict[str, float]:
    return {"tool_calls": float(calls), "tool_calls_failed": float(failed)}


@lru_cache(maxsize=256)
def tool_schema(path: str) -> dict[str, Any]:
    """What the chat template shows of a tool. Raises UserError if it is not described."""
    from transformers.utils import get_json_schema

    try:
        schema: dict[str, Any] = get_json_schema(import_path(path))
    except Exception as error:
        where = "algorithm.params.environment.params.tools"
        what = f"{path} does not say what it does: {error}"
        remedy = "give it type hints and a docstring with an Args: section"
        raise UserError(Problem(where, what, remedy)) from error
    return schema
