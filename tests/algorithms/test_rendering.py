"""Tokens and loss masks, written out by hand, for several kinds of chat templates."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from algorithms.data.dataset import Dataset
from algorithms.data.pairs import render_pairs
from algorithms.data.rendering import (
    Rendering,
    Supervise,
    generation_prompt,
    render_colored,
    render_rows,
    stop_tokens,
    to_datum,
)
from algorithms.rollouts.chat import Voice
from algorithms.rollouts.environment import EnvironmentConfig
from algorithms.rollouts.single_turn import SingleTurn
from backends.errors import UserError
from backends.mock import MockTokenizer
from tests.algorithms.samples import (
    CHATML,
    HEADERS,
    MODEL,
    PLAIN,
    STRICT,
    THINKING,
    byte_tokenizer,
    chat,
)

START, END = "<|im_start|>", "<|im_end|>"


def dataset(*rows: dict[str, Any]) -> Dataset:
    return Dataset(list(rows), [f"rows.jsonl:{n}" for n in range(1, len(rows) + 1)], "rows.jsonl")


def render(
    tokenizer: Any,
    *rows: dict[str, Any],
    supervise: Supervise = "all_assistant",
    max_seq_len: int | None = None,
) -> Rendering:
    return render_rows(dataset(*rows), tokenizer, supervise, max_seq_len)


def spans(tokenizer: Any, row: dict[str, Any], supervise: Supervise = "all_assistant") -> list[Any]:
    """The row's text in (text, supervised) spans."""
    (rendered,) = render(tokenizer, row, supervise=supervise).rows
    return render_colored(rendered.tokens, rendered.mask, tokenizer)


def problem_of(tokenizer: Any, *rows: dict[str, Any], **options: Any) -> Any:
    with pytest.raises(UserError) as caught:
        render(tokenizer, *rows, **options)
    return caught.value.problems[0]


def test_tokens_and_mask_one_by_one() -> None:
    tokenizer = byte_tokenizer()
    (row,) = render(tokenizer, chat("a?", "b")).rows
    pieces = [tokenizer.decode([token]) for token in row.tokens]
    want = [
        (START, 0), *((letter, 0) for letter in "user\na?"), (END, 0), ("\n", 0),
        (START, 0), *((letter, 0) for letter in "assistant\n"), ("b", 1), (END, 1), ("\n", 0),
    ]  # fmt: skip
    assert list(zip(pieces, row.mask.astype(int).tolist(), strict=True)) == want


def test_the_datum_is_shifted_by_one() -> None:
    (row,) = render(byte_tokenizer(), chat("a?", "b")).rows
    datum = to_datum(row)
    inputs = datum.model_input.to_ints()
    targets = datum.loss_fn_inputs["target_tokens"].to_numpy()
    weights = datum.loss_fn_inputs["weights"].to_numpy()
    assert inputs == row.tokens[:-1].tolist()
    assert targets.tolist() == row.tokens[1:].tolist()
    assert [str(targets.dtype), str(weights.dtype)] == ["int64", "float32"]
    # 24 tokens, 21 before the answer: "b" and its end are the targets of inputs 20 and 21
    assert len(inputs) == len(weights) == 23
    assert np.flatnonzero(weights).tolist() == [20, 21]
    assert weights[20] == weights[21] == 1.0


def test_every_assistant_turn_is_supervised_or_the_last() -> None:
    tokenizer = byte_tokenizer()
    row = chat("q1", "a1", "q2", "a2")
    head = f"{START}user\nq1{END}\n{START}assistant\n"
    middle = f"\n{START}user\nq2{END}\n{START}assistant\n"
    assert spans(tokenizer, row) == [
        (head, False),
        (f"a1{END}", True),
        (middle, False),
        (f"a2{END}", True),
        ("\n", False),
    ]
    assert spans(tokenizer, row, "last_assistant") == [
        (f"{head}a1{END}{middle}", False),
        (f"a2{END}", True),
        ("\n", False),
    ]


def test_turns_behind_the_last_answer_are_context() -> None:
    row = chat("q1", "a1", "q2")
    assert spans(byte_tokenizer(), row)[1:] == [
        (f"a1{END}", True),
        (f"\n{START}user\nq2{END}\n", False),
    ]


