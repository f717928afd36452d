"""What a row may look like, with the names that TRL gives the shapes.

    {"messages": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]}
    {"prompt": "1+1=", "completion": "2"}                  (strings, or two lists of messages)
    {"prompt": "1+1=", "chosen": "2", "rejected": "3"}     (strings, or three lists of messages)
    {"text": "1+1=2"}                                      (learned whole; for sft)
    {"input_ids": [5, 6, 7], "weights": [0, 0.5, 1]}       (tokens as they are; for sft)

A chat row may hold `tools` (a list, or JSON text of one) and `chat_template_kwargs`, which are
handed to the chat template. Rows to be learned from may say how much they count: `weight` of a row
(1 if left out) times `weight` of an assistant turn (1), for which `train: false` stands for 0.
Further columns are kept.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from backends.errors import Problem

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Row = dict[str, Any]
Message = dict[str, Any]

SHAPES = frozenset({"messages", "prompt", "completion", "chosen", "rejected", "input_ids"})
"""The columns that tell what shape a row has; without any of them it may be `text`."""

UNPAIRED = frozenset({"prompt", "completion", "label"})
"""TRL's unpaired preference: beside further columns a label is one like any."""

ROLES = ("system", "developer", "user", "assistant", "tool")
EXAMPLE_ROW = (
    '{"messages": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]}'
)
EXAMPLE_PAIR = '{"prompt": "1+1=", "chosen": "2", "rejected": "3"}'


@dataclass(frozen=True)
class Conversation:
    """A chat row; assistant turns before `first_supervised` are context only."""

    messages: list[Message]
    first_supervised: int
    tools: list[Any] | None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PlainText:
    """A prompt and its completion as text, without a chat template.

    An empty prompt is none: the completion is the whole text.
    """

    prompt: str
    completion: str


@dataclass(frozen=True)
class Preference:
    """Two answers to one prompt, the better first: all three text, or all three turns."""

    prompt: list[Message] | str
    chosen: list[Message] | str
    rejected: list[Message] | str
    tools: list[Any] | None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


def read_example(row: Row) -> Conversation | PlainText:
    """A row that `row_problem` has nothing against, in the shape it has.

    Of a prompt and completion given as messages only the completion's turns are supervised.
    """
    if is_text(row):
        return PlainText("", row["text"])
    tools, template_kwargs = read_tools(row), read_template_kwargs(row)
    if "messages" in row:
        return Conversation(row["messages"], 0, tools, template_kwargs)
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str):
        return PlainText(prompt, completion)
    return Conversation([*prompt, *completion], len(prompt), tools, template_kwargs)


def is_text(row: Row) -> bool:
    """Whether a row is text without a prompt; beside other shapes `text` is a column like any."""
    return "text" in row and not SHAPES & row.keys()


def read_tools(row: Row) -> list[Any] | None:
    """The tools of a row that nothing is wrong with; None for a list of none, as in TRL."""
    tools = row.get("tools")
    return (json.loads(tools) if isinstance(tools, str) else tools) or None


def read_template_kwargs(row: Row) -> Mapping[str, Any]:
    """What a row that nothing is wrong with gives its chat template beside messages and tools."""
    return row.get("chat_template_kwargs") or {}


def read_tokens(row: Row) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """The tokens and weights, both [N + 1], of a row of `input_ids` that nothing is wrong with.

    Without `weights` every token counts; the first is never predicted.
    """
    import numpy as np

    tokens = np.asarray(row["input_ids"], np.int64)
    given = row.get("weights")
    weights = np.ones(len(tokens)) if given is None else np.asarray(given)
    return tokens, (row_weight(row) * weights).astype(np.float32)


def row_weight(row: Row) -> float:
    """How much a row counts that nothing is wrong with."""
    return float(row.get("weight", 1.0))


def turn_weight(turn: Message) -> float:
    """How much an assistant turn counts that nothing is wrong with."""
    return float(turn.get("weight", 1.0)) if turn.get("train", True) else 0.0


def expected_answer(row: Row) -> str:
    """What the last assistant turn, or the completion, says."""
    example = read_example(row)
    if isinstance(example, PlainText):
        return example.completion
    return str(example.messages[last_assistant(example.messages)].get("content") or "")


