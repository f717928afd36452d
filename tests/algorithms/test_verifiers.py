"""Every kind of verifier on hand-checked answers, what it refuses, and the docs' table of kinds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter, ValidationError

from algorithms.rewards import scoring
from algorithms.rewards.section import VerifierField, VerifierSection
from algorithms.rewards.structured import calls_in, parse_json, same_json
from algorithms.rewards.verifiers import VERIFIERS
from backends.errors import UserError
from tests.algorithms.samples import chat

ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "q"}]}
SECTION: TypeAdapter[VerifierSection] = TypeAdapter(VerifierField)


def section(kind: str, **params: Any) -> VerifierSection:
    return SECTION.validate_python({"kind": kind, "params": params})


async def reward(kind: str, row: dict[str, Any], completion: str, **params: Any) -> float:
    wanted = section(kind, **params)
    return await scoring.score(
        wanted, wanted.build(), row, completion, where="verifier", place="rows[0]"
    )


def against(kind: str, row: dict[str, Any], **params: Any) -> str:
    """What a verifier says of a row; empty if it takes it."""
    problem = scoring.check_row(section(kind, **params).build(), row, "rows[0]")
    return "" if problem is None else str(problem)


def refusal(kind: str, **params: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        section(kind, **params)
    return str(caught.value)


DOCS = Path(__file__).parents[2] / "docs/rewards.md"


def blocks(language: str) -> list[str]:
    found = re.findall(rf"```{language}\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    assert found
    return found


def test_the_docs_show_every_kind() -> None:
    docs = DOCS.read_text(encoding="utf-8")
    built_in = [row for row in VERIFIERS.rows().values() if row.origin == "built in"]
    assert len(built_in) >= 12
    assert not VERIFIERS.broken()
    lines = [f"| `{row.kind}` | {row.summary} |" for row in built_in]
    assert "\n".join(["| kind | reward |", "|---|---|", *lines]) in docs


async def test_the_examples_of_the_docs_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, kind = blocks("python")
    (tmp_path / "my_rewards.py").write_text(function)
    monkeypatch.syspath_prepend(tmp_path)
    sections = [SECTION.validate_python(yaml.safe_load(b)["verifier"]) for b in blocks("yaml")]
    assert [section.kind for section in sections] == ["numeric", "code", "function"]
    brief = sections[-1].build()
    assert [brief(ASKED, "word " * n) for n in (10, 11)] == [1.0, 0.0]
    names: dict[str, Any] = {}
    exec(kind, names)
    VERIFIERS.register("brief", names["Brief"])
    try:
        own = VerifierSection(kind="brief", params=names["BriefConfig"](words=1))
        for words, right in (("one", 1.0), ("one two", 0.0)):
            got = await scoring.score(own, own.build(), ASKED, words, where="v", place="r")
            assert got == right
    finally:
        VERIFIERS.forget("brief")


# --- text ---------------------------------------------------------------------------------------

THOUGHT = "<think>is it 7?</think>"


@pytest.mark.parametrize(
    ("params", "expected", "completion", "right"),
    [
        ({}, "46", "It is 46.", 1.0),
        ({}, "46", "It is 47.", 0.0),
        ({}, "7", THOUGHT + "8", 0.0),
        ({"drop_reasoning": False}, "7", THOUGHT + "8", 1.0),
        ({}, "Paris", "paris", 0.0),
        ({"ignore_case": True}, "Paris", "PARIS!", 1.0),
        ({"text": ["a", "b"]}, "x", "a and b", 1.0),
        ({"text": ["a", "b"]}, "x", "only a", 0.0),
        ({"text": ["a", "b"], "how_many": "any"}, "x", "only b", 1.0),
    ],
)
async def test_contains(
    params: dict[str, Any], expected: str, completion: str, right: float
) -> None:
    assert await reward("contains", chat("q", expected), completion, **params) == right


@pytest.mark.parametrize(
    ("params", "expected", "completion", "right"),
    [
        ({"pattern": r"\d+"}, "x", "about 46 or so", 1.0),
        ({"pattern": r"\d+", "full": True}, "x", "about 46", 0.0),
        ({"pattern": r"\d+", "full": True}, "x", " 46\n", 1.0),
        ({"pattern": r"#### (.+)", "group": 1}, "46", "#### 45\nno:\n#### 46", 1.0),
        ({"pattern": r"#### (.+)", "group": 1}, "46", "#### 46\nno:\n#### 45", 0.0),
        ({"pattern": r"#### (.+)", "group": 1}, "46", "46", 0.0),
        ({"pattern": r"is (?P<what>\w+)", "group": "what"}, "Red", "it is red", 0.0),
        ({"pattern": r"IS (?P<what>\w+)", "group": "what", "ignore_case": True}, "R", "is r", 1.0),
    ],
)
async def test_regex(params: dict[str, Any], expected: str, completion: str, right: float) -> None:
    assert await reward("regex", chat("q", expected), completion, **params) == right


async def test_a_pattern_that_backtracks_for_ever_is_an_error_in_time() -> None:
    params = {"pattern": r"(a|aa)+$", "timeout_seconds": 0.1}
    with pytest.raises(UserError, match=r"regex (raised TimeoutError|took longer)"):
        await reward("regex", chat("q", "x"), "a" * 60 + "b", **params)


@pytest.mark.parametrize(
    ("params", "expected", "completion", "right"),
    [
        ({}, "46", "It is 46.", 1.0),
        ({}, "46", "46.0, not 45", 0.0),
        ({}, "It is 1,234.5 EUR", "1234.5", 1.0),
        ({}, "-3", "x = -3", 1.0),
        ({}, "-3", "x = −3", 1.0),
        ({}, "-5", "10-5", 0.0),
        ({}, "5", "10-5", 1.0),
        ({}, "1200", "1.2e3", 1.0),
        ({}, "0.5", ".5", 1.0),
        ({}, "3", "1,2,3", 1.0),
        ({}, "46", "no number", 0.0),
        ({}, "46", "1e999", 0.0),
        ({}, "100", "100.00009", 1.0),
        ({}, "100", "100.0002", 0.0),
        ({"abs_tolerance": 0.5}, "10", "10.5", 1.0),
        ({"abs_tolerance": 0.5}, "10", "10.6", 0.0),
        ({"rel_tolerance": 0.1}, "-200", "-220", 1.0),
        ({"rel_tolerance": 0.1}, "-200", "-221", 0.0),
        ({"rel_tolerance": 0.0}, "0", "0", 1.0),
        ({"pattern": r"\\boxed\{(.+?)\}"}, "46", r"\boxed{46} is 2 less than 48", 1.0),
        ({"pattern": r"\\boxed\{(.+?)\}"}, "46", "46", 0.0),
    ],
)
async def test_numeric(
    params: dict[str, Any], expected: str, completion: str, right: float
) -> None:
    assert await reward("numeric", chat("q", expected), completion, **params) == right


@pytest.mark.parametrize(
    ("params", "completion", "right"),
    [
        ({"tags": ["think", "answer"]}, "<think>a</think>\n<answer>b</answer>\n", 1.0),
        ({"tags": ["think", "answer"]}, "<answer>b</answer><think>a</think>", 0.0),
        ({"tags": ["think", "answer"]}, "<think>a</think> so <answer>b</answer>", 0.0),
        ({"tags": ["think", "answer"]}, "<think>a<answer>b</answer></think>", 0.0),
        ({"tags": ["think"]}, "<think>a</think>b", 0.0),
        ({"tags": ["think"], "text_after": True}, "<think>a</think>b", 1.0),
        ({"tags": ["think"], "text_after": True}, "<think>a</think> ", 0.0),
        ({"tags": ["think"], "text_after": True}, "<think> </think>b", 0.0),
        ({"tags": ["think"], "text_after": True}, "a</think>b", 0.0),
        ({"tags": ["think"], "text_after": True, "opened": True}, "a</think>b", 1.0),
        ({"tags": ["a"], "text_after": True}, "<a>1</a><a>2</a>3", 0.0),
        ({"sections": ["# A", "# B"]}, "# A\ntext\n # B \n", 1.0),
        ({"sections": ["# A", "# B"]}, "# B\n# A", 0.0),
        ({"sections": ["# A"]}, "see # A", 0.0),
        ({"pattern": r"Because .*\d"}, "Because\nof 3", 0.0),
        ({"pattern": r"Because.*\d"}, " Because\nof 3\n", 1.0),
    ],
)
async def test_format(params: dict[str, Any], completion: str, right: float) -> None:
    assert await reward("format", chat("q", "x"), completion, **params) == right


# --- structured ---------------------------------------------------------------------------------

SCHEMA = {"type": "object", "required": ["n"], "properties": {"n": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("completion", "right"),
    [
        ('{"n": 1}', 1.0),
        ('```json\n{"n": 1}\n```', 1.0),
        ('<think>{"n": "x"}</think>\n{"n": 1}', 1.0),
        ('{"n": "1"}', 0.0),
        ("{}", 0.0),
        ('Here: {"n": 1}', 0.0),
        ('{"n": 1', 0.0),
        ('{"n": NaN}', 0.0),
        ("[" * 100_000, 0.0),
    ],
)
async def test_json_schema(completion: str, right: float) -> None:
    assert await reward("json_schema", chat("q", "x"), completion, json_schema=SCHEMA) == right
    row = {**chat("q", "x"), "schema": SCHEMA}
    assert await reward("json_schema", row, completion, schema_field="schema") == right


async def test_a_schema_elsewhere_is_not_fetched() -> None:
    schema = {"$ref": "http://127.0.0.1:9/schema.json"}
    with pytest.raises(UserError, match="Unresolvable"):
        await reward("json_schema", chat("q", "x"), "1", json_schema=schema)


def test_json_values() -> None:
    assert same_json({"a": [1, None]}, {"a": [1.0, None]})
    assert not same_json(1, True)
    assert not same_json({"a": 0}, {"a": False})
    assert not same_json([1, 2], [2, 1])
    assert not same_json({"a": 1}, {"a": 1, "b": 2})
    with pytest.raises(ValueError, match="Infinity"):
        parse_json("-Infinity")


def turn(*calls: dict[str, Any], content: str | None = None) -> dict[str, Any]:
    answer = {"role": "assistant", "content": content, "tool_calls": list(calls)}
    return {"messages": [{"role": "user", "content": "q"}, answer]}


def call(name: str, arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


PARIS = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>'
TIME = '<tool_call>{"name": "time", "arguments": {}}</tool_call>'
WEATHER = call("weather", {"days": 2, "city": "Paris"})
CLOCK = call("time", "{}")


@pytest.mark.parametrize(
    ("row", "params", "completion", "right"),
    [
        (turn(WEATHER), {}, PARIS, 1.0),
        (turn(WEATHER), {}, f"<think>{TIME}</think>I look it up. {PARIS}", 1.0),
        (turn(WEATHER), {}, PARIS.replace("2", "2.0"), 1.0),
        (turn(WEATHER), {}, PARIS.replace("2", "true"), 0.0),
        (turn(WEATHER), {}, PARIS.replace("Paris", "Rome"), 0.0),
        (turn(WEATHER), {"arguments": "ignored"}, PARIS.replace("Paris", "Rome"), 1.0),
        (turn(WEATHER), {}, PARIS + PARIS, 0.0),
        (turn(WEATHER), {}, "It rains.", 0.0),
        (turn(WEATHER), {}, PARIS.replace("}}", "}"), 0.0),
        (turn(WEATHER), {}, PARIS.replace("</tool_call>", ""), 1.0),
        (turn(WEATHER, CLOCK), {}, PARIS + TIME, 1.0),
        (turn(WEATHER, CLOCK), {}, TIME + PARIS, 0.0),
        (turn(WEATHER, CLOCK), {"ordered": False}, TIME + PARIS, 1.0),
        (turn(CLOCK, CLOCK, WEATHER), {"ordered": False}, TIME + PARIS + PARIS, 0.0),
        (turn(CLOCK), {}, '[{"function": {"name": "time", "arguments": "{}"}}]', 1.0),
        (turn(CLOCK), {}, '{"tool_calls": [{"name": "time"}]}', 1.0),
        (turn(CLOCK), {}, '{"name": "time"}', 1.0),
        (chat("q", "no need"), {}, "It rains.", 1.0),
        (chat("q", "no need"), {}, TIME, 0.0),
        (chat("q", TIME), {}, TIME, 1.0),
    ],
)
async def test_tool_calls(
    row: dict[str, Any], params: dict[str, Any], completion: str, right: float
) -> None:
    assert await reward("tool_calls", row, completion, **params) == right


def test_calls_that_are_none() -> None:
    assert calls_in("[]") == calls_in("3") == calls_in("hello") == []
    with pytest.raises(ValueError, match="has a name"):
        calls_in('<tool_call>{"arguments": {}}</tool_call>')


# --- mathematics --------------------------------------------------------------------------------


async def test_math() -> None:
    wanted = section("math", cpu_seconds=1)
    verifier = wanted.build()
    table = [
        ("46", "It is 46.", 1.0),
        ("46", "It is 47.", 0.0),
        ("46", "no idea", 0.0),
        ("46", "", 0.0),
        ("42", r"not 41 but \boxed{42}", 1.0),
        ("7", THOUGHT + "8", 0.0),
        (r"$\frac{1}{2}$", r"so \boxed{0.5}", 1.0),
        (r"\frac{1}{2}", "$1/2$", 1.0),
        (r"$\sqrt{8}$", r"$2\sqrt{2}$", 1.0),
        ("$(x+1)^2$", "$x^2+2x+1$", 1.0),
        ("$(x+1)^2$", "$x^2+2x+2$", 0.0),
        ("$(1,2)$", "$(2,1)$", 0.0),
        (r"$\{1,2\}$", r"$\{2,1\}$", 1.0),
        ("3", r"\boxed{9^{9^{9^{9}}}}", 0.0),  # ends its process; the next ones have another
        ("3", "3", 1.0),
    ]
    for expected, completion, right in table:
        row = chat("q", expected)
        got = await scoring.score(wanted, verifier, row, completion, where="v", place="rows[0]")
        assert got == right, (expected, completion)
    with pytest.raises(UserError, match="'no idea' cannot be read as mathematics") as caught:
        await scoring.score(wanted, verifier, chat("q", "no idea"), "3", where="v", place="r")
    assert "LaTeX" in caught.value.problems[0].remedy


# --- rows and parameters that will not do -------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        ("exact_match", {}),
        ("contains", {}),
        ("regex", {"pattern": "(.)", "group": 1}),
        ("numeric", {}),
        ("math", {}),
        ("tool_calls", {}),
        ("judge", {}),
        ("weighted", {"verifiers": [{"kind": "exact_match"}]}),
    ],
)
async def test_a_row_without_an_answer_is_found_before_and_is_never_a_zero(
    kind: str, params: dict[str, Any]
) -> None:
    assert against(kind, chat("q", "46"), **params) == ""
    assert against(kind, {"prompt": "q", "completion": "46"}, **params) == ""
    assert "rows[0]: has no " in against(kind, ASKED, **params)
    if kind != "judge":
        with pytest.raises(UserError, match=r"\(row rows\[0\]\)"):
            await reward(kind, ASKED, "q", **params)


async def test_the_answer_may_stand_in_a_field() -> None:
    row = {**ASKED, "right": 46}
    assert await reward("exact_match", row, "46", answer_field="right") == 1.0
    assert against("exact_match", row, answer_field="right") == ""
    assert "has no wrong" in against("exact_match", row, answer_field="wrong")


def test_rows_that_do_not_fit_their_verifier() -> None:
    assert "holds no number" in against("numeric", chat("q", "none"))
    assert "empty" in against("contains", chat("q", " "))
    assert against("contains", ASKED, text="x") == against("regex", ASKED, pattern="x") == ""
    assert "has no schema" in against("json_schema", ASKED, schema_field="schema")
    bad = {**ASKED, "schema": {"type": "objekt"}}
    assert "'objekt' is not valid" in against("json_schema", bad, schema_field="schema")
    assert "holds a bad tool call" in against("tool_calls", turn(call("x", "{")))
    assert against("judge", ASKED, prompt="{answer}?") == ""


@pytest.mark.parametrize(
    ("kind", "params", "said"),
    [
        ("regex", {"pattern": "("}, "not a regular expression"),
        ("regex", {"pattern": "(a)", "group": 2}, "its groups are 0, 1"),
        ("numeric", {"pattern": "a"}, "put brackets around the number"),
        ("numeric", {"abs_tolerance": -1}, "greater than or equal to 0"),
        ("contains", {"text": ""}, "an empty text is in every answer"),
        ("contains", {"text": []}, "an empty text is in every answer"),
        ("format", {}, "one of tags, sections and pattern, not 0"),
        ("format", {"tags": ["a"], "pattern": "b"}, "not 2"),
        ("format", {"pattern": "b", "opened": True}, "go with tags"),
        ("format", {"pattern": "("}, "not a regular expression"),
        ("json_schema", {}, "one of the two"),
        ("json_schema", {"json_schema": {"type": "objekt"}}, "no JSON Schema: type"),
        ("function", {"path": "no_colon"}, "is not module:attribute"),
        ("function", {"path": "no_such_module:f"}, "no_such_module does not import"),
        ("function", {"path": "json:no_such"}, "json has no 'no_such': define it there"),
        ("function", {"path": "json:JSONDecoder"}, "is no function"),
        ("function", {"path": "json:dumps"}, "cannot be called with"),
        ("judge", {"prompt": "{answr}"}, "the prompt names {answr}"),
        ("judge", {"prompt": "{answer.__class__}"}, "the prompt names"),
        ("judge", {"prompt": "{question}"}, "put {answer} into it"),
        ("judge", {"prompt": "{answer"}, "expected '}'"),
        ("judge", {"pattern": "grade"}, "put brackets around the grade"),
        ("code", {"isolation": "limits"}, "set network: allow"),
        ("code", {"seconds": 300}, "must be more than seconds"),
        ("weighted", {"verifiers": []}, "at least 1 item"),
        ("weighted", {"verifiers": [{"kind": "exact"}]}, "there is no verifier 'exact'"),
        ("weighted", {"verifiers": [{"kind": "weighted"}]}, "weighted holds no weighted"),
        (
            "weighted",
            {"verifiers": [{"kind": "regex", "params": {"pattern": "("}}]},
            "params.pattern: not a regular expression",
        ),
        ("exact_match", {"timeout_seconds": 0}, "greater than 0"),
    ],
)
def test_parameters_that_are_refused(kind: str, params: dict[str, Any], said: str) -> None:
    assert said in refusal(kind, **params)