def test_of_a_pair_of_messages_only_the_completion_is_supervised() -> None:
    turns = chat("q1", "a1", "q2", "a2")["messages"]
    got = spans(byte_tokenizer(), {"prompt": turns[:3], "completion": turns[3:]})
    assert [text for text, supervised in got if supervised] == [f"a2{END}"]


def test_a_turn_that_ends_with_another_special_token_than_eos() -> None:
    tokenizer = byte_tokenizer(
        HEADERS, eos="<eos>", bos="<bos>", specials=("<|h|>", "<|/h|>", "<|eot|>")
    )
    got = spans(tokenizer, chat("q", "a", "q", "b"))
    assert [text for text, supervised in got if supervised] == ["a<|eot|>", "b<|eot|>"]
    assert got[0][0].startswith("<bos><|h|>user")
    ends = tokenizer.convert_tokens_to_ids(["<eos>", "<|eot|>"])
    assert stop_tokens(tokenizer) == sorted(ends)


def test_a_turn_without_an_end_token_is_supervised_to_its_end() -> None:
    tokenizer = byte_tokenizer(PLAIN, eos="<eos>", specials=())
    assert spans(tokenizer, chat("q", "a", "q", "b")) == [
        ("user: q\nassistant: ", False),
        ("a\n", True),
        ("user: q\nassistant: ", False),
        ("b\n", True),
    ]
    assert stop_tokens(tokenizer) == [tokenizer.eos_token_id]


async def never(answer: str) -> float:
    """The score of an answer that nobody gives."""
    raise AssertionError(answer)


def test_tools_reach_the_template() -> None:
    tokenizer = byte_tokenizer("{% if tools %}[{{ tools[0].name }}]{% endif %}" + CHATML)
    tools = [None, [{"name": "add"}], '[{"name": "add"}]', []]
    rows = [{**chat("q", "a"), "tools": one} for one in tools]
    texts = [tokenizer.decode(row.tokens) for row in render(tokenizer, *rows).rows]
    assert [text.startswith("[add]") for text in texts] == [False, True, True, False]
    asked = [SingleTurn(EnvironmentConfig(), row, 0, never).tools for row in rows]
    assert asked == [None, [{"name": "add"}], [{"name": "add"}], None]


def test_template_kwargs_reach_the_template() -> None:
    tokenizer = byte_tokenizer("{% if mood is defined %}[{{ mood }}]{% endif %}" + CHATML)
    sad = {"chat_template_kwargs": {"mood": "sad"}}
    rows = [chat("q", "a"), {**chat("q", "a"), **sad}, chat("q", "a")]
    texts = [tokenizer.decode(row.tokens) for row in render(tokenizer, *rows).rows]
    assert [text.startswith("[sad]") for text in texts] == [False, True, False]
    turns = chat("q", "a")["messages"]
    pair = {"prompt": turns[:1], "chosen": turns[1:], "rejected": turns[1:] * 2, **sad}
    (both,) = render_pairs(dataset(pair), tokenizer, None).pairs
    assert all(
        tokenizer.decode(one.tokens).startswith("[sad]") for one in (both.chosen, both.rejected)
    )
    voice = Voice(tokenizer, [], 1, 1.0, None)
    for row, begins in zip(rows, ("<|im", "[sad]", "<|im"), strict=True):
        assert voice.of(row).opening(turns[:1], None, "x").prompt.text.startswith(begins)


# --- against transformers' own mask -------------------------------------------------------------


@pytest.mark.parametrize(
    "row",
    [
        chat("q", "a"),
        chat("q1", "a1", "q2", "a2", "q3", ""),
        chat("wo?", "überall \n", "q", "a"),
        {"messages": [{"role": "system", "content": "s"}, *chat("q", "a")["messages"]]},
    ],
)
def test_masks_agree_with_generation_blocks(row: dict[str, Any]) -> None:
    tokenizer = byte_tokenizer()
    (rendered,) = render(tokenizer, row).rows
    theirs = tokenizer.apply_chat_template(
        row["messages"], return_assistant_tokens_mask=True, return_dict=True
    )
    assert rendered.tokens.tolist() == theirs["input_ids"]
    assert rendered.mask.astype(int).tolist() == theirs["assistant_masks"]


# --- templates that are not prefix-stable -------------------------------------------------------


