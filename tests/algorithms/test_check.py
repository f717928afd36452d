"""The preflight: every mistake at once, by name, with a remedy, and nothing started."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from algorithms.check import check_experiment
from algorithms.experiment import Experiment
from algorithms.model_facts import model_problems
from algorithms.registry import REGISTRIES
from backends.errors import Problem
from tests.algorithms.samples import ROWS, chat, document


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def model_folder(name: str = "model", without: str = "", template: bool = True) -> str:
    folder = Path(name)
    folder.mkdir(parents=True)
    files = {
        "config.json": "{}",
        "model.safetensors": "x",
        "tokenizer.json": "{}",
        "tokenizer_config.json": json.dumps({"chat_template": "x"} if template else {}),
    }
    for file, text in files.items():
        if file != without:
            (folder / file).write_text(text)
    return name


def problems_of(**changes: Any) -> list[Problem]:
    return check_experiment(document(**changes))[1]


def test_a_good_experiment_has_no_problems(tmp_path: Path) -> None:
    path = Path("sft.yaml")
    path.write_text(yaml.safe_dump(document()))
    experiment, problems = check_experiment(path, ["algorithm.params.max_steps=3"])
    assert problems == []
    assert isinstance(experiment, Experiment)
    assert experiment.algorithm.params.max_steps == 3
    assert [entry.name for entry in tmp_path.rglob("*") if entry.is_file()] == ["sft.yaml"]


def test_everything_at_once() -> None:
    Path("train.jsonl").write_text(
        "\n".join([json.dumps(chat("q", "a")), "{", json.dumps(chat("q"))])
    )
    Path("good.jsonl").write_text("\n".join([json.dumps(chat("q")), json.dumps({"x": 1})]))
    Path("store").write_text("a file")
    experiment, problems = check_experiment(
        {
            "name": "a/b",
            "sede": 1,
            "store": "store",
            "model": {"name": "examples/models/tiny"},
            "data": {"kind": "jsonl", "path": "train.jsonl"},
            "algorithm": {"kind": "sft", "params": {"lr": 1}},
            "backend": {"kind": "mok"},
            "evaluations": [
                {"name": "one", "data": {"kind": "jsonl", "path": "good.jsonl"}, "every": 0},
                {"name": "two", "data": {"kind": "jsonl", "path": "absent.jsonl"}},
                {"name": "three", "data": {"kind": "sql"}},
            ],
        }
    )
    assert experiment is None
    assert {problem.where for problem in problems} == {
        "name",
        "sede",
        "store",
        "model.name",
        "train.jsonl:2",
        "train.jsonl:3",
        "algorithm.params.lr",
        "backend.kind",
        "evaluations[0].every",
        "good.jsonl:1",
        "good.jsonl:2",
        "evaluations[1].data.path",
        "evaluations[2].data.kind",
    }


def test_rows_are_checked_even_where_the_parameters_are_wrong() -> None:
    found = problems_of(
        data={"kind": "rows", "rows": [chat("q"), chat("q", "a")]},
        algorithm={"kind": "mock_sft", "params": {"batch_size": "big"}},
    )
    assert [problem.where for problem in found] == ["algorithm.params.batch_size", "data.rows[0]"]


def test_many_bad_rows_are_counted() -> None:
    found = problems_of(data={"kind": "rows", "rows": [chat("q")] * 30})
    assert len(found) == 21
    assert "10 more bad rows (30 in all)" in found[-1].what


def test_bad_rows_that_are_skipped_are_no_problem() -> None:
    Path("train.jsonl").write_text(
        "\n".join([json.dumps(chat("q", "a")), "{", json.dumps(chat("q"))])
    )
    data = {"kind": "jsonl", "path": "train.jsonl"}
    assert problems_of(data=data | {"max_bad_rows": 2}) == []
    found = problems_of(data=data | {"max_bad_rows": 1})
    assert [p.where for p in found] == ["train.jsonl:2", "train.jsonl:3", "data.max_bad_rows"]
    held = {"name": "held", "data": data | {"max_bad_rows": 2}}
    (problem,) = problems_of(evaluations=[held])  # what is not scored is not left out silently
    assert problem.where == "train.jsonl:3"


def test_a_transform_that_breaks_rows_is_found() -> None:
    rename = {"kind": "rename", "params": {"columns": {"question": "prompt"}}}
    found = problems_of(data={"kind": "rows", "rows": ROWS, "transforms": [rename]})
    assert [problem.where for problem in found] == [f"data.rows[{n}]" for n in range(len(ROWS))]


def test_a_document_that_cannot_be_read() -> None:
    experiment, problems = check_experiment("no.yaml")
    assert experiment is None
    assert [problem.where for problem in problems] == ["no.yaml"]
    assert check_experiment(document(), ["x"])[1][0].where == "--set x"


def test_verifier_parameters_are_checked() -> None:
    held = {"name": "held", "data": {"kind": "rows", "rows": ROWS}}
    (problem,) = problems_of(
        evaluations=[held | {"verifier": {"kind": "exact_match", "params": {"stripp": True}}}]
    )
    assert problem.where == "evaluations[0].verifier.params.stripp"
    assert "did you mean 'strip'?" in problem.remedy


# --- stores -------------------------------------------------------------------------------------


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_store_that_cannot_be_written() -> None:
    Path("closed").mkdir(mode=0o500)
    (problem,) = problems_of(store="closed/runs")
    assert problem.where == "store"
    assert problem.remedy


def test_a_store_below_a_file() -> None:
    Path("file").write_text("x")
    (problem,) = problems_of(store="file/runs")
    assert problem.where == "store"
    assert "file/runs" in problem.what


def test_a_store_of_an_unknown_kind() -> None:
    (problem,) = problems_of(store="ftp://x/y")
    assert problem.where == "store"
    assert "s3://" in problem.remedy


# --- models -------------------------------------------------------------------------------------


def test_a_whole_folder_and_hub_names_pass() -> None:
    assert model_problems(model_folder(), chat=True) == []
    assert model_problems("Qwen/Qwen3-0.6B", chat=True) == []


@pytest.mark.parametrize(
    ("without", "what"),
    [
        ("config.json", "has no config.json"),
        ("model.safetensors", "has no weights"),
        ("tokenizer.json", "has no tokenizer"),
    ],
)
def test_a_folder_with_a_file_missing(without: str, what: str) -> None:
    (problem,) = model_problems(model_folder(without=without), chat=True)
    assert problem.where == "model.name"
    assert what in problem.what
    assert problem.remedy


def test_a_template_is_asked_for_by_chat_rows_only() -> None:
    name = model_folder(template=False)
    (problem,) = model_problems(name, chat=True)
    assert "no chat template" in problem.what
    assert model_problems(name, chat=False) == []
    (Path(name) / "chat_template.jinja").write_text("x")
    assert model_problems(name, chat=True) == []


@pytest.mark.parametrize(
    "name", ["examples/models/nope", "/nope", "./nope", "no name", "models/tny-qwen"]
)
def test_a_folder_that_is_not_there(name: str) -> None:
    Path("models/tiny-qwen3").mkdir(parents=True)
    (problem,) = model_problems(name, chat=True)
    assert problem.what == f"there is no folder {name}"
    if name == "models/tny-qwen":
        assert problem.remedy == "did you mean models/tiny-qwen3?"
    else:
        assert "Qwen/Qwen3-0.6B" in problem.remedy


def test_a_name_without_an_owner_is_the_hubs_unless_a_folder_is_almost_called_so() -> None:
    assert model_problems("gpt2", chat=True) == []
    Path("gpt").mkdir()
    (problem,) = model_problems("gpt2", chat=True)
    assert problem.what == "there is no folder gpt2"
    assert problem.remedy.startswith("did you mean gpt? a hub name has its owner before it")
    assert model_problems("openai-community/gpt2", chat=True) == []


def test_a_file_is_not_a_model() -> None:
    Path("model.gguf").write_text("x")
    assert model_problems("model.gguf", chat=True)[0].what == "model.gguf is a file"


def test_weights_to_start_from_must_be_there() -> None:
    name = model_folder()
    found = problems_of(
        model={"name": name, "init_from": "runs/x"},
        algorithm={"kind": "sft"},
        backend={"kind": "embedded"},
    )
    (problem,) = found
    assert problem.where == "model.init_from"
    assert "adapter_model.safetensors" in problem.what


def test_the_mock_needs_no_model() -> None:
    assert problems_of(model={"name": "nowhere/at/all"}) == []


# --- teachers -----------------------------------------------------------------------------------


def tokenizer_file(folder: str, **tokens: int) -> None:
    """A tokenizer of whole words."""
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel(tokens, unk_token="a")).save(f"{folder}/tokenizer.json")


def problems_with_teacher(**teacher: str) -> list[Problem]:
    """Those of a run that learns from it, without those of its own model."""
    params = {"teacher": teacher, "max_steps": 1}
    model, kind = {"name": "student"}, {"kind": "distill", "params": params}
    found = problems_of(model=model, algorithm=kind, backend={"kind": "embedded"})
    return [problem for problem in found if not problem.where.startswith("model.")]


def test_a_teacher_is_looked_at_as_the_model_is() -> None:
    for name in ("student", "alike"):
        tokenizer_file(model_folder(name), a=0, b=1)
    tokenizer_file(model_folder("other"), a=1, b=0, c=2)
    assert problems_with_teacher(model="alike") == []
    assert problems_with_teacher(model="Qwen/Qwen3-0.6B") == []  # its files are not here
    (problem,) = problems_with_teacher(model="other")
    assert problem.where == "algorithm.params.teacher.model"
    assert "other has another vocabulary: 0 of the 2 tokens" in problem.what
    (problem,) = problems_with_teacher(model="alik")
    assert problem.what == "there is no folder alik"
    assert problem.remedy.startswith("did you mean alike?")
    for file, what in (("config.json", "no config.json"), ("tokenizer.json", "no tokenizer")):
        (problem,) = problems_with_teacher(model=model_folder(f"without-{file}", without=file))
        assert what in problem.what
    model_folder("garbage")
    Path("garbage/tokenizer.json").write_text("{")
    (problem,) = problems_with_teacher(model="garbage")
    assert (problem.where, "is no tokenizer" in problem.what) == ("garbage/tokenizer.json", True)


def test_a_teachers_weights_must_be_there() -> None:
    tokenizer_file(model_folder("student"), a=0, b=1)
    (problem,) = problems_with_teacher(weights="runs/x")
    assert problem.where == "algorithm.params.teacher.weights"
    assert "there is no runs/x/adapter_model.safetensors" in problem.what
    Path("runs/x").mkdir(parents=True)
    Path("runs/x/adapter_model.safetensors").write_text("x")
    assert problems_with_teacher(weights="runs/x") == []


@pytest.mark.parametrize(
    ("backend", "weights", "what"),
    [
        ("tinker", "runs/x", "reads no files of yours, such as runs/x"),
        ("tinker", "s3://bucket/x", "reads no files of yours, such as s3://bucket/x"),
        ("tinker", "tinker://a/b", None),
        ("embedded", "tinker://a/b", "an embedded engine cannot read tinker://a/b"),
        ("embedded", "runs/x", None),
        ("local", "tinker://a/b", "a local run cannot read tinker://a/b"),
        ("local", "runs/x", None),
    ],
)
def test_weights_must_be_such_as_the_backend_can_load(
    backend: str, weights: str, what: str | None
) -> None:
    tokenizer_file(model_folder("student"), a=0, b=1)
    Path("runs/x").mkdir(parents=True)
    Path("runs/x/adapter_model.safetensors").write_text("x")
    params = {"teacher": {"weights": weights}, "max_steps": 1}
    found = problems_of(
        model={"name": "student", "init_from": weights},
        algorithm={"kind": "distill", "params": params},
        backend={"kind": backend},
    )
    fields = {"model.init_from", "algorithm.params.teacher.weights"}
    told = {problem.where: problem.what for problem in found if problem.where in fields}
    assert set(told) == (fields if what else set())
    assert all(str(what) in words for words in told.values())


# --- parts of one's own -------------------------------------------------------------------------

PARTS = """
from algorithms.callbacks import Callback
from algorithms.data.transforms import RowTransform
from algorithms.mock_sft import MockSFT
from algorithms.registry import *
from algorithms.rewards.verifiers import ExactMatch


