"""Rollouts on a page: which are shown, and each conversation turn by turn.

What a model said stands in fences, so that nothing of it is taken for markdown.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from algorithms.base import Transcript
from tasks.report_text import cell, fenced, number, table

MOST_TURNS = 8
MOST_OPEN_CHARACTERS = 400
"""A longer turn is folded."""


def rollout_sections(rollouts: Mapping[int, Sequence[Transcript]]) -> str:
    """A table of the rollouts that are shown of each step, then their conversations."""
    shown = [
        (step, which, transcript)
        for step, transcripts in rollouts.items()
        for which, transcript in _telling(transcripts).items()
    ]
    if not shown:
        return ""
    lines = [
        (
            step,
            which,
            number(transcript.reward),
            "not trained on" if transcript.advantage is None else number(transcript.advantage),
            transcript.group,
            cell(transcript.end),
            _answers(transcript),
            cell(_turn_text(transcript.messages[-1])) if transcript.messages else "",
        )
        for step, which, transcript in shown
    ]
    head = ("step", "which", "reward", "advantage", "group", "ended", "answers", "last message")
    ends = [_ends(step, transcripts) for step, transcripts in rollouts.items() if transcripts]
    conversations = [_conversation(*one) for one in shown]
    return "\n\n".join(["## Rollouts", *ends, table(head, lines), *conversations])


def _telling(transcripts: Sequence[Transcript]) -> dict[str, Transcript]:
    """The worst, a typical and the best rollout, each once; the first if rewards are all alike."""
    ordered = sorted(transcripts, key=lambda transcript: transcript.reward)
    if not ordered:
        return {}
    if ordered[0].reward == ordered[-1].reward:
        return {"all alike": ordered[0]}
    worst, *between, best = ordered
    typical = {"typical": between[(len(between) - 1) // 2]} if between else {}
    return {"worst": worst, **typical, "best": best}


def _ends(step: int, transcripts: Sequence[Transcript]) -> str:
    """How the rollouts of a step ended, the most frequent end first."""
    counts = Counter(transcript.end for transcript in transcripts).most_common()
    ends = ", ".join(f"{count} {cell(end)}" for end, count in counts)
    return f"Step {step}: rollouts: {len(transcripts)}; ended by: {ends}."


def _answers(transcript: Transcript) -> int:
    return sum(message.get("role") == "assistant" for message in transcript.messages)


def _conversation(step: int, which: str, transcript: Transcript) -> str:
    messages = transcript.messages
    left_out = len(messages) - MOST_TURNS
    turns = [_turn(message) for message in messages]
    if left_out > 0:
        half = MOST_TURNS // 2
        turns[half:-half] = [f"… ({left_out} turns are left out)"]
    title = f"### Step {step}, {which}: reward {number(transcript.reward)}"
    return "\n\n".join([title, *turns])


def _turn(message: Mapping[str, Any]) -> str:
    """Who spoke, and the text as it is; a long one folded, and cut in its middle."""
    role, text = cell(str(message.get("role", ""))), _turn_text(message)
    body = fenced(text)
    if len(text) <= MOST_OPEN_CHARACTERS:
        return f"**{role}**\n\n{body}"
    summary = f"<b>{escape(role)}</b>: {len(text):,} characters"
    return f"<details><summary>{summary}</summary>\n\n{body}\n\n</details>"


def _turn_text(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    calls = [json.dumps(call, ensure_ascii=False) for call in message.get("tool_calls") or []]
    return "\n".join([text, *calls] if text else calls)