def test_an_unstable_template_names_row_and_turn() -> None:
    problem = problem_of(byte_tokenizer(THINKING), chat("q", "a"), chat("q1", "a1", "q2", "a2"))
    assert problem.where == "rows.jsonl:2"
    assert problem.what.startswith("turn 1 (assistant): the chat template renders it differently")
    assert "<think>" in problem.what
    assert "supervise: last_assistant" in problem.remedy


def test_the_last_turn_of_an_unstable_template_can_be_trained_on() -> None:
    tokenizer = byte_tokenizer(THINKING)
    row = chat("q1", "a1", "q2", "a2")
    assert spans(tokenizer, row, "last_assistant")[1:] == [
        (f"<think>\n\n</think>\n\na2{END}", True),
        ("\n", False),
    ]


def test_a_template_that_changes_what_came_before_is_refused() -> None:
    counting = "{{ messages|length }}" + CHATML
    problem = problem_of(byte_tokenizer(counting), chat("q", "a"))
    assert "renders what comes before it differently" in problem.what
    assert "'1<|im_start|>" in problem.what
    assert "'2<|im_start|>" in problem.what


def test_tokens_that_merge_over_the_boundary_are_refused() -> None:
    tokenizer = byte_tokenizer(merges=(("Ċ", "Ċ"),))  # two line breaks become one token
    problem = problem_of(tokenizer, chat("q", "a"), chat("q", "\na"))
    assert problem.where == "rows.jsonl:2"
    assert "turn 1" in problem.what
    assert "merge" in problem.what
    assert "white space" in problem.remedy


def test_a_row_that_the_template_refuses_is_named_and_no_other() -> None:
    tokenizer = byte_tokenizer(STRICT)
    with pytest.raises(UserError) as caught:
        render(tokenizer, chat("q", "a"), chat("q", "a", "q", "a"), chat("q", "a"))
    (problem,) = caught.value.problems
    assert problem.where == "rows.jsonl:2"
    assert "roles must alternate" in problem.what


def test_chat_rows_need_a_template() -> None:
    problem = problem_of(byte_tokenizer(None), chat("q", "a"))
    assert "no chat template" in problem.what
    assert "chat_template.jinja" in problem.remedy


def test_bad_rows_are_all_named() -> None:
    with pytest.raises(UserError) as caught:
        render(byte_tokenizer(), chat("q"), chat("q", "a"), {"txt": "x"})
    assert [problem.where for problem in caught.value.problems] == ["rows.jsonl:1", "rows.jsonl:3"]


# --- plain text ---------------------------------------------------------------------------------


def test_text_is_learned_whole() -> None:
    row = {"text": "1+1=2", "weight": 0.5}
    tokenizer = byte_tokenizer(None, eos="<eos>", specials=())
    (rendered,) = render(tokenizer, row).rows
    assert tokenizer.decode(rendered.tokens) == "1+1=2<eos>"
    assert rendered.weights.tolist() == [0.5] * 6
    assert spans(tokenizer, {"text": "2<eos>"}) == [("2<eos>", True)]


def test_plain_pairs_need_no_template() -> None:
    tokenizer = byte_tokenizer(None, eos="<eos>", specials=())
    row = {"prompt": "1+1=", "completion": "2"}
    assert spans(tokenizer, row) == [("1+1=", False), ("2<eos>", True)]
    assert spans(tokenizer, {**row, "completion": "2<eos>"}) == [("1+1=", False), ("2<eos>", True)]
    assert stop_tokens(tokenizer) == [tokenizer.eos_token_id]


def test_plain_pairs_that_would_merge_keep_the_prompts_tokens() -> None:
    tokenizer = byte_tokenizer(None, eos="<eos>", specials=(), merges=(("a", "b"),))
    (row,) = render(tokenizer, {"prompt": "a", "completion": "b"}).rows
    assert row.tokens.tolist() == [*tokenizer.convert_tokens_to_ids(["a", "b", "<eos>"])]
    assert row.mask.tolist() == [False, True, True]


def test_a_tokenizer_without_eos_cannot_end_a_completion() -> None:
    tokenizer = byte_tokenizer(None)
    tokenizer.eos_token = None
    assert "eos" in problem_of(tokenizer, {"prompt": "a", "completion": "b"}).what


# --- length -------------------------------------------------------------------------------------