def read_prompt(row: Row) -> list[Message] | str:
    """What a row that `prompt_problem` has nothing against asks: turns, or text without a template.

    An assistant turn at the end is the answer, and no part of it.
    """
    if "messages" in row:
        messages: list[Message] = row["messages"]
        return messages[:-1] if messages[-1]["role"] == "assistant" else messages
    prompt: list[Message] | str = row["prompt"]
    return prompt


def read_preference(row: Row) -> Preference:
    """A row that `preference_problem` has nothing against: its prompt and its two answers.

    Where chosen and rejected are whole conversations or texts (no prompt, or only its text beside
    conversations), the prompt is what both begin with, as in TRL.
    """
    prompt, chosen, rejected = row.get("prompt"), row["chosen"], row["rejected"]
    if prompt is None or (isinstance(chosen, list) and not isinstance(prompt, list)):
        shared = _shared(chosen, rejected)
        prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
    return Preference(prompt, chosen, rejected, read_tools(row), read_template_kwargs(row))


def _shared(chosen: Sequence[Any], rejected: Sequence[Any]) -> int:
    """How many turns or characters both begin with; the space before an answer belongs to that."""
    pairs = enumerate(zip(chosen, rejected, strict=False))
    shared = next((i for i, (a, b) in pairs if a != b), min(len(chosen), len(rejected)))
    return shared - 1 if shared and chosen[shared - 1] == " " else shared


def last_assistant(messages: list[Message]) -> int:
    """The index of the last assistant turn; -1 if there is none."""
    return max((i for i, turn in enumerate(messages) if turn["role"] == "assistant"), default=-1)


def row_problem(row: Row, place: str) -> Problem | None:
    """What is wrong with a row to be learned from: its shape, its turns. None if nothing."""
    if problem := _template_problem(row, place):
        return problem
    if "messages" in row:
        if "prompt" in row or "completion" in row:
            return Problem(place, "has messages and prompt/completion", "keep one of the two")
        return _messages_problem(row["messages"], "messages", place) or _turns_problem(
            row["messages"], 0, place
        )
    missing = [name for name in ("prompt", "completion") if name not in row]
    if len(missing) == 2:
        keys = ", ".join(map(repr, row)) or "nothing"
        return Problem(
            place,
            f"has neither messages nor prompt and completion, but {keys}",
            "write it as messages, turns with role and content"
            if "conversations" in row
            else f"a row looks like {EXAMPLE_ROW}",
        )
    if missing and {"chosen", "rejected"} <= row.keys():
        return Problem(place, "is a preference, of two answers", "take kind: dpo for these")
    if missing:
        return Problem(place, f"{missing[0]} is missing", "give both prompt and completion")
    return _pair_problem(row["prompt"], row["completion"], place)


def scored_problem(row: Row, place: str) -> Problem | None:
    """What is wrong with a row whose tokens are to be likely: as `row_problem`, or text.

    None if nothing.
    """
    if is_text(row):
        text = row["text"]
        good = isinstance(text, str) and text
        return None if good else Problem(place, f"text is {shown(text)}", "give the text to learn")
    if row.keys() == UNPAIRED and str(row["label"]).lower() == "false":  # csv has it as text
        what = "label is false: an unpaired preference, and no example to learn from"
        remedy = "keep the others by a filter, or rename the column if it says something else"
        return Problem(place, what, remedy)
    return row_problem(row, place)


def supervised_problem(row: Row, place: str) -> Problem | None:
    """What is wrong with a row to be learned from token by token: shape and weights.

    None if nothing.
    """
    if problem := _tokens_problem(row, place) if "input_ids" in row else scored_problem(row, place):
        return problem
    if problem := _weight_problem(row, "", place):
        return problem
    for name in ("messages", "prompt", "completion"):
        turns = row.get(name)
        for index, turn in enumerate(turns if isinstance(turns, list) else []):
            if problem := _weight_problem(turn, f"{name}[{index}].", place):
                return problem
    return None


def prompt_problem(row: Row, place: str) -> Problem | None:
    """What is wrong with a row to be answered: as in `row_problem`, but the answer may be left out.

    None if nothing.
    """
    if problem := _template_problem(row, place):
        return problem
    if "messages" in row and "prompt" not in row:
        messages = row["messages"]
        problem = _messages_problem(messages, "messages", place)
        if problem is None and not any(turn["role"] == "user" for turn in messages):
            problem = Problem(place, "has no user turn to answer", f"as in {EXAMPLE_ROW}")
        return problem
    if "prompt" in row and not {"messages", "completion"} & row.keys():
        prompt = row["prompt"]
        if isinstance(prompt, str):
            return None if prompt else Problem(place, "prompt is empty", "give the question")
        return _messages_problem(prompt, "prompt", place) or _asking_problem(prompt, place)
    return row_problem(row, place)


