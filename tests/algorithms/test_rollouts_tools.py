"""Rollouts with tools: what the model is shown, what a call gets for an answer, what is trained."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from pydantic import ValidationError

from algorithms.rollouts.scenes import EnvironmentStage
from algorithms.rollouts.tools import Tools, ToolsConfig, tool_schema
from algorithms.rollouts.trajectory import segments
from backends.errors import UserError
from tests.algorithms.rollout_parts import Scripted, placed, runner, section
from tests.algorithms.samples import byte_tokenizer

# As Hermes' and Qwen's, in short: tools first, and a tool's answer is a turn of its own.
HERMES = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
END = "<|im_end|>"
ROW = {"messages": [{"role": "user", "content": "17 + 4?"}, {"role": "assistant", "content": "21"}]}


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


async def lookup(word: str) -> dict[str, str]:
    """Look a word up.

    Args:
        word: What to look up.
    """
    return {"word": word}


def undescribed(a, b):  # type: ignore[no-untyped-def]
    return a


ADD, LOOKUP = f"{__name__}:add", f"{__name__}:lookup"


def call(text: str) -> str:
    return f"<tool_call>\n{text}\n</tool_call>"


async def right(row: dict[str, Any], answer: str) -> float:
    return float(answer == "21")


async def play(*answers: str) -> Any:
    """The rollout in which the model says these, one a turn."""
    tokenizer = byte_tokenizer(HERMES)
    client = Scripted(
        tokenizer, lambda prompt, _: answers[prompt.count("<|im_start|>assistant") - 1] + END, -0.5
    )
    stage = EnvironmentStage(section(Tools, tools=[ADD, LOOKUP]))
    rolling = runner(stage, tokenizer, score=lambda row, place: partial(right, row), max_tokens=500)
    (group,) = await rolling.run(client, 0, placed([ROW]))
    return group[0], client


async def test_the_model_calls_and_then_answers() -> None:
    calls = call('{"name": "add", "arguments": {"a": 17, "b": 4}}') + call(
        '{"name": "lookup", "arguments": {"word": "sum"}}'
    )
    rollout, client = await play(calls, "21")
    assert rollout.reward == 1.0
    assert rollout.metrics == {"tool_calls": 2.0, "tool_calls_failed": 0.0}
    answers = [m["content"] for m in rollout.messages if m["role"] == "tool"]
    assert answers == ["21", '{"word": "sum"}']
    shown = client.requests[0][0]
    assert '"name": "add"' in shown
    assert '"description": "The first."' in shown
    assert "21" not in shown, "the row's answer is not part of the prompt"
    (merged,) = segments(rollout.turns)
    tokenizer = client.tokenizer
    assert tokenizer.decode(merged.tokens[merged.mask].tolist()) == f"{calls}{END}21{END}"


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (call('{"name": "add", "arguments": {"a": 17}}'), "error: TypeError"),
        (call('{"name": "sub", "arguments": {}}'), "there is no tool sub; there are add, lookup"),
        (call("add(17, 4)"), "error: not a tool call"),
    ],
)
async def test_a_bad_call_is_answered_with_what_is_wrong(said: str, told: str) -> None:
    rollout, _ = await play(said, "21")
    assert rollout.reward == 1.0
    assert rollout.metrics == {"tool_calls": 1.0, "tool_calls_failed": 1.0}
    assert told in rollout.messages[2]["content"]


async def test_the_first_turn_without_a_call_is_the_answer() -> None:
    rollout, _ = await play('{"name": "add"}')
    assert (rollout.reward, len(rollout.turns)) == (0.0, 1)


@pytest.mark.parametrize(
    ("tools", "says"),
    [
        ([f"{__name__}:gone"], "has no 'gone'"),
        ([f"{__name__}:HERMES"], "is no function"),
        ([ADD, ADD], "two tools are called add"),
        ([], "at least 1 item"),
    ],
)
def test_tools_that_can_not_be_called_are_refused(tools: list[str], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        ToolsConfig(tools=tools)


def test_a_tool_has_to_say_what_it_does() -> None:
    with pytest.raises(UserError, match="give it type hints and a docstring"):
        tool_schema(f"{__name__}:undescribed")


def test_a_plain_prompt_has_no_place_for_tools() -> None:
    assert Tools.check_row(ROW, "x") is None
    assert Tools.check_row({"prompt": "1+1="}, "x") is not None
