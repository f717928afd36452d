"""Preference rows, in the shapes that TRL takes."""

from __future__ import annotations

import pytest

from algorithms.data.shapes import Preference, Row, preference_problem, read_preference

USER = {"role": "user", "content": "q"}
GOOD = {"role": "assistant", "content": "good"}
BAD = {"role": "assistant", "content": "bad"}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (
            {"prompt": "q", "chosen": "good", "rejected": "bad"},
            Preference("q", "good", "bad", None),
        ),
        (
            {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD], "tools": [{"name": "t"}]},
            Preference([USER], [GOOD], [BAD], [{"name": "t"}]),
        ),
        (
            {
                "prompt": [USER],
                "chosen": [GOOD],
                "rejected": [BAD],
                "tools": '[{"name": "t"}]',
                "chat_template_kwargs": {"enable_thinking": False},
            },
            Preference([USER], [GOOD], [BAD], [{"name": "t"}], {"enable_thinking": False}),
        ),
        (
            {"chosen": "The sky is blue.", "rejected": "The sky is green."},
            Preference("The sky is", " blue.", " green.", None),
        ),
        (
            {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
            Preference([USER], [GOOD], [BAD], None),
        ),
        (  # the prompt's text beside whole conversations, as UltraFeedback has it
            {"prompt": "q", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
            Preference([USER], [GOOD], [BAD], None),
        ),
        (
            {"chosen": [USER, GOOD, USER, GOOD], "rejected": [USER, GOOD, USER, BAD]},
            Preference([USER, GOOD, USER], [GOOD], [BAD], None),
        ),
    ],
)
def test_preferences(row: Row, expected: Preference) -> None:
    assert preference_problem(row, "x") is None
    assert read_preference(row) == expected


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"prompt": "q", "chosen": "a"}, "has no rejected, but 'prompt', 'chosen'"),
        ({"prompt": "q"}, "has no chosen and no rejected"),
        ({"chosen": "a", "rejected": "b"}, "prompt is missing"),
        ({"chosen": "a", "rejected": "a"}, "are the same"),
        ({"prompt": "q", "completion": "a", "label": True}, "an unpaired preference"),
        (
            {"prompt": [USER], "chosen": [USER, GOOD], "rejected": [USER, BAD]},
            "chosen and rejected repeat the turns of prompt",
        ),
        ({"prompt": "q", "chosen": "a", "rejected": "b", "tools": 3}, "tools is 3"),
        ({"prompt": "", "chosen": "a", "rejected": "b"}, "prompt is empty"),
        ({"prompt": [USER], "chosen": "a", "rejected": "b"}, "prompt is a list, but chosen"),
        ({"prompt": "q", "chosen": "a", "rejected": [BAD]}, "are a str and a list"),
        ({"prompt": "q", "chosen": "a", "rejected": "a"}, "are the same"),
        ({"prompt": [USER], "chosen": [GOOD], "rejected": [GOOD]}, "are the same"),
        ({"chosen": [USER, GOOD], "rejected": [USER, GOOD]}, "are the same"),
        (
            {"chosen": [GOOD], "rejected": [BAD]},
            "has no prompt of turns: chosen and rejected do not",
        ),
        ({"prompt": [USER], "chosen": [], "rejected": [BAD]}, "chosen is []"),
        ({"prompt": [{}], "chosen": [GOOD], "rejected": [BAD]}, "prompt[0] has no role"),
        ({"prompt": [USER], "chosen": [USER], "rejected": [BAD]}, "chosen has no assistant"),
        ({"chosen": [USER, GOOD], "rejected": [USER]}, "rejected has no assistant turn behind"),
        ({"prompt": [GOOD], "chosen": [GOOD], "rejected": [BAD]}, "starts with an assistant"),
    ],
)
def test_what_is_wrong_with_a_preference(row: Row, what: str) -> None:
    problem = preference_problem(row, "rows.jsonl:7")
    assert problem is not None
    assert problem.where == "rows.jsonl:7"
    assert what in problem.what
    assert problem.remedy


@pytest.mark.parametrize(
    "row",
    [
        {"chosen": [USER, GOOD, USER, GOOD], "rejected": [USER, GOOD, USER, BAD]},
        {"chosen": "The sky is blue.", "rejected": "The sky is green."},
        {"chosen": "1+1=2", "rejected": "1+1=3"},
    ],
)
def test_they_are_cut_as_trl_cuts_them(row: Row) -> None:
    data_utils = pytest.importorskip("trl.data_utils")
    theirs = data_utils.maybe_extract_prompt(row)
    ours = read_preference(row)
    assert (ours.prompt, ours.chosen, ours.rejected) == (
        theirs["prompt"],
        theirs["chosen"],
        theirs["rejected"],
    )
