"""Rows to tokens: what the model reads, and which tokens it has to produce.

The supervised tokens of an assistant turn are those the model must produce behind the generation
prompt: the turn's content up to and including the last special token of the turn (end of turn).
What the template writes behind that (a line break) is not supervised. A template without such a
token is supervised up to the end of the turn.

Spans are found by rendering prefixes, and every prefix is checked: the messages before the turn
with the generation prompt, and the messages up to the turn, must be prefixes of the whole, as text
and as tokens. Where they are not, the model would train on something else than it is asked for.

Text without a prompt is supervised whole, with the eos token behind it.

A row's `weight` and that of its turns (see `shapes`) multiply the loss of their tokens; a turn of
weight 0 is context only. Rows of `input_ids` are taken as they are.

Shapes: N tokens of input; a row holds N + 1 tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from algorithms.data.dataset import Dataset
from algorithms.data.shapes import (
    Conversation,
    Message,
    PlainText,
    Row,
    last_assistant,
    read_example,
    read_tokens,
    row_weight,
    supervised_problem,
    turn_weight,
)
from algorithms.data.spool import Lazy
from backends.base import Tokenizer
from backends.errors import Problem, UserError, first_line

if TYPE_CHECKING:
    import tinker

__all__ = [
    "Rendered",
    "Rendering",
    "Supervise",
    "chat_prompt",
    "chat_text",
    "generation_prompt",
    "generation_text",
    "longest_scored",
    "model_limit",
    "plain_prompt",
    "render_colored",
    "render_rows",
    "stop_tokens",
    "text_tokens",
    "to_datum",
]

Supervise = Literal["all_assistant", "last_assistant"]

CHUNK_ROWS = 1024
NO_KWARGS: Mapping[str, Any] = MappingProxyType({})
NO_LIMIT = 10**9  # tokenizers without a limit of their own say 1e30

_PROBE: list[Message] = [
    {"role": "user", "content": "Hi."},
    {"role": "assistant", "content": "Hello."},
]


@dataclass(frozen=True, slots=True, eq=False)
class Rendered:
    """One row: `tokens` [N + 1], how much the loss of each counts, `weights` [N + 1], its place."""

    tokens: npt.NDArray[np.int64]
    weights: npt.NDArray[np.float32]
    place: str

    @property
    def mask(self) -> npt.NDArray[np.bool_]:
        """Which tokens are supervised [N + 1]."""
        return self.weights > 0


@dataclass(frozen=True, slots=True)
class Rendering:
    """All rows that are trained on, in the dataset's order, and what became of the others.

    `rows` of a dataset on disk are rendered anew each time they are asked for. A row is cut to the
    length limit, dropped if nothing supervised remains of it, and skipped if it is bad.
    """

    rows: Sequence[Rendered]
    numbers: Sequence[int]
    """Which row of the dataset each is (from 0)."""
    lengths: Sequence[int]
    """The N of each."""
    cut: int
    dropped: int
    skipped: int
    tokens_total: int
    """Tokens of all rows."""
    tokens_supervised: int
    """Tokens that the loss counts, once per epoch."""

    def metrics(self) -> dict[str, float]:
        """Rows and tokens of an epoch, and how many rows were cut, dropped, or skipped as bad."""
        return {
            "data/rows": float(len(self.rows)),
            "data/rows_cut": float(self.cut),
            "data/rows_dropped": float(self.dropped),
            "data/rows_skipped": float(self.skipped),
            "data/tokens": float(self.tokens_total),
            "data/tokens_supervised": float(self.tokens_supervised),
        }


def render_rows(
    dataset: Dataset,
    tokenizer: Tokenizer,
    supervise: Supervise = "all_assistant",
    max_seq_len: int | None = None,
) -> Rendering:
    """Tokens and masks of all rows; rows are cut at `max_seq_len` tokens (None: the model's).

    Bad rows are skipped as far as the dataset allows it. Raises UserError naming each one if they
    are too many, for a template that is not prefix-stable, and if no row remains.
    """
    writer = _Writer(tokenizer, supervise)
    limit = max_seq_len or model_limit(tokenizer)
    rows: list[Rendered] = []
    numbers, lengths = array("q"), array("q")
    problems: list[Problem] = []
    cut = dropped = total = supervised = 0
    for number, done in enumerate(_rendered(dataset, writer)):
        if isinstance(done, Problem):
            if done.where != dataset.places[number]:  # not the row's fault, so none to skip
                raise UserError(done)
            problems.append(done)
            continue
        row = _fit(done, limit)
        if row is None:
            dropped += 1
            continue
        cut += row is not done
        total += len(row.tokens)
        supervised += int(row.mask[1:].sum())
        numbers.append(number)
        lengths.append(len(row.tokens) - 1)
        if not dataset.on_disk:
            rows.append(row)
    bad_rows = dataset.bad_rows.skip(problems)
    if not total:
        raise UserError(_nothing_left(dataset, limit))
    kept = _on_demand(dataset, writer, limit, numbers) if dataset.on_disk else rows
    return Rendering(kept, numbers, lengths, cut, dropped, bad_rows.skipped, total, supervised)


def _rendered(dataset: Dataset, writer: _Writer) -> Iterable[Rendered | Problem]:
    for start in range(0, len(dataset), CHUNK_ROWS):
        yield from writer.render(
            dataset.rows[start : start + CHUNK_ROWS], dataset.places[start : start + CHUNK_ROWS]
        )


def _fit(row: Rendered, limit: int | None) -> Rendered | None:
    """The row, cut if it is too long; None if nothing supervised would remain."""
    if not row.weights[1:limit].any():
        return None
    if limit is None or len(row.tokens) <= limit:
        return row
    return Rendered(row.tokens[:limit], row.weights[:limit], row.place)


def _on_demand(
    dataset: Dataset, writer: _Writer, limit: int | None, numbers: Sequence[int]
) -> Sequence[Rendered]:
    """The rows of these numbers, which have been rendered once, so that nothing is wrong then."""

    def render(index: int) -> Rendered:
        number = numbers[index]
        (done,) = writer.render([dataset.rows[number]], [dataset.places[number]])
        assert isinstance(done, Rendered)
        row = _fit(done, limit)
        assert row is not None
        return row

    return Lazy(len(numbers), render)


def to_datum(row: Rendered) -> tinker.Datum:
    """The row as a training example: inputs [N], targets one further [N], their weights [N]."""
    import tinker

    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(row.tokens[:-1].tolist()),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData.from_numpy(row.tokens[1:]),
            "weights": tinker.TensorData.from_numpy(row.weights[1:]),
        },
    )


def render_colored(
    tokens: Sequence[int] | npt.NDArray[np.int64],
    mask: Sequence[bool] | npt.NDArray[np.bool_],
    tokenizer: Tokenizer,
) -> list[tuple[str, bool]]:
    """The row as text in spans of (text, supervised), special tokens shown."""
    pairs = zip((int(token) for token in tokens), (bool(on) for on in mask), strict=True)
    return [
        (str(tokenizer.decode([token for token, _ in span])), on)
        for on, span in groupby(pairs, key=lambda pair: pair[1])
    ]


def generation_prompt(
    messages: list[Message],
    tokenizer: Tokenizer,
    tools: list[Any] | None = None,
    template_kwargs: Mapping[str, Any] = NO_KWARGS,
) -> list[int]:
    """The tokens of a conversation up to where the assistant's next turn begins."""
    return text_tokens(generation_text(messages, tokenizer, tools, template_kwargs), tokenizer)


def generation_text(
    messages: list[Message],
    tokenizer: Tokenizer,
    tools: list[Any] | None = None,
    template_kwargs: Mapping[str, Any] = NO_KWARGS,
) -> str:
    """The same as text."""
    return _template(tokenizer, [messages], tools, template_kwargs, generation=True)[0]


def text_tokens(text: str, tokenizer: Tokenizer) -> list[int]:
    """The tokens of text as it stands in the middle of a conversation."""
    return _token_lists(tokenizer, [text])[0]


def chat_prompt(
    messages: list[Message],
    tokenizer: Tokenizer,
    tools: list[Any] | None,
    place: str,
    template_kwargs: Mapping[str, Any] = NO_KWARGS,
) -> list[int]:
    """The same of a row. Raises UserError naming its place if the template does not take it."""
    return text_tokens(chat_text(messages, tokenizer, tools, place, template_kwargs), tokenizer)


def chat_text(
    messages: list[Message],
    tokenizer: Tokenizer,
    tools: list[Any] | None,
    place: str,
    template_kwargs: Mapping[str, Any] = NO_KWARGS,
) -> str:
    """The same as text. Raises UserError as `chat_prompt` does."""
    if not tokenizer.chat_template:
        raise UserError(_no_template(place))
    try:
        return generation_text(messages, tokenizer, tools, template_kwargs)
    except Exception as error:
        raise UserError(_refused(error, place)) from error


def plain_prompt(text: str, tokenizer: Tokenizer) -> list[int]:
    """The tokens of a prompt without a template, opened as the tokenizer opens any text."""
    ids: list[int] = tokenizer([text], add_special_tokens=True)["input_ids"][0]
    if len(ids) > 1 and ids[-1] == tokenizer.eos_token_id:
        ids = ids[:-1]
    return ids


def stop_tokens(tokenizer: Tokenizer) -> list[int]:
    """The tokens at which an answer ends: the tokenizer's eos and the template's end of turn."""
    ends = set() if tokenizer.eos_token_id is None else {int(tokenizer.eos_token_id)}
    if tokenizer.chat_template:
        before = generation_prompt(_PROBE[:1], tokenizer)
        text = _template(tokenizer, [_PROBE], None, NO_KWARGS, generation=False)
        whole = _token_lists(tokenizer, text)[0]
        special = _special_tokens(tokenizer)
        last = whole[_end_of_turn(whole, len(before), len(whole), special, tokenizer) - 1]
        if last in special:
            ends.add(last)
    return sorted(ends)


# --- from rows to tokens ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Turn:
    """The rendered text before an assistant turn's answer, and up to the turn's end."""

    index: int
    before: str
    until: str
    weight: float


@dataclass(frozen=True, slots=True)
class _Script:
    """A row as text: the whole, and its supervised turns."""

    whole: str
    turns: list[_Turn]
    place: str
    weight: float


class _Writer:
    """Renders rows with one tokenizer; chunks are tokenised in one call."""

    def __init__(self, tokenizer: Tokenizer, supervise: Supervise) -> None:
        self.tokenizer = tokenizer
        self.supervise = supervise
        self.special = _special_tokens(tokenizer)

    def render(self, rows: Sequence[Row], places: Sequence[str]) -> Iterable[Rendered | Problem]:
        """One result for each row, in order."""
        done: list[Rendered | Problem | _Script | None] = [None] * len(rows)
        chats: list[tuple[int, Conversation]] = []
        for index, (row, place) in enumerate(zip(rows, places, strict=True)):
            if problem := supervised_problem(row, place):
                done[index] = problem
            elif "input_ids" in row:
                done[index] = Rendered(*read_tokens(row), place)
            elif isinstance(example := read_example(row), Conversation):
                chats.append((index, example))
            else:
                done[index] = self._plain(example, row_weight(row), place)
        found = [(rows[index], chat, places[index]) for index, chat in chats]
        for (index, _), script in zip(chats, self._scripts(found), strict=True):
            done[index] = script
        return self._tokenise(done)

    # chat rows

    def _scripts(self, chats: list[tuple[Row, Conversation, str]]) -> list[_Script | Problem]:
        if chats and not self.tokenizer.chat_template:
            return [_no_template(place) for _, _, place in chats]
        try:
            return self._write(chats)
        except Exception as error:  # noqa: BLE001  (templates raise anything; reported by row)
            if len(chats) == 1:
                return [_refused(error, chats[0][2])]
            return [self._scripts([chat])[0] for chat in chats]

    def _write(self, chats: list[tuple[Row, Conversation, str]]) -> list[_Script | Problem]:
        wanted: list[_Wanted] = []
        for _, chat, _ in chats:
            wanted.append(_Wanted(chat, len(chat.messages), generation=False))
            for turn in self._supervised(chat):
                wanted.append(_Wanted(chat, turn, generation=True))
                if turn + 1 < len(chat.messages):
                    wanted.append(_Wanted(chat, turn + 1, generation=False))
        texts = iter(_template_all(self.tokenizer, wanted))
        scripts: list[_Script | Problem] = []
        for row, chat, place in chats:
            whole = next(texts)
            turns = [
                _Turn(
                    turn,
                    next(texts),
                    next(texts) if turn + 1 < len(chat.messages) else whole,
                    turn_weight(chat.messages[turn]),
                )
                for turn in self._supervised(chat)
            ]
            problem = next((p for turn in turns if (p := _unstable(turn, whole, place))), None)
            scripts.append(problem or _Script(whole, turns, place, row_weight(row)))
        return scripts

    def _supervised(self, chat: Conversation) -> list[int]:
        last = last_assistant(chat.messages)
        first = last if self.supervise == "last_assistant" else chat.first_supervised
        return [
            index
            for index, turn in enumerate(chat.messages)
            if turn["role"] == "assistant" and index >= first and turn_weight(turn) > 0
        ]

    def _tokenise(
        self, done: list[Rendered | Problem | _Script | None]
    ) -> Iterable[Rendered | Problem]:
        scripts = [item for item in done if isinstance(item, _Script)]
        texts = {text for script in scripts for text in _texts(script)}
        ordered = sorted(texts)
        tokens = dict(zip(ordered, _token_lists(self.tokenizer, ordered), strict=True))
        for item in done:
            if isinstance(item, _Script):
                yield self._weigh(item, tokens)
            elif item is not None:
                yield item

    def _weigh(self, script: _Script, tokens: dict[str, list[int]]) -> Rendered | Problem:
        whole = tokens[script.whole]
        weights = np.zeros(len(whole), np.float32)
        for turn in script.turns:
            before, until = tokens[turn.before], tokens[turn.until]
            if whole[: len(before)] != before or whole[: len(until)] != until:
                return _merged(turn, script.place)
            end = _end_of_turn(whole, len(before), len(until), self.special, self.tokenizer)
            weights[len(before) : end] = script.weight * turn.weight
        return Rendered(np.asarray(whole, dtype=np.int64), weights, script.place)

    # prompt and completion as text

    def _plain(self, example: PlainText, weight: float, place: str) -> Rendered | Problem:
        eos = self.tokenizer.eos_token_id
        if eos is None:
            return Problem(
                "model.name",
                "the tokenizer has no eos token, so a completion would have no end",
                "take a tokenizer with an eos_token, or chat rows",
            )
        prompt = plain_prompt(example.prompt, self.tokenizer) if example.prompt else []
        whole = plain_prompt(example.prompt + example.completion, self.tokenizer)
        if whole[: len(prompt)] == prompt:
            completion = whole[len(prompt) :]
        else:  # the texts merge where they meet; at inference the prompt's tokens stand alone
            completion = _token_lists(self.tokenizer, [example.completion])[0]
        if not completion or completion[-1] != eos:
            completion = [*completion, int(eos)]
        weights = np.zeros(len(prompt) + len(completion), np.float32)
        weights[len(prompt) :] = weight
        return Rendered(np.asarray([*prompt, *completion], dtype=np.int64), weights, place)


def _texts(script: _Script) -> Iterable[str]:
    yield script.whole
    for turn in script.turns:
        yield turn.before
        yield turn.until


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The text of a conversation's first turns, with the generation prompt behind them or not."""

    chat: Conversation
    turns: int
    generation: bool

    @property
    def messages(self) -> list[Message]:
        return self.chat.messages[: self.turns]


def _template_all(tokenizer: Tokenizer, wanted: list[_Wanted]) -> list[str]:
    """The texts of conversations; those that differ in nothing but messages go in one call."""
    texts: list[str] = [""] * len(wanted)
    plain: dict[bool, list[int]] = {False: [], True: []}
    for index, one in enumerate(wanted):
        tools, kwargs = one.chat.tools, one.chat.template_kwargs
        if tools is None and not kwargs:
            plain[one.generation].append(index)
        else:
            texts[index] = _template(tokenizer, [one.messages], tools, kwargs, one.generation)[0]
    for generation, indices in plain.items():
        if indices:
            conversations = [wanted[index].messages for index in indices]
            rendered = _template(tokenizer, conversations, None, NO_KWARGS, generation)
            for index, text in zip(indices, rendered, strict=True):
                texts[index] = text
    return texts


def _template(
    tokenizer: Tokenizer,
    conversations: list[list[Message]],
    tools: list[Any] | None,
    kwargs: Mapping[str, Any],
    generation: bool,
) -> list[str]:
    texts: list[str] = tokenizer.apply_chat_template(
        conversations, tools=tools, tokenize=False, add_generation_prompt=generation, **kwargs
    )
    return texts


def _token_lists(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    if not texts:
        return []
    ids: list[list[int]] = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return ids


def _special_tokens(tokenizer: Tokenizer) -> frozenset[int]:
    added = {int(i) for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(added | {int(i) for i in tokenizer.all_special_ids})


def _end_of_turn(
    tokens: list[int], start: int, stop: int, special: frozenset[int], tokenizer: Tokenizer
) -> int:
    """Where the supervised part of a turn in tokens[start:stop] ends (exclusive)."""
    for index in range(stop - 1, start - 1, -1):
        if tokens[index] in special:
            return index + 1
        if str(tokenizer.decode([tokens[index]])).strip():
            break
    return stop


def model_limit(tokenizer: Tokenizer) -> int | None:
    """The most tokens that the tokenizer says the model reads; None if it does not say."""
    limit = int(min(tokenizer.model_max_length, NO_LIMIT))
    return None if limit == NO_LIMIT else limit


def longest_scored(tokenizer: Tokenizer, max_seq_len: int | None = None) -> int | None:
    """The most tokens of a text that is to be scored: a sampler needs room for one more."""
    limit = model_limit(tokenizer)
    if limit is None:
        return max_seq_len
    return min(limit - 1, max_seq_len or limit)


# --- what can be wrong --------------------------------------------------------------------------

_REMEDY = (
    "use supervise: last_assistant, make one row of each assistant turn, or give the model's "
    "folder a chat template that writes earlier turns as it writes the last one"
)


def _nothing_left(dataset: Dataset, limit: int | None) -> Problem:
    if limit is None:
        what = f"every weight in {dataset.source} is 0, so there is nothing to learn"
        return Problem("data", what, "give some rows and turns a weight above 0")
    return Problem(
        "algorithm.params.max_seq_len",
        f"no supervised token of {dataset.source} lies in the first {limit} tokens of its row",
        "raise max_seq_len or shorten the prompts",
    )


def _unstable(turn: _Turn, whole: str, place: str) -> Problem | None:
    for part, what in ((turn.before, "what comes before it"), (turn.until, "it")):
        if not whole.startswith(part):
            at = next(
                (i for i, (a, b) in enumerate(zip(part, whole, strict=False)) if a != b),
                min(len(part), len(whole)),
            )
            return Problem(
                place,
                f"turn {turn.index} (assistant): the chat template renders {what} differently "
                f"once later turns follow: {_around(part, at)} becomes {_around(whole, at)}",
                _REMEDY,
            )
    return None


def _around(text: str, at: int) -> str:
    return repr(text[max(0, at - 20) : at + 30])


def _merged(turn: _Turn, place: str) -> Problem:
    return Problem(
        place,
        f"turn {turn.index} (assistant): its first tokens merge with the template's text around it",
        "remove the white space at the beginning and the end of its content",
    )


def _refused(error: Exception, place: str) -> Problem:
    return Problem(
        place,
        f"the model's chat template refuses the row: {first_line(error)}",
        "bring the turns into the order that the template wants",
    )


def _no_template(place: str) -> Problem:
    return Problem(
        place,
        "a chat row, but the model's tokenizer has no chat template",
        "take an instruct model, put a chat_template.jinja into its folder, or give the rows as "
        "prompt and completion strings",
    )