def test_long_rows_are_cut_and_those_with_nothing_left_dropped() -> None:
    tokenizer = byte_tokenizer()
    # tokens: 20 before the answer of a one-letter question, then the answer, end, line break
    rows = [chat("q", "a"), chat("q", "abcdef"), chat("q" * 9, "a")]
    done = render(tokenizer, *rows, max_seq_len=23)
    assert [len(row.tokens) for row in done.rows] == [23, 23]
    assert [int(row.mask.sum()) for row in done.rows] == [2, 3]
    assert (done.cut, done.dropped) == (1, 1)
    assert done.tokens_total == 46
    assert done.tokens_supervised == 5


def test_without_a_limit_the_tokenizers_holds() -> None:
    tokenizer = byte_tokenizer()
    assert render(tokenizer, chat("q", "a" * 5000)).cut == 0
    tokenizer.model_max_length = 30
    assert len(render(tokenizer, chat("q", "a" * 5000)).rows[0].tokens) == 30


def test_when_every_row_is_dropped_the_run_is_refused() -> None:
    problem = problem_of(byte_tokenizer(), chat("q" * 50, "a"), max_seq_len=10)
    assert problem.where == "algorithm.params.max_seq_len"
    assert "first 10 tokens" in problem.what
    assert "raise max_seq_len" in problem.remedy


# --- prompts ------------------------------------------------------------------------------------


def test_generation_prompts_are_the_prefix_of_what_is_trained() -> None:
    tokenizer = byte_tokenizer()
    row = chat("q", "a")
    prompt = generation_prompt(row["messages"][:1], tokenizer)
    (rendered,) = render(tokenizer, row).rows
    assert prompt == rendered.tokens[: len(prompt)].tolist()
    assert rendered.mask.tolist().index(True) == len(prompt)
    assert stop_tokens(tokenizer) == [tokenizer.eos_token_id]


def test_the_mock_tokenizer_renders_like_a_real_one() -> None:
    real, mock = byte_tokenizer(), MockTokenizer()
    for row in (chat("q", "a"), chat("wo?", "überall", "q", "")):
        assert spans(mock, row) == spans(real, row)


# --- the shipped model's tokenizer --------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny() -> Any:
    from backends.tokenizer import load_tokenizer

    return load_tokenizer(str(MODEL))


def test_the_shipped_tokenizer_token_by_token(tiny: Any) -> None:
    (row,) = render(tiny, chat("What is 6 + 41?", "47")).rows
    pieces = tiny.convert_ids_to_tokens(row.tokens.tolist())
    question = ["What", "Ġis", "Ġ", "6", "Ġ+", "Ġ", "4", "1", "?"]
    want = [
        *((piece, 0) for piece in [START, "user", "Ċ", *question, END, "Ċ"]),
        *((piece, 0) for piece in [START, "assistant", "Ċ"]),
        *((piece, 1) for piece in ["4", "7", END]),
        ("Ċ", 0),
    ]
    assert list(zip(pieces, row.mask.astype(int).tolist(), strict=True)) == want


def test_the_shipped_template_agrees_with_its_generation_blocks(tiny: Any) -> None:
    row = chat("What is 6 + 41?", "47", "What is 1 + 1?", "2")
    (rendered,) = render(tiny, row).rows
    theirs = tiny.apply_chat_template(
        row["messages"], return_assistant_tokens_mask=True, return_dict=True
    )
    assert rendered.tokens.tolist() == theirs["input_ids"]
    assert rendered.mask.astype(int).tolist() == theirs["assistant_masks"]


def test_any_text_gets_the_mask_of_its_generation_blocks(tiny: Any) -> None:
    draw = random.Random(0)
    pieces = ["46", " ", "\n", "is", "What", "ü", "<", "☃", "<|im_end|>", "."]

    def text() -> str:
        return "".join(draw.choices(pieces, k=draw.randrange(6)))

    rows = [chat(*(text() for _ in range(2 * draw.randint(1, 3)))) for _ in range(200)]
    done = render(tiny, *rows).rows
    theirs = tiny.apply_chat_template(
        [row["messages"] for row in rows], return_assistant_tokens_mask=True, return_dict=True
    )
    assert [row.tokens.tolist() for row in done] == theirs["input_ids"]
    assert [row.mask.astype(int).tolist() for row in done] == theirs["assistant_masks"]