def preference_problem(row: Row, place: str) -> Problem | None:
    """What is wrong with a row to learn a preference from. None if nothing."""
    if problem := _template_problem(row, place):
        return problem
    missing = [name for name in ("chosen", "rejected") if name not in row]
    if len(missing) == 2 and {"completion", "label"} <= row.keys():
        what = "has a completion with a label: an unpaired preference, which is not read"
        return Problem(place, what, "pair it with an answer of the other label to its prompt")
    if missing:
        keys = ", ".join(map(repr, row)) or "nothing"
        what = f"has no {' and no '.join(missing)}, but {keys}"
        return Problem(place, what, f"a row looks like {EXAMPLE_PAIR}")
    chosen, rejected, prompt = row["chosen"], row["rejected"], row.get("prompt")
    if isinstance(chosen, str) and isinstance(rejected, str):
        problem = _text_prompt_problem(prompt, chosen, rejected, place)
    elif isinstance(chosen, str) or isinstance(rejected, str):
        kinds = f"a {type(chosen).__name__} and a {type(rejected).__name__}"
        what = f"chosen and rejected are {kinds}"
        problem = Problem(place, what, "two strings, or two lists of messages")
    else:
        problem = (
            _messages_problem(chosen, "chosen", place)
            or _messages_problem(rejected, "rejected", place)
            or _answers_problem(prompt, chosen, rejected, place)
        )
    if problem is None and chosen == rejected:
        problem = Problem(
            place, "chosen and rejected are the same: neither is better", "remove the row"
        )
    return problem


def _text_prompt_problem(prompt: Any, chosen: str, rejected: str, place: str) -> Problem | None:
    if prompt is None:
        if chosen == rejected or _shared(chosen, rejected):
            return None
        what = "prompt is missing, and chosen and rejected do not begin alike"
        return Problem(place, what, "give the text that both answers follow")
    if not isinstance(prompt, str):
        return Problem(
            place,
            f"prompt is a {type(prompt).__name__}, but chosen and rejected are strings",
            "three strings, or three lists of messages",
        )
    if not prompt:
        return Problem(place, "prompt is empty", "give the text that both answers follow")
    return None


def _answers_problem(
    prompt: Any, chosen: list[Message], rejected: list[Message], place: str
) -> Problem | None:
    """What is wrong with answers given as turns, each of which has been looked at."""
    if isinstance(prompt, str | None):
        shared = _shared(chosen, rejected)
        if shared == 0:
            return Problem(
                place,
                "has no prompt of turns: chosen and rejected do not begin with the same one",
                "give the prompt's turns as prompt, or at the head of both",
            )
        if chosen == rejected:
            return None  # said of every shape alike
        prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
    elif problem := _messages_problem(prompt, "prompt", place):
        return problem
    elif prompt == chosen[: len(prompt)] == rejected[: len(prompt)]:
        what = "chosen and rejected repeat the turns of prompt"
        return Problem(place, what, "leave prompt out, or the turns in these")
    for name, answer in (("chosen", chosen), ("rejected", rejected)):
        if last_assistant(answer) < 0:
            return Problem(
                place,
                f"{name} has no assistant turn behind the prompt",
                'add a turn {"role": "assistant", "content": …} or remove the row',
            )
    return _opening_problem([*prompt, *chosen], place)


def _pair_problem(prompt: Any, completion: Any, place: str) -> Problem | None:
    if isinstance(prompt, str) and isinstance(completion, str):
        if not prompt:
            return Problem(place, "prompt is empty", "give the text that the completion follows")
        return None
    if isinstance(prompt, str) or isinstance(completion, str):
        kinds = f"a {type(prompt).__name__} and a {type(completion).__name__}"
        return Problem(
            place, f"prompt and completion are {kinds}", "two strings, or two lists of messages"
        )
    return (
        _messages_problem(prompt, "prompt", place)
        or _messages_problem(completion, "completion", place)
        or _turns_problem([*prompt, *completion], len(prompt), place)
    )


