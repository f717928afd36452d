"""A verifier that asks a model: it reads question and answer, and gives a grade."""

from __future__ import annotations

import asyncio
import string
import zlib
from typing import TYPE_CHECKING, ClassVar

from pydantic import BaseModel, Field, field_validator

from algorithms.data.rendering import chat_prompt, stop_tokens
from algorithms.data.shapes import Row, last_assistant
from algorithms.rewards.text import compiled
from algorithms.rewards.verifiers import AnswerConfig
from backends.base import Backend, SamplingClient, Tokenizer
from backends.errors import Problem, UserError
from backends.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from tinker import types as tinker_types

WORDS = ("question", "answer", "expected")
PROMPT = """\
Grade the answer to a question.

Question: {question}
Right answer: {expected}
Given answer: {answer}

Say in a sentence what is right or wrong about the given answer. Then end with a line
Grade: N
where N is a whole number from 0 (wrong) to 10 (right)."""


class JudgeConfig(AnswerConfig):
    """Which model judges, what it is asked, and how its grade is read."""

    timeout_seconds: float = Field(
        600, gt=0, description="Longest time that one score may take; longer is an error."
    )
    model: str | None = Field(
        None, description="The judge: a hub name or folder; left out, the base of the model here."
    )
    weights: str | None = Field(
        None, description="A checkpoint of that model to judge with: a folder or an address."
    )
    prompt: str = Field(
        PROMPT, description="What it is asked; {question}, {answer} and {expected} are put in."
    )
    pattern: str = Field(
        r"(?i)grade:\s*(\d+(?:\.\d+)?)",
        description="Where the grade stands: a number, the first group of the last match.",
    )
    full_marks: float = Field(10.0, gt=0, description="The grade that is a reward of 1.")
    max_tokens: int = Field(512, ge=1, description="Longest judgement, in tokens.")
    temperature: float = Field(0.0, ge=0, description="0 takes the likeliest token each time.")

    @field_validator("prompt")
    @classmethod
    def _known_words(cls, prompt: str) -> str:
        used = words_of(prompt)
        if unknown := sorted(used - set(WORDS)):
            raise ValueError(
                f"the prompt names {{{unknown[0]}}}: it may name {{question}}, {{answer}} and "
                "{expected}; write other braces twice"
            )
        if "answer" not in used:
            raise ValueError("the prompt does not show the answer: put {answer} into it")
        return prompt

    @field_validator("pattern")
    @classmethod
    def _one_group(cls, pattern: str) -> str:
        if compiled(pattern).groups < 1:
            raise ValueError("the pattern has no group: put brackets around the grade")
        return pattern


def words_of(prompt: str) -> set[str]:
    """The words in braces. Raises ValueError for braces that do not pair."""
    return {word for _, word, _, _ in string.Formatter().parse(prompt) if word is not None}


class Judge:
    """A model's grade of the answer, as a share of full marks; the model is opened by `bind`."""

    Config: ClassVar[type[BaseModel]] = JudgeConfig

    def __init__(self, cfg: JudgeConfig) -> None:
        self.cfg = cfg
        self.pattern = compiled(cfg.pattern)
        self.words = words_of(cfg.prompt)
        self._client: SamplingClient | None = None
        self._tokenizer: Tokenizer | None = None

    async def bind(self, backend: Backend, tokenizer: Tokenizer) -> None:
        """Open the judge on a backend, with the tokenizer of its own model."""
        if self.cfg.model is not None:
            tokenizer = await asyncio.to_thread(load_tokenizer, self.cfg.model)
        self._tokenizer = tokenizer
        self._client = await backend.open_sampling_client(self.cfg.model, self.cfg.weights)

    async def __call__(self, row: Row, completion: str) -> float:
        """Grade / full_marks. Raises UserError if the judge was not bound, or gives no grade."""
        if self._client is None or self._tokenizer is None:
            raise UserError(
                Problem("verifier", "no model to judge with", "await scoring.bind before scoring")
            )
        from tinker import types as tinker_types

        message = {"role": "user", "content": self._question(row, completion)}
        prompt = chat_prompt([message], self._tokenizer, None, "the judge's prompt")
        answer = await self._client.sample(
            tinker_types.ModelInput.from_ints(prompt), 1, self._params(prompt)
        )
        said = self._tokenizer.decode(answer.sequences[0].tokens, skip_special_tokens=True)
        return self._grade(str(said))

    def check_row(self, row: Row, place: str) -> Problem | None:
        """A prompt that shows the right answer needs one."""
        return self.cfg.row_problem(row, place) if "expected" in self.words else None

    def _question(self, row: Row, completion: str) -> str:
        expected = self.cfg.expected(row) if "expected" in self.words else ""
        answer = self.cfg.answer(completion)
        return self.cfg.prompt.format(
            question=_last_question(row), answer=answer, expected=expected
        )

    def _params(self, prompt: list[int]) -> tinker_types.SamplingParams:
        """The same question is judged the same way."""
        from tinker import types as tinker_types

        return tinker_types.SamplingParams(
            max_tokens=self.cfg.max_tokens,
            temperature=self.cfg.temperature,
            stop=stop_tokens(self._tokenizer),
            seed=zlib.crc32(repr(prompt).encode()) >> 1,
        )

    def _grade(self, said: str) -> float:
        found = list(self.pattern.finditer(said, timeout=self.cfg.timeout_seconds))
        if not found:
            what = f"no grade in what the judge said: {said[-200:]!r}"
            raise UserError(Problem("verifier", what, "mend its prompt, pattern or max_tokens"))
        grade = float(found[-1].group(1))
        if not 0 <= grade <= self.cfg.full_marks:
            what = f"the judge gave {grade:g} of {self.cfg.full_marks:g}"
            raise UserError(Problem("verifier", what, "mend its prompt, pattern or full_marks"))
        return grade / self.cfg.full_marks


def _last_question(row: Row) -> str:
    """What the last assistant turn answers."""
    turns = row["messages"] if "messages" in row else row["prompt"]
    if isinstance(turns, str):
        return turns
    if turns[-1]["role"] == "assistant":
        turns = turns[: last_assistant(turns)]
    return str(turns[-1].get("content") or "")
