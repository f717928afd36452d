"""The policy as a chat: messages in, an assistant turn out, and every token kept that was drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from algorithms.data.rendering import chat_text, plain_prompt, text_tokens
from algorithms.data.shapes import Message, Row, read_template_kwargs
from algorithms.rollouts.trajectory import Turn, sampled_turn
from backends.base import SamplingClient, Tokenizer

if TYPE_CHECKING:
    from tinker import types as tinker_types


class RolloutOver(Exception):
    """There is no room for another turn; what the model has said by then is what counts.

    `end` says what there is no room in: max_turns or max_context.
    """

    def __init__(self, end: str) -> None:
        super().__init__(end)
        self.end = end


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the policy reads: the conversation as the template writes it, and its tokens [P].

    `text` is empty for plain text, which no template writes.
    """

    text: str
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class Opening:
    """How a rollout begins: the messages, and their prompt. Plain text has no template."""

    messages: list[Message] | str
    tools: list[Any] | None
    prompt: Prompt


@dataclass(frozen=True, slots=True)
class Voice:
    """How the policy reads and speaks, the same in every rollout of a run."""

    tokenizer: Tokenizer
    stop: list[int]
    max_tokens: int
    temperature: float
    max_context: int | None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """What the chat template is given beside messages and tools."""

    def of(self, row: Row) -> Voice:
        """The same, with what the row gives its chat template."""
        kwargs = read_template_kwargs(row)
        return replace(self, template_kwargs=kwargs) if kwargs else self

    def opening(
        self, messages: list[Message] | str, tools: list[Any] | None, place: str
    ) -> Opening:
        """How a rollout that begins with these messages begins. Raises UserError naming `place`."""
        if isinstance(messages, str):
            prompt = Prompt("", plain_prompt(messages, self.tokenizer))
        else:
            text = self.written(messages, tools, place)
            prompt = Prompt(text, text_tokens(text, self.tokenizer))
        return Opening(messages, tools, prompt)

    def written(self, messages: list[Message], tools: list[Any] | None, place: str) -> str:
        """The conversation as the template writes it. Raises UserError naming `place`."""
        return chat_text(messages, self.tokenizer, tools, place, self.template_kwargs)

    def params(self, seed: int) -> tinker_types.SamplingParams:
        """The settings of one request."""
        from tinker import types as tinker_types

        return tinker_types.SamplingParams(
            max_tokens=self.max_tokens, temperature=self.temperature, stop=self.stop, seed=seed
        )

    def fits(self, prompt: list[int]) -> bool:
        """Whether there is room for the longest turn behind a prompt."""
        return self.max_context is None or len(prompt) + self.max_tokens <= self.max_context

    def said(self, tokens: list[int]) -> str:
        """What sampled tokens say, without the end of the turn and other special tokens."""
        end = len(tokens)
        while end and tokens[end - 1] in self.stop:
            end -= 1
        return str(self.tokenizer.decode(tokens[:end], skip_special_tokens=True))


class ChatClient:
    """One rollout's talk with the policy, from the sampler that its batch is sampled from.

    `client` is that sampler itself; only what is drawn through `reply` is trained on. `seed` is the
    rollout's own, for whatever else is drawn.
    """

    def __init__(
        self,
        client: SamplingClient,
        voice: Voice,
        place: str,
        max_turns: int,
        seed_of_turn: Callable[[int], int],
    ) -> None:
        self.client = client
        self.seed = seed_of_turn(-1)
        self.turn = 0
        """The turn it is in, or was in last, from 1."""
        self.turns: list[Turn] = []
        self.messages: list[Message] = []
        """The conversation up to the last reply."""
        self.failed: Exception | None = None
        """What the sampler raised, which is no fault of an environment or agent."""
        self._voice = voice
        self._place = place
        self._max_turns = max_turns
        self._seed_of_turn = seed_of_turn
        self._text = ""
        self._expected: tuple[Opening, Turn] | None = None

    @property
    def cut(self) -> bool:
        """Whether the last reply was cut off at max_tokens."""
        return bool(self.turns) and self.turns[-1].cut

    def expect(self, opening: Opening, first: Turn) -> None:
        """Give it the turn that was drawn for it, in case it begins like that."""
        self._expected = opening, first

    async def reply(self, messages: list[Message] | str, tools: list[Any] | None = None) -> Message:
        """The policy's next turn behind the messages, as an assistant message.

        Its content is what was sampled, to the letter; a tool call stands in it as text. Plain text
        is gone on from without a template. Raises RolloutOver if there is no room for a turn.
        """
        if len(self.turns) == self._max_turns:
            raise RolloutOver("max_turns")
        self.turn += 1
        expected, self._expected = self._expected, None
        if expected is not None and (messages, tools) == (
            expected[0].messages,
            expected[0].tools,
        ):
            prompt, turn = expected[0].prompt, expected[1]
        else:
            prompt = self._prompt(messages, tools)
            if self.turns and not self._voice.fits(prompt.tokens):
                raise RolloutOver("max_context")
            turn = await self._draw(prompt.tokens)
        content = self._voice.said(turn.tokens)
        self.turns.append(turn)
        self._text = prompt.text and prompt.text + content
        message = {"role": "assistant", "content": content}
        self.messages = [*_as_messages(messages), message]
        return message

    def _prompt(self, messages: list[Message] | str, tools: list[Any] | None) -> Prompt:
        """What the policy reads before its next turn.

        Where the template writes the conversation so far as it was, the tokens so far stay as they
        were sampled, and those of what is new follow; else the whole is written anew.
        """
        if not self._text or isinstance(messages, str):
            return self._voice.opening(messages, tools, self._place).prompt
        text = self._voice.written(messages, tools, self._place)
        if text.startswith(self._text):
            before = self.turns[-1]
            new = text_tokens(text[len(self._text) :], self._voice.tokenizer)
            if before.tokens[-1] not in self._voice.stop:
                return Prompt(text, [*before.prompt, *before.tokens, *new])
            if new and new[0] == before.tokens[-1]:  # the template ends the turn as the model did
                return Prompt(text, [*before.prompt, *before.tokens, *new[1:]])
        return Prompt(text, text_tokens(text, self._voice.tokenizer))

    async def _draw(self, prompt: list[int]) -> Turn:
        from tinker import types as tinker_types

        params = self._voice.params(self._seed_of_turn(len(self.turns)))
        try:
            answer = await self.client.sample(tinker_types.ModelInput.from_ints(prompt), 1, params)
            return sampled_turn(prompt, answer.sequences[0])
        except Exception as error:
            self.failed = error
            raise


def _as_messages(messages: list[Message] | str) -> list[Message]:
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