def opened():
    return open("not/there")


@register_algorithm("failing")
class FailingSFT(MockSFT):
    def __init__(self, cfg):
        opened()


@register_verifier("failing")
class FailingMatch(ExactMatch):
    def __init__(self, cfg):
        {}[cfg.strip]


@register_callback("failing")
class FailingCallback(Callback):
    def __init__(self):
        pass


@register_transform("failing")
class FailingTransform(RowTransform):
    def __init__(self, cfg):
        raise SystemExit("I leave")

    def apply(self, row):
        return row
"""


def test_a_part_that_cannot_be_made_is_named_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("parts_that_fail.py").write_text(PARTS)
    monkeypatch.setattr(sys, "path", [*sys.path])
    held = {"kind": "rows", "rows": ROWS}
    try:
        found = problems_of(
            imports=["parts_that_fail"],
            data={"kind": "rows", "rows": ROWS},
            algorithm={"kind": "failing", "params": {"batch_size": 3}},
            evaluations=[
                {"name": "a", "data": held, "verifier": {"kind": "failing"}},
                {"name": "b", "data": held | {"transforms": [{"kind": "failing"}]}},
            ],
            callbacks=[{"kind": "failing"}],
        )
    finally:
        for kinds in ("algorithms", "verifiers", "callbacks", "transforms"):
            REGISTRIES[kinds].forget("failing")
        sys.modules.pop("parts_that_fail", None)
    raised = {problem.where: problem.what.partition(" raised ")[2] for problem in found}
    assert set(raised) == {
        "algorithm.kind",
        "evaluations[0].verifier.kind",
        "evaluations[1].data.transforms[0].kind",
        "callbacks[0].kind",
    }
    assert raised["algorithm.kind"].startswith("FileNotFoundError: ")
    assert raised["algorithm.kind"].endswith("'not/there' (parts_that_fail.py, line 10)")
    assert raised["evaluations[0].verifier.kind"] == "KeyError: True (parts_that_fail.py, line 22)"
    assert raised["callbacks[0].kind"].startswith("TypeError: ")
    assert (
        raised["evaluations[1].data.transforms[0].kind"]
        == "SystemExit: I leave (parts_that_fail.py, line 34)"
    )