def _messages_problem(messages: Any, name: str, place: str) -> Problem | None:
    if not isinstance(messages, list) or not messages:
        return Problem(
            place, f"{name} is {shown(messages)}", f"a list of turns, as in {EXAMPLE_ROW}"
        )
    for index, turn in enumerate(messages):
        where = f"{name}[{index}]"
        if not isinstance(turn, dict):
            return Problem(
                place,
                f"{where} is {shown(turn)}",
                'a turn is an object with "role" and "content"',
            )
        role = turn.get("role")
        if role not in ROLES:
            near = difflib.get_close_matches(str(role), ROLES, n=1)
            what = f"{where}.role is {shown(role)}" if "role" in turn else f"{where} has no role"
            remedy = f"did you mean {near[0]!r}?" if near else f"roles are {', '.join(ROLES)}"
            return Problem(place, what, remedy)
        content = turn.get("content")
        if not isinstance(content, str) and not (content is None and turn.get("tool_calls")):
            what = (
                f"{where}.content is {shown(content)}"
                if "content" in turn
                else f"{where} has no content"
            )
            return Problem(place, what, "content is a string")
        calls = turn.get("tool_calls")
        if calls is not None and not _all_objects(calls):
            what = f"{where}.tool_calls is {shown(calls)}"
            return Problem(place, what, "give a list of objects")
    return None


def _asking_problem(prompt: list[Message], place: str) -> Problem | None:
    """What is wrong with turns that an answer is to follow."""
    role = prompt[-1]["role"]
    if role in ("user", "tool"):
        return None
    what = f"prompt ends with a turn of {role}, which asks for no answer"
    return Problem(place, what, "end it with a user turn")


def _template_problem(row: Row, place: str) -> Problem | None:
    """What is wrong with what a row has for its chat template beside messages."""
    tools = row.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError:
            tools = False
    if tools is not None and not _all_objects(tools):
        what = f"tools is {shown(row['tools'])}"
        return Problem(place, what, "give a list of objects, or JSON text of one")
    kwargs = row.get("chat_template_kwargs")
    if kwargs is not None and not isinstance(kwargs, dict):
        what = f"chat_template_kwargs is {shown(kwargs)}"
        return Problem(place, what, 'give an object, as {"enable_thinking": false}')
    return None


def _all_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _tokens_problem(row: Row, place: str) -> Problem | None:
    ids, weights = row["input_ids"], row.get("weights")
    if not isinstance(ids, list) or len(ids) < 2 or not all(map(_is_token, ids)):
        what = f"input_ids is {shown(ids)}"
        return Problem(place, what, "give two token numbers or more, from 0 on")
    if weights is None:
        return None
    if not isinstance(weights, list) or not all(map(_is_weight, weights)):
        return Problem(place, f"weights is {shown(weights)}", "give numbers from 0 on")
    if len(weights) != len(ids):
        what = f"has {len(ids)} input_ids and {len(weights)} weights"
        return Problem(place, what, "give each token its weight")
    return None


def _weight_problem(item: dict[str, Any], where: str, place: str) -> Problem | None:
    """What is wrong with the `weight` of a row, or with that and `train` of a turn."""
    if "weight" in item and not _is_weight(item["weight"]):
        what = f"{where}weight is {shown(item['weight'])}"
        return Problem(place, what, "give a number from 0 on; 1 is what others count")
    if where and not isinstance(item.get("train", True), bool):
        return Problem(place, f"{where}train is {shown(item['train'])}", "give true or false")
    return None


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_weight(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value) and value >= 0


def _turns_problem(messages: list[Message], first_supervised: int, place: str) -> Problem | None:
    roles = [turn["role"] for turn in messages]
    if "assistant" not in roles[first_supervised:]:
        part = "completion" if first_supervised else "messages"
        return Problem(
            place,
            f"{part} has no assistant turn, so there is nothing to learn from",
            'add a turn {"role": "assistant", "content": …} or remove the row',
        )
    return _opening_problem(messages, place)


def _opening_problem(messages: list[Message], place: str) -> Problem | None:
    roles = [turn["role"] for turn in messages]
    opening = next(role for role in roles if role not in ("system", "developer"))
    if opening == "assistant":
        return Problem(
            place, "starts with an assistant turn: it answers nothing", "put a user turn before it"
        )
    return None


def shown(value: Any) -> str:
    """A value as a message shows it: as JSON, at most 60 characters of it."""
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= 60 else text[:57] + "…"
